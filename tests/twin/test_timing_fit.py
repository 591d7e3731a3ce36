"""The fit: what it is fitted on, that nothing leaks across the split, that it can be repeated."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from npu_twin.timing import exceptions, fit, models, optimise, parameters, records, rows
from tools import twin_calibration

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


def test_a_judged_exception_is_predicted_by_the_formula_alone():
    collapsed = next(r for r in ROWS if r.id == "k0155")
    neighbour = next(r for r in ROWS if r.id == "k0154")
    values = dict(parameters.current())
    alone = fit.cross_validate([collapsed], values)[collapsed.id]
    assert alone == pytest.approx(rows.predict_us(values, neighbour), rel=0.15)
    assert rows.predict_us(values, collapsed) > 8 * alone


def test_rows_in_doubt_are_judged_and_fitted_nowhere():
    doubts = {r.id: r.doubt for r in ROWS if r.doubt}
    assert set(doubts) == {"k0081", "k0082", "k0084", "k0211", "k0212", "k0213", "k0214"}
    assert "not measured" in doubts["k0082"]
    assert not any(s.takes(r) for s in fit.STAGES for r in ROWS if r.doubt)


def test_only_rows_without_a_time_are_unjudged():
    assert {u.id for u in UNJUDGED} == {"k0122", "k0123", "k0300"}
    assert all(u.excused for u in UNJUDGED)


ALTERNATING = {
    **{"id": "mine", "kernel": "gemm", "method": "drain", "M": 1024, "K": 768, "N": 768, "status": "pass"},
    **{"section": "elf_vs_xclbin_same_driver", "herd_x": 8, "herd_y": 4, "latency_us": 500.0},
}


@pytest.mark.parametrize("elf", [{"output_format": "elf"}, {"note": "output format elf"}])
def test_contexts_in_turn_slow_the_work_and_an_elf_is_loaded_each_time(elf):
    p = parameters.current()
    (xclbin, own), others = rows.split([ALTERNATING, {**ALTERNATING, **elf}])
    assert others == []
    alone = dataclasses.replace(xclbin, alternating=False)
    assert alone.scope == rows.ALONE
    assert own.scope == rows.ONE_LAUNCH
    work = rows.predict_us(p, alone) - p["program.start_us"]
    assert rows.predict_us(p, xclbin) == pytest.approx(p["program.start_us"] + 1.4 * work)
    loading = p["program.reload_us"] + 32 * p["program.reload_us_per_tile"]
    assert rows.predict_us(p, own) - rows.predict_us(p, xclbin) == pytest.approx(loading)


def test_the_tile_n_of_a_sweep_inside_a_program_changes_nothing():
    """As published: 578.5, 575.9, 578.3 and 578.2 us for 96, 64, 48 and 192 columns."""
    sweep = [r for r in ROWS if r.scope == rows.IN_PROGRAM and r.sizes == "1024x768x768"]
    assert len(sweep) == 4
    assert max(r.measured_us for r in sweep) < 1.01 * min(r.measured_us for r in sweep)
    assert len({r.call.tile["tile_n"] for r in sweep}) == 1
    assert all(r.assumed_tile for r in sweep)


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
    assert twin_calibration.agrees(changed, text)
    content["parameters"][0]["value"] *= 1.1
    assert not twin_calibration.agrees(changed, json.dumps(content))
    assert not twin_calibration.agrees(tmp_path / "absent.json", text)


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


@pytest.mark.parametrize(
    ("record", "other"),
    [
        ({"kernel": "rmsnorm", "M": 4096, "N": 128}, {"kernel": "qk_norm", "rows": 4096, "head_dim": 128}),
        ({"kernel": "eltwise_add", "n_elements": 65536}, {"kernel": "add", "rows": 64, "N": 1024}),
        ({"kernel": "silu_mul", "n_elements": 65536}, {"kernel": "swiglu", "M": 64, "N": 1024}),
        (
            {"kernel": "bias_add", "rows": 64, "N": 1024},
            {"kernel": "bias_add", "M": 64, "n_elements": 65536},
        ),
    ],
)
def test_a_size_may_have_the_name_of_its_sibling(record, other):
    calls = [records.launch_of(r)[0] for r in (record, other)]
    assert calls[0] == calls[1]


def test_rows_with_the_same_id_or_none_do_not_take_each_others_place():
    second = {**GEMV, "M": 8192, "latency_us": 1067.0}
    used, _ = rows.split([GEMV, second, {**GEMV, "id": None}, {k: v for k, v in second.items() if k != "id"}])
    assert [r.id for r in used] == ["mine", "mine#2", "?", "?#2"]
    p = parameters.current()
    predicted = {r.id: rows.predict_us(p, r) for r in used}
    assert predicted["mine#2"] > 2 * predicted["mine"]


def test_records_of_builds_that_ran_into_the_time_limit_claim_nothing():
    assert rows.split([{**GEMV, "latency_us": None, "status": "compile_timeout"}]) == ([], [])


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
        ({"emb_dim": None}, "no emb_dim"),
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


def published_model(**change):
    return {**json.loads(models.PUBLISHED_MODELS.read_text(encoding="utf-8"))["models"][0], **change}


def read_one(tmp_path, record):
    path = tmp_path / "models.json"
    path.write_text(json.dumps({"models": [record]}), encoding="utf-8")
    return models.read_models(path)


HF_CONFIG = {
    **{"model_type": "qwen3", "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16},
    **{"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936},
    **{"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "rope_theta": 1e6},
    **{"attention_bias": False, "tie_word_embeddings": True},
}


def test_no_model_is_known_by_its_name(tmp_path):
    ((first,), _, _) = read_one(tmp_path, published_model())
    ((other,), _, _) = read_one(tmp_path, published_model(id="mine", hf_id="acme/mine", date=None, x=[1]))
    assert (other.sizes, other.seq_len, other.ttft_s) == (first.sizes, first.seq_len, first.ttft_s)


def test_sizes_may_stand_in_a_config_as_hugging_face_has_it(tmp_path):
    flat = {"id": "mine", "ttft_s": 2.0, **HF_CONFIG}
    nested = {"id": "mine", "ttft_s": 2.0, "config": HF_CONFIG, "n_layers": None}
    found = [read_one(tmp_path, record).records[0].sizes for record in (flat, nested)]
    assert found[0] == found[1]
    assert found[0].qk_norm
    own = read_one(tmp_path, {**nested, "num_hidden_layers": 14}).records[0].sizes
    assert own.n_layers == 14, "what the record itself says comes first"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"deltas": ["sliding window 1024 on 5 of 6 layers"]}, "sliding window"),
        ({"deltas": "gelu_tanh glu"}, "activation gelu"),
        ({"deltas": ["partial rotary 96 of 128", "longrope"]}, "RoPE"),
        ({"emb_dim": None}, "read from the record or from its config"),
    ],
)
def test_a_model_out_of_scope_is_missed_with_the_reason(tmp_path, change, reason):
    found = read_one(tmp_path, published_model(**change))
    assert found.records == []
    ((_, why),) = found.unjudged
    assert reason in why


@pytest.mark.parametrize("weights", ["bf16", "BF16", "bfloat16", "bf16 safetensors", None])
def test_weights_in_bf16_are_judged_however_they_are_written(tmp_path, weights):
    assert len(read_one(tmp_path, published_model(weights=weights)).records) == 1


def test_a_model_without_figures_is_left_out_and_named(tmp_path):
    path = tmp_path / "models.json"
    path.write_text(json.dumps({"models": [{"id": "vision", "weights": "bf16"}]}), encoding="utf-8")
    assert models.read_models(path) == ([], [], [("vision", "no ttft_s and no time per token")])


BREAKDOWN = [
    {"model": "llama32_1b", "phase": "prefill", "component": "o_ffn", "kind": "elf", "per_call_ms": 40.0},
    {"model": "llama32_1b", "phase": "decode", "component": "time per token", "total_ms": 90.0},
]


def with_breakdown(tmp_path, lines):
    path = tmp_path / "models.json"
    record = json.loads(models.PUBLISHED_MODELS.read_text(encoding="utf-8"))["models"][0]
    path.write_text(json.dumps({"models": [record], "breakdown": lines}), encoding="utf-8")
    return models.read_models(path)


@pytest.mark.parametrize("line", [0, 1])
@pytest.mark.parametrize(
    "change", [{"per_call_ms": None, "total_ms": None}, {"per_call_ms": 0, "total_ms": 0}]
)
def test_a_line_of_a_breakdown_without_a_time_says_nothing(tmp_path, line, change):
    lines = [dict(entry) for entry in BREAKDOWN]
    lines[line].update(change)
    ((record,), unjudged, _) = with_breakdown(tmp_path, lines)
    assert unjudged == []
    assert len(record.programs) == (0 if line == 0 else 1)
    assert record.decode_ms == ((82.0, 90.0) if line == 0 else (82.0,))


@pytest.mark.parametrize("value", [-1.0, float("nan"), "fast", [], True])
@pytest.mark.parametrize(("line", "key"), [(0, "per_call_ms"), (1, "total_ms")])
def test_a_line_of_a_breakdown_with_garbage_is_named(tmp_path, line, key, value):
    lines = [dict(entry) for entry in BREAKDOWN]
    lines[line][key] = value
    found = with_breakdown(tmp_path, lines)
    assert found.records == []
    ((_, why),) = found.unjudged
    assert f"{lines[line]['component']}: {key} must be a positive number" in why


def test_constants_of_models_do_not_depend_on_the_kernel_fit_alone():
    """Leaving a model out must change the shared constants, else it was not in the fit."""
    values = dict(parameters.current())
    everything = fit.fit_models(MODELS, values)
    without = fit.fit_models([m for m in MODELS if m.id != "llama32_1b"], values)
    assert any(not math.isclose(everything[n], without[n], rel_tol=1e-4) for n in everything)
