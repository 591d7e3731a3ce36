"""Phase 1: every kernel at every shape a model needs, alone on the device, against its plain fp32 reference.

A test module of a model is::

    from llms import phase1

    pytestmark = pytest.mark.phase1
    pytest_generate_tests = phase1.generate_tests

    def test_kernel(kernel, npu_device, npu_lock, npu_record): ...

The shapes come from the model's blocks (see :func:`cases`); nothing heavy is imported to collect them.
Prefill lengths 128 and 256 are covered; with `slow` in the marker expression (`-m "phase1 and slow"`) all
lengths are.

Payload `phase1`, one per kernel: kernel, op, shape, method, tile, herd, cores, utilisation, row, provenance,
used_by, mean_rel_L1, baseline (value, limit, source), rtol, atol, elements (over, allowed, expected, total,
worst), status (`pass`, `in tier, n elements over`, `FAIL`), problems.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from kernel_registry import registry_lookup
from llms.llama_kernel_builder import kernels
from llms.llama_kernel_builder.block import Block
from llms.llama_kernel_builder.cache import KernelCache
from llms.llama_kernel_builder.deployment.session import artefact_folder
from llms.llama_kernel_builder.driver import current
from llms.llama_kernel_builder.kernels import Requirement, recording
from llms.llama_kernel_builder.llama_loop import BUCKETS, KernelSequence, buckets_of
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.llama_kernel_builder.program import Program, leaf_program
from llms.llama_kernel_builder.specs import KernelSpec
from llms.llama_kernel_builder.toolchains.seam import toolchain_for
from llms.verify.contract.outcome import Outcome
from llms.verify.gates.phase1 import kernel_laws
from llms.verify.reference.kernels import compare, make_inputs, offenders, reference_output, tolerance

QUICK_BUCKETS = BUCKETS[:2]
CORES = 32
"""Compute cores of an NPU2: 8 columns of 4 (AMD XDNA 2)."""


@dataclass(frozen=True)
class KernelCase:
    """One kernel at one shape. `model` is the folder's name, `eps` that of a norm, 0 for others."""

    model: str
    need: Requirement
    eps: float = 0.0

    def __str__(self) -> str:
        text = f"{self.need.op}-{'x'.join(map(str, self.need.shape))}"
        return text if self.eps in (0.0, 1e-5) else f"{text}-eps{self.eps:.4g}"

    @property
    def dims(self) -> dict[str, int]:
        """Dimensions by name."""
        return dict(zip(registry_lookup.DIMS[self.need.op], self.need.shape, strict=True))

    def spec(self) -> KernelSpec:
        """The kernel as the registry configures it. Raises UnmeasuredShape, naming the command to add it."""
        op, shape = self.need.op, self.need.shape
        if op == "gemm":
            M, K, N = shape
            dtype, precision = self.need.output_dtype, self.need.precision
            return kernels.gemm(M, K, N, output_dtype=dtype, precision=precision)
        if op == "rms_norm":
            return kernels.rms_norm(shape[0], shape[1], self.eps)
        if op == "flash_attention":
            return kernels.flash_attention(shape[0], *shape[2:])
        build: Any = getattr(kernels, op)
        found: KernelSpec = build(*shape)
        return found


def cases(
    model: str, sequence: KernelSequence, config: ModelConfig, buckets: Sequence[int] = QUICK_BUCKETS
) -> tuple[KernelCase, ...]:
    """Every kernel that these prefill lengths, decode and the LM head launch, each once."""
    built: list[Block] = []
    with recording() as needs:
        for seq_len in (size for size in buckets if size in buckets_of(config)):
            built += sequence.prefill_blocks(config, seq_len)
        built += [*sequence.decode_blocks(config), sequence.lm_head(config)]
    eps: dict[tuple[int, ...], dict[float, None]] = {}
    for spec in (step.spec for block in built for step in block.steps if step.spec.op == "rms_norm"):
        eps.setdefault((spec.dim("M"), spec.dim("N")), {})[float(dict(spec.attrs)["eps"])] = None
    return tuple(
        KernelCase(model, need, value)
        for need in needs
        for value in (eps[need.shape] if need.op == "rms_norm" else (0.0,))
    )


def generate_tests(metafunc: Any) -> None:
    """pytest's hook of a test module in `<model>/tests/`: one test per kernel and shape."""
    import pytest

    if "kernel" not in metafunc.fixturenames:
        return
    option = metafunc.config.getoption
    folder = Path(metafunc.module.__file__).resolve().parents[1]
    quick, every = model_cases(
        folder,
        checkpoint=option("checkpoint", None),
        choice=option("npu_model", None),
        buckets=BUCKETS if "slow" in str(option("markexpr", "") or "") else QUICK_BUCKETS,
    )
    parameters = [
        pytest.param(case, id=str(case), marks=() if case in quick else pytest.mark.slow) for case in every
    ]
    metafunc.parametrize("kernel", parameters)


def model_cases(
    folder: Path,
    *,
    checkpoint: Path | str | None = None,
    choice: str | None = None,
    buckets: Sequence[int] = QUICK_BUCKETS,
) -> tuple[frozenset[KernelCase], tuple[KernelCase, ...]]:
    """Cases of the quick lengths, and all cases of `buckets`, for what a model folder deploys."""
    from llms.verify.contract.deployment import load_adapter

    adapter = load_adapter(folder)
    sequence = adapter.inference.SEQUENCE
    quick: dict[KernelCase, None] = {}
    every: dict[KernelCase, None] = {}
    for config in deployed_configs(folder, adapter, checkpoint, choice):
        quick.update(dict.fromkeys(cases(folder.name, sequence, config)))
        every.update(dict.fromkeys(cases(folder.name, sequence, config, buckets)))
    return frozenset(quick), tuple(every)


def deployed_configs(
    folder: Path, adapter: Any, checkpoint: Path | str | None, choice: str | None
) -> list[ModelConfig]:
    """Configurations whose shapes count, found without network and without weights.

    A named checkpoint counts alone. Otherwise the configuration of the chosen variant (its config.json in the
    local HF cache, else the published one that the folder states), and for the default variant that of the
    tiny checkpoint, which the suite falls back to.
    """
    if checkpoint is not None and (Path(checkpoint) / "config.json").is_file():
        return [ModelConfig.from_hf_folder(Path(checkpoint))]
    wanted = choice or adapter.DEFAULT_MODEL
    cached = _cached_folder(str(adapter.resolve_model(wanted)))
    found = [adapter.CONFIG if cached is None else ModelConfig.from_hf_folder(cached)]
    tiny = folder / "tiny"
    if choice in (None, adapter.DEFAULT_MODEL) and (tiny / "config.json").is_file():
        found.append(ModelConfig.from_hf_folder(tiny))
    return found


def _cached_folder(hf_id: str) -> Path | None:
    import re

    if Path(hf_id, "config.json").is_file():
        return Path(hf_id)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", hf_id):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:  # an interpreter for silicon alone: kernels need numpy and nothing else
        return None
    path = try_to_load_from_cache(hf_id, "config.json")
    return Path(path).parent if isinstance(path, str) else None


def check(
    case: KernelCase, *, device: AbstractContextManager[Any] | None = None, artefacts: Path | None = None
) -> Outcome:
    """Run one kernel on the device and judge its whole output.

    Elements beyond the tolerance, no more than the arithmetic explains, pass with the status `in tier`:
    reports count them in the phase's row and list the kernels, the terminal has one line for all of them.
    `device` is held while the kernel runs, not while inputs and reference are computed.
    Raises CompileFailed, ArtefactMissing, KernelRunError from the toolkit.
    """
    try:
        spec = case.spec()
    except registry_lookup.UnmeasuredShape as error:
        payload: dict[str, Any] = {
            "kernel": str(case),
            "op": case.need.op,
            "shape": list(case.need.shape),
            "status": "FAIL",
        }
        return Outcome("phase1", False, {**payload, "problems": [str(error)]}, f"{case}: {error}")
    inputs = make_inputs(spec.op, case.dims, method=spec.method, tile=dict(spec.tile))
    output = run(case, spec, inputs, device, artefacts)
    payload = judge(case, spec, inputs, output)
    problems = payload["problems"]
    return Outcome.of("phase1", str(case), problems, payload)


def program_of(spec: KernelSpec) -> Program:
    """The ELF that launches one kernel alone."""
    return leaf_program(spec.symbol, spec)


def run(
    case: KernelCase,
    spec: KernelSpec,
    inputs: Mapping[str, Any],
    device: AbstractContextManager[Any] | None,
    artefacts: Path | None = None,
) -> Any:
    """The output of one launch in a program of its own, by the same cache and driver as a deployment's."""
    driver = current()
    folder = artefacts if artefacts is not None else artefact_folder(case.model) / "kernels"
    cache = KernelCache(folder, driver=driver, toolchain=toolchain_for(driver.name, case.model))
    program = program_of(spec)
    cache.compile_and_cache(program)
    arrays = [inputs.get(buffer.name) for buffer in program.buffers]
    with device if device is not None else nullcontext():
        try:
            return cache.load_and_run(program.name, *arrays)[program.index["out"]]
        finally:
            cache.close()


def judge(case: KernelCase, spec: KernelSpec, inputs: Mapping[str, Any], output: Any) -> dict[str, Any]:
    """Payload of one kernel; `problems` is empty when it passed."""
    attrs, tile, dims = dict(spec.attrs), dict(spec.tile), case.dims
    dtype = spec.signature()["out"].dtype
    reference = reference_output(spec.op, inputs, dims=dims, method=spec.method, attrs=attrs, out_dtype=dtype)
    gate = tolerance(spec.op, spec.method)
    metrics = compare(output, reference)
    over = offenders(output, reference, rtol=gate.rtol, atol=gate.atol)
    rows = registry_lookup.rows(spec.op, dims)
    base = kernel_laws.baseline(spec.op, spec.method, dims, tile, case.need.causal, over.total, rows)
    expected = kernel_laws.expected_over(spec.op, spec.method, dims, tile, gate.rtol, gate.atol)
    allowed = kernel_laws.most_over(expected, _published_over(rows, spec))
    used = configuring_row(spec, rows)
    problems = []
    if not metrics.mean_rel_L1 <= base.limit:
        problems.append(
            f"out of tier: mean_rel_L1 {metrics.mean_rel_L1:.3e}, limit {base.limit:.3e} ({base.source})"
        )
    if over.count > allowed:
        problems.append(
            f"{over.count} of {over.total} elements beyond rtol {gate.rtol:g}, atol {gate.atol:g}, at most "
            f"{allowed} explained; worst by {over.worst:.3e}, first at {list(over.indices[:3])}"
        )
    problems += row_problems(case, used)
    status = "FAIL" if problems else "pass"
    if over.count and not problems:
        status = f"in tier, {over.count} element{'s' if over.count > 1 else ''} over"
    return {
        "kernel": str(case),
        "op": spec.op,
        "shape": list(case.need.shape),
        "method": spec.method,
        "tile": tile,
        "herd": list(spec.herd),
        "cores": prod(spec.herd),
        "utilisation": prod(spec.herd) / CORES,
        "row": used["id"] if used else None,
        "provenance": used["provenance"] if used else None,
        "used_by": list(used.get("used_by", ())) if used else [],
        "mean_rel_L1": metrics.mean_rel_L1,
        "baseline": {"value": base.value, "limit": base.limit, "source": base.source},
        "rtol": gate.rtol,
        "atol": gate.atol,
        "elements": {
            "over": over.count,
            "allowed": allowed,
            "expected": round(expected, 2),
            "total": over.total,
            "worst": over.worst,
        },
        "status": status,
        "problems": problems,
    }


def _published_over(rows: Sequence[Mapping[str, Any]], spec: KernelSpec) -> int:
    counts = [
        int(row["figures"]["elements_over"] or 0)
        for row in rows
        if row["provenance"] == "published-silicon"
        and row["method"] == spec.method
        and (row.get("figures") or {}).get("elements_over") is not None
    ]
    return max(counts, default=0)


def configuring_row(spec: KernelSpec, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The registry row that configured this kernel: the lookup's choice where several say the same."""
    same = [
        row
        for row in rows
        if row["method"] == spec.method
        and tuple(row.get("herd") or ()) == spec.herd
        and (row.get("tile") or {}) == dict(spec.tile)
        and registry_lookup.usable(row)
    ]
    return min(same, key=registry_lookup.rank, default=None)


def row_problems(case: KernelCase, row: Mapping[str, Any] | None) -> list[str]:
    """What the registry does not say of a kernel that a model launches."""
    if row is None:
        return ["no row of the kernel registry has this configuration"]
    tags = [str(tag) for tag in row.get("used_by", ())]
    if any(tag == case.model or tag.startswith(f"{case.model}:") for tag in tags):
        return []
    shape = "x".join(map(str, case.need.shape))
    causal = " --causal" if case.need.causal else ""
    return [
        f"registry row {row['id']} does not say that {case.model} uses it; add it with: python -m "
        f"kernel_registry sweep {case.need.op} {shape}{causal} --if-missing --used-by {case.model}"
    ]
