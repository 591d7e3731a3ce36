"""Phase 0, weights: what the files hold, what transformers expects, what the deployment read and assigned."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from llms.verify.contract.records import Array
from llms.verify.reference.hf_facts import LAYER_TENSORS, MODEL_TENSORS

INDEX = "model.safetensors.index.json"
# (tensors read, tensors not read, weight name -> values): what a runner's `weight_ledger()` returns.
Ledger = tuple[Sequence[str], Sequence[str], Mapping[str, Array]]

_SHOWN = 5


def tensor_name(weight: str) -> str | None:
    """Tensor name of a weight such as `layers.3.wq`; None for a name that is not known."""
    if weight in MODEL_TENSORS:
        return MODEL_TENSORS[weight]
    parts = weight.split(".")
    if len(parts) == 3 and parts[0] == "layers" and parts[1].isdigit() and parts[2] in LAYER_TENSORS:
        return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}"
    return None


def weight_ledger(
    folder: Path, expected: Mapping[str, tuple[int, ...]], ledger: Ledger | None
) -> tuple[list[str], list[str], dict[str, Any]]:
    """Compare files, expectation and what a deployment did; returns (problems, notes, payload).

    A tensor that repeats a tied head bit for bit is redundant, not unused: published checkpoints have it.
    """
    shards, where, problems = _read_files(folder)
    problems += [f"tensor {name} {list(expected[name])} is missing" for name in expected if name not in where]
    with _Files(folder, where) as files:
        for name, shape in expected.items():
            if name in where and files.shape(name) != shape:
                problems.append(f"tensor {name} is {list(files.shape(name))}, the model has {list(shape)}")
        extra = [name for name in where if name not in expected]
        redundant = [name for name in extra if files.redundant(name)]
        unused = [name for name in extra if name not in redundant]
        for name in unused:
            if name == "lm_head.weight":
                problems.append(
                    "config.json says the head is tied, the file holds a lm_head.weight of its own: one is "
                    "wrong"
                )
            else:
                problems.append(f"tensor {name} belongs to no part of the model")
        notes = [f"redundant: {name}" for name in redundant]
        loaded = assigned = None
        if ledger is None:
            notes.append("not offered: the runner has no weight_ledger, loading and assignment are unseen")
        elif ledger[0] or ledger[2]:
            loaded = len(ledger[0])
            problems += _loading_problems(expected, where, redundant, ledger)
            wrong, assigned = _assignment_problems(expected, where, files, ledger[2])
            problems += wrong
    payload = {
        "expected": len(expected),
        "in_files": len(where),
        "loaded": loaded,
        "assigned": assigned,
        "unused": unused,
        "redundant": redundant,
        "shards": shards,
        "index": (folder / INDEX).is_file(),
    }
    return problems, notes, payload


def _read_files(folder: Path) -> tuple[list[dict[str, Any]], dict[str, str], list[str]]:
    """Shards as they are, tensor -> file, and where index and shards disagree."""
    from safetensors import SafetensorError, safe_open

    problems: list[str] = []
    where: dict[str, str] = {}
    shards = []
    index: dict[str, str] = {}
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8")).get("weight_map", {})
    present = {p.name for p in folder.glob("*.safetensors") if not p.name.startswith("consolidated")}
    for name in sorted(set(index.values()) - present):
        problems.append(
            f"shard {name} is missing: {sum(v == name for v in index.values())} tensors of the index"
        )
    for name in sorted(present):
        if index and name not in set(index.values()):
            problems.append(f"{name} is not named by {INDEX}")
        try:
            with safe_open(folder / name, framework="np") as opened:
                keys = list(opened.keys())
        except (SafetensorError, OSError) as error:
            problems.append(f"{name} cannot be read: {error}")
            continue
        for key in keys:
            if key in where:
                problems.append(f"tensor {key} is in {where[key]} and in {name}")
            if index and index.get(key) != name:
                problems.append(f"tensor {key} is in {name}, {INDEX} says {index.get(key)}")
            where[key] = name
        shards.append({"file": name, "tensors": len(keys), "bytes": (folder / name).stat().st_size})
    for key in index:
        if key not in where and index[key] in present:
            problems.append(f"{INDEX} names {key} in {index[key]}, which does not hold it")
    if not present:
        problems.append(f"{folder.name} holds no safetensors file")
    return shards, where, problems


class _Files:
    """Tensors of a folder through the library's own reader."""

    def __init__(self, folder: Path, where: Mapping[str, str]) -> None:
        self._folder = folder
        self._where = where
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.clear()
        self._stack.close()

    def _handle(self, name: str) -> Any:
        from safetensors import safe_open

        file = self._where[name]
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
        return self._open[file]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored."""
        return tuple(self._handle(name).get_slice(name).get_shape())

    def bits(self, name: str) -> Array:
        """Values rounded to bf16 as uint16 bits."""
        import torch

        tensor = self._handle(name).get_tensor(name).to(torch.bfloat16).contiguous()
        bits: Array = tensor.view(torch.int16).numpy().view(np.uint16)
        return bits

    def redundant(self, name: str) -> bool:
        """True for a head that repeats the embedding, and for stored rotary frequencies."""
        if name.endswith("rotary_emb.inv_freq"):
            return True
        tied = MODEL_TENSORS["embedding"]
        if (
            name != MODEL_TENSORS["lm_head"]
            or tied not in self._where
            or self.shape(name) != self.shape(tied)
        ):
            return False
        return bool(np.array_equal(self.bits(name), self.bits(tied)))


def _loading_problems(
    expected: Mapping[str, Any], where: Mapping[str, str], redundant: Sequence[str], ledger: Ledger
) -> list[str]:
    read, unread = set(ledger[0]), set(ledger[1])
    left = sorted(name for name in expected if name in where and name not in read)
    found = [f"{_list(left)} never loaded by the deployment"] if left else []
    lost = sorted(unread - set(expected) - set(redundant))
    if lost:
        found.append(f"{_list(lost)} in the files and unused by the deployment")
    return found


def _assignment_problems(
    expected: Mapping[str, Any], where: Mapping[str, str], files: _Files, held: Mapping[str, Array]
) -> tuple[list[str], int]:
    """Weights that hold another tensor's values, tensors that no weight holds; and how many are right."""
    problems = []
    right: set[str] = set()
    for weight, values in held.items():
        name = tensor_name(weight)
        if name == MODEL_TENSORS["lm_head"] and name not in expected:
            name = MODEL_TENSORS["embedding"]
        if name is None or name not in expected:
            problems.append(f"weight {weight} is filled although the model has no such tensor")
            continue
        if name not in where:
            continue
        bits = files.bits(name)
        mine = np.ascontiguousarray(values).view(np.uint16)
        if mine.shape == bits.shape and np.array_equal(mine, bits):
            right.add(name)
        else:
            problems.append(f"weight {weight} does not hold tensor {name}")
    unassigned = [name for name in expected if name in where and name not in right]
    silent = [name for name in unassigned if not any(name in text for text in problems)]
    if silent:
        problems.append(f"{_list(silent)} loaded and assigned to no weight")
    return problems, len(right)


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"
