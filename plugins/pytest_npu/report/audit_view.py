"""View of what the independent audit of phase 7 records: its questions, its gate, its ladder, its limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .model import RunReport
from .values import Table, dicts, number, short, table

_MEANING = {
    "PASS": "Every question was answered well: the gates judge what users run, and they can fail.",
    "PASS-with-warnings": "Nothing failed; the warnings say what this audit could not or did not show.",
    "FAIL": "At least one answer is wrong: a PASS of this model's gates is not to be trusted.",
}
_CSS = {"FAIL": "bad", "WARN": "warn", "PASS": "good"}
_LONGEST = 600


@dataclass(frozen=True)
class AuditView:
    """One audit. `css` belongs to the verdict, `not_shown` is what it does not cover."""

    verdict: str
    css: str
    meaning: str
    tables: tuple[Table, ...]
    not_shown: tuple[str, ...]
    commands: tuple[str, ...]
    environment: str


def status_css(text: str) -> str:
    """Class of a cell that is an answer; empty for any other text."""
    return _CSS.get(text, "")


def audits(report: RunReport) -> list[AuditView]:
    """All records of kind `audit`."""
    return [_audit(record["payload"]) for record in report.records_of("audit")]


def _audit(payload: Mapping[str, Any]) -> AuditView:
    verdict = str(payload.get("verdict") or "FAIL")
    command = str(payload.get("command") or "")
    commands = (
        f"{command}  # this audit, in the root of the source tree",
        f"{command} --fault norm_plus_one  # must end in FAIL",
    )
    return AuditView(
        verdict,
        {"PASS": "good", "FAIL": "bad"}.get(verdict, "warn"),
        _MEANING.get(verdict, ""),
        tuple(_tables(payload)),
        tuple(_not_shown(payload, command)),
        commands if command else (),
        ", ".join(f"{name} {value}" for name, value in _dict(payload, "environment").items()),
    )


def _tables(payload: Mapping[str, Any]) -> Iterator[Table]:
    order = list(_CSS)
    findings = [
        (str(f.get("status")), str(f.get("question")), _clipped(f.get("evidence")))
        for f in dicts(payload.get("findings"))
    ]
    findings.sort(key=lambda row: order.index(row[0]) if row[0] in order else -1)
    yield table("", "", ("at a glance", ""), _glance(payload))
    yield table("Questions and answers", "", ("", "question", "evidence, or what is wrong"), findings)
    prompts = dicts(_dict(payload, "gate").get("prompts"))
    if prompts:
        head = ("prompt", "tokens", "first divergence", "verdict")
        yield table("Token-set gate of the audit", "", head, map(_prompt_row, prompts))
    rungs = dicts(payload.get("ladder"))
    if rungs:
        columns = ("rung", "status", "nearest to its limit", "measured", "limit")
        yield table("Ladder of the audit", "", columns, map(_rung_row, rungs))


def _glance(payload: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    checkpoint, f = _dict(payload, "checkpoint"), _dict(payload, "figures")
    yield "device", str(payload.get("device") or "")
    yield "checkpoint", f"{checkpoint.get('label')}, content {str(checkpoint.get('content_hash'))[:12]}"
    prompts = dicts(_dict(payload, "gate").get("prompts"))
    if prompts:
        good = sum(prompt.get("status") == "OK" for prompt in prompts)
        steps = [step for prompt in prompts if (step := prompt.get("divergence_step")) is not None]
        apart = f"first divergence at step {min(steps)}" if steps else "identical to the end"
        yield "token-set gate", f"{good} of {len(prompts)} prompts pass; {apart}"
    offered = [rung for rung in dicts(payload.get("ladder")) if rung.get("status") != "not offered"]
    if offered:
        good = sum(rung.get("status") == "passed" for rung in offered)
        yield "ladder", f"{good} of {len(offered)} rungs pass{_nearest(offered)}"
    if "faults_planted" in f:
        yield "planted faults", f"{f.get('faults_seen')} of {f['faults_planted']} make the gates fail"
    if "programs_started" in f:
        yield "programs started by the first three prompts", str(f["programs_started"])
    times = [number(f.get(name)) for name in ("ttft_ms", "predicted_ttft_ms", "tpot_ms", "predicted_tpot_ms")]
    ttft, expected_ttft, tpot, expected_tpot = (time or 0.0 for time in times)
    if tpot:
        rows = f.get("prompt_rows")
        yield "time to first token", f"{ttft:.1f} ms for {rows} rows (predicted {expected_ttft:.1f} ms)"
        rate = f"{tpot:.2f} ms, {1e3 / tpot:.1f} tokens/s"
        yield "time per output token", f"{rate} (predicted {expected_tpot:.2f} ms)"
    seconds = number(payload.get("seconds")) or 0.0
    yield "audit", f"{payload.get('date')}, {seconds:.0f} s, in a process of its own, without caches"


def _nearest(rungs: list[dict[str, Any]]) -> str:
    shares = [
        (share, str(near.get("statistic")))
        for rung in rungs
        if (share := number((near := _dict(rung, "nearest")).get("share"))) is not None
    ]
    if not shares:
        return ""
    share, statistic = max(shares)
    return f"; nearest to its limit: {statistic} at {share:.0%} of it"


def _prompt_row(prompt: Mapping[str, Any]) -> tuple[str, ...]:
    step, where = prompt.get("divergence_step"), "none"
    if step is not None:
        where = f"step {step}: {prompt.get('npu_token_text')!r} for {prompt.get('hf_token_text')!r}"
    return str(prompt.get("text"))[:90], str(prompt.get("n_steps")), where, str(prompt.get("status"))


def _rung_row(rung: Mapping[str, Any]) -> tuple[str, ...]:
    name, status, near = str(rung.get("name")), str(rung.get("status")), _dict(rung, "nearest")
    value, limit = number(near.get("value")), number(near.get("limit"))
    if value is None or limit is None:
        return name, status, _clipped(rung.get("reason") or ""), "", ""
    return name, status, str(near.get("statistic")), short(value), short(limit)


def _not_shown(payload: Mapping[str, Any], command: str) -> Iterator[str]:
    """What the verdict does not cover."""
    if "modelled" in str(payload.get("device")):
        yield "The device is the digital twin: numbers are those of its arithmetic, times are modelled."
    prompts = len(dicts(_dict(payload, "gate").get("prompts")))
    if prompts:
        more = f"; `{command} --prompts 8` takes all" if prompts < 8 else ""
        yield f"Gate and ladder saw {prompts} known and one made-up prompt{more}."
    if _dict(payload, "checkpoint").get("kind") == "tiny":
        yield "The checkpoint is a small stand-in: the code was judged, not the published model."


def _dict(payload: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = payload.get(name)
    return value if isinstance(value, dict) else {}


def _clipped(text: Any) -> str:
    words = " ".join(str(text).split())
    return words if len(words) <= _LONGEST else words[: _LONGEST - 1] + "…"
