"""Every fault of the catalogue, planted where it applies, and the gate that catches it.

`pytest -m faults` writes the matrix to reports/faults/. Tiny models take every fault, SmolLM2-135M with its
real weights those of the deployment's own code.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llms.verify.contract.deployment import Deployment
from llms.verify.contract.prompts import STYLES
from npu_twin import faults
from npu_twin.faults import Fault
from tests.faults import matrix
from tests.faults.bench import Bench, Row

pytestmark = [pytest.mark.faults, pytest.mark.slow]

LLMS = Path(__file__).resolve().parents[2] / "llms"
REAL = "smollm2_135m"
TINY = tuple(sorted(path.parent.name for path in LLMS.glob("*/tiny")))
# The faults that a model with its own weights must show as well: those above the kernels.
REAL_FAULTS = (
    "rope_theta_tenth",
    "rope_theta_hundredfold",
    "rope_interleaved",
    "gqa_tiled",
    "decode_slot_late",
    "decode_position_late",
    "open_tail",
    "attention_hole",
    "no_causal_mask",
    "norm_plus_one",
    "layer_skipped",
    "nan_at_step_3",
    "rare_bad_tile",
    "decode_norm_bf16_sum",
    "eps_1e-6_for_1e-5",
    "prompt_length_without_eos",
    "decode_start_without_eos",
    "results_are_views",
    "run_state_ignored",
    "stale_artefact",
    "reference_dtype",
    "gate_on_a_mock",
    "late_decode_fault",
    "kv_slot_clobbered",
    "down_low_precision",
    "stale_weights",
    "head_key_zeroed",
    "weight_tile_fp8",
    "head_rows_shifted",
    "embedding_end_wrong",
    "logits_one_percent",
    "query_louder_prefill",
    "stale_hidden",
    "hole_at_one_step",
    "probabilities_bf16",
    "short_prompt",
    "full_length_slot",
    "last_bit_unsteady",
    "worn_out",
)
# Forms, lengths and audits are gates of the code around a model: one model shows their faults.
ONCE = "smollm2_135m"
LATE = ("phase4", "phase5", "phase7")


def tiny(model: str) -> Path:
    return LLMS / model / "tiny"


def plants() -> list[Any]:
    """(fault, model, checkpoint) of all tests, model by model."""
    found = []
    for model in TINY:
        opened = Deployment.from_folder(model, checkpoint=tiny(model))
        found += [
            pytest.param(fault, model, tiny(model), id=f"{model}-tiny-{fault.name}")
            for fault in faults.load()
            if fault.applies(opened) and (model == ONCE or fault.expected not in LATE)
        ]
    opened = Deployment.from_folder(REAL)
    found += [
        pytest.param(faults.find(name), REAL, None, id=f"{REAL}-real-{name}")
        for name in REAL_FAULTS
        if faults.find(name).applies(opened)
    ]
    return found


@pytest.fixture(scope="module")
def bench() -> Iterator[Callable[[str, Path | None], Bench]]:
    """A bench per model and checkpoint, kept: workers get tests of several models in turn."""
    open_ones: dict[tuple[str, Path | None], Bench] = {}

    def get(model: str, checkpoint: Path | None) -> Bench:
        key = (model, checkpoint)
        if key not in open_ones:
            open_ones[key] = Bench(model, checkpoint)
        return open_ones[key]

    yield get
    while open_ones:
        open_ones.popitem()[1].close()


@pytest.fixture
def record(npu_options: Any) -> Callable[..., None]:
    """Write to the matrix; several workers may."""

    def write(rows: list[Row], controls: list[dict[str, Any]]) -> None:
        folder = npu_options.report_dir / "faults"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            matrix.write(folder, [matrix.row_json(row) for row in rows], controls)

    return write


# Controls come first: the one on real weights is the longest test, and the last one would run alone.
def control(bench: Bench, prompts_per_style: int, record: Callable[..., None]) -> None:
    """No fault: every gate over the prompts of both styles, in two orders."""
    prompts = [prompt for style in STYLES for prompt in bench.clean.prompts(prompts_per_style, style=style)]
    alarms = bench.control(prompts)
    entry = {
        "model": bench.model,
        "checkpoint": bench.checkpoint,
        "prompts": len(prompts),
        "alarms": alarms,
    }
    record([], [entry])
    assert not alarms, "\n".join(alarms)


@pytest.mark.parametrize("model", TINY)
def test_no_alarm_without_a_fault(model: str, bench: Any, record: Callable[..., None]) -> None:
    control(bench(model, tiny(model)), 8, record)


def test_no_alarm_without_a_fault_on_real_weights(bench: Any, record: Callable[..., None]) -> None:
    control(bench(REAL, None), 8, record)


@pytest.mark.parametrize(("fault", "model", "checkpoint"), plants())
def test_fault_is_caught(
    fault: Fault, model: str, checkpoint: Path | None, bench: Any, record: Callable[..., None]
) -> None:
    row = bench(model, checkpoint).judge(fault)
    record([row], [])
    assert not row.problem, row.problem
