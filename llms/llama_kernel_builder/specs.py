"""Kernel specifications: what one launch computes, with which tile, on which part of the array."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .exceptions import ProgramError

Scalar = int | float | bool | str
Shape = tuple[int, ...]

DTYPE_BYTES = {"bf16": 2, "f32": 4}


@dataclass(frozen=True)
class OperandSignature:
    """Shape, dtype (`bf16` or `f32`) and direction of one operand of a kernel."""

    shape: Shape
    dtype: str = "bf16"
    written: bool = False


@dataclass(frozen=True)
class KernelSpec:
    """One leaf kernel: frozen, hashable, printable.

    `dims`, `tile` and `attrs` are sorted tuples of pairs so that equal specs hash equally.
    `herd` is (columns, rows) of the compute array. `rounding` overrides the mode of the core
    (`floor` or `nearest_even`); None leaves the toolchain's default for the op.
    `symbol` and `object_file` name the external object code: they carry what the object is compiled for (an
    object of another tile gives wrong numbers, mlir-air kernel registry).
    """

    op: str
    dims: tuple[tuple[str, int], ...]
    method: str
    tile: tuple[tuple[str, int], ...] = ()
    herd: tuple[int, int] = (1, 1)
    attrs: tuple[tuple[str, Scalar], ...] = ()
    dtype_out: str = "bf16"
    rounding: str | None = None

    @classmethod
    def make(
        cls,
        op: str,
        dims: Mapping[str, int],
        method: str,
        tile: Mapping[str, int] | None = None,
        herd: tuple[int, int] = (1, 1),
        attrs: Mapping[str, Scalar] | None = None,
        dtype_out: str = "bf16",
        rounding: str | None = None,
    ) -> KernelSpec:
        """Build a spec from mappings. Raises ProgramError for an unknown op or a missing dimension."""
        spec = cls(
            op=op,
            dims=tuple(sorted(dims.items())),
            method=method,
            tile=tuple(sorted((tile or {}).items())),
            herd=(int(herd[0]), int(herd[1])),
            attrs=tuple(sorted((attrs or {}).items())),
            dtype_out=dtype_out,
            rounding=rounding,
        )
        spec.signature()
        return spec

    def dim(self, name: str) -> int:
        """Return one dimension; raises ProgramError when the spec lacks it."""
        for key, value in self.dims:
            if key == name:
                return value
        raise ProgramError(f"kernel '{self.op}' needs dimension '{name}', has {dict(self.dims)}")

    @property
    def symbol(self) -> str:
        """External symbol of the object code, unique per everything the object is compiled for.

        That is op, method, tile, attributes (eps, mask), rounding, an f32 result, and the dimensions in
        `_BAKED_DIMS`: two GEMVs of different K in one ELF have buffers of different types, attention is
        compiled for its head size (mlir-air rules V8, F14).
        """
        parts = [self.op, self.method.replace("-", "")]
        parts += [f"{name.lower()}{self.dim(name)}" for name in _BAKED_DIMS.get(self.op, ())]
        parts += [f"{key.replace('tile_', '')}{value}" for key, value in self.tile]
        parts += [f"{key}{_word(value)}" for key, value in self.attrs]
        parts += [self.dtype_out] if self.dtype_out != "bf16" else []
        parts += [self.rounding] if self.rounding is not None else []
        return "_".join(part for part in parts if part)

    @property
    def object_file(self) -> str:
        """File name of the external object code."""
        return f"{self.symbol}.o"

    def signature(self) -> dict[str, OperandSignature]:
        """Operands by name, in the order of the kernel's argument list."""
        try:
            build = _SIGNATURES[self.op]
        except KeyError:
            known = ", ".join(sorted(_SIGNATURES))
            raise ProgramError(f"unknown kernel op '{self.op}'; known ops: {known}") from None
        return build(self)

    def __str__(self) -> str:
        dims = " ".join(f"{key}={value}" for key, value in sorted(self.dims, key=_reading_order))
        tile = " ".join(f"{key}={value}" for key, value in self.tile)
        return f"{self.op}[{dims}] {self.method} tile({tile}) herd {self.herd[0]}x{self.herd[1]}"


# Dimensions that object code is compiled for; the others are loop counts of the module around it.
_BAKED_DIMS = {
    "gemv": ("K",),
    "gemv_add": ("K",),
    "norm_gateup_swiglu": ("emb",),
    "rms_norm": ("N",),
    "rope": ("head_dim",),
    "flash_attention": ("head_dim",),
}


def _word(value: Scalar) -> str:
    """A value as part of a C identifier."""
    return str(value).lower().replace("-", "m").replace(".", "p").replace("+", "")


def _reading_order(dim: tuple[str, int]) -> tuple[int, str]:
    """Sort key: M, K, N as everybody writes them, the rest by name."""
    return ("MKN".find(dim[0]) if dim[0] in "MKN" else 3, dim[0])


def _out(shape: Shape, dtype: str = "bf16") -> OperandSignature:
    return OperandSignature(shape, dtype, written=True)


def _in(shape: Shape, dtype: str = "bf16") -> OperandSignature:
    return OperandSignature(shape, dtype)


def _gemm(spec: KernelSpec) -> dict[str, OperandSignature]:
    m, k, n = spec.dim("M"), spec.dim("K"), spec.dim("N")
    operands = {"a": _in((m, k)), "b": _in((k, n)), "out": _out((m, n), spec.dtype_out)}
    if spec.method == "fused-cast":
        operands["scratch"] = _out((m, n), "f32")
    return operands


def _gemv(spec: KernelSpec) -> dict[str, OperandSignature]:
    m, k = spec.dim("M"), spec.dim("K")
    return {"w": _in((m, k)), "x": _in((k,)), "out": _out((m,))}


def _gemv_add(spec: KernelSpec) -> dict[str, OperandSignature]:
    m, k = spec.dim("M"), spec.dim("K")
    return {"w": _in((m, k)), "x": _in((k,)), "residual": _in((m,)), "out": _out((m,))}


def _norm_gateup_swiglu(spec: KernelSpec) -> dict[str, OperandSignature]:
    emb, hidden = spec.dim("emb"), spec.dim("hidden")
    return {"packed": _in((2, emb)), "w": _in((2 * hidden, emb)), "out": _out((hidden,))}


def _rms_norm(spec: KernelSpec) -> dict[str, OperandSignature]:
    m, n = spec.dim("M"), spec.dim("N")
    return {"x": _in((m, n)), "w": _in((n,)), "out": _out((m, n))}


def _rope(spec: KernelSpec) -> dict[str, OperandSignature]:
    shape = (spec.dim("rows"), spec.dim("head_dim"))
    return {"x": _in(shape), "table": _in(shape), "out": _out(shape)}


def _flash_attention(spec: KernelSpec) -> dict[str, OperandSignature]:
    lq, lk, head_dim = spec.dim("lq"), spec.dim("lk"), spec.dim("head_dim")
    q_heads, kv_heads = spec.dim("q_heads"), spec.dim("kv_heads")
    if spec.method == "seq_first":
        q, kv = (lq, q_heads * head_dim), (lk, kv_heads * head_dim)
        return {"q": _in(q), "k": _in(kv), "v": _in(kv), "out": _out(q)}
    dv_tile = dict(spec.tile).get("dv_tile", head_dim)
    chunks = head_dim // dv_tile
    return {
        "q": _in((q_heads, lq, head_dim)),
        "k": _in((kv_heads, lk, head_dim)),
        "v": _in((kv_heads * chunks, lk, dv_tile)),
        "out": _out((q_heads * chunks, lq, dv_tile)),
    }


def _eltwise_add(spec: KernelSpec) -> dict[str, OperandSignature]:
    shape = (spec.dim("n"),)
    return {"a": _in(shape), "b": _in(shape), "out": _out(shape)}


def _bias_add(spec: KernelSpec) -> dict[str, OperandSignature]:
    rows, n = spec.dim("rows"), spec.dim("n")
    return {"x": _in((rows, n)), "bias": _in((n,)), "out": _out((rows, n))}


def _silu_mul(spec: KernelSpec) -> dict[str, OperandSignature]:
    shape = (spec.dim("n"),)
    return {"gate": _in(shape), "up": _in(shape), "out": _out(shape)}


_SIGNATURES = {
    "gemm": _gemm,
    "gemv": _gemv,
    "gemv_add": _gemv_add,
    "norm_gateup_swiglu": _norm_gateup_swiglu,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "flash_attention": _flash_attention,
    "eltwise_add": _eltwise_add,
    "bias_add": _bias_add,
    "silu_mul": _silu_mul,
}
