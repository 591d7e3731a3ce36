"""Torn, incomplete and contradictory HF folders: each is refused, naming the file."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from llms.checkpoints import (
    Checkpoint,
    CheckpointError,
    SourceAbsentError,
    cache_root,
    content_hash,
    file_sha256,
    load_tensors,
    validate_folder,
)

INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_NPU_CACHE", str(tmp_path / "cache"))


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "a.weight": rng.standard_normal((4, 6)).astype(ml_dtypes.bfloat16),
        "b.weight": rng.standard_normal((3,)).astype(np.float32),
        "c.weight": rng.standard_normal((2, 2)).astype(ml_dtypes.bfloat16),
    }


def save(path: Path, values: dict[str, np.ndarray]) -> None:
    """Write with torch and the safetensors library, so that our reader is held against them."""
    import torch
    from safetensors.torch import save_file

    as_torch = {
        name: torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16)
        if value.dtype == ml_dtypes.bfloat16
        else torch.from_numpy(value)
        for name, value in values.items()
    }
    save_file(as_torch, path, metadata={"format": "pt"})


@pytest.fixture
def single(tmp_path: Path) -> Path:
    folder = tmp_path / "single"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    save(folder / "model.safetensors", tensors())
    return folder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    values = tensors()
    shards = {"model-1.safetensors": ["a.weight"], "model-2.safetensors": ["b.weight", "c.weight"]}
    for name, members in shards.items():
        save(folder / name, {member: values[member] for member in members})
    weight_map = {member: name for name, members in shards.items() for member in members}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def edit_index(folder: Path, **changes: str | None) -> None:
    index = json.loads((folder / INDEX).read_text())
    for name, shard in changes.items():
        key = name.replace("_", ".")
        if shard is None:
            del index["weight_map"][key]
        else:
            index["weight_map"][key] = shard
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_tensors_come_back_bit_for_bit_with_a_ledger(layout: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(layout)
    reader = load_tensors(Checkpoint(folder, "x", "explicit", "0" * 64))
    values = tensors()
    assert set(reader) == set(values)
    assert reader.entry("a.weight").shape == (4, 6)
    assert reader.ledger().loaded == ()  # looking is not reading
    for name in ("a.weight", "b.weight"):
        assert reader[name].dtype == values[name].dtype
        np.testing.assert_array_equal(reader[name].view(np.uint8), values[name].view(np.uint8))
    ledger = reader.ledger()
    assert (ledger.loaded, ledger.unused) == (("a.weight", "b.weight"), ("c.weight",))
    with pytest.raises(ValueError, match="read-only"):
        reader["a.weight"][0, 0] = 1
    _ = reader["c.weight"]
    assert reader.ledger().unused == ()


def test_an_unknown_tensor_is_named_with_its_neighbours(single: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor 'a.weigth' \(nearest: a.weight"):
        load_tensors(single)["a.weigth"]


@pytest.mark.parametrize("keep", [0, 4, 7, 20, -1])
def test_a_truncated_file_is_torn(single: Path, keep: int) -> None:
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"(truncated|too short|announces)") as caught:
        validate_folder(single)
    assert caught.value.path == path
    assert "fetch or convert it again" in caught.value.remedy


def test_trailing_bytes_are_torn_too(single: Path) -> None:
    with (single / "model.safetensors").open("ab") as stream:
        stream.write(b"\0" * 16)
    with pytest.raises(CheckpointError, match="truncated or padded"):
        validate_folder(single)


@pytest.mark.parametrize("header", [b"{not json", b'{"a": {"dtype": "BF16"}}', b'{"a": 3}'])
def test_a_malformed_header_is_torn(single: Path, header: bytes) -> None:
    (single / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match=r"(unreadable|malformed)"):
        validate_folder(single)


def test_a_shape_that_contradicts_its_bytes_is_torn(single: Path) -> None:
    header = b'{"a":{"dtype":"BF16","shape":[3],"data_offsets":[0,4]}}'
    (single / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    with pytest.raises(CheckpointError, match=r"'a' of shape .3. BF16 should take 6 bytes"):
        validate_folder(single)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shard model-2.safetensors is missing \(2 tensors"):
        validate_folder(sharded)


def test_a_tensor_that_only_the_index_knows_is_named(sharded: Path) -> None:
    edit_index(sharded, d_weight="model-1.safetensors")
    with pytest.raises(CheckpointError, match=r"'d.weight' in model-1.safetensors, which does not hold it"):
        validate_folder(sharded)


def test_a_tensor_that_only_a_shard_knows_is_named(sharded: Path) -> None:
    edit_index(sharded, c_weight=None)
    with pytest.raises(CheckpointError, match=r"'c.weight' lies in model-2.safetensors"):
        validate_folder(sharded)


def test_a_tensor_in_another_shard_than_the_index_says_is_named(sharded: Path) -> None:
    edit_index(sharded, c_weight="model-1.safetensors")
    with pytest.raises(CheckpointError, match=r"'c.weight' lies in model-2.safetensors"):
        validate_folder(sharded)


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_a_stray_weight_file_is_named(layout: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(layout)
    save(folder / "model-9.safetensors", {"z": np.zeros(2, np.float32)})
    with pytest.raises(CheckpointError, match=r"model-9\.safetensors"):
        validate_folder(folder)
    (folder / "model-9.safetensors").rename(folder / "consolidated.safetensors")  # Mistral's second copy
    validate_folder(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_what_is_simply_absent_says_so(single: Path, name: str) -> None:
    (single / name).unlink()
    with pytest.raises(SourceAbsentError):
        validate_folder(single)


def test_pickles_are_named_and_not_read(single: Path) -> None:
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    with pytest.raises(SourceAbsentError, match=r"pytorch_model.bin, which is a pickle"):
        validate_folder(single)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_wrong_config_is_named(single: Path, text: str) -> None:
    (single / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        validate_folder(single)


def test_the_content_hash_follows_content_not_place(single: Path, tmp_path: Path) -> None:
    import shutil

    before = content_hash(single)
    other = tmp_path / "elsewhere"
    shutil.copytree(single, other)
    assert content_hash(other) == before
    (other / "README.md").write_text("no part of the content")
    assert content_hash(other) == before
    (other / "tokenizer.json").write_text("{} ")
    assert content_hash(other) != before


def test_a_remembered_hash_notices_a_change_that_keeps_size_and_mtime(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"a" * 100)
    status = path.stat()
    before = file_sha256(path)
    assert file_sha256(path) == before
    path.write_bytes(b"b" * 100)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file_sha256(path) != before


def test_a_torn_memory_of_a_hash_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"a" * 100)
    before = file_sha256(path)
    (memo,) = (cache_root() / "hashes").iterdir()
    for text in ("", "{", '{"stamp": 1, "sha256": "x"}', "[]"):
        memo.write_text(text)
        assert file_sha256(path) == before


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_root() == tmp_path / "cache"
    monkeypatch.delenv("PYTEST_NPU_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "pytest-npu"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative is invalid by the XDG specification")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "pytest-npu"
