"""Host operations of tiny: embedding, final norm of one row, attention on the host."""

from llms.llama_kernel_builder.host_ops import decode_attention, embed, final_rms_norm, prefill_attention

__all__ = ["decode_attention", "embed", "final_rms_norm", "prefill_attention"]
