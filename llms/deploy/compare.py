"""Name that folders of earlier scaffolds import; see llms.llama_kernel_builder.deployment.compare."""

from llms.llama_kernel_builder.deployment.compare import beside_silicon

__all__ = ["beside_silicon"]
