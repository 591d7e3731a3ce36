"""Kernels of the example in numpy, behind a cache that hands out its pooled output buffers."""

import numpy as np


def bf16(x):
    """Round float32 to bf16 precision, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).reshape(np.shape(x))


def rms_norm(x, w, eps):
    """Row-wise RMS norm."""
    return bf16(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w)


def rope(x, table):
    """Rotate halves: x [n, heads, d], table [n, d] = cos | sin."""
    half = x.shape[-1] // 2
    cos, sin = table[:, None, :half], table[:, None, half:]
    a, b = x[..., :half], x[..., half:]
    return bf16(np.concatenate([a * cos - b * sin, b * cos + a * sin], -1))


def attention(q, k, v, first_row):
    """Causal attention; q [n, hq, d] at positions first_row.., k and v [m, hkv, d]."""
    groups = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, groups, 1), np.repeat(v, groups, 1)
    scores = np.einsum("nhd,mhd->hnm", q, k) / np.sqrt(q.shape[-1])
    hidden = np.arange(k.shape[0])[None] > first_row + np.arange(q.shape[0])[:, None]
    scores[:, hidden] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return bf16(np.einsum("hnm,mhd->nhd", weights, v).reshape(q.shape[0], -1))


class KernelCache:
    """Runs kernels by name. One output buffer per (kernel, output, shape), shared by all layers."""

    def __init__(self):
        self._pool = {}

    def _output(self, kernel, index, value):
        buffer = self._pool.setdefault((kernel, index, value.shape), np.empty(value.shape, np.float32))
        buffer[:] = value
        return buffer

    def load_and_run(self, name, *inputs):
        """Return views of the pooled outputs."""
        outputs = KERNELS[name](*inputs)
        return tuple(self._output(name, index, value) for index, value in enumerate(outputs))


def rms_gemms_rope(x, layer, config, table):
    """Norm, Q, K and V projections, RoPE."""
    n, d = x.shape[0], config.head_dim
    normed = rms_norm(x, layer["attn_norm"], config.rms_eps)
    q, k, v = (bf16(normed @ layer[name].T).reshape(n, -1, d) for name in ("wq", "wk", "wv"))
    return rope(q, table), rope(k, table), v


def o_ffn(attn, x, layer, config):
    """Output projection, residual, norm, SwiGLU, residual."""
    x = bf16(x + bf16(attn @ layer["wo"].T))
    normed = rms_norm(x, layer["ffn_norm"], config.rms_eps)
    gate, up = bf16(normed @ layer["w_gate"].T), bf16(normed @ layer["w_up"].T)
    hidden = bf16(gate / (1 + np.exp(-gate)) * up)
    return (bf16(x + bf16(hidden @ layer["w_down"].T)),)


KERNELS = {
    "rms_gemms_rope": rms_gemms_rope,
    "flash_attn": lambda q, k, v, first_row: (attention(q, k, v, first_row),),
    "o_ffn": o_ffn,
    "lm_head_gemv": lambda row, head: (bf16(head @ row),),
}
