"""Preflight: what a machine has, what is wrong with it for NPU work, and what helps.

    from pytest_npu.device import preflight
    report = preflight.examine(model="smollm2_135m")
    report.blocking      # findings that stop work on silicon
    report.as_json()

`npu-deploy doctor` prints it, the pytest plugin runs it at the start of every `--npu` run. Nothing here needs
an NPU, and nothing opens a hardware context.
"""

from pytest_npu.device.preflight.doctor import command, examine, examine_model, render
from pytest_npu.device.preflight.machine import Machine
from pytest_npu.device.preflight.types import Finding, Report, Status

__all__ = ["Finding", "Machine", "Report", "Status", "command", "examine", "examine_model", "render"]
