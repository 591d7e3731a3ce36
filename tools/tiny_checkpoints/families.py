"""What each tiny checkpoint looks like: its traits, its tokenizer, its chat template, its config file's form.

The traits follow the published configurations (meta-llama/Llama-3.2-1B-Instruct,
HuggingFaceTB/SmolLM2-135M-Instruct, Qwen/Qwen2.5-0.5B-Instruct, Qwen/Qwen3-0.6B); only sizes shrink.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MAX_POSITION = 2048

# Llama 3: the template writes the begin token, and so does plain encoding (the trap of a doubled one).
LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def chatml_template(system: str | None) -> str:
    """Return a ChatML template; ``system`` is said first when the conversation does not bring its own."""
    opening = (
        ""
        if system is None
        else "{% if loop.first and message['role'] != 'system' %}"
        "{{ '<|im_start|>system\n" + system + "<|im_end|>\n' }}{% endif %}"
    )
    return (
        "{% for message in messages %}"
        + opening
        + "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


@dataclass(frozen=True)
class TokenizerSpec:
    """How a family cuts text.

    Attributes:
        entries: tokens in all, special ones included; may be fewer than the model's vocabulary, as in Qwen.
        special: special tokens, in the order of their ids.
        special_first: they take the first ids (SmolLM2) or the last ones.
        digits: longest run of digits in one token.
        bos, eos, pad: the named ones; ``bos`` None means that the family has none.
        add_bos: plain encoding puts ``bos`` in front.
        nfc: text is normalised first.
        stop: every token that ends a generation.
        chat_template: Jinja text.
    """

    entries: int
    special: tuple[str, ...]
    special_first: bool
    digits: int
    bos: str | None
    eos: str
    pad: str
    add_bos: bool
    nfc: bool
    stop: tuple[str, ...]
    chat_template: str


@dataclass(frozen=True)
class Family:
    """One tiny checkpoint.

    Attributes:
        folder: model folder under ``llms/`` that owns it.
        stands_for: the published model.
        model_type: ``llama``, ``qwen2`` or ``qwen3``.
        vocab, hidden, ffn, layers, heads, kv_heads, head_dim: sizes; matrix sides are multiples of 64.
        tied: the head is the embedding.
        eps: of every RMS norm.
        rope: rope parameters in the transformers 5 form, ``rope_theta`` included.
        config_form: 4 or 5, the transformers version whose ``config.json`` layout is written.
        extra: further config fields of the architecture.
        seed, steps: of the training.
    """

    folder: str
    stands_for: str
    model_type: str
    tokenizer: TokenizerSpec
    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    eps: float
    rope: dict[str, Any]
    config_form: int
    seed: int
    steps: int
    extra: dict[str, Any] = field(default_factory=dict)


_CHATML_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA3_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)

LLAMA32 = Family(
    folder="llama32_1b",
    stands_for="meta-llama/Llama-3.2-1B-Instruct",
    model_type="llama",
    tokenizer=TokenizerSpec(
        entries=2048,
        special=_LLAMA3_SPECIAL,
        special_first=False,
        digits=3,
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        pad="<|end_of_text|>",
        add_bos=True,
        nfc=False,
        stop=("<|end_of_text|>", "<|eot_id|>"),
        chat_template=LLAMA3_TEMPLATE,
    ),
    vocab=2048,
    hidden=256,
    ffn=512,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=64,
    tied=True,
    eps=1e-5,
    # The published model's scaling (factor 32) with an original context that every prompt leaves.
    rope={
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    config_form=5,
    seed=3201,
    steps=600,
    extra={"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
)

SMOLLM2 = Family(
    folder="smollm2_135m",
    stands_for="HuggingFaceTB/SmolLM2-135M-Instruct",
    model_type="llama",
    tokenizer=TokenizerSpec(
        entries=2304,
        special=_CHATML_SPECIAL,
        special_first=True,
        digits=1,
        bos="<|im_start|>",
        eos="<|im_end|>",
        pad="<|im_end|>",
        add_bos=False,
        nfc=False,
        stop=("<|im_end|>",),
        chat_template=chatml_template("You are a helpful assistant."),
    ),
    vocab=2304,
    hidden=192,
    ffn=512,
    layers=4,
    heads=3,
    kv_heads=1,
    head_dim=64,
    tied=True,
    eps=1e-5,
    rope={"rope_type": "default", "rope_theta": 100000.0},
    config_form=5,
    seed=1351,
    steps=640,
    extra={"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
)

QWEN2 = Family(
    folder="qwen2",
    stands_for="Qwen/Qwen2.5-0.5B-Instruct",
    model_type="qwen2",
    tokenizer=TokenizerSpec(
        entries=2500,
        special=_CHATML_SPECIAL,
        special_first=False,
        digits=1,
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        add_bos=False,
        nfc=True,
        stop=("<|im_end|>", "<|endoftext|>"),
        chat_template=chatml_template("You are a helpful assistant."),
    ),
    vocab=2560,
    hidden=256,
    ffn=512,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=64,
    tied=True,
    eps=1e-6,
    rope={"rope_type": "default", "rope_theta": 1000000.0},
    config_form=5,
    seed=2501,
    steps=600,
    extra={"use_sliding_window": False, "sliding_window": None, "max_window_layers": 3},
)

QWEN3 = Family(
    folder="qwen3_0_6b",
    stands_for="Qwen/Qwen3-0.6B",
    model_type="qwen3",
    tokenizer=TokenizerSpec(
        entries=2150,
        special=_CHATML_SPECIAL,
        special_first=False,
        digits=1,
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        add_bos=False,
        nfc=True,
        stop=("<|im_end|>", "<|endoftext|>"),
        chat_template=chatml_template(None),
    ),
    vocab=2176,
    hidden=256,
    ffn=512,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=128,
    tied=False,
    eps=1e-6,
    rope={"rope_type": "default", "rope_theta": 1000000.0},
    config_form=4,
    seed=3061,
    steps=600,
    extra={
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 2,
    },
)

FAMILIES = {family.folder: family for family in (LLAMA32, SMOLLM2, QWEN2, QWEN3)}


def config_dict(family: Family, ids: dict[str, int]) -> dict[str, Any]:
    """Return ``config.json`` in the family's form; ``ids`` maps special tokens to their ids."""
    tokenizer = family.tokenizer
    config: dict[str, Any] = {
        "architectures": [
            {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[
                family.model_type
            ]
        ],
        "attention_dropout": 0.0,
        "bos_token_id": ids[tokenizer.bos] if tokenizer.bos else None,
        "eos_token_id": ids[tokenizer.eos],
        "pad_token_id": ids[tokenizer.pad],
        "head_dim": family.head_dim,
        "hidden_act": "silu",
        "hidden_size": family.hidden,
        "initializer_range": 0.02,
        "intermediate_size": family.ffn,
        "max_position_embeddings": MAX_POSITION,
        "model_type": family.model_type,
        "num_attention_heads": family.heads,
        "num_hidden_layers": family.layers,
        "num_key_value_heads": family.kv_heads,
        "rms_norm_eps": family.eps,
        "tie_word_embeddings": family.tied,
        "use_cache": True,
        "vocab_size": family.vocab,
        **family.extra,
    }
    if family.model_type == "qwen2":
        del config["head_dim"]  # Qwen2's published files do not have the field
    if family.config_form == 5:
        config |= {"dtype": "bfloat16", "rope_parameters": dict(family.rope), "transformers_version": "5.0.0"}
    else:
        scaling = {key: value for key, value in family.rope.items() if key != "rope_theta"}
        config |= {
            "torch_dtype": "bfloat16",
            "rope_theta": family.rope["rope_theta"],
            "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
            "transformers_version": "4.51.0",
        }
    return dict(sorted(config.items()))


def generation_dict(family: Family, ids: dict[str, int]) -> dict[str, Any]:
    """Return ``generation_config.json``: greedy, with every stop token of the family."""
    tokenizer = family.tokenizer
    stop = [ids[token] for token in tokenizer.stop]
    generation = {
        "do_sample": False,
        "eos_token_id": stop if len(stop) > 1 else stop[0],
        "pad_token_id": ids[tokenizer.pad],
        "transformers_version": "5.0.0" if family.config_form == 5 else "4.51.0",
    }
    if tokenizer.bos:
        generation["bos_token_id"] = ids[tokenizer.bos]
    return dict(sorted(generation.items()))
