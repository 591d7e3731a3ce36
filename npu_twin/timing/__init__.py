"""Modelled time of the NPU2: launches, whole programs, buffer transfers, host work and whole models.

Everything here is a prediction in microseconds of device time, computed from the listing or the configuration
alone: no value is computed and no weight is needed. The functions are plain Python and cheap enough for the
decode loop. How the parameters were found and how well they predict is told in `docs/twin.md`;
`python -m tools.twin_calibration` fits them anew, `python -m npu_twin.validate` holds them against
measurements.
"""

from npu_twin.timing.kernels import launch_us, standalone_us
from npu_twin.timing.model_config import ModelSizes
from npu_twin.timing.predictor import Part, Prediction, predict
from npu_twin.timing.program import RunTiming, run_us
from npu_twin.timing.system import (
    context_switch_us,
    dispatch_us,
    host_op_us,
    sync_us,
    wake_us,
)

__all__ = [
    "ModelSizes",
    "Part",
    "Prediction",
    "RunTiming",
    "context_switch_us",
    "dispatch_us",
    "host_op_us",
    "launch_us",
    "predict",
    "run_us",
    "standalone_us",
    "sync_us",
    "wake_us",
]
