"""Phase 3, the whole model with one ELF per kernel: the yardstick of the phases after it."""
