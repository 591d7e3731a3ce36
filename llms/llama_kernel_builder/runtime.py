"""Host runtime on the driver seam: contexts, kernels, buffers and runs.

One code path for silicon and twin; only the imported driver module differs. Facts about the real library that
shape it (XRT 2.25.0): a memoryview does not keep its bo alive, `bo.write` ignores strides, a run keeps its
context but not its buffers and aborts the process when it is dropped in flight, `wait` without a limit may
never return and holds the interpreter lock, failures are returned as states and not raised.
"""

from __future__ import annotations

import ctypes
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import timeline
from .artefacts import loading_of
from .driver import Driver
from .exceptions import (
    ArtefactRefused,
    ContextRefused,
    DeviceMemoryError,
    DevicePoisoned,
    DriverUnavailable,
    KernelRunError,
)

# A process that opens about ten contexts is refused by the driver (mlir-air smolvla profile), so the
# least recently used one is closed before.
MAX_CONTEXTS = 8
# The driver's own time-out is about 6.1 s; a wait ends after it, so that a time-out is seen as a state.
WAIT_LIMIT_MS = 10_000
WAIT_LIMIT_ENV = "NPU_WAIT_LIMIT_MS"

# Arguments of an xclbin kernel in front of its buffers: opcode of a transaction, instructions, their length.
_TRANSACTION = 3
_INSTRUCTION_ARGUMENT = 1
_WORD_BYTES = 4

_CAUSES = {
    "ERT_CMD_STATE_TIMEOUT": "the device did not finish in time: a hanging tile configuration, or a launch "
    "that waits for data that never comes",
    "ERT_CMD_STATE_ERROR": "the device reported an error: usually an argument missing or too small, or an "
    "artefact built for another target",
    "ERT_CMD_STATE_ABORT": "the command was aborted, usually because the context was lost",
    "ERT_CMD_STATE_NORESPONSE": "the firmware did not answer; reload the amdxdna driver",
    "ERT_CMD_STATE_SKERROR": "the firmware reports a failed kernel; check that driver and firmware fit",
    "ERT_CMD_STATE_SKCRASHED": "the firmware crashed; reload the amdxdna driver or reboot",
}


@dataclass
class BoundRun:
    """A run with its arguments set, and the buffers it needs: the run itself does not keep them alive."""

    run: Any
    bos: tuple[Any, ...]


@dataclass
class _OpenKernel:
    """A context, its kernel and the runs made on it: they go together, as a run keeps its context.

    `code`: the instructions of an xclbin kernel (None for a full ELF), and their number of words.
    """

    context: Any
    kernel: Any
    code: Any = None
    words: int = 0
    runs: dict[str, BoundRun] = field(default_factory=dict)


def keep_for_ever(bound: BoundRun) -> None:
    """Leak a run in flight and its buffers: freeing either while the device works is worse than the leak.

    Not even the end of the interpreter may free them, as XRT aborts the process then and takes the exit code
    and the output of the run with it.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(bound.run))
    for bo in bound.bos:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(bo))


def wait_limit_ms() -> int:
    """`$NPU_WAIT_LIMIT_MS`, else 10 s. Raises DriverUnavailable for a value that is no positive number."""
    text = os.environ.get(WAIT_LIMIT_ENV, str(WAIT_LIMIT_MS))
    if not text.isdigit() or int(text) < 1:
        raise DriverUnavailable(f"{WAIT_LIMIT_ENV}='{text}' is no limit", "Give milliseconds from 1 up")
    return int(text)


class HostRuntime:
    """A device, its open contexts and its state. Close it to release the hardware.

    Buffers belong to the device and outlive the context of the kernel that uses them, so closing
    the least recently used context loses no data.
    """

    def __init__(
        self, driver: Driver, *, max_contexts: int = MAX_CONTEXTS, wait_limit: int | None = None
    ) -> None:
        self.driver = driver
        self.max_contexts = max_contexts
        self.wait_limit_ms = wait_limit if wait_limit is not None else wait_limit_ms()
        self._poison: KernelRunError | None = None
        self._submitted_s = 0.0
        self._contexts: OrderedDict[tuple[str, str], _OpenKernel] = OrderedDict()
        self._images: dict[str, Any] = {}
        try:
            self._device = driver.module.device(0)
        except RuntimeError as error:
            raise DriverUnavailable(
                f"device 0 cannot be opened ({error})", "Check the device node and its permission"
            ) from error
        module = driver.module
        states = module.ert_cmd_state
        self._completed = states.ERT_CMD_STATE_COMPLETED
        self._unfinished = (
            states.ERT_CMD_STATE_NEW,
            states.ERT_CMD_STATE_QUEUED,
            states.ERT_CMD_STATE_SUBMITTED,
        )
        self._to_device = module.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE
        self._from_device = module.xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE

    @property
    def open_contexts(self) -> int:
        """Number of hardware contexts that are open now."""
        return len(self._contexts)

    def run_for(self, artefact: Path, name: str, bo_key: str, bos: Sequence[Any]) -> BoundRun:
        """Return the run of one buffer set, its arguments set; made once while its context is open.

        Opens the context of the artefact when it is closed, and closes the least recently used one for it
        when the limit is reached or the driver has no context left. Raises ArtefactRefused, ContextRefused.
        """
        key = (str(artefact), name)
        opened = self._contexts.get(key) or self._open(key)
        self._contexts.move_to_end(key)
        bound = opened.runs.get(bo_key)
        if bound is None:
            run = self.driver.module.run(opened.kernel)
            code = () if opened.code is None else (_TRANSACTION, opened.code, opened.words)
            for index, value in enumerate((*code, *bos)):
                run.set_arg(index, value)
            bound = opened.runs[bo_key] = BoundRun(run, (*bos, opened.code))
        return bound

    def _open(self, key: tuple[str, str]) -> _OpenKernel:
        while len(self._contexts) >= self.max_contexts:
            self._contexts.popitem(last=False)
        artefact, name = key
        loading = loading_of(Path(artefact), name)
        try:
            if loading.instructions is None:
                opened = self._open_elf(name, artefact, loading.kernel)
            else:
                opened = self._open_xclbin(name, artefact, loading.kernel, Path(loading.instructions))
        except RuntimeError as error:
            raise ArtefactRefused(name, artefact, loading.kernel, str(error)) from error
        self._contexts[key] = opened
        return opened

    def _open_elf(self, name: str, artefact: str, kernel: str) -> _OpenKernel:
        module = self.driver.module
        elf = module.elf(artefact)
        context = self._context(name, lambda: module.hw_context(self._device, elf))
        return _OpenKernel(context, module.ext.kernel(context, kernel))

    def _open_xclbin(self, name: str, artefact: str, kernel: str, instructions: Path) -> _OpenKernel:
        module = self.driver.module
        if artefact not in self._images:
            self._images[artefact] = self._device.register_xclbin(module.xclbin(artefact))
        uuid = self._images[artefact]
        context = self._context(name, lambda: module.hw_context(self._device, uuid))
        opened = module.kernel(context, kernel)
        data = instructions.read_bytes()
        if not data or len(data) % _WORD_BYTES:
            raise ArtefactRefused(
                name, str(instructions), kernel, f"{len(data)} bytes are no whole number of instruction words"
            )
        group = opened.group_id(_INSTRUCTION_ARGUMENT)
        code = module.bo(self._device, len(data), module.bo.cacheable, group)
        self.write(code, data, (name, "instructions"))
        return _OpenKernel(context, opened, code, len(data) // _WORD_BYTES)

    def _context(self, name: str, create: Callable[[], Any]) -> Any:
        """Create a context; while the driver has none left, close one of ours and try again."""
        while True:
            try:
                return create()
            except RuntimeError as error:
                if "CREATE_HWCTX" not in str(error):
                    raise
                if not self._contexts:
                    raise ContextRefused(name, str(error)) from error
                self._contexts.popitem(last=False)

    def forget(self, artefact: Path, name: str) -> None:
        """Close the context of a kernel, so that no run keeps the address of a buffer that is gone."""
        self._contexts.pop((str(artefact), name), None)

    def buffer(self, nbytes: int) -> Any:
        """Allocate a buffer object of `nbytes` on the device. Raises DeviceMemoryError."""
        try:
            return self.driver.module.ext.bo(self._device, nbytes)
        except RuntimeError as error:
            raise DeviceMemoryError(nbytes, str(error)) from error

    def write(self, bo: Any, data: Any, what: tuple[str, str] = ("", "")) -> None:
        """Copy a contiguous byte buffer into a bo and make it visible to the device.

        `what` is the kernel and the argument that a timeline shows.
        """
        with self._transfer("bo_write", what, memoryview(data).nbytes):
            bo.write(data, 0)
            bo.sync(self._to_device)

    def read(self, bo: Any, nbytes: int, what: tuple[str, str] = ("", "")) -> Any:
        """Return a new int8 array with what the device left in a bo; `what` as in `write`."""
        with self._transfer("bo_read", what, nbytes):
            bo.sync(self._from_device)
            return bo.read(nbytes, 0)

    def _transfer(self, kind: str, what: tuple[str, str], nbytes: int) -> AbstractContextManager[None]:
        if not timeline.recorders:
            return nullcontext()
        name = ".".join(filter(None, what)) or kind
        return timeline.span(self.driver.clock, timeline.HOST, kind, name, bytes=nbytes)

    def execute(self, name: str, bound: BoundRun) -> None:
        """Start a run and wait for it.

        Raises KernelRunError for every state but COMPLETED and for calls that the driver refuses, and
        DevicePoisoned once such an error has happened: results after it cannot be trusted.
        """
        if self._poison is not None:
            first = self._poison
            raise DevicePoisoned(
                name, first.state, 0.0, f"device unusable since kernel '{first.kernel}': {first.cause}"
            )
        if not timeline.recorders:
            self._execute(name, bound)
            return
        # the run, the submission and the wait are on the timeline also when the run fails
        clock = self.driver.clock
        timeline.flush()
        begin = self._submitted_s = clock.now()
        outcome = "COMPLETED"
        try:
            self._execute(name, bound)
        except KernelRunError as error:
            outcome = error.state
            raise
        except BaseException:
            outcome = "INTERRUPTED"
            raise
        finally:
            timeline.record(clock, timeline.DEVICE, "elf", name, begin, state=outcome)
            for recorder in timeline.recorders:
                recorder.slice(clock, timeline.HOST, "submit", f"submit {name}", begin, self._submitted_s)
            timeline.record(clock, timeline.HOST, "wait", f"wait {name}", self._submitted_s)

    def _execute(self, name: str, bound: BoundRun) -> None:
        begin = self.driver.clock.now()
        run = bound.run
        try:
            run.start()
            self._submitted_s = self.driver.clock.now()
            state = run.wait(self.wait_limit_ms)
        except RuntimeError as error:
            keep_for_ever(bound)
            what = "WAIT REFUSED" if "WAIT_CMD" in str(error) else "SUBMISSION REFUSED"
            self._fail(name, what, begin, str(error))
        except BaseException:  # an interrupt between start and wait: nobody knows whether it still runs
            keep_for_ever(bound)
            raise
        if state != self._completed:
            state_name = getattr(state, "name", str(state))
            if run.state() in self._unfinished:
                keep_for_ever(bound)
                cause = (
                    f"no end within the wait limit of {self.wait_limit_ms} ms and still running: a hanging "
                    f"tile configuration, or a limit below the kernel's own run time (${WAIT_LIMIT_ENV})"
                )
            else:
                cause = _CAUSES.get(state_name, "unexpected command state")
            self._fail(name, state_name, begin, cause)

    def _fail(self, name: str, state: str, begin: float, cause: str) -> None:
        self._poison = KernelRunError(name, state, (self.driver.clock.now() - begin) * 1e3, cause)
        raise self._poison

    def close_contexts(self) -> None:
        """Close all hardware contexts; buffers stay, contexts are opened again when they are needed."""
        self._contexts.clear()

    def close(self) -> None:
        """Close all contexts and the device."""
        self._contexts.clear()
        self._images.clear()
        self._device = None
