"""Who was called, while it ran: production functions of a model and programs started on the device.

The functions of `<model>_inference.py` are wrapped where they are and wherever a module of the model's folder
has imported them, so a call counts however the adapter reaches it. Programs are counted where the host
runtime starts them. Fulfils `Watch` of llms.verify.contract.abilities.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from unittest import mock

import numpy as np

from llms.llama_kernel_builder.deployment import describe
from llms.llama_kernel_builder.deployment.predicted import predicted_apart
from llms.llama_kernel_builder.deployment.session import Session
from llms.llama_kernel_builder.device_config import attends_on_device
from llms.llama_kernel_builder.llama_loop import bucket_for
from llms.llama_kernel_builder.runtime import HostRuntime
from llms.verify.contract.abilities import NotOffered
from llms.verify.contract.abilities.watch import ProductionCall

FUNCTIONS = ("prepare_runtime", "run_npu_prefill", "run_npu_decode_step")


class CallRecorder:
    """Calls and programs since the last `take`, and what the model's own kernel sequence says of them."""

    def __init__(self, folder: Path, production: Any, config: Any) -> None:
        self.name = str(production.__name__)
        self.folder = folder
        self.replaced = tuple(replaced_functions(production, _source(folder)))
        self.production = production
        self.config = config
        self.calls: list[ProductionCall] = []
        self.started: Counter[str] = Counter()

    @property
    def sequence(self) -> Any:
        """The kernel sequence; None for a production module that does not show it."""
        return getattr(self.production, "SEQUENCE", None)

    def take(self) -> tuple[list[ProductionCall], Counter[str]]:
        """Return and forget."""
        taken = (self.calls, self.started)
        self.calls, self.started = [], Counter()
        return taken

    def programs_per_call(self, length: int) -> Mapping[str, int] | None:
        """Programs that one prefill of `length` tokens and one decode step must start, by the blocks."""
        if self.sequence is None:
            return None
        config = self.config
        blocks = list(self.sequence.prefill_blocks(config, self.compiled_length(length)))
        on_device = [b for b in blocks if attends_on_device(config) or b.name != "flash_attn"]
        return {
            "run_npu_prefill": config.n_layers * len(on_device) + 1,
            "run_npu_decode_step": config.n_layers * len(list(self.sequence.decode_blocks(config))) + 1,
        }

    def compiled_length(self, length: int) -> int:
        """The bucket of a prompt."""
        return bucket_for(length, self.config.max_position)

    def predicted_ms(self, length: int) -> Mapping[str, float]:
        """Of the toolkit's loop over the model's sequence; of the published flow where that is not shown."""
        if self.sequence is None:
            flow = describe.speed(self.config, self.compiled_length(length))
            return {"prefill": flow.ttft_ms, "decode step": flow.tpot_ms}
        own = predicted_apart(self.folder, self.config, length)
        return {"prefill": own.prefill_ms, "decode step": own.decode_ms}

    def generate(
        self, checkpoint: Any, tokenizer: Any, ids: Sequence[int], n_tokens: int
    ) -> tuple[int, ...] | None:
        """By a Session, as the command line of the model does."""
        if self.sequence is None:
            return None
        session = Session(self.production, checkpoint, tokenizer, len(ids) + n_tokens)
        try:
            return session.generate(lambda: ids, n_tokens, stop_at_eos=False).tokens
        finally:
            session.close()


@contextmanager
def watch(folder: Path, adapter: ModuleType, config: Any) -> Iterator[CallRecorder]:
    """Count while the block runs. Raises NotOffered."""
    production = production_module(folder, adapter)
    recorder = CallRecorder(folder, production, config)
    execute = HostRuntime.execute

    def counted(self: HostRuntime, name: str, bound: Any) -> None:
        execute(self, name, bound)
        recorder.started[name] += 1

    with ExitStack() as wrapped:
        for name in FUNCTIONS:
            original = getattr(production, name)
            wrapper = _counting(recorder, name, original)
            for module in _modules_of(folder, production):
                for key, value in list(vars(module).items()):
                    if callable(value) and not isinstance(value, type) and _same(value, original):
                        wrapped.enter_context(mock.patch.object(module, key, wrapper))
        wrapped.enter_context(mock.patch.object(HostRuntime, "execute", counted))
        yield recorder


def production_module(folder: Path, adapter: ModuleType) -> ModuleType:
    """The module `<model>_inference.py` of a folder, as the adapter has it loaded.

    Raises NotOffered when the folder has none or it lacks a function.
    """
    path = _source(folder)
    if not path.is_file():
        raise NotOffered(
            f"{folder} has no {path.name}: there is no production code to hold the runner against"
        )
    module = next(
        (m for m in list(sys.modules.values()) if _file(m) == path.resolve() and m is not adapter), None
    )
    if module is None:
        module = _load(path)
    missing = [name for name in FUNCTIONS if not callable(getattr(module, name, None))]
    if missing:
        raise NotOffered(f"{path.name} has no {', '.join(missing)}")
    return module


def replaced_functions(module: ModuleType, path: Path) -> list[str]:
    """Production functions that are not those of their own source; `path`: that source file."""
    fresh = _load(path, module.__package__ or "")
    replaced = []
    for name in FUNCTIONS:
        loaded, shipped = (_code(getattr(owner, name, None)) for owner in (module, fresh))
        if loaded is None or loaded != shipped:
            by = f" (now {loaded.co_name} of {Path(loaded.co_filename).name})" if loaded is not None else ""
            replaced.append(f"{path.name}: {name} is not the one of the source{by}")
    return replaced


def _code(function: Any) -> CodeType | None:
    function = function.__func__ if isinstance(function, MethodType) else function
    return function.__code__ if isinstance(function, FunctionType) else None


def _source(folder: Path) -> Path:
    return folder / f"{folder.name}_inference.py"


def _load(path: Path, package: str = "") -> ModuleType:
    """Run a source as a module of its own, of a package where it belongs to one."""
    name = f"npu_audit_{path.stem}"
    spec = importlib.util.spec_from_file_location(f"{package}.{name}" if package else name, path)
    if spec is None or spec.loader is None:
        raise NotOffered(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _file(module: ModuleType) -> Path | None:
    name = getattr(module, "__file__", None)
    return Path(name).resolve() if name else None


def _same(value: Any, original: Any) -> bool:
    return value is original or bool(value == original)


def _modules_of(folder: Path, production: ModuleType) -> list[ModuleType]:
    """The production module first, then every loaded module of the same folder."""
    others = [
        m
        for m in list(sys.modules.values())
        if m is not production and (path := _file(m)) is not None and folder.resolve() in path.parents
    ]
    return [production, *others]


def _counting(recorder: CallRecorder, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        before = sum(recorder.started.values())
        result = original(*args, **kwargs)
        started = sum(recorder.started.values()) - before
        recorder.calls.append(ProductionCall(name, _kept(result), started))
        return result

    return call


def _kept(result: Any) -> tuple[int, Any] | None:
    """Copies of what a production function returned, without the KV cache."""
    if not isinstance(result, tuple) or len(result) < 2:
        return None
    return int(result[0]), np.array(result[1], copy=True)
