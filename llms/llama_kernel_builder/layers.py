"""Names that folders of earlier scaffolds import; see llms.llama_kernel_builder.earlier."""

from .earlier import run_ffn, run_ffn_gemv

__all__ = ["run_ffn", "run_ffn_gemv"]
