"""Phase 1: which kernels are tested, what they are held against, and faults it must see."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernel_registry import registry_lookup
from llms.llama_kernel_builder import driver
from llms.llama_kernel_builder.kernels import Requirement
from llms.llama_kernel_builder.llama_loop import required_kernels
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.verify.gates.phase1 import gate as phase1
from llms.verify.gates.phase1 import kernel_laws
from npu_twin import injection
from npu_twin.listing import Launch, Listing

LLMS = Path(__file__).resolve().parents[2] / "llms"
GEMM = phase1.KernelCase("smollm2_135m", Requirement("gemm", (128, 576, 576)))
NORM = phase1.KernelCase("qwen2", Requirement("rms_norm", (128, 256)), 1e-6)
ROPE = phase1.KernelCase("qwen2", Requirement("rope", (512, 64)))
FLASH = phase1.KernelCase("qwen2", Requirement("flash_attention", (128, 128, 64, 4, 2), causal=True))


@pytest.fixture(autouse=True)
def _twin() -> None:
    driver.select("twin")


@pytest.mark.parametrize("model", ["smollm2_135m", "llama32_1b", "qwen2", "qwen3_0_6b"])
def test_every_required_kernel_has_its_test(model: str) -> None:
    from llms.verify.contract.deployment import load_adapter

    sequence = load_adapter(LLMS / model).inference.SEQUENCE
    config = ModelConfig.from_hf_folder(LLMS / model / "tiny")
    found = phase1.cases(model, sequence, config)
    assert {case.need for case in found} == set(required_kernels(sequence, config, (128, 256)))
    assert {case.eps for case in found if case.need.op == "rms_norm"} == {config.rms_eps}
    ids = [str(case) for case in found]
    assert len(set(ids)) == len(ids)
    assert all(case.spec().dim(name) == size for case in found for name, size in case.dims.items())


def test_ids_read_like_the_kernel() -> None:
    assert [str(case) for case in (GEMM, NORM)] == ["gemm-128x576x576", "rms_norm-128x256-eps1e-06"]


def test_longer_prompts_add_slow_cases_only() -> None:
    quick, every = phase1.model_cases(LLMS / "qwen2", buckets=(128, 256, 512))
    assert quick < set(every)
    assert {case.need.shape[0] for case in set(every) - quick if case.need.op == "gemm"} == {512}
    assert any(case.need.shape == (128, 896, 4864) for case in quick)  # published configuration
    assert any(case.need.shape == (128, 256, 512) for case in quick)  # tiny checkpoint


def test_a_named_checkpoint_counts_alone(tmp_path: Path) -> None:
    quick, _ = phase1.model_cases(LLMS / "qwen2", checkpoint=LLMS / "llama32_1b" / "tiny")
    assert not any(case.need.op == "gemm" and 896 in case.need.shape for case in quick)
    assert {case.eps for case in quick} == {0.0, 1e-5}


def test_collecting_imports_no_torch() -> None:
    code = (
        "import sys, pathlib; from llms import phase1; "
        f"assert phase1.model_cases(pathlib.Path({str(LLMS / 'qwen2')!r}))[1]; "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("case", [NORM, ROPE, FLASH], ids=str)
def test_a_right_kernel_passes(case: phase1.KernelCase, tmp_path: Path) -> None:
    outcome = phase1.check(case, artefacts=tmp_path)
    assert outcome.ok, outcome.message
    assert outcome.payload["status"] == "pass"
    assert 0 < outcome.payload["utilisation"] <= 1
    assert outcome.payload["row"] is not None
    json.dumps(outcome.payload)


def test_elements_over_in_tier_pass_and_the_payload_says_so(tmp_path: Path) -> None:
    outcome = phase1.check(GEMM, artefacts=tmp_path)
    assert outcome.ok
    elements = outcome.payload["elements"]
    assert 0 < elements["over"] <= elements["allowed"] < 20
    assert outcome.payload["status"] == f"in tier, {elements['over']} elements over"


def judged(case: phase1.KernelCase, spoil: Callable[[Any], Any]) -> dict[str, Any]:
    """Payload for the reference itself with something done to it."""
    from llms.verify.reference.kernels import make_inputs, reference_output

    spec = case.spec()
    inputs = make_inputs(spec.op, case.dims, method=spec.method, tile=dict(spec.tile))
    right = reference_output(spec.op, inputs, dims=case.dims, method=spec.method, attrs=dict(spec.attrs))
    return phase1.judge(case, spec, inputs, spoil(np.array(right)))


def spoil_elements(count: int, value: float) -> Callable[[Any], Any]:
    def spoil(output: Any) -> Any:
        output.reshape(-1)[:count] += value
        return output

    return spoil


def test_more_elements_over_than_the_law_explains() -> None:
    allowed = judged(GEMM, lambda out: out)["elements"]["allowed"]
    assert judged(GEMM, spoil_elements(allowed, 0.1))["status"] == f"in tier, {allowed} elements over"
    over = judged(GEMM, spoil_elements(allowed + 1, 0.1))
    assert over["status"] == "FAIL"
    assert f"at most {allowed} explained" in over["problems"][0]
    assert "at most 0 explained" in judged(NORM, spoil_elements(1, 9.0))["problems"][0]


def test_values_that_are_not_finite() -> None:
    found = judged(ROPE, spoil_elements(1, float("nan")))
    assert found["status"] == "FAIL"
    assert any("out of tier: mean_rel_L1 nan" in text for text in found["problems"])


def test_a_common_factor_is_seen() -> None:
    assert "out of tier" in judged(NORM, lambda out: out * np.float32(1.07))["problems"][0]


def change_method(op: str, method: str, **attrs: Any) -> Callable[[Listing], Listing]:
    def change(listing: Listing) -> Listing:
        launches = tuple(
            replace(item, method=method or item.method, attrs={**item.attrs, **attrs})
            if item.op == op
            else item
            for item in listing.launches
        )
        return replace(listing, launches=launches)

    return change


@pytest.mark.parametrize(
    ("case", "change", "says"),
    [
        (GEMM, change_method("gemm", "direct"), "out of tier"),
        (ROPE, change_method("rope", "interleaved"), "out of tier"),
        (FLASH, change_method("flash_attention", "", causal=False), "out of tier"),
        (NORM, change_method("rms_norm", "", eps=0.1), "out of tier"),
    ],
    ids=["low precision", "interleaved rope", "no causal mask", "wrong eps"],
)
def test_device_that_runs_another_kernel(
    case: phase1.KernelCase, change: Callable[[Listing], Listing], says: str, tmp_path: Path
) -> None:
    with injection.rewrite_listing(change) as fault:
        outcome = phase1.check(case, artefacts=tmp_path)
    assert fault.hits
    assert says in outcome.message


def test_wrong_heads_and_zeros(tmp_path: Path) -> None:
    def swap(launch: Launch, views: Any) -> None:
        views["out"].u16[:, :128] = views["out"].u16[:, 128:].copy()

    def zero(launch: Launch, views: Any) -> None:
        views["out"].u16[...] = 0

    for change in (swap, zero):
        with injection.corrupt_launch(change):
            assert not phase1.check(FLASH, artefacts=tmp_path).ok


def test_a_shape_without_a_row_names_the_command(tmp_path: Path) -> None:
    outcome = phase1.check(phase1.KernelCase("qwen2", Requirement("gemm", (128, 512, 7))), artefacts=tmp_path)
    assert not outcome.ok
    assert "python -m kernel_registry sweep gemm 128x512x7" in outcome.message


def test_a_row_that_does_not_name_the_model() -> None:
    stranger = replace(NORM, model="another_model")
    found = judged(stranger, lambda out: out)
    assert found["status"] == "FAIL"
    assert "--if-missing --used-by another_model" in found["problems"][0]


@pytest.mark.parametrize("model", ["smollm2_135m", "llama32_1b", "qwen2", "qwen3_0_6b"])
def test_rows_of_all_lengths_name_the_model(model: str) -> None:
    """The slow cases too, whose kernels take long while their rows do not."""
    for case in phase1.model_cases(LLMS / model, buckets=phase1.BUCKETS)[1]:
        row = phase1.configuring_row(case.spec(), registry_lookup.rows(case.need.op, case.dims))
        assert not phase1.row_problems(case, row)


def test_of_rows_that_say_the_same_the_best_is_the_one() -> None:
    """A published sweep over herds repeats the row of the kernel alone, without its users."""
    need = Requirement("silu_mul", (16777216,))
    case = phase1.KernelCase("llama32_1b", need)
    rows = registry_lookup.rows("silu_mul", case.dims)
    for order in (rows, rows[::-1]):
        row = phase1.configuring_row(case.spec(), order)
        assert row is not None
        assert row["id"] == registry_lookup.silu_mul_config(16777216).row_id


def published() -> list[dict[str, Any]]:
    found = []
    for path in sorted((registry_lookup.PACKAGED / "details").glob("*.json")):
        for row in json.loads(path.read_text())["rows"]:
            figures = row.get("figures") or {}
            if row["provenance"] == "published-silicon" and figures.get("mean_rel_L1") is not None:
                found.append(row)
    return found


def elements(row: dict[str, Any]) -> int:
    d = row["dims"]
    if row["op"] == "gemm":
        return int(d["M"] * d["N"])
    return int(d["M"]) if row["op"] == "gemv" else int(np.prod(list(d.values())))


def law(row: dict[str, Any]) -> kernel_laws.Baseline:
    causal = bool((row.get("attrs") or {}).get("causal", False))
    tile = row.get("tile") or {}
    return kernel_laws.baseline(row["op"], row["method"], row["dims"], tile, causal, elements(row), ())


def test_the_laws_hold_for_every_published_row_that_is_right() -> None:
    ops = {"gemm", "gemv", "rms_norm", "rope", "eltwise_add", "silu_mul", "flash_attention"}
    rows = [row for row in published() if row["op"] in ops and row["status"] in ("pass", "in_tier")]
    rows = [row for row in rows if (row["op"], row["method"], row["dtype_out"]) != ("gemm", "direct", "f32")]
    assert len(rows) > 120
    for row in rows:
        base = law(row)
        figure = row["figures"]["mean_rel_L1"]
        assert figure <= base.limit, row["id"]
        if row["op"] != "gemv":
            assert 0.85 * base.value <= figure <= 1.1 * base.value, (row["id"], base)


def test_the_laws_refuse_every_published_row_that_is_corrupt() -> None:
    rows = [row for row in published() if row["status"] == "silent_corruption"]
    assert len(rows) >= 5
    assert all(row["figures"]["mean_rel_L1"] > law(row).limit for row in rows)


def test_a_published_figure_of_the_same_shape_comes_first_and_the_twins_never() -> None:
    shape = {"M": 2048, "K": 2048, "N": 2048}
    rows = registry_lookup.rows("gemm", shape)
    base = kernel_laws.baseline("gemm", "fused-cast", shape, {}, False, 2048 * 2048, rows)
    assert base.source.startswith("published-silicon")
    assert base.value == 9.7e-3
    twin = [{**row, "provenance": "twin", "figures": {"mean_rel_L1": 0.5}} for row in rows]
    assert (
        kernel_laws.baseline("gemm", "drain", shape, {}, False, 10**6, twin).value
        == kernel_laws.GEMM["drain"]
    )


@pytest.mark.parametrize(
    ("dims", "published_count"),
    [((2048, 1024, 3072), 1), ((2048, 896, 4864), 2), ((192, 64, 320), 2458), ((2048, 2048, 2048), 0)],
)
def test_the_law_of_elements_over_explains_what_was_published(
    dims: tuple[int, ...], published_count: int
) -> None:
    expected = kernel_laws.expected_over(
        "gemm", "drain", dict(zip("MKN", dims, strict=True)), {}, 1.6e-2, 1.5e-3
    )
    assert published_count <= kernel_laws.most_over(expected)
    assert kernel_laws.most_over(expected) <= 1.75 * published_count + 8


def test_attention_over_a_few_heads_may_have_an_element_over_and_a_fault_has_more() -> None:
    """128x128x128, 9 heads over 3: one element of an early row is over, by 0.005."""
    details = registry_lookup.PACKAGED / "details" / "flash_attention.json"
    published = [
        row
        for row in json.loads(details.read_text())["rows"]
        if row["provenance"] == "published-silicon" and row["status"] == "pass" and row["attrs"]["causal"]
    ]
    heads = sum(row["dims"]["q_heads"] for row in published)
    assert pytest.approx(3 / heads) == kernel_laws.FLASH_OVER_PER_HEAD
    dims = {"lq": 128, "lk": 128, "head_dim": 128, "q_heads": 9, "kv_heads": 3}
    allowed = kernel_laws.most_over(
        kernel_laws.expected_over("flash_attention", "head_first", dims, {}, 0.016, 0.1)
    )
    assert 1 <= allowed <= 4


def test_an_operation_without_a_law() -> None:
    with pytest.raises(ValueError, match="no law for the error of kernel 'gelu'"):
        kernel_laws.baseline("gelu", "", {}, {}, False, 10, ())
