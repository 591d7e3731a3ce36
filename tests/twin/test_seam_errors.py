"""Error rows of pyxrt 2.25.0: one row per call that fails, with exception type and exact text."""

from __future__ import annotations

import ctypes
import logging
import pathlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_twin import executor, injection, npu2, pyxrt
from npu_twin.exceptions import DeviceHangError

ext = pyxrt.ext
HOST = pyxrt.bo.host_only
SHARED = pyxrt.hw_context.shared
TO_DEVICE = pyxrt.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE
INT = "typing.SupportsInt | typing.SupportsIndex"
PAST_WRITE = "attempting to write past buffer size: Invalid argument"
PAST_READ = "attempting to read past buffer size: Invalid argument"
SUB = "sub buffer size and offset: Invalid argument"
NO_ELF = "no ELF found with given kernel name in ctx"
FLOW = "Invalid API called for xrt::kernel creation, xrt::hw_context passed is not created using XCLBIN"
STAGED = "Hardware Context Handle is not yet created, so cannot determine flow type."
DOUBLE = "kernel already exists, cannot use this ELF with this hw ctx\n"
LISTED = "Run object belongs to a runlist and cannot be explicitly started: Invalid argument"


class World:
    """One of everything, for the rows to use."""

    def __init__(self, bench: Any, listing: Any, folder: Path) -> None:
        self.d = bench.device
        self.folder = folder
        self.path = bench.path(listing)
        self.elf = pyxrt.elf(self.path)
        self.ctx = pyxrt.hw_context(self.d, self.elf)
        self.staged = pyxrt.hw_context(self.d, {}, SHARED)
        self.k = ext.kernel(self.ctx, "adder")
        self.b = pyxrt.bo(self.d, 64, HOST, 0)
        self.sub = pyxrt.bo(self.b, 16, 16)
        self.run = pyxrt.run(self.k)
        self.member = pyxrt.run(self.k)
        self.list = pyxrt.runlist(self.ctx)
        self.list.add(self.member)

    def file(self, data: bytes) -> str:
        path = self.folder / "file"
        path.write_bytes(data)
        return str(path)


@pytest.fixture
def w(bench: Any, adder: Callable[..., Any], tmp_path: Path) -> World:
    return World(bench, adder(), tmp_path)


Row = tuple[Callable[[World], Any], type[Exception], str]


def runtime(call: Callable[[World], Any], text: str) -> Row:
    return call, RuntimeError, text


ROWS: dict[str, Row] = {
    "device 7": runtime(lambda w: pyxrt.device(7), " No such device with index '7'"),
    "device '9'": runtime(lambda w: pyxrt.device("9"), " No such device with index '9'"),
    "device bdf": runtime(
        lambda w: pyxrt.device("0000:66:00.1"), "No such device '0000:66:00.1': Invalid argument"
    ),
    "device ''": (lambda w: pyxrt.device(""), ValueError, "stoul"),
    "info uuid": runtime(
        lambda w: w.d.get_info(pyxrt.xrt_info_device.interface_uuid), "No such query request (185)"
    ),
    "info kdma": runtime(lambda w: w.d.get_info(pyxrt.xrt_info_device.kdma), "bad any_cast"),
    "info clock": runtime(
        lambda w: w.d.get_info(pyxrt.xrt_info_device.max_clock_frequency_mhz), "No such query request (72)"
    ),
    "info nodma": runtime(lambda w: w.d.get_info(pyxrt.xrt_info_device.nodma), "No such query request (70)"),
    "info offline": runtime(
        lambda w: w.d.get_info(pyxrt.xrt_info_device.offline), "No such query request (180)"
    ),
    "bo normal": runtime(
        lambda w: pyxrt.bo(w.d, 64, pyxrt.bo.normal, 0),
        "unsupported buffer type: none flag (err=95): Operation not supported",
    ),
    "bo default flags": runtime(
        lambda w: pyxrt.bo(w.ctx, 64, 0),
        "unsupported buffer type: none flag (err=95): Operation not supported",
    ),
    **{
        f"bo {flag}": runtime(
            lambda w, flag=flag: pyxrt.bo(w.d, 64, getattr(pyxrt.bo, flag), 0),  # type: ignore[misc]
            "Bad BO type. (err=22): Invalid argument",
        )
        for flag in ("device_only", "p2p", "svm")
    },
    "bo 0": runtime(
        lambda w: pyxrt.bo(w.d, 0, HOST, 0), "mmap_range(len=0) failed (err=-22): Invalid argument"
    ),
    "ext.bo 0": runtime(lambda w: ext.bo(w.d, 0), "mmap_range(len=0) failed (err=-22): Invalid argument"),
    "bo 8 GiB": runtime(
        lambda w: pyxrt.bo(w.d, 1 << 33, HOST, 0),
        "DRM_IOCTL_AMDXDNA_CREATE_BO IOCTL failed (err=-12): Cannot allocate memory",
    ),
    "sub size": runtime(lambda w: pyxrt.bo(w.b, 65, 0), SUB),
    "sub offset": runtime(lambda w: pyxrt.bo(w.b, 64, 1), SUB),
    "sub of sub": runtime(lambda w: pyxrt.bo(w.sub, 16, 8), SUB),
    "sub wrap": runtime(lambda w: pyxrt.bo(w.b, 2, (1 << 64) - 1), SUB),
    "write past": runtime(lambda w: w.b.write(bytes(65), 0), PAST_WRITE),
    "write past offset": runtime(lambda w: w.b.write(b"a", 64), PAST_WRITE),
    "write nothing past": runtime(lambda w: w.b.write(b"", 65), PAST_WRITE),
    "write sub": runtime(lambda w: w.sub.write(bytes(17), 0), PAST_WRITE),
    "write datetime": (
        lambda w: w.b.write(np.zeros(2, "M8[s]"), 0),
        ValueError,
        "cannot include dtype 'M' in a buffer",
    ),
    "read past": runtime(lambda w: w.b.read(65, 0), PAST_READ),
    "read nothing past": runtime(lambda w: w.b.read(0, 65), PAST_READ),
    "sync past": runtime(
        lambda w: w.b.sync(TO_DEVICE, 64, 1),
        "Invalid BO offset and size for sync'ing: 1, 64 (err=22): Invalid argument",
    ),
    "sync wrap": runtime(
        lambda w: w.b.sync(TO_DEVICE, 2, (1 << 64) - 1),
        "Invalid BO offset and size for sync'ing: -1, 2 (err=22): Invalid argument",
    ),
    "sync sub past": runtime(
        lambda w: w.sub.sync(TO_DEVICE, 49, 0),
        "Invalid offset and size when syncing sub buffer: Invalid argument",
    ),
    "elf missing": runtime(
        lambda w: pyxrt.elf("/missing"), "/missing is not found or is not a valid ELF file"
    ),
    "elf host": runtime(
        lambda w: pyxrt.elf(w.file(b"\x7fELF\x02\x01\x01" + bytes(100))),
        "ELF contains unsupported platform OS/ABI: 0",
    ),
    "elf uuid": runtime(
        lambda w: pyxrt.hw_context(w.d, pyxrt.uuid("12345678-1234-1234-1234-123456789abc")),
        "No xclbin with uuid '12345678-1234-1234-1234-123456789abc': Invalid argument",
    ),
    "ctx xclbin missing": runtime(lambda w: pyxrt.hw_context(w.d, "/missing"), "No such file '/missing'"),
    "ctx listing as xclbin": runtime(lambda w: pyxrt.hw_context(w.d, w.path), "Invalid xclbin"),
    "xclbin missing": runtime(lambda w: pyxrt.xclbin("/missing"), "No such file '/missing'"),
    "xclbin relative": runtime(lambda w: pyxrt.xclbin("none"), "No such file or directory 'none'"),
    "xclbin empty": runtime(
        lambda w: pyxrt.xclbin(w.file(b"")), "xclbin: buffer too small to contain header"
    ),
    "xclbin garbage": runtime(lambda w: pyxrt.xclbin(w.file(b"x" * 5000)), "Invalid xclbin"),
    "xclbin torn": runtime(
        lambda w: pyxrt.xclbin(w.file(b"xclbin2\0" + bytes(600))),
        "xclbin: m_length does not match buffer size",
    ),
    "xclbin folder": (
        lambda w: pyxrt.xclbin(str(w.folder)),
        ValueError,
        "cannot create std::vector larger than max_size()",
    ),
    "add twice": runtime(lambda w: w.ctx.add_config(w.elf), DOUBLE),
    "add same kernel": runtime(lambda w: w.ctx.add_config(pyxrt.elf(w.path)), DOUBLE),
    "kernel unknown": runtime(lambda w: ext.kernel(w.ctx, "other"), NO_ELF),
    "kernel unknown:main": runtime(lambda w: ext.kernel(w.ctx, "other:main"), NO_ELF),
    "kernel ''": runtime(lambda w: ext.kernel(w.ctx, ""), NO_ELF),
    "kernel :main": runtime(lambda w: ext.kernel(w.ctx, ":main"), NO_ELF),
    "kernel instance": runtime(
        lambda w: ext.kernel(w.ctx, "adder:other"), "Unable to find group idx for given kernel: adder:other"
    ),
    "kernel instance ''": runtime(
        lambda w: ext.kernel(w.ctx, "adder:"), "Unable to find group idx for given kernel: adder:"
    ),
    "kernel xclbin flow": runtime(lambda w: pyxrt.kernel(w.ctx, "adder"), FLOW),
    "kernel module": runtime(lambda w: ext.kernel(w.ctx, pyxrt.module(w.elf), "adder"), FLOW),
    "kernel staged": runtime(lambda w: ext.kernel(w.staged, "adder"), STAGED),
    "kernel staged xclbin flow": runtime(lambda w: pyxrt.kernel(w.staged, "adder"), STAGED),
    "arg 3": (
        lambda w: w.run.set_arg(3, 5),
        IndexError,
        "vector::_M_range_check: __n (which is 3) >= this->size() (which is 3)",
    ),
    "arg -1": (
        lambda w: w.run.set_arg(-1, w.b),
        IndexError,
        "vector::_M_range_check: __n (which is 18446744073709551615) >= this->size() (which is 3)",
    ),
    "scratchpad": runtime(
        lambda w: w.run.get_ctrl_scratchpad_bo(), "Control scratchpad memory is not present\n"
    ),
    "member start": runtime(lambda w: w.member.start(), LISTED),
    "empty list": runtime(
        lambda w: pyxrt.runlist().add(w.run),
        "cannot add run object to uninitialized runlist: Invalid argument",
    ),
    "axlf": (
        lambda w: w.ctx.get_xclbin().get_axlf(),
        TypeError,
        "Unable to convert function return value to a Python type! The signature was\n"
        "\t(self: pyxrt.xclbin) -> axlf",
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_error_text(row: str, w: World) -> None:
    call, kind, text = ROWS[row]
    with pytest.raises(kind) as caught:
        call(w)
    assert type(caught.value) is kind
    assert str(caught.value) == text


@pytest.mark.parametrize("content", [b"", b"{}", b"{json}" * 100, b"\x7fELF", b"\xff\xfe", b'{"format": 1'])
def test_elf_of_a_bad_file(content: bytes, w: World) -> None:
    path = w.file(content)
    with pytest.raises(RuntimeError) as caught:
        pyxrt.elf(path)
    assert str(caught.value) == f"{path} is not found or is not a valid ELF file"


def test_elf_of_a_torn_listing_gives_the_reason(w: World) -> None:
    text = Path(w.path).read_text()
    with pytest.raises(RuntimeError, match="is not a valid ELF file") as caught:
        pyxrt.elf(w.file(text[: len(text) // 2].encode()))
    assert "not a program listing" in str(caught.value.__cause__)


MISMATCH: dict[str, Callable[[World], Any]] = {
    "device -1": lambda w: pyxrt.device(-1),
    "device None": lambda w: pyxrt.device(None),
    "device float": lambda w: pyxrt.device(1.5),
    "device keyword": lambda w: pyxrt.device(number=0),
    "device two": lambda w: pyxrt.device(0, 1),
    "bo()": lambda w: pyxrt.bo(),
    "bo flag int": lambda w: pyxrt.bo(w.d, 64, 1 << 29, 0),
    "bo -1": lambda w: pyxrt.bo(w.d, -1, HOST, 0),
    "bo float": lambda w: pyxrt.bo(w.d, 64.0, HOST, 0),
    "bo group": lambda w: pyxrt.bo(w.d, 64, HOST, -1),
    "bo None": lambda w: pyxrt.bo(None, 64, HOST, 0),
    "ext.bo()": lambda w: ext.bo(),
    "ext.bo access int": lambda w: ext.bo(w.d, 64, 3),
    "ext.bo sub": lambda w: ext.bo(w.b, 16, 0),
    "ext.bo import": lambda w: ext.bo(w.d, 1, 2),
    "ext.bo userptr": lambda w: ext.bo(w.d, b"abc", 64),
    "write one": lambda w: w.b.write(b"abc"),
    "write keyword": lambda w: w.b.write(data=b"abc", seek=0),
    "write str": lambda w: w.b.write("abc", 0),
    "write list": lambda w: w.b.write([1], 0),
    "write None": lambda w: w.b.write(None, 0),
    "write -1": lambda w: w.b.write(b"a", -1),
    "write float offset": lambda w: w.b.write(b"a", 1.0),
    "write 2**64": lambda w: w.b.write(b"a", 1 << 64),
    "read one": lambda w: w.b.read(4),
    "read -1": lambda w: w.b.read(-1, 0),
    "read keyword": lambda w: w.b.read(size=4, skip=0),
    "sync int": lambda w: w.b.sync(0),
    "sync two": lambda w: w.b.sync(TO_DEVICE, 64),
    "sync keyword": lambda w: w.b.sync(dir=TO_DEVICE),
    "map one": lambda w: w.b.map(1),
    "elf()": lambda w: pyxrt.elf(),
    "elf None": lambda w: pyxrt.elf(None),
    "elf Path": lambda w: pyxrt.elf(pathlib.Path("/x")),
    "elf keyword": lambda w: pyxrt.elf(arg0="/x"),
    "elf bytes, n": lambda w: pyxrt.elf(b"abc", 3),
    "program()": lambda w: pyxrt.program(),
    "module()": lambda w: pyxrt.module(),
    "ctx device": lambda w: pyxrt.hw_context(w.d),
    "ctx mode": lambda w: pyxrt.hw_context(w.d, w.elf, SHARED),
    "ctx config float": lambda w: pyxrt.hw_context(w.d, w.elf, {"gops": 1.5}, SHARED),
    "ctx config only": lambda w: pyxrt.hw_context(w.d, {}),
    "ctx None": lambda w: pyxrt.hw_context(None, w.elf),
    "add_config None": lambda w: w.ctx.add_config(None),
    "kernel()": lambda w: pyxrt.kernel(),
    "ext.kernel None": lambda w: ext.kernel(w.ctx, None),
    "group_id None": lambda w: w.k.group_id(None),
    "call keyword": lambda w: w.k(a=1),
    "run None": lambda w: pyxrt.run(None),
    "run keyword": lambda w: pyxrt.run(arg0=w.k),
    "run context": lambda w: pyxrt.run(w.ctx),
    "set_arg float": lambda w: w.run.set_arg(1, 1.5),
    "set_arg None": lambda w: w.run.set_arg(1, None),
    "set_arg 2**31": lambda w: w.run.set_arg(1, 1 << 31),
    "set_arg -2**31-1": lambda w: w.run.set_arg(1, -(1 << 31) - 1),
    "set_arg keyword": lambda w: w.run.set_arg(index=0, value=w.b),
    "set_arg one": lambda w: w.run.set_arg(0),
    "start one": lambda w: w.run.start(1),
    "wait -1": lambda w: w.run.wait(-1),
    "wait float": lambda w: w.run.wait(1.5),
    "wait 2**32": lambda w: w.run.wait(1 << 32),
    "wait keyword": lambda w: w.run.wait(timeout_ms=1),
    "wait2 limit": lambda w: w.run.wait2(1),
    "add_callback": lambda w: w.run.add_callback(pyxrt.ert_cmd_state(4), print, None),
    "runlist device": lambda w: pyxrt.runlist(w.d),
    "runlist add None": lambda w: w.list.add(None),
    "runlist execute one": lambda w: w.list.execute(1),
    "runlist wait limit": lambda w: w.list.wait(5),
    "register str": lambda w: w.d.register_xclbin("x"),
    "get_info int": lambda w: w.d.get_info(0),
    "uuid()": lambda w: pyxrt.uuid(),
    "uuid int": lambda w: pyxrt.uuid(3),
    "xclbin Path": lambda w: pyxrt.xclbin(pathlib.Path("/x")),
    "log int": lambda w: pyxrt.log_message(6, "a", "b"),
}


@pytest.mark.parametrize("row", MISMATCH)
def test_argument_mismatch(row: str, w: World) -> None:
    with pytest.raises(
        TypeError, match=r"\(\): incompatible (function|constructor) arguments\. The"
    ) as caught:
        MISMATCH[row](w)
    assert "\n\nInvoked with: " in str(caught.value)


def test_mismatch_text_in_full(w: World) -> None:
    with pytest.raises(TypeError) as caught:
        w.b.sync(TO_DEVICE, 64)
    assert str(caught.value) == (
        "sync(): incompatible function arguments. The following argument types are supported:\n"
        f"    1. (self: pyxrt.bo, arg0: pyxrt.xclBOSyncDirection, arg1: {INT}, arg2: {INT}) -> None\n"
        "    2. (self: pyxrt.bo, arg0: pyxrt.xclBOSyncDirection) -> None\n"
        "\n"
        f"Invoked with: {w.b!r}, <xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE: 0>, 64"
    )
    with pytest.raises(TypeError) as caught:
        pyxrt.device(number=0)
    assert str(caught.value) == (
        "__init__(): incompatible constructor arguments. The following argument types are supported:\n"
        "    1. pyxrt.device()\n"
        f"    2. pyxrt.device(index: {INT})\n"
        "    3. pyxrt.device(bdf: str)\n"
        "\n"
        "Invoked with: kwargs: number=0"
    )
    with pytest.raises(TypeError, match=r"chrono\.h>, etc\. Some automatic"):
        w.run.wait2(1)


def test_hw_context_lists_thirteen_overloads(w: World) -> None:
    with pytest.raises(TypeError) as caught:
        pyxrt.hw_context(w.d, w.elf, SHARED)
    lines = str(caught.value).splitlines()
    assert lines[1] == "    1. pyxrt.hw_context()"
    assert lines[12] == "    12. pyxrt.hw_context(device: xrt::device, elf: xrt::elf)"
    assert lines[13].startswith("    13. pyxrt.hw_context(device: xrt::device, elf: xrt::elf, cfg_param: ")


ACCEPTED: dict[str, Callable[[World], Any]] = {
    "device numpy": lambda w: pyxrt.device(np.int64(0)),
    "device bool": lambda w: pyxrt.device(False),
    "device float32 truncates": lambda w: pyxrt.device(np.float32(0.7)),
    "device text": lambda w: pyxrt.device("0"),
    "device bdf": lambda w: pyxrt.device(npu2.BDF),
    "device keyword": lambda w: pyxrt.device(index=0),
    "bo keywords": lambda w: pyxrt.bo(device=w.d, size=64, flags=HOST, group=0),
    "bo context": lambda w: pyxrt.bo(w.ctx, 64, HOST, 0),
    "bo staged": lambda w: pyxrt.bo(w.staged, 64, HOST, 0),
    "bo cacheable": lambda w: pyxrt.bo(w.d, 64, pyxrt.bo.cacheable, 0),
    "bo any group": lambda w: pyxrt.bo(w.d, 64, HOST, (1 << 32) - 1),
    "ext.bo access": lambda w: ext.bo(w.d, 64, ext.read_write | ext.shared),
    "ext.bo keywords": lambda w: ext.bo(device=w.d, size=64, access=ext.read),
    "ext.bo context": lambda w: ext.bo(w.ctx, 64),
    "sub nothing": lambda w: pyxrt.bo(w.b, 0, 64),
    "elf bytes": lambda w: pyxrt.elf(w.path.encode()),
    "module keyword": lambda w: pyxrt.module(elf=w.elf),
    "ctx keywords": lambda w: pyxrt.hw_context(device=w.d, elf=w.elf),
    "ctx config": lambda w: pyxrt.hw_context(w.d, w.elf, {"gops": 1, "unknown": 2}, SHARED),
    "kernel instance": lambda w: ext.kernel(w.ctx, "adder:main"),
    "kernel mlir-air": lambda w: ext.kernel(w.ctx, "main:adder"),
    "kernel keywords": lambda w: ext.kernel(hwctx=w.ctx, name="adder"),
    "runlist keyword": lambda w: pyxrt.runlist(hwctx=w.ctx),
    "add keyword": lambda w: pyxrt.runlist(w.ctx).add(run=w.run),
    "set_arg int": lambda w: w.run.set_arg(1, -(1 << 31)),
    "set_arg numpy": lambda w: w.run.set_arg(1, np.float32(2.5)),
    "write nothing at end": lambda w: w.b.write(b"", 64),
    "sync nothing": lambda w: w.b.sync(TO_DEVICE, 0, 64),
    "sync beyond sub": lambda w: w.sub.sync(TO_DEVICE, 48, 0),
    "log": lambda w: pyxrt.log_message(pyxrt.info, "tag", "text"),
    "register empty": lambda w: w.d.register_xclbin(pyxrt.xclbin()),
}


@pytest.mark.parametrize("row", ACCEPTED)
def test_accepted(row: str, w: World) -> None:
    ACCEPTED[row](w)


def test_return_values(w: World) -> None:
    zero = "00000000-0000-0000-0000-000000000000"
    assert w.ctx.get_xclbin_uuid().to_string() == w.staged.get_xclbin_uuid().to_string() == zero
    assert w.d.get_xclbin_uuid().to_string() == zero
    assert w.ctx.get_mode() == SHARED
    assert pyxrt.hw_context(w.d, {}, pyxrt.hw_context.exclusive).get_mode() == pyxrt.hw_context.exclusive
    assert type(w.ctx.get_device()) is pyxrt.device
    assert w.ctx.get_device() is not w.d
    assert w.ctx.get_xclbin().get_xsa_name() == ""
    assert w.ctx.get_xclbin().get_kernels() == []
    assert pyxrt.program(w.elf).get_partition_size() == 8
    assert pyxrt.enumerate_devices() == 1
    assert w.d.get_info(pyxrt.xrt_info_device.bdf) == npu2.BDF
    assert w.d.get_info(pyxrt.xrt_info_device.m2m) == "0"
    assert "modelled" in w.d.get_info(pyxrt.xrt_info_device.name)
    assert w.d.get_info(pyxrt.xrt_info_device.vmr) == "{\n}\n"
    for query in ("electrical", "thermal", "mechanical", "memory", "platform", "pcie_info", "host"):
        assert w.d.get_info(getattr(pyxrt.xrt_info_device, query)).startswith("{\n")


CRASHES: dict[str, Callable[[World], Any]] = {
    "device().get_info": lambda w: pyxrt.device().get_info(pyxrt.xrt_info_device.bdf),
    "bo(device())": lambda w: pyxrt.bo(pyxrt.device(), 64, HOST, 0),
    "ext.bo(hw_context())": lambda w: ext.bo(pyxrt.hw_context(), 64),
    "hw_context(device())": lambda w: pyxrt.hw_context(pyxrt.device(), w.elf),
    "hw_context(device, xclbin())": lambda w: pyxrt.hw_context(w.d, pyxrt.xclbin()),
    "hw_context().get_mode": lambda w: pyxrt.hw_context().get_mode(),
    "hw_context().add_config": lambda w: pyxrt.hw_context().add_config(w.elf),
    "ext.kernel(hw_context())": lambda w: ext.kernel(pyxrt.hw_context(), "x"),
    "module.get_hw_context": lambda w: pyxrt.module(w.elf).get_hw_context().get_mode(),
    "kernel.group_id": lambda w: w.k.group_id(0),
    "run().state": lambda w: pyxrt.run().state(),
    "run().start": lambda w: pyxrt.run().start(),
    "run().wait": lambda w: pyxrt.run().wait(1),
    "run().set_arg": lambda w: pyxrt.run().set_arg(0, 1),
    "runlist().execute": lambda w: pyxrt.runlist().execute(),
    "runlist().wait": lambda w: pyxrt.runlist().wait(),
    "runlist(hw_context())": lambda w: pyxrt.runlist(pyxrt.hw_context()),
    "runlist.add(run())": lambda w: pyxrt.runlist(w.ctx).add(pyxrt.run()),
}


@pytest.mark.parametrize("row", CRASHES)
def test_where_the_real_library_crashes_the_twin_raises(row: str, w: World) -> None:
    with pytest.raises(RuntimeError, match="the real library ends the process with SIGSEGV here"):
        CRASHES[row](w)


@pytest.mark.parametrize("wait", [lambda r: r.wait(), lambda r: r.wait(5), lambda r: r.wait2()])
def test_wait_before_the_first_start(wait: Callable[[Any], Any], w: World) -> None:
    with pytest.raises(DeviceHangError, match="never started"):
        wait(w.run)
    with pytest.raises(DeviceHangError, match="belongs to a runlist"):
        wait(w.member)


def test_deprecated_calls_warn_at_the_caller(w: World) -> None:
    identity = pyxrt.uuid("12345678-1234-1234-1234-123456789abc")
    with (
        pytest.warns(
            DeprecationWarning, match=r"kernel\(device, uuid, name\[, mode\]\) is deprecated"
        ) as seen,
        pytest.raises(RuntimeError, match="No xclbin with uuid"),
    ):
        pyxrt.kernel(w.d, identity, "k")
    assert seen[0].filename == __file__
    with (
        pytest.warns(DeprecationWarning, match=r"pyxrt\.device\.load_xclbin\(\) is deprecated") as seen,
        pytest.raises(RuntimeError, match="xrtDeviceLoadXclbin failed in load_xclbin compatibility shim"),
    ):
        w.d.load_xclbin(pyxrt.xclbin())
    assert seen[0].filename == __file__


def test_contexts_are_limited_and_given_back(bench: Any, adder: Callable[..., Any]) -> None:
    held = [bench.kernel(adder(f"k{i}")) for i in range(npu2.MAX_HW_CONTEXTS)]
    with pytest.raises(RuntimeError) as caught:
        bench.kernel(adder("one_more"))
    assert str(caught.value) == "DRM_IOCTL_AMDXDNA_CREATE_HWCTX IOCTL failed (err=-22): Invalid argument"
    held.pop()
    held.append(bench.kernel(adder("one_more")))
    held.clear()
    assert bench.npu.contexts == 0


def test_several_elfs_in_one_context(bench: Any, adder: Callable[..., Any]) -> None:
    context = pyxrt.hw_context(bench.device, {}, SHARED)
    assert bench.npu.contexts == 0
    for name in ("one", "two", "three"):
        context.add_config(pyxrt.elf(bench.path(adder(name))))
    assert bench.npu.contexts == 1
    assert ext.kernel(context, "two") is not None


@pytest.mark.parametrize("errno", [5, 12, 16, 22])
def test_refused_start(errno: int, bench: Any, adder: Callable[..., Any]) -> None:
    run = bench.run(adder())
    with (
        injection.fail_submit(errno),
        pytest.raises(RuntimeError, match=rf"EXEC_CMD IOCTL failed \(err=-{errno}\)"),
    ):
        run.start()
    run.start()
    assert run.wait(10) == pyxrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED


def test_driver_error_text() -> None:
    assert (
        executor.driver_error("EXEC_CMD", 22)
        == "DRM_IOCTL_AMDXDNA_EXEC_CMD IOCTL failed (err=-22): Invalid argument"
    )


def test_capsules_are_refused(w: World) -> None:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    data = ctypes.create_string_buffer(64)
    capsule = new(ctypes.addressof(data), None, None)
    with pytest.raises(RuntimeError, match=r"CREATE_BO IOCTL failed \(err=-95\): Operation not supported"):
        ext.bo(w.d, capsule, 64)
    with pytest.raises(RuntimeError, match=r"^not valid ELF data$"):
        pyxrt.elf(capsule, 64)


def test_log_message_goes_to_logging(npu: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="npu_twin.xrt"):
        pyxrt.log_message(pyxrt.warning, "tag", "careful")
    [record] = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.WARNING, "[tag] careful")
