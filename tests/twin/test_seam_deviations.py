"""The list of deliberate deviations: well-formed, and no entry that nothing shows."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

FIELDS = ["id", "call", "real", "twin", "reason"]

SHOWN_BY = {
    "artefact": "test_seam_errors.py::test_elf_of_a_bad_file",
    "elf-truncated": "test_seam_errors.py::test_elf_of_a_torn_listing_gives_the_reason",
    "kernel-names": "test_seam_errors.py::test_accepted",
    "xclbin-flow": "test_seam_errors.py::test_error_text",
    "empty-handle": "test_seam_errors.py::test_where_the_real_library_crashes_the_twin_raises",
    "group-id": "test_seam_errors.py::test_where_the_real_library_crashes_the_twin_raises",
    "set-arg-range": "test_seam_errors.py::test_error_text",
    "wait-hang": "test_seam_runs.py::test_a_hang_times_out_on_the_virtual_clock",
    "wait-unstarted": "test_seam_errors.py::test_wait_before_the_first_start",
    "drop-in-flight": "test_seam_runs.py::test_dropping_a_run_in_flight_is_reported",
    "map-lifetime": "test_seam_buffers.py::test_a_view_does_not_outlive_its_bo",
    "write-strides": "test_seam_buffers.py::test_strides_that_leave_the_memory_are_refused",
    "buffer-gone": "test_seam_runs.py::test_a_run_does_not_keep_its_buffers",
    "bad-arguments": "test_seam_runs.py::test_bad_arguments_end_in_error",
    "two-copies": "test_seam_buffers.py::test_sync_copies_the_given_range_only",
    "poison": "test_seam_buffers.py::test_new_memory_is_poisoned_on_both_sides",
    "late-results": "test_seam_runs.py::test_results_appear_when_the_run_is_seen_complete",
    "sync-gmio": "test_seam_buffers.py::test_gmio_directions_move_nothing",
    "time": "test_seam_runs.py::test_wait_limit_below_the_modelled_time",
    "contexts": "test_seam_errors.py::test_contexts_are_limited_and_given_back",
    "hung-context": "test_seam_runs.py::test_a_hung_context_stays_hung_and_others_go_on",
    "addresses": "test_seam_buffers.py::test_addresses_do_not_overlap",
    "device-identity": "test_seam_errors.py::test_return_values",
    "uuid-text": "test_seam_surface.py::test_uuid",
    "inplace-or": "test_seam_surface.py::test_access_mode_operators",
    "import-capsule": "test_seam_errors.py::test_capsules_are_refused",
    "type-names": "test_seam_surface.py::test_objects_are_closed",
    "docstrings": "test_seam_surface.py::test_member_names",
    "log-output": "test_seam_errors.py::test_log_message_goes_to_logging",
    "driver-refusals": "test_seam_errors.py::test_contexts_are_limited_and_given_back",
    "vectors": "test_seam_surface.py::test_vectors",
}


@pytest.fixture(scope="module")
def entries() -> list[dict[str, str]]:
    data = json.loads(resources.files("npu_twin").joinpath("deviations.json").read_text(encoding="utf-8"))
    assert (data["format"], data["version"]) == ("npu-twin-deviations", 1)
    found: list[dict[str, str]] = data["deviations"]
    return found


def test_entries_are_complete(entries: list[dict[str, str]]) -> None:
    assert all(list(entry) == FIELDS and all(entry.values()) for entry in entries)
    names = [entry["id"] for entry in entries]
    assert len(set(names)) == len(names)


def test_each_deviation_is_shown_by_a_test(entries: list[dict[str, str]]) -> None:
    assert sorted(SHOWN_BY) == sorted(entry["id"] for entry in entries)
    for place in SHOWN_BY.values():
        file, test = place.split("::")
        assert f"def {test}(" in Path(__file__).with_name(file).read_text(encoding="utf-8"), place
