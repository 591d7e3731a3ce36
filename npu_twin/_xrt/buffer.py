"""``bo`` and ``ext.bo``: buffer objects with a host and a device copy.

``write``, ``read`` and ``sync`` are called for every dispatch of the decode loop, hence their direct path in
front of the general overload resolution.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from npu_twin import clock, injection, npu2, trace
from npu_twin._xrt.device import require_open
from npu_twin._xrt.enums import bo_flags, export_values, xclBOSyncDirection
from npu_twin._xrt.pybind import Overloads, bound, constructor, method, pybind11_object
from npu_twin.executor import Range, default_device, driver_error
from npu_twin.memory import POISON_WORD, DeviceMemory, poisoned

_PAGE = 4096
_address_lock = threading.Lock()
_next_address = 0x7E00_0000_0000

freed = 0
"""Number of allocations gone so far; a run re-checks its buffers when it has grown."""


class Allocation:
    """Memory of one buffer object: host copy and device copy, both poisoned when new."""

    __slots__ = ("__weakref__", "address", "device", "host", "mapped", "views")

    def __init__(self, nbytes: int) -> None:
        global _next_address
        if nbytes > npu2.MAX_BO_BYTES:
            raise RuntimeError(driver_error("CREATE_BO", 12))
        try:
            if clock.is_timing_only():
                self.host = np.empty(nbytes, np.uint8)
                self.device = DeviceMemory(nbytes, poison=False)
            else:
                self.host = poisoned(nbytes)
                self.device = DeviceMemory(nbytes)
        except MemoryError:
            raise RuntimeError(driver_error("CREATE_BO", 12)) from None
        self.mapped = False
        self.views: list[weakref.ref[memoryview]] = []
        with _address_lock:
            self.address = _next_address
            _next_address += -(-nbytes // _PAGE) * _PAGE

    def __del__(self) -> None:
        global freed
        freed += 1
        if not getattr(self, "mapped", False):
            return
        for reference in self.views:
            view = reference()
            if view is not None:
                with contextlib.suppress(BufferError):
                    view.release()
        # arrays made from a view keep the memory; on silicon looking at it would crash
        self.host[: self.host.nbytes & ~1].view(np.uint16).fill(POISON_WORD)


_init = Overloads("__init__", "bo")
_write = Overloads("write", "bo")
_read = Overloads("read", "bo")
_sync = Overloads("sync", "bo")
_map = Overloads("map", "bo")
_size = Overloads("size", "bo")
_address = Overloads("address", "bo")

_PLAIN_BUFFERS = (np.ndarray, bytes, bytearray, memoryview)


@bound("bo", "Represents a buffer object")
class bo(pybind11_object):  # noqa: N801 - XRT's name
    """Buffer object."""

    __slots__ = ("_at", "_bytes", "_device_range", "_host_range", "_memory", "_nbytes", "_offset", "_parent")

    __init__ = constructor(_init)
    flags = bo_flags

    def _attach(self, memory: Allocation, offset: int, nbytes: int, parent: Any = None) -> None:
        self._memory = memory
        self._offset = offset
        # XRT 2.25.0 adds a sub-buffer's own offset to the address of the whole buffer: the device address
        # of a sub-buffer of a sub-buffer misses the outer offset, while the host side sees the right bytes
        self._at = offset if parent is None else offset - parent._offset
        self._nbytes = nbytes
        self._parent = parent
        host: Any = memory.host[offset : offset + nbytes]
        self._host_range = host
        self._device_range = memory.device.data[offset : offset + nbytes]
        self._bytes = memoryview(host) if nbytes else memoryview(b"")

    def write(self, *args: Any, **kwargs: Any) -> None:
        """Write the provided data into the buffer object starting at specified offset"""
        if len(args) == 2 and not kwargs:
            data, offset = args
            if type(offset) is int and offset >= 0 and type(data) in _PLAIN_BUFFERS:
                _put(self, data, offset)
                return
        _write(self, args, kwargs)

    def read(self, *args: Any, **kwargs: Any) -> npt.NDArray[np.int8]:
        """Read from the buffer object requested number of bytes starting from specified offset"""
        if len(args) == 2 and not kwargs:
            size, offset = args
            if type(size) is int and type(offset) is int and size >= 0 and offset >= 0:
                found: npt.NDArray[np.int8] = _get(self, size, offset)
                return found
        return cast(npt.NDArray[np.int8], _read(self, args, kwargs))

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Sync the buffer content in specified direction."""
        if len(args) == 1 and not kwargs and type(args[0]) is xclBOSyncDirection:
            _transfer(self, args[0]._value, self._nbytes, 0)
            return
        _sync(self, args, kwargs)

    map = method(_map, "Create a byte accessible memory view of the buffer object")
    size = method(_size, "Return the size of the buffer object")
    address = method(_address, "Return the device physical address of the buffer object")


export_values(bo_flags, bo)


def allocate(self: Any, size: int, flags: Any) -> None:
    """Give a new buffer object its memory. Raises RuntimeError with the NPU driver's texts."""
    if flags.value == 0:
        raise RuntimeError("unsupported buffer type: none flag (err=95): Operation not supported")
    if flags not in (bo_flags.host_only, bo_flags.cacheable):
        raise RuntimeError("Bad BO type. (err=22): Invalid argument")
    if size == 0:
        raise RuntimeError("mmap_range(len=0) failed (err=-22): Invalid argument")
    self._attach(Allocation(size), 0, size)


@_init.add("device: device, size: u64, flags: bo.flags, group: u32")
def _on_device(self: Any, device: Any, size: int, flags: Any, group: int) -> None:
    require_open(device, "bo(device())")
    allocate(self, size, flags)


@_init.add("hwctx: hw_context, size: u64, flags: bo.flags, group: u32")
def _in_context(self: Any, hwctx: Any, size: int, flags: Any, group: int) -> None:
    require_open(hwctx, "bo(hw_context())")
    allocate(self, size, flags)


@_init.add("hwctx: hw_context, size: u64, group: u32")
def _in_context_default(self: Any, hwctx: Any, size: int, group: int) -> None:
    _in_context(self, hwctx, size, bo_flags.normal, group)


@_init.add("arg0: bo, arg1: u64, arg2: u64")
def _sub_buffer(self: Any, parent: Any, size: int, offset: int) -> None:
    if size + offset > parent._nbytes:
        raise RuntimeError("sub buffer size and offset: Invalid argument")
    self._attach(parent._memory, parent._offset + offset, size, parent)


@_write.add("arg0: buffer, arg1: u64")
def _put(self: Any, data: Any, offset: int) -> None:
    view = memoryview(data)
    nbytes = view.nbytes
    if nbytes + offset > self._nbytes:
        if offset >> 64:
            raise _write.mismatch(self, (data, offset), {})
        raise RuntimeError("attempting to write past buffer size: Invalid argument")
    if not nbytes or clock.is_timing_only():
        return
    if view.c_contiguous:
        try:
            flat: Any = view.cast("B")
        except (TypeError, ValueError):  # a format that memoryview cannot cast: struct, complex, object
            flat = _bytes_at_start(data, view)
    else:
        flat = _bytes_at_start(data, view)
    self._bytes[offset : offset + nbytes] = flat


def _bytes_at_start(data: Any, view: memoryview) -> bytes:
    """The ``view.nbytes`` bytes from the start pointer on, whatever the strides say, as XRT copies them.

    Raises RuntimeError where that leaves the memory of the object (listed deviation ``write-strides``).
    """
    array = data if isinstance(data, np.ndarray) else np.asarray(view)
    start = array.ctypes.data
    owner: Any = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    base = owner if owner.base is None else np.frombuffer(_owner_of(owner.base), np.uint8)
    low = base.ctypes.data
    if not low <= start <= start + view.nbytes <= low + base.nbytes:
        raise RuntimeError(
            "bo.write ignores strides and would read outside of this array's memory; pass a contiguous array"
        )
    return ctypes.string_at(start, view.nbytes)


def _owner_of(base: Any) -> Any:
    while isinstance(base, memoryview):
        base = base.obj
    return base


@_read.add("arg0: u64, arg1: u64", returns="numpy.typing.NDArray[numpy.int8]")
def _get(self: Any, size: int, offset: int) -> npt.NDArray[np.int8]:
    if size + offset > self._nbytes:
        if (size | offset) >> 64:
            raise _read.mismatch(self, (size, offset), {})
        raise RuntimeError("attempting to read past buffer size: Invalid argument")
    found: npt.NDArray[np.int8] = self._host_range[offset : offset + size].view(np.int8).copy()
    return found


@_sync.add("arg0: xclBOSyncDirection, arg1: u64, arg2: u64")
def _sync_range(self: Any, direction: Any, size: int, offset: int) -> None:
    if self._parent is not None:
        if self._offset + offset + size > self._memory.host.nbytes:
            raise RuntimeError("Invalid offset and size when syncing sub buffer: Invalid argument")
    elif offset + size > self._nbytes:
        shown = offset - (1 << 64) if offset >> 63 else offset
        raise RuntimeError(
            f"Invalid BO offset and size for sync'ing: {shown}, {size} (err=22): Invalid argument"
        )
    _transfer(self, direction.value, size, offset)


@_sync.add("arg0: xclBOSyncDirection")
def _sync_all(self: Any, direction: Any) -> None:
    _transfer(self, direction.value, self._nbytes, 0)


def _transfer(self: Any, direction: int, size: int, offset: int) -> None:
    """Copy a range between host and device (0: to the device, 1: from it) and advance the clock."""
    device = default_device()
    to_device = direction == 0
    if direction > 1:
        return
    us = device.timing.sync_us(size, to_device)
    end_us = device.clock.advance_us(us)
    if trace.sinks:
        name = "to_device" if to_device else "from_device"
        trace.emit(trace.TraceEvent("sync", "", "", name, (end_us - us) * 1e-6, us * 1e-6))
    if injection.active and injection.sync_dropped("to_device" if to_device else "from_device", size):
        return
    if clock.is_timing_only():
        return
    memory = self._memory
    if size == self._nbytes and not offset:
        host, dev = self._host_range, self._device_range
    else:
        start = self._offset + offset
        host, dev = memory.host[start : start + size], memory.device.data[start : start + size]
    if to_device:
        dev[:] = host
        memory.device.changed()
    else:
        host[:] = dev


@_map.add(returns="memoryview")
def _new_view(self: Any) -> memoryview:
    view = memoryview(self._bytes)
    views = self._memory.views
    self._memory.mapped = True
    if len(views) > 64:
        views[:] = [known for known in views if known() is not None]
    views.append(weakref.ref(view))
    return view


@_size.add(returns="int")
def _size_of(self: Any) -> int:
    return int(self._nbytes)


@_address.add(returns="int")
def _address_of(self: Any) -> int:
    return int(self._memory.address + self._at)


def argument(buffer: Any) -> tuple[Range, weakref.ref[Allocation]]:
    """A buffer as a kernel argument, and whether its memory still exists."""
    memory = buffer._memory
    return Range(memory.device, buffer._at, buffer._nbytes), weakref.ref(memory)


_ext_init = Overloads("__init__", "ext.bo")


@bound("ext.bo", "Extended buffer object with explicit sharing and access controls.")
class ext_bo(bo):  # noqa: N801 - XRT's name
    """Buffer object of the newer interface."""

    __slots__ = ()
    __init__ = constructor(_ext_init)


def _extended(self: Any, place: Any, size: int, access: Any = None) -> None:
    require_open(place, "ext.bo")
    allocate(self, size, bo_flags.host_only)


def _unsupported(self: Any, *values: Any) -> None:
    raise RuntimeError(driver_error("CREATE_BO", 95))


_ext_init.add("device: device, userptr: capsule, size: u64, access: ext.access_mode")(_unsupported)
_ext_init.add("device: device, userptr: capsule, size: u64")(_unsupported)
_ext_init.add("device: device, size: u64, access: ext.access_mode")(_extended)
_ext_init.add("device: device, size: u64")(_extended)
_ext_init.add("device: device, pid: pid, export_handle: u64")(_unsupported)
_ext_init.add("hwctx: hw_context, size: u64, access: ext.access_mode")(_extended)
_ext_init.add("hwctx: hw_context, size: u64")(_extended)
_ext_init.add("hwctx: hw_context, pid: pid, export_handle: u64")(_unsupported)
