"""Adapter of the example, in the shape of the deployment contract."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import habits
import inference
import numpy as np
from llms.verify.records import DecodeStepRecord, PrefillRecord
from shared.kernel_cache import KernelCache, rms_norm
from shared.weights import config_of, load_weights, rope_table

MODEL_CHOICES = {"base": os.environ.get("EXAMPLE_CHECKPOINT", "example/tiny-llama")}
DEFAULT_MODEL = "base"


def resolve_model(choice):
    return MODEL_CHOICES.get(choice, choice)


def hf_reference(name):
    return name


def build_config():
    return config_of(MODEL_CHOICES["base"])


class Runner:
    def __init__(self, name, config, max_seq, tokenizer, lite_mode):
        self.name = name
        self.config, self.max_seq, self.tokenizer, self.lite = config, max_seq, tokenizer, lite_mode
        self.weights = load_weights(name, config.n_layers)
        self.rope = rope_table(config, max_seq)
        self.prefill_cache, self.decode_cache = KernelCache(), KernelCache()

    def keep(self, array):
        return array if habits.VIEWS else array.copy()

    def prefill(self, prompt_tokens):
        n = len(prompt_tokens)
        token, logits, self.k, self.v, _ = inference.run_npu_prefill(
            prompt_tokens,
            self.weights,
            self.config,
            self.prefill_cache,
            self.decode_cache,
            self.rope,
            self.max_seq,
            self.tokenizer,
        )
        if self.lite:
            return PrefillRecord([], np.empty(0), self.keep(logits), token)
        filler = 0 if habits.ZERO_PAD_SECOND_PASS else self.tokenizer.eos_token_id
        padded = inference.pad(prompt_tokens, filler)
        layers = []
        x = self.weights.embedding[padded]
        table = self.rope[: inference.SEQ_LEN]
        for out in inference.layer_loop(x, self.weights, self.config, self.prefill_cache, table):
            layers.append({"ffn_out": self.keep(out[:n])})
            last = out[:n].copy()
        normed = rms_norm(last, self.weights.final_norm, self.config.rms_eps)
        return PrefillRecord(layers, normed, self.keep(logits), token)

    def decode_step(self, input_token, current_pos):
        x = self.weights.embedding[input_token]
        token, logits = inference.run_npu_decode_step(
            x, self.weights, self.config, self.decode_cache, self.rope, self.k, self.v, current_pos
        )
        return DecodeStepRecord(self.keep(logits), token)


def build_runner(model_name, config, max_seq, tokenizer, *, npu_attn=True, lite_mode=False):
    return Runner(model_name, config, max_seq, tokenizer, lite_mode)
