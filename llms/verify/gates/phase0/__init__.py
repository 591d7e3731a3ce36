"""Phase 0, reference: weights, configuration, token ids and the reference run."""
