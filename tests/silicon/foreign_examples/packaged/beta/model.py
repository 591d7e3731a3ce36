"""The model of both sides."""

import torch
from transformers import AutoModelForCausalLM


def load(folder):
    """Any causal language model, bf16."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
