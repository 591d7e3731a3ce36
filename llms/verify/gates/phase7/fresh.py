"""Start an audit in a process of its own and read what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from llms.verify.contract.outcome import Outcome
from llms.verify.gates.phase7.types import FAIL, TREE, AuditRequest

LIMIT_S = 1800


class AuditOutcome(Outcome):
    """The verdict of an audit."""

    @property
    def table(self) -> dict[str, Any]:
        """The findings as a payload of kind `table`, which folders of earlier scaffolds record."""
        findings = self.payload.get("findings", [])
        return {
            "title": f"Independent audit: {self.payload.get('verdict', 'FAIL')}",
            "note": f"{self.payload.get('device', '')}; {self.payload.get('seconds', 0)} s in a process of "
            f"its own without caches; again with: {self.payload.get('command', '')}",
            "columns": ["answer", "question", "evidence"],
            "rows": [[f["status"], f["question"], f["evidence"]] for f in findings],
        }


def in_fresh_process(request: AuditRequest, out: Path) -> AuditOutcome:
    """Run `python -m llms.audit`, which leaves its report and `audit.json` in `out`.

    A process that dies is a failed audit.
    """
    command = [sys.executable, "-m", "llms.audit", str(request.folder), "--out", str(out)]
    result = out / "audit.json"
    result.unlink(missing_ok=True)
    # the tree that this process runs comes first, wherever it was started
    paths = [str(TREE), str(TREE / "plugins"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(
        [*command, *request.arguments()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            output, errors = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return _failed(f"the audit did not end within {LIMIT_S} s")
    code = process.returncode
    if not result.is_file():
        return _failed(f"the audit ended with exit code {code}: {(errors or output).strip()[-2000:]}")
    payload = json.loads(result.read_text(encoding="utf-8"))
    author = payload.get("environment", {}).get("process")
    if author != str(process.pid):
        text = f"the report was written by process {author}, the audit is process {process.pid}"
        return _failed(f"{text}: an earlier one", payload)
    failed = [f for f in payload["findings"] if f["status"] == FAIL]
    lines = [
        f"{payload['model']}: {payload['verdict']}",
        *(f"  {f['question']} {f['evidence']}" for f in failed),
    ]
    ok = code == 0 and payload["verdict"] != FAIL
    return AuditOutcome("audit", ok, payload, "" if ok else "\n".join(lines))


def _failed(message: str, payload: dict[str, Any] | None = None) -> AuditOutcome:
    return AuditOutcome("audit", False, {**(payload or {}), "verdict": FAIL}, message)


def for_options(folder: Path, options: Any) -> AuditOutcome:
    """The audit that a pytest run asks for; its record goes into the report of that run.

    `options`: device, checkpoint, variant and planted fault of the plugin's `npu_options`.
    """
    request = AuditRequest(
        folder,
        npu=options.npu,
        checkpoint=options.checkpoint,
        choice=options.model,
        fault=getattr(options, "fault", None),
    )
    with tempfile.TemporaryDirectory(prefix="npu-audit-") as out:
        return in_fresh_process(request, Path(out))
