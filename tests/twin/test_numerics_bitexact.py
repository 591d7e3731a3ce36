"""Vectorised datapaths bit by bit against a plain implementation of the same chain, written down twice.

The plain versions use ml_dtypes for nearest even, ``numpy.nextafter`` for floor, and loops. Matrix products
are compared on operands whose f32 sums are exact, so that no order of summation can matter.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from ml_dtypes import bfloat16

from npu_twin.datapath import run_launch, standalone_launch
from npu_twin.ops.flash_attention import datapath as attention_module

F = np.float32


def rne(x):
    return np.asarray(x, F).astype(bfloat16).astype(F)


def floor(x):
    x = np.asarray(x, F)
    near = x.astype(bfloat16)
    below = np.nextafter(near, np.array(-np.inf, bfloat16))
    return np.where(near.astype(F) > x, below, near).astype(F)


ROUND = {"floor": floor, "nearest_even": rne}
MODES = sorted(ROUND)


def random_bf16(rng, *shape, scale=1.0):
    return (rng.standard_normal(shape) * scale).astype(bfloat16)


def both(op, dims, inputs, plain, *, method="default", rounding="floor", tile=None, attrs=None):
    """Run the datapath and compare each bit of its output with ``plain`` (f32 holding bf16 values)."""
    launch = standalone_launch(op, dims, method=method, rounding=rounding, tile=tile, attrs=attrs)
    out = run_launch(launch, inputs)["out"]
    assert np.array_equal(out.astype(F), np.asarray(plain, F).reshape(out.shape), equal_nan=True)


@pytest.mark.parametrize("rounding", MODES)
@pytest.mark.parametrize("n", [1, 576, 70000])
def test_eltwise_add(n, rounding):
    rng = np.random.default_rng(1)
    a, b = random_bf16(rng, n), random_bf16(rng, n, scale=30)
    plain = ROUND[rounding](a.astype(F) + b.astype(F))
    both("eltwise_add", {"n": n}, {"a": a, "b": b}, plain, rounding=rounding)


@pytest.mark.parametrize("rounding", MODES)
def test_bias_add(rounding):
    rng = np.random.default_rng(2)
    x, bias = random_bf16(rng, 700, 96), random_bf16(rng, 96)
    plain = np.stack([ROUND[rounding](row.astype(F) + bias.astype(F)) for row in x])
    both("bias_add", {"rows": 700, "n": 96}, {"x": x, "bias": bias}, plain, rounding=rounding)


@pytest.mark.parametrize("rounding", MODES)
@pytest.mark.parametrize("method", ["half_split", "interleaved"])
def test_rope(method, rounding):
    rng = np.random.default_rng(3)
    x, table = random_bf16(rng, 1100, 64), random_bf16(rng, 1100, 64)
    plain = np.empty(x.shape, F)
    for i in range(32):
        a, b = (i, i + 32) if method == "half_split" else (2 * i, 2 * i + 1)
        xa, xb, cos, sin = (v.astype(F) for v in (x[:, a], x[:, b], table[:, i], table[:, i + 32]))
        plain[:, a] = ROUND[rounding](xa * cos - xb * sin)
        plain[:, b] = ROUND[rounding](xa * sin + xb * cos)
    dims = {"rows": 1100, "head_dim": 64}
    both("rope", dims, {"x": x, "table": table}, plain, method=method, rounding=rounding)


def lanes(row):
    total = [F(0)] * 16
    for start in range(0, len(row), 16):
        for j in range(16):
            total[j] = F(total[j] + row[start + j])
    while len(total) > 1:
        half = len(total) // 2
        total = [F(total[j] + total[j + half]) for j in range(half)]
    return total[0]


def plain_rms(x, w, eps, r):
    out = []
    for row in x.astype(F):
        mean = F(lanes(row * row) / F(len(row)))
        rstd = r(F(1) / np.sqrt(F(mean + F(eps))))
        out.append(r(r(row * rstd) * w.astype(F)))
    return np.stack(out)


@pytest.mark.parametrize("rounding", MODES)
@pytest.mark.parametrize(("rows", "n"), [(1, 576), (9, 64), (70, 960)])
def test_rms_norm(rows, n, rounding):
    rng = np.random.default_rng(4)
    x, w = random_bf16(rng, rows, n), random_bf16(rng, n)
    plain = plain_rms(x, w, 1e-5, ROUND[rounding])
    both("rms_norm", {"M": rows, "N": n}, {"x": x, "w": w}, plain, method="weighted", rounding=rounding)


@pytest.mark.parametrize("rounding", MODES)
def test_layer_norm(rounding):
    rng, r = np.random.default_rng(5), ROUND[rounding]
    x, w, b = random_bf16(rng, 90, 768), random_bf16(rng, 768), random_bf16(rng, 768)
    plain = []
    for row in x.astype(F):
        d = r(row - r(lanes(row) / F(768)))
        rstd = r(F(1) / np.sqrt(F(F(lanes(d * d) / F(768)) + F(1e-5))))
        plain.append(r(r(d * rstd) * w.astype(F) + b.astype(F)))
    dims = {"M": 90, "N": 768}
    both("layer_norm", dims, {"x": x, "w": w, "b": b}, plain, method="affine", rounding=rounding)


def plain_tanh(x):
    grid = 2.0**-4.25
    return rne(np.tanh(np.round(x.astype(np.float64) / grid) * grid))


@pytest.mark.parametrize("rounding", MODES)
def test_silu_mul_over_every_gate(rounding):
    gate = np.arange(0x10000, dtype=np.uint16).view(bfloat16)
    gate = gate[np.isfinite(gate.astype(F))]
    up = random_bf16(np.random.default_rng(6), gate.size)
    r, g = ROUND[rounding], gate.astype(F)
    with np.errstate(all="ignore"):
        s = r(F(1) + plain_tanh(g / F(2))) / F(2)
        plain = r(r(g * s) * up.astype(F))
    both("silu_mul", {"n": gate.size}, {"gate": gate, "up": up}, plain, rounding=rounding)


@pytest.mark.parametrize("rounding", MODES)
def test_gelu_over_moderate_values(rounding):
    x = np.arange(0x10000, dtype=np.uint16).view(bfloat16)
    x = x[np.abs(x.astype(F)) < 1e4]
    r, v = ROUND[rounding], x.astype(F)
    x3 = r(r(v * v) * v)
    z = r(rne(math.sqrt(2 / math.pi)) * r(v + r(rne(0.044715) * x3)))
    plain = r(v / F(2) * r(plain_tanh(z) + F(1)))
    both("gelu", {"n": x.size}, {"x": x}, plain, rounding=rounding)


def plain_block(values):
    """Block floating point of a vector, eight at a time."""
    out = np.array(values, np.float64)
    for start in range(0, len(out), 8):
        part = out[start : start + 8]
        if not part.any():
            continue
        exponent = math.floor(math.log2(np.abs(part).max()))
        mantissa = np.round(part / 2.0 ** (exponent - 6))
        if mantissa.max() > 127:
            exponent += 1
            mantissa = np.round(part / 2.0 ** (exponent - 6))
        out[start : start + 8] = mantissa * 2.0 ** (exponent - 6)
    return out


def exact_operand(rng, *shape):
    """bf16 values of magnitude 1..4 with all eight bits in use: short sums of their products are exact."""
    magnitude = rng.integers(128, 256, shape) / 128.0 * 2.0 ** rng.integers(0, 2, shape)
    return (magnitude * rng.choice([-1.0, 1.0], shape)).astype(bfloat16)


@pytest.mark.parametrize("method", ["external", "drain", "fused-cast", "direct"])
def test_gemm(method):
    rng = np.random.default_rng(7)
    M, K, N, step = 24, 32, 40, 16
    a, b = exact_operand(rng, M, K), exact_operand(rng, K, N)
    qa = np.stack([plain_block(row) for row in a.astype(np.float64)])
    qb = np.stack([plain_block(column) for column in b.astype(np.float64).T]).T
    if method == "direct":
        plain = np.zeros((M, N), F)
        for k in range(0, K, step):
            plain = rne(plain + (qa[:, k : k + step] @ qb[k : k + step]).astype(F))
    else:
        plain = (qa @ qb).astype(F)
        plain = {"external": lambda x: x, "drain": rne, "fused-cast": floor}[method](plain)
    both(
        "gemm",
        {"M": M, "K": K, "N": N},
        {"a": a, "b": b},
        plain,
        method=method,
        rounding="nearest_even",
        tile={"tile_k_l1": step, "tile_k_l2": 32},
    )


@pytest.mark.parametrize("rounding", MODES)
def test_gemv_and_cascade(rounding):
    rng, r = np.random.default_rng(8), ROUND[rounding]
    M, K = 48, 1536
    w = rng.integers(-7, 8, (M, K)).astype(bfloat16)
    x = rng.integers(-7, 8, K).astype(bfloat16)
    residual = random_bf16(rng, M, scale=100)
    exact = w.astype(np.float64) @ x.astype(np.float64)
    both("gemv", {"M": M, "K": K}, {"w": w, "x": x}, r(exact), method="external", rounding=rounding)
    running = np.zeros(M, F)
    for k in range(0, K, 512):
        running = r(running + (w[:, k : k + 512].astype(F) @ x[k : k + 512].astype(F)))
    plain = r(running + residual.astype(F))
    inputs = {"w": w, "x": x, "residual": residual}
    both("gemv_add", {"M": M, "K": K}, inputs, plain, method="cascade", rounding=rounding)


def test_cascade_loses_the_tail_of_an_odd_length():
    """The silent fault of this kernel: elements past the last whole 512 do not take part."""
    rng = np.random.default_rng(9)
    w, x = rng.integers(-7, 8, (8, 576)).astype(bfloat16), rng.integers(-7, 8, 576).astype(bfloat16)
    head = rne(w[:, :512].astype(F) @ x[:512].astype(F))
    inputs = {"w": w, "x": x, "residual": np.zeros(8, bfloat16)}
    both("gemv_add", {"M": 8, "K": 576}, inputs, head, method="cascade", rounding="nearest_even")


@pytest.mark.parametrize("rounding", MODES)
def test_norm_gateup_swiglu(rounding):
    rng, r = np.random.default_rng(10), ROUND[rounding]
    emb, hidden = 512, 40
    packed = random_bf16(rng, 2, emb)
    w = rng.integers(-3, 4, (2 * hidden, emb)).astype(bfloat16)
    normed = plain_rms(packed[:1], packed[1], 1e-5, r)[0]
    lines = r((w.astype(np.float64) @ normed.astype(np.float64)).astype(F))
    g, u = lines[0::2], lines[1::2]
    plain = r(r(g * (r(F(1) + plain_tanh(g / F(2))) / F(2))) * u)
    launch = standalone_launch(
        "norm_gateup_swiglu", {"emb": emb, "hidden": hidden}, method="cascade", rounding=rounding
    )
    out = run_launch(launch, {"packed": packed, "w": w})["out"].astype(F)
    # The f32 sums here depend on their order in the last bit, which may move a value by one bf16 step.
    assert np.mean(out != plain) <= 0.05
    assert np.allclose(out, plain, rtol=2.0**-6, atol=1e-6)


def plain_exp2(d, scale):
    """2**(d*scale) of the device: argument to 9 fraction bits, mantissa linear and cut to 7 bits."""
    values, where = np.unique(d, return_inverse=True)
    return np.array([one_exp2(F(v) * scale) for v in values], F)[where].reshape(np.shape(d))


def one_exp2(x):
    if x < -1000:
        return 0.0
    x = round(float(x) * 512) / 512
    whole = math.floor(x)
    return 0.0 if whole < -126 else (1 + math.floor((x - whole) * 128) / 128) * 2.0**whole


def plain_reciprocal(x):
    bits = (0x7EB5 - x.astype(bfloat16).view(np.uint16).astype(np.int64)).astype(np.uint16)
    y = bits.view(bfloat16).astype(F)
    y = rne(rne(rne(1.9395974) * y) * rne(rne(1.436142) - x * y))
    return rne(y + y * rne(F(1) - x * y))


def plain_attention(q, k, v, causal, stages, chunk=64):
    """One head, query rows one after the other where it matters; every chunk is walked, none is skipped."""
    lq, hd = q.shape
    lk = k.shape[0]
    scale = rne(math.log2(math.e) / math.sqrt(hd))
    depth = min(chunk, hd)
    qq = np.stack([plain_block(row) for row in q.astype(np.float64)])
    qk = np.stack([plain_block(row) for row in k.astype(np.float64)])
    qv = np.stack([plain_block(column) for column in v.astype(np.float64).T]).T
    states = []
    for stage in range(stages):
        m, d, acc = np.full(lq, -3.3895314e38, F), np.zeros(lq, F), np.zeros((lq, v.shape[1]), F)
        for start in range(stage * lk // stages, (stage + 1) * lk // stages, chunk):
            keys = slice(start, start + chunk)
            s = np.zeros((lq, chunk), F)
            for at in range(0, hd, depth):
                s = rne(s + (qq[:, at : at + depth] @ qk[keys, at : at + depth].T).astype(F))
            if causal:
                s[np.arange(start, start + chunk)[None, :] > np.arange(lq)[:, None]] = -np.inf
            new = np.maximum(m, s.max(axis=1))
            with np.errstate(over="ignore"):
                p = plain_exp2(rne(s - new[:, None]), scale)
                fade = plain_exp2(rne(m - new), scale)
            total = np.zeros(lq, F)
            for j in range(chunk):
                total = total + p[:, j]
            d = rne(rne(d * fade) + rne(total))
            qp = np.stack([plain_block(row) for row in p])
            acc = rne(rne(acc * fade[:, None]) + (qp @ qv[keys]).astype(F))
            m = new
        states.append((m, d, acc))
    m, d, acc = states[-1]
    for own_m, own_d, own_acc in states[-2::-1]:
        new = np.maximum(own_m, m)
        with np.errstate(over="ignore"):
            f_own, f = plain_exp2(rne(own_m - new), scale), plain_exp2(rne(m - new), scale)
        d = rne(rne(own_d * f_own) + rne(d * f))
        acc = rne(rne(own_acc * f_own[:, None]) + rne(acc * f[:, None]))
        m = new
    return rne(acc * plain_reciprocal(d)[:, None])


def mild_attention_inputs(rng, heads, kv, length, hd):
    """Scores of a small range and short values, so that every f32 sum is exact in any order."""
    q = (rng.integers(-2, 3, (heads, length, hd)) / 4).astype(bfloat16)
    k = (rng.integers(-2, 3, (kv, length, hd)) / 4).astype(bfloat16)
    v = (rng.integers(128, 256, (kv, length, hd)) / 128 * rng.choice([-1, 1], (kv, length, hd))).astype(
        bfloat16
    )
    return q, k, v


def attention_dims(heads, kv, length, hd):
    return {"lq": length, "lk": length, "head_dim": hd, "q_heads": heads, "kv_heads": kv}


CASES = [
    # method, heads, kv, length, head_dim, causal, stages
    ("seq_first", 3, 1, 256, 64, True, 4),
    ("head_first", 3, 1, 256, 64, True, 4),
    ("seq_first", 2, 2, 256, 64, False, 4),
    ("head_first", 2, 1, 512, 64, True, 2),
    ("head_first", 2, 1, 256, 128, True, 4),
]


@pytest.mark.parametrize(("method", "heads", "kv", "length", "hd", "causal", "stages"), CASES)
def test_flash_attention(method, heads, kv, length, hd, causal, stages):
    q, k, v = mild_attention_inputs(np.random.default_rng(11), heads, kv, length, hd)
    plain = np.stack(
        [
            plain_attention(q[h], k[h // (heads // kv)], v[h // (heads // kv)], causal, stages)
            for h in range(heads)
        ]
    )
    tile = {"lqp": 256, "lkp": 64, "num_q_tiles": 4}
    if method == "seq_first":
        inputs = {n: np.ascontiguousarray(x.transpose(1, 0, 2)) for n, x in (("q", q), ("k", k), ("v", v))}
        plain = plain.transpose(1, 0, 2)
    else:
        tile["dv_tile"] = 64
        split = v.reshape(kv, length, hd // 64, 64).transpose(0, 2, 1, 3)
        inputs = {"q": q, "k": k, "v": np.ascontiguousarray(split)}
        plain = plain.reshape(heads, length, hd // 64, 64).transpose(0, 2, 1, 3)
    attrs = {"causal": causal, "num_cascade_stages": stages}
    both(
        "flash_attention",
        attention_dims(heads, kv, length, hd),
        inputs,
        np.ascontiguousarray(plain),
        method=method,
        rounding="nearest_even",
        tile=tile,
        attrs=attrs,
    )


def causal_launch(length=512, heads=4, kv=2):
    return standalone_launch(
        "flash_attention",
        attention_dims(heads, kv, length, 64),
        method="head_first",
        attrs={"causal": True, "num_cascade_stages": 4},
        tile={"lkp": 64, "dv_tile": 64},
    )


@pytest.mark.parametrize("scale", [1.0, 12.0])
def test_skipping_masked_chunks_changes_no_bit(scale, monkeypatch):
    rng = np.random.default_rng(12)
    inputs = {n: random_bf16(rng, h, 512, 64, scale=scale) for n, h in (("q", 4), ("k", 2), ("v", 2))}
    skipped = run_launch(causal_launch(), inputs)["out"]
    monkeypatch.setattr(attention_module, "_is_tame", lambda *a: False)
    walked = run_launch(causal_launch(), inputs)["out"]
    assert np.array_equal(skipped.view(np.uint16), walked.view(np.uint16))


def test_a_nan_in_a_masked_value_row_shows():
    """NaN * 0 is NaN on the device, so nothing may be skipped when an operand is not finite."""
    rng = np.random.default_rng(13)
    inputs = {n: random_bf16(rng, h, 512, 64) for n, h in (("q", 4), ("k", 2), ("v", 2))}
    inputs["v"][0, 511, 5] = np.nan
    out = run_launch(causal_launch(), inputs)["out"].astype(F)
    assert np.isnan(out[:2, :, 5]).all()
    assert np.isfinite(out[2:]).all()


def test_attention_of_random_operands_is_the_plain_one():
    """General operands: f32 sums may differ in their last bit between orders, bf16 results hardly ever."""
    rng = np.random.default_rng(14)
    q, k, v = (random_bf16(rng, 256, 64) for _ in range(3))
    plain = plain_attention(q, k, v, True, 4)
    launch = causal_launch(256, 1, 1)
    out = run_launch(launch, {"q": q, "k": k, "v": v})["out"].astype(F)[0]
    assert np.mean(out != plain) < 1e-3
    assert np.abs(out - plain).max() <= 2.0**-6
