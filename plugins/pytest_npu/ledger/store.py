"""The gate ledger of a model: each verdict with the hash of what it judged, one JSON object per line.

A verdict holds for its hash only. The hash has six parts, so that `npu-deploy status` can say what changed:
programs (every ELF with its tiles), weights, adapter (the code and tests of the model's folder), and what
:mod:`pytest_npu.ledger.judging` lists as gates (with their limits, prompts and published figures), toolkit
(kernel builder and host runtime) and twin.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llms.verify.contract.models import ModelFolder, report_root
from pytest_npu.core.exceptions import LedgerError, NoCheckpoint
from pytest_npu.ledger import judging

if TYPE_CHECKING:
    from llms.verify.contract.deployment import Deployment

VERSION = 1
FILE = "ledger.jsonl"
PASS = "PASS"


@dataclass(frozen=True)
class Identity:
    """What a verdict is about. Digests are SHA-256, shortened to 16 hexadecimal digits."""

    programs: str
    weights: str
    adapter: str
    toolkit: str
    gates: str
    twin: str

    @property
    def hash(self) -> str:
        """One digest over all parts."""
        return _digest([f"{key}={value}" for key, value in asdict(self).items()])

    def differences(self, parts: Mapping[str, str]) -> list[str]:
        """Names of the parts that are not those of an earlier verdict."""
        return [key for key, value in asdict(self).items() if parts.get(key) != value]


@dataclass(frozen=True)
class Entry:
    """One verdict. `date` is UTC in ISO form, `run` the folder name of its report, `wall_s` seconds."""

    model: str
    phase: int
    verdict: str
    hash: str
    parts: dict[str, str]
    device: str
    checkpoint: str
    date: str
    run: str
    wall_s: float
    v: int = VERSION


def entry(
    model: str,
    phase: int,
    verdict: str,
    identity: Identity,
    device: str,
    checkpoint: str,
    run: str,
    wall_s: float,
) -> Entry:
    """A verdict of now."""
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    parts = asdict(identity)
    return Entry(model, phase, verdict, identity.hash, parts, device, checkpoint, date, run, round(wall_s, 2))


def path_of(model: ModelFolder) -> Path:
    """The ledger file of a model."""
    return report_root(model.folder) / model.name / FILE


def append(path: Path, entries: Iterable[Entry]) -> None:
    """Add verdicts; every line is one write, so two runs never mix. Raises LedgerError for a full disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            for entry in entries:
                os.write(handle, (json.dumps(asdict(entry)) + "\n").encode())
        finally:
            os.close(handle)
    except OSError as error:
        raise LedgerError(f"{path}: the ledger cannot be written ({error.strerror})") from error


def read(path: Path) -> list[Entry]:
    """All verdicts in order; a torn last line is left out. Raises LedgerError when it is no ledger."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(Entry(**json.loads(line)))
        except (ValueError, TypeError) as error:
            if number == len(lines):
                break
            raise LedgerError(f"{path}, line {number} is no ledger entry: {error}") from error
    return entries


def last_by_phase(entries: Iterable[Entry]) -> dict[int, Entry]:
    """The latest verdict of every phase."""
    return {entry.phase: entry for entry in entries}


def holds(entries: Iterable[Entry], phase: int, identity: Identity) -> bool:
    """Whether the latest verdict of a phase is PASS and about exactly this."""
    entry = last_by_phase(entries).get(phase)
    return entry is not None and entry.verdict == PASS and entry.hash == identity.hash


def identity_of(deployment: Deployment) -> Identity:
    """Digest everything a verdict of this deployment depends on. Raises NoCheckpoint."""
    from llms.checkpoints import CheckpointError
    from llms.llama_kernel_builder.exceptions import ToolkitError

    folder = deployment.folder
    try:
        weights = deployment.checkpoint.content_hash
        programs = _programs(deployment)
        rows = judging.judging_rows(deployment.name)
    except (CheckpointError, ToolkitError) as error:
        raise NoCheckpoint(f"{deployment.name}: {error}") from error
    except LookupError as error:  # a shape that the registry does not know, or a damaged one
        raise LedgerError(f"{deployment.name}: {error}") from error
    code = code_digests(folder)
    code["gates"] = _digest([code["gates"], *rows])
    return Identity(programs=_digest(programs), weights=weights[:16], **code)


def code_digests(folder: Path) -> dict[str, str]:
    """Digests of the files of :func:`judged_code`, by part of the hash."""
    roots = {"adapter": folder}
    return {part: _code(paths, roots.get(part, judging.ROOT)) for part, paths in judged_code(folder).items()}


def judged_code(folder: Path) -> dict[str, list[Path]]:
    """Files that a verdict of the model in `folder` depends on, by part of the hash."""
    shared = {part: list(paths) for part, paths in judging.judging_files().items()}
    return {"adapter": sorted([*folder.glob("*.py"), *folder.glob("tests/*.py")]), **shared}


def _programs(deployment: Deployment) -> list[str]:
    """Digests of all ELFs; a foreign adapter shows none, its folder's code stands for them."""
    sequence = getattr(getattr(deployment.adapter, "inference", None), "SEQUENCE", None)
    if sequence is None:
        return []
    from llms.llama_kernel_builder.llama_loop import all_programs

    return [f"{program.name} {program.digest}" for program in all_programs(sequence, deployment.config())]


def _code(paths: Iterable[Path], root: Path) -> str:
    return _digest(
        f"{path.relative_to(root)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in paths
    )


def _digest(lines: Iterable[Any]) -> str:
    return hashlib.sha256("\n".join(map(str, lines)).encode()).hexdigest()[:16]


def open_deployment(model: ModelFolder, checkpoint: Path | None, choice: str | None) -> Deployment:
    """Load the adapter of a model. Raises LedgerError."""
    from llms.verify.contract.deployment import Deployment, DeploymentError

    try:
        return Deployment.from_folder(model.folder, checkpoint=checkpoint, model_choice=choice)
    except DeploymentError as error:
        raise LedgerError(str(error)) from error
