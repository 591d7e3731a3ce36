"""One kernel at one shape, as a deployment describes it to phase 1."""

from __future__ import annotations

from dataclasses import dataclass, field

Scalar = int | float | bool | str


@dataclass(frozen=True)
class RegistryRow:
    """The registry row that configures a kernel: its id, where its figures come from, its users."""

    id: str
    provenance: str
    used_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class KernelCase:
    """One kernel at one shape as a deployment launches it: what it computes and how, no limit.

    Cases that launch the same are equal, whatever registry row or prompt length they come from.

    Attributes:
        model: name of the model folder.
        op: operation (``gemm``, ``rope`` ...), as :mod:`llms.verify.reference.kernels` names it.
        sizes: dimensions by name, in the order of a shape as it is written.
        method: implementation (``drain``, ``half_split`` ...); empty where no configuration is known.
        tile: tile sizes by name.
        herd: columns and rows of cores.
        attrs: what else decides the result, such as ``eps`` and ``causal``.
        dtype_out: ``bf16`` or ``f32``. All operands that are read are bf16.
        prompt_len: the shortest compiled prompt length that launches it; 0 for decode.
        row: the registry row behind the configuration, None where there is none.
        unavailable: why there is no configuration, with the remedy; empty where there is one.
        command: shell command that enters the model as a user of the row.
    """

    model: str
    op: str
    sizes: tuple[tuple[str, int], ...]
    method: str = ""
    tile: tuple[tuple[str, int], ...] = ()
    herd: tuple[int, int] = (1, 1)
    attrs: tuple[tuple[str, Scalar], ...] = ()
    dtype_out: str = "bf16"
    prompt_len: int = field(default=0, compare=False)
    row: RegistryRow | None = field(default=None, compare=False)
    unavailable: str = field(default="", compare=False)
    command: str = field(default="", compare=False)

    def __str__(self) -> str:
        text = f"{self.op}-{'x'.join(str(size) for size in self.shape)}"
        eps = dict(self.attrs).get("eps", 1e-5)
        return text if eps == 1e-5 else f"{text}-eps{eps:.4g}"

    @property
    def dims(self) -> dict[str, int]:
        """Dimensions by name."""
        return dict(self.sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes alone, in the order they are written."""
        return tuple(size for _, size in self.sizes)
