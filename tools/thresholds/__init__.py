"""Measure the limits of the gate ladder: clean devices, reordered sums, planted faults."""
