"""Llama-3.2-1B on NPU2."""
