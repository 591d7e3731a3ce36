"""Which model folders exist and where: the one place that finds them. Reads source only, imports no model."""

from __future__ import annotations

import ast
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llms.checkpoints import cache_root, exclusive, write_atomically

ROOT = Path(__file__).resolve().parents[2]
"""The package that holds the model folders."""

ADAPTER = "verify_adapter.py"
"""A folder that holds this file is a model folder."""


class DeploymentError(Exception):
    """A model folder or its adapter cannot be used; the text says which and what is missing."""


@dataclass(frozen=True)
class ModelFolder:
    """One deployed model: its folder, its choices (key -> HF id) and the key used by default."""

    name: str
    folder: Path
    choices: dict[str, str]
    default: str

    @property
    def tests(self) -> Path:
        """Folder of the model's gates."""
        return self.folder / "tests"


def known_models(root: Path = ROOT) -> tuple[str, ...]:
    """Names of the model folders below ``root``, sorted."""
    return tuple(sorted(path.parent.name for path in root.glob(f"*/{ADAPTER}")))


def in_checkout() -> bool:
    """Whether this package is a writable source tree, so that new models belong into it."""
    return (ROOT.parent / "pyproject.toml").is_file() and os.access(ROOT, os.W_OK)


def report_root(folder: Path) -> Path:
    """Where the results of models are: `reports/` of the source tree, or beside a folder elsewhere."""
    if folder.parent != ROOT:
        return folder.parent / "reports"
    return (ROOT.parent if in_checkout() else Path.cwd()) / "reports"


def model_folders(root: Path = ROOT) -> list[ModelFolder]:
    """All model folders below ``root``, by name."""
    return [read_folder(root / name) for name in known_models(root)]


def _memory() -> Path:
    return cache_root() / "deploy" / "folders.json"


def remembered() -> list[Path]:
    """Folders outside the package that :func:`remember` noted and that still exist, the newest last."""
    try:
        paths = [Path(text) for text in json.loads(_memory().read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []
    return [path for path in paths if (path / ADAPTER).is_file() and path.parent != ROOT]


def remember(folder: Path) -> None:
    """Note a folder outside the package, so that its name is enough from now on."""
    with suppress(OSError), exclusive(_memory().with_suffix(".lock")):
        paths = [path for path in remembered() if path != folder] + [folder]
        write_atomically(_memory(), json.dumps([str(path) for path in paths], indent=1).encode())


def all_models() -> list[ModelFolder]:
    """Models of the package, then the remembered ones."""
    return [*model_folders(), *map(read_folder, remembered())]


def find_folder(path_or_model_name: str | Path) -> Path:
    """The folder of a model, given its name (in this package or remembered) or any path to it.

    Raises:
        DeploymentError: there is no such folder or it has no adapter; the text lists the known models.
    """
    path = Path(path_or_model_name).expanduser()
    candidates = [path, ROOT / path.name]
    candidates += [folder for folder in reversed(remembered()) if folder.name == str(path)]
    for folder in candidates:
        if (folder / ADAPTER).is_file():
            return folder.resolve()
    known = ", ".join(model.name for model in all_models()) or "none"
    if any(folder.is_dir() for folder in candidates):
        problem = f"model folder {path_or_model_name} has no {ADAPTER}"
    else:
        problem = f"unknown model {str(path_or_model_name)!r}"
    raise DeploymentError(
        f"{problem}. Known models: {known}. Name one of them or a folder that holds {ADAPTER}."
    )


def find_model(path_or_model_name: str | Path) -> ModelFolder:
    """As :func:`find_folder`, read."""
    return read_folder(find_folder(path_or_model_name))


def read_folder(folder: Path) -> ModelFolder:
    """Read one folder: MODEL_CHOICES and DEFAULT_MODEL are literals of one of its modules."""
    choices: dict[str, str] = {}
    default = ""
    for path in sorted(folder.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
                continue
            if node.targets[0].id == "MODEL_CHOICES":
                choices = ast.literal_eval(node.value)
            elif node.targets[0].id == "DEFAULT_MODEL":
                default = ast.literal_eval(node.value)
    return ModelFolder(folder.name, folder, choices, default)
