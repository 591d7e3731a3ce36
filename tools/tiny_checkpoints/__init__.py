"""Training of the tiny checkpoints that stand in for the production models of each family."""
