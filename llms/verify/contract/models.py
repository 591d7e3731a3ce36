"""The model folders of this package: what `npu-deploy list` shows and `run` accepts."""

from __future__ import annotations

import ast
import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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


def in_checkout() -> bool:
    """Whether this package is a writable source tree, so that new models belong into it."""
    return (ROOT.parent / "pyproject.toml").is_file() and os.access(ROOT, os.W_OK)


def report_root(folder: Path) -> Path:
    """Where the results of models are: `reports/` of the source tree, or beside a folder elsewhere."""
    if folder.parent != ROOT:
        return folder.parent / "reports"
    return (ROOT.parent if in_checkout() else Path.cwd()) / "reports"


def model_folders(root: Path = ROOT) -> list[ModelFolder]:
    """All folders with a `verify_adapter.py`, by name. Reads source only, so it costs no import."""
    return [read_folder(path.parent) for path in sorted(root.glob("*/verify_adapter.py"))]


def find_model(name: str, root: Path = ROOT) -> ModelFolder:
    """Return one model; raises LookupError listing the known ones."""
    folders = model_folders(root)
    for model in folders:
        if model.name == name:
            return model
    known = ", ".join(model.name for model in folders) or "none"
    raise LookupError(f"no model folder '{name}'; known: {known}")


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
