"""Name the first kernel, host operation or buffer that is wrong in a deployment.

    report = find(deployment)
    print(report.text())

Method: the deployment's own runner runs one prompt and a few decode steps while every argument of every ELF
is read back. Each launch is compared with its plain fp32 reference on the device's own inputs; what the host
passes on, the KV cache, weights and tables are compared with the checkpoint. The suspect is then confirmed in
the unmerged form, one ELF per kernel: it is exchanged for its fp32 reference, and the cosines of the layers
before and after show whether that heals the model. When nothing stands out, the host's loop around the layers
is looked at; then layers are exchanged by halves, and the kernels of the layer that this names.

The launches come from the runner's ability ``launch_probe``, see :mod:`llms.verify.contract.abilities`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from llms.verify.contract.abilities import NotOffered, needed, offered
from llms.verify.contract.abilities.launch_probe import LaunchProbe, LaunchTap
from llms.verify.localise import loop
from llms.verify.localise.checkpoint import Truth
from llms.verify.localise.report import BisectReport
from llms.verify.localise.swap import layer_cosines, try_swaps
from llms.verify.localise.walk import Walk

if TYPE_CHECKING:
    from llms.verify.contract.chat import EncodedPrompt
    from llms.verify.contract.deployment import Deployment
    from llms.verify.reference.hf import ReferenceRun

# Enough for faults that come late, a long cache or a rare tile; `steps` asks for more.
STEPS = 12
PATHS = ("prefill", "decode")


class BisectNotOffered(Exception):
    """The runner lacks an ability that a bisect needs; the text says which."""


@dataclass
class Search:
    """One bisect under way: who is looked at, with which prompts, and what was judged so far.

    layers: per path, median cosine of every layer against HF bf16.
    """

    runner: Any
    probe: LaunchProbe
    ids: list[int]
    other: list[int]
    reference: ReferenceRun
    walk: Walk
    layers: dict[str, list[float]] = field(default_factory=dict)

    def prefill(self, tap: LaunchTap) -> bool:
        """Run and judge the prompt; False when the prefill miscounts it, so that nothing can follow."""
        try:
            record = self.runner.prefill(np.asarray(self.ids, np.int64))
        except self.probe.wrong_length as error:
            self.walk.prefill(tap.take(), self.ids, None)
            self.walk.note(loop.wrong_length(error))
            return False
        self.walk.prefill(tap.take(), self.ids, self.runner.kv_cache())
        self.walk.logits("prefill", -1, record.logits_at_pred, record.top1_token)
        self.layers["prefill"] = layer_cosines(record.layer_intermediates, self.reference.prefill_layers)
        return True

    def decode(self, tap: LaunchTap, steps: int) -> None:
        """Run and judge decode steps that are fed the reference's tokens, up to the first bad comparison."""
        for step in range(steps):
            if self.walk.first is not None:
                return
            token, position = self.reference.fed[step], len(self.ids) + step
            probed = self.runner.decode_step_probed(token, position)
            self.walk.decode(tap.take(), token, position, step, self.runner.kv_cache())
            self.walk.logits("decode", step, probed.record.lm_head_logits, probed.record.top1_token)
            wanted = self.reference.decode_layers[step]
            self.layers["decode"] = layer_cosines(probed.layer_intermediates, wanted)

    def host_loop(self) -> None:
        """Look at the loop around the layers."""
        self.walk.note_all(loop.look(self.runner, self.ids, self.other, self.reference.fed))


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
    is held while the device works. Raises BisectNotOffered for a runner that shows no launches, ValueError
    for another path.
    """
    if path not in (None, *PATHS):
        raise ValueError(f"path is prefill or decode, not '{path}'")
    chosen = prompt if prompt is not None else deployment.prompts(1)[0]
    search = _open(deployment, list(chosen.ids), path, steps, max_seq)
    count = 0 if path == "prefill" else steps
    with device if device is not None else nullcontext():
        with search.probe.observed() as tap:
            if not search.prefill(tap):
                count = 0
            search.decode(tap, count)
        if search.walk.first is None and path != "decode":
            search.host_loop()
        rows = [row for row in search.walk.rows if path is None or row.path == path]
        bad = [row for row in rows if not row.ok]
        confirmed = try_swaps(search.probe, search.ids, search.reference, bad) if confirm else None
        deployment.release_runners()
    return BisectReport(
        model=deployment.name,
        device=search.probe.device,
        checkpoint=deployment.checkpoint.label,
        prompt=chosen.text,
        n_prompt=len(search.ids),
        steps=count,
        rows=tuple(rows),
        confirmed=confirmed,
        layers=search.layers,
    )


def _open(
    deployment: Deployment, ids: list[int], path: str | None, steps: int, max_seq: int | None
) -> Search:
    """Everything that is needed before the device works: runner compiled, reference run."""
    other = list(next(prompt.ids for prompt in deployment.prompts(2) if list(prompt.ids) != ids))
    longest = max(len(ids), len(other)) + steps + loop.STEPS
    runner = deployment.runner(max_seq if max_seq is not None else longest)
    try:
        abilities = ("launch_probe", "device_arithmetic", "decode_step_probed", "kv_cache")
        probe, arithmetic, *_ = (needed(runner, name) for name in abilities)
    except NotOffered as error:
        raise BisectNotOffered(f"bisect is not offered for {deployment.name}: {error}") from error
    reference = deployment.hf_reference().run(ids, max(steps, 1) + 1)
    deployment.hf_reference().release()
    launches: LaunchProbe = probe()
    truth = Truth(deployment.reference_checkpoint.path, launches.layout)
    prepare = offered(runner, "prepare")
    if prepare is not None:
        for length in sorted({len(ids), len(other)}):
            prepare(length)
    return Search(runner, launches, ids, other, reference, Walk(truth, arithmetic(len(ids)), path))
