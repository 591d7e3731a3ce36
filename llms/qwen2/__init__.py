"""Qwen2.5 on NPU2."""
