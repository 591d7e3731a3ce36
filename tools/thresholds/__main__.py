"""``python -m tools.thresholds MODEL``: measure the limits of the ladder, write ``thresholds.json``.

For every statistic of the ladder: the clean device over all prompts, the same against a reference whose sums
run in another order (what other silicon may do), and each planted fault on the first prompt. The limit is the
largest clean value times a margin, at least a floor below which differences mean nothing; it must not depend
on the faults. A fault whose every statistic stays below its limit is named and ends the script with status 1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llms.checkpoints import write_atomically
from llms.llama_kernel_builder import driver
from llms.verify.contract.chat import EncodedPrompt
from llms.verify.contract.deployment import Deployment
from llms.verify.contract.prompts import STYLES
from llms.verify.contract.topk import N_TOKENS
from llms.verify.ladder.climbing import Ladder
from llms.verify.ladder.edges import capture_edges, edges
from llms.verify.ladder.thresholds import FILE, FORMAT_VERSION, POOLED, floor_of, threshold_key
from llms.verify.ladder.types import RungResult
from llms.verify.reference.arithmetic import DescribedRunner
from llms.verify.reference.cache import ReferenceCache
from llms.verify.reference.matched import MatchedReference
from tools.thresholds.faults import FAULTS

MARGIN = 2.0


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns its exit status."""
    options = _parser().parse_args(arguments)
    driver.select("twin")
    deployment = Deployment.from_folder(options.model, checkpoint=options.checkpoint)
    raw = _Raw(options.raw)
    if options.edges:
        _measure_edges(deployment, raw)
        _add(threshold_key(deployment.name, deployment.checkpoint), _evaluate(deployment, raw), options.out)
        return 0
    prompts = {
        f"{style} {index}": prompt
        for style in STYLES
        for index, prompt in enumerate(deployment.prompts(options.prompts, style=style))
    }
    _measure_clean(deployment, prompts, raw)
    _measure_faults(deployment, [next(iter(prompts.values()))], raw, options.only)
    measured = _evaluate(deployment, raw)
    _write(threshold_key(deployment.name, deployment.checkpoint), measured, options.out)
    escaped = [name for name, seen in measured["faults"].items() if not seen["seen_by"]]
    print(f"{len(measured['faults'])} faults, not seen by any statistic: {', '.join(escaped) or 'none'}")
    return 1 if escaped else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.thresholds", description=__doc__)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--checkpoint", type=Path, help="checkpoint instead of the model's own")
    parser.add_argument("--prompts", type=int, default=8, help="prompts per style for the clean measurement")
    parser.add_argument("--only", nargs="*", help="measure these faults again")
    parser.add_argument(
        "--edges", action="store_true", help="measure the rung `edges` alone and add it to the model's entry"
    )
    parser.add_argument("--out", type=Path, default=FILE, help="thresholds file to update")
    parser.add_argument(
        "--raw",
        type=Path,
        required=True,
        help="file of raw measurements; what it holds is not measured again",
    )
    return parser


class _Raw:
    """Raw measurements on disk, so that an interrupted run goes on where it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def __contains__(self, name: str) -> bool:
        return name in self.content

    def put(self, name: str, rungs: Sequence[RungResult]) -> None:
        self.content[name] = {
            "values": {one.statistic: one.value for rung in rungs for one in rung.measured},
            "failures": [line for rung in rungs for line in rung.failures[:2]],
        }
        write_atomically(self.path, json.dumps(self.content, indent=1).encode())
        print(
            name, *(f"{key}={value:.3g}" for key, value in self.content[name]["values"].items()), flush=True
        )


def _measure(
    deployment: Deployment, prompts: list[EncodedPrompt], matched: MatchedReference, max_seq: int
) -> tuple[RungResult, ...]:
    ladder = Ladder(deployment, deployment.hf_reference(), prompts, matched=matched)
    return ladder.measure(max_seq).rungs


def _measure_clean(deployment: Deployment, prompts: dict[str, EncodedPrompt], raw: _Raw) -> None:
    checkpoint, cache = deployment.reference_checkpoint, ReferenceCache.default()
    max_seq = max(len(prompt) for prompt in prompts.values()) + N_TOKENS
    for label, reorder in (("clean", None), ("reordered", 1)):
        matched = MatchedReference(checkpoint, cache=cache, reorder=reorder)
        for index, (prompt_name, prompt) in enumerate(prompts.items()):
            name = f"{label} {prompt_name}"
            if name not in raw and not (label == "reordered" and index % 4):
                raw.put(name, _measure(deployment, [prompt], matched, max_seq))
    deployment.release_runners()


def _measure_faults(
    deployment: Deployment, prompts: list[EncodedPrompt], raw: _Raw, again: list[str] | None
) -> None:
    matched = MatchedReference(deployment.reference_checkpoint, cache=ReferenceCache.default())
    for one in FAULTS:
        name = f"fault {one.name}"
        if not one.applies(deployment.config()) or (name in raw and one.name not in (again or ())):
            continue
        with one.plant(deployment.config()):
            try:
                raw.put(name, _measure(deployment, prompts, matched, len(prompts[0]) + N_TOKENS))
            finally:
                deployment.release_runners()


def _measure_edges(deployment: Deployment, raw: _Raw) -> None:
    checkpoint = deployment.reference_checkpoint
    for seed in (None, 1, 2, 3):
        name = "clean made-up" if seed is None else f"reordered made-up, seed {seed}"
        if name not in raw:
            raw.put(name, [_edges(deployment, MatchedReference(checkpoint, reorder=seed))])
    matched = MatchedReference(checkpoint)
    for one in FAULTS:
        if one.applies(deployment.config()) and f"fault {one.name}" not in raw:
            with one.plant(deployment.config()):
                raw.put(f"fault {one.name}", [_edges(deployment, matched)])


def _edges(deployment: Deployment, matched: MatchedReference) -> RungResult:
    runner = deployment.runner(1)
    assert isinstance(runner, DescribedRunner)
    try:
        captures = capture_edges(runner, deployment.config().vocab_size)
        return edges(captures, runner.device_arithmetic, matched, deployment.tokenizer, None)
    finally:
        deployment.release_runners()


def _evaluate(deployment: Deployment, raw: _Raw) -> dict[str, Any]:
    clean = {key: entry for key, entry in raw.content.items() if not key.startswith("fault ")}
    faults = {key[6:]: entry for key, entry in raw.content.items() if key.startswith("fault ")}
    alarms = [line for entry in clean.values() for line in entry["failures"]]
    if alarms:
        raise SystemExit("a clean device fails without any limit:\n" + "\n".join(alarms))
    statistics = sorted({name for entry in clean.values() for name in entry["values"]})
    limits: dict[str, Any] = {}
    for name in statistics:
        values = {
            f"{key} {source}": entry["values"][source]
            for key, entry in clean.items()
            for source in {name, POOLED.get(name, name)}
            if source in entry["values"]
        }
        floor = floor_of(name)
        largest = max(values.values())
        limit = float(f"{max(MARGIN * largest, floor):.3g}")
        planted = {key: entry["values"][name] for key, entry in faults.items() if name in entry["values"]}
        seen = {key: value for key, value in planted.items() if not value <= limit}
        finite = {key: value for key, value in seen.items() if value == value and value != float("inf")}
        weakest = min(finite, key=lambda key: finite[key]) if finite else None
        limits[name] = {
            "limit": limit,
            "floor": floor,
            "clean": {
                "max": _rounded(largest),
                "median": _rounded(sorted(values.values())[len(values) // 2]),
                "n": len(values),
                "reordered_max": _rounded(
                    max((v for key, v in values.items() if key.startswith("reordered")), default=0.0)
                ),
            },
            "weakest_fault": None
            if weakest is None
            else {"name": weakest, "value": _rounded(finite[weakest])},
            "seen_faults": len(seen),
        }
    return {
        "checkpoint": deployment.reference_checkpoint.label,
        "content_hash": deployment.reference_checkpoint.content_hash,
        "device": driver.current().label,
        "date": datetime.date.today().isoformat(),
        "margin": MARGIN,
        "limits": limits,
        "faults": {
            key: {
                "what": next((one.what for one in FAULTS if one.name == key), ""),
                "seen_by": [
                    *(name for name in limits if not entry["values"].get(name, 0.0) <= limits[name]["limit"]),
                    *(["a failure without limit: " + entry["failures"][0]] if entry["failures"] else []),
                ],
            }
            for key, entry in faults.items()
        },
    }


def _rounded(value: float) -> float | None:
    return float(f"{value:.4g}") if value == value and abs(value) != float("inf") else None


def _write(key: str, measured: dict[str, Any], out: Path) -> None:
    content: dict[str, Any] = {"format": FORMAT_VERSION, "models": {}}
    if out.exists():
        content = json.loads(out.read_text())
    content["models"][key] = measured
    content["models"] = dict(sorted(content["models"].items()))
    write_atomically(out, (json.dumps(content, indent=1) + "\n").encode())


def _add(key: str, measured: dict[str, Any], out: Path) -> None:
    """Put the limits of one rung into an entry that holds the others."""
    content: dict[str, Any] = json.loads(out.read_text())
    entry = content["models"][key]
    mine = {name.split(".")[0] for name in measured["limits"]}
    kept = {name: limit for name, limit in entry["limits"].items() if name.split(".")[0] not in mine}
    entry["limits"] = dict(sorted({**kept, **measured["limits"]}.items()))
    for name, fault in measured["faults"].items():
        known = entry["faults"].setdefault(name, {"what": fault["what"], "seen_by": []})
        others = [one for one in known["seen_by"] if one.split(".")[0] not in mine]
        known["seen_by"] = list(dict.fromkeys([*others, *fault["seen_by"]]))
    write_atomically(out, (json.dumps(content, indent=1) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main())
