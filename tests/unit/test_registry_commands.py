"""Commands of the registry: sweep, add, show, and the measurers behind a sweep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernel_registry import registry_lookup as lookup
from kernel_registry import store
from kernel_registry.cli import main
from kernel_registry.measure import MeasurementUnavailable, Numerics, Timed, judge, silicon
from kernel_registry.shapes import Request, RequestError, from_config, from_file, parse
from kernel_registry.sweep import ranked, sweep
from llms.verify.reference.kernels import make_inputs
from npu_twin.constraints import legal_configs

SMOLLM2 = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "rope_theta": 1e5,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "max_position_embeddings": 8192,
    "eos_token_id": 2,
}


class Recorder:
    """A measurer whose answers a test chooses."""

    provenance = "measured-silicon"
    source = "a test"
    shortlist = 10**9
    resolution = 0.05
    resolution_us = 0.0

    def __init__(self, latency: Any, numerics: Any = None) -> None:
        self._latency = latency
        self._numerics = numerics or (lambda config: None)

    def times(self, config: Any) -> Timed | None:
        result: float | None = self._latency(config)
        return None if result is None else Timed(result, result)

    def numerics(self, config: Any) -> Numerics | None:
        result: Numerics | None = self._numerics(config)
        return result


def figures(mean: float, over: int = 0) -> Numerics:
    return Numerics({"mean_rel_L1": mean}, {"rtol": 0.016, "atol": 0.001}, over)


def run(root: Path, *arguments: str) -> int:
    return main([arguments[0], "--registry", str(root), *arguments[1:]])


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_a_sweep_adds_a_row_that_the_lookup_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "sweep", "gemm", "64x128x192", "--precision", "high", "--used-by", "tiny") == 0
    assert "added     gemm 64x128x192 bf16 high" in capsys.readouterr().out
    config = lookup.config("gemm", M=64, K=128, N=192, registry=tmp_path)
    assert config.provenance == "twin"
    assert config.herd[0] * config.herd[1] > 1
    (row,) = store.read(tmp_path, "gemm")
    assert row["used_by"] == ["tiny"]
    assert row["tolerance"] == {"rtol": 0.016, "atol": 0.0015}
    assert 0.008 < row["figures"]["mean_rel_L1"] < 0.011
    assert run(tmp_path, "check") == 0


def test_a_sweep_is_idempotent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = ("eltwise_add", "4096", "8192")
    assert run(tmp_path, "sweep", *shapes, "--used-by", "tiny") == 0
    before = files(tmp_path)
    capsys.readouterr()
    assert run(tmp_path, "sweep", *shapes, "--used-by", "tiny") == 0
    assert capsys.readouterr().out.count("unchanged") == 2
    assert files(tmp_path) == before


def test_if_missing_only_tags(tmp_path: Path) -> None:
    assert run(tmp_path, "sweep", "silu_mul", "4096", "--no-numerics") == 0
    assert run(tmp_path, "sweep", "silu_mul", "4096", "--if-missing", "--used-by", "other") == 0
    (row,) = store.read(tmp_path, "silu_mul")
    assert row["used_by"] == ["other"]
    assert "mean_rel_L1" not in row["figures"]


def test_a_latency_only_sweep_keeps_the_error_figures(tmp_path: Path) -> None:
    assert run(tmp_path, "sweep", "silu_mul", "4096") == 0
    before = files(tmp_path)
    assert "mean_rel_L1" in store.read(tmp_path, "silu_mul")[0]["figures"]
    assert run(tmp_path, "sweep", "silu_mul", "4096", "--no-numerics") == 0
    assert files(tmp_path) == before


def test_several_variants_of_a_shape_live_side_by_side(tmp_path: Path) -> None:
    for options in (["--precision", "high"], ["--precision", "low"], ["--output-dtype", "f32"]):
        assert run(tmp_path, "sweep", "gemm", "512x128x256", *options, "--no-numerics") == 0
    tiers = {(r["method"], r["dtype_out"]) for r in store.read(tmp_path, "gemm")}
    assert {d for _, d in tiers} == {"bf16", "f32"}
    assert (
        lookup.config("gemm", M=512, K=128, N=256, output_dtype="f32", registry=tmp_path).method == "external"
    )
    assert lookup.config("gemm", M=512, K=128, N=256, precision="low", registry=tmp_path).method == "direct"


def test_the_fastest_configuration_is_chosen_and_the_rest_is_tried(tmp_path: Path) -> None:
    request = parse("gemv", "1024x256")
    best = sweep(request, Recorder(lambda c: float(c.tile["tile_m"] * c.herd[0])), tmp_path)
    config = lookup.config("gemv", M=1024, K=256, registry=tmp_path)
    assert (config.tile["tile_m"], config.herd) == (2, (1, 1))
    assert best.latency_us == 2.0
    assert best.tried > 20


def test_below_the_resolution_more_cores_win(tmp_path: Path) -> None:
    request = parse("rope", "9x64")
    sweep(request, Recorder(lambda c: 50.0 + c.herd[0] / 10), tmp_path)
    assert lookup.config("rope", rows=9, head_dim=64, registry=tmp_path).herd == (3, 1)
    sweep(request, Recorder(lambda c: 50.0 * c.herd[0]), tmp_path)
    assert lookup.config("rope", rows=9, head_dim=64, registry=tmp_path).herd == (1, 1)


def test_configurations_that_cannot_be_built_are_left_out(tmp_path: Path) -> None:
    request = parse("gemv", "1024x256")
    only = Recorder(lambda c: 5.0 if c.tile == {"tile_m": 4, "m_input": 4} else None)
    sweep(request, only, tmp_path)
    assert lookup.config("gemv", M=1024, K=256, registry=tmp_path).tile == {"tile_m": 4, "m_input": 4}
    with pytest.raises(
        MeasurementUnavailable, match=r"none of \d+ legal configurations has a compiled kernel"
    ):
        ranked(request, Recorder(lambda c: None))


def test_wrong_numbers_are_recorded_and_the_next_best_is_taken(tmp_path: Path) -> None:
    fast = {"tile_m": 16, "m_input": 16}
    measurer = Recorder(
        lambda c: 1.0 if c.tile == fast and c.herd == (8, 1) else 2.0,
        lambda c: figures(0.9, 4096) if c.tile == fast else figures(1e-9),
    )
    done = sweep(parse("gemv", "1024x256"), measurer, tmp_path)
    assert done.latency_us == 2.0
    assert lookup.config("gemv", M=1024, K=256, registry=tmp_path).tile != fast
    statuses = {r["status"] for r in store.read(tmp_path, "gemv")}
    assert statuses == {"silent_corruption", "pass"}
    with pytest.raises(MeasurementUnavailable, match="wrong numbers"):
        sweep(parse("gemv", "2048x256"), Recorder(lambda c: 1.0, lambda c: figures(1.0)), tmp_path)


def test_a_new_best_tile_of_the_twin_replaces_the_old_row(tmp_path: Path) -> None:
    request = parse("gemv", "1024x256")
    old, new = (Recorder(lambda c, t=t: 1.0 if c.tile["tile_m"] == t else 2.0) for t in (8, 4))
    old.provenance = new.provenance = "twin"
    sweep(request, old, tmp_path, used_by=["first"])
    done = sweep(request, new, tmp_path, used_by=["second"])
    (row,) = store.read(tmp_path, "gemv")
    assert (row["tile"]["tile_m"], row["used_by"], done.outcome) == (4, ["first", "second"], "updated")
    silicon_row = Recorder(lambda c: 3.0 if c.tile["tile_m"] == 16 else 4.0)
    sweep(request, silicon_row, tmp_path)
    assert len(store.read(tmp_path, "gemv")) == 2


def test_k_tilings_that_silicon_has_not_confirmed_are_marked(tmp_path: Path) -> None:
    for k, marked in ((576, True), (960, False), (512, False)):
        tile = {576: (192, 32), 960: (320, 32), 512: (256, 32)}[k]
        chosen = Recorder(lambda c, t=tile: 1.0 if (c.tile["tile_k_l2"], c.tile["tile_k_l1"]) == t else 2.0)
        chosen.provenance = "twin"
        sweep(parse("gemm", f"256x{k}x320"), chosen, tmp_path)
        (row,) = (r for r in store.read(tmp_path, "gemm") if r["dims"]["K"] == k)
        assert ("not confirmed on silicon" in row.get("note", "")) == marked


def test_nan_in_the_output_counts_as_wrong_numbers() -> None:
    config = legal_configs("eltwise_add", {"n": 4096})[0]
    inputs = make_inputs("eltwise_add", {"n": 4096})
    right = inputs["a"].astype(np.float32) + inputs["b"].astype(np.float32)
    assert judge(config, inputs, right).status == "pass"
    wrong = right.copy()
    wrong[17] = np.nan
    numerics = judge(config, inputs, wrong)
    assert numerics.status == "silent_corruption"
    assert numerics.elements_over == 1
    assert all(np.isfinite(v) for v in numerics.figures.values())


def test_elements_over_show_as_in_tier(tmp_path: Path) -> None:
    sweep(parse("gemv", "1024x256"), Recorder(lambda c: 1.0, lambda c: figures(0.01, 3)), tmp_path)
    (row,) = store.read(tmp_path, "gemv")
    assert (row["status"], row["figures"]["elements_over"]) == ("in_tier", 3)
    assert row["note"] == "3 elements over the tolerance"


def test_the_toolkit_measures_through_the_driver(tmp_path: Path) -> None:
    """The silicon path, driven through the twin's driver: same code, other module."""
    from llms.llama_kernel_builder import driver
    from llms.llama_kernel_builder.bench import SiliconMeasurer
    from llms.llama_kernel_builder.toolchains.seam import TwinToolchain

    measurer = SiliconMeasurer(driver.select("twin"), TwinToolchain())
    measurer.shortlist = 2
    done = sweep(parse("eltwise_add", "4096"), measurer, tmp_path)
    (row,) = store.read(tmp_path, "eltwise_add")
    assert done.tried == 2
    assert row["source"].startswith("twin (modelled), npu-twin-compiler")
    assert row["status"] == "pass"
    assert 1e-3 < row["figures"]["mean_rel_L1"] < 3e-3
    assert 1 < row["figures"]["latency_us"] < 1000


def test_npu_without_a_device_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyxrt", None)
    with pytest.raises(MeasurementUnavailable, match="pyxrt cannot be imported"):
        silicon(None)
    assert run(tmp_path, "sweep", "gemv", "576x576", "--npu") == 1
    assert "error: --npu: pyxrt cannot be imported" in capsys.readouterr().err
    assert files(tmp_path) == {}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["gemm", "64x128"], 2, "gemm: shape '64x128' must be MxKxN"),
        (["gemm", "64xAx128"], 2, "must be MxKxN"),
        (["gemm", "0x64x64"], 2, "positive integers"),
        (["softmax", "64"], 2, "unknown kernel 'softmax'; known: gemm"),
        (["gemv"], 2, "name a kernel and a shape"),
        (["gemm", "64x64x64", "--output-dtype", "f32", "--precision", "low"], 2, "no kernel writes f32"),
        (["gemv", "151936x1024"], 1, "no legal configuration; pad or split the shape"),
        (["--model", "missing.json"], 2, "missing.json"),
    ],
)
def test_bad_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str
) -> None:
    assert run(tmp_path, "sweep", *arguments) == code
    assert says in capsys.readouterr().err


def test_one_illegal_shape_does_not_stop_the_others(tmp_path: Path) -> None:
    assert run(tmp_path, "sweep", "gemv", "151936x1024", "1024x256", "--no-numerics") == 1
    assert lookup.config("gemv", M=1024, K=256, registry=tmp_path).provenance == "twin"


def test_shapes_of_a_model_from_its_config() -> None:
    """What its blocks launch, which the toolkit knows: the LM head in partitions, too."""
    found = from_config(SMOLLM2, [128])
    named = {str(r) for r in found}
    assert len(named) == len(found) == 20
    assert {"gemm 128x576x192 bf16 high", "flash_attention 128x128x64x9x3 causal", "rope 1152x64"} <= named
    assert {"rms_norm 1x576", "gemv 16384x576", "gemv 576x1536", "rope 9x64", "silu_mul 1536"} <= named


def test_families_add_their_own_kernels_and_vocabularies_are_split() -> None:
    qwen2 = {**SMOLLM2, "model_type": "qwen2", "vocab_size": 151936}
    named = {str(r) for r in from_config(qwen2, [128])}
    assert {"bias_add 128x576", "gemv 16384x576"} <= named
    qwen3 = {**SMOLLM2, "model_type": "qwen3", "head_dim": 128}
    named = {str(r) for r in from_config(qwen3, [128])}
    assert {"rms_norm 1152x128", "rms_norm 9x128", "gemm 128x576x1152 bf16 high", "gemv 576x1152"} <= named


def test_a_config_without_a_field_is_refused() -> None:
    with pytest.raises(RequestError, match="'intermediate_size' is missing"):
        from_config({k: v for k, v in SMOLLM2.items() if k != "intermediate_size"})


def test_a_file_of_shapes(tmp_path: Path) -> None:
    path = tmp_path / "shapes.json"
    path.write_text(
        json.dumps({"used_by": ["tiny"], "shapes": [{"op": "gemm", "shape": "64x64x64", "precision": "low"}]})
    )
    assert from_file(path) == ([Request("gemm", (64, 64, 64), "low")], ["tiny"])
    path.write_text('{"shapes": [{"op": "gemm"}]}')
    with pytest.raises(RequestError, match=r"shapes\[0\]: needs op and shape"):
        from_file(path)
    path.write_text("[]")
    with pytest.raises(RequestError, match="neither a model's config"):
        from_file(path)


def test_sweep_of_a_model_file_adds_everything_at_once(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMOLLM2))
    root = tmp_path / "registry"
    done = run(
        root, "sweep", "--model", str(config), "--buckets", "128", "--no-numerics", "--used-by", "smol"
    )
    assert done == 0
    rows = [r for rows in store.read_all(root).values() for r in rows]
    assert len(rows) == 20
    assert all(r["used_by"] == ["smol"] for r in rows)


def test_add_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "op": "rope",
        "dims": {"rows": 64, "head_dim": 64},
        "method": "half_split",
        "herd": [8, 1],
        "context": "standalone",
        "status": "pass",
        "provenance": "measured-silicon",
        "figures": {"latency_us": 85.0},
        "date": "2026-10-01",
        "source": "own Strix machine",
    }
    path = tmp_path / "row.json"
    path.write_text(json.dumps([row]))
    root = tmp_path / "registry"
    assert run(root, "add", str(path)) == 0
    assert "added     rope:64x64" in capsys.readouterr().out
    assert lookup.config("rope", rows=64, head_dim=64, registry=root).provenance == "measured-silicon"
    assert run(root, "add", str(path)) == 0
    assert "unchanged" in capsys.readouterr().out
    assert run(root, "show", "rope", "64x64") == 0
    assert "measured silicon" in capsys.readouterr().out

    path.write_text(json.dumps({**row, "figures": {"latency_us": "fast"}}))
    assert run(root, "add", str(path)) == 1
    assert "figures.latency_us" in capsys.readouterr().err
    path.write_text(json.dumps({"op": "rope"}))
    assert run(root, "add", str(path)) == 1
    path.write_text("{")
    assert run(root, "add", str(path)) == 1
    assert len(store.read(root, "rope")) == 1


def test_show_of_an_unknown_shape_names_the_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "show", "gemv", "4x64") == 1
    assert "python -m kernel_registry sweep gemv 4x64" in capsys.readouterr().out


def test_a_registry_that_cannot_be_written_is_a_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert run(blocked, "sweep", "silu_mul", "4096", "--no-numerics") == 1
    assert "cannot be read" in capsys.readouterr().err
    assert run(blocked, "render") == 1
    assert "cannot be written" in capsys.readouterr().err
