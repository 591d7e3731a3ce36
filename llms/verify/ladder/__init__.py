"""The gate ladder of phases 3 and 6: rungs, limits, calibration of a checkpoint nobody measured.

The functions are for test files of earlier scaffolds; :class:`Ladder` is what they call.
"""

from __future__ import annotations

from collections.abc import Sequence

from llms.verify.contract.chat import EncodedPrompt
from llms.verify.contract.deployment import NO_DEVICE, Deployment, Device
from llms.verify.contract.topk import N_TOKENS
from llms.verify.ladder.climbing import REFERENCE_RUNGS, RUNGS, Ladder
from llms.verify.ladder.types import LadderOutcome, RungResult
from llms.verify.reference.hf import HFReference

__all__ = ["REFERENCE_RUNGS", "RUNGS", "Ladder", "climb", "compiled_lengths"]


def climb(
    deployment: Deployment,
    reference: HFReference,
    prompts: Sequence[EncodedPrompt],
    n_tokens: int = N_TOKENS,
    *,
    device: Device = NO_DEVICE,
) -> LadderOutcome:
    """All rungs, once per deployment and prompts."""
    return Ladder(deployment, reference, prompts, n_tokens, device).climb_once()


def compiled_lengths(
    deployment: Deployment, text: Sequence[int], up_to: int, *, device: Device = NO_DEVICE
) -> RungResult:
    """The rungs ``limits`` and ``edges`` over all compiled lengths; ``text``: token ids."""
    prompt = EncodedPrompt("", tuple(text), "base")
    return Ladder(deployment, deployment.hf_reference(), [prompt], device=device).over_lengths(up_to)
