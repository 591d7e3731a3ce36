"""How limits come from raw measurements: margin, floor, pooled quantities, faults that nothing sees."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tools.thresholds.__main__ as tool
from llms.llama_kernel_builder import driver

CLEAN = {"teacher_forced.kl_mean": 0.002, "self_consistency.kl_max": 0.05, "limits.kl_max": 0.001}
FAULT = {**CLEAN, "teacher_forced.kl_mean": 0.009}


def evaluate(tmp_path: Path, **raw: Any) -> dict[str, Any]:
    path = tmp_path / "raw.json"
    path.write_text(json.dumps({name.replace("_", " ", 1): entry for name, entry in raw.items()}))
    checkpoint = SimpleNamespace(label="tiny", content_hash="a" * 64)
    subject: Any = SimpleNamespace(reference_checkpoint=checkpoint)
    driver.select("twin")
    return tool._evaluate(subject, tool._Raw(path))


def entry(values: dict[str, float], *failures: str) -> dict[str, Any]:
    return {"values": values, "failures": list(failures)}


def test_limits_follow_the_clean_side(tmp_path: Path) -> None:
    louder = entry({**CLEAN, "teacher_forced.kl_mean": 0.003})
    found = evaluate(tmp_path, clean_0=entry(CLEAN), reordered_0=louder, fault_big=entry(FAULT))
    limit = found["limits"]["teacher_forced.kl_mean"]
    assert limit["limit"] == pytest.approx(2 * 0.003)
    assert limit["clean"] == {"max": 0.003, "median": 0.003, "n": 2, "reordered_max": 0.003}
    assert limit["weakest_fault"] == {"name": "big", "value": 0.009}
    assert found["limits"]["limits.kl_max"]["limit"] == pytest.approx(0.1), "pooled with self-consistency"
    assert found["faults"]["big"]["seen_by"] == ["teacher_forced.kl_mean"]


def test_a_fault_below_every_limit_is_unseen(tmp_path: Path) -> None:
    found = evaluate(tmp_path, clean_0=entry(CLEAN), fault_small=entry(CLEAN), fault_nan=entry(CLEAN, "NaN"))
    assert found["faults"]["small"]["seen_by"] == []
    assert found["faults"]["nan"]["seen_by"] == ["a failure without limit: NaN"]
    assert found["limits"]["teacher_forced.kl_mean"]["weakest_fault"] is None


def test_a_clean_device_must_not_fail(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="layer 3"):
        evaluate(tmp_path, clean_0=entry(CLEAN, "layer 3"))
