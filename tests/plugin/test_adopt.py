"""`--npu-adopt` on a deployment in the shape of mlir-air's examples: collected, judged, weaknesses named."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from adoption import Adoption, adopt, random_llama

from llms.verify.contract.models import ROOT as LLMS
from llms.verify.ladder.climbing import REFERENCE_RUNGS, RUNGS

EXAMPLE = Path(__file__).parents[1] / "silicon" / "adopted_example"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def both(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Adoption:
    """Both models of the example, every gate."""
    work = tmp_path_factory.mktemp("adopted")
    few = ("--npu-prompts", "1", "--npu-n-tokens", "8")
    return adopt(work, EXAMPLE / "llms", checkpoint, "--no-phase-order", *few)


@pytest.mark.slow
def test_clean_adapter_passes_every_gate(both: Adoption) -> None:
    both.assert_judged("second_llama")


@pytest.mark.slow
def test_sloppy_adapter_fails_where_its_habits_matter(both: Adoption) -> None:
    assert both.code == 1
    both.assert_judged(
        "first_llama", but={"test_block", "test_records", "test_diagnosis_cosine", "test_end_of_text"}
    )


WEAKNESSES = {
    "views": r"prefill: layers 0 and 1 are bitwise equal: records are views of a reused buffer",
    "record changes": r"the prefill record changes when the runner goes on \(decode_step\): logits_at_pred",
    "end-of-text": r"predicted from position \d+ instead of \d+: the prompt length is recounted",
    "second pass": r"the inside view comes from a second pass after .*run_o_ffn 3 times",
    "zero padding": r"the second pass pads with token \[0\], production with \[1\]",
    "cut": r"a prompt of 2049 tokens is taken without an error: it is cut silently",
}


@pytest.mark.slow
@pytest.mark.parametrize("weakness", WEAKNESSES)
def test_weakness_is_named(weakness: str, both: Adoption) -> None:
    assert re.search(WEAKNESSES[weakness], both.text), both.text


@pytest.mark.slow
def test_reports_are_written(both: Adoption) -> None:
    for model in ("first_llama", "second_llama"):
        (path,) = both.reports.glob(f"{model}/*/results.json")
        results = json.loads(path.read_text())
        assert {record["kind"] for record in results["records"]} >= {"topk_gate", "diagnosis"}
        assert (path.parent / "report.html").is_file()


def test_collected_by_name_and_phase(checkpoint: Path, tmp_path: Path) -> None:
    """Nothing of the folder is imported to collect it; its own tests are not collected."""
    target = tmp_path / "llms" / "model"
    target.mkdir(parents=True)
    (target / "verify_adapter.py").write_text("raise SystemExit('imported')")
    (target / "test_own.py").write_text("raise SystemExit('imported')")
    (target / "conftest.py").write_text("raise SystemExit('imported')")
    work = tmp_path / "work"
    work.mkdir()
    run = adopt(work, target, checkpoint, "-m", "phase6", "--collect-only")
    assert run.code == 0, run.text
    assert [line.rpartition("::")[2] for line in run.text.splitlines() if "::" in line] == [
        "test_topk_gate",
        "test_diagnosis_cosine",
        *(f"test_ladder[{rung}]" for rung in RUNGS),
        "test_compiled_lengths",
        "test_ttft",
        "test_time_per_output_token",
        "test_end_of_text",
    ]


def test_no_adapter_is_a_usage_error(checkpoint: Path, tmp_path: Path) -> None:
    run = adopt(tmp_path, tmp_path / "nothing", checkpoint)
    assert run.code == 4
    assert "no verify_adapter.py in" in run.text


BROKEN = {
    "import": (
        "import no_such_module_anywhere",
        "import: ModuleNotFoundError: No module named 'no_such_module",
    ),
    "contract": ("MODEL_CHOICES = {'base': 'x'}", "resolve_model is missing; build_config is missing"),
    "dies": ("import os; os._exit(7)", "the process of the adapter died"),
    "hangs": ("import time; time.sleep(60)", "did not answer within 3 s"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_an_adapter_that_cannot_be_judged_says_why(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    body, text = BROKEN[kind]
    target = tmp_path / "model"
    target.mkdir()
    (target / "verify_adapter.py").write_text(body)
    run = adopt(tmp_path, target, checkpoint, "-m", "phase0", "--npu-hang-timeout", "3")
    assert run.code == 1, run.text
    assert text in run.text.replace("\n", " ") or text.replace("; ", "\n") in run.text, run.text
    assert "1 failed" in run.text


@pytest.mark.slow
def test_a_wrong_configuration_is_named(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "example"
    shutil.copytree(EXAMPLE, target)
    adapter = target / "llms" / "second_llama" / "verify_adapter.py"
    adapter.write_text(
        adapter.read_text()
        + "\n_real = build_config\ndef build_config():\n    c = _real(); c.n_kv_heads = 4; return c\n"
    )
    work = tmp_path / "work"
    work.mkdir()
    run = adopt(work, adapter.parent, checkpoint, "-m", "phase0")
    assert run.code == 1
    assert "n_kv_heads is 4, config.json says 2" in run.text


@pytest.mark.slow
def test_our_own_deployment_climbs_every_rung_from_another_process(tmp_path: Path) -> None:
    """The proof that there is one path: nothing is lost on the way between the processes."""
    model = LLMS / "qwen2"
    run = adopt(tmp_path, model, model / "tiny", "--checkpoint", str(model / "tiny"), "--npu-prompts", "1")
    outcomes = run.outcomes("qwen2")
    assert {outcomes[f"test_ladder[{rung}]"] for rung in RUNGS} == {"passed"}, run.text
    assert {outcomes[f"test_reference_ladder[{rung}]"] for rung in REFERENCE_RUNGS} == {"passed"}
    assert "failed" not in outcomes.values()
