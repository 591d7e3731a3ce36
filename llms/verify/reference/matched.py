"""The arithmetic-matched reference: complete runs of Hugging Face's model in the device's arithmetic.

Against plain HF bf16 a correct device differs by what its number formats cost, which hides small faults.
Against this reference it differs by the order of f32 sums alone, so nearly everything that is left is a
fault. See :mod:`llms.verify.reference.matched_model` for what is injected and what stays Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from llms.checkpoints import Checkpoint
from llms.verify.contract.records import Array, frozen_copy
from llms.verify.contract.topk import N_TOKENS
from llms.verify.reference.arithmetic import DeviceArithmetic
from llms.verify.reference.cache import ReferenceCache, key_hash, source_hash
from llms.verify.reference.hf import load_hf_model

FORMAT_VERSION = 1
_IMPLEMENTATION = ("llms.verify.reference.arithmetic", "llms.verify.reference.matched_model")


@dataclass(frozen=True, eq=False)
class MatchedRun:
    """One prompt through the matched reference: prefill and ``n_tokens - 1`` decode steps.

    Attributes:
        prompt_ids: token ids of the prompt (n of them).
        tokens: the greedy choice of every step, ``n_tokens`` of them.
        fed: tokens fed to the decode steps: the own choices, or the forced ones.
        logits: ``[n_tokens, vocab]`` bf16, row 0 from the prefill.
        keys, values: ``[n_layers, n_kv_heads, n + n_tokens - 1, head_dim]`` bf16, the cache at the end; a
            slot is written once, so what the cache held at an earlier step is a prefix of it.
    """

    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    fed: tuple[int, ...]
    logits: Array
    keys: Array
    values: Array


class MatchedReference:
    """Matched runs of one checkpoint, cached on disk like those of the plain reference.

    Args:
        checkpoint: the checkpoint of the deployment under test.
        cache: where runs are kept; ``None`` bypasses the disk.
        reorder: seed of a permutation of all sums over K, see
            :class:`llms.verify.reference.matched_model.MatchedModel`.
        model: a Hugging Face model to inject into instead of loading the checkpoint; its runs are cached only
            with ``model_key``, its content identity.

    The key of a run covers checkpoint content, prompt, forced tokens, the description of the arithmetic, the
    source of its implementation, and the versions of torch and transformers.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        cache: ReferenceCache | None = None,
        reorder: int | None = None,
        model: Any = None,
        model_key: str | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.reorder = reorder
        self.cache = cache if model is None or model_key is not None else None
        self._given = model
        self._model_key = model_key
        self._live: Any = None
        self.hits = 0
        self.computed = 0

    @property
    def model(self) -> Any:
        """The live :class:`llms.verify.reference.matched_model.MatchedModel`, made on first use."""
        if self._live is None:
            from llms.verify.reference.matched_model import MatchedModel

            plain = self._given if self._given is not None else load_hf_model(self.checkpoint)
            self._live = MatchedModel(plain, reorder=self.reorder)
        return self._live

    def release(self) -> None:
        """Drop the live model and its memory; a given model is kept."""
        if self._given is None:
            self._live = None

    def key(
        self,
        prompt_ids: Sequence[int],
        n_tokens: int,
        arithmetic: DeviceArithmetic,
        forced: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Return what identifies a run, as JSON-able values."""
        from importlib.metadata import version

        return {
            "reference": "matched",
            "checkpoint": self.checkpoint.content_hash,
            "model": self._model_key,
            "prompt_ids": [int(token) for token in prompt_ids],
            "forced": None if forced is None else [int(token) for token in forced[: n_tokens - 1]],
            "n_tokens": n_tokens,
            "arithmetic": arithmetic.as_dict(),
            "implementation": implementation_hash(),
            "reorder": self.reorder,
            "torch": version("torch"),
            "transformers": version("transformers"),
            "format": FORMAT_VERSION,
        }

    def key_hash(self, prompt_ids: Sequence[int], n_tokens: int, arithmetic: DeviceArithmetic) -> str:
        """Return the SHA-256 (hex) of :meth:`key`, by which a report names the inputs of a run."""
        return key_hash(self.key(prompt_ids, n_tokens, arithmetic))

    def run(
        self,
        prompt_ids: Sequence[int],
        n_tokens: int = N_TOKENS,
        *,
        arithmetic: DeviceArithmetic,
        forced: Sequence[int] | None = None,
    ) -> MatchedRun:
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
        if not prompt_ids or n_tokens < 1:
            raise ValueError("a reference run needs at least one prompt token and one generated token")
        if forced is not None and len(forced) < n_tokens - 1:
            raise ValueError(f"{n_tokens} tokens need {n_tokens - 1} forced ones, got {len(forced)}")
        key = self.key(prompt_ids, n_tokens, arithmetic, forced)
        if self.cache is not None:
            stored = self.cache.load(key)
            if stored is not None:
                self.hits += 1
                return _unpack(stored)
        result = self._compute(prompt_ids, n_tokens, arithmetic, forced)
        self.computed += 1
        if self.cache is not None:
            self.cache.store(key, _pack(result))
        return result

    def _compute(
        self,
        prompt_ids: Sequence[int],
        n_tokens: int,
        arithmetic: DeviceArithmetic,
        forced: Sequence[int] | None,
    ) -> MatchedRun:
        model = self.model
        rows = [model.prefill(prompt_ids, arithmetic)]
        tokens = [_first_largest(rows[0])]
        fed: list[int] = []
        for index in range(n_tokens - 1):
            fed.append(tokens[-1] if forced is None else int(forced[index]))
            rows.append(model.decode(fed[-1]))
            tokens.append(_first_largest(rows[-1]))
        keys, values = model.kv_cache()
        return MatchedRun(
            tuple(int(token) for token in prompt_ids),
            tuple(tokens),
            tuple(fed),
            frozen_copy(np.stack(rows)),
            frozen_copy(keys),
            frozen_copy(values),
        )


@lru_cache(maxsize=1)
def implementation_hash() -> str:
    """SHA-256 (hex) over the source of the arithmetic and of its injection."""
    return source_hash(_IMPLEMENTATION)


def _first_largest(logits: Array) -> int:
    return int(np.argmax(logits.astype(np.float32)))


def _pack(run: MatchedRun) -> dict[str, Array]:
    return {
        "prompt_ids": np.array(run.prompt_ids, np.int64),
        "tokens": np.array(run.tokens, np.int64),
        "fed": np.array(run.fed, np.int64),
        "logits": run.logits,
        "keys": run.keys,
        "values": run.values,
    }


def _unpack(stored: dict[str, Array]) -> MatchedRun:
    def numbers(name: str) -> tuple[int, ...]:
        return tuple(int(token) for token in stored[name])

    return MatchedRun(
        numbers("prompt_ids"),
        numbers("tokens"),
        numbers("fed"),
        frozen_copy(stored["logits"]),
        frozen_copy(stored["keys"]),
        frozen_copy(stored["values"]),
    )
