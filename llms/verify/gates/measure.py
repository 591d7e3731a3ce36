"""One form of a deployment, measured: what it dispatches, how long it takes, what it says.

A form is the same production functions with one optimisation more or less (:class:`Form`). Times are on the
device clock, set-up excluded; the first run of a form (contexts open, caches fill) is the token-set gate's
and never a time of the prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from llms.llama_kernel_builder import host_ops
from llms.llama_kernel_builder.deployment.runner import ProductionRunner
from llms.llama_kernel_builder.deployment.session import Session
from llms.llama_kernel_builder.llama_loop import BUCKETS, bucket_for
from llms.llama_kernel_builder.specs import KernelSpec
from llms.verify.contract.capture import DiagnosisCapture, capture_diagnosis
from llms.verify.contract.chat import EncodedPrompt
from llms.verify.contract.deployment import Deployment
from llms.verify.contract.topk import N_TOKENS, GateResult, TokenStep, TokenTrace, judge
from llms.verify.gates.phase1 import kernel_laws
from llms.verify.reference.hf import HFReference

Array = np.ndarray[Any, Any]
# Runs are repeated until two agree, at least twice; 20 are what the mlir-air LLM examples time.
FEWEST_RUNS, MOST_RUNS, AGREEMENT = 2, 20, 2e-3
PROBED_TOKENS = 4


@dataclass(frozen=True)
class Form:
    """merged: one ELF per block instead of one per kernel. resident: activations stay on the device."""

    name: str
    merged: bool
    resident: bool


UNFUSED = Form("unfused", merged=False, resident=False)
MERGED = Form("merged", merged=True, resident=False)
PRODUCTION = Form("merged, buffers reused", merged=True, resident=True)


@dataclass(frozen=True)
class Dispatch:
    """What one prefill or decode step hands to the device.

    programs: (name, digest, calls); kernels: leaf kernels with their number of launches; writes and reads:
    transfers of activations, with their bytes.
    """

    programs: tuple[tuple[str, str, int], ...]
    kernels: tuple[tuple[KernelSpec, int], ...]
    writes: int = 0
    reads: int = 0
    bytes_written: int = 0
    bytes_read: int = 0

    @property
    def calls(self) -> int:
        """Runs of an ELF."""
        return sum(calls for _, _, calls in self.programs)

    @property
    def launches(self) -> int:
        """Kernel launches inside them."""
        return sum(count for _, count in self.kernels)

    def low_tier(self) -> dict[KernelSpec, int]:
        """Launches whose arithmetic rounds inside the sum over K: fast, and less exact."""
        return {spec: n for spec, n in self.kernels if rounds_inside(spec)}

    def summary(self) -> dict[str, int]:
        """JSON-able counts."""
        return {
            "elf_calls": self.calls,
            "launches": self.launches,
            "writes": self.writes,
            "reads": self.reads,
            "bytes_written": self.bytes_written,
            "bytes_read": self.bytes_read,
            "low_tier_launches": sum(self.low_tier().values()),
        }


def rounds_inside(spec: KernelSpec) -> bool:
    """True for GEMM `direct` with bf16 output and for the cascade GEMV over more than one pass of K."""
    if spec.op == "gemm":
        return spec.method == "direct" and spec.dtype_out == "bf16"
    return spec.op == "gemv_add" and spec.dim("K") > kernel_laws.CASCADE_PASS


@dataclass(frozen=True, eq=False)
class Measured:
    """Times in milliseconds on the device clock, dispatch, tokens and logits of one form.

    `logits`: [n_tokens, vocab] uint16, the bf16 bits. `inside`: layer outputs, of the unfused form only.
    """

    form: Form
    clock: str
    prompt: EncodedPrompt
    seq_len: int
    prefill_ms: float
    decode_ms: float
    prefill: Dispatch
    decode: Dispatch
    gate: GateResult
    logits: Array
    runs: tuple[int, int]
    inside: DiagnosisCapture | None = None


@dataclass(frozen=True)
class Longer:
    """Prefill of the same prompt in the next compiled length."""

    seq_len: int
    prefill_ms: float
    prefill: Dispatch


@dataclass
class _Known:
    forms: dict[Form, Measured] = field(default_factory=dict)
    longer: Longer | None = None


_known: WeakKeyDictionary[Deployment, _Known] = WeakKeyDictionary()


def measured(
    deployment: Deployment,
    reference: HFReference,
    form: Form,
    *,
    device: AbstractContextManager[Any] | None = None,
) -> Measured:
    """Measure a form on the first prompt of the deployment's set; once per deployment and process.

    Raises TypeError for an adapter that brings its own runner, and what compilation and device raise.
    """
    known = _known.setdefault(deployment, _Known())
    if form not in known.forms:
        known.forms[form] = _measure(deployment, reference, form, device)
    return known.forms[form]


def longer_prefill(
    deployment: Deployment, *, device: AbstractContextManager[Any] | None = None
) -> Longer | None:
    """The production form in the next compiled length; None when there is none."""
    known = _known.setdefault(deployment, _Known())
    if known.longer is None:
        known.longer = _measure_longer(deployment, device)
    return known.longer


def _session(deployment: Deployment, form: Form, max_seq: int) -> Session:
    inference = getattr(deployment.adapter, "inference", None)
    if inference is None or not hasattr(inference, "SEQUENCE"):
        raise TypeError(
            f"{deployment.name}: its adapter has no `inference` with a SEQUENCE: it cannot be built unfused"
        )
    return Session(
        inference,
        deployment.checkpoint,
        deployment.tokenizer,
        max_seq,
        config=deployment.config(),
        merged=form.merged,
        resident=form.resident,
    )


def _measure(
    deployment: Deployment,
    reference: HFReference,
    form: Form,
    device: AbstractContextManager[Any] | None,
) -> Measured:
    prompt = deployment.prompts(1)[0]
    run = reference.run(prompt.ids, N_TOKENS)
    reference.release()
    n = len(prompt)
    # One decode step more than the gate has: the one that is profiled.
    session = _session(deployment, form, n + N_TOKENS + 1)
    session.prepare(n)
    inside = None
    with device if device is not None else nullcontext():
        try:
            rows, tokens, decode_times, state = _generate(session, prompt.ids)
            prefill, prefill_times = _timed(session, "prefill", lambda: session.prefill(prompt.ids))
            decode, _ = _timed(session, "decode", lambda: session.decode(*state), runs=1)
            if form == UNFUSED:
                runner = ProductionRunner(form.name, session)
                inside = capture_diagnosis(runner, prompt.ids, run.fed[: PROBED_TOKENS - 1])
        finally:
            session.close()
    steps = tuple(
        TokenStep.from_logits(token, host_ops.widen(row)) for token, row in zip(tokens, rows, strict=True)
    )
    gate = judge([TokenTrace(prompt.ids, steps)], [run.trace()])
    return Measured(
        form=form,
        clock=session.driver.label,
        prompt=prompt,
        seq_len=bucket_for(n, session.config.max_position),
        prefill_ms=median(prefill_times) * 1e3,
        decode_ms=median(decode_times) * 1e3,
        prefill=prefill,
        decode=decode,
        gate=gate,
        logits=np.stack([np.asarray(row).view(np.uint16) for row in rows]),
        runs=(len(prefill_times), len(decode_times)),
        inside=inside,
    )


def _generate(
    session: Session, ids: Sequence[int]
) -> tuple[list[Array], list[int], list[float], tuple[int, Array, Array, int]]:
    """Greedy generation of the gate's tokens: logits, tokens, times of the steps, state for one more."""
    now = session.driver.clock.now
    token, row, keys, values, position = session.prefill(ids)
    rows, tokens, times = [row], [token], []
    for _ in range(N_TOKENS - 1):
        begin = now()
        token, row = session.decode(token, keys, values, position)
        times.append(now() - begin)
        position += 1
        rows.append(row)
        tokens.append(token)
    return rows, tokens, times, (token, keys, values, position)


def _timed(
    session: Session, section: str, call: Callable[[], Any], runs: int = MOST_RUNS
) -> tuple[Dispatch, list[float]]:
    """Run until two runs agree; the first one under the profiler, which says what is dispatched."""
    now = session.driver.clock.now
    times: list[float] = []
    with session.profiled() as profiler, profiler.section(section):
        begin = now()
        call()
        times.append(now() - begin)
    dispatch = _dispatch(session, section)
    while len(times) < runs:
        begin = now()
        call()
        times.append(now() - begin)
        if len(times) >= FEWEST_RUNS and abs(times[-1] - times[-2]) <= AGREEMENT * times[-2]:
            break
    return dispatch, times


def _dispatch(session: Session, section: str) -> Dispatch:
    programs, transfers = [], {"bo_write": [0, 0], "bo_read": [0, 0]}
    kernels: dict[KernelSpec, int] = {}
    for (where, kind, name), entry in session.profiler.entries.items():
        if where != section:
            continue
        if kind in transfers:
            transfers[kind][0] += entry.calls
            transfers[kind][1] += entry.nbytes
        elif kind == "elf":
            program = session.cache.program(name)
            programs.append((name, program.digest, entry.calls))
            for launch in program.launches:
                kernels[launch.spec] = kernels.get(launch.spec, 0) + entry.calls
    ordered = tuple(sorted(kernels.items(), key=lambda item: str(item[0])))
    (writes, written), (reads, read) = transfers["bo_write"], transfers["bo_read"]
    return Dispatch(tuple(sorted(programs)), ordered, writes, reads, written, read)


def _measure_longer(deployment: Deployment, device: AbstractContextManager[Any] | None) -> Longer | None:
    prompt = deployment.prompts(1)[0]
    limit = int(getattr(deployment.config(), "max_position", BUCKETS[-1]))
    seq_len = bucket_for(len(prompt), limit)
    place = BUCKETS.index(seq_len)
    if place + 1 == len(BUCKETS) or seq_len >= limit:
        return None
    session = _session(deployment, PRODUCTION, seq_len + 1)
    # One token more than the shorter length holds takes the longer one; its cost knows no content.
    ids = [*prompt.ids, *[session.config.pad_token] * (seq_len + 1 - len(prompt))]
    session.prepare(len(ids))
    with device if device is not None else nullcontext():
        try:
            session.prefill(ids)
            dispatch, times = _timed(session, "prefill", lambda: session.prefill(ids))
        finally:
            session.close()
    return Longer(BUCKETS[place + 1], median(times) * 1e3, dispatch)
