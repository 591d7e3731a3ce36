"""Single launches of a deployment: what a runner with the ability ``launch_probe`` shows of them.

The records name kernels, buffers and operands as the deployed programs do (the names of the blocks of the
mlir-air LLM examples); see :class:`llms.verify.contract.abilities.LaunchProbe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llms.verify.contract.records import Array


@dataclass(frozen=True)
class Launch:
    """One kernel launch inside an ELF.

    op: the operation, as in :mod:`llms.verify.reference.kernels`. reads: operand -> argument of the ELF that
    it is bound to. writes: argument that holds the result.
    """

    name: str
    op: str
    reads: Mapping[str, str]
    writes: str


@dataclass(frozen=True, eq=False)
class ElfRun:
    """One run of one ELF, and what its arguments hold afterwards.

    roles: every argument in order -> ``input``, ``static``, ``intermediate`` or ``output``. arguments:
    contents in bf16 of all but the static ones. static: contents of those, at the first run of a layer only.
    """

    elf: str
    layer: int
    roles: Mapping[str, str]
    launches: tuple[Launch, ...]
    arguments: Mapping[str, Array]
    static: Mapping[str, Array]

    def label(self, argument: str) -> str:
        """Name of the launch that writes an argument, as `elf.launch`."""
        for launch in self.launches:
            if launch.writes == argument:
                return self.elf if self.elf.endswith(f".{launch.name}") else f"{self.elf}.{launch.name}"
        return self.elf

    def reader(self, argument: str) -> str:
        """Label of the first launch that reads an argument."""
        for launch in self.launches:
            if argument in launch.reads.values():
                return self.label(launch.writes)
        return self.elf


@dataclass(frozen=True, eq=False)
class KernelCall:
    """One kernel about to run on its own: what a reference needs to compute the same. inputs: by operand."""

    op: str
    dims: Mapping[str, int]
    method: str
    attrs: Mapping[str, Any]
    inputs: Mapping[str, Array]


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model, of the checkpoint or as padded for the device."""

    n_layers: int
    emb_dim: int
    hidden_dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def q_dim(self) -> int:
        """Columns of Q."""
        return self.n_heads * self.head_dim


@dataclass(frozen=True, eq=False)
class LayeredWeights:
    """Weights of a model in bf16, projections ``[out, in]`` as Hugging Face stores them.

    layers: per layer, by name: ``attn_norm wq wk wv wo ffn_norm w_gate w_up w_down`` and, where the model has
    them, ``bq bk bv bo q_norm k_norm``.
    """

    embedding: Array
    layers: tuple[Mapping[str, Array], ...]
    final_norm: Array
    lm_head: Array
