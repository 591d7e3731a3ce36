"""The reference's arithmetic against the twin's, kernel by kernel: two implementations, no common code.

Where no sum is involved the bits are equal. Where the order of an f32 sum decides a rounding, a small share
of the results may differ by one ULP of bf16; attention carries its sums through several roundings, so a few
ULPs of the largest value are allowed for few elements. Operands include the tails that models have: single
large features, tiny values, zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ml_dtypes import bfloat16

from llms.verify.reference.arithmetic import (
    AttentionArithmetic,
    LinearArithmetic,
    attention,
    elementwise,
    products,
)
from npu_twin.datapath import run_launch, standalone_launch


def values(seed: int, *shape: int, tails: bool = True) -> np.ndarray:
    """bf16 normals; with tails, one feature in 61 is 40 times larger, one 1e-4 times, some are zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32)
    if tails:
        flat = x.reshape(-1)
        flat[::61] *= 40.0
        flat[7::53] *= 1e-4
        flat[11::97] = 0.0
    return x.astype(bfloat16)


def tensor(array: np.ndarray) -> Any:
    return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)


def bits(array: Any) -> np.ndarray:
    if isinstance(array, torch.Tensor):
        return array.contiguous().view(torch.int16).numpy().view(np.uint16).reshape(-1)
    return np.ascontiguousarray(array).view(np.uint16).reshape(-1)


def ulps(a: Any, b: Any) -> np.ndarray:
    """Distance in bf16 steps, element by element."""
    ordered = [np.where(x & 0x8000, -(x & 0x7FFF).astype(int), x.astype(int)) for x in (bits(a), bits(b))]
    return np.abs(ordered[0] - ordered[1])


def twin(op: str, dims: dict[str, int], method: str, inputs: dict[str, np.ndarray], **kw: Any) -> Any:
    out = run_launch(standalone_launch(op, dims, method=method, **kw), inputs)["out"]
    return np.ascontiguousarray(np.asarray(out)).astype(bfloat16)


@pytest.mark.parametrize("method", ["drain", "fused-cast", "direct"])
@pytest.mark.parametrize("shape", [(40, 576, 192), (64, 1536, 576)])
def test_gemm(method: str, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a, b = values(1, m, k), values(2, k, n)
    there = twin("gemm", {"M": m, "K": k, "N": n}, method, {"a": a, "b": b}, tile={"tile_k_l1": 32})
    weight = products.quantised_weight(tensor(np.ascontiguousarray(b.T)))
    how = LinearArithmetic(method, 32 if method == "direct" else 0)  # type: ignore[arg-type]
    distance = ulps(products.gemm(tensor(a), weight, how), there)
    small = np.abs(there.astype(np.float32)).reshape(-1) < 0.05
    assert distance[~small].max() <= 1
    assert (distance > 0).mean() < (0.02 if method == "direct" else 2e-3)


def test_gemv() -> None:
    w, x = values(3, 1536, 576), values(4, 576)
    there = twin("gemv", {"M": 1536, "K": 576}, "external", {"w": w, "x": x})
    distance = ulps(products.gemv(tensor(x)[None], tensor(w), LinearArithmetic("gemv")), there)
    assert distance.max() <= 1
    assert (distance > 0).mean() < 5e-3


def test_gemv_cascade_with_residual() -> None:
    w, x, residual = values(5, 256, 1024), values(6, 1024), values(7, 256)
    inputs = {"w": w, "x": x, "residual": residual}
    there = twin("gemv_add", {"M": 256, "K": 1024}, "cascade", inputs)
    running = products.gemv(tensor(x)[None], tensor(w), LinearArithmetic("cascade", 512))
    distance = ulps(elementwise.add(running[0], tensor(residual), "nearest_even"), there)
    assert (distance > 0).mean() < 1e-2


@pytest.mark.parametrize("rounding", ["floor", "nearest_even"])
@pytest.mark.parametrize("shape", [(64, 576), (1, 576), (128, 64)])
def test_rms_norm(shape: tuple[int, int], rounding: str) -> None:
    x, w = values(8, *shape), values(9, shape[1])
    there = twin(
        "rms_norm",
        {"M": shape[0], "N": shape[1]},
        "weighted",
        {"x": x, "w": w},
        attrs={"eps": 1e-5},
        rounding=rounding,
    )
    distance = ulps(elementwise.rms_norm(tensor(x), tensor(w), 1e-5, rounding), there)
    # The order of the sum decides the rounding of one factor per row, about once in 10,000 rows.
    assert (distance.reshape(shape).max(1) > 0).mean() < 0.02
    assert distance.max() <= 2


@pytest.mark.parametrize("rounding", ["floor", "nearest_even"])
def test_rope(rounding: str) -> None:
    rows, d = 96, 64
    x = values(10, rows, d)
    angles = np.arange(rows)[:, None] * 1e5 ** (-np.arange(d // 2) * 2 / d)[None]
    table = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(bfloat16)
    there = twin(
        "rope", {"rows": rows, "head_dim": d}, "half_split", {"x": x, "table": table}, rounding=rounding
    )
    cos, sin = (tensor(np.tile(half, (1, 2))) for half in np.split(table, 2, axis=1))
    assert ulps(elementwise.rope(tensor(x), cos, sin, rounding), there).max() == 0


@pytest.mark.parametrize("rounding", ["floor", "nearest_even"])
def test_adds(rounding: str) -> None:
    a, b = values(11, 64 * 256), values(12, 64 * 256)
    there = twin("eltwise_add", {"n": a.size}, "default", {"a": a, "b": b}, rounding=rounding)
    assert ulps(elementwise.add(tensor(a), tensor(b), rounding), there).max() == 0
    bias = values(13, 256)
    dims = {"rows": 64, "n": 256}
    there = twin("bias_add", dims, "default", {"x": a.reshape(64, 256), "bias": bias}, rounding=rounding)
    assert ulps(elementwise.add(tensor(a).view(64, 256), tensor(bias), rounding), there).max() == 0


def test_silu_mul_for_every_gate() -> None:
    gate = np.arange(65536, dtype=np.uint16).view(bfloat16)
    gate = gate[np.isfinite(gate.astype(np.float32))]
    up = values(14, gate.size)
    there = twin("silu_mul", {"n": gate.size}, "external", {"gate": gate, "up": up})
    here = elementwise.multiply(elementwise.silu(tensor(gate), "floor"), tensor(up), "floor")
    same = (ulps(here, there) == 0) | (np.isnan(there.astype(np.float32)) & np.isnan(here.float().numpy()))
    assert same.all()


@pytest.mark.parametrize(
    ("length", "n", "stages", "d", "heads", "kv"),
    [(128, 128, 2, 64, 9, 3), (128, 40, 2, 64, 9, 3), (512, 200, 4, 64, 4, 1), (256, 72, 4, 128, 4, 2)],
)
def test_flash_attention(length: int, n: int, stages: int, d: int, heads: int, kv: int) -> None:
    """The reference handles n rows, the device the whole compiled length; keys behind n change nothing."""
    q, k, v = (values(20 + i, length, h * d, tails=False) for i, h in enumerate((heads, kv, kv)))
    dims = {"lq": length, "lk": length, "head_dim": d, "q_heads": heads, "kv_heads": kv}
    attrs = {"causal": True, "num_cascade_stages": stages}
    there = twin("flash_attention", dims, "seq_first", {"q": q, "k": k, "v": v}, attrs=attrs)

    def split(x: np.ndarray, h: int) -> Any:
        return tensor(x[:n].reshape(n, h, d).transpose(1, 0, 2))

    hidden = torch.triu(torch.ones(n, n, dtype=torch.bool), 1)
    how = AttentionArithmetic("flash", length, stages)
    here = attention.flash(split(q, heads), split(k, kv), split(v, kv), hidden, how)
    here = here.transpose(0, 1).reshape(n, heads * d)
    distance = ulps(here, there[:n])
    assert (distance > 0).mean() < 5e-3
    error = np.abs(here.float().numpy() - there[:n].astype(np.float32))
    assert error.max() <= 2.0**-6


def test_keys_sharing_a_block_with_padding_see_its_values() -> None:
    """Why a prompt is padded to whole blocks in the reference: values behind it move shared exponents."""
    n, how = 8, AttentionArithmetic("flash", 128, 2)
    q, k, v = (tensor(values(30 + i, 1, n, 64, tails=False)) for i in range(3))
    hidden = torch.triu(torch.ones(n, n, dtype=torch.bool), 1)
    plain = attention.flash(q, k, v, hidden, how)
    louder = v.clone()
    louder[:, 5:] *= 64
    assert not torch.equal(plain[:, :5], attention.flash(q, k, louder, hidden, how)[:, :5])


@pytest.mark.parametrize("flip", ["rounding", "blocks", "exp2"])
def test_a_flipped_choice_shows(flip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is fine enough to see each single approximation switched off."""
    if flip == "exp2":
        monkeypatch.setattr(attention, "exp2_linear", lambda x: torch.exp2(x).to(torch.bfloat16))
        check = lambda: test_flash_attention(128, 40, 2, 64, 9, 3)  # noqa: E731
    elif flip == "blocks":
        monkeypatch.setattr(products, "block_quantise", lambda x: x)
        check = lambda: test_gemm("drain", (40, 576, 192))  # noqa: E731
    else:
        monkeypatch.setattr(elementwise, "cast", lambda x, rounding: x.to(torch.bfloat16))
        check = lambda: test_rms_norm((64, 576), "floor")  # noqa: E731
    with pytest.raises(AssertionError):
        check()
