"""``elf``, ``program``, ``module``, ``hw_context``, ``kernel`` and ``ext.kernel``: from artefact to
kernel.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from npu_twin import executor, npu2
from npu_twin._xrt.device import NO_UUID, crashes, open_device, require_open, uuid, xclbin
from npu_twin._xrt.enums import export_values, hw_context_access_mode, kernel_cu_access_mode
from npu_twin._xrt.pybind import Overloads, bound, constructor, method, pybind11_object
from npu_twin.exceptions import ListingError
from npu_twin.listing import Listing

_elf_init = Overloads("__init__", "elf")
_ELF_HEADER_BYTES = 52
_NPU_ABIS = (64, 69, 70, 75, 86, 105)


@bound("elf", "ELF representation of compiled AIE binary")
class elf(pybind11_object):  # noqa: N801 - XRT's name
    """A compiled artefact; here a program listing."""

    __slots__ = ("_program",)
    __init__ = constructor(_elf_init)


@_elf_init.add("arg0: str")
def _read_elf(self: Any, name: str) -> None:
    invalid = f"{name} is not found or is not a valid ELF file"
    try:
        data = Path(name).read_bytes()
    except (OSError, ValueError):
        raise RuntimeError(invalid) from None
    if data[:4] == b"\x7fELF" and len(data) >= _ELF_HEADER_BYTES:
        abi = data[7]
        if abi not in _NPU_ABIS:
            raise RuntimeError(f"ELF contains unsupported platform OS/ABI: {abi}")
        raise RuntimeError(f"{name} holds NPU machine code; the twin runs program listings only")
    try:
        listing = Listing.from_json(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise RuntimeError(invalid) from None
    except ListingError as error:
        raise RuntimeError(invalid) from error
    self._program = executor.load(listing)


@_elf_init.add("arg0: capsule, arg1: u64")
def _elf_from_memory(self: Any, data: Any, size: int) -> None:
    raise RuntimeError("not valid ELF data")


_program_init = Overloads("__init__", "program")
_partition_size = Overloads("get_partition_size", "program")


@bound(
    "program",
    "Represents a compiled program to be executed on the AIE. The program is an ELF file with sections and "
    "data specific to the AIE.",
)
class program(pybind11_object):  # noqa: N801 - XRT's name
    """A compiled program."""

    __slots__ = ("_elf",)
    __init__ = constructor(_program_init)
    get_partition_size = method(_partition_size, "Required partition size to run the program")


@_program_init.add("arg0: elf")
def _make_program(self: Any, artefact: Any) -> None:
    self._elf = artefact


@_partition_size.add(returns="int")
def _columns(self: Any) -> int:
    columns = self._elf._program.listing.options.get("columns", npu2.COLUMNS)
    return int(columns)


_module_init = Overloads("__init__", "module")
_module_context = Overloads("get_hw_context", "module")


@bound("module", "Executable hardware module created from an ELF image.")
class module(pybind11_object):  # noqa: N801 - XRT's name
    """A module."""

    __slots__ = ("_elf",)
    __init__ = constructor(_module_init)
    get_hw_context = method(_module_context, "Get the hardware context associated with the module.")


@_module_init.add("elf: elf")
def _make_module(self: Any, artefact: Any) -> None:
    self._elf = artefact


@_module_context.add(returns="pyxrt.hw_context")
def _context_of_module(self: Any) -> Any:
    return hw_context()


class Context:
    """The driver's hardware context, shared by every handle and kernel made from it."""

    __slots__ = ("__weakref__", "device", "programs")

    def __init__(self) -> None:
        self.device: executor.Device | None = None
        self.programs: dict[str, executor.Program] = {}

    def add(self, artefact: executor.Program) -> None:
        """Load a program. Raises RuntimeError when its kernel is there already or no context is left."""
        name = artefact.listing.name
        if name in self.programs:
            raise RuntimeError("kernel already exists, cannot use this ELF with this hw ctx\n")
        if self.device is None:
            device = executor.default_device()
            device.open_context()
            self.device = device
        self.programs[name] = artefact

    def find(self, name: str) -> executor.Program:
        """The program of a kernel name, ``NAME`` or ``NAME:INSTANCE``.

        mlir-air names the kernel ``main:NAME``, so that form is understood, too. Raises RuntimeError with
        XRT's texts.
        """
        kernel, colon, instance = name.partition(":")
        if kernel == "main" and instance in self.programs:
            return self.programs[instance]
        if kernel not in self.programs:
            raise RuntimeError("no ELF found with given kernel name in ctx")
        if colon and instance not in ("main", kernel):
            raise RuntimeError(f"Unable to find group idx for given kernel: {name}")
        return self.programs[kernel]

    def __del__(self) -> None:
        if self.device is not None:
            self.device.close_context(self)


_context_init = Overloads("__init__", "hw_context")
_add_config = Overloads("add_config", "hw_context")
_get_device = Overloads("get_device", "hw_context")
_get_uuid = Overloads("get_xclbin_uuid", "hw_context")
_get_xclbin = Overloads("get_xclbin", "hw_context")
_get_mode = Overloads("get_mode", "hw_context")


@bound(
    "hw_context",
    "Hardware context for associating an xclbin or ELF configuration with device resources.",
)
class hw_context(pybind11_object):  # noqa: N801 - XRT's name
    """Hardware context."""

    __slots__ = ("_context", "_mode", "_open")
    access_mode = hw_context_access_mode
    __init__ = constructor(_context_init)
    add_config = method(_add_config, "Add an ELF configuration object to the hardware context.")
    get_device = method(_get_device, "Get the device from which the hardware context was created.")
    get_xclbin_uuid = method(_get_uuid, "Get the UUID of the xclbin of the hardware context.")
    get_xclbin = method(_get_xclbin, "Get the xclbin associated with the hardware context.")
    get_mode = method(_get_mode, "Get the access mode of the hardware context.")


export_values(hw_context_access_mode, hw_context)


@_context_init.add()
def _empty_context(self: Any) -> None:
    self._open = False


def _by_uuid(self: Any, device: Any, identity: Any, *options: Any) -> None:
    require_open(device, "hw_context(device())")
    raise RuntimeError(f"No xclbin with uuid '{identity._text}': Invalid argument")


def _by_xclbin(self: Any, device: Any, image: Any, *options: Any) -> None:
    raise crashes("hw_context(device, xclbin())")


def _by_path(self: Any, device: Any, path: str, *options: Any) -> None:
    require_open(device, "hw_context(device())")
    _by_xclbin(self, device, xclbin(path))


for _source, _target in (
    ("uuid: uuid", _by_uuid),
    ("xclbin: xrt::xclbin", _by_xclbin),
    ("xclbin_path: str", _by_path),
):
    _context_init.add(f"device: xrt::device, {_source}")(_target)
    _context_init.add(f"device: xrt::device, {_source}, mode: hw_context.access_mode")(_target)
    _context_init.add(f"device: xrt::device, {_source}, cfg_param: config")(_target)


@_context_init.add("device: xrt::device, cfg_param: config, mode: hw_context.access_mode")
def _staged(self: Any, device: Any, settings: Mapping[str, int], mode: Any) -> None:
    self._context = Context()
    self._mode = mode
    self._open = True


@_context_init.add("device: xrt::device, elf: xrt::elf")
def _by_elf(self: Any, device: Any, artefact: Any) -> None:
    _by_elf_with(self, device, artefact, {}, hw_context_access_mode.shared)


@_context_init.add("device: xrt::device, elf: xrt::elf, cfg_param: config, mode: hw_context.access_mode")
def _by_elf_with(self: Any, device: Any, artefact: Any, settings: Mapping[str, int], mode: Any) -> None:
    require_open(device, "hw_context(device())")
    _staged(self, device, settings, mode)
    self._context.add(artefact._program)


@_add_config.add("elf: xrt::elf")
def _configure(self: Any, artefact: Any) -> None:
    require_open(self, "hw_context.add_config")
    self._context.add(artefact._program)


@_get_device.add(returns="xrt::device")
def _device_of_context(self: Any) -> Any:
    require_open(self, "hw_context.get_device")
    return open_device()


@_get_uuid.add(returns="pyxrt.uuid")
def _uuid_of_context(self: Any) -> Any:
    require_open(self, "hw_context.get_xclbin_uuid")
    return uuid(NO_UUID)


@_get_xclbin.add(returns="xrt::xclbin")
def _xclbin_of_context(self: Any) -> Any:
    require_open(self, "hw_context.get_xclbin")
    return xclbin()


@_get_mode.add(returns="pyxrt.hw_context.access_mode")
def _mode_of_context(self: Any) -> Any:
    require_open(self, "hw_context.get_mode")
    return hw_context_access_mode(self._mode.value)


_kernel_init = Overloads("__init__", "kernel")
_call = Overloads("__call__", "kernel")
_group_id = Overloads("group_id", "kernel")


@_call.add("*args", returns="pyxrt.run")
def _call_target(self: Any, *args: Any) -> Any:
    raise AssertionError("kernel.__call__ takes any positional arguments without conversion")


@bound("kernel", "Represents a set of instances matching a specified name")
class kernel(pybind11_object):  # noqa: N801 - XRT's name
    """Kernel."""

    __slots__ = ("_context", "_program")
    cu_access_mode = kernel_cu_access_mode
    __init__ = constructor(_kernel_init)
    group_id = method(_group_id, "Get the memory-group identifier for a kernel argument.")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make a run of the positional arguments and start it; what does not convert is left out."""
        if kwargs:
            raise _call.mismatch(self, args, kwargs)
        from npu_twin._xrt.run import run_of

        return run_of(self, args)


export_values(kernel_cu_access_mode, kernel)
_FLOW = "Invalid API called for xrt::kernel creation, xrt::hw_context passed is not created using"


def _by_device(self: Any, device: Any, identity: Any, name: str, mode: Any = None) -> None:
    warnings.warn(
        "kernel(device, uuid, name[, mode]) is deprecated; use kernel(hw_context, name) instead.",
        DeprecationWarning,
        stacklevel=5,
    )
    _by_uuid(self, device, identity)


_kernel_init.add("device: device, uuid: uuid, name: str, mode: kernel.cu_access_mode")(_by_device)
_kernel_init.add("device: device, uuid: uuid, name: str")(_by_device)


@_kernel_init.add("hw_context: hw_context, name: str")
def _by_context(self: Any, handle: Any, name: str) -> None:
    _flow_context(handle)
    raise RuntimeError(f"{_FLOW} XCLBIN")


def _flow_context(handle: Any) -> Context:
    require_open(handle, "kernel(hw_context())")
    context: Context = handle._context
    if context.device is None:
        raise RuntimeError("Hardware Context Handle is not yet created, so cannot determine flow type.")
    return context


@_group_id.add("arg0: i32", returns="int")
def _group(self: Any, index: int) -> int:
    raise RuntimeError(
        "kernel.group_id of a kernel of an ELF context: the real library ends the process with SIGSEGV here"
    )


_ext_init = Overloads("__init__", "ext.kernel")


@bound("ext.kernel", "Extended kernel object for module-backed and shared workflows.")
class ext_kernel(kernel):  # noqa: N801 - XRT's name
    """Kernel of the newer interface."""

    __slots__ = ()
    __init__ = constructor(_ext_init)


@_ext_init.add("hwctx: hw_context, module: module, name: str")
def _by_module(self: Any, handle: Any, code: Any, name: str) -> None:
    _by_context(self, handle, name)


@_ext_init.add("hwctx: hw_context, name: str")
def _by_name(self: Any, handle: Any, name: str) -> None:
    self._context = _flow_context(handle)
    self._program = self._context.find(name)
