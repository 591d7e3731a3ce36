"""Complete runs of a reference: what all of them record, and how each is computed once and kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib import metadata
from typing import Any, Generic, Self, TypeVar

import numpy as np

from llms.checkpoints import Checkpoint
from llms.verify.contract.records import Array, frozen_copy
from llms.verify.reference.cache import ReferenceCache


@dataclass(frozen=True, eq=False)
class Run:
    """One prompt through a reference: prefill and ``n_tokens - 1`` decode steps.

    Attributes:
        prompt_ids: token ids of the prompt (n of them).
        tokens: the greedy choice of every step, ``n_tokens`` of them.
        fed: tokens fed to the decode steps: the own choices, or the forced ones.
        logits: ``[n_tokens, vocab]``, row 0 from the prefill.
        keys, values: ``[n_layers, n_kv_heads, n + n_tokens - 1, head_dim]``, the KV cache at the end; a slot
            is written once, so what the cache held at an earlier step is a prefix of it.
    """

    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    fed: tuple[int, ...]
    logits: Array
    keys: Array
    values: Array

    def arrays(self) -> dict[str, Array]:
        """All fields as arrays, tokens as int64."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: np.array(v, np.int64) if isinstance(v, tuple) else v for name, v in values}

    @classmethod
    def from_arrays(cls, arrays: dict[str, Array]) -> Self:
        """The run that :meth:`arrays` was made from."""
        values: dict[str, Any] = {field.name: frozen_copy(arrays[field.name]) for field in fields(cls)}
        for name in ("prompt_ids", "tokens", "fed"):
            values[name] = tuple(values[name].tolist())
        return cls(**values)


R = TypeVar("R", bound=Run)


class CachedReference(Generic[R]):
    """Runs of one checkpoint by a model that is loaded when a run has to be computed.

    Attributes:
        checkpoint: the checkpoint of the deployment under test.
        cache: where runs are kept; None for the disk to be bypassed, and always with a given model, whose
            content nothing names.
        hits, computed: runs from the disk, and others.
    """

    record: type[R]

    def __init__(self, checkpoint: Checkpoint, cache: ReferenceCache | None, model: Any) -> None:
        self.checkpoint = checkpoint
        self.cache = cache if model is None else None
        self._given = model
        self._live: Any = None
        self.hits = 0
        self.computed = 0

    def release(self) -> None:
        """Drop the live model and its memory; the next computation loads it again. A given model is kept."""
        if self._given is None:
            self._live = None

    def _key(self, prompt_ids: Sequence[int], n_tokens: int, forced: Sequence[int] | None) -> dict[str, Any]:
        """What identifies a run whatever the reference: checkpoint, tokens, versions of the libraries."""
        return {
            "checkpoint": self.checkpoint.content_hash,
            "prompt_ids": [int(token) for token in prompt_ids],
            "forced": None if forced is None else [int(token) for token in forced[: n_tokens - 1]],
            "n_tokens": n_tokens,
            "torch": metadata.version("torch"),
            "transformers": metadata.version("transformers"),
        }

    def _obtain(self, keys: Sequence[dict[str, Any]], compute: Callable[[], R]) -> R:
        """The run under the first key that the disk has, else a computed one, kept under the first."""
        if self.cache is not None:
            for key in keys:
                stored = self.cache.load(key)
                if stored is not None:
                    self.hits += 1
                    return self.record.from_arrays(stored)
        result = compute()
        self.computed += 1
        if self.cache is not None:
            self.cache.store(keys[0], result.arrays())
        return result


def check_request(prompt_ids: Sequence[int], n_tokens: int, forced: Sequence[int] | None = None) -> None:
    """Raise ValueError for an empty prompt, ``n_tokens`` below 1, or too few forced tokens."""
    if not prompt_ids or n_tokens < 1:
        raise ValueError("a run needs at least one prompt token and one generated token")
    if forced is not None and len(forced) < n_tokens - 1:
        raise ValueError(f"{n_tokens} tokens need {n_tokens - 1} forced ones, got {len(forced)}")
