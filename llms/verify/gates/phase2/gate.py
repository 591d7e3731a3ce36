"""Phase 2: one decoder layer, assembled, against layer 0 of the Hugging Face model in bf16.

Two prompts and the first one again, each with one decode step, through the production functions of a runner
that is built with a single layer (adapters that cannot be built so run whole). Per prompt and path:

* cosine of the whole output at least 0.99, per position at least 0.99 / 0.98 / 0.97 for a head size up to
  64 / up to 128 / above (the limits of the mlir-air LLM examples, e972f2942);
* a median size of the output within 5 % of the reference's, as a cosine is blind to a common factor;
* everything finite; the first prompt's second run bit for bit the first one, the second prompt's output not
  the first's (a stale buffer).

Payload `block`: head_dim, limits (whole, position, size), one_layer, rows (prompt, text, path, positions,
cos_whole, cos_min, cos_median, size, max_abs, mean_abs, max_rel, mean_rel, ok), repeat_equal, status,
problems. max_abs and max_rel are recorded only: near-zero references decide them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import numpy as np

from llms.verify.contract.capture import DiagnosisCapture, capture_diagnosis
from llms.verify.contract.chat import EncodedPrompt
from llms.verify.contract.deployment import NO_DEVICE, Deployment, Device
from llms.verify.contract.outcome import Outcome
from llms.verify.contract.records import Array
from llms.verify.gates.phase6.diagnosis import Path, cosines, layer_row
from llms.verify.reference.hf import HFReference, ReferenceRun

WHOLE_LIMIT = 0.99
# Clean twin, four families, two prompts, both paths: 0.982 to 1.0003 (float-only cores round downwards).
SIZE_LIMIT = 0.05
STEPS = 2
_RECORDED = ("cos_min", "cos_median", "max_abs", "mean_abs", "max_rel", "mean_rel")


def position_limit(head_dim: int) -> float:
    """Smallest cosine of any position: more head columns, more rounding per score."""
    if head_dim <= 64:
        return 0.99
    return 0.98 if head_dim <= 128 else 0.97


def block_gate(
    deployment: Deployment,
    reference: HFReference,
    prompts: Sequence[EncodedPrompt],
    *,
    device: Device = NO_DEVICE,
) -> Outcome:
    """Judge layer 0 over two prompts. Raises ValueError for fewer, and what the runner raises."""
    if len(prompts) < 2:
        raise ValueError("the block gate needs two prompts: one alone cannot show a stale buffer")
    first, second = prompts[:2]
    runs = [reference.run(prompt.ids, STEPS).with_layers() for prompt in (first, second)]
    reference.release()
    order = ((first, runs[0]), (second, runs[1]), (first, runs[0]))
    captures, alone = _capture(deployment, order, device)
    return judge(int(deployment.config().head_dim), prompts, runs, captures, one_layer=alone)


def _capture(
    deployment: Deployment,
    order: Sequence[tuple[EncodedPrompt, ReferenceRun]],
    device: Device,
) -> tuple[list[DiagnosisCapture], bool]:
    lengths = [len(prompt) for prompt, _ in order]
    longest = max(lengths) + STEPS
    config, built = deployment.config(), None
    if is_dataclass(config) and not isinstance(config, type):
        single = replace(config, n_layers=1)
        built = deployment.adapter.build_runner(deployment.model_name, single, longest, deployment.tokenizer)
    with deployment.on_device(device, lengths, max_seq=longest, runner=built) as runner:
        return [capture_diagnosis(runner, prompt.ids, run.fed) for prompt, run in order], built is not None


def judge(
    head_dim: int,
    prompts: Sequence[EncodedPrompt],
    runs: Sequence[ReferenceRun],
    captures: Sequence[DiagnosisCapture],
    *,
    one_layer: bool,
) -> Outcome:
    """Judge captures of (first prompt, second prompt, first prompt again)."""
    limit = position_limit(head_dim)
    problems: list[str] = []
    rows: list[dict[str, Any]] = []
    for index, (run, captured) in enumerate(zip(runs, captures, strict=False)):
        for path, mine, theirs in _outputs(captured, run):
            found, row = _judge_output(index, path, mine, theirs, limit)
            rows.append({"text": prompts[index].text, **row})
            problems += found
    equal = len(captures) == 3 and _same(captures[0], captures[2])
    if not equal:
        problems.append(
            "the same prompt gave another output the second time: something of a run stays behind"
        )
    if _same(captures[0], captures[1]):
        problems.append("two prompts gave the same output: the device works on the first one's data")
    payload = {
        "head_dim": head_dim,
        "limits": {"whole": WHOLE_LIMIT, "position": limit, "size": SIZE_LIMIT},
        "one_layer": one_layer,
        "rows": rows,
        "repeat_equal": equal,
        "status": "FAIL" if problems else "OK",
        "problems": problems,
    }
    return Outcome.of("block", "block gate, layer 0", problems, payload)


def _layer0(captured: DiagnosisCapture) -> tuple[Array | None, list[Array]]:
    """Output of layer 0, of the prefill and of every decode step; None and left out where it is not given."""
    layers = captured.prefill.layer_intermediates
    steps = [step.layer_intermediates[0]["ffn_out"] for step in captured.decode if step.layer_intermediates]
    return layers[0].get("ffn_out") if layers else None, steps


def _same(left: DiagnosisCapture, right: DiagnosisCapture) -> bool:
    pairs = []
    for captured in (left, right):
        prefill, steps = _layer0(captured)
        pairs.append([*([] if prefill is None else [prefill]), *steps])
    return len(pairs[0]) == len(pairs[1]) and all(map(np.array_equal, *pairs))


def _outputs(captured: DiagnosisCapture, run: ReferenceRun) -> list[tuple[Path, Array | None, Array]]:
    prefill, steps = _layer0(captured)
    outputs: list[tuple[Path, Array | None, Array]] = [("prefill", prefill, run.prefill_layers[0])]
    if captured.decode_offered:
        outputs.append(("decode", np.stack(steps) if steps else None, run.decode_layers[:, 0]))
    return outputs


def _judge_output(
    index: int, path: Path, mine: Array | None, theirs: Array, limit: float
) -> tuple[list[str], dict[str, Any]]:
    where = f"prompt {index}, {path}"
    row: dict[str, Any] = {"prompt": index, "path": path, "ok": False}
    if mine is None or mine.shape != theirs.shape:
        shape = None if mine is None else mine.shape
        return [f"{where}: layer 0 gave {shape}, the reference {theirs.shape}"], row
    if not np.isfinite(mine.astype(np.float64)).all():
        return [f"{where}: values that are not finite"], row
    a, b = mine.astype(np.float64), theirs.astype(np.float64)
    whole = float(cosines(a.reshape(1, -1), b.reshape(1, -1))[0])
    size = float(np.median(np.linalg.norm(a, axis=1) / np.maximum(np.linalg.norm(b, axis=1), 1e-30)))
    table = layer_row(0, path, "ffn_out", mine, theirs)
    problems = []
    if not whole >= WHOLE_LIMIT:
        problems.append(f"{where}: cosine {whole:.4f} of the whole output, limit {WHOLE_LIMIT}")
    if not table.cos_min >= limit:
        worst = int(np.argmin(cosines(a, b)))
        problems.append(f"{where}: cosine {table.cos_min:.4f} at position {worst}, limit {limit}")
    if not abs(size - 1) <= SIZE_LIMIT:
        problems.append(f"{where}: the output is {size:.3f} times as large, limit {SIZE_LIMIT:.0%}")
    row |= {"positions": len(a), "cos_whole": whole, "size": size, "ok": not problems}
    row |= {name: getattr(table, name) for name in _RECORDED}
    return problems, row
