"""The evaluation report: Markdown and HTML of one audit, readable in two minutes."""

from __future__ import annotations

import html
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llms.verify.gates.phase7.types import Audit

NAME = "evaluation_report"
_MEANING = {
    "PASS": "Every question was answered well: the gates judge what users run, and they can fail.",
    "PASS-with-warnings": "Nothing failed; the warnings say what this audit could not or did not show.",
    "FAIL": "At least one answer is wrong: a PASS of this model's gates is not to be trusted.",
}
_ORDER = ("FAIL", "WARN", "PASS")
_LONGEST = 600


@dataclass(frozen=True)
class _Table:
    """A section of the report: heading (empty for none), column names (empty for none), rows of text."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def _tables(audit: Audit) -> list[_Table]:
    findings = sorted(audit.findings, key=lambda f: _ORDER.index(f.status))
    tables = [
        _Table("", ("at a glance", ""), tuple(_glance(audit))),
        _Table(
            "Questions and answers",
            ("", "question", "evidence, or what is wrong"),
            tuple((f.status, f.question, f.evidence) for f in findings),
        ),
    ]
    if audit.gate.get("prompts"):
        head = ("prompt", "tokens", "first divergence", "verdict")
        tables.append(_Table("Token-set gate", head, tuple(_prompt_row(p) for p in audit.gate["prompts"])))
    if audit.ladder:
        columns = ("rung", "status", "nearest to its limit", "measured", "limit")
        tables.append(_Table("Ladder", columns, tuple(_rung_row(rung) for rung in audit.ladder)))
    return tables


def _glance(audit: Audit) -> Iterator[tuple[str, str]]:
    checkpoint = audit.checkpoint
    yield "device", audit.device
    yield "checkpoint", f"{checkpoint['label']}, content {checkpoint['content_hash'][:12]}"
    prompts = audit.gate.get("prompts", [])
    if prompts:
        good = sum(prompt["status"] == "OK" for prompt in prompts)
        steps = [prompt["divergence_step"] for prompt in prompts if prompt["divergence_step"] is not None]
        apart = f"first divergence at step {min(steps)}" if steps else "identical to the end"
        yield "token-set gate", f"{good} of {len(prompts)} prompts pass; {apart}"
    if audit.ladder:
        offered = [rung for rung in audit.ladder if rung["status"] != "not offered"]
        good = sum(rung["status"] == "passed" for rung in offered)
        yield "ladder", f"{good} of {len(offered)} rungs pass{_nearest(offered)}"
    f = audit.figures
    if "faults_planted" in f:
        yield "planted faults", f"{f['faults_seen']} of {f['faults_planted']} make the gates fail"
    if f.get("tpot_ms"):
        yield (
            "time to first token",
            f"{f['ttft_ms']:.1f} ms for {f['prompt_rows']} rows (predicted {f['predicted_ttft_ms']:.1f} ms)",
        )
        yield (
            "time per output token",
            f"{f['tpot_ms']:.2f} ms, {1e3 / f['tpot_ms']:.1f} tokens/s (predicted "
            f"{f['predicted_tpot_ms']:.2f} ms)",
        )
    yield "audit", f"{audit.date}, {audit.seconds:.0f} s, in a process of its own, without caches"


def _nearest(rungs: list[dict[str, Any]]) -> str:
    near = [rung["nearest"] for rung in rungs if rung.get("nearest")]
    if not near:
        return ""
    worst = max(near, key=lambda one: float(one["share"]))
    return f"; nearest to its limit: {worst['statistic']} at {worst['share']:.0%} of it"


def _prompt_row(prompt: dict[str, Any]) -> tuple[str, ...]:
    step = prompt["divergence_step"]
    where = "none"
    if step is not None:
        where = f"step {step}: {prompt['npu_token_text']!r} for {prompt['hf_token_text']!r}"
    return prompt["text"][:90], str(prompt["n_steps"]), where, prompt["status"]


def _rung_row(rung: dict[str, Any]) -> tuple[str, ...]:
    near = rung.get("nearest")
    if not near:
        return rung["name"], rung["status"], rung["reason"], "", ""
    return rung["name"], rung["status"], near["statistic"], f"{near['value']:.3g}", f"{near['limit']:.3g}"


def _limits_of(audit: Audit) -> list[str]:
    """What the verdict does not cover."""
    found = []
    if "modelled" in audit.device:
        found.append(
            "The device is the digital twin: numbers are those of its arithmetic, times are modelled."
        )
    prompts = len(audit.gate.get("prompts", []))
    if prompts:
        more = f"; `{audit.command} --prompts 8` takes all" if prompts < 8 else ""
        found.append(f"Gate and ladder saw {prompts} known and one made-up prompt{more}.")
    if audit.checkpoint["kind"] == "tiny":
        found.append("The checkpoint is a small stand-in: the code was judged, not the published model.")
    return found


def _reproduce(audit: Audit) -> str:
    return "\n".join(
        [
            f"{audit.command}  # this audit, in the root of the source tree",
            f"{audit.command} --fault norm_plus_one  # must end in FAIL",
        ]
    )


def markdown(audit: Audit) -> str:
    """The report as Markdown."""
    lines = [f"# Evaluation of {audit.model}: {audit.verdict}", "", _MEANING[audit.verdict], ""]
    for table in _tables(audit):
        lines += [f"## {table.title}", ""] if table.title else []
        lines += ["| " + " | ".join(table.head) + " |", "|" + "---|" * len(table.head)]
        for row in table.rows:
            first = f"**{row[0]}**" if row[0] in _ORDER else _cell(row[0])
            lines.append("| " + " | ".join([first, *(_cell(text) for text in row[1:])]) + " |")
        lines.append("")
    if _limits_of(audit):
        lines += ["## What this does not show", "", *(f"- {text}" for text in _limits_of(audit)), ""]
    lines += ["## Reproduce", "", "```", _reproduce(audit), "```", "", _environment(audit), ""]
    return "\n".join(lines)


def _environment(audit: Audit) -> str:
    return ", ".join(f"{name} {value}" for name, value in audit.environment.items())


def _cell(text: str) -> str:
    return _short(" ".join(str(text).replace("|", "\\|").split()))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;
background:#fff}
table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #d5d9de;padding:.4rem;text-align:left;
vertical-align:top}
.PASS{color:#116329}.WARN{color:#7d4e00}.FAIL{color:#a40e26}.badge{font-weight:700;white-space:nowrap}
pre{background:#f3f4f6;padding:.7rem;overflow:auto}
@media(prefers-color-scheme:dark){body{color:#e6e8eb;background:#15181c}pre{background:#22262b}
.PASS{color:#5fd381}.WARN{color:#e3b341}.FAIL{color:#ff7b8a}td,th{border-color:#363b42}}
"""


def page(audit: Audit) -> str:
    """The report as one HTML file without references."""
    e = html.escape
    css = {"PASS": "PASS", "FAIL": "FAIL"}.get(audit.verdict, "WARN")
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>Evaluation of {e(audit.model)}: {audit.verdict}</title><style>{_STYLE}</style></head><body>",
        f"<h1>Evaluation of {e(audit.model)}: <span class='{css}'>{audit.verdict}</span></h1>",
        f"<p>{_MEANING[audit.verdict]}</p>",
    ]
    for table in _tables(audit):
        parts += [f"<h2>{e(table.title)}</h2>"] if table.title else []
        parts.append(_html_table(table))
    if _limits_of(audit):
        items = "".join(f"<li>{e(text)}</li>" for text in _limits_of(audit))
        parts.append(f"<h2>What this does not show</h2><ul>{items}</ul>")
    parts.append(f"<h2>Reproduce</h2><pre>{e(_reproduce(audit))}</pre><p>{e(_environment(audit))}</p>")
    return "\n".join([*parts, "</body></html>"])


def _html_table(table: _Table) -> str:
    top = "".join(f"<th scope='col'>{html.escape(name)}</th>" for name in table.head)
    body = []
    for row in table.rows:
        cells = [html.escape(_short(text)) for text in row]
        if row[0] in _ORDER:
            cells[0] = f"<span class='badge {row[0]}'>{row[0]}</span>"
        body.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def write(audit: Audit, folder: Path) -> dict[str, Path]:
    """Write evaluation_report.md, evaluation_report.html and audit.json, each at once; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        f"{NAME}.md": markdown(audit),
        f"{NAME}.html": page(audit),
        "audit.json": json.dumps(audit.payload(), indent=1, allow_nan=False),
    }
    for name, text in contents.items():
        handle, part = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        Path(part).chmod(0o644)
        Path(part).replace(folder / name)
    return {name: folder / name for name in contents}
