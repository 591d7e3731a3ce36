"""How the gates reach Qwen3-0.6B: the names of the deployment contract."""

from llms.llama_kernel_builder.deployment.adapter import ModelAdapter

from . import qwen3_0_6b_inference as inference
from .qwen3_0_6b_weights import CONFIG, SOURCE

MODEL_CHOICES, DEFAULT_MODEL = SOURCE.choices, SOURCE.default
_adapter = ModelAdapter(inference, SOURCE, CONFIG)
resolve_model = _adapter.resolve_model
checkpoint = SOURCE.checkpoint
hf_reference = _adapter.hf_reference
build_config = _adapter.build_config
build_runner = _adapter.build_runner
