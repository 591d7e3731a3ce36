"""What a check says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

#: ok: as it must be. bad: stops the work. warning: works, with a drawback. info: recorded only.
#: unknown: could not be found out.
Status = Literal["ok", "bad", "warning", "info", "unknown"]

#: silicon: needed for `--npu`. twin: needed without an NPU. host: needed by both.
Scope = Literal["silicon", "twin", "host"]

FORMAT = "npu-deploy-doctor"
VERSION = 1


@dataclass(frozen=True)
class Finding:
    """One finding: what was seen, why it matters, and what helps when it is not as it must be."""

    name: str
    status: Status
    value: str
    why: str
    remedy: str = ""
    scope: Scope = "silicon"
    data: Mapping[str, Any] = field(default_factory=dict)


def judged(name: str, good: bool, value: str, why: str, remedy: str, **more: Any) -> Finding:
    """A finding that is as it must be, or bad, with what helps then."""
    return (
        Finding(name, "ok", value, why, **more) if good else Finding(name, "bad", value, why, remedy, **more)
    )


@dataclass(frozen=True)
class Report:
    """All findings of a machine."""

    findings: tuple[Finding, ...]

    def _bad(self, *scopes: Scope) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.status == "bad" and f.scope in scopes)

    @property
    def blocking(self) -> tuple[Finding, ...]:
        """Findings that stop work on silicon."""
        return self._bad("silicon", "host")

    @property
    def twin_blocking(self) -> tuple[Finding, ...]:
        """Findings that stop work on the twin."""
        return self._bad("twin", "host")

    def named(self, name: str) -> Finding:
        """The finding of that name. Raises KeyError."""
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(name)

    def as_json(self) -> dict[str, Any]:
        """Plain values, for `npu-deploy doctor --json` and the event log."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "silicon": {"usable": not self.blocking, "blocking": [f.name for f in self.blocking]},
            "twin": {"usable": not self.twin_blocking, "blocking": [f.name for f in self.twin_blocking]},
            "findings": [{**asdict(f), "data": dict(f.data)} for f in self.findings],
        }
