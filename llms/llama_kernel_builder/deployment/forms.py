"""The forms of a deployment that phases 3 to 5 compare: the ability ``forms()`` of our runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np

from llms.llama_kernel_builder import host_ops
from llms.llama_kernel_builder.deployment.arithmetic_of import CASCADE_STEP
from llms.llama_kernel_builder.deployment.session import Session
from llms.llama_kernel_builder.device_config import DEVICE_HEAD_DIMS, device_config
from llms.llama_kernel_builder.llama_loop import buckets_of
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.llama_kernel_builder.specs import KernelSpec
from llms.verify.contract.abilities.forms import Dispatch, Form, Section, TimedStep
from llms.verify.contract.records import NpuRunner

Array = np.ndarray[Any, Any]


class SessionForms:
    """Builds sessions like a given one, in another form; see ``contract.abilities.Forms``."""

    def __init__(self, session: Session) -> None:
        # Not the session itself: its weights would stay in memory beside those of the form.
        self._config = session.config
        self._build = partial(
            Session,
            session.module,
            session.checkpoint,
            session.tokenizer,
            config=session.config,
            npu_attn=session.npu_attn,
        )

    def build(self, form: Form, max_seq: int) -> SessionForm:
        """A new session of this form, with weights and caches of its own."""
        return SessionForm(form, self._build(max_seq=max_seq, merged=form.merged, resident=form.resident))

    def compiled_lengths(self) -> tuple[int, ...]:
        """Buckets that prompts of this model can need, ascending."""
        return buckets_of(self._config)

    def layouts(self, section: Section) -> tuple[tuple[str, str], ...]:
        """(name, reason) of the layouts that are not deployed."""
        return (attention_layout(self._config) if section == "prefill" else cascade_form(self._config),)


class SessionForm:
    """One form, run by its own session; see ``contract.abilities.BuiltForm``."""

    def __init__(self, form: Form, session: Session) -> None:
        self.form = form
        self.session = session
        self.clock = session.driver.label

    def prepare(self, prompt_len: int) -> None:
        """Compile and preload what a prompt of this length needs."""
        self.session.prepare(prompt_len)

    def prefill(self, prompt_ids: Sequence[int], *, counted: bool = False) -> TimedStep:
        """Run a prompt through the production prefill."""
        return self._timed("prefill", lambda: self.session.prefill(prompt_ids)[:2], counted)

    def decode_step(self, token: int, position: int, *, counted: bool = False) -> TimedStep:
        """Run one production decode step. Raises SequenceTooLong before the first prefill."""
        return self._timed("decode", lambda: self.session.decode(token, position), counted)

    def runner(self) -> NpuRunner:
        """A runner over the same session."""
        from llms.llama_kernel_builder.deployment.runner import ProductionRunner

        return ProductionRunner(self.form.name, self.session)

    def close(self) -> None:
        """Release the device."""
        self.session.close()

    def _timed(self, section: Section, run: Callable[[], tuple[int, Array]], counted: bool) -> TimedStep:
        now = self.session.driver.clock.now
        with self.session.profiled(section) if counted else nullcontext():
            begin = now()
            token, row = run()
            seconds = now() - begin
        return TimedStep(token, host_ops.widen(row), seconds, self._dispatch(section) if counted else None)

    def _dispatch(self, section: Section) -> Dispatch:
        programs, transfers = [], {"bo_write": [0, 0], "bo_read": [0, 0]}
        kernels: dict[KernelSpec, int] = {}
        for (where, kind, name), entry in self.session.profiler.entries.items():
            if where != section:
                continue
            if kind in transfers:
                transfers[kind][0] += entry.calls
                transfers[kind][1] += entry.nbytes
            elif kind == "elf":
                program = self.session.cache.program(name)
                programs.append((name, program.digest, entry.calls))
                for launch in program.launches:
                    kernels[launch.spec] = kernels.get(launch.spec, 0) + entry.calls
        ordered = tuple(sorted(kernels.items(), key=lambda item: str(item[0])))
        (writes, written), (reads, read) = transfers["bo_write"], transfers["bo_read"]
        return Dispatch(tuple(sorted(programs)), ordered, writes, reads, written, read)


def attention_layout(config: ModelConfig) -> tuple[str, str]:
    """Attention on the projections as they are, without transposes on the host: legal up to head size 64."""
    name = "attention without host transposes"
    if config.head_dim not in DEVICE_HEAD_DIMS:
        return name, f"no attention kernel for head_dim {config.head_dim}: the host attends"
    if config.head_dim > 64:
        return name, (
            f"head_dim {config.head_dim}: the sequence-first kernel hangs beyond one chunk of 64 columns, so "
            "the host puts heads first"
        )
    return name, "nothing to change: the only kernel for this head size is sequence-first already"


def cascade_form(config: ModelConfig) -> tuple[str, str]:
    """O+FFN of decode as a cascade of three launches: published, and less exact."""
    name = "cascade O+FFN in three launches"
    padded = device_config(config)
    widths = {"emb_dim": padded.emb_dim, "q_dim": padded.q_dim, "hidden_dim": padded.hidden_dim}
    odd = [f"{key} {value}" for key, value in widths.items() if value % CASCADE_STEP]
    if odd:
        return name, f"not legal: {', '.join(odd)} is no multiple of {CASCADE_STEP}"
    return name, (
        f"lower precision: it rounds the running sum every {CASCADE_STEP} columns and sums the norm in bf16"
    )
