"""Host runtime on the driver seam: contexts, kernels, buffers and runs.

One code path for silicon and twin; only the imported driver module differs. Facts about the real
library that shape it (XRT 2.25.0): a memoryview does not keep its bo alive, `bo.write` ignores
strides, a run dropped in flight aborts the process, `wait` without a limit may never return and
holds the interpreter lock, failures are returned as states and not raised.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .driver import Driver
from .exceptions import DevicePoisoned, DriverUnavailable, KernelRunError

# A process that opens about ten contexts is refused by the driver (mlir-air smolvla profile), so the
# least recently used one is closed before.
MAX_CONTEXTS = 8
# The driver's own time-out is about 6.1 s; a wait ends after it, so that a time-out is seen as a state.
WAIT_LIMIT_MS = 10_000

_CAUSES = {
    "ERT_CMD_STATE_TIMEOUT": "the device did not finish in time: a hanging tile configuration, or a "
    "wait limit below the kernel's own run time",
    "ERT_CMD_STATE_ERROR": "the device reported an error: usually an argument missing or too small, or an "
    "artefact built for another target",
    "ERT_CMD_STATE_ABORT": "the command was aborted, usually because the context was lost",
    "ERT_CMD_STATE_NORESPONSE": "the firmware did not answer; reload the amdxdna driver",
}

# Runs that were still in flight when their wait ended: destroying one would abort the process.
_in_flight: list[Any] = []


@dataclass
class _OpenKernel:
    """A context, its kernel and the runs made on it: they go together, as a run keeps its context."""

    context: Any
    kernel: Any
    runs: dict[str, Any] = field(default_factory=dict)


class HostRuntime:
    """A device, its open contexts and its state. Close it to release the hardware.

    Buffers belong to the device and outlive the context of the kernel that uses them, so closing
    the least recently used context loses no data.
    """

    def __init__(
        self, driver: Driver, *, max_contexts: int = MAX_CONTEXTS, wait_limit_ms: int = WAIT_LIMIT_MS
    ) -> None:
        self.driver = driver
        self.max_contexts = max_contexts
        self.wait_limit_ms = wait_limit_ms
        self._poison: KernelRunError | None = None
        self._contexts: OrderedDict[tuple[str, str], _OpenKernel] = OrderedDict()
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

    def run_for(self, artefact: Path, name: str, bo_key: str, bos: Sequence[Any]) -> Any:
        """Return the run of one buffer set, its arguments set; made once while its context is open.

        Opens the context of the ELF when it is closed, and closes the least recently used one for it
        when the limit is reached. Raises RuntimeError with the driver's text when the artefact is no
        ELF of this target, has no kernel of that name, or the driver has no context left.
        """
        key = (str(artefact), name)
        found = self._contexts.get(key)
        if found is None:
            found = self._open(key)
        elif next(reversed(self._contexts)) != key:
            self._contexts.move_to_end(key)
        run = found.runs.get(bo_key)
        if run is None:
            run = found.runs[bo_key] = self.driver.module.run(found.kernel)
            for index, bo in enumerate(bos):
                run.set_arg(index, bo)
        return run

    def _open(self, key: tuple[str, str]) -> _OpenKernel:
        while len(self._contexts) >= self.max_contexts:
            self._contexts.popitem(last=False)
        artefact, name = key
        module = self.driver.module
        context = module.hw_context(self._device, module.elf(artefact))
        opened = self._contexts[key] = _OpenKernel(context, module.ext.kernel(context, name))
        return opened

    def forget(self, artefact: Path, name: str) -> None:
        """Close the context of a kernel, so that no run keeps the address of a buffer that is gone."""
        self._contexts.pop((str(artefact), name), None)

    def buffer(self, nbytes: int) -> Any:
        """Allocate a buffer object of `nbytes` on the device."""
        return self.driver.module.ext.bo(self._device, nbytes)

    def write(self, bo: Any, data: Any) -> None:
        """Copy a contiguous byte buffer into a bo and make it visible to the device."""
        bo.write(data, 0)
        bo.sync(self._to_device)

    def read(self, bo: Any, nbytes: int) -> Any:
        """Return a new int8 array with what the device left in a bo."""
        bo.sync(self._from_device)
        return bo.read(nbytes, 0)

    def execute(self, name: str, run: Any) -> None:
        """Start a run and wait for it.

        Raises KernelRunError for every state but COMPLETED, and DevicePoisoned once such an error
        has happened: results after it cannot be trusted.
        """
        if self._poison is not None:
            first = self._poison
            raise DevicePoisoned(
                name, first.state, 0.0, f"device unusable since kernel '{first.kernel}': {first.cause}"
            )
        begin = self.driver.clock.now()
        run.start()
        state = run.wait(self.wait_limit_ms)
        if state != self._completed:
            self._fail(name, run, state, (self.driver.clock.now() - begin) * 1e3)

    def _fail(self, name: str, run: Any, state: Any, elapsed_ms: float) -> None:
        state_name = getattr(state, "name", str(state))
        if run.state() in self._unfinished:
            _in_flight.append(run)
        cause = _CAUSES.get(state_name, "unexpected command state")
        self._poison = KernelRunError(name, state_name, elapsed_ms, cause)
        raise self._poison

    def close_contexts(self) -> None:
        """Close all hardware contexts; buffers stay, contexts are opened again when needed."""
        self._contexts.clear()

    def close(self) -> None:
        """Close all contexts and the device."""
        self.close_contexts()
        self._device = None
