"""Options, phases, models, state and fixtures of a run."""
