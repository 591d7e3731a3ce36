"""Name that folders of earlier scaffolds import; see llms.llama_kernel_builder.deployment.production."""

from llms.llama_kernel_builder.deployment.production import ProductionFunctions

__all__ = ["ProductionFunctions"]
