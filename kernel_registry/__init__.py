"""Measured kernel configurations: the one source of tiles, tolerances and figures."""
