"""The device: a Hugging Face model with a cache of the fed tokens."""

import torch
from transformers import AutoModelForCausalLM


class Device:
    """Runs whole sequences; one global instance."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def run(self, ids):
        """(hidden states per layer, final norm, logits) of all positions, float32."""
        out = self.model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        hidden = [h[0].float() for h in out.hidden_states[1:]]
        return hidden[:-1], hidden[-1], out.logits[0].float()
