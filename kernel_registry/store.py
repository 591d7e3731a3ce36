"""Read and write registry files. Writers hold a lock and replace the file in one step."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_registry.registry_lookup import DIMS
from kernel_registry.schema import VERSION, RegistryError, row_id, validate_file, validate_row

Rows = list[dict[str, Any]]
LOCK_NAME = ".registry.lock"
LOCK_LIMIT_S = 60.0
FIGURE_NOISE = 1e-3


def read(root: Path, op: str) -> Rows:
    """Checked rows of one kernel; empty when the registry has no such file. Raises RegistryError."""
    path = root / "details" / f"{op}.json"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RegistryError(f"{path}: cannot be read: {error}") from error
    try:
        data = json.loads(text)
    except ValueError as error:
        raise RegistryError(f"{path}: not JSON ({error})") from None
    return validate_file(data, path)


def read_all(root: Path) -> dict[str, Rows]:
    """Checked rows of every kernel that has a file. Raises RegistryError, also for a file of no kernel."""
    for path in sorted((root / "details").glob("*.json")):
        if path.stem not in DIMS:
            raise RegistryError(f"{path}: {path.stem!r} is not a kernel; known: {', '.join(DIMS)}")
    return {op: rows for op in DIMS if (rows := read(root, op))}


def dump(op: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Text of a file: one row per line, sorted by shape and id, so that changes read well."""
    ordered = sorted(rows, key=lambda r: ([r["dims"][d] for d in DIMS[op]], r["id"]))
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in ordered)
    return f'{{"schema": {VERSION}, "op": "{op}", "rows": [\n{lines}\n]}}\n'


def write_text(path: Path, text: str) -> bool:
    """Replace a file that differs, in one step: a reader sees the old or the new text, never a part."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
    return True


@contextlib.contextmanager
def locked(root: Path, limit_s: float = LOCK_LIMIT_S) -> Iterator[None]:
    """Hold the registry's lock. Raises RegistryError when another process keeps it for ``limit_s``, or when
    the folder cannot be written.
    """
    import fcntl

    folder = root / "details"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RegistryError(
            f"{folder}: cannot be written ({error}); name another registry with --registry DIR"
        ) from error
    try:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RegistryError(f"{folder}: another process holds the registry's lock") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(handle)


def update(root: Path, op: str, change: Callable[[Rows], Rows]) -> Rows:
    """Apply ``change`` to the rows of a kernel under the lock and write them when they differ."""
    with locked(root):
        before = read(root, op)
        after = [validate_row(row, f"new {op} row") for row in change([dict(r) for r in before])]
        ids = [row["id"] for row in after]
        double = {i for i in ids if ids.count(i) > 1}
        if double:
            raise RegistryError(f"duplicate rows: {', '.join(sorted(double))}")
        write_text(root / "details" / f"{op}.json", dump(op, after))
        return after


def put(
    row: Mapping[str, Any], root: Path, *, replace: Callable[[Mapping[str, Any]], bool] = lambda old: False
) -> str:
    """Add a row, or bring the present one up to date. Returns ``added``, ``updated`` or ``unchanged``.

    ``replace(old)`` tells which older rows the new one supersedes; their ``used_by`` tags are kept. A row
    whose content is already there keeps its date.
    """
    new = dict(row)
    new["id"] = row_id(new)
    outcome = "added"

    def change(rows: Rows) -> Rows:
        nonlocal outcome
        old = [r for r in rows if r["id"] == new["id"] or replace(r)]
        tags = {tag for r in old for tag in r.get("used_by", ())} | set(new.get("used_by", ()))
        final = validate_row({**new, "used_by": sorted(tags)}, "new row")
        kept = [r for r in rows if r not in old]
        if len(old) == 1 and _same(old[0], final):
            outcome = "unchanged" if old[0].get("used_by", []) == final["used_by"] else "updated"
            final = {**old[0], "used_by": final["used_by"]}
        elif old:
            outcome = "updated"
        return [*kept, final]

    update(root, str(new["op"]), change)
    return outcome


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Equal but for date and tags; figures may differ in the last digits, as summation order does that."""
    keys = (a.keys() | b.keys()) - {"date", "used_by", "figures"}
    one, other = a["figures"], b["figures"]
    return (
        all(a.get(k) == b.get(k) for k in keys)
        and one.keys() == other.keys()
        and all(math.isclose(v, other[k], rel_tol=FIGURE_NOISE, abs_tol=1e-12) for k, v in one.items())
    )
