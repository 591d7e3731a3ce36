"""The table beside published silicon: labels on every row, published figures as the file has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llms.llama_kernel_builder.deployment.compare import REFERENCE_MODEL, comparison
from llms.verify.contract.deployment import load_adapter

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = json.loads((ROOT / "npu_twin" / "data" / "published_models.json").read_text())["models"]


def rows(model: str) -> list[dict[str, Any]]:
    payload = comparison(model, load_adapter(ROOT / "llms" / model).CONFIG)
    json.dumps(payload)
    assert "before tokenising" in payload["definition"]
    found: list[dict[str, Any]] = payload["rows"]
    return found


@pytest.mark.parametrize("model", ["smollm2_135m", "qwen3_0_6b", REFERENCE_MODEL])
def test_every_figure_says_what_it_is(model: str) -> None:
    for row in rows(model):
        assert row["device"].endswith(("(modelled)", "(measured)"))
        assert ("published" in row["source"]) or row["device"] == "twin (modelled)"
        assert ("no weights" in row["checkpoint"]) == (row["device"] == "twin (modelled)")
        assert row["seq_len"] > 0
        assert row["ttft_ms"] > row["tpot_ms"] > 0


def test_reference_model_with_its_published_figures_is_beside_every_other() -> None:
    published = next(record for record in PUBLISHED if record["id"] == REFERENCE_MODEL)
    (measured,) = [row for row in rows("qwen3_0_6b") if row["what"].startswith(REFERENCE_MODEL)][1:]
    assert measured["ttft_ms"] == pytest.approx(1e3 * published["ttft_s"])
    assert measured["tpot_ms"] == published["decode_ms_per_token"]
    assert [row["what"] for row in rows(REFERENCE_MODEL)] == [REFERENCE_MODEL] * 2


def test_model_without_published_figures_has_a_prediction_only() -> None:
    own = [row for row in rows("smollm2_135m") if row["what"] == "smollm2_135m"]
    assert [row["device"] for row in own] == ["twin (modelled)"]
