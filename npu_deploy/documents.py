"""The documents of a deployment, written by `npu-deploy run` from the report of its pytest run.

Results go to `reports/<model>/`. TODO.md, the list of what is left, stands in the model folder where
`npu-deploy new` made the folder (or with --update-docs): a run must not change files under version control
unasked.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llms.llama_kernel_builder.deployment import describe
from llms.verify.contract.models import ModelFolder, report_root
from npu_deploy.scaffold import RECORD, render

if TYPE_CHECKING:
    from pytest_npu.report.model import RunReport

    from llms.llama_kernel_builder.model_config import ModelConfig

BEGIN = "<!-- state: npu-deploy run writes between these marks -->"
END = "<!-- /state -->"
TIMING_HEAD = (
    "Wall time is this machine's; device time is modelled on the twin and measured on silicon; remaining is\n"
    "wall time without device time, where that is measured.\n\n"
    "| phase | start | end | wall min | device min | remaining min | device | verdict |\n"
    "|---|---|---|---|---|---|---|---|\n"
)
REVIEW = "needs-human-review"


@dataclass(frozen=True)
class PhaseResult:
    """One phase of a run. Times in seconds; `start` and `end` are local times, empty when nothing ran."""

    phase: int
    title: str
    verdict: str
    counts: dict[str, int] = field(default_factory=dict)
    start: str = ""
    end: str = ""
    wall_s: float = 0.0
    device_s: float = 0.0
    reason: str = ""

    @property
    def label(self) -> str:
        """`phase 6 finalize`."""
        return f"phase {self.phase} {self.title}"

    @property
    def tests(self) -> str:
        """How many tests had which outcome, else why none ran."""
        return ", ".join(f"{count} {name}" for name, count in self.counts.items()) or self.reason or "-"

    def remaining_s(self, measured: bool) -> float:
        """Wall time without device time, where that is real."""
        return max(0.0, self.wall_s - (self.device_s if measured else 0.0))


@dataclass(frozen=True)
class Facts:
    """Everything the documents of one run say."""

    model: ModelFolder
    phases: Sequence[PhaseResult]
    known: dict[int, str]
    device: str
    checkpoint: str
    run_folder: Path | None
    warnings: Sequence[str]
    reasons: Sequence[str]
    config: ModelConfig | None
    report: RunReport | None

    @property
    def stopped(self) -> PhaseResult | None:
        """The phase that the run came to an end at, None for a complete one."""
        return next((result for result in self.phases if result.verdict != "PASS"), None)


def home(model: ModelFolder, update_docs: bool | None) -> Path:
    """Folder that gets TODO.md: the model's own or that of its results."""
    own = update_docs if update_docs is not None else (model.folder / RECORD).is_file()
    return model.folder if own and os.access(model.folder, os.W_OK) else results_of(model)


def results_of(model: ModelFolder) -> Path:
    """Folder of a model's results: `reports/<model>/`."""
    return report_root(model.folder) / model.name


def write_all(facts: Facts, todo_home: Path) -> list[Path]:
    """Write every document that the run has something for, TODO.md to `todo_home`; returns their paths."""
    results = results_of(facts.model)
    results.mkdir(parents=True, exist_ok=True)
    written = [
        _write_timing(results / "phase_timing.md", facts),
        _write_state(todo_home, "TODO.md", facts),
        _write_state(results, "progress.md", facts),
    ]
    if facts.run_folder is not None and (facts.run_folder / "evaluation_report.md").is_file():
        latest = results / "evaluation_report.md"
        shutil.copyfile(facts.run_folder / "evaluation_report.md", latest)
        written.append(latest)
    if any(result.phase == 6 and result.verdict == "PASS" for result in facts.phases):
        written.append(_put(results / "phase6_finalize.md", _finalize(facts)))
    written.append(_put(results / "handoff.md", [_rendered("handoff.md", facts)]))
    return written


def _rendered(name: str, facts: Facts) -> str:
    from pytest_npu.core.constants import PHASES

    context = {"f": facts, "phases": list(PHASES.items()), "review": REVIEW}
    return render(f"results/{name}.j2", context).rstrip("\n")


def _put(path: Path, lines: Iterable[str]) -> Path:
    from llms.checkpoints import write_atomically

    text = "\n".join(lines).rstrip("\n") + "\n"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_atomically(path, text.encode())
        path.chmod(0o644)
    return path


def _write_timing(path: Path, facts: Facts) -> Path:
    if path.is_file():
        old = path.read_text(encoding="utf-8")
    else:
        old = f"# {facts.model.name}: time per phase\n\n{TIMING_HEAD}"
    measured = facts.device.endswith("(measured)")
    new = [
        f"| {r.phase} {r.title} | {r.start} | {r.end} | {r.wall_s / 60:.2f} | "
        f"{r.device_s / 60:.3f} | {r.remaining_s(measured) / 60:.2f} | {facts.device} | {r.verdict} |"
        for r in facts.phases
        if r.start
    ]
    return _put(path, [old.rstrip("\n"), *new])


def _write_state(target: Path, name: str, facts: Facts) -> Path:
    """Replace what stands between the marks; the rest comes from the target, else from the model's folder."""
    path = target / name
    old = next((p for p in (path, facts.model.folder / name) if p.is_file()), None)
    fresh = f"# {facts.model.name}\n\n{BEGIN}\n{END}\n"
    text = old.read_text(encoding="utf-8") if old is not None else fresh
    if BEGIN not in text or END not in text.split(BEGIN, 1)[1]:
        text = f"{text.rstrip()}\n\n{BEGIN}\n{END}\n"
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    return _put(path, [f"{before}{BEGIN}\n{_rendered(name.lower(), facts)}\n{END}{after}"])


def _finalize(facts: Facts) -> list[str]:
    from pytest_npu.report.timing import timing_of

    judged = next(result.end for result in facts.phases if result.phase == 6)
    head = f"Weights: {facts.checkpoint}. Judged {judged}; predictions are of that day."
    lines = [f"# {facts.model.name}: phase 6, finalize", "", head, ""]
    timing = timing_of(facts.report) if facts.report is not None else None
    lines += [
        "| | prompt | TTFT | tokens/s | ms per token | clock |",
        "|---|---|---|---|---|---|",
    ]
    if timing is not None:
        lines.append(
            f"| this run, these weights | {timing.seq_len or '-'} | {_ms(timing.ttft_ms)} | "
            f"{_number(timing.tps)} | {_number(timing.tpot_ms)} | {timing.clock} |"
        )
    if facts.config is not None:
        production = production_config(facts)
        for what, config in (
            ("this configuration, predicted", facts.config),
            ("production configuration, predicted", production),
            ("reference llama32_1b, predicted", reference_config()),
        ):
            if config is None or (what.startswith("production") and config == facts.config):
                continue
            expected = describe.speed(config)
            lines.append(
                f"| {what} | {expected.seq_len} | {_ms(expected.ttft_ms)} | {expected.tps:.1f} "
                f"| {expected.tpot_ms:.1f} | twin (modelled) |"
            )
            silicon = describe.published(config)
            if silicon is not None:
                lines.append(
                    f"| {what.split(',')[0]}, published (Xilinx/mlir-air e972f2942, {silicon['device']}) | "
                    f"{silicon['seq_len']} | {_ms(silicon['ttft_s'] * 1e3)} | {silicon['decode_tps']:.1f} | "
                    f"{silicon['decode_ms_per_token']:.1f} | npu2 (measured) |"
                )
        lines += ["", *_against_reference(production or facts.config)]
        lines += ["", describe.share(facts.config).sentence()]
    if timing is not None and timing.rows:
        lines += ["", "## Breakdown of this run", "", "| section | kind | name | calls | ms | ms per call |"]
        lines.append("|---|---|---|---|---|---|")
        lines += [
            f"| {row.get('section')} | {row.get('kind')} | {row.get('name')} | {row.get('calls')} | "
            f"{_number(row.get('total_ms'), 3)} | {_number(row.get('per_call_ms'), 4)} |"
            for row in timing.rows
        ]
    return lines


def _against_reference(config: ModelConfig) -> list[str]:
    """Time per token relative to the reference model, next to the ratio of the weights read per token."""
    reference = reference_config()
    times = describe.speed(config).tpot_ms / describe.speed(reference).tpot_ms
    weights, of_reference = (
        c.n_layers * (2 * c.emb_dim * (c.q_dim + c.kv_dim) + 3 * c.emb_dim * c.hidden_dim)
        + c.emb_dim * c.vocab_size
        for c in (config, reference)
    )
    return [
        f"One token takes {times:.3g} times that of llama32_1b (both predicted, twin (modelled)), for "
        f"{weights / of_reference:.3g} times the weights read per token."
    ]


def reference_config() -> ModelConfig:
    """The production configuration of the reference model, llama32_1b."""
    from llms.llama32_1b.llama32_1b_weights import CONFIG

    return CONFIG


def production_config(facts: Facts) -> ModelConfig | None:
    """What the adapter says the published model looks like; None for a foreign adapter."""
    from llms.llama_kernel_builder.model_config import ModelConfig
    from llms.verify.contract.deployment import load_adapter

    config = getattr(load_adapter(facts.model.folder), "CONFIG", None)
    return config if isinstance(config, ModelConfig) else None


def _ms(value: Any) -> str:
    return "-" if value is None else f"{float(value):.1f} ms"


def _number(value: Any, places: int = 1) -> str:
    return "-" if value is None else f"{float(value):.{places}f}"
