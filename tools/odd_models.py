"""Small random checkpoints of unusual shapes, to try a deployment on models it has never seen.

    python -m tools.odd_models FOLDER NAME [field=value ...]

The logits of a freshly initialised model are nearly equal, so that a gate on tokens would judge noise; here
the head is scaled until the best tokens stand apart, and biases and norm weights are moved away from 0 and 1.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
# Standard deviation of the logits; a trained model has 2 to 4.
LOGIT_SPREAD = 3.0


def make_checkpoint(
    folder: Path,
    model_type: str,
    fields: Mapping[str, Any],
    *,
    tokenizer: Path | None,
    seed: int = 0,
    shards: bool = False,
    dtype: str = "bfloat16",
    v4: bool = False,
) -> Path:
    """Write a random checkpoint.

    Args:
        folder: created.
        model_type: of transformers, such as ``llama`` or ``qwen2``.
        fields: fields of its configuration.
        tokenizer: folder to copy the tokenizer from; None trains one of ``vocab_size`` entries.
        seed: of the weights.
        shards: several files and an index instead of one file.
        dtype: of the stored weights.
        v4: write config.json as transformers 4 did.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(1.0, 0.1)
            elif name.endswith(".bias"):
                parameter.normal_(0.0, 0.3)
            elif "layers" in name:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
            else:
                parameter.normal_(0.0, LOGIT_SPREAD * config.hidden_size**-0.5)
    model.generation_config.do_sample = False
    size = "300KB" if shards else "50GB"
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=size)
    if tokenizer is None:
        train_tokenizer(folder, config.vocab_size)
    else:
        for file in TOKENIZER_FILES:
            shutil.copyfile(tokenizer / file, folder / file)
    if v4:
        to_v4(folder / "config.json")
    return folder


def train_tokenizer(folder: Path, entries: int) -> None:
    """A byte-level tokenizer of at most ``entries`` tokens, trained on a few sentences, with an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([__doc__ or "", str(make_checkpoint.__doc__)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)


def to_v4(path: Path) -> None:
    """Rewrite a config.json in the form of transformers 4: rope_theta, rope_scaling, torch_dtype."""
    data = json.loads(path.read_text(encoding="utf-8"))
    rope = dict(data.pop("rope_parameters"))
    data["rope_theta"] = rope.pop("rope_theta")
    data["rope_scaling"] = None if rope.get("rope_type") == "default" else rope
    data["torch_dtype"] = data.pop("dtype", "float32")
    data["transformers_version"] = "4.51.0"
    path.write_text(json.dumps(data, indent=2), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Make one checkpoint from the command line."""
    folder, model_type, *pairs = arguments
    fields: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        try:
            fields[key] = json.loads(value)
        except ValueError:
            fields[key] = value
    make_checkpoint(Path(folder), model_type, fields, tokenizer=None)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
