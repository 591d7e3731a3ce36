"""Qwen3-0.6B on NPU2."""
