"""Lines of the session header; printed only when the plugin takes part in the run."""

from __future__ import annotations

import os
from pathlib import Path

from pytest_npu.core.state import NpuState
from pytest_npu.device.driver import environment


def header_lines(state: NpuState) -> list[str]:
    """Device, checkpoint, versions and report folder."""
    options = state.options
    checkpoint = str(options.checkpoint) if options.checkpoint else "the model's first available"
    env = environment()
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    device = f"npu: device {state.device.label}"
    if not options.npu:
        device += ", no silicon involved (--npu for the real one)"
    lines = [device]
    if options.fault is not None:
        from pytest_npu.features.fault import header_line

        lines.append(header_line(options.fault))
    return [
        *lines,
        f"npu: checkpoint {checkpoint}; variant {options.model or 'default'}; "
        f"{'all' if options.prompts is None else options.prompts} prompts x {options.n_tokens} tokens",
        f"npu: {versions}",
        f"npu: reports in {relative(options.report_dir)}"
        + (f"; supervised, hang limit {options.hang_timeout:g} s" if state.control is not None else ""),
    ]


def relative(path: Path) -> str:
    """A path relative to the current folder when that is shorter to read."""
    try:
        text = os.path.relpath(path)
    except ValueError:
        return str(path)
    return str(path) if text.startswith("..") else text
