"""What pytest-benchmark keeps of a run: completed after a crash, compared before the reports are written.

pytest-benchmark raises a regression when the terminal's summary is shown. The reports are made before that,
so the same checks are asked here, with its own objects.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

#: What must agree, where both sides know it, before two times may be compared: entries of `extra_info`.
SAME = ("device", "checkpoint", "seq_len")


def _session(config: pytest.Config) -> Any:
    return getattr(config, "_benchmarksession", None)


def measured(config: pytest.Config, nodeid: str) -> dict[str, Any] | None:
    """The measurement of one test, as pytest-benchmark's JSON files have it; None when it left none."""
    for bench in getattr(_session(config), "benchmarks", ()):
        if bench and bench.fullname == nodeid and not bench.has_error:
            from pytest_benchmark.utils import safe_dumps

            measurement: dict[str, Any] = json.loads(safe_dumps(bench.as_dict()))
            return measurement
    return None


def take_over(config: pytest.Config, data: dict[str, Any]) -> None:
    """Add a measurement of an earlier process of this run, so that tables, files and checks have it."""
    session = _session(config)
    if session is None:
        return
    from pytest_benchmark.stats import Metadata

    names = ("name", "fullname", "group", "param", "params", "extra_info")
    fixture = SimpleNamespace(cprofile_stats=None, has_error=False, **{name: data[name] for name in names})
    bench = Metadata(fixture, iterations=data["stats"]["iterations"], options=data["options"])
    bench.stats.data = list(data["stats"]["data"])
    session.benchmarks.append(bench)


def regressions(config: pytest.Config) -> Iterator[tuple[str, str]]:
    """Node id and reason of what `--benchmark-compare-fail` rejects, and of what cannot be compared.

    What cannot be compared is taken out of the comparison, so no table shows it as a gain or loss.
    """
    session = _session(config)
    for bench in getattr(session, "benchmarks", ()):
        if not bench or bench.has_error:
            continue
        for path, saved in (session.compared_mapping or {}).items():
            then = saved.get(bench.fullname)
            if then is None:
                continue
            where = getattr(path, "name", str(path))
            if different := _differences(bench.extra_info, then.get("extra_info") or {}):
                del saved[bench.fullname]
                yield bench.fullname, f"cannot be compared with {where}: {different}"
                continue
            for check in session.compare_fail or ():
                if check.fails(bench, then["stats"]):
                    yield (
                        bench.fullname,
                        f"slower than in {where}: {_change(check.field, bench, then['stats'])}",
                    )


def _differences(now: dict[str, Any], then: dict[str, Any]) -> str:
    if "device" not in now or "device" not in then:
        return ""  # not measured by npu_benchmark
    return "; ".join(
        f"{name} {then.get(name)!r} then, {now.get(name)!r} now"
        for name in SAME
        if then.get(name) != now.get(name) and None not in (then.get(name), now.get(name))
    )


def _change(field: str, now: Any, then: dict[str, Any]) -> str:
    new, old = float(now[field]), float(then[field])
    percent = f", {100 * (new / old - 1):+.1f} %" if old else ""
    if field in ("rounds", "iterations", "ops", "iqr_outliers", "stddev_outliers", "outliers"):
        return f"{field} {old:.6g} then, {new:.6g} now{percent}"
    return f"{field} {1e3 * old:.3f} ms then, {1e3 * new:.3f} ms now{percent}"
