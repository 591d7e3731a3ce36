"""Enums of pyxrt 2.25.0: names, values and which of them compare equal to plain ints."""

from __future__ import annotations

from typing import Any

from npu_twin._xrt.pybind import Overloads, classes, enum, method

bo_flags: Any = enum(
    "bo.flags",
    "Buffer object creation flags",
    {
        "normal": 0,
        "cacheable": 1 << 24,
        "device_only": 1 << 28,
        "host_only": 1 << 29,
        "p2p": 1 << 30,
        "svm": 1 << 27,
    },
)

hw_context_access_mode: Any = enum(
    "hw_context.access_mode", "Hardware context access mode", {"exclusive": 0, "shared": 1}
)

kernel_cu_access_mode: Any = enum(
    "kernel.cu_access_mode", "Compute unit access mode", {"exclusive": 0, "shared": 1, "none": 2}
)

xclBOSyncDirection: Any = enum(  # noqa: N816 - XRT's name
    "xclBOSyncDirection",
    "DMA flags used with DMA API",
    {
        "XCL_BO_SYNC_BO_TO_DEVICE": 0,
        "XCL_BO_SYNC_BO_FROM_DEVICE": 1,
        "XCL_BO_SYNC_BO_GMIO_TO_AIE": 2,
        "XCL_BO_SYNC_BO_AIE_TO_GMIO": 3,
    },
    int_equal=True,
)

ert_cmd_state: Any = enum(
    "ert_cmd_state",
    "Kernel execution status",
    {
        "ERT_CMD_STATE_NEW": 1,
        "ERT_CMD_STATE_QUEUED": 2,
        "ERT_CMD_STATE_COMPLETED": 4,
        "ERT_CMD_STATE_ERROR": 5,
        "ERT_CMD_STATE_ABORT": 6,
        "ERT_CMD_STATE_SUBMITTED": 7,
        "ERT_CMD_STATE_TIMEOUT": 8,
        "ERT_CMD_STATE_NORESPONSE": 9,
        "ERT_CMD_STATE_SKERROR": 10,
        "ERT_CMD_STATE_SKCRASHED": 11,
    },
    int_equal=True,
)

xrt_info_device: Any = enum(
    "xrt_info_device",
    "Device feature and sensor information",
    {
        "bdf": 0,
        "interface_uuid": 1,
        "kdma": 2,
        "max_clock_frequency_mhz": 3,
        "m2m": 4,
        "name": 5,
        "nodma": 6,
        "offline": 7,
        "electrical": 8,
        "thermal": 9,
        "mechanical": 10,
        "memory": 11,
        "platform": 12,
        "pcie_info": 13,
        "host": 14,
        "dynamic_regions": 17,
        "vmr": 18,
    },
)

xrt_msg_level: Any = enum(
    "xrt_msg_level",
    "XRT log msgs level",
    {
        "emergency": 0,
        "alert": 1,
        "critical": 2,
        "error": 3,
        "warning": 4,
        "notice": 5,
        "info": 6,
        "debug": 7,
    },
)

ext_access_mode: Any = enum(
    "ext.access_mode",
    "External buffer access mode",
    {
        "none": 0,
        "read": 1,
        "write": 2,
        "read_write": 3,
        "local": 0,
        "shared": 4,
        "process": 8,
        "hybrid": 16,
    },
)


def _combining(name: str, combine: Any) -> Any:
    overloads = Overloads(name, "ext.access_mode")

    @overloads.add("arg0: ext.access_mode", returns="pyxrt.ext.access_mode")
    def _apply(self: Any, other: Any) -> Any:
        return ext_access_mode(combine(self.value, other.value))

    return method(overloads, "Combine access modes.")


for _name, _combine in {"or": int.__or__, "and": int.__and__}.items():
    setattr(ext_access_mode, f"__{_name}__", _combining(f"__{_name}__", _combine))
    setattr(ext_access_mode, f"__i{_name}__", _combining(f"__i{_name}__", _combine))

_new = object.__new__


def command_state(value: int) -> Any:
    """A new ``ert_cmd_state`` object, as the real calls return one."""
    state = _new(ert_cmd_state)
    state._value = value
    state._constructed = True
    return state


def export_values(enumeration: Any, target: Any) -> None:
    """Make the values of an enum attributes of its parent, too (``bo.host_only``)."""
    for name in enumeration._members:
        setattr(target, name, getattr(enumeration, name))


def is_a(name: str, value: object) -> bool:
    """Whether ``value`` is an instance of the bound class of that name."""
    return isinstance(value, classes[name])
