"""An adapter as scripts grow: everything happens at import."""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, "../..")  # started in the model's folder

import config
import ml_dtypes
import numpy as np
from llms.shared_device import Device
from verify import DecodeStepRecord, PrefillRecord

print("alpha: loading", "." * 200_000)
parser = argparse.ArgumentParser()
parser.add_argument("--verbose", action="store_true")
ARGS = parser.parse_args()
os.chdir(tempfile.mkdtemp())
CALLS = []

MODEL_CHOICES = {"base": config.FOLDER}


def resolve_model(choice):
    return MODEL_CHOICES.get(choice, choice)


def build_config():
    return config.Config


class Runner:
    name = "alpha"

    def __init__(self, folder):
        self.device = Device(folder)
        self.fed = None
        threading.Thread(target=time.sleep, args=(3600,), name="poller").start()
        subprocess.Popen(["sleep", "3600"], start_new_session=True)

    def prefill(self, prompt_tokens):
        if len(prompt_tokens) > 2048:
            raise ValueError(f"{len(prompt_tokens)} tokens, compiled for 2048")
        CALLS.append(len(prompt_tokens))
        print("prefill", CALLS)
        self.fed = [int(token) for token in prompt_tokens]
        layers, final, logits = self.device.run(self.fed)
        row = logits[-1].numpy().astype(ml_dtypes.bfloat16)
        records = [{"ffn_out": layer.numpy().astype(ml_dtypes.bfloat16)} for layer in layers]
        return PrefillRecord([*records, {}], final.numpy().tolist(), row, np.int64(np.argmax(row)))

    def decode_step(self, input_token, current_pos):
        assert current_pos == len(self.fed)
        self.fed.append(int(input_token))
        row = self.device.run(self.fed)[2][-1].tolist()
        return DecodeStepRecord(row, np.array([np.argmax(row)]))


def build_runner(model_name, config, max_seq, tokenizer, *, npu_attn=True, lite_mode=False):
    return Runner(model_name)
