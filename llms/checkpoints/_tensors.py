"""Lazy reading of safetensors weights as numpy arrays, with a ledger of what was taken."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llms.checkpoints._folder import DTYPES, TensorEntry, tensor_table
from llms.checkpoints._types import Checkpoint, CheckpointError


@dataclass(frozen=True)
class TensorLedger:
    """Which tensors of a checkpoint were read.

    Attributes:
        loaded: names that were read at least once, sorted.
        unused: names that nobody read, sorted.
    """

    loaded: tuple[str, ...]
    unused: tuple[str, ...]


class TensorReader(Mapping[str, NDArray[Any]]):
    """The tensors of a checkpoint by name; each access maps the bytes from the file.

    Arrays are read-only views of the memory-mapped file in the stored shape and dtype (``ml_dtypes.bfloat16``
    for BF16): reading costs no memory until the values are used, and whoever changes values must copy first.
    Looking at ``entry(name)`` does not count as reading, indexing does.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._table: dict[str, TensorEntry] = tensor_table(folder)
        self._maps: dict[Path, mmap.mmap] = {}
        self._loaded: set[str] = set()

    def entry(self, name: str) -> TensorEntry:
        """Return dtype, shape and place of a tensor without counting it as read.

        Raises:
            CheckpointError: there is no such tensor; the text lists the nearest names.
        """
        try:
            return self._table[name]
        except KeyError:
            import difflib

            near = difflib.get_close_matches(name, self._table, n=3)
            raise CheckpointError(
                f"has no tensor {name!r} (nearest: {', '.join(near) if near else 'none'})",
                path=self._folder,
                remedy="check that architecture and checkpoint belong together",
            ) from None

    def __getitem__(self, name: str) -> NDArray[Any]:
        entry = self.entry(name)
        dtype = DTYPES[entry.dtype]
        count = (entry.end - entry.start) // dtype.itemsize
        values = np.frombuffer(self._map(entry.file), dtype=dtype, count=count, offset=entry.start)
        self._loaded.add(name)
        return values.reshape(entry.shape)

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            with path.open("rb") as stream:
                self._maps[path] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[path]

    def __contains__(self, name: object) -> bool:
        return name in self._table

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def ledger(self) -> TensorLedger:
        """Return what was read so far and what was not."""
        return TensorLedger(tuple(sorted(self._loaded)), tuple(sorted(set(self._table) - self._loaded)))


def load_tensors(checkpoint: Checkpoint | Path) -> TensorReader:
    """Open the weights of a checkpoint (or of an HF folder) for lazy reading; torch is not needed.

    Raises:
        CheckpointError: a file is missing, torn, or disagrees with the index.
    """
    return TensorReader(checkpoint.path if isinstance(checkpoint, Checkpoint) else Path(checkpoint))
