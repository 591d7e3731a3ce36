"""How the gates reach SmolLM2-135M: the names of the deployment contract."""

from llms.llama_kernel_builder.deployment.adapter import ModelAdapter

from . import smollm2_135m_inference as inference
from .smollm2_135m_weights import CONFIG, SOURCE

MODEL_CHOICES, DEFAULT_MODEL = SOURCE.choices, SOURCE.default
_adapter = ModelAdapter(inference, SOURCE, CONFIG)
resolve_model = _adapter.resolve_model
checkpoint = SOURCE.checkpoint
hf_reference = _adapter.hf_reference
build_config = _adapter.build_config
build_runner = _adapter.build_runner
