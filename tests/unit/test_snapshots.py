"""What people read and other programs parse is pinned: a change of it shows in the diff of a snapshot.

No predicted latency, date or path is in a snapshot. `pytest tests/unit/test_snapshots.py --snapshot-update`
writes them anew after a change that was meant.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernel_registry import render
from llms.llama_kernel_builder.llama_loop import all_programs
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.llama_kernel_builder.program import Program
from llms.verify.contract.deployment import load_adapter
from npu_deploy import scaffold
from npu_twin import compiler
from npu_twin.listing import Listing

LLMS = Path(__file__).resolve().parents[2] / "llms"
MODELS = ("llama32_1b", "qwen2", "qwen3_0_6b", "smollm2_135m")


def config_of(model: str) -> ModelConfig:
    """Configuration of the tiny checkpoint, which is committed."""
    return ModelConfig.from_hf_folder(LLMS / model / "tiny")


def programs(model: str) -> dict[str, Program]:
    """The programs of prompts up to 128 tokens and of a decode step."""
    sequence = load_adapter(LLMS / model).inference.SEQUENCE
    longer = ("_s256", "_s512", "_s1024", "_s2048")
    found = all_programs(sequence, config_of(model))
    return {program.name: program for program in found if not program.name.endswith(longer)}


def compiled(program: Program) -> Listing:
    return compiler.compile_program(program.request())


@pytest.mark.parametrize("name", ["flash_attn_s128", "lm_head_gemv"])
def test_program_listing(snapshot, name):
    assert compiled(programs("qwen2")[name]).to_json().splitlines() == snapshot


@pytest.mark.parametrize("model", MODELS)
def test_programs_of_a_model(snapshot, model):
    """Launches with their sizes and what they read and write. Methods and tiles come from the registry."""
    outline = {}
    for name, program in programs(model).items():
        outline[name] = [
            f"{launch.name}: {launch.op} {'x'.join(map(str, launch.dims.values()))} "
            + ", ".join(f"{key}={operand.arg}" for key, operand in launch.operands.items())
            for launch in compiled(program).launches
        ]
    assert outline == snapshot


def row(provenance: str, **fields: Any) -> dict[str, Any]:
    figures = {"latency_us": 87.6, "mean_rel_L1": 0.01038, "abs_err_max": 0.04688, "elements_over": 0}
    return {
        "id": provenance,
        "op": "silu_mul",
        "dims": {"n": 512},
        "dtype_in": "bf16",
        "dtype_out": "bf16",
        "method": "external",
        "tier": "bf16_transcendental",
        "tile": {"tile_n": 256},
        "herd": [2, 1],
        "context": "standalone",
        "status": "pass",
        "provenance": provenance,
        "figures": figures,
        "tolerance": {"rtol": 0.016, "atol": 0.08},
        "used_by": ["a_model", "another"],
        "date": "2026-06",
        "source": f"made up, {provenance}",
        **fields,
    }


ROWS = [
    row("published-silicon", herd=[8, 1], dims={"n": 4096}, note="read from a chart"),
    row(
        "published-silicon", context="tile_sweep", status="compile_fail: L1 overflow", figures={}, used_by=[]
    ),
    row("twin"),
]


def test_registry_page_of_a_kernel(snapshot):
    assert render.kernel_page("silu_mul", ROWS).splitlines() == snapshot


def test_registry_overview(snapshot):
    assert render.overview_page({"silu_mul": ROWS}).splitlines() == snapshot


def rendered_scaffold() -> dict[str, str]:
    """Files of `npu-deploy new` for a checkpoint outside of the project, without the predicted times."""
    context = scaffold.context_of(config_of("qwen2"), "mymodel", "My-Model", local=True)
    context |= {
        "choice": "instruct",
        "source": '"someone/My-Model"',
        "checkpoint_words": "`someone/My-Model`",
    }
    return scaffold.rendered({**context, "speed": "", "share": ""})


def test_scaffolded_code(snapshot):
    code = {path: text.splitlines() for path, text in rendered_scaffold().items() if path.endswith(".py")}
    code = {path: lines for path, lines in code.items() if not path.startswith("tests/")}
    assert code == snapshot


def test_scaffolded_files_and_headings(snapshot):
    documents = {
        path: [line for line in text.splitlines() if line.startswith("#")] if path.endswith(".md") else []
        for path, text in rendered_scaffold().items()
        if not path.endswith(".py")
    }
    tests = sorted(path.removeprefix("tests/") for path in rendered_scaffold() if path.startswith("tests/"))
    assert json.loads(json.dumps({"documents": documents, "tests": tests})) == snapshot
