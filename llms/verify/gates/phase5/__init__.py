"""Phase 5, decode: every optimisation measured against the form before it."""
