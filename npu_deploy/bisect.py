"""`npu-deploy bisect MODEL`: the bisect as a command."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from npu_deploy import folders
from npu_deploy.answer import Answer
from npu_deploy.audit import planted
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


def bisect_model(request: BisectRequest) -> Answer:
    """Run it; exit code 1 when an offender was named.

    Raises DeployError for a wrong request, a missing device or checkpoint, a foreign runner.
    """
    from pytest_npu.device.lock import NpuLock

    from llms.checkpoints import CheckpointError
    from llms.llama_kernel_builder import driver
    from llms.llama_kernel_builder.exceptions import DriverUnavailable
    from llms.verify.contract.deployment import Deployment, DeploymentError
    from llms.verify.localise.find import PATHS, BisectNotOffered, find

    if request.path not in (None, *PATHS):
        raise DeployError(f"--path {request.path}: choose prefill or decode", USAGE)
    folder = folders.find(request.model).folder
    with ExitStack() as stack:
        try:
            driver.select(driver.NPU2 if request.npu else driver.TWIN)
            if request.fault is not None:
                stack.enter_context(planted(request.fault))
            opened = Deployment.from_folder(
                folder, checkpoint=request.checkpoint, model_choice=request.choice
            )
            prompt = opened.encode(request.prompt) if request.prompt else None
            lock = NpuLock() if request.npu else None
            report = find(opened, prompt=prompt, path=request.path, steps=request.steps, device=lock)
        except DriverUnavailable as error:
            raise DeployError(str(error), NO_NPU) from error
        except CheckpointError as error:
            raise DeployError(str(error), BAD_CHECKPOINT) from error
        except (BisectNotOffered, DeploymentError) as error:
            raise DeployError(str(error), USAGE) from error
    lines = tuple(report.text().splitlines())
    return Answer(report.payload(), lines, OK if report.offender is None else GATE_FAILED)
