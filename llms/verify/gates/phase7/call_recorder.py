"""Who was called, while it ran: production functions of the model and programs started on the device.

The functions of `<model>_inference.py` are wrapped where they are and wherever a module of the model's folder
has imported them, so a call counts however the adapter reaches it. Programs are counted where the host
runtime starts them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

FUNCTIONS = ("prepare_runtime", "run_npu_prefill", "run_npu_decode_step")


class NoProduction(Exception):
    """The model folder has no production functions; the text says which are missing."""


@dataclass
class Production:
    """One call of a production function: name, what it returned, programs started inside."""

    function: str
    result: Any
    started: int


@dataclass
class Ledger:
    """What happened since the last `take`."""

    calls: list[Production] = field(default_factory=list)
    started: Counter[str] = field(default_factory=Counter)

    def take(self) -> tuple[list[Production], Counter[str]]:
        """Return and forget."""
        taken = (self.calls, self.started)
        self.calls, self.started = [], Counter()
        return taken


def production_module(folder: Path, adapter: ModuleType) -> ModuleType:
    """The module `<model>_inference.py` of a folder, as the adapter has it loaded.

    Raises NoProduction when the folder has none or it lacks a function.
    """
    path = folder / f"{folder.name}_inference.py"
    if not path.is_file():
        raise NoProduction(
            f"{folder} has no {path.name}: there is no production code to hold the runner against"
        )
    module = next(
        (m for m in list(sys.modules.values()) if _file(m) == path.resolve() and m is not adapter), None
    )
    if module is None:
        module = load_production(path)
    missing = [name for name in FUNCTIONS if not callable(getattr(module, name, None))]
    if missing:
        raise NoProduction(f"{path.name} has no {', '.join(missing)}")
    return module


def load_production(path: Path, package: str = "") -> ModuleType:
    """Run the source of production functions as a module of its own, of a package where it belongs to one.

    Raises NoProduction when it cannot be imported.
    """
    name = f"npu_audit_{path.stem}"
    spec = importlib.util.spec_from_file_location(f"{package}.{name}" if package else name, path)
    if spec is None or spec.loader is None:
        raise NoProduction(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _file(module: ModuleType) -> Path | None:
    name = getattr(module, "__file__", None)
    return Path(name).resolve() if name else None


@contextmanager
def watched(folder: Path, production: ModuleType) -> Iterator[Ledger]:
    """Count while the block runs."""
    from llms.llama_kernel_builder.runtime import HostRuntime

    ledger = Ledger()
    undo: list[Callable[[], None]] = []
    for name in FUNCTIONS:
        original = getattr(production, name)
        wrapper = _counting(ledger, name, original)
        for module in _modules_of(folder, production):
            for key, value in list(vars(module).items()):
                if callable(value) and not isinstance(value, type) and _same(value, original):
                    setattr(module, key, wrapper)
                    undo.append(_restore(module, key, value))
    execute = HostRuntime.execute

    def counted(self: HostRuntime, name: str, bound: Any) -> None:
        execute(self, name, bound)
        ledger.started[name] += 1

    setattr(HostRuntime, "execute", counted)  # noqa: B010 - mypy forbids to assign a method
    undo.append(_restore(HostRuntime, "execute", execute))
    try:
        yield ledger
    finally:
        for step in reversed(undo):
            step()


def _same(value: Any, original: Any) -> bool:
    return value is original or bool(value == original)


def _restore(owner: Any, key: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, key, value)


def _modules_of(folder: Path, production: ModuleType) -> list[ModuleType]:
    """The production module first, then every loaded module of the same folder."""
    others = [
        m
        for m in list(sys.modules.values())
        if m is not production and (path := _file(m)) is not None and folder.resolve() in path.parents
    ]
    return [production, *others]


def _counting(ledger: Ledger, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        before = sum(ledger.started.values())
        result = original(*args, **kwargs)
        ledger.calls.append(Production(name, _kept(result), sum(ledger.started.values()) - before))
        return result

    return call


def _kept(result: Any) -> Any:
    """Copies of what a production function returned, without the KV cache."""
    if not isinstance(result, tuple) or len(result) < 2:
        return None
    return int(result[0]), np.array(result[1], copy=True)


def programs_per_call(production: ModuleType, config: Any, length: int) -> Mapping[str, int] | None:
    """Programs that one prefill of `length` tokens and one decode step must start, from the model's blocks.

    None for a production module that does not show its kernel sequence.
    """
    from llms.llama_kernel_builder.device_config import attends_on_device
    from llms.llama_kernel_builder.llama_loop import bucket_for

    sequence = getattr(production, "SEQUENCE", None)
    if sequence is None:
        return None
    blocks = list(sequence.prefill_blocks(config, bucket_for(length, config.max_position)))
    on_device = [b for b in blocks if attends_on_device(config) or b.name != "flash_attn"]
    return {
        "run_npu_prefill": config.n_layers * len(on_device) + 1,
        "run_npu_decode_step": config.n_layers * len(list(sequence.decode_blocks(config))) + 1,
    }
