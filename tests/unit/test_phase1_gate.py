"""Phase 1: which kernels are tested, what they are held against, and faults it must see."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from kernel_registry import registry_lookup
from llms.llama_kernel_builder import driver
from llms.llama_kernel_builder.bench import case_of, spec_of
from llms.llama_kernel_builder.kernels import Requirement
from llms.llama_kernel_builder.llama_loop import required_kernels
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.verify.contract.abilities import NotOffered
from llms.verify.contract.deployment import DeploymentError, load_adapter
from llms.verify.contract.kernel_case import KernelCase
from llms.verify.gates.phase1 import gate as phase1
from llms.verify.gates.phase1 import kernel_laws
from llms.verify.reference.kernels import make_inputs, reference_output
from llms.verify.reference.kernels import published as published_figures
from llms.verify.reference.kernels.published import FILE
from npu_twin import injection
from npu_twin.listing import Launch, Listing

LLMS = Path(__file__).resolve().parents[2] / "llms"
GEMM = case_of("smollm2_135m", Requirement("gemm", (128, 576, 576)), {})
NORM = case_of("qwen2", Requirement("rms_norm", (128, 256)), {"eps": 1e-6})
ROPE = case_of("qwen2", Requirement("rope", (512, 64)), {})
FLASH = case_of("qwen2", Requirement("flash_attention", (128, 128, 64, 4, 2), causal=True), {"causal": True})


@pytest.fixture(autouse=True)
def _twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_NPU_CACHE", str(tmp_path / "cache"))
    driver.select("twin")


def kernels(model: str, **options: Any) -> tuple[phase1.Kernel, ...]:
    return phase1.kernels(LLMS / model, load_adapter(LLMS / model), **options)


def check(case: KernelCase, bench: Any = None) -> Any:
    """The gate's verdict of one kernel, on the bench of a model of ours unless another is given."""
    bench = bench or load_adapter(LLMS / "qwen2").build_runner.__self__.kernel_bench()
    return phase1.check(phase1.Kernel(case, bench))


@pytest.mark.parametrize("model", ["smollm2_135m", "llama32_1b", "qwen2", "qwen3_0_6b"])
def test_every_required_kernel_has_its_test(model: str) -> None:
    tiny = LLMS / model / "tiny"
    sequence = load_adapter(LLMS / model).inference.SEQUENCE
    config = ModelConfig.from_hf_folder(tiny)
    cases = [kernel.case for kernel in kernels(model, checkpoint=tiny) if not kernel.slow]
    needs = {(need.op, need.shape) for need in required_kernels(sequence, config, (128, 256))}
    assert {(case.op, case.shape) for case in cases} == needs
    assert {dict(case.attrs)["eps"] for case in cases if case.op == "rms_norm"} == {config.rms_eps}
    ids = [str(case) for case in cases]
    assert len(set(ids)) == len(ids)
    assert all(spec_of(case).dim(name) == size for case in cases for name, size in case.dims.items())


def test_ids_read_like_the_kernel() -> None:
    assert [str(case) for case in (GEMM, NORM)] == ["gemm-128x576x576", "rms_norm-128x256-eps1e-06"]


def test_longer_prompts_add_slow_cases_only() -> None:
    every = kernels("qwen2")
    quick = [kernel.case for kernel in every if not kernel.slow]
    gemms = {kernel.case.shape[0] for kernel in every if kernel.slow and kernel.case.op == "gemm"}
    assert gemms == {512, 1024, 2048}
    assert {case.shape[0] for case in quick if case.op == "gemm"} == {128, 256}
    assert any(case.shape == (128, 896, 4864) for case in quick)  # published configuration
    assert any(case.shape == (128, 256, 512) for case in quick)  # tiny checkpoint


def test_a_named_checkpoint_counts_alone(tmp_path: Path) -> None:
    config = json.loads((LLMS / "qwen2" / "tiny" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    cases = [kernel.case for kernel in kernels("qwen2", checkpoint=tmp_path)]
    assert not any(case.op == "gemm" and 896 in case.shape for case in cases)
    assert {dict(case.attrs)["eps"] for case in cases if case.op == "rms_norm"} == {1e-5}


def test_collecting_imports_no_torch() -> None:
    code = (
        "import sys, pathlib; from llms import phase1\n"
        "from llms.verify.contract.deployment import load_adapter\n"
        f"folder = pathlib.Path({str(LLMS / 'qwen2')!r})\n"
        "assert phase1.kernels(folder, load_adapter(folder))\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("case", [NORM, ROPE, FLASH], ids=str)
def test_a_right_kernel_passes(case: KernelCase) -> None:
    outcome = check(case)
    assert outcome.ok, outcome.message
    assert outcome.payload["status"] == "pass"
    assert 0 < outcome.payload["utilisation"] <= 1
    assert outcome.payload["row"] is not None
    json.dumps(outcome.payload)


def test_elements_over_in_tier_pass_and_the_payload_says_so() -> None:
    outcome = check(GEMM)
    assert outcome.ok
    elements = outcome.payload["elements"]
    assert 0 < elements["over"] <= elements["allowed"] < 20
    assert outcome.payload["status"] == f"in tier, {elements['over']} elements over"


def judged(case: KernelCase, spoil: Callable[[Any], Any]) -> dict[str, Any]:
    """Payload for the reference itself with something done to it."""
    inputs = make_inputs(case.op, case.dims, method=case.method, tile=dict(case.tile))
    right = reference_output(case.op, inputs, dims=case.dims, method=case.method, attrs=dict(case.attrs))
    return phase1.judge(case, inputs, spoil(np.array(right))).payload


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
    case: KernelCase, change: Callable[[Listing], Listing], says: str
) -> None:
    with injection.rewrite_listing(change) as fault:
        outcome = check(case)
    assert fault.hits
    assert says in outcome.message


def test_wrong_heads_and_zeros() -> None:
    def swap(launch: Launch, views: Any) -> None:
        views["out"].u16[:, :128] = views["out"].u16[:, 128:].copy()

    def zero(launch: Launch, views: Any) -> None:
        views["out"].u16[...] = 0

    for change in (swap, zero):
        with injection.corrupt_launch(change):
            assert not check(FLASH).ok


def test_a_shape_without_a_row_names_the_command() -> None:
    outcome = check(case_of("qwen2", Requirement("gemm", (128, 512, 7)), {}))
    assert not outcome.ok
    assert "python -m kernel_registry sweep gemm 128x512x7" in outcome.message


def test_a_row_that_does_not_name_the_model() -> None:
    stranger = case_of("another_model", Requirement("rms_norm", NORM.shape), {"eps": 1e-6})
    found = judged(stranger, lambda out: out)
    assert found["status"] == "FAIL"
    assert "--if-missing --used-by another_model" in found["problems"][0]


@pytest.mark.parametrize("model", ["smollm2_135m", "llama32_1b", "qwen2", "qwen3_0_6b"])
def test_rows_of_all_lengths_name_the_model(model: str) -> None:
    """The slow cases too, whose kernels take long while their rows do not."""
    every = kernels(model)
    assert any(kernel.slow for kernel in every)
    for kernel in every:
        assert not phase1.row_problems(kernel.case)


def test_of_rows_that_say_the_same_the_best_is_the_one() -> None:
    """A published sweep over herds repeats the row of the kernel alone, without its users."""
    case = case_of("llama32_1b", Requirement("silu_mul", (16777216,)), {})
    same = [
        row["id"]
        for row in registry_lookup.rows("silu_mul", case.dims)
        if tuple(row["herd"] or ()) == case.herd and row["tile"] == dict(case.tile)
    ]
    assert len(same) > 1
    assert case.row is not None
    assert case.row.id in same
    assert not phase1.row_problems(case)


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
    return kernel_laws.law(row["op"], row["method"], row["dims"], tile, causal, elements(row))


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


def test_a_published_figure_of_the_same_shape_comes_first() -> None:
    shape = {"M": 2048, "K": 2048, "N": 2048}
    base = kernel_laws.baseline("gemm", "fused-cast", shape, {}, False, 2048 * 2048)
    assert base.source.startswith("published-silicon")
    assert base.value == 9.7e-3
    shape = {"M": 128, "K": 576, "N": 576}
    assert any(row["provenance"] == "twin" for row in registry_lookup.rows("gemm", shape))
    unpublished = kernel_laws.baseline("gemm", "drain", shape, {}, False, 10**6)
    assert unpublished == kernel_laws.law("gemm", "drain", shape, {}, False, 10**6)


def test_the_published_figures_are_those_of_the_rows_of_silicon() -> None:
    """The gate's copy has every published row that is right, and no other."""
    largest: dict[tuple[str, str, frozenset[tuple[str, int]], bool], tuple[float, int]] = {}
    for row in published():
        if row["status"] not in ("pass", "in_tier"):
            continue
        figures = row["figures"]
        causal = bool((row.get("attrs") or {}).get("causal"))
        key = (row["op"], row["method"], frozenset(row["dims"].items()), causal)
        mean, over = largest.get(key, (0.0, 0))
        largest[key] = (max(mean, figures["mean_rel_L1"]), max(over, figures.get("elements_over") or 0))
    stored = json.loads(FILE.read_text(encoding="utf-8"))["figures"]
    assert len(stored) == len(largest) > 150
    for (op, method, dims, causal), figures in largest.items():
        known = published_figures(op, method, dict(dims), causal)
        assert known is not None, (op, method, dims)
        assert (known.mean_rel_L1, known.elements_over) == figures, (op, method, dims)


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
        kernel_laws.baseline("gelu", "", {}, {}, False, 10)
    with pytest.raises(ValueError, match="no law for a GEMM of method 'loose'"):
        kernel_laws.baseline("gemm", "loose", {"M": 8, "K": 8, "N": 8}, {}, False, 64)


class OwnYardstick:
    """A bench that computes zeros and says in every way it can think of that this is right."""

    rtol = atol = 1e9
    published = baseline = 1e9

    def __init__(self) -> None:
        self.ran: list[KernelCase] = []

    def prepare(self, case: KernelCase) -> None:
        pass

    def tolerance(self, *arguments: Any) -> Any:
        raise AssertionError("a bench has no tolerance")

    reference_output = make_inputs = compare = offenders = judge = tolerance

    def run(self, case: KernelCase, inputs: Any) -> dict[str, Any]:
        self.ran.append(case)
        zeros = np.zeros((128, 256), np.float32)
        for values in inputs.values():
            values[...] = 0  # the reference is computed of what the gate made, not of what is left
        return {"out": zeros, "reference": zeros, "rtol": 1e9, "atol": 1e9, "mean_rel_L1": 0.0, "ok": True}


class LooseCase(KernelCase):
    """A case that carries figures of its own."""

    rtol = atol = limit = 1e9
    elements_over = 10**9
    problems = ()


@pytest.mark.parametrize("kind", [KernelCase, LooseCase])
def test_a_bench_that_brings_its_own_yardstick_is_not_heard(kind: type[KernelCase]) -> None:
    bench = OwnYardstick()
    fields = {name: getattr(NORM, name) for name in NORM.__dataclass_fields__}
    outcome = check(kind(**fields), bench)
    assert bench.ran
    assert not outcome.ok
    assert "out of tier: mean_rel_L1 1.000e+00" in outcome.message
    assert outcome.payload["rtol"] == 1.6e-2
    assert outcome.payload["baseline"] == judged(NORM, lambda out: out)["baseline"]


def test_a_figure_in_the_registry_sets_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that claims a published error of 0.5 configures the kernel; the limit stays what it is."""
    (row,) = (r for r in registry_lookup.rows("rope", ROPE.dims) if ROPE.row and r["id"] == ROPE.row.id)
    loose = {**row, "provenance": "published-silicon", "figures": {"mean_rel_L1": 0.5, "elements_over": 9**9}}
    (tmp_path / "details").mkdir()
    loose["id"] = row["id"].removesuffix(row["provenance"]) + "published-silicon"
    (tmp_path / "details" / "rope.json").write_text(json.dumps({"schema": 1, "op": "rope", "rows": [loose]}))
    before = judged(ROPE, lambda out: out)
    monkeypatch.setenv(registry_lookup.ENV, str(tmp_path))
    case = case_of("qwen2", Requirement("rope", (512, 64)), {})
    after = judged(case, lambda out: out * np.float32(1.2))
    assert after["row"] == loose["id"]
    assert after["baseline"] == before["baseline"]
    assert after["elements"]["allowed"] == before["elements"]["allowed"] == 0
    assert after["status"] == "FAIL"


class Without(OwnYardstick):
    """A bench whose output cannot be judged."""

    def __init__(self, outputs: dict[str, Any]) -> None:
        super().__init__()
        self.outputs = outputs

    def run(self, case: KernelCase, inputs: Any) -> dict[str, Any]:
        return self.outputs


def test_what_cannot_be_judged_fails() -> None:
    assert "no output 'out'" in check(NORM, Without({})).message
    assert (
        "the output has shape (3,), the kernel writes (128, 256)"
        in check(NORM, Without({"out": np.zeros(3)})).message
    )
    strange = replace(NORM, op="softmax")
    assert "no harness inputs for operation 'softmax'" in check(strange, Without({})).message
    assert "no row of a kernel registry" in judged(replace(NORM, row=None), lambda out: out)["problems"][0]


class Foreign:
    """An adapter as other projects write them: the contract and nothing else."""

    MODEL_CHOICES: ClassVar = {"one": "org/one"}

    @staticmethod
    def resolve_model(choice: str) -> str:
        return Foreign.MODEL_CHOICES.get(choice, choice)

    @staticmethod
    def build_runner(*arguments: Any, **options: Any) -> None:
        """Never called: a bench needs no runner."""


def test_an_adapter_without_the_ability_is_not_offered(tmp_path: Path) -> None:
    with pytest.raises(NotOffered, match=r"the adapter has no kernel_bench\(\)"):
        phase1.kernels(tmp_path, Foreign())


def test_a_bench_without_a_kernel_is_an_error(tmp_path: Path) -> None:
    class Empty(Foreign):
        @staticmethod
        def kernel_bench(folder: Path | None) -> Any:
            return type("Nothing", (), {"cases": lambda self: ()})()

    with pytest.raises(DeploymentError, match=r"kernel_bench\(\) of the adapter has no case"):
        phase1.kernels(tmp_path, Empty())
