"""Run the conformance rows against one pyxrt and print what every row gives, as JSON.

Usage: python3 probe.py MODULE ARTEFACTS ROWS_FOLDER
    MODULE     pyxrt or npu_twin.pyxrt
    ARTEFACTS  folder with full.elf, nouid.elf (and npu.xclbin, txn.bin on the real library)

Every group of rows is a file GROUP.rows of the folder: one row of Python per line. `! ` starts a line of
set-up, `#` a comment, and `    ~ DEVIATION | PATTERN` after a row says that the twin differs there on purpose
(see conformance.py). The value of a row's last expression is its outcome, or the exception, or the signal
that ended the process: every row runs in a process of its own, forked from one that has done the set-up of
its group. Needs numpy only.
"""

from __future__ import annotations

import array
import ast
import contextlib
import copy
import gc
import importlib
import json
import os
import pathlib
import pickle
import re
import signal
import sys
import tempfile
import traceback
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

#: Seconds after which a row counts as hanging; the longest legitimate one sleeps 0.2 s.
ROW_LIMIT_S = 1.5
UUID = "12345678-1234-1234-1234-123456789abc"
NO_UUID = "00000000-0000-0000-0000-000000000000"
MAX_TEXT = 4000


class RealDevice:
    """Faults of the kernel stand-in, through its environment."""

    states: ClassVar = {
        "COMPLETED": 4,
        "ERROR": 5,
        "ABORT": 6,
        "TIMEOUT": 8,
        "NORESPONSE": 9,
        "SKERROR": 10,
        "SKCRASHED": 11,
    }
    ioctls: ClassVar = {
        "CREATE_HWCTX": 0x40,
        "CREATE_BO": 0x43,
        "SYNC_BO": 0x45,
        "EXEC_CMD": 0x46,
        "WAIT_CMD": 0x49,
    }

    def end_in(self, state: str) -> None:
        """Every command ends in this state."""
        os.environ["FX_STATE"] = str(self.states[state])

    def slow(self, milliseconds: int) -> None:
        """Every command takes that long."""
        os.environ["FX_DELAY_MS"] = str(milliseconds)

    def never(self) -> None:
        """No command ever ends."""
        self.slow(-1)

    def refuse(self, ioctl: str, errno: int) -> None:
        """The driver refuses this ioctl."""
        os.environ["FX_FAIL"] = f"{self.ioctls[ioctl]:x}:{errno}"

    def most_contexts(self, limit: int) -> None:
        """The driver opens that many contexts at most."""
        os.environ["FX_MAX_CONTEXTS"] = str(limit)


class TwinDevice:
    """The same on the twin; what it cannot be told to do is a listed deviation."""

    def __init__(self) -> None:
        self._planted = contextlib.ExitStack()

    def _plant(self, name: str, *values: Any) -> None:
        from npu_twin import injection

        self._planted.enter_context(getattr(injection, name)(*values))

    def end_in(self, state: str) -> None:
        """See RealDevice."""
        self._planted.close()
        self._plant("force_state", state)

    def slow(self, milliseconds: int) -> None:
        """See RealDevice."""
        self._plant("delay", milliseconds * 1e3)

    def never(self) -> None:
        """See RealDevice."""
        self._plant("never_complete")

    def refuse(self, ioctl: str, errno: int) -> None:
        """See RealDevice; only submissions can be refused."""
        if ioctl == "EXEC_CMD":
            self._plant("fail_submit", errno)

    def most_contexts(self, limit: int) -> None:
        """The twin's own limit."""
        from npu_twin import npu2

        assert limit == npu2.MAX_HW_CONTEXTS


def twin_artefacts(folder: pathlib.Path) -> None:
    """Write the artefacts that stand for those of the real library: kernel DPU with three buffers."""
    from npu_twin.listing import Argument, Launch, Listing, Operand

    arguments = (Argument("a", (16,)), Argument("b", (16,)), Argument("c", (16,), role="output"))
    operands = {"a": Operand("a"), "b": Operand("b"), "out": Operand("c")}
    launch = Launch("add", "eltwise_add", {"n": 16}, operands, tile={"tile": 16})
    text = Listing("DPU", arguments, (launch,), options={"columns": 4}).to_json()
    for name in ("full.elf", "nouid.elf"):
        (folder / name).write_text(text, encoding="utf-8")


def namespace(module: str, artefacts: pathlib.Path, scratch: pathlib.Path) -> dict[str, Any]:
    """The names a row can use."""
    pyxrt: Any = importlib.import_module(module)
    device = pyxrt.device(0)
    control: Any = TwinDevice() if module != "pyxrt" else RealDevice()

    def bo(size: Any = 64, flags: Any = pyxrt.bo.host_only, group: Any = 0) -> Any:
        return pyxrt.bo(device, size, flags, group)

    def context() -> Any:
        return pyxrt.hw_context(device, pyxrt.elf(str(artefacts / "full.elf")))

    def file(name: str, data: bytes) -> str:
        (scratch / name).write_bytes(data)
        return str(scratch / name)

    def message(call: Callable[[], Any]) -> str:
        try:
            call()
        except Exception as error:
            return str(error)
        return "no error"

    def warned(call: Callable[[], Any]) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            text = message(call)
        return [*(f"{w.category.__name__}: {w.message}" for w in caught), text]

    xclbin, code = artefacts / "npu.xclbin", artefacts / "txn.bin"
    return {
        "pyxrt": pyxrt,
        "np": np,
        "d": device,
        "e": pyxrt.ext,
        "H": pyxrt.bo.host_only,
        "S": pyxrt.ert_cmd_state,
        "D": pyxrt.xclBOSyncDirection,
        "bo": bo,
        "context": context,
        "kernel": lambda made: pyxrt.ext.kernel(made, "DPU:main"),
        "file": file,
        "message": message,
        "warned": warned,
        "FULL": str(artefacts / "full.elf"),
        "NOUID": str(artefacts / "nouid.elf"),
        "NOCONFIG": str(artefacts / "noconfig.elf"),
        "SCALAR": str(artefacts / "scalar.elf"),
        "XCLBIN": str(xclbin) if xclbin.exists() else None,
        "TXN": code.read_bytes() if code.exists() else b"",
        "TMP": str(scratch),
        "UUID": UUID,
        "NO_UUID": NO_UUID,
        "MAGIC": b"xclbin2\0",
        "NINE": (object,) * 9,
        **{name: getattr(control, name) for name in ("end_in", "slow", "never", "refuse", "most_contexts")},
        **{m.__name__: m for m in (array, copy, gc, json, os, pathlib, pickle, weakref)},
    }


def describe(value: Any) -> str:
    """A value as text: type and repr."""
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"returns {name}: {value!r}"


def evaluate(code: str, names: dict[str, Any]) -> str:
    """Run one row; its outcome as text."""
    tree = ast.parse(code)
    last = tree.body.pop()
    try:
        exec(compile(tree, "row", "exec"), names)
        if not isinstance(last, ast.Expr):
            exec(compile(ast.Module([last], []), "row", "exec"), names)
            return "returns NoneType: None"
        return describe(eval(compile(ast.Expression(last.value), "row", "eval"), names))
    except SystemExit:
        raise
    except BaseException as error:
        if os.environ.get("PROBE_TRACE"):
            traceback.print_exc()
        return f"raises {type(error).__name__}: {error}"


def normal(text: str, replacements: dict[str, str]) -> str:
    """Leave out what differs from one process to the next: addresses and folders."""
    for old, new in replacements.items():
        text = text.replace(old, new)
    text = text.replace("npu_twin.pyxrt", "pyxrt")
    text = re.sub(r"used \d+ kB", "used ... kB", text)
    return re.sub(r"0x[0-9a-f]{6,}", "0x...", text)[:MAX_TEXT]


def in_child(work: Callable[[], str]) -> str:
    """Run `work` in a forked process with a time limit and return its text, or how the process ended."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.setitimer(signal.ITIMER_REAL, ROW_LIMIT_S)
        text = work()
        os.write(writer, text.encode("utf-8", "backslashreplace"))
        os._exit(0)  # no finalisers: what they do is a row of its own
    os.close(writer)
    chunks = []
    while chunk := os.read(reader, 65536):
        chunks.append(chunk)
    os.close(reader)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return "hangs" if number == signal.SIGALRM else f"dies: {signal.Signals(number).name}"
    return b"".join(chunks).decode()


def run_group(path: pathlib.Path, module: str, artefacts: pathlib.Path) -> dict[str, str]:
    """Run the rows of one file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.strip() and not line.startswith(("#", "!", " "))]
    outcomes = {}
    with tempfile.TemporaryDirectory() as scratch:
        names = namespace(module, artefacts, pathlib.Path(scratch))
        exec("\n".join(line[2:] for line in lines if line.startswith("! ")), names)
        replacements = {scratch: "<tmp>", str(artefacts): "<artefacts>"}
        for code in rows:
            outcomes[code] = in_child(lambda code=code: normal(evaluate(code, names), replacements))  # type: ignore[misc]
        sys.stdout.flush()
    return outcomes


def main(module: str, artefacts: str, rows: str) -> None:
    """Print {"python", "groups": {group: {row: outcome}}}."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(artefacts if artefacts != "-" else made)
        if module != "pyxrt":
            twin_artefacts(folder)
        groups = {}
        for path in sorted(pathlib.Path(rows).glob("*.rows")):
            text = in_group(path, module, folder)
            groups[path.stem] = json.loads(text)
        print(json.dumps({"python": sys.version.split()[0], "groups": groups}))


def in_group(path: pathlib.Path, module: str, folder: pathlib.Path) -> str:
    """Run a group in a process of its own, so that no group sees the device state of another."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            data = json.dumps(run_group(path, module, folder)).encode()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        while data:
            data = data[os.write(writer, data) :]
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode()
    if os.waitpid(pid, 0)[1] != 0:
        raise SystemExit(f"the set-up of {path.name} failed")
    return text


if __name__ == "__main__":
    main(*sys.argv[1:])
