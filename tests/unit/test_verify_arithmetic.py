"""The reference's arithmetic on its own: definitions by brute force, properties, and published error figures.

Published figures are mean relative L1 errors of the kernel registry of Xilinx/mlir-air e972f2942, with its
inputs and its float32 reference.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from llms.verify.reference.arithmetic import (
    AttentionArithmetic,
    DescriptionError,
    LinearArithmetic,
    PhaseArithmetic,
    attention,
    elementwise,
    products,
    rounding,
)
from llms.verify.reference.arithmetic.description import LINEARS
from llms.verify.reference.kernels import compare, make_inputs, reference_output

F32 = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**120), max_value=2.0**120)


def tensor(array: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(array).view(np.int16).copy()).view(torch.bfloat16)


def numbers(value: Any) -> np.ndarray:
    return value.float().numpy()


@given(F32)
def test_floor_is_the_largest_bf16_below(x: float) -> None:
    result = float(rounding.floor_bf16(torch.tensor([x]))[0])
    above = float(np.nextafter(np.array(result, bfloat16), np.array(np.inf, bfloat16)))
    assert result <= np.float32(x)
    assert above > np.float32(x)


def test_floor_at_the_ends() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 3.4e38, -1e-45, 0.0])
    result = numbers(rounding.floor_bf16(x))
    assert np.isnan(result[0])
    assert result[1] == np.inf
    assert result[2] == -np.inf
    assert np.isfinite(result[3])
    assert result[4] < 0
    assert result[5] == 0


def block_by_hand(values: list[float]) -> list[float]:
    """The definition, one block at a time in Python numbers."""
    peak = max(abs(v) for v in values)
    if peak == 0:
        return [0.0] * len(values)
    exponent = math.floor(math.log2(peak))
    while True:
        step = 2.0 ** (exponent - 6)
        mantissas = [round(v / step) for v in values]  # Python rounds halves to even
        if all(-128 <= m <= 127 for m in mantissas):
            return [m * step for m in mantissas]
        exponent += 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=16, allow_nan=False, allow_infinity=False), min_size=8, max_size=8))
def test_block_quantisation_by_hand(values: list[float]) -> None:
    exact = torch.tensor(values).to(torch.bfloat16).float()
    assert products.block_quantise(exact).tolist() == block_by_hand(exact.tolist())


def test_block_quantisation_raises_the_exponent_instead_of_saturating() -> None:
    x = torch.tensor([1.9921875, 1.0, 0.015625, -0.015625, 0, 0, 0, 0])
    assert products.block_quantise(x).tolist() == block_by_hand(x.tolist())
    assert products.block_quantise(x)[0] == 2.0


def test_a_quantised_weight_is_exact_in_bf16_and_a_poisoned_block_is_nan() -> None:
    weight = torch.randn(16, 64).to(torch.bfloat16)
    assert torch.equal(products.quantised_weight(weight).float(), products.block_quantise(weight.float()))
    weight[3, 9] = math.inf
    poisoned = products.quantised_weight(weight)
    assert poisoned[3, 8:16].isnan().all()
    assert int(poisoned.isnan().sum()) == 8


def test_blocks_need_whole_k() -> None:
    with pytest.raises(ValueError, match="blocks of 8"):
        products.block_quantise(torch.zeros(2, 12))


def test_gemv_rounds_once_from_f32() -> None:
    w, x = torch.randn(64, 512).to(torch.bfloat16), torch.randn(1, 512).to(torch.bfloat16)
    exact = (w.double() @ x[0].double()).float()
    result = products.gemv(x, w, LinearArithmetic("gemv"))[0]
    ulp = 2.0 ** (torch.floor(torch.log2(exact.abs().clamp_min(2.0**-6))) - 7)
    assert ((result.float() - exact).abs() <= 0.52 * ulp).all()


@pytest.mark.parametrize(
    ("op", "dims", "published", "tolerance"),
    [
        ("gemm", {"M": 512, "K": 512, "N": 512}, 9.273e-3, 1e-3),
        ("rms_norm", {"M": 256, "N": 960}, 4.205e-3, 1e-3),
        ("rope", {"rows": 256, "head_dim": 64}, 2.778e-3, 1e-3),
        ("eltwise_add", {"n": 1 << 20}, 1.88e-3, 5e-3),
        ("silu_mul", {"n": 1 << 20}, 1.0242e-2, 1e-2),
        (
            "flash_attention",
            {"lq": 512, "lk": 512, "head_dim": 64, "q_heads": 2, "kv_heads": 2},
            4.4e-2,
            5e-3,
        ),
    ],
)
def test_published_error(op: str, dims: dict[str, int], published: float, tolerance: float) -> None:
    """Which kernel makes which error; the figure moves by a third when one choice is flipped."""
    method = {"gemm": "external", "flash_attention": "seq_first", "rope": "half_split"}.get(op, "")
    inputs = make_inputs(op, dims, method=method)
    t = {name: tensor(array) for name, array in inputs.items()}
    if op == "gemm":
        # f32 output: the product before its cast.
        left = products.block_quantise(t["a"].float())
        out = left @ products.quantised_weight(t["b"].T.contiguous()).float().T
        reference = reference_output(op, inputs, dims=dims, method=method, out_dtype="f32")
    else:
        out = _element_wise(op, t, dims).float()
        reference = reference_output(op, inputs, dims=dims, method=method)
    error = compare(out.numpy().reshape(reference.shape), reference).mean_rel_L1
    assert error == pytest.approx(published, rel=tolerance)


def _element_wise(op: str, t: dict[str, Any], dims: dict[str, int]) -> Any:
    if op == "rms_norm":
        return elementwise.rms_norm(t["x"], t["w"], 1e-5, "floor")
    if op == "rope":
        half = dims["head_dim"] // 2
        cos, sin = t["table"][:, :half].repeat(1, 2), t["table"][:, half:].repeat(1, 2)
        return elementwise.rope(t["x"], cos, sin, "floor")
    if op == "eltwise_add":
        return elementwise.add(t["a"], t["b"], "floor")
    if op == "silu_mul":
        return elementwise.multiply(elementwise.silu(t["gate"], "floor"), t["up"], "floor")
    n, d = dims["lq"], dims["head_dim"]
    q, k, v = (t[name].view(n, -1, d).transpose(0, 1).contiguous() for name in "qkv")
    how = AttentionArithmetic("flash", n, 4)
    out = attention.flash(q, k, v, torch.zeros(n, n, dtype=torch.bool), how)
    return out.transpose(0, 1).contiguous()


def test_exp2_is_linear_between_powers_and_zero_below_the_normal_range() -> None:
    x = torch.tensor([0.0, 0.5, -0.5, -1.0, -126.0, -126.5, -1e9, -math.inf])
    assert numbers(attention.exp2_linear(x)).tolist() == [1.0, 1.5, 0.75, 0.5, 2.0**-126, 0, 0, 0]


def test_reciprocal_is_off_by_about_two_per_mille() -> None:
    x = torch.linspace(1, 512, 4000).to(torch.bfloat16)
    relative = (attention.reciprocal(x).float() * x.float() - 1).abs()
    assert 1e-3 < float(relative.mean()) < 2.5e-3
    assert float(relative.max()) < 1e-2


def test_host_attention_is_softmax() -> None:
    q, k, v = (torch.randn(h, n, 16).to(torch.bfloat16) for h, n in ((4, 3), (2, 7), (2, 7)))
    hidden = torch.zeros(3, 7, dtype=torch.bool)
    hidden[:, 5:] = True
    out = attention.host_attention(q, k, v, hidden)
    for head in range(4):
        score = q[head].double() @ k[head // 2, :5].double().T / 4
        expected = torch.softmax(score, -1) @ v[head // 2, :5].double()
        assert torch.allclose(out[head].double(), expected, atol=8e-3)


def test_host_attention_ends_with_what_is_not_a_number() -> None:
    """A planted fault can make scores NaN: the reference shows that, it does not compute for ever."""
    for bad in (math.nan, math.inf, -math.inf):
        q, k, v = (torch.ones(2, 1, 16, dtype=torch.bfloat16) for _ in range(3))
        q[1, 0, 3] = bad
        out = attention.host_attention(q, k, v, None)
        assert torch.isnan(out[1]).all()
        assert torch.equal(out[0], torch.ones(1, 16, dtype=torch.bfloat16))


def test_flash_refuses_what_it_was_not_compiled_for() -> None:
    q = torch.zeros(1, 136, 64, dtype=torch.bfloat16)
    hidden = torch.zeros(136, 136, dtype=torch.bool)
    with pytest.raises(ValueError, match="136 keys for a kernel compiled for 128"):
        attention.flash(q, q, q, hidden, AttentionArithmetic("flash", 128, 2))


def test_descriptions_that_contradict_themselves() -> None:
    linear = LinearArithmetic("gemv")
    with pytest.raises(DescriptionError, match="down_proj"):
        PhaseArithmetic({n: linear for n in LINEARS if n != "down_proj"}, AttentionArithmetic("host"))
    with pytest.raises(DescriptionError, match="unknown entries: lm_head"):
        PhaseArithmetic(dict.fromkeys((*LINEARS, "lm_head"), linear), AttentionArithmetic("host"))
    with pytest.raises(DescriptionError, match="shared out"):
        AttentionArithmetic("flash", 128, 4)
    with pytest.raises(DescriptionError, match="step"):
        LinearArithmetic("direct")
    with pytest.raises(DescriptionError, match="none of"):
        LinearArithmetic("magic")  # type: ignore[arg-type]


@pytest.mark.parametrize("k", [300, 1100, 4])
def test_a_width_of_no_whole_blocks_is_that_of_operands_padded_with_zeros(k: int) -> None:
    x, weight = torch.randn(3, k).bfloat16(), torch.randn(5, k).bfloat16()
    wide = (k + 63) // 64 * 64
    padded = [torch.nn.functional.pad(each, (0, wide - k)) for each in (x, weight)]
    for how in (LinearArithmetic("drain"), LinearArithmetic("fused-cast")):
        found = products.gemm(x, products.quantised_weight(weight), how)
        wanted = products.gemm(padded[0], products.quantised_weight(padded[1]), how)
        assert found.shape == (3, 5)
        # the order of f32 sums may move one rounding
        assert torch.allclose(found.float(), wanted.float(), rtol=2.0**-7, atol=1e-6)


def test_compiled_loops_need_no_place_to_write_and_share_one(tmp_path: Path) -> None:
    """Two processes at once on an empty cache, then a cache that cannot be made: the same sums."""
    code = (
        "import torch; from llms.verify.reference.arithmetic import sums; "
        "x = torch.arange(300).reshape(3, 100) / 7; "
        "print(sums.products(x, x.bfloat16()).numpy().tobytes().hex())"
    )
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    places = (tmp_path / "cache", tmp_path / "cache", tmp_path / "file" / "cache")
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTEST_NPU_CACHE": str(place)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for place in places
    ]
    printed = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert printed[0]
    assert len(set(printed)) == 1
    assert any((tmp_path / "cache").rglob("*.nbi"))
