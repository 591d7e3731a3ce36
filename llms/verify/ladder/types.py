"""Results of the rungs and what they share: a verdict that can be read, numbers with their limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from llms.verify.contract.chat import EncodedPrompt
from llms.verify.contract.outcome import Outcome
from llms.verify.ladder.thresholds import Thresholds

Status = Literal["passed", "failed", "not offered"]
_SHOWN = 8


@dataclass(frozen=True)
class Measured:
    """One statistic of a rung: the worst value, where it was found, and its verdict."""

    statistic: str
    value: float
    where: str
    limit: float | None = None
    pedigree: str = ""
    ok: bool = True

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; a value that is not finite becomes None."""
        return {**vars(self), "value": self.value if math.isfinite(self.value) else None}


@dataclass(frozen=True)
class RungResult:
    """Outcome of one rung.

    Attributes:
        name: ``teacher_forced``, ``cache_check``, ``layer_check``, ``edges``, ``self_consistency``,
            ``determinism``, ``limits`` or ``plain_reference``.
        status: ``not offered`` when the adapter lacks the ability; never counted as passed.
        reason: why it is not offered, or one line on what was judged.
        measured: statistics with their limits.
        failures: one readable line each.
        data: JSON-able detail for the report.
    """

    name: str
    status: Status
    reason: str
    measured: tuple[Measured, ...] = ()
    failures: tuple[str, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True unless the rung failed."""
        return self.status != "failed"

    def message(self) -> str:
        """The failure as text: what, where, by how much, against which limit."""
        lines = [f"{self.name}: {self.status} ({self.reason})"]
        lines += [f"  {failure}" for failure in self.failures[:_SHOWN]]
        if len(self.failures) > _SHOWN:
            lines.append(f"  and {len(self.failures) - _SHOWN} more")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able entry of the payload ``ladder``."""
        return {
            "name": self.name,
            "status": self.status,
            "reason": self.reason,
            "measured": [one.as_dict() for one in self.measured],
            "failures": list(self.failures),
        }


def joined(first: RungResult, second: RungResult) -> RungResult:
    """Two rungs as one, with name and data of the first; a second that is not offered adds nothing."""
    if second.status == "not offered":
        return first
    status: Status = "failed" if "failed" in (first.status, second.status) else first.status
    return replace(
        first,
        status=status,
        reason=f"{first.reason}; {second.reason}",
        measured=(*first.measured, *second.measured),
        failures=(*first.failures, *second.failures),
    )


def not_offered(name: str, ability: str) -> RungResult:
    """The result of a rung whose ability the runner does not have."""
    return RungResult(name, "not offered", f"the runner has no {ability}")


class Judge:
    """Collects the statistics of one rung and holds the worst of each against its limit.

    ``thresholds`` None only measures: that is how the limits themselves are found.
    """

    def __init__(self, name: str, thresholds: Thresholds | None) -> None:
        self.name = name
        self.thresholds = thresholds
        self.failures: list[str] = []
        self._worst: dict[str, tuple[float, str]] = {}

    def see(self, statistic: str, value: float, where: str) -> None:
        """Take one value of a statistic (larger is worse); only the worst is kept, NaN being worst of all."""
        known = self._worst.get(statistic)
        if known is None or (not math.isnan(known[0]) and not value <= known[0]):
            self._worst[statistic] = (float(value), where)

    def fail(self, line: str) -> None:
        """Add a failure that needs no limit."""
        self.failures.append(line)

    def result(self, reason: str, data: Mapping[str, Any] | None = None) -> RungResult:
        """Hold every statistic against its limit and return the outcome."""
        measured = []
        for statistic, (value, where) in self._worst.items():
            full = f"{self.name}.{statistic}"
            if self.thresholds is None:
                measured.append(Measured(full, value, where))
                continue
            limit = self.thresholds[full]
            bad = limit.exceeded(value)
            measured.append(Measured(full, value, where, limit.value, limit.text(), not bad))
            if bad:
                self.failures.append(f"{statistic} {value:.4g} at {where}: {limit.text()}")
        status: Status = "failed" if self.failures else "passed"
        return RungResult(self.name, status, reason, tuple(measured), tuple(self.failures), dict(data or {}))


@dataclass(frozen=True)
class LadderOutcome:
    """Outcome of all rungs.

    ``ok``: no rung failed and at least one passed. ``message``: the failures. ``payloads``: see
    :mod:`llms.verify.ladder.climbing`.
    """

    rungs: tuple[RungResult, ...]
    payloads: dict[str, dict[str, Any]]

    @classmethod
    def of(
        cls, rungs: Sequence[RungResult], prompts: Sequence[EncodedPrompt], n_tokens: int
    ) -> LadderOutcome:
        """The outcome with its payloads."""
        payloads: dict[str, dict[str, Any]] = {
            "ladder": {
                "rungs": [rung.as_dict() for rung in rungs],
                "prompts": [prompt.text for prompt in prompts],
                "n_tokens": n_tokens,
            }
        }
        for rung in rungs:
            if rung.data:
                payloads[rung.name] = dict(rung.data)
        return cls(tuple(rungs), payloads)

    @property
    def ok(self) -> bool:
        """Whether no rung failed; a ladder of which nothing was offered is no pass."""
        return all(rung.ok for rung in self.rungs) and any(rung.status == "passed" for rung in self.rungs)

    @property
    def message(self) -> str:
        """Text of all failed rungs, then one line on the others."""
        failed = [rung.message() for rung in self.rungs if not rung.ok]
        others = [f"{rung.name} {rung.status}" for rung in self.rungs if rung.ok]
        return "\n".join([*failed, "other rungs: " + ", ".join(others)])

    def rung(self, name: str) -> RungResult:
        """Return one rung by name."""
        return next(rung for rung in self.rungs if rung.name == name)

    def outcomes(self, name: str) -> tuple[Outcome, ...]:
        """The detail of one rung, if it has one, and last its verdict: ``ladder`` with this rung alone."""
        rung, ladder = self.rung(name), self.payloads["ladder"]
        mine = {**ladder, "rungs": [one for one in ladder["rungs"] if one["name"] == name]}
        verdict = Outcome("ladder", rung.ok, mine, "" if rung.ok else rung.message())
        detail = self.payloads.get(name)
        return (Outcome(name, rung.ok, detail, verdict.message), verdict) if detail else (verdict,)

    def payloads_of(self, name: str) -> dict[str, dict[str, Any]]:
        """The payloads of one rung by kind, as test files of earlier scaffolds ask for them."""
        return {outcome.kind: outcome.payload for outcome in reversed(self.outcomes(name))}
