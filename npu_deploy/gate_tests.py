"""The test files of a model folder: each imports its tests from the suite, so that none keeps old gates."""

from __future__ import annotations

from pathlib import Path

FILES: dict[str, tuple[str, str]] = {
    "test_phase0_reference.py": (
        "Phase 0: weights, configuration, rotary angles, tokens and the reference run.",
        "test_reference",
    ),
    "test_phase1_kernels.py": (
        "Phase 1: every kernel at every shape the model needs, alone on the device.",
        "pytest_generate_tests, test_kernel",
    ),
    "test_phase2_block.py": (
        "Phase 2: one assembled layer against layer 0 of the reference.",
        "test_block",
    ),
    "test_phase3_ladder.py": (
        "Phase 3: the rungs that compare with a reference.",
        "test_reference_ladder as test_ladder",
    ),
    "test_phase3_model.py": (
        "Phase 3: the whole model with one ELF per kernel: token-set gate, table of layers, baseline times.",
        "test_unfused_model",
    ),
    "test_phase4_prefill.py": (
        "Phase 4: every optimisation of the prefill, measured against the form before it.",
        "test_prefill_steps",
    ),
    "test_phase5_decode.py": (
        "Phase 5: every optimisation of a decode step, measured against the form before it.",
        "test_decode_steps",
    ),
    "test_diagnosis_cosine.py": (
        "Phase 6: cosine per layer against the reference, prefill and decode; judges only what is broken.",
        "test_diagnosis_cosine",
    ),
    "test_phase6_ladder.py": (
        "Phase 6: all rungs of the ladder on the production path.",
        "test_ladder, test_compiled_lengths",
    ),
    "test_phase6_topk_gate.py": (
        "Phase 6: the token-set gate on the production path.",
        "test_topk_gate",
    ),
    "test_phase7_audit.py": (
        "Phase 7: the independent audit, in a process of its own and without caches.",
        "test_independent_audit",
    ),
    "test_profile_benchmark.py": (
        "Phase 6: TTFT and time per output token on the device clock, with the breakdown of both.",
        "ready, test_ttft, test_time_per_output_token",
    ),
}
"""File name -> (what it tests, what it imports from the suite, in the order of the run)."""


def text_of(name: str) -> str:
    """Text of one of the `FILES`; a model adds tests of its own below it."""
    words, imported = FILES[name]
    names = imported.split(", ")
    unsorted = "" if names == sorted(names) else ", I001"
    return f'"""{words}"""\n\nfrom llms.verify.suite import {imported}  # noqa: F401{unsorted}\n'


def write(target: Path) -> None:
    """Write all test files into a folder."""
    target.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (target / name).write_text(text_of(name), encoding="utf-8")
