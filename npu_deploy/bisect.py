"""`npu-deploy bisect MODEL`: the bisect as a command."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_deploy.errors import BAD_CHECKPOINT, GATE_FAILED, NO_NPU, OK, USAGE, DeployError


@dataclass(frozen=True)
class BisectRequest:
    """What was asked for. `prompt` None takes the first of the model's set, `path` None both paths."""

    model: str
    prompt: str | None = None
    path: str | None = None
    steps: int = 12
    npu: bool = False
    checkpoint: Path | None = None
    choice: str | None = None
    fault: str | None = None


@dataclass(frozen=True)
class Answer:
    """JSON-able data, text, and the exit code: 0 nothing found, 1 an offender was named."""

    data: dict[str, Any]
    shown: str
    exit_code: int

    def text(self) -> str:
        """Lines for a terminal."""
        return self.shown


def bisect_model(request: BisectRequest) -> Answer:
    """Run it. Raises DeployError for a wrong request, a missing device or checkpoint, a foreign runner."""
    from llms.checkpoints import CheckpointError
    from llms.llama_kernel_builder import driver
    from llms.llama_kernel_builder.exceptions import DriverUnavailable
    from llms.verify.contract.deployment import Deployment, DeploymentError
    from llms.verify.localise.find import PATHS, BisectNotOffered, find
    from npu_deploy.folders import find as find_folder

    if request.path not in (None, *PATHS):
        raise DeployError(f"--path {request.path}: choose prefill or decode", USAGE)
    folder = find_folder(request.model).folder
    try:
        driver.select(driver.NPU2 if request.npu else driver.TWIN)
    except DriverUnavailable as error:
        raise DeployError(str(error), NO_NPU) from error
    with ExitStack() as stack:
        if request.fault is not None:
            stack.enter_context(_fault(request.fault))
        try:
            opened = Deployment.from_folder(
                folder, checkpoint=request.checkpoint, model_choice=request.choice
            )
            prompt = opened.encode(request.prompt) if request.prompt else None
            lock = _lock() if request.npu else None
            report = find(opened, prompt=prompt, path=request.path, steps=request.steps, device=lock)
        except CheckpointError as error:
            raise DeployError(str(error), BAD_CHECKPOINT) from error
        except (BisectNotOffered, DeploymentError) as error:
            raise DeployError(str(error), USAGE) from error
    return Answer(report.payload(), report.text(), OK if report.offender is None else GATE_FAILED)


def _fault(name: str) -> AbstractContextManager[Any]:
    from npu_twin import faults

    try:
        return faults.find(name).plant()
    except LookupError as error:
        raise DeployError(f"--fault: {error.args[0]}", USAGE) from error


def _lock() -> AbstractContextManager[Any]:
    from pytest_npu.device.lock import NpuLock

    return NpuLock()
