"""The fit: what it is fitted on, that nothing leaks across the split, that it can be repeated."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from npu_twin.timing import exceptions, fit, models, optimise, parameters, rows

ROWS, UNJUDGED = rows.split(rows.read_records(rows.PUBLISHED_KERNELS))
MODELS = models.read_models(models.PUBLISHED_MODELS).records


def stage(name):
    return next(s for s in fit.STAGES if s.name == name)


def test_the_optimiser_finds_a_known_minimum_in_spite_of_outliers():
    points = [(float(x), 3.0 * x + 7.0) for x in range(1, 30)]
    points[5] = (points[5][0], points[5][1] * 4)

    def residuals(p):
        return [math.log((p["a"] * x + p["b"]) / y) for x, y in points]

    found = optimise.fit(residuals, {"a": 1.0, "b": 1.0})
    assert found["a"] == pytest.approx(3.0, rel=0.01)
    assert found["b"] == pytest.approx(7.0, rel=0.05)


def test_the_parameter_file_is_what_a_new_fit_gives():
    values = fit.fit_rows(ROWS)
    shipped = parameters.current()
    for s in fit.STAGES:
        for name in s.parameters:
            assert values[name] == pytest.approx(shipped[name], rel=0.01), name


def test_a_left_out_size_cannot_influence_its_own_prediction():
    """Doubling every measurement of one size must leave its cross-validated prediction as it is."""
    gemv = [r for r in ROWS if stage("gemv").takes(r)]
    target = gemv[3].shape
    doubled = [
        dataclasses.replace(r, measured_us=2 * r.measured_us) if r.shape == target else r for r in gemv
    ]
    values = fit.fit_rows(gemv)
    honest, planted = (fit.cross_validate(used, values) for used in (gemv, doubled))
    for row in gemv:
        if row.shape == target:
            assert planted[row.id] == pytest.approx(honest[row.id], rel=1e-3)


def test_the_plant_shows_where_the_size_is_not_left_out():
    gemv = [r for r in ROWS if stage("gemv").takes(r)]
    doubled = [dataclasses.replace(r, measured_us=2 * r.measured_us) for r in gemv]
    assert fit.fit_rows(doubled)["gemv.ddr_gbps"] < 0.7 * fit.fit_rows(gemv)["gemv.ddr_gbps"]


def test_duplicates_stay_on_one_side_of_the_split():
    """Rows with the same figures under two ids share their size, so they are left out together."""
    seen: dict[tuple[object, ...], set[object]] = {}
    for row in ROWS:
        figures = (row.kernel, row.call.method, tuple(row.call.tile.items()), row.call.herd, row.measured_us)
        seen.setdefault((figures, tuple(row.call.dims.items())), set()).add(row.shape)
    assert all(len(shapes) == 1 for shapes in seen.values())
    pairs = [s for s in seen if sum(1 for r in ROWS if r.measured_us == s[0][4] and r.kernel == s[0][0]) > 1]
    assert pairs, "the published rows contain duplicates; the test must see some"


def test_rows_of_exceptions_are_fitted_nowhere():
    excepted = [r for r in ROWS if exceptions.entry_of(r.call)]
    assert excepted
    assert not any(s.takes(r) for s in fit.STAGES for r in excepted)
    assert len(exceptions.TABLE) <= 5
    assert all(len(e.reason) > 40 for e in exceptions.TABLE)


def test_copied_rates_are_no_measurements():
    reasons = {u.id: u.reason for u in UNJUDGED}
    assert "not measured" in reasons["k0082"]
    assert all(u.excused for u in UNJUDGED)


def test_every_fitted_parameter_belongs_to_one_stage():
    names = [n for s in fit.STAGES for n in s.parameters] + list(fit.MODEL_PARAMETERS)
    assert len(names) == len(set(names))
    fitted = {p.name for p in parameters.DEFINITIONS if p.provenance != parameters.PROFILE}
    assert fitted == set(names)


def test_check_notices_a_changed_value(tmp_path, capsys):
    content = parameters.read_file()
    changed = tmp_path / "timing_parameters.json"
    text = json.dumps(content)
    changed.write_text(text, encoding="utf-8")
    assert fit._agrees(changed, text)
    content["parameters"][0]["value"] *= 1.1
    assert not fit._agrees(changed, json.dumps(content))
    assert not fit._agrees(tmp_path / "absent.json", text)


@pytest.mark.parametrize("content", ["[", '{"rows": []}', '{"records": [1]}'])
def test_a_file_of_another_form_is_named(tmp_path, content):
    path = tmp_path / "mine.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"mine\.json"):
        rows.read_records(path)


@pytest.mark.parametrize(
    "content",
    ["[", '{"rows": []}', '{"models": [1]}', '{"models": []}', '{"models": [{"id": "a"}], "breakdown": [3]}'],
)
def test_a_model_file_of_another_form_is_named(tmp_path, content):
    path = tmp_path / "mine.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"mine\.json"):
        models.read_models(path)


def test_an_incomplete_record_is_unjudged_and_named():
    found = rows.parse({"id": "mine7", "kernel": "gemv", "K": 2048, "latency_us": 100.0})
    assert isinstance(found, rows.Unjudged)
    assert not found.excused
    assert "M" in found.reason
    assert "no M" in found.reason
    strange = rows.parse({"id": "mine8", "kernel": "conv2d", "latency_us": 100.0})
    assert isinstance(strange, rows.Unjudged)
    assert "conv2d" in strange.reason


GEMV = {"id": "mine", "kernel": "gemv", "M": 2048, "K": 2048, "latency_us": 250.0, "status": "pass"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"M": 0}, "M must be a positive whole number, not 0"),
        ({"M": -5}, "M must be"),
        ({"K": 1.5}, "K must be"),
        ({"K": "2048"}, "K must be"),
        ({"tile_m": True}, "tile_m must be"),
        ({"herd_x": 10**12}, "herd_x must be"),
        ({"latency_us": 0.0}, "latency must be a positive number"),
        ({"latency_us": float("nan")}, "latency must be a positive number"),
        ({"latency_us": "250"}, "latency_us must be a number"),
        ({"latency_us": None}, "neither a latency nor error figures"),
        ({"status": "ok"}, "unknown status 'ok'"),
        ({"status": []}, "unknown status"),
        ({"dtype_out": "int8"}, "dtype_out must be bf16 or f32"),
        ({"kernel": "gemm", "N": 64, "method": "magic"}, "unknown method 'magic'"),
    ],
)
def test_an_unusable_record_is_unjudged_and_says_why(change, reason):
    used, others = rows.split([{**GEMV, **change}])
    assert used == []
    (found,) = others
    assert reason in found.reason
    assert not found.excused


def test_records_that_claim_nothing_about_the_model_are_excused_and_named():
    quantised, works = {**GEMV, "dtype_in": "int4"}, {**GEMV, "latency_us": None, "section": "tile_sweep"}
    used, others = rows.split([quantised, works, {**GEMV, "status": "compile_fail"}])
    assert used == []
    assert all(other.excused for other in others)
    assert [other.reason for other in others] == [
        "input type int4, only bf16 is modelled",
        "neither a latency nor error figures in the record",
    ]


def test_a_latency_is_derived_from_a_rate():
    record = {
        "id": "r",
        "kernel": "gemm",
        "M": 1024,
        "K": 1024,
        "N": 1024,
        "gflops": 2147.483648,
        "status": "pass",
    }
    found = rows.parse(record)
    assert isinstance(found, rows.Row)
    assert found.measured_us == pytest.approx(1000.0)
    assert found.derived
    assert found.assumed_tile


def test_quantised_models_are_not_claimed(tmp_path):
    path = tmp_path / "models.json"
    record = {
        **json.loads(models.PUBLISHED_MODELS.read_text(encoding="utf-8"))["models"][0],
        "weights": "q4nx",
    }
    path.write_text(json.dumps({"models": [record]}), encoding="utf-8")
    found = models.read_models(path)
    assert (found.records, found.unjudged) == ([], [])
    assert found.left_out == [("llama32_1b", "weights q4nx, not bf16")]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ttft_s": -1.0}, "ttft_s must be a positive number"),
        ({"ttft_s": "fast"}, "ttft_s must be a positive number"),
        ({"seq_len": 0}, "seq_len must be a positive whole number"),
        ({"emb_dim": None}, "no hidden_size or emb_dim"),
        ({"vocab_size": 10**12}, "vocab_size must be a whole number"),
        ({"head_dim": 63}, "even head_dim"),
        ({"n_kv_heads": 5}, "cannot share"),
    ],
)
def test_a_model_that_cannot_be_judged_is_named(tmp_path, change, reason):
    path = tmp_path / "models.json"
    record = {**json.loads(models.PUBLISHED_MODELS.read_text(encoding="utf-8"))["models"][0], **change}
    path.write_text(json.dumps({"models": [record]}), encoding="utf-8")
    found = models.read_models(path)
    assert (found.records, found.left_out) == ([], [])
    ((identity, why),) = found.unjudged
    assert identity == "llama32_1b"
    assert reason in why


def test_a_model_without_figures_is_left_out_and_named(tmp_path):
    path = tmp_path / "models.json"
    path.write_text(json.dumps({"models": [{"id": "vision", "weights": "bf16"}]}), encoding="utf-8")
    assert models.read_models(path) == ([], [], [("vision", "no ttft_s and no time per token")])


def test_constants_of_models_do_not_depend_on_the_kernel_fit_alone():
    """Leaving a model out must change the shared constants, else it was not in the fit."""
    values = dict(parameters.current())
    everything = fit.fit_models(MODELS, values)
    without = fit.fit_models([m for m in MODELS if m.id != "llama32_1b"], values)
    assert any(not math.isclose(everything[n], without[n], rel_tol=1e-4) for n in everything)
