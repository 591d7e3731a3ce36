"""Name that folders of earlier scaffolds import; see llms.llama_kernel_builder.deployment.inference_cli."""

from llms.llama_kernel_builder.deployment.inference_cli import main

__all__ = ["main"]
