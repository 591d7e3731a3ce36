"""The device side of a comparison: drive a runner and keep copies of what it says.

Nothing here needs the reference, so a capture can be made while the device is held and judged after its
release.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llms.verify.contract.records import (
    Array,
    DecodeProbe,
    DecodeStepRecord,
    NpuRunner,
    PrefillRecord,
    ProbedRunner,
    frozen_copy,
)
from llms.verify.contract.topk import N_TOKENS, K, TokenStep, TokenTrace


@dataclass(frozen=True, eq=False)
class Capture:
    """What one side did for one prompt.

    Attributes:
        trace: tokens, own top k and finite flags per step; step 0 comes from the prefill.
        logits: ``[n_steps, vocab]`` when asked for, else size 0.
        fed: tokens that were fed to the decode steps (own tokens, or the forced ones).
    """

    trace: TokenTrace
    logits: Array
    fed: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class DiagnosisCapture:
    """Inside view of one prefill and the decode steps after it.

    Attributes:
        prefill: record of the prefill, with layer outputs.
        decode: one probe per decode step; empty when the runner does not offer probes.
        fed: the tokens fed to the decode steps.
        decode_offered: whether the runner has ``decode_step_probed``.
    """

    prefill: PrefillRecord
    decode: tuple[DecodeProbe, ...]
    fed: tuple[int, ...]
    decode_offered: bool


def _ids(prompt_ids: Sequence[int]) -> tuple[tuple[int, ...], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    ids = tuple(int(token) for token in prompt_ids)
    if not ids:
        raise ValueError("the prompt has no tokens")
    return ids, np.array(ids, np.int64)


def capture(
    runner: NpuRunner,
    prompt_ids: Sequence[int],
    *,
    n_tokens: int = N_TOKENS,
    k: int = K,
    forced: Sequence[int] | None = None,
    keep_logits: bool = False,
) -> Capture:
    """Generate ``n_tokens`` greedily (one from the prefill, the rest by decode steps), end-of-text or not.

    Args:
        runner: the side to drive, see :class:`llms.verify.contract.records.NpuRunner`.
        prompt_ids: token ids; their number is the position of the first decode step.
        n_tokens: number of tokens to record.
        k: size of the recorded top k.
        forced: tokens to feed instead of the side's own (teacher forcing), at least ``n_tokens - 1``.
        keep_logits: also copy the logits of every step.

    Raises:
        ValueError: empty prompt, no tokens asked for, or too few forced tokens.
    """
    ids, array = _ids(prompt_ids)
    if n_tokens < 1:
        raise ValueError(f"n_tokens must be at least 1, got {n_tokens}")
    if forced is not None and len(forced) < n_tokens - 1:
        raise ValueError(f"{n_tokens} tokens need {n_tokens - 1} forced ones, got {len(forced)}")
    first = PrefillRecord.copy_of(runner.prefill(array))
    steps = [TokenStep.from_logits(first.top1_token, first.logits_at_pred, k)]
    rows = [first.logits_at_pred] if keep_logits else []
    fed: list[int] = []
    for index in range(n_tokens - 1):
        fed.append(int(forced[index]) if forced is not None else steps[-1].token)
        record = DecodeStepRecord.copy_of(runner.decode_step(fed[-1], len(ids) + index))
        steps.append(TokenStep.from_logits(record.top1_token, record.lm_head_logits, k))
        if keep_logits:
            rows.append(record.lm_head_logits)
    kept = frozen_copy(np.stack(rows)) if rows else frozen_copy(np.empty((0, 0), np.float32))
    return Capture(TokenTrace(ids, tuple(steps)), kept, tuple(fed))


def capture_diagnosis(
    runner: NpuRunner, prompt_ids: Sequence[int], forced: Sequence[int]
) -> DiagnosisCapture:
    """Run one prompt and feed ``forced`` through the decode path, keeping all layer outputs on offer."""
    ids, array = _ids(prompt_ids)
    prefill = PrefillRecord.copy_of(runner.prefill(array))
    probes: list[DecodeProbe] = []
    offered = isinstance(runner, ProbedRunner)
    if isinstance(runner, ProbedRunner):
        for index, token in enumerate(forced):
            probe = runner.decode_step_probed(int(token), len(ids) + index)
            probes.append(
                DecodeProbe(
                    DecodeStepRecord.copy_of(probe.record),
                    probe.layer_intermediates,
                    probe.final_hidden_normed,
                )
            )
    return DiagnosisCapture(prefill, tuple(probes), tuple(int(token) for token in forced), offered)
