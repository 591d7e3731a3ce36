"""The twin's compiler: what it refuses, what it lets through, and what the device then does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from npu_twin import constraints, pyxrt
from npu_twin.compiler import compile_program
from npu_twin.exceptions import CompileError, DataflowError
from npu_twin.listing import Listing

STATE = pyxrt.ert_cmd_state


def request(listing: Listing) -> dict[str, Any]:
    """What a toolkit hands to the compiler: no header."""
    data = listing.to_mapping()
    return {key: data[key] for key in ("name", "options", "arguments", "launches")}


def test_compiles_to_the_listing(chain: Listing) -> None:
    compiled = compile_program(request(chain))
    assert compiled == chain
    assert Listing.from_json(compiled.to_json()) == compiled


def test_refusal_names_program_launch_rule_and_remedy(adder: Callable[..., Listing]) -> None:
    listing = adder()
    wide = dataclasses.replace(listing.launches[0], herd=(8, 4))
    with pytest.raises(CompileError) as caught:
        compile_program(request(dataclasses.replace(listing, launches=(wide,))))
    assert caught.value.program == "adder"
    assert caught.value.launch == "sum"
    assert caught.value.violations
    rules = {v.rule_id for v in caught.value.violations}
    assert all(rule in str(caught.value) for rule in rules)
    assert "adder" in str(caught.value)
    assert "sum" in str(caught.value)
    assert "would fit" in str(caught.value)


def test_malformed_program_is_a_compile_error(chain: Listing) -> None:
    data = request(chain)
    data["launches"][1]["op"] = "conv"
    with pytest.raises(CompileError, match=r"program chain: launches.swiglu.op: unknown operation") as caught:
        compile_program(data)
    assert caught.value.launch == "swiglu"


def test_dataflow_is_refused(chain: Listing) -> None:
    with pytest.raises(DataflowError, match="reads element 0 of mid") as caught:
        compile_program(request(dataclasses.replace(chain, launches=chain.launches[1:])))
    assert caught.value.launch == "swiglu"


def test_other_target_is_refused(adder: Callable[..., Listing]) -> None:
    with pytest.raises(CompileError, match="'npu1' is not built here"):
        compile_program({**request(adder()), "target": "npu1"})


@pytest.mark.parametrize(
    ("shows_as", "state"), [("hang", "TIMEOUT"), ("runtime", "ERROR"), ("silent", "COMPLETED")]
)
def test_rules_that_show_on_the_device(
    shows_as: Any, state: str, bench: Any, adder: Callable[..., Listing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a program compiles; a hang stays in flight, a run-time fault is an error state."""
    rule = constraints.Violation("X1", shows_as, "planted", launch="sum")
    monkeypatch.setattr(constraints, "check_listing", lambda listing: [rule])
    listing = compile_program(request(adder()))
    run = bench.run(listing)
    run.start()
    assert run.wait(50).name == f"ERT_CMD_STATE_{state}"
    if shows_as == "hang":
        assert run.state() == STATE.ERT_CMD_STATE_NEW
        run._in_flight = False  # nothing can end it; spare the test the abort message
    else:
        assert run.state().name == f"ERT_CMD_STATE_{state}"


def test_rules_are_judged_on_the_artefact_not_on_a_mark(
    bench: Any, adder: Callable[..., Listing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edited listing behaves as edited: the check runs again when it is loaded."""
    seen: list[str] = []
    monkeypatch.setattr(constraints, "check_listing", lambda listing: seen.append(listing.name) or [])
    pyxrt.elf(bench.path(adder("edited")))
    assert seen == ["edited"]
