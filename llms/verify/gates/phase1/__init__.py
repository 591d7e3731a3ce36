"""Phase 1, kernels: every kernel at every shape the model needs, against fp32."""
