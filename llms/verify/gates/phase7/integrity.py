"""Is what judges, measures and computes still what this tree ships, after a model's code has run?

A snapshot of every function, method, constant and data file that the setting of the audit lists is taken
before the adapter is imported, and compared afterwards. Whoever replaces one (a wider k, a patched clock, a
looser limit, a reference in another dtype) is named.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from llms.verify.gates.phase7.types import Setting

_FOREIGN = ("transformers.modeling_utils", "transformers.models.auto.auto_factory")
_MODELLING = "transformers.models.{0}.modeling_{0}"
_CONSTANTS = (bool, int, float, str, bytes, tuple, frozenset, dict)
# What only somebody needs who wants to behave differently when he is watched.
_SNIFFED = ("pytest", "_pytest", "llms.audit", "llms.verify.gates.phase7")
_PREFIX, _OURS = "PYTEST", "PYTEST_NPU_"
_LOOKED_UP = (("sys", "_getframe"), ("sys", "modules"), ("inspect", "currentframe"), ("inspect", "stack"))


@dataclass(frozen=True)
class Snapshot:
    """Fingerprints by `module:name` and `module:Class.name`, of data files, and of the device clock."""

    prints: Mapping[str, Any]
    setting: Setting

    @classmethod
    def take(cls, setting: Setting, model_types: tuple[str, ...] = ()) -> Snapshot:
        """Import what the setting lists, and the modelling code of these model types, and look at them."""
        return cls(dict(_everything(setting, model_types)), setting)

    def changed(self) -> list[str]:
        """Names whose function, method or constant is another one now."""
        found = []
        for module_name, names in self._by_module().items():
            module = importlib.import_module(module_name)
            now = dict(_of_module(module))
            found += [f"{name}{_by(now.get(name))}" for name in names if now.get(name) != self.prints[name]]
        other = {**dict(_clock(self.setting)), **dict(_data(self.setting))}
        found += [name for name, value in self.prints.items() if name[0] == "<" and other.get(name) != value]
        return found

    def _by_module(self) -> dict[str, list[str]]:
        modules: dict[str, list[str]] = {}
        for name in self.prints:
            if name[0] != "<":
                modules.setdefault(name.split(":")[0], []).append(name)
        return modules


def _everything(setting: Setting, model_types: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    foreign = (*_FOREIGN, *(_MODELLING.format(name) for name in model_types))
    for name in (*setting.modules(), *foreign):
        try:
            module = importlib.import_module(name)
        except ImportError:
            if name in foreign:
                continue
            raise
        yield from _of_module(module)
    yield from _data(setting)
    yield from _clock(setting)


def _data(setting: Setting) -> Iterator[tuple[str, Any]]:
    """Limits, prompts and tables as they lie on the disk."""
    for name, path in setting.data().items():
        yield f"<{name}>", hashlib.sha256(path.read_bytes()).hexdigest()


def _of_module(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if isinstance(value, type) and value.__module__ == module.__name__:
            for attribute, held in vars(value).items():
                mark = _fingerprint(held)
                if mark is not None:
                    yield f"{module.__name__}:{name}.{attribute}", mark
            continue
        if name.startswith("__"):
            continue
        # transformers keeps registries in upper case
        mark = _fingerprint(value, constant=name.isupper() and not module.__name__.startswith("transformers"))
        if mark is not None:
            yield f"{module.__name__}:{name}", mark


def _fingerprint(value: Any, *, constant: bool = False) -> Any:
    """What must not change: the code of a function with its defaults, the class, the value of a constant."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        return ("property", _fingerprint(value.fget))
    if isinstance(value, MethodType):
        value = value.__func__
    if isinstance(value, FunctionType):
        return (value.__code__, repr(value.__defaults__), repr(value.__kwdefaults__))
    if isinstance(value, type):
        return ("class", value.__module__, value.__qualname__)
    if constant and isinstance(value, _CONSTANTS):
        return ("constant", repr(value))
    return None


def _by(mark: Any) -> str:
    """Where the replacement comes from, if it is a function."""
    code = mark[0] if isinstance(mark, tuple) and mark and isinstance(mark[0], CodeType) else None
    return f" (now {code.co_name} of {Path(code.co_filename).name})" if code else ""


def _clock(setting: Setting) -> Iterator[tuple[str, Any]]:
    """The clock of the device: its class, and what lies in the object itself."""
    clock = setting.clock
    yield "<device clock>", type(clock).__qualname__
    yield "<device clock's attributes>", tuple(sorted((key, id(value)) for key, value in vars(clock).items()))


def watching_code(folder: Path) -> list[str]:
    """Lines of a model folder that look at who is calling, outside of its tests."""
    found = []
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            sniffed = _sniffed(node)
            if sniffed:
                found.append(f"{path.name}, line {node.lineno}: looks at {sniffed}")  # type: ignore[attr-defined]
    return found


def _sniffed(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        named = node.value.startswith(_PREFIX) and not node.value.startswith(_OURS)
        return repr(node.value) if named or node.value in _SNIFFED else ""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}" if (node.value.id, node.attr) in _LOOKED_UP else ""
    return ""
