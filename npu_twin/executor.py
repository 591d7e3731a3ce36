"""The device behind the seam: loads listings, binds them to buffers and runs them on the virtual clock.

Work is queued when a run is started and done when the device gets there, i.e. inside the wait that sees it
complete: until then the outputs hold what they held before, as on silicon.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from npu_twin import clock, injection, npu2, trace
from npu_twin.clock import VirtualClock
from npu_twin.listing import TARGET, Launch, Listing
from npu_twin.memory import ITEMSIZE, DeviceMemory, OperandView

log = logging.getLogger("npu_twin.device")
"""What a kernel log would say: why a run ended in an error state."""

COMPLETED = 4
ERROR = 5

Step = tuple[Callable[[], None], tuple[DeviceMemory, ...]]


@dataclass(frozen=True)
class Program:
    """A loaded listing. ``hang`` and ``error`` name the rule that it breaks at run time, empty if none.

    They are found when the artefact is loaded, from what the listing says then, not from a mark that the
    compiler left: an edited listing behaves as edited.
    """

    listing: Listing
    hang: str = ""
    error: str = ""


def load(listing: Listing) -> Program:
    """Load a listing: planted rewrites and the constraint rules that only show when the program runs."""
    from npu_twin import constraints

    if injection.active:
        listing = injection.rewritten(listing)
    faults = {"hang": "", "runtime": ""}
    for violation in constraints.check_listing(listing):
        if violation.shows_as in faults and not faults[violation.shows_as]:
            faults[violation.shows_as] = f"{violation.rule_id}: {violation.message}"
    return Program(listing, faults["hang"], faults["runtime"])


@dataclass(frozen=True)
class Range:
    """A buffer as a kernel argument: ``size`` bytes from byte ``offset`` of device memory."""

    memory: DeviceMemory
    offset: int
    size: int


class Binding:
    """A program bound to its arguments: closures in listing order and what each of them changes."""

    __slots__ = ("epoch", "error", "program", "steps")

    def __init__(self, program: Program, arguments: Sequence[Range | None]) -> None:
        self.program = program
        self.epoch = injection.epoch
        self.error = program.error or _argument_error(program.listing, arguments)
        self.steps: tuple[Step, ...] = ()
        if not self.error:
            ranges = {
                argument.name: known
                for argument, known in zip(program.listing.arguments, arguments, strict=True)
                if known is not None
            }
            self.steps = tuple(_step(program.listing, launch, ranges) for launch in program.listing.launches)

    def execute(self) -> None:
        """Compute every launch in order."""
        for compute, written in self.steps:
            compute()
            for memory in written:
                memory.changed()


def _argument_error(listing: Listing, arguments: Sequence[Range | None]) -> str:
    for index, (argument, known) in enumerate(zip(listing.arguments, arguments, strict=True)):
        if known is None:
            return f"argument {index} ({argument.name}) is not a buffer"
        if known.size < argument.nbytes:
            return (
                f"argument {index} ({argument.name}) needs {argument.nbytes} bytes, "
                f"its buffer has {known.size}"
            )
    return ""


def _step(listing: Listing, launch: Launch, ranges: dict[str, Range]) -> Step:
    from npu_twin import datapath

    views: dict[str, OperandView] = {}
    written: list[DeviceMemory] = []
    for key, spec in launch.signature().items():
        operand = launch.operands[key]
        bound = ranges[operand.arg]
        offset = bound.offset + operand.offset * ITEMSIZE[spec.dtype]
        views[key] = bound.memory.view(offset, spec.shape, spec.dtype)
        if spec.access == "write" and bound.memory not in written:
            written.append(bound.memory)
    if listing.target == TARGET:
        compute = datapath.prepare(launch, views)
    else:
        # code of the older array generation runs on this one and leaves zeros
        compute = _zeros([views[key] for key, spec in launch.signature().items() if spec.access == "write"])
    if injection.active:
        compute = injection.corrupted(listing.name, launch, views, compute)
    return compute, tuple(written)


def _zeros(outputs: list[OperandView]) -> Callable[[], None]:
    def compute() -> None:
        for view in outputs:
            view.array[...] = 0

    return compute


class Job:
    """One started run: when it ends on the virtual clock (infinity: never) and in which state."""

    __slots__ = ("binding", "compute", "done", "finish_us", "start_us", "state")

    def __init__(self, binding: Binding) -> None:
        self.binding = binding
        self.state = COMPLETED
        self.compute = True
        self.done = False
        self.start_us = 0.0
        self.finish_us = math.inf


@dataclass
class Device:
    """The one NPU of the process: a queue in order of submission, contexts and time. Thread-safe."""

    clock: VirtualClock = field(default_factory=clock.default_clock)
    contexts: int = 0
    busy_until_us: float = 0.0
    last_context: int = 0
    queue: deque[Job] = field(default_factory=deque)
    hung: set[int] = field(default_factory=set)
    lock: Any = field(default_factory=threading.RLock)
    _timing: Any = None

    @property
    def timing(self) -> Any:
        """The cost model, imported on first use."""
        if self._timing is None:
            from npu_twin import timing

            self._timing = timing
        return self._timing

    def open_context(self) -> None:
        """Reserve a hardware context. Raises RuntimeError with the driver's text when all are taken."""
        with self.lock:
            if self.contexts >= npu2.MAX_HW_CONTEXTS:
                raise RuntimeError("DRM_IOCTL_AMDXDNA_CREATE_HWCTX IOCTL failed (err=-22): Invalid argument")
            self.contexts += 1

    def close_context(self, context: object) -> None:
        """Give a hardware context back."""
        with self.lock:
            self.contexts -= 1
            self.hung.discard(id(context))
            if self.last_context == id(context):
                self.last_context = 0

    def submit(self, binding: Binding, context: object) -> Job:
        """Queue one run; costs the host the dispatch time. Raises RuntimeError for a planted refusal."""
        timing = self.timing
        program = binding.program
        job = Job(binding)
        extra_us = 0.0
        fault = injection.run_fault(program.listing.name) if injection.active else None
        if fault is not None:
            if fault.submit_errno is not None:
                raise RuntimeError(driver_error("EXEC_CMD", fault.submit_errno))
            extra_us = fault.delay_us
            if fault.state is not None and fault.state != COMPLETED:
                job.state = fault.state
                job.compute = False
        if binding.error:
            log.warning("run of %s ends in ERROR: %s", program.listing.name, binding.error)
            job.state = ERROR
            job.compute = False
        with self.lock:
            now = self.clock.advance_us(timing.dispatch_us())
            start = now if now > self.busy_until_us else self.busy_until_us
            extra_us += timing.wake_us((start - self.busy_until_us) * 1e-6)
            if self.last_context != id(context):
                if self.last_context:
                    extra_us += timing.context_switch_us()
                self.last_context = id(context)
            job.start_us = start + extra_us
            hangs = bool(program.hang) or (fault is not None and fault.hang) or id(context) in self.hung
            if hangs:
                # the next contexts get the array, this one stays stuck
                self.hung.add(id(context))
                self.busy_until_us = start
                if program.hang:
                    log.warning("run of %s hangs: %s", program.listing.name, program.hang)
            else:
                job.finish_us = job.start_us + timing.run_us(program.listing).total_us
                self.busy_until_us = job.finish_us
            self.queue.append(job)
        return job

    def wait(self, job: Job, timeout_us: float = math.inf) -> bool:
        """Move the clock until ``job`` is done (True) or ``timeout_us`` have passed (False)."""
        if job.done:
            return True
        with self.lock:
            limit = self.clock.now_us() + timeout_us
            if job.finish_us > limit or job.finish_us == math.inf:
                if limit < math.inf:
                    self.clock.advance_to_us(limit)
                return False
            self.clock.advance_to_us(job.finish_us)
            queue = self.queue
            while not job.done:
                self._finish(queue.popleft())
        return True

    def _finish(self, job: Job) -> None:
        job.done = job.finish_us < math.inf
        if trace.sinks:
            self._report(job)
        if job.compute and job.done and not clock.is_timing_only():
            job.binding.execute()

    def _report(self, job: Job) -> None:
        listing = job.binding.program.listing
        name = listing.name
        start, end = job.start_us * 1e-6, job.finish_us * 1e-6
        trace.emit(trace.TraceEvent("run", name, "", "", start, end - start))
        if job.done:
            timing = self.timing.run_us(listing)
            at = start + timing.overhead_us * 1e-6
            for launch, (_, us) in zip(listing.launches, timing.launches, strict=True):
                trace.emit(trace.TraceEvent("launch", name, launch.name, launch.op, at, us * 1e-6))
                at += us * 1e-6


_ERRNO_TEXT = {
    1: "Operation not permitted",
    5: "Input/output error",
    12: "Cannot allocate memory",
    16: "Device or resource busy",
    22: "Invalid argument",
    62: "Timer expired",
}


def driver_error(ioctl: str, errno: int) -> str:
    """Text of XRT's exception for a failed driver call, e.g. ``EXEC_CMD`` with errno 22."""
    import os

    text = _ERRNO_TEXT.get(errno) or os.strerror(errno)
    return f"DRM_IOCTL_AMDXDNA_{ioctl} IOCTL failed (err=-{errno}): {text}"


_device: Device | None = None
_device_lock = threading.Lock()


def default_device() -> Device:
    """The NPU of this process."""
    global _device
    if _device is None:
        with _device_lock:
            if _device is None:
                _device = Device()
    return _device
