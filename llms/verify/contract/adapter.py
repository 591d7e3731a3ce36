"""Load a folder's adapter, ``verify_adapter.py``, and hold it to the names of the contract."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from llms.verify.contract.models import ADAPTER, ROOT, DeploymentError

_FUNCTIONS = ("resolve_model", "build_config", "build_runner")


def load_adapter(folder: Path) -> ModuleType:
    """Import ``<folder>/verify_adapter.py`` and check the names of the contract.

    A folder of this package is imported as ``llms.<model>.verify_adapter``; another one by path, with the
    folder and its parent importable, as scripts of such a folder expect.

    Raises:
        DeploymentError: the import fails or names of the contract are missing.
    """
    try:
        if folder.parent == ROOT:
            module = importlib.import_module(f"llms.{folder.name}.{Path(ADAPTER).stem}")
        else:
            module = _import_by_path(folder / ADAPTER)
    except Exception as error:
        raise DeploymentError(
            f"{folder / ADAPTER} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    missing = [name for name in _FUNCTIONS if not callable(getattr(module, name, None))]
    choices = getattr(module, "MODEL_CHOICES", None)
    if not isinstance(choices, Mapping) or not choices:
        missing.insert(0, "MODEL_CHOICES (a non-empty dict of key -> checkpoint id)")
    if missing:
        raise DeploymentError(
            f"{folder / ADAPTER} does not fulfil the adapter contract, missing: {', '.join(missing)}"
        )
    accepted = inspect.signature(module.build_runner).parameters
    if not any(item.kind is inspect.Parameter.VAR_KEYWORD for item in accepted.values()):
        lacking = [name for name in ("npu_attn", "lite_mode") if name not in accepted]
        if lacking:
            raise DeploymentError(f"{folder / ADAPTER}: build_runner does not accept {', '.join(lacking)}")
    return module


def _import_by_path(path: Path) -> ModuleType:
    """Import the adapter of a folder that was made outside of this package (`npu-deploy new --into`).

    One of another project belongs into a process of its own, see :mod:`llms.verify.foreign.remote`.
    """
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    name = f"npu_adapter_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    for folder in (path.parent.parent, path.parent):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"no loader for {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
