"""Findings of an audit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from llms.verify.contract.abilities.watch import Watcher
from llms.verify.contract.models import ROOT

TREE = ROOT.parent
"""The source tree that this process runs."""

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"


class DeviceClock(Protocol):
    """The timer of the device."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""


@dataclass(frozen=True)
class Setting:
    """What whoever starts an audit brings along, so that it knows no device, no toolkit and no catalogue.

    Args:
        device: label of the device, as it goes with every number.
        clock: of that device.
        watch: sees the calls of production functions and the programs started.
        plant: a fault of the catalogue by name, as a context manager.
        modules: names of all modules that judge, measure or compute.
        data: the data files of these by the name that a report shows.
    """

    device: str
    clock: DeviceClock
    watch: Watcher
    plant: Callable[[str], AbstractContextManager[Any]]
    modules: Callable[[], Sequence[str]]
    data: Callable[[], Mapping[str, Path]]


@dataclass(frozen=True)
class AuditRequest:
    """What to audit. `prompts` is the number of prompts of gate and ladder."""

    folder: Path
    npu: bool = False
    checkpoint: Path | None = None
    choice: str | None = None
    prompts: int = 1
    ladder: bool = True
    fault: str | None = None

    def arguments(self) -> list[str]:
        """Arguments of `python -m llms.audit` behind the folder."""
        words = ["--npu"] if self.npu else []
        words += ["--checkpoint", str(self.checkpoint)] if self.checkpoint else []
        words += ["--model", self.choice] if self.choice else []
        words += ["--prompts", str(self.prompts)] if self.prompts != 1 else []
        words += [] if self.ladder else ["--no-ladder"]
        words += ["--fault", self.fault] if self.fault else []
        return words

    def command(self) -> str:
        """The command line that repeats it, from the root of the source tree."""
        folder = self.folder.resolve()
        place = folder.relative_to(TREE) if TREE in folder.parents else folder.name
        return " ".join(["python -m llms.audit", str(place), *self.arguments()])


@dataclass(frozen=True)
class Finding:
    """One question of the audit, its answer and the evidence in one or two sentences."""

    key: str
    question: str
    status: str
    evidence: str


@dataclass
class Audit:
    """All findings and figures. Filled question by question; a question that was not asked is a failure."""

    model: str
    device: str
    checkpoint: dict[str, Any]
    environment: dict[str, str]
    command: str
    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    gate: dict[str, Any] = field(default_factory=dict)
    ladder: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    date: str = ""

    def add(self, key: str, question: str, problems: list[str], evidence: str, *, warn: bool = False) -> bool:
        """Record a finding: FAIL (WARN with `warn`) when there are problems; returns whether it passed.

        `evidence` tells what a good answer rests on; of a bad one the problems are told.
        """
        status = PASS if not problems else (WARN if warn else FAIL)
        text = evidence if not problems else "; ".join(problems)
        self.findings.append(Finding(key, question, status, text))
        return not problems

    @property
    def verdict(self) -> str:
        """PASS, PASS-with-warnings or FAIL; an audit without findings fails."""
        statuses = {finding.status for finding in self.findings}
        if not statuses or FAIL in statuses:
            return FAIL
        return "PASS-with-warnings" if WARN in statuses else PASS

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return self.verdict != FAIL

    def payload(self) -> dict[str, Any]:
        """JSON-able: what `audit.json` and the record of kind `audit` hold."""
        return {
            **vars(self),
            "verdict": self.verdict,
            "seconds": round(self.seconds, 1),
            "findings": [vars(finding) for finding in self.findings],
        }
