"""Summary in the terminal: one table of phases per model, key figures, and the report's path."""

from __future__ import annotations

from _pytest.terminal import TerminalReporter

from pytest_npu.core.header import relative
from pytest_npu.report.model import RunReport
from pytest_npu.report.timing import timing_of
from pytest_npu.report.write import Written

_COLOURS = {"PASS": "green", "FAIL": "red", "INCOMPLETE": "yellow", "EMPTY": "yellow"}


def write_written(output: TerminalReporter, written: Written) -> None:
    """Print the summary of one model."""
    output.write_sep("=", f"npu: {written.report.model}")
    for line in summary_lines(written.report):
        output.write_line(line)
    verdict = written.report.verdict
    output.write_line(verdict_line(written.report), **{_COLOURS[verdict]: True, "bold": True})
    for line in path_lines(written):
        output.write_line(line)


def summary_lines(report: RunReport) -> list[str]:
    """Device, checkpoint, the phase table and key figures."""
    lines = [f"device {report.device_label}; checkpoint {report.checkpoint_label}"]
    rows = [("phase", "verdict", "tests", "time", "lock wait")]
    for phase in report.phases:
        times = (f"{phase.duration_s:.1f} s", f"{phase.lock_wait_s:.1f} s")
        rows.append((phase.title, phase.verdict, phase.counts_text, *times))
    if not any(row[4] != "0.0 s" for row in rows[1:]):
        rows = [row[:4] for row in rows]  # type: ignore[misc]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines += [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines += figure_lines(report)
    return lines


def kernel_line(report: RunReport) -> str:
    """One line for all kernels with elements beyond their tolerance; empty without any."""
    over = [kernel for kernel in report.kernels if kernel.in_tier]
    if not over:
        return ""
    worst = max(over, key=lambda kernel: (kernel.elements.get("over", 0), kernel.payload.get("kernel", "")))
    return (
        f"in tier: {len(over)} of {len(report.kernels)} kernels have elements beyond rtol and atol, no more "
        f"than the number formats explain; most in {worst.payload.get('kernel')}: {worst.elements_text}"
    )


def figure_lines(report: RunReport) -> list[str]:
    """Kernels in tier, TTFT, TPOT and the outcome of the token-set gate, as far as they were recorded."""
    lines = [line for line in (kernel_line(report),) if line]
    for record in report.records_of("topk_gate"):
        prompts = record["payload"].get("prompts", [])
        passed = sum(prompt.get("status") == "OK" for prompt in prompts)
        steps = record["payload"].get("n_tokens", "?")
        lines.append(f"token-set gate: {passed} of {len(prompts)} prompts, {steps} tokens each")
    timing = timing_of(report)
    if timing is not None:
        known = (
            ("TTFT", timing.ttft_ms, "ms"),
            ("TPOT", timing.tpot_ms, "ms"),
            ("rate", timing.tps, "tokens/s"),
        )
        figures = [f"{name} {value:.2f} {unit}" for name, value, unit in known if value is not None]
        lines.append(f"{', '.join(figures)}: {timing.clock}")
    for entry in report.regressions:
        lines.append(f"{entry['nodeid'].rpartition('::')[2]} {entry['reason']}")
    return lines


def verdict_line(report: RunReport) -> str:
    """`PASS: 3 passed`, with why a run is incomplete."""
    line = f"{report.verdict}: {report.counts_text}"
    if report.interrupts:
        line += f" ({report.interrupts[-1]})"
    elif not report.finished:
        line += " (the run ended without finishing)"
    if report.regressions:
        line += f"; {len(report.regressions)} regression{'s' if len(report.regressions) > 1 else ''}"
    if report.poisoned:
        line += f"; device out of use: {report.poisoned}"
    return line


def path_lines(written: Written) -> list[str]:
    """Where the reports are, or why there are none."""
    lines = [f"report: {relative(written.folder / 'report.html')}"] if written.error is None else []
    if written.error is not None:
        lines.append(f"report: NOT WRITTEN to {relative(written.folder)}: {written.error}")
    if written.fallback_reason:
        lines.append(f"report: {written.fallback_reason}, hence this folder")
    if written.log_error:
        lines.append(f"event log: incomplete on disk ({written.log_error}); the report was made from memory")
    return lines
