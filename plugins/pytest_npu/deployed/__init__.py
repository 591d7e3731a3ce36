"""The models of this project for a verifier that has modules called `llms` or `kernel_registry` of its own.

    verifier --runner pytest_npu.deployed.llama32_1b

`pytest_npu.deployed.<model>` is the adapter of `llms/<model>` with the names of the deployment contract
(Xilinx/mlir-air e972f2942). Behind it our packages are loaded a second time under private names, so that it
does not matter which `llms` the process knows. Two things differ from the adapter itself, as the contract
passes no model to `build_config` and its verifiers know no packaged weights: `resolve_model` answers with the
folder of the checkpoint that is going to run, and `build_config()` is the configuration of the one resolved
last.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

#: Our packages whose names others have, too, and the names they are loaded under here.
PRIVATE = {"llms": "_npu_llms", "kernel_registry": "_npu_kernel_registry"}
_PACKAGES = {private: package for package, private in PRIVATE.items()}


def _root() -> Path:
    """The folder that holds our packages: site-packages, or the project when it is installed editable."""
    above = Path(__file__).resolve().parents
    return next(
        folder for folder in (above[2], above[3]) if (folder / "llms" / "verify" / "__init__.py").is_file()
    )


def _import(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] = (),
    level: int = 0,
) -> ModuleType:
    """`import` of the modules loaded here: our packages by their private names."""
    top, dot, rest = name.partition(".")
    if level == 0 and top in PRIVATE:
        name = PRIVATE[top] + dot + rest
    return builtins.__import__(name, globals, locals, fromlist, level)


_BUILTINS = {**vars(builtins), "__import__": _import}


class _Private(importlib.machinery.SourceFileLoader):
    """Runs a module of ours with an `import` that finds the rest of ours."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = _BUILTINS
        super().exec_module(module)


class _Adapter(Loader):
    """Makes `pytest_npu.deployed.<model>`."""

    def __init__(self, model: str) -> None:
        self._model = model

    def exec_module(self, module: ModuleType) -> None:
        """Fill in the names of the contract."""
        adapter: Any = importlib.import_module(f"{PRIVATE['llms']}.{self._model}.verify_adapter")
        resolved: list[str] = []

        def resolve_model(choice: str) -> str:
            """A key of MODEL_CHOICES, an HF id or a path -> the folder of its checkpoint on this machine."""
            resolved[:] = [str(adapter.checkpoint(adapter.resolve_model(choice)).path)]
            return resolved[0]

        def build_config() -> Any:
            """The configuration of the checkpoint resolved last, else of the default one."""
            return adapter.build_config(resolved[0] if resolved else resolve_model(adapter.DEFAULT_MODEL))

        vars(module).update(
            MODEL_CHOICES=adapter.MODEL_CHOICES,
            DEFAULT_MODEL=adapter.DEFAULT_MODEL,
            resolve_model=resolve_model,
            hf_reference=adapter.hf_reference,
            build_config=build_config,
            build_runner=adapter.build_runner,
            checkpoint=adapter.checkpoint,
            __file__=adapter.__file__,
            __doc__=adapter.__doc__,
        )


class _Finder(MetaPathFinder):
    """Finds the modules of this package and of our packages under their private names."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Part of the import protocol."""
        above, _, name = fullname.rpartition(".")
        if above == __name__:
            exists = (self._root / "llms" / name / "verify_adapter.py").is_file()
            return importlib.util.spec_from_loader(fullname, _Adapter(name)) if exists else None
        if fullname.partition(".")[0] not in _PACKAGES:
            return None
        places = list(path) if path is not None else [str(self._root)]
        spec = importlib.machinery.PathFinder.find_spec(_PACKAGES.get(fullname, fullname), places)
        if spec is None or spec.origin is None:
            return spec
        return importlib.util.spec_from_file_location(
            fullname,
            spec.origin,
            loader=_Private(fullname, spec.origin),
            submodule_search_locations=spec.submodule_search_locations,
        )


sys.meta_path.insert(0, _Finder(_root()))
