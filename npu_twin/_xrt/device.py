"""``uuid``, ``device``, ``xclbin`` and their small parts, ``enumerate_devices``, ``log_message``."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path
from typing import Any

from npu_twin import npu2
from npu_twin._xrt.enums import xrt_info_device, xrt_msg_level
from npu_twin._xrt.pybind import Overloads, bound, constructor, method, pybind11_object, pybind11_type

NO_UUID = "00000000-0000-0000-0000-000000000000"
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\Z")

_uuid_init = Overloads("__init__", "uuid")
_uuid_to_string = Overloads("to_string", "uuid")


def crashes(call: str) -> RuntimeError:
    """The error that stands for a crash of the real library (listed deviation ``empty-handle``)."""
    return RuntimeError(f"{call}: empty handle; the real library ends the process with SIGSEGV here")


@bound("uuid", "XRT UUID object to identify a compiled xclbin binary")
class uuid(pybind11_object):  # noqa: N801 - XRT's name
    """Binary identity."""

    __slots__ = ("_text",)
    __init__ = constructor(_uuid_init)
    to_string = method(_uuid_to_string, "Convert XRT UUID object to string")


@_uuid_init.add("arg0: char*")
def _make_uuid(self: Any, text: str | None) -> None:
    if text is None:
        raise RuntimeError("basic_string: construction from null is not valid")
    self._text = text.lower() if _UUID.match(text) else NO_UUID


@_uuid_to_string.add(returns="str")
def _uuid_text(self: Any) -> str:
    return str(self._text)


_device_init = Overloads("__init__", "device")
_register = Overloads("register_xclbin", "device")
_load = Overloads("load_xclbin", "device")
_device_uuid = Overloads("get_xclbin_uuid", "device")
_info = Overloads("get_info", "device")


@bound("device", "Abstraction of an acceleration device")
class device(pybind11_object):  # noqa: N801 - XRT's name
    """The NPU."""

    __slots__ = ("_open",)
    __init__ = constructor(_device_init)
    register_xclbin = method(_register, "Register an xclbin with the device.")
    load_xclbin = method(_load, "Deprecated compatibility shim.")
    get_xclbin_uuid = method(_device_uuid, "Return the UUID of the xclbin of the device.")
    get_info = method(_info, "Obtain the device properties and sensor information")


@_device_init.add()
def _empty_device(self: Any) -> None:
    self._open = False


@_device_init.add("index: u32")
def _device_by_index(self: Any, index: int) -> None:
    if index != 0:
        raise RuntimeError(f" No such device with index '{index}'")
    self._open = True


@_device_init.add("bdf: str")
def _device_by_name(self: Any, bdf: str) -> None:
    if bdf == npu2.BDF:
        self._open = True
    elif bdf == "":
        raise ValueError("stoul")
    elif bdf.isdigit():
        _device_by_index(self, int(bdf))
    else:
        raise RuntimeError(f"No such device '{bdf}': Invalid argument")


def require_open(handle: Any, call: str) -> None:
    """Raise where the real library would follow a null pointer."""
    if not handle._open:
        raise crashes(call)


def open_device() -> Any:
    """A new handle of the NPU."""
    return device(0)


@_register.add("xclbin: xrt::xclbin", returns="pyxrt.uuid")
def _register_xclbin(self: Any, image: Any) -> Any:
    require_open(self, "device.register_xclbin")
    return uuid(NO_UUID)


def _warn_load() -> None:
    warnings.warn(
        "pyxrt.device.load_xclbin() is deprecated; use pyxrt.hw_context(device, xclbin) or "
        "pyxrt.hw_context(device, xclbin_path) instead",
        DeprecationWarning,
        stacklevel=5,
    )


@_load.add("xclbin_path: str", returns="pyxrt.uuid")
def _load_path(self: Any, path: str) -> Any:
    _warn_load()
    require_open(self, "device.load_xclbin")
    xclbin(path)
    raise RuntimeError(_LOAD_FAILED)


@_load.add("xclbin: xrt::xclbin", returns="pyxrt.uuid")
def _load_image(self: Any, image: Any) -> Any:
    _warn_load()
    require_open(self, "device.load_xclbin")
    raise RuntimeError(_LOAD_FAILED)


@_device_uuid.add(returns="pyxrt.uuid")
def _get_uuid(self: Any) -> Any:
    require_open(self, "device.get_xclbin_uuid")
    return uuid(NO_UUID)


@_info.add("arg0: xrt_info_device", returns="str")
def _get_info(self: Any, query: Any) -> str:
    require_open(self, "device.get_info")
    return npu2.info(query._label())


_LOAD_FAILED = "xrtDeviceLoadXclbin failed in load_xclbin compatibility shim"
_xclbin_init = Overloads("__init__", "xclbin")
_AXLF_HEADER_BYTES = 496
_AXLF_LENGTH = slice(304, 312)


@bound("xclbin.xclbinip")
class xclbinip(pybind11_object):  # noqa: N801 - XRT's name
    """An IP of an xclbin; an empty handle here."""

    __slots__ = ()
    _init = Overloads("__init__", "xclbin.xclbinip")
    __init__ = constructor(_init)


@bound("xclbin.xclbinkernel", "Represents a kernel in an xclbin")
class xclbinkernel(pybind11_object):  # noqa: N801 - XRT's name
    """A kernel of an xclbin; an empty handle here."""

    __slots__ = ()
    _init = Overloads("__init__", "xclbin.xclbinkernel")
    __init__ = constructor(_init)


@bound("xclbin.xclbinmem", "Represents a physical device memory bank")
class xclbinmem(pybind11_object):  # noqa: N801 - XRT's name
    """A memory bank of an xclbin; an empty handle here."""

    __slots__ = ()
    _init = Overloads("__init__", "xclbin.xclbinmem")
    __init__ = constructor(_init)


def _empty_methods(cls: Any, names: dict[str, str]) -> None:
    for name, returns in names.items():
        overloads = Overloads(name, cls.__qualname__)

        @overloads.add(returns=returns)
        def crash(self: Any, call: str = f"{cls.__qualname__}.{name}") -> Any:
            raise crashes(call)

        setattr(cls, name, method(overloads, "Metadata of an xclbin."))


for _part in (xclbinip, xclbinkernel, xclbinmem):
    _part._init.add()(lambda self: None)
_empty_methods(xclbinip, {"get_name": "str"})
_empty_methods(xclbinkernel, {"get_name": "str", "get_num_args": "int"})
_empty_methods(
    xclbinmem,
    {
        "get_tag": "str",
        "get_base_address": "int",
        "get_size_kb": "int",
        "get_used": "bool",
        "get_index": "int",
    },
)


@bound("xclbin", "Represents an xclbin and provides APIs to access meta data")
class xclbin(pybind11_object):  # noqa: N801 - XRT's name
    """An xclbin; the twin opens none, so every handle is empty."""

    __slots__ = ()
    xclbinip = xclbinip
    xclbinkernel = xclbinkernel
    xclbinmem = xclbinmem
    __init__ = constructor(_xclbin_init)


def _metadata(name: str, returns: str, make: Any) -> None:
    overloads = Overloads(name, "xclbin")
    overloads.add(returns=returns)(lambda self: make())
    setattr(xclbin, name, method(overloads, "Metadata of an xclbin."))


def _no_axlf() -> Any:
    raise TypeError(
        "Unable to convert function return value to a Python type! The signature was\n"
        "\t(self: pyxrt.xclbin) -> axlf"
    )


_metadata("get_kernels", "list[pyxrt.xclbin.xclbinkernel]", list)
_metadata("get_mems", "list[pyxrt.xclbin.xclbinmem]", list)
_metadata("get_uuid", "pyxrt.uuid", lambda: uuid(NO_UUID))
_metadata("get_xsa_name", "str", str)
_metadata("get_axlf", "axlf", _no_axlf)


@_xclbin_init.add()
def _empty_xclbin(self: Any) -> None:
    """A handle without content, which answers every query with nothing."""


@_xclbin_init.add("arg0: str")
def _read_xclbin(self: Any, name: str) -> None:
    path = Path(name)
    if path.is_dir():
        raise ValueError("cannot create std::vector larger than max_size()")
    if not path.is_file():
        raise RuntimeError(
            f"No such file '{name}'" if path.is_absolute() else f"No such file or directory '{name}'"
        )
    data = path.read_bytes()
    if len(data) < _AXLF_HEADER_BYTES:
        raise RuntimeError("xclbin: buffer too small to contain header")
    if data[:7] != b"xclbin2":
        raise RuntimeError("Invalid xclbin")
    if int.from_bytes(data[_AXLF_LENGTH], "little") != len(data):
        raise RuntimeError("xclbin: m_length does not match buffer size")
    raise RuntimeError(f"'{name}' is an xclbin; the twin runs program listings (full-ELF flow) only")


@_xclbin_init.add("arg0: axlf")
def _xclbin_from_memory(self: Any, image: Any) -> None:
    raise AssertionError("no Python object converts to axlf")


class _Vector(pybind11_object):
    """A bound std::vector of metadata objects, list-like."""

    __slots__ = ("_items",)
    _element: type = object

    def __init__(self, items: Any = ()) -> None:
        self._items = [self._checked(item) for item in items]
        self._constructed = True

    def _checked(self, item: Any) -> Any:
        if not isinstance(item, self._element):
            raise TypeError(f"a {type(self).__name__} holds {self._element.__name__} objects only")
        return item

    def clear(self) -> None:
        """Clear the contents"""
        self._items.clear()

    def extend(self, items: Any) -> None:
        """Append all items"""
        self._items.extend([self._checked(item) for item in items])

    def insert(self, i: int, x: Any) -> None:
        """Insert an item at a given position."""
        self._items.insert(i, self._checked(x))

    def pop(self, i: int = -1) -> Any:
        """Remove and return the item at index ``i``"""
        try:
            return self._items.pop(i)
        except IndexError:
            raise IndexError from None

    def __getitem__(self, i: Any) -> Any:
        return type(self)(self._items[i]) if isinstance(i, slice) else self._items[i]

    def __setitem__(self, i: int, x: Any) -> None:
        self._items[i] = self._checked(x)

    def __delitem__(self, i: Any) -> None:
        del self._items[i]

    def __iter__(self) -> Any:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def _vector(element: Any) -> Any:
    name = f"{element.__name__}_vector"
    append = Overloads("append", name)
    append.add(f"x: xclbin.{element.__name__}")(lambda self, x: self._items.append(x))
    members = {
        "__slots__": (),
        "_element": element,
        "append": method(append, "Add an item to the end of the list"),
    }
    return bound(name)(pybind11_type(name, (_Vector,), members))


xclbinip_vector: Any = _vector(xclbinip)
xclbinkernel_vector: Any = _vector(xclbinkernel)
xclbinmem_vector: Any = _vector(xclbinmem)

_enumerate = Overloads("enumerate_devices")
_log = Overloads("log_message")
_LEVELS = {
    "emergency": 50,
    "alert": 50,
    "critical": 50,
    "error": 40,
    "warning": 30,
    "notice": 20,
    "info": 20,
    "debug": 10,
}


@_enumerate.add(returns="int")
def _count() -> int:
    return 1


@_log.add("arg0: xrt_msg_level, arg1: str, arg2: str")
def _message(level: Any, tag: str, text: str) -> None:
    logging.getLogger("npu_twin.xrt").log(_LEVELS.get(level._label(), 20), "[%s] %s", tag, text)


def enumerate_devices(*args: Any, **kwargs: Any) -> int:
    """Enumerate devices in system"""
    return int(_enumerate(None, args, kwargs))


def log_message(*args: Any, **kwargs: Any) -> None:
    """Dispatch formatted log message"""
    _log(None, args, kwargs)


__all__ = [
    "device",
    "enumerate_devices",
    "log_message",
    "uuid",
    "xclbin",
    "xclbinip_vector",
    "xclbinkernel_vector",
    "xclbinmem_vector",
    "xrt_info_device",
    "xrt_msg_level",
]
