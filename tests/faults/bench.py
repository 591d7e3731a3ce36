"""Plants a fault, runs the gates from the stage that must catch it, and notes which one does.

A deployment is opened anew inside the plant, so that nothing computed before hides it; the matched reference
and the runs of the plain one are shared, as they do not depend on the device.
"""

from __future__ import annotations

import gc
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from llms.llama_kernel_builder import driver, runtime
from llms.llama_kernel_builder.deployment.session import compile_all
from llms.llama_kernel_builder.exceptions import ToolkitError
from llms.verify.contract.chat import EncodedPrompt
from llms.verify.contract.deployment import Deployment
from llms.verify.contract.outcome import Outcome
from llms.verify.contract.topk import N_TOKENS
from llms.verify.gates import phase7 as audit
from llms.verify.gates.phase0 import gate as phase0
from llms.verify.gates.phase1 import gate as phase1
from llms.verify.gates.phase2 import gate as phase2
from llms.verify.gates.phase4.gate import prefill_gate
from llms.verify.gates.phase5.gate import decode_gate
from llms.verify.gates.phase6 import gate as gates
from llms.verify.ladder.climbing import RUNGS, Ladder
from llms.verify.ladder.thresholds import Thresholds
from llms.verify.ladder.types import LadderOutcome
from llms.verify.reference.matched import MatchedReference
from npu_twin import injection
from npu_twin.faults import STAGES, Fault

TOKEN_SET = "token_set"
GATES: dict[str, str] = {
    "compile": "compile",
    "refusal": "runtime",
    **dict.fromkeys(phase0.CHECKS, "phase0"),
    "kernels": "phase1",
    "block": "phase2",
    TOKEN_SET: "phase3",
    **dict.fromkeys(RUNGS, "phase3"),
    "prefill_steps": "phase4",
    "decode_steps": "phase5",
    "compiled_lengths": "phase6",
    "audit": "phase7",
}
"""Columns of the matrix, each with its stage; `refusal`: an error of toolkit or runtime that ends a gate."""

# Kernels that are judged per operation.
_CASES_PER_OP = 4
# The largest compiled length that is tried, as in the tests of the model folders.
_LONGEST = 512


@dataclass(frozen=True)
class Cell:
    """What one gate said of one fault: `caught`, `passed` or `not offered`, and its words."""

    status: str
    text: str = ""


@dataclass
class Row:
    """One fault in one model. `token_set` is always there: `caught`, `passed` or `stopped` by an error."""

    fault: Fault
    model: str
    checkpoint: str
    cells: dict[str, Cell] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def caught_by(self) -> tuple[str, ...]:
        """Gates that caught it, in the order of the columns."""
        return tuple(gate for gate in GATES if gate in self.cells and self.cells[gate].status == "caught")

    @property
    def stage(self) -> str | None:
        """Earliest stage that caught it, None when it escaped."""
        stages = [GATES[gate] for gate in self.caught_by]
        return min(stages, key=STAGES.index) if stages else None

    @property
    def problem(self) -> str:
        """Why the row is not as it must be; empty when it is."""
        where = f"{self.fault.name} in {self.model} ({self.checkpoint})"
        if self.stage is None:
            return f"{where} ESCAPED: no gate saw it ({', '.join(self.cells)} passed)"
        if STAGES.index(self.stage) > STAGES.index(self.fault.expected):
            return f"{where} was caught in {self.stage} only, expected {self.fault.expected}"
        return ""


class WrongError(AssertionError):
    """A plant ended in an error that is not the fault's: the plant is broken, nothing was caught."""


class Bench:
    """One model with one checkpoint.

    `thresholds` default to the recorded ones. Raises DeploymentError, CheckpointError, ThresholdError.
    """

    def __init__(
        self,
        model: str,
        checkpoint: Path | None = None,
        *,
        n_prompts: int = 2,
        thresholds: Thresholds | None = None,
    ) -> None:
        driver.select("twin")
        self.model, self.path, self.n_prompts = model, checkpoint, n_prompts
        self.clean = Deployment.from_folder(model, checkpoint=checkpoint)
        self.checkpoint = self.clean.checkpoint.label
        self.thresholds = (
            thresholds
            if thresholds is not None
            else Thresholds.for_checkpoint(self.clean.name, self.clean.checkpoint)
        )
        self._matched: MatchedReference | None = None

    @property
    def matched(self) -> MatchedReference:
        """The matched reference, shared by all faults."""
        if self._matched is None:
            self._matched = self.clean.matched_reference()
        return self._matched

    def close(self) -> None:
        """Free the references."""
        if self._matched is not None:
            self._matched.release()
        self.clean.release_runners()

    def judge(self, fault: Fault, *, every_gate: bool = False) -> Row:
        """Plant a fault and run the gates from its expected stage on, up to the first that catches it.

        The token-set gate is run whatever the others say; ``every_gate`` runs all of them. Raises WrongError.
        """
        row = Row(fault, self.model, self.checkpoint)
        begin = time.perf_counter()
        start = 0 if every_gate else STAGES.index(fault.expected)
        for stage, run in self._stages():
            wanted = every_gate or row.stage is None or stage == row.stage == "phase3"
            if STAGES.index(stage) >= start and wanted:
                self._planted(fault, row, run)
        if TOKEN_SET not in row.cells:
            self._planted(fault, row, self._token_set)
        row.seconds = time.perf_counter() - begin
        return row

    def _planted(self, fault: Fault, row: Row, run: Callable[[Deployment, Row], None]) -> None:
        """Run one gate on a deployment of its own: a fault that strikes rarely strikes in each of them."""
        with fault.plant(), _freed(fault), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            deployment = Deployment.from_folder(self.model, checkpoint=self.path)
            try:
                run(deployment, row)
            finally:
                deployment.release_runners()

    def _stages(self) -> list[tuple[str, Callable[[Deployment, Row], None]]]:
        return [
            ("compile", self._compile),
            ("runtime", self._token_set),
            ("phase0", self._phase0),
            ("phase1", self._kernels),
            ("phase2", self._block),
            ("phase3", self._token_set),
            ("phase3", self._ladder),
            ("phase4", self._prefill_steps),
            ("phase5", self._decode_steps),
            ("phase6", self._lengths),
            ("phase7", self._audit),
        ]

    def control(self, prompts: Sequence[EncodedPrompt]) -> list[str]:
        """Run every gate without a fault, the ladder also in reverse order; returns the alarms."""
        deployment = Deployment.from_folder(self.model, checkpoint=self.path)
        reference = deployment.hf_reference()
        kernels = self._quick_kernels(deployment)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcomes = [phase0.run(check, deployment, reference, N_TOKENS) for check in phase0.CHECKS]
            outcomes += [phase1.check(kernel) for kernel in _of_interest(kernels, ())]
            outcomes.append(phase2.block_gate(deployment, reference, prompts))
            outcomes.append(gates.topk_gate(deployment, reference, prompts, N_TOKENS))
            forth = self.climb(deployment, prompts)
            back = self.climb(deployment, [*prompts[1::2], *prompts[::2]])
        alarms = [outcome.message for outcome in outcomes if not outcome.ok]
        alarms += [rung.message() for one in (forth, back) for rung in one.rungs if not rung.ok]
        return alarms

    # -- gates -----------------------------------------------------------------------------------------

    @contextmanager
    def _refusals(self, row: Row, gate: str = "refusal") -> Iterator[None]:
        try:
            yield
        except Exception as error:
            fault = row.fault
            if not isinstance(error, ToolkitError):
                if type(error).__name__ != fault.raises:
                    raise
                return  # a crash stops the gate, but it is nobody's refusal
            text = f"{type(error).__name__}: {error}"
            if type(error).__name__ != fault.raises or fault.says not in text:
                raise WrongError(f"{fault.name} in {row.model} ended in {text}") from error
            row.cells[gate] = Cell("caught", text)

    def _compile(self, deployment: Deployment, row: Row) -> None:
        with tempfile.TemporaryDirectory(prefix="fault-compile-") as folder, self._refusals(row, "compile"):
            for _ in compile_all(deployment.adapter.inference, deployment.config(), folder=Path(folder)):
                pass
            row.cells["compile"] = Cell("passed")

    def _phase0(self, deployment: Deployment, row: Row) -> None:
        for check in phase0.CHECKS:
            with self._refusals(row):
                _note(row, check, phase0.run(check, deployment, deployment.hf_reference(), N_TOKENS))
            if row.stage is not None:
                return

    def _kernels(self, deployment: Deployment, row: Row) -> None:
        row.cells["kernels"] = Cell("passed")
        for kernel in _of_interest(self._quick_kernels(deployment), row.fault.ops):
            with self._refusals(row):
                outcome = phase1.check(kernel)
                if not outcome.ok:
                    row.cells["kernels"] = Cell("caught", outcome.message)
                    return

    def _quick_kernels(self, deployment: Deployment) -> list[phase1.Kernel]:
        found = phase1.kernels(deployment.folder, deployment.adapter, checkpoint=self.path)
        return [kernel for kernel in found if not kernel.slow]

    def _block(self, deployment: Deployment, row: Row) -> None:
        with self._refusals(row):
            prompts = deployment.prompts(self.n_prompts)
            _note(row, "block", phase2.block_gate(deployment, deployment.hf_reference(), prompts))

    def _token_set(self, deployment: Deployment, row: Row) -> None:
        row.cells[TOKEN_SET] = Cell("stopped")
        with self._refusals(row):
            reference = deployment.hf_reference()
            prompts = deployment.prompts(self.n_prompts)
            outcome = gates.topk_gate(deployment, reference, prompts, N_TOKENS)
            _note(row, TOKEN_SET, outcome)

    def _ladder(self, deployment: Deployment, row: Row) -> None:
        if row.stage == "phase3" and row.fault.kind == "verdict":
            return  # the token-set gate said what there is to say
        prompts = deployment.prompts(min(row.fault.prompts, self.n_prompts))
        with self._refusals(row):
            outcome = self.climb(deployment, prompts)
            for rung in outcome.rungs:
                status = {"failed": "caught"}.get(rung.status, rung.status)
                row.cells[rung.name] = Cell(status, "" if rung.ok else rung.message())

    def _prefill_steps(self, deployment: Deployment, row: Row) -> None:
        with self._refusals(row):
            _note(row, "prefill_steps", prefill_gate(deployment, deployment.hf_reference()))

    def _decode_steps(self, deployment: Deployment, row: Row) -> None:
        with self._refusals(row):
            _note(row, "decode_steps", decode_gate(deployment, deployment.hf_reference()))

    def _lengths(self, deployment: Deployment, row: Row) -> None:
        prompts, reference = deployment.prompts(1), deployment.hf_reference()
        with self._refusals(row):
            result = Ladder(deployment, reference, prompts, matched=self.matched).over_lengths(_LONGEST)
            row.cells["compiled_lengths"] = Cell("passed") if result.ok else Cell("caught", result.message())

    def _audit(self, deployment: Deployment, row: Row) -> None:
        """In a process of its own, which plants the fault again."""
        with tempfile.TemporaryDirectory(prefix="fault-audit-") as folder:
            request = audit.AuditRequest(
                deployment.folder, checkpoint=self.path, ladder=False, fault=row.fault.name
            )
            outcome = audit.in_fresh_process(request, Path(folder))
        row.cells["audit"] = Cell("passed") if outcome.ok else Cell("caught", outcome.message)

    def climb(self, deployment: Deployment, prompts: Sequence[EncodedPrompt]) -> LadderOutcome:
        """All rungs over the prompts, by the recorded limits, references shared."""
        return Ladder(
            deployment,
            deployment.hf_reference(),
            prompts,
            N_TOKENS,
            thresholds=self.thresholds,
            matched=self.matched,
        ).climb()


@contextmanager
def _freed(fault: Fault) -> Iterator[None]:
    """Give back the hardware contexts of a plant that ends in an error.

    The runtime keeps a run in flight for ever, and a matrix plants more hangs than there are contexts. On the
    twin it can be freed. The error and the runtime refer to each other, so only the collector finds them.
    """
    held: list[Any] = []
    with mock.patch.object(runtime, "keep_for_ever", held.append):
        yield
    for bound in held:
        injection.let_go(bound.run)
    held.clear()
    if fault.raises:
        gc.collect()


def _of_interest(kernels: Sequence[phase1.Kernel], ops: Sequence[str]) -> list[phase1.Kernel]:
    """A few kernels per operation, the fewest elements first; of GEMMs the deepest: there tiers differ."""
    chosen = []
    for op in ops or {kernel.case.op for kernel in kernels}:
        same_op = [kernel for kernel in kernels if kernel.case.op == op]
        same_op.sort(
            key=lambda kernel: (-kernel.case.dims["K"] if op == "gemm" else 0, sum(kernel.case.shape))
        )
        chosen += same_op[:_CASES_PER_OP]
    return chosen


def _note(row: Row, gate: str, outcome: Outcome) -> None:
    row.cells[gate] = Cell("passed" if outcome.ok else "caught", outcome.message)
