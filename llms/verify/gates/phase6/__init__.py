"""Phase 6, finalize: token-set gate and diagnosis of the production path, TTFT and TPOT."""
