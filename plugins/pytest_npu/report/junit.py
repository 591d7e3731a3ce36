"""`junit.xml` from the event log: also for tests that crashed or never came to an end."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from xml.etree import ElementTree as ET

from .model import RunReport, TestResult

#: Characters that XML 1.0 does not allow.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_TAGS = {
    "failed": "failure",
    "error": "error",
    "crashed": "error",
    "interrupted": "error",
    "not run": "skipped",
    "blocked": "skipped",
    "skipped": "skipped",
    "xfailed": "skipped",
}


def _clean(text: str) -> str:
    return _ILLEGAL.sub("?", text)


def render_junit(report: RunReport) -> str:
    """JUnit XML of one run. An interrupted test is an error, one that was never started is skipped."""
    tests = list(report.tests.values())
    tags = [_TAGS.get(test.outcome) for test in tests]
    suite = ET.Element(
        "testsuite",
        {
            "name": _clean(report.model),
            "tests": str(len(tests) + len(report.collect_errors) + len(report.regressions)),
            "failures": str(tags.count("failure") + len(report.regressions)),
            "errors": str(tags.count("error") + len(report.collect_errors)),
            "skipped": str(tags.count("skipped")),
            "time": f"{report.ended_at - report.started_at:.3f}",
            "timestamp": datetime.fromtimestamp(report.started_at, timezone.utc).isoformat(),
            "hostname": _clean(str(report.session.get("host") or "")),
        },
    )
    _add_properties(suite, device=report.device_label, checkpoint=report.checkpoint_label)
    for error in report.collect_errors:
        case = _add_case(suite, "", error["nodeid"])
        _add_outcome(case, "error", "collection failure", str(error["longrepr"]))
    for entry in report.regressions:  # the test itself passed: the comparison is a case of its own
        _add_outcome(_add_case(suite, "benchmark-compare", entry["nodeid"]), "failure", entry["reason"])
    for test in tests:
        _add_test(suite, test)
    root = ET.Element("testsuites", {"name": "pytest-npu"})
    root.append(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _add_case(suite: ET.Element, classname: str, name: str, time: str = "0") -> ET.Element:
    names = {"classname": _clean(classname), "name": _clean(name), "time": time}
    return ET.SubElement(suite, "testcase", names)


def _add_properties(parent: ET.Element, **values: str) -> None:
    properties = ET.SubElement(parent, "properties")
    for name, value in values.items():
        ET.SubElement(properties, "property", {"name": name, "value": _clean(value)})


def _add_outcome(case: ET.Element, tag: str, message: str, text: str | None = None) -> None:
    ET.SubElement(case, tag, {"message": _clean(message)}).text = None if text is None else _clean(text)


def _add_test(suite: ET.Element, test: TestResult) -> None:
    path, _, name = test.nodeid.partition("::")
    classname = path.removesuffix(".py").replace("/", ".")
    case = _add_case(suite, classname, name, f"{test.duration_s:.3f}")
    if test.lock_wait_s:
        _add_properties(case, lock_wait_s=f"{test.lock_wait_s:.3f}")
    tag = _TAGS.get(test.outcome)
    if tag is None:
        return
    named = test.reason.startswith(f"{test.outcome}:")
    message = test.reason if named else f"{test.outcome}: {test.reason}".removesuffix(": ")
    details = "\n\n".join(f"--- {title} ---\n{text}" for title, text in test.details)
    _add_outcome(case, tag, message, None if tag == "skipped" else details)
