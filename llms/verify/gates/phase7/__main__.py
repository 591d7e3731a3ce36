"""``python -m llms.audit MODEL``: the independent audit, phase 7.

Exit code 0 for PASS and PASS-with-warnings, 1 for FAIL, 2 when there is nothing to audit.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Audit, print the verdict and the findings, write the report."""
    parser = argparse.ArgumentParser(prog="python -m llms.audit", description="Independent audit of a model.")
    parser.add_argument("folder", metavar="MODEL", help="model name or path of its folder")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where reports go (default: reports/MODEL)")
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
    with suppress(ImportError):
        import pytest  # noqa: F401

    from llms.checkpoints import CheckpointError
    from llms.llama_kernel_builder.exceptions import DriverUnavailable
    from llms.verify.contract.deployment import DeploymentError, find_folder
    from llms.verify.gates.phase7 import report
    from llms.verify.gates.phase7.run import AuditRequest, run_audit

    if options.prompts < 1:
        parser.error("--prompts must be 1 or more: an empty gate is no gate")
    try:
        folder = find_folder(options.folder)
        audit = run_audit(
            AuditRequest(
                folder,
                options.npu,
                options.checkpoint,
                options.model,
                options.prompts,
                not options.no_ladder,
                options.fault,
            )
        )
    except (DeploymentError, CheckpointError, DriverUnavailable, KeyError) as error:
        print(f"error: {error.args[0] if isinstance(error, KeyError) else error}", file=sys.stderr)
        return 2
    written = report.write(audit, options.out or Path("reports") / audit.model)
    print(f"{audit.model}: {audit.verdict} on {audit.device}, {audit.checkpoint['label']}")
    for finding in audit.findings:
        print(f"  {finding.status:4} {finding.question} {finding.evidence}")
    print(f"report: {written['evaluation_report.md']}")
    return 0 if audit.ok else 1


if __name__ == "__main__":
    sys.exit(main())
