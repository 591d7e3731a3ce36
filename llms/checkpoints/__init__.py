"""Checkpoint resolution: explicit path, local HF cache, hub, packaged GGUF, tiny checkpoint."""
