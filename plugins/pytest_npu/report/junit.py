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
    properties = ET.SubElement(suite, "properties")
    for name, value in (("device", report.device_label), ("checkpoint", report.checkpoint_label)):
        ET.SubElement(properties, "property", {"name": name, "value": _clean(value)})
    for error in report.collect_errors:
        case = ET.SubElement(
            suite, "testcase", {"classname": "", "name": _clean(error["nodeid"]), "time": "0"}
        )
        ET.SubElement(case, "error", {"message": "collection failure"}).text = _clean(str(error["longrepr"]))
    for entry in report.regressions:  # the test itself passed: the comparison is a case of its own
        case = ET.SubElement(
            suite,
            "testcase",
            {"classname": "benchmark-compare", "name": _clean(entry["nodeid"]), "time": "0"},
        )
        ET.SubElement(case, "failure", {"message": _clean(entry["reason"])})
    for test in tests:
        _add_case(suite, test)
    root = ET.Element("testsuites", {"name": "pytest-npu"})
    root.append(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _add_case(suite: ET.Element, test: TestResult) -> None:
    path, _, name = test.nodeid.partition("::")
    case = ET.SubElement(
        suite,
        "testcase",
        {
            "classname": _clean(path.removesuffix(".py").replace("/", ".")),
            "name": _clean(name),
            "time": f"{test.duration_s:.3f}",
        },
    )
    if test.lock_wait_s:
        properties = ET.SubElement(case, "properties")
        ET.SubElement(properties, "property", {"name": "lock_wait_s", "value": f"{test.lock_wait_s:.3f}"})
    tag = _TAGS.get(test.outcome)
    if tag is None:
        return
    said = test.reason.startswith(f"{test.outcome}:")
    message = _clean(test.reason if said else f"{test.outcome}: {test.reason}".removesuffix(": "))
    element = ET.SubElement(case, tag, {"message": message})
    if tag != "skipped":
        element.text = _clean("\n\n".join(f"--- {title} ---\n{text}" for title, text in test.details))
