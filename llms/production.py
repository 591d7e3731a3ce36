"""Name that folders of earlier scaffolds import; see llms.llama_kernel_builder.earlier."""

from llms.llama_kernel_builder.earlier import ProductionFunctions

__all__ = ["ProductionFunctions"]
