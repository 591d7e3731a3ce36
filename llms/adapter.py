"""Name that folders of earlier scaffolds import; see llms.llama_kernel_builder.deployment.adapter."""

from llms.llama_kernel_builder.deployment.adapter import CheckpointSource, ModelAdapter, use_registry

__all__ = ["CheckpointSource", "ModelAdapter", "use_registry"]
