"""Where model folders are: in this package, in the current folder, or where `new --into` made them."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from llms.verify.contract.models import (
    ADAPTER,
    ROOT,
    ModelFolder,
    in_checkout,
    model_folders,
    read_folder,
)
from npu_deploy.errors import USAGE, DeployError


def default_parent() -> Path:
    """Where `new` puts a folder without --into: the package of a source tree, else the current folder."""
    return ROOT if in_checkout() else Path.cwd()


def _memory() -> Path:
    from llms.checkpoints import cache_root

    return cache_root() / "deploy" / "folders.json"


def remembered() -> list[Path]:
    """Folders that `new --into` made and that still exist, the newest last."""
    try:
        paths = [Path(text) for text in json.loads(_memory().read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []
    return [path for path in paths if (path / ADAPTER).is_file()]


def remember(folder: Path) -> None:
    """Note a folder outside the package, so that its name is enough from now on."""
    from llms.checkpoints import exclusive, write_atomically

    with suppress(OSError), exclusive(_memory().with_suffix(".lock")):
        paths = [path for path in remembered() if path != folder] + [folder]
        write_atomically(_memory(), json.dumps([str(path) for path in paths], indent=1).encode())


def all_models() -> list[ModelFolder]:
    """Models of the package, then the remembered ones."""
    outside = [read_folder(path) for path in remembered() if path.parent != ROOT]
    return [*model_folders(), *outside]


def find(model: str) -> ModelFolder:
    """A model by path or by name. Raises DeployError listing the known ones."""
    path = Path(model).expanduser()
    candidates = [path] if os.sep in model or model in (".", "..") else []
    candidates += [ROOT / model, path]
    candidates += [known for known in reversed(remembered()) if known.name == model]
    for folder in candidates:
        if (folder / ADAPTER).is_file():
            return read_folder(folder.resolve())
    known = ", ".join(model_folder.name for model_folder in all_models()) or "none"
    raise DeployError(
        f"no model '{model}'; known: {known}; or give the path of a folder with {ADAPTER}", USAGE
    )
