"""LLM deployments on NPU2: one folder per model, the kernel toolkit and the gates."""
