"""Phase 1: every kernel at every shape a model needs, alone on the device, against its plain fp32 reference.

The adapter's ability `kernel_bench` says which kernels the model launches, and runs one. It only computes:
inputs, reference, tolerance and laws are those of `llms.verify`. An adapter without it gets "not offered".

A test module of a model imports `test_kernel` and `pytest_generate_tests` from `llms.verify.suite`. Nothing
heavy is imported to collect it. Kernels of prompts up to 256 tokens and of decode are covered; with `slow` in
the marker expression (`-m "phase1 and slow"`) those of all compiled lengths are.

Payload `phase1`, one per kernel: kernel, op, shape, method, tile, herd, cores, utilisation, row, provenance,
used_by, mean_rel_L1, baseline (value, limit, source), rtol, atol, elements (over, allowed, expected, total,
worst), status (`pass`, `in tier, n elements over`, `FAIL`), problems.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llms.verify.contract.abilities import NotOffered, needed
from llms.verify.contract.abilities.kernel_bench import KernelBench
from llms.verify.contract.deployment import DeploymentError, load_adapter
from llms.verify.contract.kernel_case import KernelCase
from llms.verify.contract.outcome import Outcome
from llms.verify.gates.phase1 import kernel_laws
from llms.verify.reference.kernels import (
    compare,
    make_inputs,
    offenders,
    published,
    reference_output,
    tolerance,
)

KIND = "phase1"
ABILITY = "kernel_bench"
QUICK_PROMPT = 256
"""Tokens of the longest prompt whose kernels are checked without `slow`."""
CORES = 32
"""Compute cores of an NPU2: 8 columns of 4 (AMD XDNA 2)."""


@dataclass(frozen=True)
class Kernel:
    """Parameter of a test: one kernel, and the bench of the deployment that runs it."""

    case: KernelCase
    bench: KernelBench = field(compare=False, repr=False)

    def __str__(self) -> str:
        return str(self.case)

    @property
    def slow(self) -> bool:
        """Whether only prompts longer than `QUICK_PROMPT` need it."""
        return self.case.prompt_len > QUICK_PROMPT


def generate_tests(metafunc: Any) -> None:
    """pytest's hook of a test module in `<model>/tests/`: one test per kernel and shape."""
    import pytest

    if "kernel" not in metafunc.fixturenames:
        return
    option = metafunc.config.getoption
    adapter = load_adapter(folder := Path(metafunc.module.__file__).resolve().parents[1])
    try:
        found = kernels(
            folder, adapter, checkpoint=option("checkpoint", None), choice=option("npu_model", None)
        )
    except NotOffered as error:
        reason = f"not offered: {error}"
        metafunc.parametrize("kernel", [pytest.param(None, id="not offered", marks=pytest.mark.skip(reason))])
        return
    every = "slow" in str(option("markexpr", "") or "")
    parameters = [
        pytest.param(kernel, id=str(kernel), marks=pytest.mark.slow if kernel.slow else ())
        for kernel in found
        if every or not kernel.slow
    ]
    metafunc.parametrize("kernel", parameters)


pytest_generate_tests = generate_tests


def kernels(
    folder: Path, adapter: Any, *, checkpoint: Path | str | None = None, choice: str | None = None
) -> tuple[Kernel, ...]:
    """Every kernel of the configurations that a model folder deploys, each once.

    Raises NotOffered for an adapter without `kernel_bench`, DeploymentError for a bench without a kernel.
    """
    make_bench = needed(adapter, ABILITY)
    found: dict[KernelCase, Kernel] = {}
    for config_folder in config_folders(folder, adapter, checkpoint, choice):
        bench = make_bench(config_folder)
        for case in bench.cases():
            if case not in found or case.prompt_len < found[case].case.prompt_len:
                found[case] = Kernel(case, bench)
    if not found:
        raise DeploymentError(f"{folder}: {ABILITY}() of the adapter has no case; a model launches kernels")
    return tuple(found.values())


def config_folders(
    folder: Path, adapter: Any, checkpoint: Path | str | None, choice: str | None
) -> list[Path | None]:
    """Folders whose `config.json` counts, found without network and without weights; None: the published one.

    A named checkpoint counts alone. Otherwise the configuration of the chosen variant (its config.json in the
    local HF cache, else the published one that the folder states), and for the default variant that of the
    tiny checkpoint, which the suite falls back to.
    """
    if checkpoint is not None and (Path(checkpoint) / "config.json").is_file():
        return [Path(checkpoint)]
    default = getattr(adapter, "DEFAULT_MODEL", None) or next(iter(adapter.MODEL_CHOICES))
    found = [_cached_folder(str(adapter.resolve_model(choice or default)))]
    tiny = folder / "tiny"
    if choice in (None, default) and (tiny / "config.json").is_file():
        found.append(tiny)
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


def check(kernel: Kernel, *, device: AbstractContextManager[Any] | None = None) -> Outcome:
    """Run one kernel on the device and judge its whole output.

    Elements beyond the tolerance, no more than the arithmetic explains, pass with the status `in tier`:
    reports count them in the phase's row and list the kernels, the terminal has one line for all of them.
    `device` is held while the kernel runs, not while it is compiled or inputs and reference are computed.
    Raises what the bench raises, such as CompileFailed, ArtefactMissing, KernelRunError of our toolkit.
    """
    case = kernel.case
    if case.unavailable:
        return _unjudged(case, case.unavailable)
    try:
        inputs = make_inputs(case.op, case.dims, method=case.method, tile=dict(case.tile))
    except (ValueError, KeyError) as error:
        return _unjudged(case, f"no test inputs for {case.op} of {case.dims}: {error}")
    kernel.bench.prepare(case)
    # The reference is computed of what was made here, whatever a bench does to its arrays.
    copies = {name: values.copy() for name, values in inputs.items()}
    with device if device is not None else nullcontext():
        outputs = kernel.bench.run(case, copies)
    if "out" not in outputs:
        return _unjudged(case, "the bench returned no output 'out'")
    return judge(case, inputs, np.asarray(outputs["out"]))


def _unjudged(case: KernelCase, problem: str) -> Outcome:
    payload = {"kernel": str(case), "op": case.op, "shape": list(case.shape), "status": "FAIL"}
    return Outcome(KIND, False, {**payload, "problems": [problem]}, f"{case}: {problem}")


def judge(case: KernelCase, inputs: Mapping[str, Any], output: Any) -> Outcome:
    """Hold the whole output of one kernel against its reference; the payload says what was found."""
    attrs, tile, dims = dict(case.attrs), dict(case.tile), case.dims
    causal = bool(attrs.get("causal", False))
    reference = reference_output(
        case.op, inputs, dims=dims, method=case.method, attrs=attrs, out_dtype=case.dtype_out
    )
    if output.shape != reference.shape:
        return _unjudged(case, f"the output has shape {output.shape}, the kernel writes {reference.shape}")
    gate = tolerance(case.op, case.method)
    metrics = compare(output, reference)
    over = offenders(output, reference, rtol=gate.rtol, atol=gate.atol)
    try:
        base = kernel_laws.baseline(case.op, case.method, dims, tile, causal, over.total)
        expected = kernel_laws.expected_over(case.op, case.method, dims, tile, gate.rtol, gate.atol)
    except ValueError as error:
        return _unjudged(case, str(error))
    known = published(case.op, case.method, dims, causal)
    allowed = kernel_laws.most_over(expected, known.elements_over if known else 0)
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
    problems += row_problems(case)
    status = "FAIL" if problems else "pass"
    if over.count and not problems:
        status = f"in tier, {over.count} element{'s' if over.count > 1 else ''} over"
    payload = {
        "kernel": str(case),
        "op": case.op,
        "shape": list(case.shape),
        "method": case.method,
        "tile": tile,
        "herd": list(case.herd),
        "cores": prod(case.herd),
        "utilisation": prod(case.herd) / CORES,
        "row": case.row.id if case.row else None,
        "provenance": case.row.provenance if case.row else None,
        "used_by": list(case.row.used_by) if case.row else [],
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
    return Outcome.of(KIND, str(case), problems, payload)


def row_problems(case: KernelCase) -> list[str]:
    """What the registry does not say of a kernel that a model launches."""
    if case.row is None:
        return ["no row of a kernel registry has this configuration"]
    if any(tag == case.model or tag.startswith(f"{case.model}:") for tag in case.row.used_by):
        return []
    return [
        f"registry row {case.row.id} does not say that {case.model} uses it"
        + (f"; add it with: {case.command}" if case.command else "")
    ]
