"""Phase 2, block: one assembled layer against the reference."""
