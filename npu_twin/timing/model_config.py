"""The sizes of a language model that its timing depends on."""

from __future__ import annotations

from dataclasses import dataclass

LARGEST = 1 << 20
"""No size of a model is above this."""
DEVICE_HEAD_DIMS = (64, 128)
"""Head sizes with a published prefill attention kernel; a deployment attends others on the host."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder-only model with RMSNorm, SwiGLU and RoPE.

    `unpadded_attention` is for sizes that are padded for the device: the width of all query heads and of all
    key heads of the model itself, where its own head size has no attention kernel and the host attends.
    """

    n_layers: int
    emb: int
    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    qkv_bias: bool = False
    qk_norm: bool = False
    unpadded_attention: tuple[int, int] | None = None

    @property
    def q_dim(self) -> int:
        """Width of all query heads together."""
        return self.q_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key heads together."""
        return self.kv_heads * self.head_dim

    @property
    def host_attention(self) -> tuple[int, int] | None:
        """Width of all query heads and of all key heads that the host attends in a prefill, or None."""
        if self.unpadded_attention is None and self.head_dim not in DEVICE_HEAD_DIMS:
            return self.q_dim, self.kv_dim
        return self.unpadded_attention

    @property
    def parameters(self) -> int:
        """Number of weights of the layers and of one vocabulary matrix."""
        layer = self.emb * (2 * self.q_dim + 2 * self.kv_dim) + 3 * self.emb * self.hidden
        return self.n_layers * layer + self.vocab * self.emb
