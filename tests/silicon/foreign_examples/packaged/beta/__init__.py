"""One model."""
