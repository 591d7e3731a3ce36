"""``run`` and ``runlist``: one execution of a kernel, and a sequence of them."""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from typing import Any

from npu_twin import executor, injection
from npu_twin._xrt import buffer
from npu_twin._xrt.context import Context
from npu_twin._xrt.device import crashes, require_open
from npu_twin._xrt.enums import command_state, ert_cmd_state
from npu_twin._xrt.pybind import Overloads, bound, constructor, method, pybind11_object
from npu_twin.exceptions import DeviceHangError

NEW = 1
COMPLETED = 4
TIMEOUT = 8

aborts = 0
"""How often the real library would have ended this process because a run in flight was dropped."""

_TIMEOUT_FIELDS = (
    "txn_op_idx",
    "ctx_pc",
    "fatal_error_type",
    "fatal_error_exception_type",
    "fatal_error_exception_pc",
    "fatal_error_app_module",
)

_ABORT = "xrt::run destructed while command is still in progress"

_init = Overloads("__init__", "run")
_start = Overloads("start", "run")
_set_arg = Overloads("set_arg", "run")
_wait = Overloads("wait", "run")
_wait2 = Overloads("wait2", "run")
_state = Overloads("state", "run")
_add_callback = Overloads("add_callback", "run")
_scratchpad = Overloads("get_ctrl_scratchpad_bo", "run")


@bound("run", "Represents one execution of a kernel")
class run(pybind11_object):  # noqa: N801 - XRT's name
    """One execution of a kernel, which can be started again after every wait."""

    __slots__ = (
        "_alive",
        "_args",
        "_binding",
        "_context",
        "_freed",
        "_in_flight",
        "_job",
        "_listed",
        "_open",
        "_program",
        "_state",
    )
    __init__ = constructor(_init)
    set_arg = method(_set_arg, "Set a specific kernel argument of a run")
    add_callback = method(_add_callback, "Register a callback to be invoked in the requested state.")
    get_ctrl_scratchpad_bo = method(_scratchpad, "Get the control scratchpad buffer object of this run")
    wait2 = method(_wait2, "Wait for the run to complete")
    state = method(_state, "Return the current execution state of the run.")

    def start(self, *args: Any, **kwargs: Any) -> None:
        """Start one execution of a run"""
        if args or kwargs:
            raise _start.mismatch(self, args, kwargs)
        _launch(self)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the run to complete, without limit or for the specified milliseconds"""
        if len(args) == 1 and not kwargs and type(args[0]) is int and 0 <= args[0] < 1 << 32:
            return _wait_limited(self, args[0])
        return _wait(self, args, kwargs)

    def __del__(self) -> None:
        if getattr(self, "_in_flight", False):
            _aborted()


def _aborted() -> None:
    """A command in flight was dropped: SIGABRT in the real library, an unraisable exception here."""
    global aborts
    aborts += 1
    if sys.is_finalizing():
        print(f"[XRT] ERROR: {_ABORT}", file=sys.stderr)
        return
    raise RuntimeError(f"{_ABORT}; the real library aborts the process here. Wait for it first.")


@_init.add()
def _empty_run(self: Any) -> None:
    self._open = False
    self._in_flight = False


@_init.add("arg0: xrt::kernel")
def _make_run(self: Any, kernel: Any) -> None:
    self._open = True
    self._context = kernel._context
    self._program = kernel._program
    self._args = [None] * len(kernel._program.listing.arguments)
    self._alive = [None] * len(self._args)
    self._binding = None
    self._freed = buffer.freed
    self._job = None
    self._in_flight = False
    self._listed = None
    self._state = NEW


def run_of(kernel: Any, values: tuple[Any, ...]) -> Any:
    """``kernel(*values)``: set what converts, skip the rest silently, start."""
    made = run(kernel)
    for index, value in enumerate(values):
        # a value of another type or beyond the last argument is dropped without an error
        with contextlib.suppress(TypeError, IndexError):
            made.set_arg(index, value)
    made.start()
    return made


def _checked_index(self: Any, index: int) -> int:
    require_open(self, "run.set_arg")
    if not 0 <= index < len(self._args):
        raise IndexError(
            f"vector::_M_range_check: __n (which is {index % (1 << 64)}) >= this->size() "
            f"(which is {len(self._args)})"
        )
    return index


@_set_arg.add("arg0: i32, arg1: xrt::bo")
def _set_buffer(self: Any, index: int, value: Any) -> None:
    at = _checked_index(self, index)
    self._args[at], self._alive[at] = buffer.argument(value)
    self._binding = None


@_set_arg.add("arg0: i32, arg1: i32")
def _set_number(self: Any, index: int, value: int) -> None:
    # the number becomes the address of the buffer: accepted here, an error on the device
    at = _checked_index(self, index)
    self._args[at], self._alive[at] = None, None
    self._binding = None


def bind(self: Any) -> executor.Binding:
    """The run bound to its current arguments. Raises RuntimeError when one of the buffers is gone."""
    binding: executor.Binding | None = self._binding
    if self._freed != buffer.freed:
        if any(reference is not None and reference() is None for reference in self._alive):
            raise RuntimeError(executor.driver_error("EXEC_CMD", 22))
        self._freed = buffer.freed
    if binding is None or binding.epoch != injection.epoch:
        binding = self._binding = executor.Binding(self._program, self._args)
    return binding


def _launch(self: Any) -> None:
    if not self._open:
        raise crashes("run.start")
    if self._listed is not None:
        raise RuntimeError(
            "Run object belongs to a runlist and cannot be explicitly started: Invalid argument"
        )
    if self._in_flight:
        raise RuntimeError("bad command state, can't launch")
    binding = self._binding
    if binding is None or self._freed != buffer.freed or binding.epoch != injection.epoch:
        binding = bind(self)
    self._job = executor.default_device().submit(binding, self._context)
    self._in_flight = True
    self._state = NEW


_start.add()(_launch)


@_wait.add(returns="pyxrt.ert_cmd_state")
def _wait_unlimited(self: Any) -> Any:
    return _wait_limited(self, 0)


@_wait.add("arg0: u32", returns="pyxrt.ert_cmd_state")
def _wait_limited(self: Any, milliseconds: int) -> Any:
    if not self._open:
        raise crashes("run.wait")
    job = self._job
    if job is None or self._listed is not None:
        why = "belongs to a runlist" if self._listed is not None else "was never started"
        raise DeviceHangError(f"run.wait: the run {why}, the real call never returns")
    limit_us = milliseconds * 1e3 if milliseconds else math.inf
    if executor.default_device().wait(job, limit_us):
        self._in_flight = False
        self._state = job.state
        return command_state(job.state)
    if limit_us == math.inf:
        raise DeviceHangError(
            f"run.wait without a limit: the run of {self._program.listing.name} never completes and the real "
            "call never returns; wait with a limit in milliseconds"
        )
    return command_state(TIMEOUT)


@_wait2.add()
def _wait_or_raise(self: Any) -> None:
    state = _wait_limited(self, 0)
    if state.value != COMPLETED:
        raise RuntimeError(
            f"Command failed to complete successfully ({state._label()}){_details(state.value)}"
        )


def _details(state: int) -> str:
    """What XRT appends to the text of a device time-out; the twin has no such registers, hence zeros."""
    return (
        "".join(("\n", *(f"{name} = 0x00000000\n" for name in _TIMEOUT_FIELDS))) if state == TIMEOUT else ""
    )


@_wait2.add("arg0: milliseconds", returns="std::cv_status")
def _wait2_limited(self: Any, limit: Any) -> Any:
    raise AssertionError("no Python object converts to std::chrono::milliseconds")


@_state.add(returns="pyxrt.ert_cmd_state")
def _current_state(self: Any) -> Any:
    if not self._open:
        raise crashes("run.state")
    return command_state(self._state)


@_add_callback.add("arg0: ert_cmd_state, arg1: callback, arg2: capsule")
def _callback(self: Any, state: Any, function: Any, data: Any) -> None:
    raise AssertionError("no Python object converts to the callback type")


@_scratchpad.add(returns="xrt::bo")
def _no_scratchpad(self: Any) -> Any:
    if not self._open:
        raise crashes("run.get_ctrl_scratchpad_bo")
    raise RuntimeError("Control scratchpad memory is not present\n")


_list_init = Overloads("__init__", "runlist")
_add = Overloads("add", "runlist")
_execute = Overloads("execute", "runlist")
_list_wait = Overloads("wait", "runlist")
_BUSY = "current state: running: Invalid argument"


@bound("runlist", "Ordered collection of runs executed as a unit.")
class runlist(pybind11_object):  # noqa: N801 - XRT's name
    """Runs that are submitted and waited for together."""

    __slots__ = ("_context", "_jobs", "_open", "_runs")
    __init__ = constructor(_list_init)
    add = method(_add, "Add a run to the runlist")
    execute = method(_execute, "Execute all runs in the runlist")
    wait = method(_list_wait, "Wait for all runs in the runlist to complete")

    def __del__(self) -> None:
        if getattr(self, "_jobs", None):
            _aborted()


@_list_init.add()
def _empty_list(self: Any) -> None:
    self._open = False


@_list_init.add("hwctx: hw_context")
def _make_list(self: Any, hwctx: Any) -> None:
    require_open(hwctx, "runlist(hw_context())")
    context: Context = hwctx._context
    self._open = True
    self._context = context
    self._runs = []
    self._jobs = []


@_add.add("run: run")
def _append(self: Any, member: Any) -> None:
    if not self._open:
        raise RuntimeError("cannot add run object to uninitialized runlist: Invalid argument")
    if not member._open:
        raise crashes("runlist.add(run())")
    if self._jobs:
        raise RuntimeError(f"runlist must be idle before adding run objects, {_BUSY}")
    member._listed = weakref.ref(self)
    self._runs.append(member)


@_execute.add()
def _submit_all(self: Any) -> None:
    if not self._open:
        raise crashes("runlist.execute")
    if self._jobs:
        raise RuntimeError(f"runlist must be idle before submitting for execution, {_BUSY}")
    bindings = [bind(member) for member in self._runs]
    device = executor.default_device()
    self._jobs = [device.submit(binding, self._context) for binding in bindings]


@_list_wait.add()
def _wait_all(self: Any) -> None:
    if not self._open:
        raise crashes("runlist.wait")
    device = executor.default_device()
    for job in self._jobs:
        if not device.wait(job):
            raise DeviceHangError("runlist.wait: a run never completes and the real call never returns")
    states = [job.state for job in self._jobs]
    self._jobs = []
    for state in states:
        if state != COMPLETED:
            label = ert_cmd_state(state)._label()
            raise RuntimeError(f"runlist failed execution ({label}){_details(state)}")


@_list_wait.add("timeout: milliseconds", returns="std::cv_status")
def _list_wait_limited(self: Any, limit: Any) -> Any:
    raise AssertionError("no Python object converts to std::chrono::milliseconds")
