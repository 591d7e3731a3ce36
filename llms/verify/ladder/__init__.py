"""The gate ladder of phases 3 and 6: rungs, limits, calibration of a checkpoint nobody measured."""

from llms.verify.ladder.climbing import REFERENCE_RUNGS, RUNGS, climb, compiled_lengths, run_ladder

__all__ = ["REFERENCE_RUNGS", "RUNGS", "climb", "compiled_lengths", "run_ladder"]
