"""The validation command: it keeps its limits on the published data and fails when something is wrong."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest

from npu_twin.timing import models, parameters, rows
from npu_twin.validate import __main__ as command
from npu_twin.validate import known, latency, limits, numerics, report


def records_of(kernel, count=None):
    found = [
        r
        for r in rows.read_records(rows.PUBLISHED_KERNELS)
        if r["kernel"] == kernel and r["status"] == "pass"
    ]
    return found[:count]


def write(path, key, content):
    path.write_text(json.dumps({key: content}, default=float), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def published():
    return command.validate(None, None, with_numerics=False, processes=1)


def test_the_published_latencies_keep_every_limit(published):
    assert published.failures() == []
    names = {k.name for k in published.kernels if k.judged}
    assert names >= {"gemm", "gemv", "rms_norm", "layer_norm", "rope", "flash_attention", "elementwise"}
    assert sum(len(k.counted) for k in published.kernels if k.judged) > 200


def test_only_the_norm_of_one_length_is_not_judged(published):
    """Four measurements of one shape, one of them under two ids; everything else counts."""
    excepted = [r.row for k in published.kernels if k.judged for r in k.results if r.excepted]
    assert [r.id for r in excepted] == ["k0260", "k0268", "k0269", "k0270", "k0271"]
    assert len({(r.call.herd, r.measured_us) for r in excepted}) == 4
    counted = {r.row.id for k in published.kernels for r in k.counted}
    assert counted >= {"k0081", "k0082", "k0084", "k0155", "k0211", "k0212", "k0213", "k0214"}


def test_rows_of_a_user_are_judged_under_the_table_of_exceptions_too():
    norm = [r for r in records_of("rmsnorm") if r["N"] == 2048]
    used, others = rows.split(norm)
    (result,) = latency.judge_rows(used, others, latency.shipped(used), calibrated_on=False)
    assert len(result.counted) == len(norm) == 5
    assert result.failures() == []
    slow = [{**r, "latency_us": float(r["latency_us"]) * 1.2} for r in norm]
    used, others = rows.split(slow)
    (result,) = latency.judge_rows(used, others, latency.shipped(used), calibrated_on=False)
    assert len(result.failures()) == 5


def test_every_model_is_within_its_limit(published):
    assert len(published.models.results) == 6
    assert published.models.failures() == []


def test_the_report_names_what_it_does_not_judge(published):
    text = report.text(published, verbose=True)
    for identity in ("k0155", "k0260", "k0081", "k0211"):
        assert identity in text
    assert "cross-validated" in text
    assert "all limits are kept" in text
    assert "| gemm |" in report.markdown(published)


@pytest.mark.parametrize(
    ("name", "share", "victim"),
    [
        ("gemm.ddr_gbps", 0.8, "gemm"),
        ("gemv.ddr_gbps", 0.85, "gemv"),
        ("attention.product_ns", 1.5, "flash_attention"),
        ("rope.element_ns", 1.4, "rope"),
        ("stream.ddr_gbps", 0.7, "elementwise"),
        ("norm.rms_ns", 1.2, "rms_norm"),
        ("norm.layer_ns", 1.2, "layer_norm"),
    ],
)
def test_a_wrong_parameter_is_noticed(name, share, victim):
    used, others = rows.split(rows.read_records(rows.PUBLISHED_KERNELS))
    p = {**parameters.current()}
    p[name] *= share
    predictions = {row.id: rows.predict_us(p, row) for row in used}
    failures = [f for k in latency.judge_rows(used, others, predictions) for f in k.failures()]
    assert any(f.startswith(victim) for f in failures)


def test_a_wrong_shared_constant_is_noticed_at_model_level():
    records = models.read_models(models.PUBLISHED_MODELS).records
    folds = {r.id: (1.5 * r.ttft_s[0], r.decode_ms[0]) for r in records}
    failures = latency.judge_models(models.ModelFile(records, [], []), folds).failures()
    assert len([f for f in failures if "ttft_s" in f]) == len(records) + 1


def test_a_file_of_the_user_is_judged_with_the_shipped_parameters(tmp_path, capsys):
    mine = records_of("rope")
    for record in mine:
        record["latency_us"] = float(record["latency_us"]) * 1.5
    path = write(tmp_path / "mine.json", "records", mine)
    before = parameters.DATA_FILE.read_bytes()
    code = command.main(["--rows", str(path), "--no-numerics", "--output", str(tmp_path / "out")])
    assert code == 1
    out = capsys.readouterr().out
    assert "parameters as shipped" in out
    assert "MISSED  rope" in out
    assert parameters.DATA_FILE.read_bytes() == before


def test_a_good_file_of_the_user_passes_and_is_written(tmp_path, capsys):
    path = write(tmp_path / "mine.json", "records", records_of("rope"))
    target = tmp_path / "result.json"
    arguments = [
        "--rows",
        str(path),
        "--no-numerics",
        "--output",
        str(tmp_path / "out"),
        "--json",
        str(target),
    ]
    assert command.main(arguments) == 0
    found = json.loads(target.read_text(encoding="utf-8"))
    assert found["passed"]
    assert found["clock"] == "twin (modelled)"
    assert {k["kernel"] for k in found["kernels"]} == {"rope"}
    assert (tmp_path / "out" / "latency_rope.svg").stat().st_size > 1000
    assert (tmp_path / "out" / "tables.md").exists()
    assert "all limits are kept" in capsys.readouterr().out


def test_rows_that_cannot_be_judged_count_as_missed(tmp_path, capsys):
    mine = [*records_of("rope"), {"id": "mine1", "kernel": "rope", "latency_us": 100.0, "status": "pass"}]
    path = write(tmp_path / "mine.json", "records", mine)
    assert command.main(["--rows", str(path), "--no-numerics", "--output", str(tmp_path / "out")]) == 1
    assert "mine1 could not be judged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        ('{"records": []}', 2, "expected {"),
        ("[]", 2, "expected {"),
        ("null", 2, "expected {"),
        ('{"records": [{"id": "a", "kernel": "gemm", "status": "compile_fail"}]}', 1, "no row that could be"),
        ('{"records": [{}]}', 1, "row ? could not be judged: unknown kernel ''"),
    ],
)
def test_nothing_to_judge_is_never_a_pass(tmp_path, capsys, content, code, says, monkeypatch):
    monkeypatch.setattr(
        latency,
        "cross_validated_models",
        lambda records: {r.id: (r.ttft_s[0], r.decode_ms[0]) for r in records},
    )
    path = tmp_path / "mine.json"
    path.write_text(content, encoding="utf-8")
    try:
        found = command.main(["--rows", str(path), "--no-numerics", "--output", str(tmp_path / "out")])
    except SystemExit as stop:
        found = stop.code
    assert found == code
    out = capsys.readouterr()
    assert says in out.out + out.err


def test_models_that_are_left_out_are_named(tmp_path, capsys):
    record = json.loads(models.PUBLISHED_MODELS.read_text(encoding="utf-8"))["models"][1]
    others = [{**record, "id": "mine_q4", "weights": "q4nx"}, {"id": "vision", "weights": "bf16"}]
    path = write(tmp_path / "models.json", "models", [record, *others])
    rope = write(tmp_path / "rows.json", "records", records_of("rope"))
    arguments = ["--rows", str(rope), "--models", str(path), "--no-numerics", "--output", str(tmp_path / "o")]
    assert command.main(arguments) == 0
    out = capsys.readouterr().out
    assert "mine_q4: weights q4nx, not bf16" in out
    assert "vision: no ttft_s and no time per token" in out
    write(tmp_path / "models.json", "models", others)
    assert command.main(arguments) == 1
    assert "none with bf16 weights and figures" in capsys.readouterr().out


def test_garbage_error_figures_are_incomplete_rows():
    (record,) = [r for r in small_records() if r["id"] == "k0302"]
    for change in ({"mean_rel_L1": "small"}, {"abs_err_max": float("nan")}, {"n_elements": 1 << 31}):
        judged = numerics.judge([{**record, **change}], processes=1, quiet=True)
        assert judged.failures(), change


def test_a_kernel_with_few_shapes_is_judged_row_by_row(tmp_path):
    mine = records_of("rope", 3)
    mine[2]["latency_us"] = float(mine[2]["latency_us"]) * 1.3
    used, others = rows.split(mine)
    (result,) = latency.judge_rows(used, others, latency.shipped(used))
    assert result.limit_text == "each 10%"
    assert [f for f in result.failures() if mine[2]["id"] in f]


def test_an_unreadable_file_is_a_usage_error(tmp_path, capsys):
    path = tmp_path / "broken.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(SystemExit) as caught:
        command.main(["--rows", str(path), "--no-numerics"])
    assert caught.value.code == 2
    assert "broken.json" in capsys.readouterr().err


def test_short_runs_may_be_off_by_a_fixed_time():
    assert limits.relative_error(94.0, 80.0) == 0.0
    assert limits.relative_error(96.0, 80.0) == pytest.approx(0.2)
    assert limits.relative_error(144.0, 130.0) > 0.1


def test_quantiles():
    assert limits.quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert limits.quantile([0.0, 1.0], 0.9) == pytest.approx(0.9)
    with pytest.raises(ValueError, match="no values"):
        limits.quantile([], 0.5)


@pytest.mark.parametrize(
    ("value", "published", "agrees"),
    [
        (0.009264, "0.00926", True),
        (0.009271, "0.00926", False),
        (0.01026, "0.01", True),  # printed as 1.0e-2: two digits
        (0.0106, "0.01", False),
        (0.1875, "0.19", True),
        (float("nan"), "0.19", False),
        (1274.0, "1300.0", True),
        (0.00945012, "0.00945", True),
    ],
)
def test_printed_digits(value, published, agrees):
    assert numerics.agrees_in_print(value, Decimal(published)) is agrees


SMALL = ("k0003", "k0219", "k0267", "k0360", "k0302", "k0272", "k0380", "k0335")


def small_records():
    return [r for r in rows.read_records(rows.PUBLISHED_KERNELS) if r["id"] in SMALL]


def test_small_rows_are_reproduced():
    judged = numerics.judge(small_records(), processes=1, quiet=True)
    assert len(judged.rows) == len(SMALL)
    assert judged.failures() == []


def test_another_figure_is_noticed():
    records = small_records()
    for record in records:
        record["mean_rel_L1"] = Decimal(str(record["mean_rel_L1"])) * Decimal("1.2") + Decimal("1e-4")
    judged = numerics.judge([r for r in records if r["kernel"] != "gemv"], processes=1, quiet=True)
    assert not any(r.reproduced for r in judged.rows)


def test_another_arithmetic_is_noticed():
    from npu_twin.datapath import arithmetic

    with arithmetic(rounding="nearest_even"):
        judged = numerics.judge(
            [r for r in small_records() if r["kernel"] == "rope"], processes=1, quiet=True
        )
    assert judged.failures()


def test_rows_that_cannot_differ_share_a_computation():
    tasks = [numerics.make_task(r) for r in records_of("gemm") if r.get("mean_rel_L1") is not None]
    assert len({t.key for t in tasks if t}) < 0.95 * len(tasks)


def test_a_gate_verdict_is_part_of_the_row():
    record = next(r for r in rows.read_records(rows.PUBLISHED_KERNELS) if r["id"] == "k0017")
    task = numerics.make_task(record)
    assert task is not None
    (found,) = numerics.measure([task])
    assert numerics.judge_row(record, task, found).reproduced
    assert not numerics.judge_row({**record, "status": "pass"}, task, found).reproduced


def test_figures_of_another_script_are_told_apart():
    record = {"kernel": "gemm", "method": "fused-cast", "M": 2048, "K": 2560, "N": 10240}
    assert "another script" in known.reason(record)
    assert known.reason({**record, "N": 1024}) == ""
    assert "random inputs" in known.reason({**record, "N": 1024, "note": "other random inputs than the row"})


def test_a_document_gets_its_tables(published):
    names = report.tables(published)
    document = "".join(f"# {n}\n<!-- {n} -->\nbefore-this\n<!-- /{n} -->\n" for n in names) + "end\n"
    found = report.refresh(document, published)
    assert "before-this" not in found
    assert found.endswith("end\n")
    assert "`gemm.ddr_gbps`" in found
    assert "| two-copies | bo.sync" in found
    assert "| T1 | every launch carries" in found
    assert report.refresh(found, published) == found
    with pytest.raises(ValueError, match="kernels"):
        report.refresh("nothing here", published)


def test_the_page_of_the_twin_has_the_tables_of_now(published):
    """`python -m npu_twin.validate --docs docs/twin.md` was run after the last change."""
    page = (Path(__file__).parents[2] / "docs" / "twin.md").read_text(encoding="utf-8")
    for name, table in report.tables(published).items():
        found = page.split(f"<!-- {name} -->\n", 1)[1].split(f"\n<!-- /{name} -->", 1)[0]
        if name in ("kernels", "models"):  # another platform may round a fitted figure otherwise
            found, table = ([line.split("|")[1:3] for line in text.splitlines()] for text in (found, table))
        assert found == table, name


@pytest.mark.slow
def test_everything_published(tmp_path, capsys):
    """All published rows and models, error figures included: what `python -m npu_twin.validate` does."""
    assert command.main(["--output", str(tmp_path)]) == 0
    assert "all limits are kept" in capsys.readouterr().out
