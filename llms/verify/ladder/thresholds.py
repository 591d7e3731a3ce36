"""Limits with a pedigree: what a correct device measures, what the weakest planted fault measures.

``thresholds.json`` next to this file is written by ``python -m tools.thresholds`` and by nothing else. Every
statistic is an upper bound: larger is worse. The limits say how far two correct implementations of the same
arithmetic differ; they were measured on the twin, and a device whose tables (tanh, exp2) hold other values
needs a measurement of its own. A checkpoint without an entry is calibrated by :mod:`~.calibration`;
where that is impossible (a runner that doesn't describe its arithmetic) it gets, for each statistic, the
largest limit among the measured checkpoints.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llms.checkpoints import Checkpoint

FILE = Path(__file__).with_name("thresholds.json")
FORMAT_VERSION = 1

# Below these a difference means nothing whatever a clean device measured: one bf16 ULP is 4e-3 relative, a
# flipped rounding of one norm factor moves a whole row by it.
FLOORS = {
    "cache_check": 0.01,
    "cache_check.key_first": 4e-3,
    "cache_check.value_first": 4e-3,
    "layer_check": 4e-3,
    "layer_check.prefill_output": 0.01,
    "layer_check.decode_output": 0.01,
    "layer_check.prefill_mean": 2e-3,
    "layer_check.decode_mean": 2e-3,
    "layer_check.logits": 1e-4,
    "teacher_forced": 1e-3,
    "teacher_forced.tie_ulps": 2.0,
    "self_consistency": 0.01,
    "limits": 0.02,
    "plain_reference": 0.05,
}
# The same quantity, KL between prefill and decode of the same tokens, seen at few lengths by one of them.
POOLED = {"limits.kl_max": "self_consistency.kl_max"}


def alike(statistic: str) -> str:
    """The statistic whose floor and margin hold: made-up prompts are measured as the others are."""
    return statistic.replace("edges.", "layer_check.", 1)


def floor_of(statistic: str) -> float:
    """The floor of a statistic ``<rung>.<name>``: its own, or its rung's."""
    statistic = alike(statistic)
    return FLOORS.get(statistic, FLOORS[statistic.split(".")[0]])


class ThresholdError(ValueError):
    """The thresholds file is missing, damaged, or lacks a statistic; the text says how to remake it."""


@dataclass(frozen=True)
class Limit:
    """One upper bound and where it comes from.

    Attributes:
        statistic: ``<rung>.<name>``.
        value: the limit.
        clean: largest value that a correct device measured.
        weakest_fault: name and value of the weakest planted fault that this statistic sees, if any.
        source: model, checkpoint, device and date of the measurement.
    """

    statistic: str
    value: float
    clean: float
    weakest_fault: tuple[str, float] | None
    source: str

    def exceeded(self, value: float) -> bool:
        """Whether a measured value is beyond the limit; one that is not finite always is."""
        return not (math.isfinite(value) and value <= self.value)

    def text(self) -> str:
        """The limit and its pedigree for a failure message."""
        fault = ""
        if self.weakest_fault is not None:
            fault = f", weakest fault it sees: {self.weakest_fault[0]} {self.weakest_fault[1]:.4g}"
        return f"limit {self.value:.4g} (clean up to {self.clean:.4g}{fault}; {self.source})"


class Thresholds:
    """The limits for one model."""

    def __init__(self, limits: Mapping[str, Limit]) -> None:
        self._limits = dict(limits)

    def __getitem__(self, statistic: str) -> Limit:
        try:
            return self._limits[statistic]
        except KeyError:
            raise ThresholdError(
                f"no limit for {statistic!r} in {FILE.name}: run python -m tools.thresholds to measure it"
            ) from None

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of all statistics with a limit."""
        return tuple(self._limits)

    @classmethod
    def recorded(cls, checkpoint: Checkpoint, *, file: Path = FILE) -> Thresholds | None:
        """Load the limits measured on a checkpoint of this very content, None when there are none.

        Raises:
            ThresholdError: the file is missing, of another format, or holds no measured model.
        """
        for key, entry in load_file(file)["models"].items():
            if entry["content_hash"] == checkpoint.content_hash:
                return cls.for_model(key, file=file)
        return None

    @classmethod
    def for_checkpoint(cls, model: str, checkpoint: Checkpoint, *, file: Path = FILE) -> Thresholds:
        """Load the limits of a model folder and checkpoint.

        The entry of that very checkpoint if it was measured, else what :meth:`for_model` finds for the model
        (for its tiny checkpoint if this is one).

        Raises:
            ThresholdError: the file is missing, of another format, or holds no measured model.
        """
        known = cls.recorded(checkpoint, file=file)
        return known if known is not None else cls.for_model(threshold_key(model, checkpoint), file=file)

    @classmethod
    def for_model(cls, key: str, *, file: Path = FILE) -> Thresholds:
        """Load the entry ``<folder>`` or ``<folder>/tiny``; without one, the loosest limits of all entries.

        Raises:
            ThresholdError: as for :meth:`for_checkpoint`.
        """
        models = load_file(file)["models"]
        chosen = [models[key]] if key in models else list(models.values())
        loosest: dict[str, Limit] = {}
        for measured in chosen:
            for name, entry in measured["limits"].items():
                limit = _limit(name, entry, measured)
                if name not in loosest or limit.value > loosest[name].value:
                    loosest[name] = limit
        return cls(loosest)


def threshold_key(model: str, checkpoint: Checkpoint) -> str:
    """Name of a model's entry: its folder, ``<folder>/tiny`` for its tiny checkpoint."""
    tiny = checkpoint.kind == "tiny" or checkpoint.path.parts[-2:] == (model, "tiny")
    return f"{model}/tiny" if tiny else model


def load_file(file: Path = FILE) -> dict[str, Any]:
    """Return the content of a thresholds file, checked for its format."""
    remedy = "run python -m tools.thresholds to write it"
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ThresholdError(f"{file.name} cannot be read ({error}): {remedy}") from error
    if content.get("format") != FORMAT_VERSION or not content.get("models"):
        raise ThresholdError(f"{file.name} is not of format {FORMAT_VERSION} or holds no model: {remedy}")
    return content


def _limit(name: str, entry: Mapping[str, Any], measured: Mapping[str, Any]) -> Limit:
    fault = entry.get("weakest_fault")
    return Limit(
        statistic=name,
        value=float(entry["limit"]),
        clean=float(entry["clean"]["max"]),
        weakest_fault=None if fault is None else (str(fault["name"]), float(fault["value"])),
        source=f"{measured['checkpoint']}, {measured['device']}, {measured['date']}",
    )
