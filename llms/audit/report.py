"""The evaluation report: Markdown and HTML of one audit, readable in two minutes."""

from __future__ import annotations

import html
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from .types import Audit

NAME = "evaluation_report"
_MEANING = {
    "PASS": "Every question was answered well.",
    "PASS-with-warnings": "Nothing failed; the warnings say what this audit could not or did not show.",
    "FAIL": "At least one answer is wrong: the gate's verdict on this deployment is not to be trusted.",
}


def markdown(audit: Audit) -> str:
    """The report as Markdown."""
    lines = [
        f"# Evaluation of {audit.model}: {audit.verdict}",
        "",
        _MEANING[audit.verdict],
        "",
        f"- device: {audit.device}",
        f"- checkpoint: {audit.checkpoint['label']} (content {audit.checkpoint['content_hash'][:12]})",
        f"- date: {audit.date}, {audit.seconds:.0f} s, in a process of its own, without caches",
        "",
        "## Findings",
        "",
        "| | question | answer and evidence |",
        "|---|---|---|",
        *(
            f"| **{f.status}** | {_cell(f.question)} | {_cell(f.evidence)} |"
            for f in sorted(audit.findings, key=lambda f: ("FAIL", "WARN", "PASS").index(f.status))
        ),
        "",
    ]
    if audit.figures.get("tpot_ms"):
        lines += ["## Measured", "", "| figure | value | predicted |", "|---|---|---|", *_figures(audit), ""]
    if audit.gate.get("prompts"):
        lines += [
            "## Token-set gate",
            "",
            "| prompt | tokens | first divergence | verdict |",
            "|---|---|---|---|",
            *(_prompt_row(prompt) for prompt in audit.gate["prompts"]),
            "",
        ]
    if audit.ladder:
        lines += ["## Ladder", "", "| rung | status | |", "|---|---|---|"]
        lines += [f"| {r['name']} | {r['status']} | {_cell(r['reason'])} |" for r in audit.ladder]
        lines.append("")
    lines += ["## Reproduce", "", "```", audit.command, "```", "", _environment(audit), ""]
    return "\n".join(lines)


def _figures(audit: Audit) -> list[str]:
    f = audit.figures
    return [
        f"| time to first token, {f['prompt_rows']} rows | {f['ttft_ms']:.2f} ms "
        f"| {f['predicted_ttft_ms']:.2f} ms |",
        f"| time per output token | {f['tpot_ms']:.2f} ms | {f['predicted_tpot_ms']:.2f} ms |",
        f"| tokens per second | {1e3 / f['tpot_ms']:.1f} | {1e3 / f['predicted_tpot_ms']:.1f} |",
    ]


def _prompt_row(prompt: dict[str, Any]) -> str:
    step = prompt["divergence_step"]
    where = (
        "none"
        if step is None
        else f"step {step}: {prompt['npu_token_text']!r} for {prompt['hf_token_text']!r}"
    )
    return f"| {_cell(prompt['text'][:70])} | {prompt['n_steps']} | {_cell(where)} | {prompt['status']} |"


def _environment(audit: Audit) -> str:
    return ", ".join(f"{name} {value}" for name, value in audit.environment.items())


def _cell(text: str) -> str:
    return " ".join(str(text).replace("|", "\\|").split())[:900]


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
    order = sorted(audit.findings, key=lambda f: ("FAIL", "WARN", "PASS").index(f.status))
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>Evaluation of {e(audit.model)}: {audit.verdict}</title><style>{_STYLE}</style></head><body>",
        f"<h1>Evaluation of {e(audit.model)}: <span class='{css}'>{audit.verdict}</span></h1>",
        f"<p>{_MEANING[audit.verdict]}</p><p>{e(audit.device)}; {e(audit.checkpoint['label'])}, content "
        f"{e(audit.checkpoint['content_hash'][:12])}; {e(audit.date)}, {audit.seconds:.0f} s, in a process "
        "of its own, without caches.</p>",
        "<h2>Findings</h2>",
        _table(
            ("", "question", "answer and evidence"),
            [
                (f"<span class='badge {f.status}'>{f.status}</span>", e(f.question), e(f.evidence))
                for f in order
            ],
        ),
    ]
    if audit.figures.get("tpot_ms"):
        rows = [tuple(e(c.strip()) for c in row.strip("| ").split("|")) for row in _figures(audit)]
        parts += ["<h2>Measured</h2>", _table(("figure", "value", "predicted"), rows)]
    if audit.gate.get("prompts"):
        rows = [
            (
                e(p["text"][:90]),
                str(p["n_steps"]),
                "none" if p["divergence_step"] is None else f"step {p['divergence_step']}",
                e(p["status"]),
            )
            for p in audit.gate["prompts"]
        ]
        parts += [
            "<h2>Token-set gate</h2>",
            _table(("prompt", "tokens", "first divergence", "verdict"), rows),
        ]
    if audit.ladder:
        rows = [(e(r["name"]), e(r["status"]), e(r["reason"])) for r in audit.ladder]
        parts += ["<h2>Ladder</h2>", _table(("rung", "status", ""), rows)]
    parts += [f"<h2>Reproduce</h2><pre>{e(audit.command)}</pre><p>{e(_environment(audit))}</p></body></html>"]
    return "\n".join(parts)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    top = "".join(f"<th scope='col'>{html.escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


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
