"""Timeline of a whole model: sections, forward passes and the same totals as the profiler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llms.llama_kernel_builder.deployment.runner import ProductionRunner
from llms.verify.contract.deployment import Deployment

FOLDER = Path(__file__).parents[2] / "llms" / "smollm2_135m"


def test_a_generation_of_the_tiny_model(tmp_path: Path) -> None:
    deployment = Deployment.from_folder(FOLDER, checkpoint=FOLDER / "tiny")
    runner = deployment.runner(128)
    assert isinstance(runner, ProductionRunner)
    session = runner.session
    session.prepare(8)
    with session.profiled() as profiler, session.timeline(tmp_path / "trace.json"):
        done = session.generate(lambda: list(range(10, 18)), 4, stop_at_eos=False)
    deployment.release_runners()
    document = json.loads((tmp_path / "trace.json").read_text())
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert document["otherData"]["device"] == "twin (modelled)"

    def named(kind: str, name: str = "") -> list[dict[str, float]]:
        return [e for e in slices if e["cat"] == kind and (not name or e["name"] == name)]

    def total_ms(events: list[dict[str, float]]) -> float:
        return sum(event["dur"] for event in events) * 1e-3

    for section, count, forwards in (("prefill", 1, 1), ("decode", 1, 3)):
        assert len(named("section", section)) == count
        assert len(named("forward", f"{section} forward")) == forwards
    assert total_ms(named("section", "prefill")) == pytest.approx(done.ttft_s * 1e3, abs=1e-3)
    assert total_ms(named("section", "decode")) == pytest.approx(3 * done.tpot_s * 1e3, abs=1e-3)
    rows = profiler.breakdown()
    for kind in ("elf", "kernel", "host", "bo_write", "bo_read"):
        expected = sum(row["total_ms"] for row in rows if row["kind"] == kind)
        assert expected > 0
        assert total_ms(named(kind)) == pytest.approx(expected, abs=1e-2), kind
