"""Reference runs on disk: one file per run, named by the hash of everything that determines its content.

A file is ``8 bytes magic, 32 bytes SHA-256 of the rest, 8 bytes header length, header JSON, raw arrays``. The
header repeats the whole key, so a hash collision or a renamed file is noticed as well as a flipped bit or a
cut.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from llms.checkpoints import cache_root, write_atomically
from llms.verify.contract.records import Array

_MAGIC = b"NPUREF01"
_DIGEST = 32
_STALE_SECONDS = 3600.0
_log = logging.getLogger("llms.verify.reference.hf")
BYPASS_ENV = "PYTEST_NPU_NO_REFERENCE_CACHE"


class ReferenceCache:
    """A folder of cached runs.

    Entries are written under a temporary name and renamed, so a killed writer leaves no torn entry and two
    writers cannot mix. A damaged entry is reported in the log, removed and computed again. A folder that
    cannot be written costs time, not the run.

    Args:
        folder: where entries lie; default ``reference`` in the cache folder of
            :func:`llms.checkpoints.cache_root`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else cache_root() / "reference"

    @classmethod
    def default(cls) -> ReferenceCache | None:
        """Return the cache of this environment, ``None`` when ``PYTEST_NPU_NO_REFERENCE_CACHE`` is set."""
        return None if os.environ.get(BYPASS_ENV, "") not in ("", "0") else cls()

    def path(self, key: Mapping[str, Any]) -> Path:
        """Return the file of a key, whether it exists or not."""
        return self.folder / f"{key_hash(key)}.npuref"

    def load(self, key: Mapping[str, Any]) -> dict[str, Array] | None:
        """Return the arrays stored under ``key``, ``None`` when there is no intact entry."""
        path = self.path(key)
        try:
            blob = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("reference cache entry %s cannot be read (%s): computing again", path.name, error)
            return None
        try:
            return _decode(blob, key)
        except (ValueError, KeyError, TypeError) as error:
            _log.warning("reference cache entry %s is damaged (%s): computing again", path.name, error)
            path.unlink(missing_ok=True)
            return None

    def store(self, key: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """Write an entry; a full or read-only disk is logged and otherwise ignored."""
        try:
            self._sweep()
            write_atomically(self.path(key), _encode(key, arrays))
        except OSError as error:
            _log.warning("reference cache %s cannot be written (%s)", self.folder, error)

    def _sweep(self) -> None:
        """Remove what killed writers left behind; an hour is far beyond any write in progress."""
        for part in self.folder.glob(".*.part"):
            with suppress(OSError):
                if time.time() - part.stat().st_mtime > _STALE_SECONDS:
                    part.unlink()


def source_hash(modules: Sequence[str]) -> str:
    """SHA-256 (hex) over the source of modules; a package counts with all its own modules.

    They are named, not looked for by a pattern, so that a moved file makes an error, not a key that never
    changes again. Nothing is imported but the packages they lie in. Raises ValueError for no modules at all,
    ModuleNotFoundError for one that does not exist.
    """
    if not modules:
        raise ValueError("a cache key over no source would accept every old entry; name the modules")
    digest = hashlib.sha256()
    for name in modules:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(
                f"{name}, whose source is part of a cache key, does not exist", name=name
            )
        origin = Path(spec.origin)
        for path in sorted(origin.parent.glob("*.py")) if spec.submodule_search_locations else [origin]:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def key_hash(key: Mapping[str, Any]) -> str:
    """Return the SHA-256 (hex) of a key in canonical JSON."""
    return hashlib.sha256(_canonical(key)).hexdigest()


def _canonical(key: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(key), sort_keys=True, separators=(",", ":")).encode()


def _encode(key: Mapping[str, Any], arrays: Mapping[str, Array]) -> bytes:
    table, parts = [], []
    for name, values in arrays.items():
        table.append({"name": name, "dtype": str(values.dtype), "shape": list(values.shape)})
        parts.append(np.ascontiguousarray(values).tobytes())
    header = json.dumps({"key": dict(key), "arrays": table}, sort_keys=True).encode()
    body = len(header).to_bytes(8, "little") + header + b"".join(parts)
    return _MAGIC + hashlib.sha256(body).digest() + body


def _decode(blob: bytes, key: Mapping[str, Any]) -> dict[str, Array]:
    start = len(_MAGIC) + _DIGEST
    if blob[: len(_MAGIC)] != _MAGIC or len(blob) < start + 8:
        raise ValueError("not an entry of this format, or cut")
    body = memoryview(blob)[start:]
    if hashlib.sha256(body).digest() != blob[len(_MAGIC) : start]:
        raise ValueError("its checksum does not match")
    length = int.from_bytes(body[:8], "little")
    header = json.loads(bytes(body[8 : 8 + length]))
    if _canonical(header["key"]) != _canonical(key):
        raise ValueError("it belongs to another key")
    arrays: dict[str, Array] = {}
    offset = 8 + length
    for entry in header["arrays"]:
        dtype = _dtype(entry["dtype"])
        count = int(np.prod(entry["shape"], dtype=np.int64))
        values = np.frombuffer(body, dtype, count, offset) if count else np.empty(0, dtype)
        arrays[entry["name"]] = values.reshape(entry["shape"]).copy()
        offset += count * dtype.itemsize
    return arrays


def _dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        bf16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bf16
    return np.dtype(name)
