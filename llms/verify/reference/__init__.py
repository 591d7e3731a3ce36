"""What the device is held against: plain HF, the arithmetic-matched model, fp32 kernels."""
