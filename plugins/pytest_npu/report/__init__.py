"""Reports, made from event logs and nothing else."""

from __future__ import annotations

from .model import PhaseSummary, RunReport, TestResult, build_run_report

__all__ = ["PhaseSummary", "RunReport", "TestResult", "build_run_report"]
