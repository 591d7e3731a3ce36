"""tiny on NPU2."""
