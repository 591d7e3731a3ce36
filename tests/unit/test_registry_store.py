"""Schema, atomic writes, locking and the drift check."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import kernel_registry
from kernel_registry import render, store
from kernel_registry.cli import main
from kernel_registry.schema import RegistryError, row_id, validate_row

PACKAGED = Path(kernel_registry.__file__).parent


def row(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "op": "silu_mul",
        "dims": {"n": 4096},
        "method": "external",
        "tile": {"tile_n": 512},
        "herd": [8, 1],
        "context": "standalone",
        "status": "pass",
        "provenance": "twin",
        "figures": {"latency_us": 10.0},
        "used_by": ["a_model"],
        "date": "2026-08-22",
        "source": "a test",
        **changes,
    }
    return {**base, "id": changes.get("id") or row_id(base)}


def add(root: Path, **changes: Any) -> str:
    return store.put(row(**changes), root, replace=lambda old: False)


def copied(tmp_path: Path) -> Path:
    root = tmp_path / "registry"
    shutil.copytree(PACKAGED / "details", root / "details")
    shutil.copy(PACKAGED / "supported_kernels.md", root)
    return root


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"provenance": "guessed"}, "provenance 'guessed'"),
        ({"status": "fine"}, "status 'fine'"),
        ({"context": "somewhere"}, "context 'somewhere'"),
        ({"figures": {"latency_us": -1.0}}, "figures.latency_us"),
        ({"figures": {"latency": 1.0}}, "figures.latency"),
        ({"figures": {"latency_us": "10"}}, "figures.latency_us"),
        ({"dims": {"n": 0}}, "dims.n 0: Input should be greater than"),
        ({"herd": [16, 4]}, "herd.0 16: Input should be less than"),
        ({"herd": [8]}, "herd"),
        ({"date": "yesterday"}, "date"),
        ({"source": ""}, "source"),
        ({"tolerance": {"rtol": 0.016}}, "tolerance.atol"),
        ({"error": "L1 overflow"}, "a row that passed has no error"),
        ({"extra": 1}, "extra"),
        ({"id": "silu_mul:other"}, "id must be"),
    ],
)
def test_schema_violations_name_the_field(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RegistryError, match="row") as error:
        validate_row(row(**changes))
    assert says in str(error.value)


def test_a_wrong_set_of_dimensions() -> None:
    bad = {**row(), "dims": {"n": 4096, "m": 2}}
    with pytest.raises(RegistryError, match="dims must be n"):
        validate_row(bad)


def test_a_legal_row_passes_and_keeps_only_what_is_set() -> None:
    checked = validate_row(row())
    assert checked["figures"] == {"latency_us": 10.0}
    assert "error" not in checked
    assert "attrs" not in checked


def test_add_is_idempotent_and_merges_tags(tmp_path: Path) -> None:
    assert add(tmp_path) == "added"
    before = (tmp_path / "details" / "silu_mul.json").read_bytes()
    assert add(tmp_path, date="2026-09-01") == "unchanged"
    assert (tmp_path / "details" / "silu_mul.json").read_bytes() == before
    assert add(tmp_path, figures={"latency_us": 10.0004}) == "unchanged"
    assert (tmp_path / "details" / "silu_mul.json").read_bytes() == before
    assert add(tmp_path, used_by=["b_model"]) == "updated"
    assert store.read(tmp_path, "silu_mul")[0]["used_by"] == ["a_model", "b_model"]
    assert add(tmp_path, figures={"latency_us": 9.0}) == "updated"
    assert [r["figures"] for r in store.read(tmp_path, "silu_mul")] == [{"latency_us": 9.0}]


def test_a_wrong_row_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    add(tmp_path)
    before = (tmp_path / "details" / "silu_mul.json").read_bytes()
    with pytest.raises(RegistryError):
        add(tmp_path, provenance="guessed")
    assert (tmp_path / "details" / "silu_mul.json").read_bytes() == before


def test_a_write_that_fails_leaves_the_old_file_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(tmp_path)
    before = (tmp_path / "details" / "silu_mul.json").read_bytes()

    def torn(handle: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", torn)
    with pytest.raises(OSError, match="disk full"):
        add(tmp_path, figures={"latency_us": 9.0})
    monkeypatch.undo()
    assert (tmp_path / "details" / "silu_mul.json").read_bytes() == before
    assert [p.name for p in (tmp_path / "details").iterdir() if p.suffix == ".tmp"] == []
    assert add(tmp_path, figures={"latency_us": 9.0}) == "updated"


def _add_many(root: str, first: int) -> None:
    for i in range(10):
        add(Path(root), dims={"n": 4096 * (first + i)})


def test_two_concurrent_writers_keep_all_rows(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_add_many, args=(str(tmp_path), start)) for start in (1, 101)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0]
    sizes = {r["dims"]["n"] // 4096 for r in store.read(tmp_path, "silu_mul")}
    assert sizes == {*range(1, 11), *range(101, 111)}


def test_a_lock_that_is_never_released_is_an_error(tmp_path: Path) -> None:
    with (
        store.locked(tmp_path),
        pytest.raises(RegistryError, match="another process holds"),
        store.locked(tmp_path, limit_s=0.05),
    ):
        pass


def test_the_packaged_registry_is_consistent(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--registry", str(PACKAGED)]) == 0
    assert "pages agree" in capsys.readouterr().out


def _edit_page(root: Path) -> None:
    page = root / "details" / "gemv.md"
    page.write_text(page.read_text().replace("1067.0", "967.0"))


def _edit_overview(root: Path) -> None:
    page = root / "supported_kernels.md"
    page.write_text(page.read_text() + "\nand everything else\n")


def _edit_figure(root: Path) -> None:
    path = root / "details" / "gemv.json"
    path.write_text(path.read_text().replace('"latency_us": 1067.0', '"latency_us": 967.0'))


def _edit_tile(root: Path) -> None:
    path = root / "details" / "gemv.json"
    path.write_text(path.read_text().replace('"m_input": 8', '"m_input": 4', 1))


def _duplicate(root: Path) -> None:
    path = root / "details" / "gemv.json"
    data = json.loads(path.read_text())
    data["rows"].append(data["rows"][0])
    path.write_text(json.dumps(data))


def _delete_page(root: Path) -> None:
    (root / "details" / "rope.md").unlink()


def _orphan_page(root: Path) -> None:
    (root / "details" / "rope.json").unlink()


def _unknown_kernel(root: Path) -> None:
    (root / "details" / "softmax.json").write_text('{"schema": 1, "op": "softmax", "rows": []}')


def _torn(root: Path) -> None:
    path = root / "details" / "gemv.json"
    path.write_text(path.read_text()[:-200])


def _illegal(root: Path) -> None:
    data = row(op="eltwise_add", method="default", dims={"n": 65536}, tile={"tile": 8192})
    store.put({**data, "id": row_id(data)}, root, replace=lambda old: False)
    render.render(root)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_edit_page, "gemv.md: differs"),
        (_edit_overview, "supported_kernels.md: differs"),
        (_edit_figure, "gemv.md: differs"),
        (_edit_tile, "id must be"),
        (_duplicate, "duplicate of row gemv:"),
        (_delete_page, "rope.md: missing"),
        (_orphan_page, "rope.md: page of a kernel without rows"),
        (_unknown_kernel, "'softmax' is not a kernel"),
        (_torn, "not JSON"),
        (_illegal, "breaks rule E1"),
    ],
)
def test_check_finds_drift_and_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Any, says: str
) -> None:
    root = copied(tmp_path)
    assert main(["check", "--registry", str(root)]) == 0
    damage(root)
    capsys.readouterr()
    assert main(["check", "--registry", str(root)]) == 1
    assert says in capsys.readouterr().err


def test_render_repairs_the_pages_and_writes_only_what_changed(tmp_path: Path) -> None:
    root = copied(tmp_path)
    _edit_page(root)
    assert [p.name for p in render.render(root)] == ["gemv.md"]
    assert render.render(root) == []
    assert main(["check", "--registry", str(root)]) == 0


def test_an_empty_registry_does_not_pass_the_check(tmp_path: Path) -> None:
    assert main(["check", "--registry", str(tmp_path)]) == 1


def test_the_overview_says_modelled_for_twin_rows(tmp_path: Path) -> None:
    add(tmp_path)
    render.render(tmp_path)
    text = (tmp_path / "supported_kernels.md").read_text()
    assert "| 4096 | bf16 |  | external | 8x1 | 10.0 | twin (modelled) | a_model |" in text
