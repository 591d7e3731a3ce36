"""What a green run does not say by itself: warnings, and the reasons for which a person should look."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_npu.report.model import RunReport

    from llms.llama_kernel_builder.model_config import ModelConfig
    from llms.verify.contract.deployment import Deployment

TWIN = "twin (modelled)"


def reasons(deployment: Deployment, report: RunReport) -> list[str]:
    """Why a PASS still needs human review, in words that stay the same from run to run."""
    remarks = []
    if report.device_label == TWIN:
        remarks.append(
            "judged on the digital twin: no compiler has placed these programs, no silicon has run them"
        )
    checkpoint = deployment.checkpoint
    if checkpoint.kind == "tiny":
        remarks.append(f"judged on {checkpoint.label}: the production weights have not been judged")
    unconfirmed, imprecise = _rows(deployment)
    if unconfirmed:
        remarks.append(f"{unconfirmed} GEMM rows have a K tiling that no silicon has confirmed")
    if imprecise:
        remarks.append(
            f"{imprecise} kernel rows are within their tier only, not within their tolerance everywhere"
        )
    return remarks


def warnings(deployment: Deployment, report: RunReport) -> list[str]:
    """What the run and the configuration warn about."""
    from llms.llama_kernel_builder.device_config import deviations
    from llms.llama_kernel_builder.model_config import ModelConfig

    config = deployment.config()
    remarks = list(deviations(config)) if isinstance(config, ModelConfig) else []
    for test in report.tests.values():
        if test.outcome in ("skipped", "xfailed", "xpassed"):
            remarks.append(f"{test.name} is {test.outcome}: {test.reason}")
        if test.reruns:
            remarks.append(f"{test.name} was run {test.reruns + 1} times")
    remarks += [
        f"preflight: {fact['name']} {fact.get('value')}: {fact.get('remedy')}"
        for fact in report.preflight
        if fact.get("ok") is False
    ]
    for record in report.records:
        payload = record["payload"]
        if isinstance(payload, dict):
            remarks += [str(text) for key in ("warnings", "notes") for text in payload.get(key) or ()]
    return list(dict.fromkeys(remarks))


def _rows(deployment: Deployment) -> tuple[int, int]:
    """Registry rows in use whose K tiling is unconfirmed, and rows that pass within their tier only."""
    from kernel_registry import registry_lookup
    from kernel_registry.sweep import UNCONFIRMED
    from llms.llama_kernel_builder.generic import generic_sequence
    from llms.llama_kernel_builder.llama_loop import buckets_of, required_kernels

    config: ModelConfig = deployment.config()
    sequence = getattr(getattr(deployment.adapter, "inference", None), "SEQUENCE", None) or generic_sequence()
    unconfirmed = imprecise = 0
    for need in required_kernels(sequence, config, buckets_of(config)):
        try:
            used = need.config()
        except registry_lookup.UnmeasuredShape:
            continue
        unconfirmed += UNCONFIRMED in used.note
        imprecise += used.status == "in_tier"
    return unconfirmed, imprecise
