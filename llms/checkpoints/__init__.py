"""Checkpoint resolution: explicit path, local HF cache, hub, packaged GGUF, tiny checkpoint.

``resolve`` returns a validated HF folder, ``load_tensors`` reads its weights lazily as numpy arrays. All
trouble is a :class:`CheckpointError` that names file and remedy; :class:`SourceAbsentError` is its subclass
for "not there".
"""

from llms.checkpoints._cache import CACHE_ENV, cache_root, exclusive, file_sha256, write_atomically
from llms.checkpoints._convert import convert_gguf
from llms.checkpoints._folder import TensorEntry, content_hash, tensor_table, validate_folder
from llms.checkpoints._resolve import hub_obstacle, locate, resolve
from llms.checkpoints._tensors import TensorLedger, TensorReader, load_tensors
from llms.checkpoints._types import (
    Checkpoint,
    CheckpointError,
    CheckpointKind,
    PackagedGGUF,
    SourceAbsentError,
)

__all__ = [
    "CACHE_ENV",
    "Checkpoint",
    "CheckpointError",
    "CheckpointKind",
    "PackagedGGUF",
    "SourceAbsentError",
    "TensorEntry",
    "TensorLedger",
    "TensorReader",
    "cache_root",
    "content_hash",
    "convert_gguf",
    "exclusive",
    "file_sha256",
    "hub_obstacle",
    "load_tensors",
    "locate",
    "resolve",
    "tensor_table",
    "validate_folder",
    "write_atomically",
]
