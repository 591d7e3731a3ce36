"""Proof that a run has the same bits under every setting that chooses instructions, threads or a BLAS."""
