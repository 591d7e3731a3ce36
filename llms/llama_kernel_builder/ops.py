"""The kernels of a Llama-family layer for many rows (a prompt: GEMM) or for one (a decode step: GEMV).

The same calls build both: what differs is the kernel of a product and of a bias, the layout of the weights
and that the rotary rows of a decode step change with its position.
"""

from __future__ import annotations

from . import kernels
from .block import Op, Step
from .device_config import device_config, gemv_slices, norm_eps
from .model_config import ModelConfig
from .program import Buffer, OperandRef
from .specs import KernelSpec


def _static(name: str, *shape: int) -> Buffer:
    """A weight or table, written once."""
    return Buffer(name, shape, "bf16", "static")


class Ops:
    """Kernels over `rows` rows of a model's widths; buffers have their names from the mlir-air examples."""

    def __init__(self, config: ModelConfig, rows: int) -> None:
        self.config = config
        self.padded = device_config(config)
        self.rows = rows
        self.one = rows == 1

    def wide(self, name: str, width: int) -> Buffer:
        """An activation: [rows, width], or [width] for one row."""
        return Buffer(name, (width,) if self.one else (self.rows, width))

    def product(self, label: str, x: str, weight: str, out: str, widths: tuple[int, int]) -> Op:
        """`out` = `x` by `weight`; widths: of `x` and of `out`. A GEMV has its weight as [out, in]."""
        k, n = widths
        if self.one:
            step = Step(f"{label}_gemv", kernels.gemv(n, k), {"w": weight, "x": x, "out": out})
        else:
            step = Step(f"{label}_gemm", kernels.gemm(self.rows, k, n), {"a": x, "b": weight, "out": out})
        shape = (n, k) if self.one else (k, n)
        return Op(step, (self.wide(x, k), _static(weight, *shape), self.wide(out, n)))

    def bias(self, label: str, x: str, bias: str, width: int) -> Op:
        """`x`_biased = `x` + `bias`."""
        out = f"{x}_biased"
        if self.one:
            step = Step(label, kernels.eltwise_add(width), {"a": x, "b": bias, "out": out})
        else:
            step = Step(label, kernels.bias_add(self.rows, width), {"x": x, "bias": bias, "out": out})
        return Op(step, (self.wide(x, width), _static(bias, width), self.wide(out, width)))

    def norm(self, label: str, x: str, weight: str, out: str) -> Op:
        """RMSNorm of every row."""
        width = self.padded.emb_dim
        eps = norm_eps(self.config.emb_dim, width, self.config.rms_eps)
        return self._norm(label, x, weight, out, width, kernels.rms_norm(self.rows, width, eps))

    def head_norm(self, name: str, source: str, heads: int) -> Op:
        """RMSNorm of every head of a projection; heads are rows."""
        d = self.padded.head_dim
        spec = kernels.rms_norm(self.rows * heads, d, norm_eps(self.config.head_dim, d, self.config.rms_eps))
        return self._norm(f"{name}_norm", source, f"{name}_norm_w", f"{name}_normed", heads * d, spec)

    def _norm(self, label: str, x: str, weight: str, out: str, width: int, spec: KernelSpec) -> Op:
        step = Step(label, spec, {"x": x, "w": weight, "out": out})
        return Op(step, (self.wide(x, width), _static(weight, spec.dim("N")), self.wide(out, width)))

    def rope(self, name: str, source: str, heads: int) -> Op:
        """Rotary embedding of every head of a projection."""
        d = self.padded.head_dim
        count, width = self.rows * heads, heads * d
        table = Buffer(f"table_{name}", (count, d), role="input" if self.one else "static")
        operands = {"x": source, "table": table.name, "out": f"{name}_roped"}
        step = Step(f"rope_{name}", kernels.rope(count, d), operands)
        return Op(step, (self.wide(source, width), table, self.wide(f"{name}_roped", width)))

    def flat(self, name: str, width: int) -> Buffer:
        """An activation that an ELF is given as one long row, as the published ones are."""
        return Buffer(name, (self.rows * width,))

    def add(self, label: str, a: str, b: str, out: str, *, flat: bool = False) -> Op:
        """Sum of two activations as wide as the model; `flat` is about `b` where another ELF computed it."""
        width = self.padded.emb_dim
        step = Step(label, kernels.eltwise_add(self.rows * width), {"a": a, "b": b, "out": out})
        other = self.flat(b, width) if flat else self.wide(b, width)
        return Op(step, (self.wide(a, width), other, self.wide(out, width)))

    def silu_mul(self) -> Op:
        """swiglu = silu(gate) * up."""
        width = self.padded.hidden_dim
        spec = kernels.silu_mul(self.rows * width)
        step = Step("silu_mul", spec, {"gate": "gate", "up": "up", "out": "swiglu"})
        return Op(step, (self.flat("gate", width), self.flat("up", width), self.wide("swiglu", width)))

    def down(self) -> tuple[Op, ...]:
        """down = swiglu by w_down; where no GEMV holds its columns, the sum of one GEMV per slice of them."""
        e, h = self.padded.emb_dim, self.padded.hidden_dim
        slices = gemv_slices(e, h) if self.one else (slice(0, h),)
        if len(slices) == 1:
            return (self.product("down", "swiglu", "w_down", "down", (h, e)),)
        ops = []
        for number, columns in enumerate(slices):
            width = columns.stop - columns.start
            weight, out = _static(f"w_down{number}", e, width), self.wide(f"down{number}", e)
            x = OperandRef("swiglu", columns.start, (width,))
            step = Step(
                f"down_gemv{number}", kernels.gemv(e, width), {"w": weight.name, "x": x, "out": out.name}
            )
            ops.append(Op(step, (self.wide("swiglu", h), weight, out)))
        total = "down0"
        for number in range(1, len(slices)):
            target = "down" if number == len(slices) - 1 else f"down_sum{number}"
            ops.append(self.add(f"down_sum{number}", total, f"down{number}", target))
            total = target
        return tuple(ops)
