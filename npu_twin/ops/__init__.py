"""The operations of the twin, one module (or folder) each: operands, datapath, rules, configurations, cost.

A module offers ``OP``, a record of ``npu_twin.opset``. Adding the module is all it takes: the package is
listed, nothing else names its operations. Modules that begin with an underscore are shared by several.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module

from npu_twin.opset import Op


class _Ops(Mapping[str, Op]):
    """The operations by name, each imported when it is first asked for: none needs the others."""

    def __init__(self) -> None:
        found = (module.name for module in pkgutil.iter_modules(__path__))
        self._names = tuple(sorted(name for name in found if not name.startswith("_")))
        self._loaded: dict[str, Op] = {}

    def __getitem__(self, name: str) -> Op:
        if name not in self._loaded:
            if name not in self._names:
                raise KeyError(name)
            self._loaded[name] = import_module(f"{__name__}.{name}").OP
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


OPS: Mapping[str, Op] = _Ops()
"""All operations by name, in alphabetical order."""
