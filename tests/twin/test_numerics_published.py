"""The twin against every kind of published error figure, to the digits that were printed.

The judge is ``published_numerics.json`` and the plain float32 references of the harness, never an earlier
output of the twin. The second half flips one choice of the arithmetic at a time: each must break its check.
"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from llms.verify.reference.kernels import compare, make_inputs, offenders, reference_output
from npu_twin.datapath import arithmetic, run_launch, standalone_launch

PUBLISHED = json.loads(Path(__file__).with_name("published_numerics.json").read_text(encoding="utf-8"))
ROWS = {row["id"]: row for row in PUBLISHED["rows"]}
FITTED = {"silu_mul", "gelu"}


def run(row):
    """Output and reference of a row, both f32."""
    op, dims, method = row["op"], row["dims"], row["method"]
    tile, attrs = row.get("tile", {}), row.get("attrs", {})
    launch = standalone_launch(op, dims, method=method, tile=tile, attrs=attrs)
    inputs = make_inputs(op, dims, method=method, tile=tile)
    out = run_launch(launch, inputs)["out"]
    out_dtype = "f32" if out.dtype == np.float32 else "bf16"
    reference = reference_output(op, inputs, dims=dims, method=method, attrs=attrs, out_dtype=out_dtype)
    return out.astype(np.float32), reference


def agrees_in_print(value, published):
    """Whether ``value``, rounded to as many digits as were printed, reads like ``published``."""
    exact = Decimal(published)
    unit = Decimal(1).scaleb(exact.as_tuple().exponent)
    return abs(Decimal(value) - exact) <= unit * Decimal("0.5001")


def within(value, published, share):
    return abs(value - float(published)) <= share * float(published)


def misses(row):
    """The figures of a row that the twin does not reproduce, as readable sentences."""
    found = compare(*run(row))
    wrong = []

    def require(name, holds):
        value = getattr(found, name)
        if name in row and not holds(value, row[name]):
            wrong.append(f"{name} {value:.4e}, published {row[name]}")

    if row["op"] == "gemv":
        # Where the reference's own summation order decides, a handful of elements differ by one bf16 step.
        limit = 2e-6 + 1.1 * float(row["mean_rel_L1"])
        require("mean_rel_L1", lambda v, p: v <= limit)
        if "abs_err_max" in row:
            require("mean_rel_L1", lambda v, p: v <= 2e-9)
            require("rel_err_max", lambda v, p: v <= 2.0**-7)
    elif row["op"] == "flash_attention":
        require("mean_rel_L1", lambda v, p: within(v, p, 0.01) or agrees_in_print(v, p))
        require("abs_err_max", lambda v, p: within(v, p, 0.12))
    elif row["op"] in FITTED:
        require("mean_rel_L1", lambda v, p: within(v, p, 0.01))
        require("abs_err_max", agrees_in_print)
    else:
        for name in ("mean_rel_L1", "rel_err_max", "abs_err_max"):
            require(name, agrees_in_print)
    return wrong


def params():
    return [
        pytest.param(row, id=key, marks=[pytest.mark.slow] if row.get("slow") else [])
        for key, row in ROWS.items()
    ]


@pytest.mark.parametrize("row", params())
def test_published_figures(row):
    assert misses(row) == []


def test_gemv_row_is_exact_to_the_last_digit():
    """The one row whose two differing elements are published too: 1.6e-9, 4.4e-3 and 2.0e-3."""
    row = ROWS["gemv-2048x2048"]
    launch = standalone_launch("gemv", row["dims"], method="external")
    inputs = make_inputs("gemv", row["dims"])
    out = run_launch(launch, inputs)["out"].astype(np.float64)
    exact = inputs["w"].astype(np.float64) @ inputs["x"].astype(np.float64)
    half_step = np.abs(exact) * 2.0**-8
    assert np.all(np.abs(out - exact) <= half_step * 1.0001), "an element is not the nearest bf16"


GATE = PUBLISHED["gate"]


@pytest.mark.parametrize("row", GATE["rows"], ids=lambda r: "x".join(map(str, r["dims"].values())))
def test_gate_offenders(row):
    out, reference = run({"op": "gemm", **row})
    found = offenders(out, reference, rtol=float(GATE["rtol"]), atol=float(GATE["atol"]))
    if "percent" in row:
        assert agrees_in_print(100 * found.fraction, row["percent"])
        return
    assert found.count == row["count"]
    for error, published in zip(sorted(found.abs_errors), row.get("abs_errors", ()), strict=True):
        assert agrees_in_print(error, published)


FLIPS = [
    ("eltwise-add-1M", {"rounding": "nearest_even"}),
    ("rope-256x64", {"rounding": "nearest_even"}),
    ("rms-norm-256x960", {"rounding": "nearest_even"}),
    ("layer-norm-1024x768", {"rounding": "nearest_even"}),
    ("gemv-512x2048", {"rounding": "floor"}),
    ("silu-mul-2M", {"rounding": "nearest_even"}),
    ("gelu-1M", {"rounding": "nearest_even"}),
    ("gemm-fused-cast-1024x1024x1024", {"cast_rounding": "nearest_even"}),
    ("gemm-drain-1024x768x768", {"rounding": "floor"}),
    ("gemm-direct-1024x768x3072", {"rounding": "floor"}),
    ("gemm-drain-64x12288x960", {"block_overflow": "saturate"}),
    ("gemm-external-1024x1024x1024", {"block_bits": 7}),
    ("gemm-drain-64x720x320", {"block_bits": 7}),
    ("gemm-drain-64x720x320", {"block_bits": 9}),
    ("gemm-drain-64x720x320", {"block_bits": None}),
    ("gemm-direct-1024x768x3072", {"direct_cast": "per_l2"}),
    ("gemm-direct-1024x768x3072", {"direct_cast": "once"}),
    ("flash-attention-512-d64-2-2", {"exp2": "exact"}),
    ("flash-attention-512-d64-2-2", {"block_bits": 7}),
    ("silu-mul-2M", {"tanh": "exact"}),
    ("gelu-1M", {"tanh": "exact"}),
]


@pytest.mark.parametrize(
    ("key", "change"), FLIPS, ids=[f"{k}-{next(iter(c))}={next(iter(c.values()))}" for k, c in FLIPS]
)
def test_each_choice_is_seen(key, change):
    """Anything but the silicon's choice must miss a published figure."""
    with arithmetic(**change):
        assert misses(ROWS[key]), f"{key} does not notice {change}"


def test_gate_counts_see_the_block_bits():
    row = GATE["rows"][2]
    with arithmetic(block_bits=7):
        out, reference = run({"op": "gemm", **row})
    found = offenders(out, reference, rtol=float(GATE["rtol"]), atol=float(GATE["atol"]))
    assert found.count != row["count"]


DECODE_NORM_FACTOR = {896: 1.036, 1024: 1.040, 1536: 1.059, 2048: 1.072, 2560: 1.089, 3072: 1.108}


def _decode_norm_factor(n):
    """Common factor by which the bf16-sum norm exceeds the f32-sum norm, over 200 rows."""
    dims = {"M": 200, "N": n}
    inputs = make_inputs("rms_norm", dims)
    out, plain = (
        run_launch(standalone_launch("rms_norm", dims, method=m), inputs)["out"].astype(np.float64)
        for m in ("weighted_bf16_sum", "weighted")
    )
    return float((out * plain).sum() / (plain * plain).sum())


@pytest.mark.parametrize("n", sorted(DECODE_NORM_FACTOR))
def test_decode_norm_with_bf16_sum_is_too_large(n):
    """No silicon figure exists; the source reports about 9 % at K=2048 for a pure bf16 sum."""
    assert _decode_norm_factor(n) == pytest.approx(DECODE_NORM_FACTOR[n], abs=0.004)


@pytest.mark.parametrize("change", [{"bf16_sum": "f32"}, {"rounding": "nearest_even"}])
def test_decode_norm_factor_sees_the_choice(change):
    with arithmetic(**change):
        assert abs(_decode_norm_factor(2048) - 1) < 0.01
