"""The arithmetic-matched reference: complete runs of Hugging Face's model in the device's arithmetic.

Against plain HF bf16 a correct device differs by what its number formats cost, which hides small faults.
Against this reference it differs by the order of f32 sums alone, so nearly everything that is left is a
fault. See :mod:`llms.verify.reference.matched_model` for what is injected and what stays Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from llms.checkpoints import Checkpoint
from llms.verify.contract.records import Array, frozen_copy
from llms.verify.contract.topk import N_TOKENS
from llms.verify.reference.arithmetic import DeviceArithmetic
from llms.verify.reference.cache import ReferenceCache, source_hash
from llms.verify.reference.hf import load_hf_model
from llms.verify.reference.runs import CachedReference, Run, check_request

FORMAT_VERSION = 1
_IMPLEMENTATION = ("llms.verify.reference.arithmetic", "llms.verify.reference.matched_model")


class MatchedReference(CachedReference[Run]):
    """Matched runs of one checkpoint, cached on disk like those of the plain reference; arrays are bf16.

    Args:
        checkpoint: the checkpoint of the deployment under test.
        cache: where runs are kept; ``None`` bypasses the disk.
        reorder: seed of a permutation of all sums over K, see
            :class:`llms.verify.reference.matched_model.MatchedModel`.
        model: a Hugging Face model to inject into instead of loading the checkpoint; its runs are not cached.

    The key of a run covers checkpoint content, prompt, forced tokens, the description of the arithmetic, the
    source of its implementation, and the versions of torch and transformers.
    """

    record = Run

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        cache: ReferenceCache | None = None,
        reorder: int | None = None,
        model: Any = None,
    ) -> None:
        super().__init__(checkpoint, cache, model)
        self.reorder = reorder

    @property
    def model(self) -> Any:
        """The live :class:`llms.verify.reference.matched_model.MatchedModel`, made on first use."""
        if self._live is None:
            from llms.verify.reference.matched_model import MatchedModel

            plain = self._given if self._given is not None else load_hf_model(self.checkpoint)
            self._live = MatchedModel(plain, reorder=self.reorder)
        return self._live

    def key(
        self,
        prompt_ids: Sequence[int],
        n_tokens: int,
        arithmetic: DeviceArithmetic,
        forced: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Return what identifies a run, as JSON-able values."""
        return {
            **self._key(prompt_ids, n_tokens, forced),
            "reference": "matched",
            "arithmetic": arithmetic.as_dict(),
            "implementation": implementation_hash(),
            "reorder": self.reorder,
            "format": FORMAT_VERSION,
        }

    def run(
        self,
        prompt_ids: Sequence[int],
        n_tokens: int = N_TOKENS,
        *,
        arithmetic: DeviceArithmetic,
        forced: Sequence[int] | None = None,
    ) -> Run:
        """Return the run for a prompt, from disk when it is there and intact.

        Args:
            prompt_ids: token ids of the prompt, at least one.
            n_tokens: tokens to generate, end-of-text or not.
            arithmetic: what is deployed for this prompt's length.
            forced: tokens to feed to the decode steps instead of the own choices.

        Raises:
            ValueError: empty prompt, ``n_tokens`` below 1, or too few forced tokens.
            InjectionError (of matched_model): the model's code is not known to the injection.
        """
        check_request(prompt_ids, n_tokens, forced)
        key = self.key(prompt_ids, n_tokens, arithmetic, forced)
        return self._obtain([key], lambda: self._compute(prompt_ids, n_tokens, arithmetic, forced))

    def _compute(
        self,
        prompt_ids: Sequence[int],
        n_tokens: int,
        arithmetic: DeviceArithmetic,
        forced: Sequence[int] | None,
    ) -> Run:
        model = self.model
        rows = [model.prefill(prompt_ids, arithmetic)]
        tokens = [_first_largest(rows[0])]
        fed: list[int] = []
        for index in range(n_tokens - 1):
            fed.append(tokens[-1] if forced is None else int(forced[index]))
            rows.append(model.decode(fed[-1]))
            tokens.append(_first_largest(rows[-1]))
        keys, values = model.kv_cache()
        return Run(
            tuple(int(token) for token in prompt_ids),
            tuple(tokens),
            tuple(fed),
            logits=frozen_copy(np.stack(rows)),
            keys=frozen_copy(keys),
            values=frozen_copy(values),
        )


@lru_cache(maxsize=1)
def implementation_hash() -> str:
    """SHA-256 (hex) over the source of the arithmetic and of its injection."""
    return source_hash(_IMPLEMENTATION)


def _first_largest(logits: Array) -> int:
    return int(np.argmax(logits.astype(np.float32)))
