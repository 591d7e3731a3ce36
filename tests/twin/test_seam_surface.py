"""The names, signatures, enums and object model of pyxrt 2.25.0, as rows.

The expected values were read off the real module (Debian python3-xrt 2.25.0-4); nothing here is computed by
the code under test.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from npu_twin import pyxrt

ext = pyxrt.ext

MODULE_NAMES = (
    "XCL_BO_FLAGS_NONE alert bo critical debug device "
    "elf emergency enumerate_devices error ert_cmd_state ext "
    "hw_context info kernel log_message module notice "
    "program run runlist uuid warning xclBOSyncDirection "
    "xclbin xclbinip_vector xclbinkernel_vector xclbinmem_vector xrt_info_device xrt_msg_level "
)

MEMBERS = {
    "bo": "address cacheable device_only flags host_only map normal p2p read size svm sync write",
    "device": "get_info get_xclbin_uuid load_xclbin register_xclbin",
    "hw_context": "access_mode add_config exclusive get_device get_mode get_xclbin get_xclbin_uuid shared",
    "kernel": "cu_access_mode exclusive group_id none shared",
    "run": "add_callback get_ctrl_scratchpad_bo set_arg start state wait wait2",
    "runlist": "add execute wait",
    "uuid": "to_string",
    "elf": "",
    "module": "get_hw_context",
    "program": "get_partition_size",
    "xclbin": "get_axlf get_kernels get_mems get_uuid get_xsa_name xclbinip xclbinkernel xclbinmem",
    "ext": "access_mode bo hybrid kernel local none process read read_write shared write",
}

ENUMS: dict[str, tuple[dict[str, int], bool]] = {
    "bo.flags": (
        {
            "normal": 0,
            "cacheable": 16777216,
            "device_only": 268435456,
            "host_only": 536870912,
            "p2p": 1073741824,
            "svm": 134217728,
        },
        False,
    ),
    "hw_context.access_mode": ({"exclusive": 0, "shared": 1}, False),
    "kernel.cu_access_mode": ({"exclusive": 0, "shared": 1, "none": 2}, False),
    "ext.access_mode": (
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
        False,
    ),
    "xclBOSyncDirection": (
        {
            "XCL_BO_SYNC_BO_TO_DEVICE": 0,
            "XCL_BO_SYNC_BO_FROM_DEVICE": 1,
            "XCL_BO_SYNC_BO_GMIO_TO_AIE": 2,
            "XCL_BO_SYNC_BO_AIE_TO_GMIO": 3,
        },
        True,
    ),
    "ert_cmd_state": (
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
        True,
    ),
    "xrt_info_device": (
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
        False,
    ),
    "xrt_msg_level": (
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
        False,
    ),
}


def named(path: str) -> Any:
    found: Any = pyxrt
    for part in path.split("."):
        found = getattr(found, part)
    return found


def public(found: Any) -> list[str]:
    return [name for name in dir(found) if not name.startswith("_")]


def test_module_names() -> None:
    assert public(pyxrt) == MODULE_NAMES.split()
    assert pyxrt.XCL_BO_FLAGS_NONE == 0
    assert not hasattr(pyxrt, "__version__")
    assert pyxrt.error == pyxrt.xrt_msg_level.error


@pytest.mark.parametrize("path", MEMBERS)
def test_member_names(path: str) -> None:
    assert public(named(path)) == MEMBERS[path].split()


@pytest.mark.parametrize("path", ENUMS)
def test_enum_values(path: str) -> None:
    kind = named(path)
    values, _ = ENUMS[path]
    assert {name: int(value) for name, value in kind.__members__.items()} == values
    for name, value in values.items():
        member = getattr(kind, name)
        assert type(member) is kind
        assert (member.value, int(member), hash(member)) == (value, value, hash(value))
        first = next(n for n, v in values.items() if v == value)
        assert repr(member) == f"<{kind.__name__}.{first}: {value}>"
        assert str(member) == f"{member}" == f"{kind.__name__}.{first}"
        if path != "xrt_info_device":
            assert member.name == first
        assert kind(value) == member
        assert kind(value) is not member
        assert pickle.loads(pickle.dumps(member)) == member
        assert copy.copy(member) == member


@pytest.mark.parametrize("path", ENUMS)
def test_enum_is_no_int(path: str) -> None:
    kind = named(path)
    values, int_equal = ENUMS[path]
    value = max(values.values())
    member = kind(value)
    assert not isinstance(member, int)
    assert (member == value) is int_equal
    assert (member != value) is not int_equal
    assert member != None  # noqa: E711
    assert member != "x"
    with pytest.raises(TypeError):
        list(kind)
    with pytest.raises(TypeError):
        kind["x"]
    with pytest.raises(TypeError):
        _ = member < member
    for wrong in (-1, 1.5, "x", None, 1 << 32):
        with pytest.raises(TypeError, match=r"__init__\(\): incompatible constructor arguments"):
            kind(wrong)
    assert repr(kind(1 << 20)).endswith(".???: 1048576>")
    with pytest.raises(AttributeError):
        member.other = 1


def test_enum_equality_is_with_plain_ints_only() -> None:
    state, direction = pyxrt.ert_cmd_state, pyxrt.xclBOSyncDirection
    assert state(4) == 4
    assert 4 == state(4)  # noqa: SIM300 - the reflected comparison is the point
    assert state(1) == True  # noqa: E712
    assert (state(4) == np.int64(4)) is False
    assert (state(4) == 4.0) is False
    assert (state(1) == direction(1)) is False
    assert state(3).name == "???"


def test_a_member_called_name_hides_the_property() -> None:
    assert pyxrt.xrt_info_device.bdf.name == pyxrt.xrt_info_device.name


def test_exported_values() -> None:
    assert pyxrt.bo.host_only == pyxrt.bo.flags.host_only
    assert pyxrt.hw_context.shared == pyxrt.hw_context.access_mode.shared
    assert pyxrt.kernel.none == pyxrt.kernel.cu_access_mode.none
    assert ext.local == ext.access_mode.none


def test_access_mode_operators() -> None:
    assert repr(ext.read | ext.write) == "<access_mode.read_write: 3>"
    assert repr(ext.read_write & ext.read) == "<access_mode.read: 1>"
    assert repr(ext.read | ext.shared) == "<access_mode.???: 5>"
    with pytest.raises(TypeError, match=r"__or__\(\): incompatible function arguments"):
        ext.read | 1
    for kind in (pyxrt.bo.flags, pyxrt.hw_context.access_mode, pyxrt.ert_cmd_state):
        with pytest.raises(TypeError):
            kind(0) | kind(1)


def test_objects_are_closed() -> None:
    device = pyxrt.device(0)
    assert repr(device).startswith("<pyxrt.device object at 0x")
    assert not hasattr(device, "__dict__")
    assert not hasattr(device, "__enter__")
    with pytest.raises(AttributeError):
        device.x = 1
    for spoil in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"cannot pickle 'pyxrt\.device' object"):
            spoil(device)


def test_subclasses() -> None:
    class Mine(pyxrt.bo):  # type: ignore[misc]
        pass

    class Broken(pyxrt.bo):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

    buffer = Mine(pyxrt.device(0), 64, pyxrt.bo.host_only, 0)
    assert isinstance(buffer, pyxrt.bo)
    assert buffer.size() == 64
    with pytest.raises(TypeError, match=r"pyxrt\.bo\.__init__\(\) must be called when overriding __init__"):
        Broken()


def test_class_relations() -> None:
    assert issubclass(ext.bo, pyxrt.bo)
    assert issubclass(ext.kernel, pyxrt.kernel)
    assert repr(ext.bo(pyxrt.device(0), 64)).startswith("<pyxrt.ext.bo object at 0x")
    assert isinstance(ext.bo(pyxrt.device(0), 64), pyxrt.bo)


def test_uuid() -> None:
    text = "12345678-1234-1234-1234-123456789aBC"
    assert pyxrt.uuid(text).to_string() == text.lower()
    assert pyxrt.uuid(text.encode()).to_string() == text.lower()
    zero = "00000000-0000-0000-0000-000000000000"
    assert pyxrt.uuid("").to_string() == pyxrt.uuid("nonsense").to_string() == zero
    assert pyxrt.uuid(text) != pyxrt.uuid(text)
    with pytest.raises(RuntimeError, match="basic_string: construction from null is not valid"):
        pyxrt.uuid(None)


def test_vectors() -> None:
    kernel = pyxrt.xclbin.xclbinkernel
    vector = pyxrt.xclbinkernel_vector()
    assert (len(vector), bool(vector), list(vector)) == (0, False, [])
    vector.append(kernel())
    vector.extend([kernel()])
    vector.insert(0, kernel())
    assert len(vector) == len(list(vector)) == len(vector[0:3]) == 3
    del vector[0]
    vector[0] = kernel()
    assert type(vector.pop()) is kernel
    vector.clear()
    with pytest.raises(IndexError) as caught:
        vector.pop()
    assert str(caught.value) == ""
    with pytest.raises(TypeError, match=r"append\(\): incompatible function arguments"):
        vector.append(1)
    with pytest.raises(TypeError):
        vector.extend([pyxrt.xclbin.xclbinmem()])


def test_import_is_light() -> None:
    """The seam must not pull in torch, nor anything of the layers above."""
    code = (
        "import sys, npu_twin.pyxrt as p; p.device(0); "
        "bad = {'torch', 'transformers', 'llms', 'pytest_npu', 'kernel_registry'} & set(sys.modules); "
        "assert not bad, bad; import npu_twin.pyxrt.ext"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
