"""``python -m llms.audit MODEL``: the independent audit, phase 7, with everything that it needs put together.

Exit code 0 for PASS and PASS-with-warnings, 1 for FAIL, 2 when there is nothing to audit.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_deploy.errors import USAGE, DeployError, environment

if TYPE_CHECKING:
    from llms.verify.gates.phase7.types import Audit, AuditRequest


def main(arguments: list[str] | None = None) -> int:
    """Audit, print the verdict and the findings, write the report."""
    parser = argparse.ArgumentParser(prog="python -m llms.audit", description="Independent audit of a model.")
    parser.add_argument("folder", metavar="MODEL", help="model name or path of its folder")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the report (default: a new one in reports/MODEL)"
    )
    parser.add_argument("--npu", action="store_true", help="on silicon instead of the digital twin")
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="HF folder or GGUF file")
    parser.add_argument("--model", metavar="NAME", help="a key of MODEL_CHOICES, or an HF id")
    parser.add_argument(
        "--prompts", type=int, default=1, metavar="N", help="prompts of the gates (default 1)"
    )
    parser.add_argument("--no-ladder", action="store_true", help="leave out the ladder")
    parser.add_argument("--fault", metavar="NAME", help="plant a fault: the audit must fail")
    options = parser.parse_args(arguments)
    os.environ["PYTEST_NPU_NO_REFERENCE_CACHE"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A deployment that behaves well only when no test is running is to be seen at its worst.
    os.environ.setdefault("PYTEST_CURRENT_TEST", "test_phase6_topk_gate.py::test_topk_gate (call)")
    import pytest  # noqa: F401 - likewise
    from pytest_npu.report.audit import write_audit

    from llms.checkpoints import CheckpointError
    from llms.llama_kernel_builder.exceptions import DriverUnavailable
    from llms.verify.contract.deployment import DeploymentError, find_folder
    from llms.verify.gates.phase7.types import AuditRequest

    if options.prompts < 1:
        parser.error("--prompts must be 1 or more: an empty gate is no gate")
    begin = time.time()
    try:
        request = AuditRequest(
            find_folder(options.folder),
            options.npu,
            options.checkpoint,
            options.model,
            options.prompts,
            not options.no_ladder,
            options.fault,
        )
        audit = _audited(request)
    except (DeploymentError, CheckpointError, DriverUnavailable, DeployError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folder = write_audit(audit.payload(), begin, options.out)
    print(f"{audit.model}: {audit.verdict} on {audit.device}, {audit.checkpoint['label']}")
    for finding in audit.findings:
        print(f"  {finding.status:4} {finding.question} {finding.evidence}")
    print(f"report: {folder / 'evaluation_report.md'}")
    return 0 if audit.ok else 1


def _audited(request: AuditRequest) -> Audit:
    """The audit on the device that was asked for, holding the NPU lock on silicon.

    Compiled programs of earlier sessions are used on silicon only: there they are not made on this machine.
    """
    from pytest_npu.device.lock import NpuLock
    from pytest_npu.ledger import judging

    from llms.llama_kernel_builder import driver
    from llms.llama_kernel_builder.deployment.session import ARTEFACTS_ENV
    from llms.llama_kernel_builder.deployment.watch import watch
    from llms.verify.gates.phase7.run import run_audit
    from llms.verify.gates.phase7.types import Setting

    device = driver.select(driver.NPU2 if request.npu else driver.TWIN)
    setting = Setting(device.label, device.clock, watch, planted, judging.judging_modules, judging.data_files)
    with ExitStack() as stack:
        if request.fault is not None:
            stack.enter_context(planted(request.fault))
        if request.npu:
            stack.enter_context(NpuLock())
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="npu-audit-"))
            stack.enter_context(environment(ARTEFACTS_ENV, folder))
        return run_audit(request, setting)


def planted(name: str) -> AbstractContextManager[Any]:
    """A fault of the catalogue, as a context manager. Raises DeployError for an unknown name."""
    from npu_twin import faults

    try:
        return faults.find(name).plant()
    except LookupError as error:
        raise DeployError(f"--fault: {error.args[0]}", USAGE) from error


if __name__ == "__main__":
    sys.exit(main())
