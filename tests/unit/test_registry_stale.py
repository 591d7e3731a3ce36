"""Rows of the twin follow its timing model: drift is found by `check` and repaired by `sweep --stale`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kernel_registry import registry_lookup as lookup
from kernel_registry import stale, store
from kernel_registry.cli import main
from kernel_registry.measure import TwinMeasurer
from kernel_registry.schema import row_id
from kernel_registry.sweep import ranked
from npu_twin import timing
from npu_twin.constraints import Config
from npu_twin.timing import kernels
from npu_twin.timing.parameters import current


def run(root: Path, *arguments: str) -> int:
    return main([arguments[0], "--registry", str(root), *arguments[1:]])


def edit(root: Path, op: str, **changes: Any) -> None:
    path = root / "details" / f"{op}.json"
    data = json.loads(path.read_text())
    for row in data["rows"]:
        row.update(changes)
    path.write_text(store.dump(op, data["rows"]))


@pytest.fixture
def swept(tmp_path: Path) -> Path:
    assert run(tmp_path, "sweep", "silu_mul", "4096", "8192", "--used-by", "tiny") == 0
    return tmp_path


def twin_rows() -> list[dict[str, Any]]:
    return [
        row
        for rows in store.read_all(lookup.PACKAGED).values()
        for row in rows
        if row["provenance"] == "twin"
    ]


def test_packaged_rows_agree_with_the_timing_model() -> None:
    rows = twin_rows()
    assert len(rows) > 300
    assert stale.problems(rows) == []


def test_the_figure_is_that_of_the_kernel_alone() -> None:
    """Start, first data and work; no loading, which only programs of several launches pay."""
    p = current()
    checked = 0
    for row in twin_rows():
        if row["op"] != "eltwise_add":
            continue
        n, cores = row["dims"]["n"], row["herd"][0] * row["herd"][1]
        work = max(n / cores * p["stream.add_ns"], 6 * n / p["stream.ddr_gbps"]) * 1e-3
        expected = p["program.start_us"] + p["stream.fill_us"] + work
        assert row["figures"]["latency_us"] == pytest.approx(expected, rel=1.1e-3, abs=0.02), row["id"]
        checked += 1
    assert checked > 20


def test_a_small_kernel_gets_the_herd_that_is_best_inside_a_program() -> None:
    """Alone, eight columns are a little faster; every launch of a program loads its tiles."""
    config = lookup.config("gemm", M=128, K=192, N=64)
    assert config.provenance == "twin"
    chosen = Config("gemm", config.method, config.dims, config.tile, config.herd, {})
    wide = Config("gemm", "drain", config.dims, {**config.tile, "tile_n": 16}, (4, 4), {})
    assert timing.standalone_us(wide) < timing.standalone_us(chosen)
    assert timing.launch_us(chosen) + 50 < timing.launch_us(wide)


def test_the_choice_is_what_a_sweep_would_choose_now() -> None:
    for row in twin_rows()[::7]:
        request = stale.request_of(row)
        best, times = ranked(request, TwinMeasurer())[0]
        stored = (row["method"], row["tile"], tuple(row["herd"]))
        assert (best.method, dict(best.tile), best.herd) == stored, row["id"]
        assert times.latency_us == pytest.approx(row["figures"]["latency_us"], rel=1.1e-3, abs=0.02)


def test_drift_of_a_figure_is_found_and_repaired(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {p.name: p.read_text() for p in (swept / "details").glob("*")}
    rows = store.read(swept, "silu_mul")
    edit(swept, "silu_mul", figures={**rows[0]["figures"], "latency_us": 12.0})
    assert run(swept, "render") == 0
    assert run(swept, "check") == 1
    text = capsys.readouterr().err
    assert text.count("latency_us 12.0 is not what the twin models now") == 2
    assert f"run: {stale.COMMAND}" in text
    assert run(swept, "sweep", "--stale") == 0
    assert capsys.readouterr().out.count("updated") == 2
    assert run(swept, "check") == 0
    repaired = store.read(swept, "silu_mul")
    assert [r["used_by"] for r in repaired] == [["tiny"], ["tiny"]]
    assert [r["figures"]["latency_us"] for r in repaired] == [r["figures"]["latency_us"] for r in rows]
    assert {p.name for p in (swept / "details").glob("*")} == set(before)


def test_a_choice_that_has_changed_is_swept_again_though_its_time_is_right(swept: Path) -> None:
    """Cheaper loading may make another herd the best one without changing the time of a kernel alone."""
    first, second = store.read(swept, "silu_mul")
    chosen = (first["tile"], first["herd"])
    first.update(tile={"tile_n": 256}, herd=[1, 1])
    first["id"] = row_id(first)
    first["figures"]["latency_us"] = round(stale.modelled_us(first), 2)
    store.update(swept, "silu_mul", lambda rows: [first, second])
    assert stale.problems([first, second]) == []
    assert stale.outranked([first, second]) == [first]
    assert list(stale.stale_requests(swept)) == [stale.request_of(first)]
    assert run(swept, "sweep", "--stale") == 0
    repaired = next(r for r in store.read(swept, "silu_mul") if r["dims"] == first["dims"])
    assert (repaired["tile"], repaired["herd"]) == chosen
    assert stale.stale_requests(swept) == {}


def test_a_silicon_row_beside_it_keeps_the_choice(swept: Path) -> None:
    first, _ = store.read(swept, "silu_mul")
    planted = {**first, "tile": {"tile_n": 256}, "herd": [1, 1]}
    assert stale.outranked([planted]) == [planted]
    assert stale.outranked([planted, {**planted, "provenance": "measured-silicon"}]) == []


def test_recalibration_makes_rows_stale(swept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(swept, "check") == 0
    slower = {**current(), "stream.silu_mul_ns": 2 * current()["stream.silu_mul_ns"]}
    monkeypatch.setattr("npu_twin.timing.kernels.current", lambda: slower)
    assert run(swept, "check") == 1
    assert run(swept, "sweep", "--stale") == 0
    assert run(swept, "check") == 0
    (row, _) = store.read(swept, "silu_mul")
    config = Config("silu_mul", row["method"], row["dims"], row["tile"], tuple(row["herd"]), {})
    assert row["figures"]["latency_us"] == pytest.approx(kernels.alone_us(slower, config), abs=0.01)


def test_error_figures_are_kept_or_measured_anew(swept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    measure = TwinMeasurer.numerics

    def numerics(self: TwinMeasurer, config: Any) -> Any:
        asked.append(config)
        return measure(self, config)

    monkeypatch.setattr(TwinMeasurer, "numerics", numerics)
    first, second = store.read(swept, "silu_mul")
    for row in (first, second):
        row["figures"]["latency_us"] = 12.0
    second.update(tile={"tile_n": 2048}, herd=[2, 1])
    second["id"] = row_id(second)
    store.update(swept, "silu_mul", lambda rows: [first, second])
    assert run(swept, "sweep", "--stale") == 0
    assert [c.dims["n"] for c in asked] == [8192]
    for row in store.read(swept, "silu_mul"):
        assert row["figures"]["mean_rel_L1"] > 0
        assert row["used_by"] == ["tiny"]


def test_rows_of_silicon_are_left_alone(tmp_path: Path) -> None:
    shutil.copytree(lookup.PACKAGED / "details", tmp_path / "details")
    shutil.copy(lookup.PACKAGED / "supported_kernels.md", tmp_path)
    assert run(tmp_path, "check") == 0
    before = {p.name: p.read_text() for p in (tmp_path / "details").iterdir()}
    assert run(tmp_path, "sweep", "--stale") == 0
    assert {p.name: p.read_text() for p in (tmp_path / "details").iterdir() if p.name in before} == before


@pytest.mark.parametrize("extra", [["gemv", "64x64"], ["--npu"], ["--if-missing"]])
def test_stale_takes_no_shapes(swept: Path, extra: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(swept, "sweep", "--stale", *extra) == 2
    assert "--stale takes the shapes from the registry" in capsys.readouterr().err
