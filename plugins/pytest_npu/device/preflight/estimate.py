"""How much memory a model needs, from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BF16 = 2
#: Interpreter, torch and transformers without a model, measured with torch 2.13 on x86: about 0.7 GiB.
PROCESS_BYTES = 3 * 2**28
LARGEST_BUCKET = 2048
#: Activations of one layer at the largest prefill length: hidden states, projections and float32 scratch.
ACTIVATION_FACTOR = 16


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes. device: buffer objects of one session; peak: the larger of session and reference, alone."""

    model: str
    weights: int
    device: int
    peak: int


def estimate(model: str, config: Any) -> MemoryEstimate:
    """Estimate from n_layers, emb_dim, n_heads, n_kv_heads, head_dim, hidden_dim and vocab_size."""
    emb, hidden = int(config.emb_dim), int(config.hidden_dim)
    q, kv = int(config.n_heads) * int(config.head_dim), int(config.n_kv_heads) * int(config.head_dim)
    layer = emb * q * 2 + emb * kv * 2 + emb * hidden * 3 + 2 * emb
    layers = int(config.n_layers) * layer * BF16
    head = int(config.vocab_size) * emb * BF16
    cache = 2 * int(config.n_layers) * kv * LARGEST_BUCKET * BF16
    activations = ACTIVATION_FACTOR * LARGEST_BUCKET * max(emb, hidden) * BF16
    weights = layers + head * (1 if getattr(config, "tied_embeddings", True) else 2)
    device = 2 * layers + head + activations
    session = weights + device + cache
    reference = weights + cache
    return MemoryEstimate(model, weights, device, max(session, reference) + PROCESS_BYTES)
