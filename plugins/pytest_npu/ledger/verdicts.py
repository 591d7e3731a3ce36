"""Verdicts of a run that is over, bound to what they judged: the only writer of the gate ledger."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from llms.verify.contract.models import read_folder
from pytest_npu.core.exceptions import LedgerError
from pytest_npu.ledger import store as ledger

if TYPE_CHECKING:
    from pytest_npu.report.model import RunReport


def keep(
    folder: Path,
    verdicts: Mapping[int, str],
    report: RunReport,
    run: str,
    *,
    book: Path | None = None,
    checkpoint: Path | None = None,
    choice: str | None = None,
) -> int:
    """Append the verdicts of a run that is over, bound to what it judged; returns their number.

    Args:
        folder: the model's.
        verdicts: phase -> PASS or FAIL, of phases that ran as a whole.
        report: of the run.
        run: name of its folder.
        book: ledger file (default: where `npu-deploy status` looks).
        checkpoint, choice: as they were asked for.

    Raises:
        LedgerError: there is no saying what was judged: its code changed while the run was going on, or the
            ledger cannot be written.
    """
    model = read_folder(folder)
    if not model.choices:
        return 0  # no adapter that `npu-deploy` could open
    used = (report.deployment.get("checkpoint") or {}).get("path")
    deployment = ledger.open_deployment(model, Path(used) if used else checkpoint, choice)
    if not used and not hasattr(getattr(deployment.adapter, "inference", None), "SEQUENCE"):
        return 0  # nothing says which weights a foreign adapter would take
    for part, paths in ledger.judged_code(folder).items():
        late = [path.name for path in paths if path.stat().st_mtime > report.started_at]
        if late:
            raise LedgerError(f"{part} changed during the run ({late[0]}): no verdict is kept")
    identity = ledger.identity_of(deployment)
    walls = {summary.phase: summary.duration_s for summary in report.phases}
    label = deployment.checkpoint.label
    entries = [
        ledger.entry(model.name, n, verdict, identity, report.device_label, label, run, walls.get(n, 0.0))
        for n, verdict in sorted(verdicts.items())
    ]
    ledger.append(book if book is not None else ledger.path_of(model), entries)
    return len(entries)
