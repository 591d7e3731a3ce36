"""Binding and running single launches: shapes, errors, choices, weight caching, and the harness itself."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from ml_dtypes import bfloat16

from llms.verify.reference.kernels import compare, make_inputs, offenders, reference_output, tolerance
from npu_twin.datapath import (
    SILICON,
    Arithmetic,
    arithmetic,
    current_arithmetic,
    prepare,
    run_launch,
    standalone_launch,
)
from npu_twin.memory import OperandView
from npu_twin.ops import OPS

SMALL = {
    "gemm": ({"M": 16, "K": 64, "N": 32}, ("drain", "fused-cast", "direct", "external")),
    "gemv": ({"M": 32, "K": 64}, ("external",)),
    "gemv_add": ({"M": 32, "K": 1024}, ("cascade",)),
    "norm_gateup_swiglu": ({"emb": 512, "hidden": 64}, ("cascade",)),
    "rms_norm": ({"M": 4, "N": 64}, ("weighted", "weighted_bf16_sum")),
    "layer_norm": ({"M": 4, "N": 64}, ("affine",)),
    "rope": ({"rows": 8, "head_dim": 64}, ("half_split", "interleaved")),
    "flash_attention": (
        {"lq": 256, "lk": 256, "head_dim": 64, "q_heads": 3, "kv_heads": 1},
        ("seq_first", "head_first"),
    ),
    "eltwise_add": ({"n": 512}, ("default",)),
    "bias_add": ({"rows": 4, "n": 64}, ("default",)),
    "silu_mul": ({"n": 512}, ("default",)),
    "gelu": ({"n": 512}, ("default",)),
}
EVERY = [(op, dims, method) for op, (dims, methods) in SMALL.items() for method in methods]


def bind(op, dims, method="default", inputs=None, **kw):
    """Operand views with harness inputs in them, and the launch."""
    launch = standalone_launch(op, dims, method=method, **kw)
    inputs = inputs if inputs is not None else make_inputs(op, dims, method=method)
    views = {}
    for name, spec in launch.signature().items():
        if name in inputs:
            array = inputs[name].view(np.uint16).reshape(spec.shape)
        else:
            array = np.zeros(spec.shape, np.uint16 if spec.dtype == "bf16" else np.float32)
        views[name] = OperandView.from_array(array)
    return launch, views


def test_every_operation_has_a_case():
    assert set(SMALL) == set(OPS)
    assert all(set(methods) >= set(OPS[op].methods) for op, (_, methods) in SMALL.items())


@pytest.mark.parametrize(("op", "dims", "method"), EVERY)
def test_every_method_passes_its_gate(op, dims, method):
    """Small shapes against the float32 reference at the kernel's own tolerance, all elements."""
    attrs = {"causal": True} if op == "flash_attention" else {}
    launch = standalone_launch(op, dims, method=method, attrs=attrs)
    inputs = make_inputs(op, dims, method=method)
    out = run_launch(launch, inputs)["out"]
    reference = reference_output(op, inputs, dims=dims, method=method, attrs=attrs)
    limit = tolerance(op, method)
    # K = 64 makes the GEMM outputs large against an absolute tolerance set for K of 768 and up.
    atol = 2e-2 if op == "gemm" else limit.atol
    assert offenders(out, reference, rtol=limit.rtol, atol=atol).count == 0
    assert compare(out, reference).mean_rel_L1 < 0.06


@pytest.mark.parametrize(("op", "dims", "method"), EVERY)
def test_poison_in_any_operand_reaches_the_output(op, dims, method):
    for name in (
        n for n, s in standalone_launch(op, dims, method=method).signature().items() if s.access == "read"
    ):
        inputs = make_inputs(op, dims, method=method)
        inputs[name].view(np.uint16).reshape(-1)[:] = 0x7FC0
        out = run_launch(standalone_launch(op, dims, method=method), inputs)["out"]
        assert np.isnan(out.astype(np.float32)).all(), f"{op}: NaN in {name} got lost"


@pytest.mark.parametrize(("op", "dims", "method"), EVERY)
def test_closure_reads_memory_when_it_runs_and_repeats_exactly(op, dims, method):
    launch, views = bind(op, dims, method)
    run = prepare(launch, views)
    run()
    first = views["out"].array.copy()
    run()
    assert np.array_equal(views["out"].array, first)
    for name, spec in launch.signature().items():
        if spec.access == "read":
            views[name].u16[...] = np.roll(views[name].u16.reshape(-1), 1).reshape(spec.shape)
            views[name].memory.changed()
    run()
    assert not np.array_equal(views["out"].array, first)


def test_quantised_weight_follows_the_device_memory():
    launch, views = bind("gemm", SMALL["gemm"][0], "external")
    run = prepare(launch, views)
    run()
    before = views["out"].f32.copy()
    views["b"].u16[...] += 0x80
    run()
    assert np.array_equal(views["out"].f32, before), "the weight was quantised again without a change"
    views["b"].memory.changed()
    run()
    assert np.array_equal(views["out"].f32, 2 * before)


def test_weight_cache_keeps_one_entry_of_half_the_f32_size():
    launch, views = bind("gemm", SMALL["gemm"][0], "drain")
    for _ in range(3):
        prepare(launch, views)()
    (kept,) = views["b"].memory.derived.values()
    assert kept.itemsize == 2


def test_choice_is_taken_when_the_launch_is_prepared():
    launch, views = bind("eltwise_add", {"n": 512})
    with arithmetic(rounding="nearest_even"):
        nearest = prepare(launch, views)
    floor = prepare(launch, views)
    floor()
    low = views["out"].u16.copy()
    nearest()
    assert not np.array_equal(views["out"].u16, low)
    floor()
    assert np.array_equal(views["out"].u16, low)


def test_choices_nest_and_end():
    assert current_arithmetic() == SILICON == Arithmetic()
    with arithmetic(exp2="exact"), arithmetic(tanh="exact") as chosen:
        assert chosen == Arithmetic(exp2="exact", tanh="exact")
    assert current_arithmetic() is SILICON


def test_unknown_choices_are_refused():
    with pytest.raises(TypeError, match=r"sine.*tanh"), arithmetic(sine="exact"):
        pass
    with pytest.raises(ValueError, match="exp2='good'"), arithmetic(exp2="good"):
        pass


def test_launch_rounding_decides():
    dims = {"n": 512}
    inputs = make_inputs("eltwise_add", dims)
    nearest = run_launch(standalone_launch("eltwise_add", dims, rounding="nearest_even"), inputs)["out"]
    exact = inputs["a"].astype(np.float32) + inputs["b"].astype(np.float32)
    assert np.array_equal(nearest, exact.astype(bfloat16))


def test_cast_launch_of_a_later_tool_chain_rounds_to_nearest():
    dims = {"M": 16, "K": 64, "N": 32}
    inputs = make_inputs("gemm", dims)
    attrs = {"cast_rounding": "nearest_even"}
    later = run_launch(standalone_launch("gemm", dims, method="fused-cast", attrs=attrs), inputs)
    drain = run_launch(standalone_launch("gemm", dims, method="drain"), inputs)["out"]
    now = run_launch(standalone_launch("gemm", dims, method="fused-cast"), inputs)
    assert np.array_equal(later["out"], drain)
    assert not np.array_equal(now["out"], drain)
    assert np.array_equal(now["scratch"], later["scratch"])


@pytest.mark.parametrize(
    ("op", "dims", "method", "message"),
    [
        ("gemm", {"M": 8, "K": 60, "N": 8}, "drain", r"K is 60.*multiple of 8"),
        ("rms_norm", {"M": 1, "N": 40}, "weighted", r"40 elements.*multiple of 16"),
        ("rope", {"rows": 2, "head_dim": 7}, "half_split", r"head_dim=7 is odd"),
        (
            "flash_attention",
            {"lq": 64, "lk": 320, "head_dim": 64, "q_heads": 1, "kv_heads": 1},
            "head_first",
            r"lk=320.*4 cascade stages",
        ),
        (
            "flash_attention",
            {"lq": 256, "lk": 256, "head_dim": 64, "q_heads": 3, "kv_heads": 2},
            "head_first",
            r"3 query heads do not share 2",
        ),
    ],
)
def test_impossible_dimensions_are_refused(op, dims, method, message):
    launch = standalone_launch(op, dims, method=method)
    shapes = {name: spec.shape for name, spec in launch.signature().items()}
    views = {name: OperandView.from_array(np.zeros(shape, np.uint16)) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        prepare(launch, views)


def test_wrong_operands_are_refused():
    launch, views = bind("eltwise_add", {"n": 512})
    with pytest.raises(ValueError, match="operand b is missing"):
        prepare(launch, {n: v for n, v in views.items() if n != "b"})
    views["b"] = OperandView.from_array(np.zeros(256, np.uint16))
    with pytest.raises(ValueError, match=r"operand b must be bf16\[512\], got bf16\[256\]"):
        prepare(launch, views)
    inputs = make_inputs("eltwise_add", {"n": 512})
    with pytest.raises(ValueError, match="reads b, which was not given"):
        run_launch(launch, {"a": inputs["a"]})
    with pytest.raises(ValueError, match="does not read c"):
        run_launch(launch, {**inputs, "c": inputs["a"]})
    with pytest.raises(TypeError, match="float64"):
        run_launch(launch, {**inputs, "b": np.zeros(512)})


def test_importing_the_datapaths_does_not_import_torch():
    code = "import sys, npu_twin.datapath, llms.verify.reference.kernels; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_metrics_follow_their_definition():
    out, reference = np.array([1.0, 2.5, 0.1]), np.array([1.0, 2.0, 0.0])
    found = compare(out, reference)
    assert found.mean_rel_L1 == pytest.approx(0.6 / 3.0)
    assert found.rel_err_max == pytest.approx(0.25)
    assert found.abs_err_max == pytest.approx(0.5)
    bad = offenders(out, reference, rtol=0.1, atol=0.2)
    assert (bad.count, bad.indices, bad.total) == (1, (1,), 3)
    assert bad.worst == pytest.approx(0.1)
    with pytest.raises(ValueError, match="shape"):
        compare(out, reference[:2])


def test_a_nan_breaks_the_gate():
    out, reference = np.array([np.nan, 0.0, np.inf]), np.zeros(3)
    assert offenders(out, reference, rtol=1.0, atol=1.0).indices == (0, 2)
    assert np.isnan(compare(out[:2], reference[:2]).mean_rel_L1)


def test_reference_and_twin_share_no_code():
    code = (
        "import sys, llms.verify.reference.kernels; "
        "others = ('npu_twin', 'kernel_registry', 'llms.llama_kernel_builder'); "
        "sys.exit(any(f'{m}.'.startswith(f'{name}.') for m in sys.modules for name in others))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
