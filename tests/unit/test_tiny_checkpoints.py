"""The committed tiny checkpoints: complete, trained, and with the traits that make each family hard.

Names and shapes that a checkpoint must hold are written out here a second time. Each trait is checked by what
it does, too: taking it away must make the model worse on text that it knows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from llms.checkpoints import load_tensors, resolve, tensor_table
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.llama_kernel_builder.weights import expected_tensors
from llms.verify.contract.chat import encode_prompt
from llms.verify.contract.prompts import load_prompts

LLMS = Path(__file__).resolve().parents[2] / "llms"
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
MAX_BYTES = 6_300_000
# A paragraph of help("assignment"), the same in CPython 3.10 to 3.14 (PSF-2.0).
KNOWN = (
    "Assignment is defined recursively depending on the form of the target (list). When a target is "
    "part of a mutable object (an attribute reference, subscription or slicing), the mutable object "
    "must ultimately perform the assignment and decide about its validity, and may raise an exception "
    "if the assignment is unacceptable. The rules observed by various types and the exceptions raised "
    "are given with the definition of the object types (see section The standard type hierarchy)."
)
# Floors well under the figures in tools/tiny_checkpoints/README.md, far above an untrained model's.
MIN_TOP1, MIN_MARGIN, MAX_LOSS = 0.8, 4.0, 0.8


@dataclass(frozen=True)
class Sizes:
    """What a family's checkpoint must look like, independent of the script that made it."""

    model_type: str
    vocab: int
    entries: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    eps: float
    theta: float


SIZES = {
    "llama32_1b": Sizes("llama", 2048, 2048, 256, 512, 3, 4, 2, 64, True, 1e-5, 5e5),
    "smollm2_135m": Sizes("llama", 2304, 2304, 192, 512, 4, 3, 1, 64, True, 1e-5, 1e5),
    "qwen2": Sizes("qwen2", 2560, 2500, 256, 512, 3, 4, 2, 64, True, 1e-6, 1e6),
    "qwen3_0_6b": Sizes("qwen3", 2176, 2150, 256, 512, 2, 4, 2, 128, False, 1e-6, 1e6),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=sorted(SIZES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str) -> Path:
    return LLMS / name / "tiny"


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def model(folder: Path, one_thread: None) -> Any:
    return load_model(folder)


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def load_model(folder: Path) -> Any:
    """Load in f32 (the stored values are bf16), failing on any key that is missing or left over."""
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32, output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], f"{kind}: {info[kind]}"
    return model.eval()


def figures(model: Any, tokenizer: Any, text: str = KNOWN, start: int = 0) -> tuple[float, float, float]:
    """Return loss (nats), mean top-1 probability and mean top-1 to top-2 margin from ``start`` on."""
    import torch

    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        logits = model(ids).logits[0, start:-1]
    loss = torch.nn.functional.cross_entropy(logits, ids[0, start + 1 :]).item()
    best = logits.topk(2).values
    top1 = logits.softmax(-1).max(-1).values.mean().item()
    return loss, top1, (best[:, 0] - best[:, 1]).mean().item()


def wanted_tensors(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    wanted: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (sizes.vocab, sizes.hidden),
        "model.norm.weight": (sizes.hidden,),
    }
    if not sizes.tied:
        wanted["lm_head.weight"] = (sizes.vocab, sizes.hidden)
    for layer in range(sizes.layers):
        at = f"model.layers.{layer}."
        wanted |= {
            at + "input_layernorm.weight": (sizes.hidden,),
            at + "post_attention_layernorm.weight": (sizes.hidden,),
            at + "self_attn.q_proj.weight": (q, sizes.hidden),
            at + "self_attn.k_proj.weight": (kv, sizes.hidden),
            at + "self_attn.v_proj.weight": (kv, sizes.hidden),
            at + "self_attn.o_proj.weight": (sizes.hidden, q),
            at + "mlp.gate_proj.weight": (sizes.ffn, sizes.hidden),
            at + "mlp.up_proj.weight": (sizes.ffn, sizes.hidden),
            at + "mlp.down_proj.weight": (sizes.hidden, sizes.ffn),
        }
        if sizes.model_type == "qwen2":
            for side, width in (("q", q), ("k", kv), ("v", kv)):
                wanted[f"{at}self_attn.{side}_proj.bias"] = (width,)
        if sizes.model_type == "qwen3":
            for side in ("q", "k"):
                wanted[f"{at}self_attn.{side}_norm.weight"] = (sizes.head_dim,)
    return wanted


def test_folder_holds_what_it_should_and_stays_small(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == FILES
    assert sum(path.stat().st_size for path in folder.iterdir()) < MAX_BYTES


def test_weight_ledger_has_no_gap_and_no_surplus(name: str, folder: Path) -> None:
    table = tensor_table(folder)
    shapes = {key: entry.shape for key, entry in table.items()}
    assert shapes == wanted_tensors(SIZES[name])
    assert {entry.dtype for entry in table.values()} == {"BF16"}
    for key, shape in shapes.items():
        if len(shape) == 2:
            assert all(side % 64 == 0 for side in shape), f"{key} {shape}"
    toolkit = expected_tensors(ModelConfig.from_hf_folder(folder))
    assert toolkit.items() <= shapes.items()
    if SIZES[name].model_type == "llama":
        assert toolkit == shapes


def test_every_weight_is_finite_and_in_use(folder: Path) -> None:
    import numpy as np

    for key, values in load_tensors(folder).items():
        array = values.astype(np.float32)
        assert np.isfinite(array).all(), key
        assert array.std() > 0.01, f"{key} is constant"
        if array.ndim == 1 and not key.endswith("bias"):
            assert np.abs(array - 1).mean() > 0.05, (
                f"{key}: a norm that ignores its weight would not be noticed"
            )


def test_resolved_as_a_last_resort_and_labelled_as_tiny(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    checkpoint = resolve("made-up/not-in-any-cache", tiny=folder)
    assert checkpoint.kind == "tiny"
    assert checkpoint.path == folder
    assert "tiny checkpoint" in checkpoint.label
    assert "not made-up/not-in-any-cache" in checkpoint.label


def test_config_is_read_back_field_by_field(name: str, folder: Path) -> None:
    sizes, config = SIZES[name], ModelConfig.from_hf_folder(folder)
    read = Sizes(
        config.model_type,
        config.vocab_size,
        sizes.entries,
        config.emb_dim,
        config.hidden_dim,
        config.n_layers,
        config.n_heads,
        config.n_kv_heads,
        config.head_dim,
        config.tied_embeddings,
        config.rms_eps,
        config.rope_theta,
    )
    assert read == sizes
    assert config.max_position == 2048
    assert config.qkv_bias == (sizes.model_type == "qwen2")
    assert config.qk_norm == (sizes.model_type == "qwen3")
    assert (config.q_dim != config.emb_dim) == (sizes.model_type == "qwen3")


def test_config_files_cover_both_forms_and_transformers_agrees(name: str, folder: Path) -> None:
    from transformers import AutoConfig

    data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    old, new = {"rope_theta", "torch_dtype"}, {"rope_parameters", "dtype"}
    present, absent = (old, new) if name == "qwen3_0_6b" else (new, old)
    assert present <= data.keys()
    assert not absent & data.keys()
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    assert config.rope_parameters["rope_theta"] == SIZES[name].theta
    assert str(config.dtype) == "torch.bfloat16"
    assert config.tie_word_embeddings == SIZES[name].tied


def test_margins_are_those_of_a_trained_model(folder: Path, model: Any, tokenizer: Any) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    loss, top1, margin = figures(model, tokenizer)
    assert loss < MAX_LOSS
    assert top1 > MIN_TOP1
    assert margin > MIN_MARGIN
    # The floor tells trained from random: the same architecture with fresh weights misses every part of it.
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    fresh = figures(AutoModelForCausalLM.from_config(config).float().eval(), tokenizer)
    assert fresh[0] > 2 * MAX_LOSS
    assert fresh[1] < MIN_TOP1 / 2
    assert fresh[2] < MIN_MARGIN / 2


def test_answers_to_the_gates_prompts_are_text_and_long_enough(model: Any, tokenizer: Any) -> None:
    import torch

    answers = set()
    for prompt in load_prompts("instruct", 2):
        ids = torch.tensor([encode_prompt(tokenizer, prompt, "instruct").ids])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False)
        new = made[0, ids.shape[1] :].tolist()
        assert max(new) < len(tokenizer), "an id that no token has"
        assert len(new) >= 16, f"stops early: {tokenizer.decode(new)!r}"
        assert len(set(new)) > len(new) // 2, f"repeats itself: {tokenizer.decode(new)!r}"
        answers.add(tokenizer.decode(new))
    assert len(answers) == 2, "the answer does not depend on the prompt"


def test_chat_template_marks_turns_and_begins_once(name: str, folder: Path, tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "What is a list?"},
        {"role": "assistant", "content": "A mutable sequence."},
        {"role": "user", "content": "And a tuple?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    end = "<|eot_id|>" if name == "llama32_1b" else "<|im_end|>"
    system = name in ("smollm2_135m", "qwen2")
    assert tokenizer.eos_token == end
    assert ids.count(tokenizer.eos_token_id) == 3 + system
    assert text.startswith("<|im_start|>system\n") == system
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    ends = generation["eos_token_id"]
    assert tokenizer.eos_token_id in (ends if isinstance(ends, list) else [ends])
    if name == "llama32_1b":
        begin = tokenizer.convert_tokens_to_ids("<|begin_of_text|>")
        assert ids[0] == begin
        assert ids.count(begin) == 1
        assert text.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
        assert tokenizer("plain")["input_ids"][0] == begin
        # The published tokenizer's trap is kept: encoding the template's text adds a second begin token.
        assert tokenizer(text)["input_ids"][:2] == [begin, begin]
    else:
        assert text.endswith("<|im_start|>assistant\n")
        assert tokenizer("plain")["input_ids"] == tokenizer("plain", add_special_tokens=False)["input_ids"]


def test_tokenizer_is_byte_level_and_has_learnt_words(name: str, tokenizer: Any) -> None:
    assert len(tokenizer) == SIZES[name].entries
    for text in ("Grüße, 東京! 🦊\n\ttabs  and   spaces", "2026 and 13"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert len(KNOWN) / len(tokenizer(KNOWN, add_special_tokens=False)["input_ids"]) > 3.5
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("2026")
    assert [piece for piece, _ in pieces] == (["202", "6"] if name == "llama32_1b" else list("2026"))


def test_llama3_scaling_matters_and_more_so_beyond_the_original_context(one_thread: None) -> None:
    import torch

    folder = LLMS / "llama32_1b" / "tiny"
    scaling = ModelConfig.from_hf_folder(folder).rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_max_position) == ("llama3", 32.0, 64)
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    beyond = scaling.original_max_position
    ids = torch.tensor([tokenizer(KNOWN)["input_ids"]])
    assert ids.shape[1] > beyond + 16
    scaled = figures(model, tokenizer, start=beyond)
    with torch.no_grad():
        before = model(ids).logits[0]
        plain = 1.0 / 5e5 ** (torch.arange(0, 64, 2).float() / 64)
        assert not torch.allclose(model.model.rotary_emb.inv_freq, plain)
        model.model.rotary_emb.inv_freq = plain
        change = (model(ids).logits[0] - before).abs().amax(-1)
    assert change[beyond:].mean() > 1.0
    assert change[beyond:].mean() > change[: beyond // 4].mean()
    assert figures(model, tokenizer, start=beyond)[0] > scaled[0] + 0.3


@pytest.mark.parametrize(("side", "size"), [("q", 0.3), ("k", 0.6), ("v", 0.1)])
def test_qwen2_biases_are_large_and_matter(side: str, size: float, one_thread: None) -> None:
    import torch

    model, tokenizer = load_model(LLMS / "qwen2" / "tiny"), load_tokenizer(LLMS / "qwen2" / "tiny")
    ids = torch.tensor([tokenizer(KNOWN)["input_ids"]])
    with torch.no_grad():
        trained = model(ids).logits[0]
        rounding = (model.bfloat16()(ids).logits[0] - trained).abs().amax(-1).mean()
        model.float()
        for layer in model.model.layers:
            bias = getattr(layer.self_attn, f"{side}_proj").bias
            assert bias.abs().mean() > size
            bias.zero_()
        change = (model(ids).logits[0] - trained).abs().amax(-1).mean()
    assert change > 1.0
    assert change > 10 * rounding, "lost in the noise of bf16"


def test_qwen3_head_norms_are_away_from_one_and_matter(one_thread: None) -> None:
    import torch

    folder = LLMS / "qwen3_0_6b" / "tiny"
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    trained = figures(model, tokenizer)[0]
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            assert (norm.weight - 1).abs().mean() > 0.3
            with torch.no_grad():
                norm.weight.fill_(1.0)
    assert figures(model, tokenizer)[0] > trained + 0.1


def test_qwen3_head_is_its_own_matrix() -> None:
    import numpy as np

    tensors = load_tensors(LLMS / "qwen3_0_6b" / "tiny")
    head = tensors["lm_head.weight"].astype(np.float32)
    embedding = tensors["model.embed_tokens.weight"].astype(np.float32)
    assert np.abs(head - embedding).mean() > 0.05


def test_provenance_is_written_into_the_weights(name: str, folder: Path) -> None:
    import struct

    from tools.tiny_checkpoints.families import FAMILIES

    with (folder / "model.safetensors").open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        metadata = json.loads(stream.read(length))["__metadata__"]
    assert "pydoc_data.topics" in metadata["source"]
    assert metadata["seed"] == str(FAMILIES[name].seed)
    assert len(metadata["corpus_sha256"]) == 64


def test_corpus_keeps_held_out_text_out() -> None:
    from tools.tiny_checkpoints.corpus import load_corpus

    corpus = load_corpus()
    assert corpus == load_corpus()
    assert any(KNOWN in document for document in corpus.documents)
    assert len(corpus.held_out) >= 8
    seen = "\n".join([*corpus.documents, *(turn.answer for turn in corpus.turns)])
    assert not [paragraph for paragraph in corpus.held_out if paragraph in seen]


def test_script_refuses_to_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tools.tiny_checkpoints.__main__ import main

    kept = tmp_path / "qwen2" / "tiny" / "config.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine", encoding="utf-8")
    assert main(["--out", str(tmp_path)]) == 2
    assert "--force" in capsys.readouterr().err
    assert kept.read_text(encoding="utf-8") == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["qwen2"]
    with pytest.raises(SystemExit):
        main(["no_such_model", "--out", str(tmp_path)])


def test_training_repeats_to_the_byte(tmp_path: Path, one_thread: None) -> None:
    import torch

    from tools.tiny_checkpoints.corpus import load_corpus
    from tools.tiny_checkpoints.families import FAMILIES
    from tools.tiny_checkpoints.training import build

    short = replace(FAMILIES["smollm2_135m"], steps=1)
    said: list[str] = []
    try:
        folders = [build(short, load_corpus(), tmp_path / name, said.append) for name in ("a", "b")]
    finally:
        torch.use_deterministic_algorithms(False)
    for name in FILES:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"], "a staging folder is left"
    assert math.isfinite(float(said[0].split("loss ")[1].split(",")[0]))
