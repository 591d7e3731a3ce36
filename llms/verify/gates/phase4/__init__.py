"""Phase 4, prefill: every optimisation measured against the form before it."""
