"""From events to results: what happened to each test, what a phase's verdict is, what was recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_npu.core.constants import PHASES
from pytest_npu.core.events import Event

#: Outcomes that make a run FAIL, most severe first.
BAD = ("crashed", "error", "failed")
#: Outcomes that leave a run INCOMPLETE.
OPEN = ("interrupted", "not run")
#: Every outcome, in the order reports list them.
OUTCOMES = (*BAD, *OPEN, "passed", "xfailed", "xpassed", "blocked", "skipped")


@dataclass
class TestResult:
    """One test of a run. Times in seconds; `lock_wait_s` is contained in `duration_s`.

    `started_at` and `ended_at` are seconds since the epoch, 0.0 for a test that did not start.

    `outcome`: passed, failed, error (setup or teardown), crashed (the process died or was ended),
    interrupted, skipped, blocked (an earlier phase failed), xfailed, xpassed, not run.
    """

    __test__ = False  # not a test class, whatever the name says to pytest

    nodeid: str
    phase: int | None = None
    perf: bool = False
    outcome: str = "not run"
    duration_s: float = 0.0
    lock_wait_s: float = 0.0
    device_s: float = 0.0
    reruns: int = 0
    worker: str = ""
    reason: str = ""
    details: list[tuple[str, str]] = field(default_factory=list)
    started: bool = False
    finished: bool = False
    started_at: float = 0.0
    ended_at: float = 0.0

    @property
    def name(self) -> str:
        """Node id without the folder, the way people refer to the test."""
        path, sep, rest = self.nodeid.partition("::")
        return f"{path.rpartition('/')[2]}{sep}{rest}"

    @property
    def active_s(self) -> float:
        """Duration without the time spent waiting for the NPU lock."""
        return max(0.0, self.duration_s - self.lock_wait_s)


@dataclass(frozen=True)
class PhaseSummary:
    """Counts and times of one phase; `phase` None holds the tests without a phase."""

    phase: int | None
    counts: dict[str, int]
    duration_s: float
    lock_wait_s: float
    verdict: str
    #: Kernels that passed with elements beyond the tolerance.
    in_tier: int = 0
    #: Time on the device, seconds, and when the first test began and the last one ended (since the epoch).
    device_s: float = 0.0
    started_at: float = 0.0
    ended_at: float = 0.0

    @property
    def counts_text(self) -> str:
        """`42 passed (33 in tier)`."""
        tier = f" ({self.in_tier} in tier)" if self.in_tier else ""
        return count_text(self.counts) + tier

    @property
    def title(self) -> str:
        """`6 finalize`, or `no phase`."""
        return "no phase" if self.phase is None else f"{self.phase} {PHASES.get(self.phase, '')}".strip()


@dataclass(frozen=True)
class Kernel:
    """One kernel at one shape against its fp32 reference: a record of kind `phase1`."""

    nodeid: str
    payload: dict[str, Any]

    @property
    def status(self) -> str:
        """`pass`, `in tier, n elements over` or `FAIL`."""
        return str(self.payload.get("status", ""))

    @property
    def in_tier(self) -> bool:
        """Passed, with elements beyond the tolerance: no more than the arithmetic of the device explains."""
        return self.status.startswith("in tier")

    @property
    def elements(self) -> dict[str, Any]:
        """Counts of elements: over, allowed, expected, total, and the worst distance."""
        counts = self.payload.get("elements")
        return counts if isinstance(counts, dict) else {}

    @property
    def elements_text(self) -> str:
        """`12 of 147456, 20 allowed`, or nothing."""
        counts = self.elements
        return (
            f"{counts.get('over')} of {counts.get('total')}, {counts.get('allowed')} allowed"
            if counts
            else ""
        )


@dataclass
class RunReport:
    """Everything one event log says about one model."""

    model: str
    run_id: str = ""
    session: dict[str, Any] = field(default_factory=dict)
    started_at: float = 0.0
    ended_at: float = 0.0
    finished: bool = False
    exit_status: int | None = None
    device: dict[str, Any] = field(default_factory=dict)
    deployment: dict[str, Any] = field(default_factory=dict)
    preflight: list[dict[str, Any]] = field(default_factory=list)
    tests: dict[str, TestResult] = field(default_factory=dict)
    deselected: list[dict[str, Any]] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    locks: list[dict[str, Any]] = field(default_factory=list)
    crashes: list[dict[str, Any]] = field(default_factory=list)
    collect_errors: list[dict[str, Any]] = field(default_factory=list)
    retries: list[dict[str, Any]] = field(default_factory=list)
    interrupts: list[str] = field(default_factory=list)
    #: Measurements that became slower, or that cannot be compared with the saved ones: nodeid, phase, reason.
    regressions: list[dict[str, Any]] = field(default_factory=list)
    #: Host of every worker of pytest-xdist, by worker id.
    workers: dict[str, str] = field(default_factory=dict)
    poisoned: str = ""

    @property
    def counts(self) -> dict[str, int]:
        """Number of tests per outcome, in the order of OUTCOMES; collection errors count as error."""
        return _counts(self.tests.values(), len(self.collect_errors))

    @property
    def counts_text(self) -> str:
        """`3 passed, 1 failed`."""
        return count_text(self.counts)

    @property
    def verdict(self) -> str:
        """PASS, FAIL, INCOMPLETE or EMPTY. Nothing passes because it did not run."""
        if self.regressions or any(not crash.get("nodeid") for crash in self.crashes):
            return "FAIL"
        return _verdict(self.counts, complete=self.finished and not self.interrupts)

    @property
    def phases(self) -> list[PhaseSummary]:
        """Summaries of all phases that have tests, tests without a phase last."""
        keys = sorted({t.phase for t in self.tests.values()}, key=lambda p: 99 if p is None else p)
        return [self._phase(key) for key in keys]

    def _phase(self, phase: int | None) -> PhaseSummary:
        tests = [t for t in self.tests.values() if t.phase == phase]
        counts = _counts(tests)
        verdict = "BLOCKED" if set(counts) == {"blocked"} else _verdict(counts, complete=True)
        if any(regression.get("phase") == phase for regression in self.regressions):
            verdict = "FAIL"
        nodeids = {t.nodeid for t in tests}
        return PhaseSummary(
            phase,
            counts,
            sum(t.duration_s for t in tests),
            sum(t.lock_wait_s for t in tests),
            verdict,
            sum(kernel.in_tier for kernel in self.kernels if kernel.nodeid in nodeids),
            sum(t.device_s for t in tests),
            min((t.started_at for t in tests if t.started_at), default=0.0),
            max((t.ended_at for t in tests), default=0.0),
        )

    @property
    def kernels(self) -> list[Kernel]:
        """Kernels that were judged alone, in the order of the tests."""
        return [Kernel(record.get("nodeid") or "", record["payload"]) for record in self.records_of("phase1")]

    def records_of(self, kind: str) -> list[dict[str, Any]]:
        """Records of one kind in the order they were made, each with `nodeid`, `kind` and `payload`."""
        return [record for record in self.records if record["kind"] == kind]

    def phase_of(self, record: Mapping[str, Any]) -> int | None:
        """Phase of the test that made a record."""
        test = self.tests.get(record.get("nodeid") or "")
        return None if test is None else test.phase

    @property
    def device_label(self) -> str:
        """`twin (modelled)` or `npu2 (measured)`."""
        return str(self.device.get("label", "no device used"))

    @property
    def checkpoint_label(self) -> str:
        """The weights that were used."""
        checkpoint = self.deployment.get("checkpoint") or {}
        return str(checkpoint.get("label", "no checkpoint used"))

    @property
    def lock_wait_s(self) -> float:
        """Time all tests together waited for the NPU lock."""
        return sum(test.lock_wait_s for test in self.tests.values())


def count_text(counts: Mapping[str, int]) -> str:
    """`3 passed, 1 failed`."""
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "no tests"


def _counts(tests: Iterable[TestResult], errors: int = 0) -> dict[str, int]:
    counter = Counter(test.outcome for test in tests)
    counter["error"] += errors
    return {name: counter[name] for name in OUTCOMES if counter[name]}


def _verdict(counts: dict[str, int], *, complete: bool) -> str:
    if any(counts.get(name) for name in BAD):
        return "FAIL"
    if not complete or any(counts.get(name) for name in OPEN):
        return "INCOMPLETE"
    if not counts.get("passed") and not counts.get("xfailed") and not counts.get("xpassed"):
        return "EMPTY" if not counts.get("blocked") else "FAIL"
    return "PASS"


def build_run_report(model: str, events: Iterable[Event]) -> RunReport:
    """Read the events of one model's log. Unknown events are ignored: a newer release may add some."""
    report = RunReport(model)
    for event in events:
        if report.started_at == 0.0:
            report.started_at = float(event.get("t", 0.0))
        report.ended_at = float(event.get("t", report.ended_at))
        _take(report, event)
    why = report.interrupts[-1] if report.interrupts else "the run ended while this test was running"
    for test in report.tests.values():
        if test.started and not test.finished and test.outcome not in BAD:
            test.outcome, test.reason = "interrupted", test.reason or why
    return report


def _take(report: RunReport, event: Event) -> None:
    match event.get("event"):
        case "session_start":
            report.session, report.run_id = event, str(event.get("run_id", ""))
        case "session_finish":
            report.finished, report.exit_status = True, event.get("exit_status")
        case "preflight":
            report.preflight.extend(event["facts"])
        case "device":
            report.device = {key: event.get(key) for key in ("name", "label", "details")}
        case "deployment":
            report.deployment = {key: event.get(key) for key in ("checkpoint", "config", "folder", "variant")}
        case "collected":
            for entry in event["tests"]:
                test = _test(report, entry)
                test.phase, test.perf = entry.get("phase"), bool(entry.get("perf"))
        case "deselected":
            before = {nodeid for entry in report.deselected for nodeid in entry["nodeids"]}
            if fresh := [nodeid for nodeid in event["nodeids"] if nodeid not in before]:
                report.deselected.append({"nodeids": fresh, "reason": event["reason"]})
        case "collect_error":
            if all(error["nodeid"] != event["nodeid"] for error in report.collect_errors):
                report.collect_errors.append(event)
        case "worker":
            report.workers[str(event["worker"])] = str(event["host"])
        case "test_start":
            _start_test(report, event)
        case "test_phase":
            _take_test_phase(_test(report, event), event)
        case "test_finish":
            test = _test(report, event)
            test.finished, test.ended_at = True, float(event.get("t", test.ended_at))
        case "record":
            _take_record(report, event)
        case "lock":
            report.locks.append(event)
        case "retry":
            report.retries.append(event)
        case "regression":
            report.regressions.append(event)
        case "crash":
            _take_crash(report, event)
        case "poisoned":
            report.poisoned = report.poisoned or str(event["cause"])
        case "interrupt":
            report.interrupts.append(str(event["reason"]))


def _test(report: RunReport, event: Event) -> TestResult:
    return report.tests.setdefault(event["nodeid"], TestResult(event["nodeid"], event.get("phase")))


def _start_test(report: RunReport, event: Event) -> None:
    """A test begins, perhaps again: what it reported before does not count."""
    test = _test(report, event)
    report.tests[test.nodeid] = TestResult(
        test.nodeid,
        event.get("phase", test.phase),
        test.perf,
        reruns=test.reruns,
        worker=event.get("worker") or "",
        started=True,
        started_at=test.started_at or float(event.get("t", 0.0)),
    )


def _take_test_phase(test: TestResult, event: Event) -> None:
    when, outcome, text = event["when"], event["outcome"], event.get("longrepr") or ""
    test.started = True
    test.ended_at = float(event.get("t", 0.0))
    test.duration_s += float(event.get("duration_s") or 0.0)
    test.lock_wait_s += float(event.get("lock_wait_s") or 0.0)
    test.device_s += float(event.get("device_s") or 0.0)
    if outcome == "rerun":
        test.reruns += 1
        test.details.append((f"{when}, run again", text))
        test.outcome = "not run"
    elif outcome == "failed":
        if when == "call" and test.outcome not in BAD:
            test.outcome = "failed"
        elif test.outcome != "crashed":
            test.outcome = "error"
        test.reason = test.reason or _first_line(text)
        test.details.append((when, text))
        test.details.extend((title, body) for title, body in event.get("sections") or () if body.strip())
    elif outcome == "skipped":
        if event.get("wasxfail") is not None:
            test.outcome = "xfailed"
        else:
            test.outcome = "blocked" if event.get("blocked_by") else "skipped"
        test.reason = str(event.get("wasxfail") or text)
    elif when == "call":
        test.outcome = "xpassed" if event.get("wasxfail") is not None else "passed"


#: Kinds of records that reports know, with the lists in them that reports rely on.
RECORD_LISTS: dict[str, tuple[str, ...]] = {
    "topk_gate": ("prompts",),
    "diagnosis": ("rows",),
    "cache_check": ("rows", "prompts"),
    "ladder": ("rungs",),
    "teacher_forced": ("prompts",),
    "profile": ("breakdown",),
    "table": ("rows",),
    "comparison": ("rows",),
    "audit": ("findings", "ladder"),
    **dict.fromkeys(("benchmark", "phase0", "phase1", "block", "optimisation", "limits"), ()),
}


def _take_record(report: RunReport, event: Event) -> None:
    """Keep a record; one that does not have the shape of its kind is listed as it is, under another name."""
    kind, payload = event["kind"], event["payload"]
    if kind in RECORD_LISTS and not _fits(kind, payload):
        event = {**event, "kind": f"{kind}, unexpected shape"}
    report.records.append(event)


def _fits(kind: str, payload: Any) -> bool:
    if not isinstance(payload, dict):
        return False
    lists = [payload[name] for name in RECORD_LISTS[kind] if payload.get(name) is not None]
    entry_type = list if kind == "table" else dict
    return all(isinstance(one, list) and all(isinstance(e, entry_type) for e in one) for one in lists)


def _take_crash(report: RunReport, event: Event) -> None:
    report.crashes.append(event)
    if event.get("nodeid"):
        test = _test(report, event)
        test.outcome, test.reason, test.started, test.finished = "crashed", event["cause"], True, True
        test.details.append(("crash", f"{event['cause']}\n{event.get('detail') or ''}".strip()))
        if event.get("stacks"):
            test.details.append(("stacks", event["stacks"]))


def _first_line(text: str) -> str:
    """The line of a traceback that says most: the first with pytest's `E` margin, else the last."""
    lines = [line for line in text.splitlines() if line.strip()]
    for line in lines:
        if line.startswith("E  "):
            return line[1:].strip()
    return lines[-1].strip() if lines else ""
