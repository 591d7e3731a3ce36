"""The device side of the ladder: one teacher-forced pass per prompt with everything that is on offer.

Nothing here needs a reference, so the device can be released before anything is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from llms.verify.contract.records import (
    Array,
    DecodeStepRecord,
    NpuRunner,
    PrefillRecord,
    ProbedRunner,
    frozen_copy,
)

_NONE = np.empty(0, np.float32)


@runtime_checkable
class CachedRunner(Protocol):
    """Optional ability of a runner: its KV cache can be read."""

    def kv_cache(self) -> tuple[Array, Array]:
        """Copies of K (after RoPE) and V, each ``[n_layers, n_kv_heads, max_seq, head_dim]``."""


@runtime_checkable
class LimitedRunner(Protocol):
    """Optional ability of a runner: it names its compiled prompt lengths."""

    def prompt_limits(self) -> tuple[int, ...]:
        """Compiled prompt lengths, ascending; a prompt past the last one is an error."""


@dataclass(frozen=True)
class Slot:
    """A place in the KV cache; ``which`` is ``K`` or ``V``, ``step`` the decode step that was looked at."""

    which: str
    step: int
    layer: int
    head: int
    slot: int


@dataclass(frozen=True, eq=False)
class ForcedCapture:
    """One prompt, prefill and decode steps fed with given tokens.

    Attributes:
        prompt_ids: n token ids.
        fed: the tokens fed to the decode steps (T - 1 of them).
        tokens: what the device chose at each of the T steps.
        logits: ``[T, vocab]``, row 0 from the prefill.
        prefill_layers: ``[n_layers, n, emb]``; empty when not recorded.
        decode_layers: ``[T - 1, n_layers, emb]``; empty when the runner offers no probes.
        prefill_keys, prefill_values: ``[n_layers, n_kv_heads, n, head_dim]`` after the prefill.
        decode_keys, decode_values: ``[T - 1, n_layers, n_kv_heads, head_dim]``, what each step wrote.
        clobbered: slots before the position of a step whose bits the step changed (the first few).
        clobbered_count: how many there were in all.
        has_cache: whether the runner offers its KV cache; without it the four arrays are empty.
    """

    prompt_ids: tuple[int, ...]
    fed: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: Array
    prefill_layers: Array = field(default_factory=lambda: _NONE)
    decode_layers: Array = field(default_factory=lambda: _NONE)
    prefill_keys: Array = field(default_factory=lambda: _NONE)
    prefill_values: Array = field(default_factory=lambda: _NONE)
    decode_keys: Array = field(default_factory=lambda: _NONE)
    decode_values: Array = field(default_factory=lambda: _NONE)
    clobbered: tuple[Slot, ...] = ()
    clobbered_count: int = 0
    has_cache: bool = False

    @property
    def has_layers(self) -> bool:
        """Whether the outputs of all layers were recorded, in prefill and in decode."""
        return self.prefill_layers.size > 0 and (self.decode_layers.size > 0 or not self.fed)


def capture_forced(runner: NpuRunner, prompt_ids: Sequence[int], forced: Sequence[int]) -> ForcedCapture:
    """Run one prompt and feed ``forced`` through the decode path, recording all that the runner offers."""
    ids = tuple(int(token) for token in prompt_ids)
    first = PrefillRecord.copy_of(runner.prefill(np.array(ids, np.int64)))
    logits, tokens, layers = [first.logits_at_pred], [first.top1_token], []
    cache = _CacheWatch(runner, len(ids))
    for index, token in enumerate(forced):
        position = len(ids) + index
        if isinstance(runner, ProbedRunner):
            probe = runner.decode_step_probed(int(token), position)
            record = DecodeStepRecord.copy_of(probe.record)
            layers.append(_stacked(probe.layer_intermediates))
        else:
            record = DecodeStepRecord.copy_of(runner.decode_step(int(token), position))
        logits.append(record.lm_head_logits)
        tokens.append(record.top1_token)
        cache.after_step(index, position)
    return ForcedCapture(
        prompt_ids=ids,
        fed=tuple(int(token) for token in forced),
        tokens=tuple(tokens),
        logits=frozen_copy(np.stack(logits)),
        prefill_layers=_stacked(first.layer_intermediates),
        decode_layers=np.stack(layers) if layers and all(one.size for one in layers) else _NONE,
        **cache.arrays(),
    )


class _CacheWatch:
    """Reads the KV cache after the prefill and after every step, when the runner offers it."""

    _SHOWN = 5

    def __init__(self, runner: Any, n: int) -> None:
        self.runner = runner if isinstance(runner, CachedRunner) else None
        self.clobbered: list[Slot] = []
        self.count = 0
        self.new: list[tuple[Array, Array]] = []
        self.before: tuple[Array, Array] = (_NONE, _NONE)
        self.n = n
        if self.runner is not None:
            self.before = self._read()
            self.prefill = tuple(frozen_copy(array[:, :, :n]) for array in self.before)

    def _read(self) -> tuple[Array, Array]:
        assert self.runner is not None
        keys, values = self.runner.kv_cache()
        for name, array in (("K", keys), ("V", values)):
            if array.ndim != 4:
                raise ValueError(
                    f"kv_cache() gave {name} of shape {array.shape}, "
                    "not [n_layers, n_kv_heads, max_seq, head_dim]"
                )
        return keys, values

    def after_step(self, step: int, position: int) -> None:
        """Keep what the step wrote at its position, and note what it changed before it."""
        if self.runner is None:
            return
        now = self._read()
        for which, old, new in zip("KV", self.before, now, strict=True):
            changed = _bits(old[:, :, :position]) != _bits(new[:, :, :position])
            if changed.any():
                where = np.argwhere(changed.any(-1))
                self.count += len(where)
                room = self._SHOWN - len(self.clobbered)
                self.clobbered += [Slot(which, step, *(int(x) for x in one)) for one in where[: max(0, room)]]
        self.new.append((now[0][:, :, position].copy(), now[1][:, :, position].copy()))
        self.before = now

    def arrays(self) -> dict[str, Any]:
        """Fields of the capture."""
        if self.runner is None:
            return {}
        shape = (0, *self.prefill[0].shape[:2], self.prefill[0].shape[3])
        empty = np.empty(shape, self.prefill[0].dtype)
        return {
            "prefill_keys": self.prefill[0],
            "prefill_values": self.prefill[1],
            "decode_keys": np.stack([new[0] for new in self.new]) if self.new else empty,
            "decode_values": np.stack([new[1] for new in self.new]) if self.new else empty,
            "clobbered": tuple(self.clobbered),
            "clobbered_count": self.count,
            "has_cache": True,
        }


def _stacked(layers: Sequence[dict[str, Array]]) -> Array:
    outputs = [layer["ffn_out"] for layer in layers if "ffn_out" in layer]
    if not outputs or len(outputs) != len(layers) or len({one.shape for one in outputs}) != 1:
        return _NONE
    return frozen_copy(np.stack(outputs))


def _bits(array: Array) -> Array:
    """The raw bits, so that NaN equals itself."""
    unsigned = np.dtype(f"u{array.dtype.itemsize}")
    view: Array = np.ascontiguousarray(array).view(unsigned)
    return view
