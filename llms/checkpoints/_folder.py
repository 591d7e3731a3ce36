"""Validation of an HF folder from its headers alone: nothing is loaded, a torn file is named."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from llms.checkpoints._cache import file_sha256
from llms.checkpoints._types import CheckpointError, SourceAbsentError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_HASHED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
# Types of elements, safetensors format (huggingface/safetensors, README "Format"), as numpy has them.
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"{kind}{bits}": np.dtype(f"{kind.lower()}{bits // 8}") for kind in "IU" for bits in (8, 16, 32, 64)},
    **{f"F{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: ``start`` and ``end`` are byte offsets from the beginning of ``file``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def _torn(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        problem,
        path=path,
        remedy="the file is torn or not safetensors: delete it and fetch or convert it again",
    )


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read the tensor table of one safetensors file and check it against the file's size.

    Raises:
        CheckpointError: the file is missing, cut, longer than its table says, or not safetensors.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise _torn(path, f"has {size} bytes, too short for a safetensors header")
            (length,) = struct.unpack("<Q", prefix)
            if length > _MAX_HEADER or 8 + length > size:
                raise _torn(path, f"announces a header of {length} bytes but has only {size} bytes")
            table: dict[str, Any] = json.loads(stream.read(length))
    except FileNotFoundError:
        raise CheckpointError(
            "weight file is missing", path=path, remedy="fetch the complete checkpoint or name another folder"
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _torn(path, f"has an unreadable safetensors header ({error})") from None
    table.pop("__metadata__", None)
    data_start = 8 + length
    entries: dict[str, TensorEntry] = {}
    try:
        for name, item in table.items():
            begin, end = item["data_offsets"]
            shape = tuple(int(extent) for extent in item["shape"])
            entries[name] = TensorEntry(path, item["dtype"], shape, data_start + begin, data_start + end)
    except (KeyError, TypeError, ValueError) as error:
        raise _torn(path, f"has a malformed tensor table ({type(error).__name__}: {error})") from None
    reached = data_start
    for name, entry in sorted(entries.items(), key=lambda pair: pair[1].start):
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"tensor {name!r} has the unsupported dtype {entry.dtype}",
                path=path,
                remedy="use a bf16, f16 or f32 checkpoint",
            )
        expected = math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
        if entry.start != reached or entry.end - entry.start != expected:
            raise _torn(
                path,
                f"tensor {name!r} of shape {list(entry.shape)} {entry.dtype} should take {expected} bytes "
                f"from {reached} on, its table says {entry.start}..{entry.end}",
            )
        reached = entry.end
    if reached != size:
        raise _torn(path, f"is truncated or padded: its table needs {reached} bytes, the file has {size}")
    return entries


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SourceAbsentError(
            f"no {path.name}",
            path=path,
            remedy="name a folder in the layout of Hugging Face (config.json, safetensors)",
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot be read as JSON ({error})", path=path, remedy="fetch the file again"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError("is not a JSON object", path=path, remedy="fetch the file again")
    return value


def tensor_table(folder: Path) -> dict[str, TensorEntry]:
    """Return all tensors of a folder, single file or shards, with index and shards compared both ways.

    Raises:
        CheckpointError: missing shard, stray file, a tensor that only the index or only a shard knows, torn
            file.
    """
    index_path, single = folder / INDEX_NAME, folder / SINGLE_NAME
    present = {path.name for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated")}
    if not index_path.exists():
        if not single.exists():
            others = sorted(
                path.name for pattern in ("*.bin", "*.pth", "*.pt") for path in folder.glob(pattern)
            )
            hint = f"; found {', '.join(others[:3])}, which is a pickle and not read" if others else ""
            hint = hint or (f"; found {', '.join(sorted(present)[:3])} without an index" if present else "")
            raise SourceAbsentError(
                f"neither {SINGLE_NAME} nor {INDEX_NAME}{hint}",
                path=folder,
                remedy="name a folder that holds all safetensors weights",
            )
        stray = sorted(present - {SINGLE_NAME})
        if stray:
            raise CheckpointError(
                f"{stray[0]} lies beside {SINGLE_NAME} and no index names it",
                path=folder / stray[0],
                remedy="remove the stray file, or restore the index when this is a sharded checkpoint",
            )
        return read_header(single)
    weight_map = _read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("has no weight_map", path=index_path, remedy="fetch the index again")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if Path(shard).name != shard or not (folder / shard).exists():
            wanted = sum(1 for where in weight_map.values() if where == shard)
            raise CheckpointError(
                f"shard {shard} is missing ({wanted} tensors of the index live in it)",
                path=folder / shard,
                remedy="fetch the missing shard",
            )
    stray = sorted(present - set(shards))
    if stray:
        raise CheckpointError(
            f"{stray[0]} is not named by {INDEX_NAME}",
            path=folder / stray[0],
            remedy="remove the stray file or fetch the matching index",
        )
    table: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in read_header(folder / shard).items():
            if weight_map.get(name) != shard:
                raise CheckpointError(
                    f"tensor {name!r} lies in {shard}, {INDEX_NAME} says {weight_map.get(name)!r}",
                    path=folder / shard,
                    remedy="fetch index and shards of the same revision",
                )
            table[name] = entry
    absent = sorted(set(weight_map) - set(table))
    if absent:
        raise CheckpointError(
            f"{INDEX_NAME} names {absent[0]!r} in {weight_map[absent[0]]}, which does not hold it "
            f"({len(absent)} such tensors)",
            path=folder / weight_map[absent[0]],
            remedy="fetch index and shards of the same revision",
        )
    return table


def validate_folder(folder: Path) -> dict[str, TensorEntry]:
    """Check that ``folder`` is a complete HF checkpoint with a tokenizer; return its tensor table.

    Raises:
        SourceAbsentError: something is simply not there (a partly filled cache looks like this).
        CheckpointError: something is there and wrong.
    """
    config = _read_json(folder / "config.json")
    if not config.get("model_type"):
        raise CheckpointError(
            "has no model_type", path=folder / "config.json", remedy="name a model's folder"
        )
    table = tensor_table(folder)
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise SourceAbsentError(
            f"no tokenizer ({', '.join(_TOKENIZER_FILES)})",
            path=folder,
            remedy="add the tokenizer files of the model",
        )
    return table


def content_hash(folder: Path) -> str:
    """Return one SHA-256 over configuration, tokenizer and weights; the folder's name does not matter."""
    names = [name for name in (*_HASHED_FILES, INDEX_NAME) if (folder / name).exists()]
    names += sorted({entry.file.name for entry in tensor_table(folder).values()})
    digest = hashlib.sha256()
    for name in sorted(names):
        digest.update(f"{name}\0{file_sha256(folder / name)}\n".encode())
    return digest.hexdigest()
