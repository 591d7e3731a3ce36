"""The fault matrix on disk: ``matrix.json`` and a page ``matrix.html`` that needs nothing else.

JSON: {"device", "date", "gates": {gate: stage}, "faults": [{name, entry, kind, what, origin, expected,
where}], "rows": [{fault, model, checkpoint, expected, stage, caught_by, token_set, seconds, problem, cells:
{gate: {status, text}}}], "controls": [{model, checkpoint, prompts, alarms: [text]}], "unplanted": [{entry,
what, reason, guard}], "open": [text]}. Rows of an earlier run are replaced by fault, model and checkpoint,
the others stay.
"""

from __future__ import annotations

import datetime
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llms.checkpoints import write_atomically
from npu_twin.faults.__main__ import catalogue
from tests.faults.bench import GATES, TOKEN_SET, Row

LONGEST_TEXT = 600


def row_json(row: Row) -> dict[str, Any]:
    """One row in the form of the file."""
    token_set = row.cells[TOKEN_SET].status
    return {
        "fault": row.fault.name,
        "model": row.model,
        "checkpoint": row.checkpoint,
        "expected": row.fault.expected,
        "stage": row.stage,
        "caught_by": list(row.caught_by),
        "token_set": {"caught": "sees it", "passed": "does not see it"}.get(token_set, "never runs"),
        "seconds": round(row.seconds, 2),
        "problem": row.problem,
        "cells": {
            gate: {"status": cell.status, "text": cell.text[:LONGEST_TEXT]}
            for gate, cell in row.cells.items()
        },
    }


def write(
    folder: Path, rows: Sequence[Mapping[str, Any]], controls: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Add rows and controls to the matrix in ``folder``; returns its content."""
    path = folder / "matrix.json"
    known: dict[str, Any] = {}
    if path.is_file():
        known = json.loads(path.read_text(encoding="utf-8"))
    listed = catalogue()
    current = {fault["name"] for fault in listed["faults"]}
    merged = {_key(row): row for row in known.get("rows", ()) if row["fault"] in current}
    merged.update({_key(row): dict(row) for row in rows})
    judged = {(c["model"], c["checkpoint"], c["prompts"]): c for c in known.get("controls", ())}
    judged.update({(c["model"], c["checkpoint"], c["prompts"]): dict(c) for c in controls})
    order = {fault["name"]: index for index, fault in enumerate(listed["faults"])}
    found = sorted(merged.values(), key=lambda row: (order[row["fault"]], row["model"], row["checkpoint"]))
    never = [name for name in order if not any(row["fault"] == name for row in found)]
    content = {
        "device": "twin (modelled)",
        "date": datetime.date.today().isoformat(),
        "gates": GATES,
        "faults": listed["faults"],
        "rows": found,
        "controls": list(judged.values()),
        "unplanted": listed["unplanted"],
        "open": [
            *(f"{name}: applies to no model that was judged, or its run is missing" for name in never),
            *(row["problem"] for row in found if row["problem"]),
            *(alarm for control in judged.values() for alarm in control["alarms"]),
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
    write_atomically(folder / "matrix.html", page(content).encode())
    return content


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["fault"], row["model"], row["checkpoint"]


_STYLE = """
:root{color-scheme:light dark;--fg:#1c2128;--bg:#fff;--soft:#f3f4f6;--line:#d5d9df;--ok:#1a7f37;--bad:#b42318;
--dim:#69707a}
@media(prefers-color-scheme:dark){:root{--fg:#e2e6eb;--bg:#15181c;--soft:#1f242a;--line:#363d46;--ok:#4cc26b;
--bad:#ff7b6b;--dim:#98a1ac}}
body{font:15px/1.45 system-ui,sans-serif;color:var(--fg);background:var(--bg);margin:2rem;max-width:110rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:13px}
th,td{border-bottom:1px solid var(--line);padding:.3rem .5rem;text-align:left;vertical-align:top}
thead th{position:sticky;top:0;background:var(--soft)}th.g{writing-mode:vertical-rl;font-weight:500}
td.c{color:var(--ok);font-weight:700;text-align:center}td.p{color:var(--dim);text-align:center}
td.x{color:var(--bad);font-weight:700;text-align:center}.bad{color:var(--bad);font-weight:600}
.dim{color:var(--dim)}details summary{cursor:pointer}pre{white-space:pre-wrap;font-size:12px;max-width:60rem}
"""


def page(content: Mapping[str, Any]) -> str:
    """The matrix as one HTML page, without scripts or other files."""
    rows, gates = content["rows"], list(content["gates"])
    what = {fault["name"]: fault for fault in content["faults"]}
    blind = sorted({row["fault"] for row in rows if row["token_set"] == "does not see it"})
    head = "".join(f"<th class=g title='{content['gates'][g]}'>{g}</th>" for g in gates)
    body = "".join(_row(row, what[row["fault"]], gates) for row in rows)
    alarms = sum(len(control["alarms"]) for control in content["controls"])
    problems = "".join(f"<li class=bad>{html.escape(text)}</li>" for text in content["open"])
    controls = "".join(
        f"<tr><td>{html.escape(c['model'])}</td><td>{html.escape(c['checkpoint'])}</td><td>{c['prompts']}</td>"
        f"<td>{'<br>'.join(map(html.escape, c['alarms'])) or 'none'}</td></tr>"
        for c in content["controls"]
    )
    without = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(u[k])}</td>" for k in ("entry", "what", "reason", "guard"))
        + "</tr>"
        for u in content["unplanted"]
    )
    escaped = sum(row["stage"] is None for row in rows)
    return f"""<!doctype html><html lang=en><meta charset=utf-8>
<meta name=viewport content="width=device-width"><title>Fault matrix</title><style>{_STYLE}</style>
<h1>Fault matrix</h1>
<p>{len({row["fault"] for row in rows})} faults in {len({row["model"] for row in rows})} models,
{len(rows)} plants on {html.escape(content["device"])}, {content["date"]}.
{escaped} escaped. The token-set gate alone would not have seen {len(blind)} of these faults in at least one
model.
{len(content["controls"])} controls without a fault, {alarms} alarms.</p>
<p class=dim>● caught it, · passed, blank: not run (gates are run from the stage that must catch the fault up
to the first that does; the token-set gate always). ✕: an error ended it before it could judge.</p>
{f"<h2>Open</h2><ul>{problems}</ul>" if problems else ""}
<div class=scroll><table><thead><tr><th>fault</th><th>model</th><th>expected</th><th>caught in</th>
<th>token-set gate alone</th>{head}</tr></thead><tbody>{body}</tbody></table></div>
<h2>Controls: no fault, no alarm</h2><div class=scroll><table><thead><tr><th>model</th><th>checkpoint</th>
<th>prompts</th><th>alarms</th></tr></thead><tbody>{controls}</tbody></table></div>
<h2>Entries without a plant</h2><div class=scroll><table><thead><tr><th>entry</th><th>what</th><th>why</th>
<th>against it</th></tr></thead><tbody>{without}</tbody></table></div></html>
"""


_SIGNS = {"caught": ("c", "●"), "passed": ("p", "·"), "stopped": ("x", "✕"), "not offered": ("p", "–")}


def _row(row: Mapping[str, Any], fault: Mapping[str, str], gates: Sequence[str]) -> str:
    cells = ""
    for gate in gates:
        cell = row["cells"].get(gate)
        sign = _SIGNS[cell["status"]] if cell else ("p", "")
        title = html.escape(cell["text"][:300], quote=True) if cell else ""
        cells += f'<td class={sign[0]} title="{title}">{sign[1]}</td>'
    told = "".join(f"{gate}: {cell['text']}\n" for gate, cell in row["cells"].items() if cell["text"])
    stage = row["stage"] or "ESCAPED"
    bad = " class=bad" if row["problem"] else ""
    return (
        f"<tr><td><details><summary><b>{html.escape(row['fault'])}</b> "
        f"<span class=dim>{fault['entry']}</span><br>{html.escape(fault['what'])}</summary>"
        f"<p class=dim>{html.escape(fault['origin'])}; applies to {html.escape(fault['where'])}</p>"
        f"<pre>{html.escape(told)}</pre></details></td><td>{html.escape(row['model'])}<br>"
        f"<span class=dim>{html.escape(row['checkpoint'])}</span></td><td>{row['expected']}</td>"
        f"<td{bad}>{stage}</td><td>{row['token_set']}</td>{cells}</tr>"
    )
