"""Name the first kernel, host operation or buffer that is wrong in a deployment.

    report = find(deployment)
    print(report.text())

Method: the deployment's own runner runs one prompt and a few decode steps while every argument of every ELF
is read back. Each launch is compared with its plain fp32 reference on the device's own inputs; what the host
passes on, the KV cache, weights and tables are compared with the checkpoint. The suspect is then confirmed in
the unmerged form, one ELF per kernel: it is exchanged for its fp32 reference, and the cosines of the layers
before and after show whether that heals the model. When nothing stands out, the host's loop around the layers
is looked at; then layers are exchanged by halves, and the kernels of the layer that this names.

Payload (`npu_record("bisect", ...)`): {"model", "device", "checkpoint", "prompt", "n_prompt", "steps",
"offender": Row or null, "also": [Row], "rows": [Row of every bad comparison, and the worst good one of every
kernel], "confirmed": {"kernel", "before", "after", "healed", "note"} or null, "layers": {"prefill": [cosine
per layer], "decode": [..]}, "verdict": text}; Row as :class:`llms.verify.localise.judge.Row`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from llms.verify.localise.judge import LOOP, Row
from llms.verify.localise.swap import Confirmation

if TYPE_CHECKING:
    from llms.verify.contract.chat import EncodedPrompt
    from llms.verify.contract.deployment import Deployment

# Enough for faults that come late, a long cache or a rare tile; `steps` asks for more.
STEPS = 12
PATHS = ("prefill", "decode")


class BisectError(Exception):
    """The deployment does not offer what a bisect needs; the text says what."""


@dataclass(frozen=True)
class BisectReport:
    """What was found. `offender` is None when every comparison was good."""

    model: str
    device: str
    checkpoint: str
    prompt: str
    n_prompt: int
    steps: int
    rows: tuple[Row, ...]
    confirmed: Confirmation | None
    layers: dict[str, list[float]]

    @property
    def bad(self) -> tuple[Row, ...]:
        """All bad comparisons in the order of execution."""
        return tuple(row for row in self.rows if not row.ok)

    @property
    def offender(self) -> Row | None:
        """The first bad comparison."""
        return self.bad[0] if self.bad else None

    @property
    def verdict(self) -> str:
        """One sentence."""
        first = self.offender
        if first is None:
            if self.confirmed is not None:
                return self.confirmed.note
            return f"no kernel, host operation or buffer stands out in {len(self.rows)} comparisons"
        if first.kernel in LOOP:
            good = len(self.rows) - len(self.bad)
            return (
                f"all kernels agree with their references in {good} comparisons; the difference is in the "
                f"host's loop: {first.kernel} ({first.where}): {first.note}"
            )
        same = [row for row in self.bad if (row.path, row.kernel) == (first.path, first.kernel)]
        layers = sorted({row.layer for row in same})
        spread = f", in {len(layers)} layers" if len(layers) > 1 else ""
        return f"first offender: {first.kernel} ({first.where}{spread}): {first.note}"

    def payload(self) -> dict[str, Any]:
        """See the module."""
        shown = [*self.bad[:200], *self._worst_good()]
        return {
            "model": self.model,
            "device": self.device,
            "checkpoint": self.checkpoint,
            "prompt": self.prompt,
            "n_prompt": self.n_prompt,
            "steps": self.steps,
            "comparisons": len(self.rows),
            "bad": len(self.bad),
            "offender": self.offender.as_dict() if self.offender else None,
            "also": [row.as_dict() for row in self._other_kernels()],
            "rows": [row.as_dict() for row in shown],
            "confirmed": self.confirmed.as_dict() if self.confirmed else None,
            "layers": self.layers,
            "verdict": self.verdict,
        }

    def _other_kernels(self) -> list[Row]:
        """First bad row of every other kernel."""
        found: dict[tuple[str, str], Row] = {}
        for row in self.bad:
            found.setdefault((row.path, row.kernel), row)
        return list(found.values())[1:]

    def _worst_good(self) -> list[Row]:
        worst: dict[tuple[str, str, str], Row] = {}
        for row in self.rows:
            key = (row.path, row.kernel, row.result)
            if row.ok and row.kind == "kernel" and (key not in worst or row.cosine < worst[key].cosine):
                worst[key] = row
        return list(worst.values())

    def text(self) -> str:
        """Verdict, table of cosines, confirmation, for a terminal."""
        lines = [
            f"bisect {self.model} on {self.device}, {self.checkpoint}",
            f"prompt of {self.n_prompt} tokens, {self.steps} decode steps, {len(self.rows)} comparisons, "
            f"{len(self.bad)} bad",
            "",
            self.verdict,
        ]
        if self.confirmed is not None:
            lines.append(f"  {self.confirmed.note}")
        lines += ["", _HEAD]
        first = self.offender
        if first is None or first.kernel in LOOP:
            rows = self._worst_good()
        else:
            rows = [
                row
                for row in self.rows
                if (row.kind == "kernel" or not row.ok)
                and (row.path, row.layer) == (first.path, first.layer)
                and row.step <= max(0, first.step)
            ]
        lines += [_line(row, row is first) for row in rows[:60]]
        if first is not None and self.steps and not any(row.path == "decode" for row in self.rows):
            lines += ["", "decode was not compared behind a wrong prefill; compare it by --path decode"]
        others = self._other_kernels()
        if others:
            lines += ["", "also bad, perhaps by the same cause:"]
            lines += [f"  {row.kernel} ({row.where}): {row.note}" for row in others[:8]]
        for path, cosines in self.layers.items():
            lines += ["", f"{path}: median cosine per layer against HF bf16"]
            lines.append("  " + " ".join(f"{value:.4f}" for value in cosines))
        return "\n".join(lines)


_HEAD = f"  {'path':8} {'layer':>5} {'kernel':34} {'result':12} {'cosine':>9} {'error':>9} {'expected':>9}"


def _line(row: Row, marked: bool) -> str:
    mark = "->" if marked else ("x " if not row.ok else "  ")
    return (
        f"{mark}{row.path:8} {row.layer:5} {row.kernel:34} {row.result:12} {row.cosine:9.6f} "
        f"{row.error:9.2e} {row.expected:9.2e}"
    )


def find(
    deployment: Deployment,
    *,
    prompt: EncodedPrompt | None = None,
    path: str | None = None,
    steps: int = STEPS,
    confirm: bool = True,
    max_seq: int | None = None,
    device: AbstractContextManager[Any] | None = None,
) -> BisectReport:
    """Run one prompt (default: the first of the model's set) and judge every launch.

    path: `prefill` or `decode` limits the verdict to one of them (decode still needs a prefill). `device`
    is held while the device works. Raises BisectError for a foreign runner, ValueError for another path.
    """
    from llms.llama_kernel_builder.deployment.runner import ProductionRunner
    from llms.llama_kernel_builder.exceptions import BadArgument
    from llms.verify.localise import loop
    from llms.verify.localise.checkpoint import Truth
    from llms.verify.localise.swap import layer_cosines, try_swaps
    from llms.verify.localise.tap import tapped
    from llms.verify.localise.walk import Walk

    if path not in (None, *PATHS):
        raise ValueError(f"path is prefill or decode, not '{path}'")
    chosen = prompt if prompt is not None else deployment.prompts(1)[0]
    ids = list(chosen.ids)
    other = list(next(prompt.ids for prompt in deployment.prompts(2) if list(prompt.ids) != ids))
    longest = max(len(ids), len(other)) + steps + loop.STEPS
    runner = deployment.runner(max_seq if max_seq is not None else longest)
    if not isinstance(runner, ProductionRunner):
        raise BisectError(
            f"{deployment.name}: a runner of type {type(runner).__name__} shows no kernels; bisect needs "
            "llms.llama_kernel_builder.deployment.runner.ProductionRunner, whose launches it can observe"
        )
    count = 0 if path == "prefill" else steps
    reference = deployment.hf_reference().run(chosen.ids, max(steps, 1) + 1)
    deployment.hf_reference().release()
    truth = Truth(deployment.reference_checkpoint.path, runner.session.config)
    walk = Walk(truth, runner.device_arithmetic(len(ids)), path)
    for length in sorted({len(ids), len(other)}):
        runner.prepare(length)
    layers: dict[str, list[float]] = {}
    with device if device is not None else nullcontext():
        with tapped(runner.session.cache) as tap:
            try:
                record = runner.prefill(np.asarray(ids, np.int64))
            except BadArgument as error:
                walk.prefill(tap.take(), ids, None)
                walk.note(loop.wrong_length(error))
                count = 0
            else:
                walk.prefill(tap.take(), ids, runner.kv_cache())
                walk.logits("prefill", -1, record.logits_at_pred, record.top1_token)
                layers["prefill"] = layer_cosines(record.layer_intermediates, reference.prefill_layers)
            for step in range(count):
                if walk.first is not None:
                    break
                token, position = reference.fed[step], len(ids) + step
                probe = runner.decode_step_probed(token, position)
                walk.decode(tap.take(), token, position, step, runner.kv_cache())
                shown = probe.record
                walk.logits("decode", step, shown.lm_head_logits, shown.top1_token)
                layers["decode"] = layer_cosines(probe.layer_intermediates, reference.decode_layers[step])
        if walk.first is None and path != "decode":
            for row in loop.look(runner, ids, other, reference.fed):
                walk.note(row)
        rows = [row for row in walk.rows if path is None or row.path == path]
        confirmed = None
        if confirm:
            confirmed = try_swaps(runner.session, ids, reference, [row for row in rows if not row.ok])
        deployment.release_runners()
    return BisectReport(
        model=deployment.name,
        device=runner.session.driver.label,
        checkpoint=deployment.checkpoint.label,
        prompt=chosen.text,
        n_prompt=len(ids),
        steps=count,
        rows=tuple(rows),
        confirmed=confirmed,
        layers=layers,
    )
