"""How the gates reach tiny: the names of the deployment contract."""

from llms.adapter import ModelAdapter
from oldmodel import oldmodel_inference as inference
from oldmodel.oldmodel_weights import CONFIG, DEFAULT_MODEL, MODEL_CHOICES, SOURCE

_adapter = ModelAdapter(inference, SOURCE, CONFIG)
resolve_model = _adapter.resolve_model
checkpoint = SOURCE.checkpoint
hf_reference = _adapter.hf_reference
build_config = _adapter.build_config
build_runner = _adapter.build_runner

__all__ = [
    "CONFIG",
    "DEFAULT_MODEL",
    "MODEL_CHOICES",
    "build_config",
    "build_runner",
    "checkpoint",
    "hf_reference",
    "inference",
    "resolve_model",
]
