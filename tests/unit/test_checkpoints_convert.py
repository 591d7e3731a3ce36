"""Conversion of small GGUF files made here: races, kills, damage, and files that must be refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llms.checkpoints import CheckpointError, convert_gguf, load_tensors, resolve

LAYERS, EMB, HEADS, KV, HIDDEN = 2, 64, 4, 2, 96
DIM = EMB // HEADS


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE (GPT-2)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(spare)) for b in range(256)]


def write_gguf(path: Path, *, seed: int = 0, drop: str = "", **changes: Any) -> Path:
    """Write a llama GGUF with F32 and Q8_0 tensors; ``changes`` set metadata, ``drop`` leaves a key out."""
    import gguf

    tokens = ["<|end|>", "<|start|>", *byte_alphabet(), "he", "ll", "hell", "hello"]
    merges = ["h e", "l l", "he ll", "hell o"]
    meta: dict[str, Any] = {
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": EMB,
        "llama.feed_forward_length": HIDDEN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV,
        "llama.rope.dimension_count": DIM,
        "llama.rope.freq_base": 5000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}",
    }
    meta.update(changes)
    meta.pop(drop, None)
    writer = gguf.GGUFWriter(path, meta.pop("architecture", "llama"))
    for key, value in meta.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
    writer.add_token_merges(merges)
    rng = np.random.default_rng(seed)

    def add(name: str, *shape: int, plain: bool = False) -> None:
        values = rng.standard_normal(shape).astype(np.float32)
        if plain:
            writer.add_tensor(name, values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), EMB)
    for i in range(LAYERS):
        add(f"blk.{i}.attn_norm.weight", EMB, plain=True)
        add(f"blk.{i}.ffn_norm.weight", EMB, plain=True)
        add(f"blk.{i}.attn_q.weight", EMB, EMB)
        add(f"blk.{i}.attn_k.weight", KV * DIM, EMB)
        add(f"blk.{i}.attn_v.weight", KV * DIM, EMB)
        add(f"blk.{i}.attn_output.weight", EMB, EMB)
        add(f"blk.{i}.ffn_gate.weight", HIDDEN, EMB)
        add(f"blk.{i}.ffn_up.weight", HIDDEN, EMB)
        add(f"blk.{i}.ffn_down.weight", EMB, HIDDEN)
    add("output_norm.weight", EMB, plain=True)
    if "extra_tensor" in changes:
        add(changes["extra_tensor"], DIM // 2, plain=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_NPU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "checkpoints"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "small.gguf")


def folders(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


def test_metadata_and_tokenizer_arrive(small: Path) -> None:
    from transformers import AutoTokenizer

    found = resolve("x/y", explicit=small)
    config = json.loads((found.path / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5  # not float32's 9.99999974e-06
    assert config["rope_parameters"]["rope_theta"] == 5000.0
    assert config["head_dim"] == DIM
    assert config["tie_word_embeddings"] is True
    assert "quantization_config" not in config
    tokenizer = AutoTokenizer.from_pretrained(found.path)
    assert tokenizer.tokenize("hello") == ["hello"]
    assert tokenizer.model_max_length == 128
    assert len(load_tensors(found)) == 2 + 9 * LAYERS


def test_a_second_call_converts_nothing(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = convert_gguf(small)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert "Converting small.gguf" in capfd.readouterr().err
    assert convert_gguf(small) == first
    assert capfd.readouterr().err == ""
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp


def test_another_content_gets_another_folder(small: Path, cache: Path) -> None:
    first = convert_gguf(small)
    before = np.array(load_tensors(first)["model.norm.weight"])
    write_gguf(small, seed=1)
    second = convert_gguf(small)
    assert second != first
    assert not np.array_equal(before, load_tensors(second)["model.norm.weight"])
    assert len(folders(cache)) == 2


@pytest.mark.parametrize("damage", ["cut", "flip", "manifest", "gone"])
def test_a_damaged_folder_is_converted_again(small: Path, damage: str) -> None:
    folder = convert_gguf(small)
    weights = folder / "model.safetensors"
    good = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(good[:-10])
    elif damage == "flip":
        weights.write_bytes(good[:-10] + b"\x55" + good[-9:])
    elif damage == "manifest":
        (folder / "conversion.json").write_text("{")
    else:
        (folder / "tokenizer.json").unlink()
    assert convert_gguf(small) == folder
    assert weights.read_bytes() == good


_CONVERT = "import sys; from pathlib import Path; from llms.checkpoints import convert_gguf; "
_CONVERT += "print(convert_gguf(Path(sys.argv[1])))"


def start(small: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _CONVERT, str(small)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_two_processes_at_once_convert_once(small: Path, cache: Path) -> None:
    both = [start(small), start(small)]
    outcomes = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outcomes
    assert outcomes[0][0] == outcomes[1][0]
    errors = "".join(err for _, err in outcomes)
    assert errors.count("Converted small.gguf") == 1
    assert folders(cache) == [Path(outcomes[0][0].strip()).name]


@pytest.mark.parametrize("amid", ["", "model.safetensors", "tokenizer.json"])
def test_a_kill_amid_conversion_leaves_no_folder_and_no_lock(small: Path, cache: Path, amid: str) -> None:
    process = start(small)
    deadline = time.monotonic() + 60
    while not (cache.exists() and any(cache.glob(f".small*/{amid}"))):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    (left,) = folders(cache)
    assert left.startswith(".")  # only the unfinished one, under its temporary name
    folder = convert_gguf(small)
    assert folders(cache) == [folder.name]  # the leftover is gone
    assert resolve("x/y", explicit=small).path == folder


@pytest.mark.parametrize("keep", [0, 3, 40, 2000, -1000])
def test_a_torn_gguf_is_refused(small: Path, keep: int, cache: Path) -> None:
    small.write_bytes(small.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"small\.gguf.*truncated or no GGUF"):
        convert_gguf(small)
    assert folders(cache) == []


@pytest.mark.parametrize(
    "key", ["llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon", "llama.attention.head_count_kv"]
)
def test_a_missing_fact_is_named_never_defaulted(tmp_path: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"no metadata key '{key}'"):
        convert_gguf(write_gguf(tmp_path / "m.gguf", drop=key))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba'; converted are llama, qwen2, qwen3"),
        ({"llama.rope.scaling.type": "linear"}, "rope scaling"),
        ({"extra_tensor": "rope_freqs.weight"}, "rope scaling"),
        ({"llama.rope.dimension_count": DIM // 2}, "partial rotary"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "unknown pre-tokeniser 'unheard-of'"),
    ],
)
def test_what_the_conversion_would_lose_is_refused(
    tmp_path: Path, changes: Any, says: str, cache: Path
) -> None:
    with pytest.raises(CheckpointError, match=says):
        convert_gguf(write_gguf(tmp_path / "m.gguf", **changes))
    assert folders(cache) == []


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.gguf.*does not exist"):
        convert_gguf(tmp_path / "absent.gguf")


def test_a_cache_that_cannot_be_written_names_the_way_out(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYTEST_NPU_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CheckpointError, match="move the cache with PYTEST_NPU_CACHE"):
        convert_gguf(small)
