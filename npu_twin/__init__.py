"""A software NPU2 (Strix, AIE2P) that is call-compatible with AMD's pyxrt."""
