"""How the gates reach Llama-3.2-1B: the names of the deployment contract."""

from llms.llama_kernel_builder.deployment.adapter import ModelAdapter

from . import llama32_1b_inference as inference
from .llama32_1b_weights import CONFIG, SOURCE

MODEL_CHOICES, DEFAULT_MODEL = SOURCE.choices, SOURCE.default
_adapter = ModelAdapter(inference, SOURCE, CONFIG)
resolve_model = _adapter.resolve_model
checkpoint = SOURCE.checkpoint
hf_reference = _adapter.hf_reference
build_config = _adapter.build_config
build_runner = _adapter.build_runner
