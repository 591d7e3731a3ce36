"""Benchmarks: ratios measured in one run, never asserted in unit tests."""
