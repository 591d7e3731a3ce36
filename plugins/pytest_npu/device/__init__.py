"""The device of a run: driver, lock, supervisor, watchdog, preflight."""
