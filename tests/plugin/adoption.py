"""Runs of `pytest --npu-adopt` in tests, and a checkpoint for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Tests that judge a deployment which offers what the contract asks for and no more.
JUDGED = {
    "test_contract",
    *(f"test_reference[{check}]" for check in ("weights", "config", "rope", "tokens", "reference")),
    "test_block",
    "test_reference_ladder[plain_reference]",
    "test_records",
    "test_topk_gate",
    "test_diagnosis_cosine",
    *(f"test_ladder[{rung}]" for rung in ("plain_reference", "self_consistency", "determinism")),
    "test_end_of_text",
}
TEXT = "the quick fox jumps over the lazy dog a river runs through the old town and nobody saw it at all"


def random_llama(folder: Path) -> Path:
    """A random Llama of three layers with a word tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<unk>", "<end>", *dict.fromkeys(TEXT.split())])}
    vocabulary |= {f"word{i}": len(vocabulary) + i for i in range(100)}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", eos_token="<end>").save_pretrained(
        folder
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.3,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@dataclass
class Adoption:
    """A run of `pytest --npu-adopt` and what it left."""

    code: int
    text: str
    reports: Path

    def outcomes(self, model: str) -> dict[str, str]:
        return {name: test["outcome"] for name, test in self.tests(model).items()}

    def tests(self, model: str) -> dict[str, dict[str, Any]]:
        (path,) = self.reports.glob(f"{model}/*/results.json")
        tests: list[dict[str, Any]] = json.loads(path.read_text())["tests"]
        return {test["nodeid"].partition("::")[2]: test for test in tests}

    def assert_judged(self, model: str, but: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        """Everything that is on offer was judged and is right, but for what fails; the rest says why not."""
        outcomes = self.outcomes(model)
        assert {name for name, outcome in outcomes.items() if outcome == "passed"} == JUDGED - but, self.text
        assert {name for name, outcome in outcomes.items() if outcome == "failed"} == but, self.text
        others = [test for name, test in self.tests(model).items() if name not in JUDGED]
        assert others, self.text
        assert all(t["outcome"] == "skipped" and t["reason"].startswith("not offered") for t in others)


def adopt(work: Path, target: Path, checkpoint: Path, *args: str, **variables: str) -> Adoption:
    """Run pytest in an empty folder on an adopted deployment, with further environment variables."""
    (work / "pytest.ini").write_text("[pytest]\n")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "NPU_"))}
    env |= {"EXAMPLE_CHECKPOINT": str(checkpoint), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "200"}
    env |= {"XDG_CACHE_HOME": str(work / "cache"), **variables}
    command = [sys.executable, "-m", "pytest", "-p", "npu", "-q", "--npu-adopt", str(target), *args]
    done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, timeout=900)
    return Adoption(done.returncode, done.stdout + done.stderr, work / "reports")
