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
        if self.op not in _OPERANDS:
            known = ", ".join(sorted(_OPERANDS))
            raise ProgramError(f"unknown kernel op '{self.op}'; known ops: {known}")
        shapes = {name: tuple(map(self.dim, dims)) for name, dims in _OPERANDS[self.op].items()}
        if self.op == "flash_attention":
            shapes = _attention_shapes(self)
        if self.op == "norm_gateup_swiglu":  # residual and norm weight in one; rows of gate and up
            shapes |= {"packed": (2, *shapes["packed"]), "w": (2 * self.dim("hidden"), self.dim("emb"))}
        operands = {name: OperandSignature(shape) for name, shape in shapes.items()}
        operands["out"] = OperandSignature(shapes["out"], self.dtype_out, written=True)
        if self.method == "fused-cast":
            operands["scratch"] = OperandSignature(shapes["out"], "f32", written=True)
        return operands

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


# Operands of a kernel in the order of its argument list -> the dimensions of their shapes. What has more to
# it stands in `signature`.
_OPERANDS: dict[str, dict[str, tuple[str, ...]]] = {
    "gemm": {"a": ("M", "K"), "b": ("K", "N"), "out": ("M", "N")},
    "gemv": {"w": ("M", "K"), "x": ("K",), "out": ("M",)},
    "gemv_add": {"w": ("M", "K"), "x": ("K",), "residual": ("M",), "out": ("M",)},
    "norm_gateup_swiglu": {"packed": ("emb",), "w": ("hidden", "emb"), "out": ("hidden",)},
    "rms_norm": {"x": ("M", "N"), "w": ("N",), "out": ("M", "N")},
    "rope": {"x": ("rows", "head_dim"), "table": ("rows", "head_dim"), "out": ("rows", "head_dim")},
    "flash_attention": {},
    "eltwise_add": {"a": ("n",), "b": ("n",), "out": ("n",)},
    "bias_add": {"x": ("rows", "n"), "bias": ("n",), "out": ("rows", "n")},
    "silu_mul": {"gate": ("n",), "up": ("n",), "out": ("n",)},
}


def _attention_shapes(spec: KernelSpec) -> dict[str, Shape]:
    lq, lk, head_dim = spec.dim("lq"), spec.dim("lk"), spec.dim("head_dim")
    q_heads, kv_heads = spec.dim("q_heads"), spec.dim("kv_heads")
    if spec.method == "seq_first":
        q, kv = (lq, q_heads * head_dim), (lk, kv_heads * head_dim)
        return {"q": q, "k": kv, "v": kv, "out": q}
    dv_tile = dict(spec.tile).get("dv_tile", head_dim)
    chunks = head_dim // dv_tile
    return {
        "q": (q_heads, lq, head_dim),
        "k": (kv_heads, lk, head_dim),
        "v": (kv_heads * chunks, lk, dv_tile),
        "out": (q_heads * chunks, lq, dv_tile),
    }
