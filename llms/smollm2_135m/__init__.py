"""SmolLM2-135M on NPU2."""
