"""The twin against what the real pyxrt 2.25.0 gave when the rows were recorded; needs no XRT.

`make conformance` runs the same rows on the real library and so checks the record, too.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import conformance
import pytest
import run_conformance
import xrt_sandbox

ALL = conformance.load_rows()


@pytest.fixture(scope="module")
def twin(say: list[str]) -> conformance.Outcomes:
    outcomes = conformance.twin_outcomes()
    say.append(conformance.summary(ALL, conformance.recorded_outcomes(), outcomes, "recorded XRT 2.25.0"))
    return outcomes


def test_twin_is_as_recorded(twin: conformance.Outcomes) -> None:
    listed, real = conformance.deviation_ids(), conformance.recorded_outcomes()
    problems = [conformance.judge(row, real, twin, listed) for row in ALL]
    assert not any(problems), "\n".join(filter(None, problems))


def test_the_record_has_exactly_the_rows() -> None:
    recorded = {(group, code) for group, rows in conformance.recorded_outcomes().items() for code in rows}
    assert recorded == {(row.group, row.code) for row in ALL}


PLANTED = {
    "signature": (
        "from npu_twin import pyxrt; from npu_twin._xrt import buffer; o = buffer._write._overloads; "
        "o[0] = o[0]._replace(parameters=o[0].parameters[:1])",
        "signatures: bo(64).write(*NINE)",
    ),
    "enum value": (
        "from npu_twin import pyxrt; S = pyxrt.ert_cmd_state; S._members['ERT_CMD_STATE_ABORT'] = 7; "
        "S.ERT_CMD_STATE_ABORT._value = 7",
        "enums: pyxrt.ert_cmd_state.__members__",
    ),
    "error text": (
        "from npu_twin._xrt import device; device._LOAD_FAILED = 'cannot load'",
        "device: d.load_xclbin(pyxrt.xclbin())",
    ),
    "return type": (
        "from npu_twin import pyxrt; pyxrt.bo.read = lambda self, size, offset: bytes(size)",
        "buffers: type(b.read(4, 0))",
    ),
    "state": (
        "from npu_twin._xrt import run; run.TIMEOUT = 5",
        "runs: never(); r = run(); r.start(); r.wait(20), r.state(), r.wait(20)",
    ),
    "name of a keyword": (
        "from npu_twin._xrt import buffer; o = buffer._init._overloads; p = list(o[0].parameters); "
        "p[1] = p[1]._replace(name='nbytes'); o[0] = o[0]._replace(parameters=tuple(p))",
        "buffers: pyxrt.bo(device=d, size=64, flags=H, group=0)",
    ),
    "keyword where there is none": (
        "from npu_twin._xrt import buffer; o = buffer._read._overloads; p = list(o[0].parameters); "
        "p = [p[0]._replace(name='size', keyword=True), p[1]._replace(name='skip', keyword=True)]; "
        "o[0] = o[0]._replace(parameters=tuple(p))",
        "buffers: b.read(size=4, skip=0)",
    ),
    "property for a method": (
        "from npu_twin import pyxrt; pyxrt.bo.size = property(lambda self: self._nbytes)",
        "buffers: b.size()",
    ),
    "method for a property": (
        "from npu_twin._xrt import pybind; pybind._Enum.value = lambda self: int(self._value)",
        "enums: S(3), S(3).name, S(3).value",
    ),
    "repr": (
        "from npu_twin._xrt import pybind; pybind._Enum.__repr__ = lambda self: f'<{self._label()}>'",
        "enums: S.ERT_CMD_STATE_NEW",
    ),
    "str": (
        "from npu_twin._xrt import pybind; pybind._Enum.__str__ = lambda self: self._label()",
        "enums: str(S.ERT_CMD_STATE_NEW)",
    ),
    "class of an exception": (
        "from npu_twin._xrt import buffer\n"
        "def put(self, data, offset, real=buffer._put):\n"
        "    try:\n"
        "        return real(self, data, offset)\n"
        "    except RuntimeError as error:\n"
        "        raise ValueError(str(error)) from None\n"
        "buffer._put = put",
        "buffers: b.write(bytes(65), 0)",
    ),
    "number for a state": (
        "from npu_twin import pyxrt; pyxrt.run.state = lambda self: 4",
        "runs: done().state()",
    ),
    "equal to a number": (
        "from npu_twin import pyxrt; type(pyxrt.info)._int_equal = True",
        "enums: pyxrt.info == 6, pyxrt.xrt_info_device.name == 5",
    ),
    "name too many": (
        "from npu_twin import pyxrt; pyxrt.runlist.wait2 = pyxrt.runlist.wait",
        'signatures: [n for n in dir(pyxrt.runlist) if n[0] != "_"]',
    ),
    "name too few": (
        "from npu_twin import pyxrt; del pyxrt.run.wait2",
        'signatures: [n for n in dir(pyxrt.run) if n[0] != "_"]',
    ),
    "identity of values": (
        "from npu_twin import pyxrt; pyxrt.uuid.__eq__ = lambda self, other: True; "
        "pyxrt.uuid.to_string = lambda self: '0'",
        "device: pyxrt.uuid(UUID).to_string()",
    ),
}


@pytest.mark.parametrize("defect", PLANTED)
def test_a_planted_defect_shows(defect: str, tmp_path: Path) -> None:
    """Change one thing of the twin: the row that is about it fails."""
    prelude, expected = PLANTED[defect]
    group = expected.partition(": ")[0]
    (tmp_path / f"{group}.rows").write_bytes((conformance.ROWS / f"{group}.rows").read_bytes())
    rows = [row for row in ALL if row.group == group]
    outcomes = conformance.twin_outcomes(tmp_path, prelude=prelude)
    real, listed = conformance.recorded_outcomes(), conformance.deviation_ids()
    failing = {row.id for row in rows if conformance.judge(row, real, outcomes, listed)}
    assert expected in failing


def test_an_unlisted_deviation_is_no_excuse() -> None:
    row = conformance.Row("g", "x", "made-up", ".*")
    assert "does not list" in conformance.judge(row, {"g": {"x": "1"}}, {"g": {"x": "2"}}, {"poison"})
    row = conformance.Row("g", "x", "poison", "3")
    assert "promises" in conformance.judge(row, {"g": {"x": "1"}}, {"g": {"x": "2"}}, {"poison"})
    assert "no outcome" in conformance.judge(row, {"g": {}}, {"g": {"x": "2"}}, {"poison"})


def test_another_release_in_the_archive_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The twin is judged against the record then, and nothing of ours is called a failure."""
    called: list[list[str]] = []
    moved = xrt_sandbox.Sandbox(Path("/nowhere"), "2.26.1-1")
    monkeypatch.setattr(xrt_sandbox, "prepare", lambda: moved)
    monkeypatch.setattr(subprocess, "call", lambda command, **options: called.append(command) or 0)
    assert run_conformance.main([]) == 0
    assert [Path(name).name for name in called[0] if name.endswith(".py")] == ["test_conformance_recorded.py"]
    said = capsys.readouterr().out
    assert (
        "NOT JUDGED ON THE REAL LIBRARY: the Debian archive has XRT 2.26.1-1, the rows are of XRT 2.25"
        in said
    )
    assert "NPU_RECORD=1" in said


def test_a_machine_without_a_sandbox_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert run_conformance.main([]) == 3
    assert "conformance cannot run here: the sandbox needs root" in capsys.readouterr().err
