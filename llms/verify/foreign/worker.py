"""The process in which a foreign adapter runs. Started by path, imports nothing of this project.

A deployment that exists brings module names of its own (`llms`, `inference`, `weights`, ...), which clash
with ours and with those of the next adapter; hence one process per runner, and messages (see `process.py`).

Usage: python worker.py FD FOLDER SILICON. FD is a connected socket, FOLDER the adapter's, SILICON 1 or 0.
Every request gets an answer: what went wrong stands in it with the stage it happened in.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

Answer = dict[str, Any]

PRODUCTION_PREFILL = "run_npu_prefill"
PREFILL_FIELDS = ("layer_intermediates", "final_hidden_normed", "logits_at_pred", "top1_token")
DECODE_FIELDS = ("lm_head_logits", "top1_token")
#: Optional methods of a runner that are offered on, see `llms/verify/contract`.
ABILITIES = ("decode_step_probed", "kv_cache", "prompt_limits", "rope_table", "device_arithmetic")


class Stage:
    """Remembers what the worker is doing, for the answer of a failing one.

    An adapter that forks and lets its child run on would have every answer given twice: the child ends at
    its next stage.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.name = "start"

    def enter(self, name: str) -> None:
        """Go on to the next stage."""
        if os.getpid() != self._pid:
            os._exit(0)
        self.name = name


def as_array(value: Any) -> np.ndarray[Any, Any]:
    """What an adapter handed over as a numpy array: lists and torch tensors, too (bf16 ones as float32)."""
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        return np.asarray(tensor.float() if "bfloat16" in str(tensor.dtype) else tensor)
    return np.asarray(value)


def floats(value: Any) -> np.ndarray[Any, Any]:
    """A float32 copy, of bf16 arrays a bf16 one; of nothing an empty one."""
    array = np.empty(0, np.float32) if value is None else as_array(value)
    return np.array(array, array.dtype if array.dtype.name == "bfloat16" else np.float32)


def fields_of(record: Any, names: Sequence[str], what: str) -> list[Any]:
    """The fields of a record, which may be of any class. Raises ValueError naming those that it lacks."""
    missing = [name for name in names if not hasattr(record, name)]
    if missing:
        raise ValueError(f"the {what} record has no {', '.join(missing)}")
    return [getattr(record, name) for name in names]


def layers_of(layers: Any) -> list[Answer]:
    """Layer outputs as records have them; an entry without one stays empty."""
    outputs = [(layer or {}).get("ffn_out") for layer in layers or ()]
    return [{} if one is None or not as_array(one).size else {"ffn_out": floats(one)} for one in outputs]


def prefill_answer(record: Any) -> Answer:
    """A prefill record for the other side."""
    layers, final, logits, token = fields_of(record, PREFILL_FIELDS, "prefill")
    return {
        "layer_intermediates": layers_of(layers),
        "final_hidden_normed": floats(final),
        "logits_at_pred": floats(logits).reshape(-1),
        "top1_token": int(as_array(token).reshape(1)[0]),
    }


def decode_answer(record: Any) -> Answer:
    """A record of a decode step for the other side."""
    logits, token = fields_of(record, DECODE_FIELDS, "decode")
    return {"lm_head_logits": floats(logits).reshape(-1), "top1_token": int(as_array(token).reshape(1)[0])}


def plain(value: Any) -> Any:
    """The answer of an optional method as plain values and arrays."""
    if hasattr(value, "as_dict"):
        return value.as_dict()
    if isinstance(value, (tuple, list)):
        return [plain(one) for one in value]
    if isinstance(value, (int, float, str)) or value is None:
        return value
    return floats(value)


def prepare_imports(folder: Path, pyxrt: str) -> None:
    """The import rules such a folder expects: its own modules, its siblings and `<parent>.<sibling>`.

    A parent without `__init__.py` becomes a package of its own, so that a folder called `llms` is the
    adapter's and not an installed one. `pyxrt` names the module that is imported in its place, if any.
    """
    own = str(Path(__file__).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(own)]
    parents = [folder, folder.parent, folder.parent.parent]
    if not (folder.parent / "__init__.py").is_file():
        package = types.ModuleType(folder.parent.name)
        package.__path__ = [str(folder.parent)]
        sys.modules[folder.parent.name] = package
        sys.path[:0] = [str(entry) for entry in parents]
    else:
        sys.path.insert(0, str(folder.parent.parent))
    sys.meta_path.append(RelativeFinder(folder))
    sys.argv[:] = [str(folder / "verify_adapter.py")]  # of what parses arguments when it is imported
    if pyxrt and importlib.util.find_spec(pyxrt.partition(".")[0]) is not None:
        sys.meta_path.insert(0, StandInFinder(pyxrt))


class RelativeFinder:
    """Finds modules by relative entries of sys.path, as if started in the adapter's folder or its build."""

    def __init__(self, folder: Path) -> None:
        self._starts = (folder / "build", folder)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Part of the import protocol; asked last."""
        entries = [Path(entry) for entry in sys.path if entry and not Path(entry).is_absolute()]
        places = [os.path.normpath(start / entry) for start in self._starts for entry in entries]
        return importlib.machinery.PathFinder.find_spec(name, places) if path is None else None


class StandInFinder:
    """Imports another module under the name pyxrt, and knows whether anybody did."""

    used: str | None = None

    def __init__(self, module: str) -> None:
        self._module = module

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Part of the import protocol."""
        if name != "pyxrt":
            return None
        StandInFinder.used = self._module
        return importlib.util.spec_from_loader(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Any:
        """The stand-in's own module object."""
        return importlib.import_module(self._module)

    def exec_module(self, module: Any) -> None:
        """It has been executed under its own name."""


def load_adapter(folder: Path) -> Any:
    """Import verify_adapter.py: as part of a package when it uses relative imports, else by its name."""
    path = folder / "verify_adapter.py"
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    relative = any(isinstance(node, ast.ImportFrom) and node.level for node in nodes)
    if relative and (folder.parent / "__init__.py").is_file():
        return importlib.import_module(f"{folder.parent.name}.{folder.name}.verify_adapter")
    if relative or (folder / "__init__.py").is_file():
        return importlib.import_module(f"{folder.name}.verify_adapter")
    return importlib.import_module("verify_adapter")


def build_config(adapter: Any, name: str) -> Any:
    """Call `build_config`, with the model name when it takes one (the contract's own takes none)."""
    parameters = inspect.signature(adapter.build_config).parameters.values()
    takes = any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    return adapter.build_config(name) if takes else adapter.build_config()


def describe(folder: Path, choice: str | None, stage: Stage) -> Answer:
    """Names, signatures, configuration; builds and runs nothing."""
    stage.enter("import")
    adapter = load_adapter(folder)
    problems = []
    choices: Any = getattr(adapter, "MODEL_CHOICES", None)
    if not isinstance(choices, dict) or not choices:
        problems.append("MODEL_CHOICES is not a non-empty dict of key -> checkpoint id")
    for name in ("resolve_model", "build_config", "build_runner"):
        if not callable(getattr(adapter, name, None)):
            problems.append(f"{name} is missing")
    if problems:
        return {"problems": problems}
    accepted = inspect.signature(adapter.build_runner).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        problems += [
            f"build_runner does not accept {name}"
            for name in ("npu_attn", "lite_mode")
            if name not in accepted
        ]
    stage.enter("resolve_model")
    choice = choice or getattr(adapter, "DEFAULT_MODEL", None) or next(iter(choices))
    name = str(adapter.resolve_model(choice))
    stage.enter("build_config")
    config = build_config(adapter, name)
    problems += [
        f"build_config() has no {field}"
        for field in ("n_layers", "emb_dim", "n_kv_heads", "head_dim")
        if not hasattr(config, field)
    ]
    fields = {key: getattr(config, key) for key in dir(config) if not key.startswith("_")}
    stage.enter("hf_reference")
    reference = str(adapter.hf_reference(name)) if callable(getattr(adapter, "hf_reference", None)) else name
    stage.enter("checkpoint")
    return {
        "problems": problems,
        "folder": checkpoint_folder(adapter, reference, folder),
        "choices": {str(key): str(value) for key, value in choices.items()},
        "choice": choice,
        "model_name": name,
        "reference": reference,
        "own_reference": callable(getattr(adapter, "build_hf_model", None)),
        "config": {key: value for key, value in fields.items() if isinstance(value, (int, float, str, bool))},
    }


def checkpoint_folder(adapter: Any, name: str, folder: Path) -> str | None:
    """Where the weights are when that is known here: our own adapters say so, others may name a folder."""
    find = getattr(adapter, "checkpoint", None)
    if callable(find):
        found = getattr(find(name), "path", None)
        return str(found) if found is not None else None
    places = [Path(name), folder / name]
    return next((str(place.resolve()) for place in places if (place / "config.json").is_file()), None)


def tokenizer_of(path: str) -> Any:
    """The tokenizer of a checkpoint folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True)


class Spy:
    """Watches one prefill: what runs after the production function has returned, and what pads the prompt."""

    def __init__(self, folder: Path, ids: np.ndarray[Any, Any]) -> None:
        self._root = str(folder.parent)
        self._ids = ids
        self.production_calls = 0
        self.after: dict[str, int] = {}
        self.pads: dict[str, set[int]] = {"production": set(), "after": set()}
        self._depth = 0

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        """Profile function."""
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(self._root):
            return
        if event == "return":  # only then are there the locals that were made inside
            self._look(frame.f_locals)
        if code.co_name == PRODUCTION_PREFILL:
            self._depth += 1 if event == "call" else -1
            self.production_calls += event == "call"
            return
        if event == "return":
            return
        if self.production_calls and not self._depth and not code.co_name.startswith("<"):
            self.after[code.co_name] = self.after.get(code.co_name, 0) + 1

    def _look(self, names: Any) -> None:
        count = self._ids.size
        phase = "after" if self.production_calls and not self._depth else "production"
        for value in list(names.values()):
            if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "iu":
                continue
            tail = value[count:]
            if tail.size and np.array_equal(value[:count], self._ids) and (tail == tail[0]).all():
                self.pads[phase].add(int(tail[0]))

    def answer(self) -> Answer:
        """What was seen."""
        return {
            "production_calls": self.production_calls,
            "after": self.after,
            "pads": {phase: sorted(values) for phase, values in self.pads.items()},
        }


def arrays_of(record: Any) -> dict[str, Any]:
    """The arrays of a prefill record by name, exactly the objects the adapter handed over."""
    layers = enumerate(record.layer_intermediates or ())
    handed = {f"layer {i}": (layer or {}).get("ffn_out") for i, layer in layers}
    handed["final_hidden_normed"] = record.final_hidden_normed
    handed["logits_at_pred"] = record.logits_at_pred
    return {name: value for name, value in handed.items() if value is not None and as_array(value).size}


def digests(arrays: dict[str, Any]) -> dict[str, str]:
    """Content of arrays, to see later whether it changed."""
    return {
        name: hashlib.sha256(np.ascontiguousarray(as_array(value)).tobytes()).hexdigest()
        for name, value in arrays.items()
    }


class Service:
    """Answers requests; each public method is a command."""

    def __init__(self, folder: Path, stage: Stage) -> None:
        self._folder = folder
        self._stage = stage
        self._runner: Any = None
        self._model: Any = None
        self._watched: dict[str, Any] = {}

    def describe(self, choice: str | None) -> Answer:
        """Names, signatures, configuration; builds and runs nothing."""
        return describe(self._folder, choice, self._stage)

    def build_runner(self, model_name: str, tokenizer: str, max_seq: int, **options: bool) -> list[str]:
        """Build the runner; names of the optional methods that it has."""
        adapter, config = self._configured(model_name)
        self._stage.enter("build_runner")
        self._runner = adapter.build_runner(model_name, config, max_seq, tokenizer_of(tokenizer), **options)
        lacking = [name for name in ("name", "prefill", "decode_step") if not hasattr(self._runner, name)]
        if lacking:
            raise ValueError(f"the runner has no {', '.join(lacking)}")
        return [name for name in ABILITIES if callable(getattr(self._runner, name, None))]

    def _configured(self, model_name: str) -> tuple[Any, Any]:
        self._stage.enter("import")
        adapter = load_adapter(self._folder)
        self._stage.enter("build_config")
        return adapter, build_config(adapter, model_name)

    def prefill(self, ids: list[int]) -> Answer:
        """Run a prompt."""
        self._stage.enter(f"prefill of {len(ids)} tokens")
        return prefill_answer(self._runner.prefill(np.array(ids, np.int64)))

    def prefill_watched(self, ids: list[int]) -> Answer:
        """Run a prompt under a profile function; what it handed over is compared by `changed` later on."""
        self._stage.enter(f"prefill of {len(ids)} tokens")
        spy = Spy(self._folder, np.array(ids, np.int64))
        sys.setprofile(spy)
        try:
            record = self._runner.prefill(np.array(ids, np.int64))
        finally:
            sys.setprofile(None)
        answer = prefill_answer(record)
        self._watched = arrays_of(record)
        self._before = digests(self._watched)
        return {"record": answer, "spy": spy.answer()}

    def changed(self) -> list[str]:
        """Arrays of the watched record whose content is another one by now."""
        now = digests(self._watched)
        return [name for name, digest in self._before.items() if digest != now[name]]

    def decode_step(self, token: int, position: int) -> Answer:
        """One decode step."""
        self._stage.enter(f"decode_step at position {position}")
        return decode_answer(self._runner.decode_step(token, position))

    def ability(self, name: str, arguments: list[int]) -> Any:
        """An optional method of the runner."""
        self._stage.enter(name)
        answer = getattr(self._runner, name)(*arguments)
        if name != "decode_step_probed":
            return plain(answer)
        final = floats(getattr(answer, "final_hidden_normed", None))
        layers = layers_of(answer.layer_intermediates)
        return {"record": decode_answer(answer.record), "layers": layers, "final": final}

    def reference(self, model_name: str, checkpoint: str, ids: list[int], n_tokens: int) -> Any:
        """Logits [n_tokens, vocab] of the adapter's own reference model, fed with its own choices."""
        import torch

        if self._model is None:
            adapter, config = self._configured(model_name)
            self._stage.enter("build_hf_model")
            self._model = adapter.build_hf_model(model_name, checkpoint, config).eval()
        self._stage.enter(f"reference of {len(ids)} tokens")
        rows: list[Any] = []
        with torch.inference_mode():
            for _ in range(n_tokens):
                output = self._model(input_ids=torch.tensor([ids]), use_cache=False)
                rows.append(floats(output.logits[0, -1]))
                ids = [*ids, int(np.argmax(rows[-1]))]
        return np.stack(rows)

    def close(self) -> Answer:
        """Close the runner; which threads are left, and whose pyxrt it was."""
        close = getattr(self._runner, "close", None)
        if callable(close):
            close()
        return {
            "threads": threads_left(),
            "pyxrt": StandInFinder.used or getattr(sys.modules.get("pyxrt"), "__file__", None),
        }


def threads_left() -> list[str]:
    """Threads that the interpreter would wait for, for ever."""
    own = threading.current_thread()
    return [thread.name for thread in threading.enumerate() if thread is not own and not thread.daemon]


def encode(answer: Answer) -> bytes:
    """An answer as one message, see `process.py`."""
    arrays: list[Any] = []

    def put(value: Any) -> Answer:
        bf16 = value.dtype.name == "bfloat16"  # unknown to the format of .npz
        arrays.append(value.view(np.uint16) if bf16 else value)
        return {"$array": len(arrays) - 1, "bf16": bf16}

    text = json.dumps(answer, default=put).encode()
    buffer = io.BytesIO()
    numbered = {f"array{index}": array for index, array in enumerate(arrays)}
    np.savez(buffer, json=np.frombuffer(text, np.uint8), **numbered)
    return buffer.getvalue()


def answer_of(command: Callable[..., Any], values: Answer, stage: Stage) -> Answer:
    """The answer to one request, whatever the adapter raises."""
    try:
        return {"values": command(**values)}
    except BaseException as error:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        described = {"stage": stage.name, "error": f"{type(error).__name__}: {error}"}
        return {"failed": {**described, "traceback": "".join(lines[-12:])}}


def end_with(parent: int) -> None:
    """End this process and all it started once `parent` is gone, whatever the adapter is doing: a pytest run
    that was killed leaves nothing behind.
    """
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def main(arguments: Sequence[str]) -> int:
    """Answer requests until the other side closes."""
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    connection = Connection(int(arguments[0]))
    os.set_inheritable(connection.fileno(), False)
    folder, pyxrt = Path(arguments[1]), arguments[2]
    stage = Stage()
    service = Service(folder, stage)
    prepare_imports(folder, pyxrt)
    command = ""
    while command != "close":
        try:
            request: Answer = json.loads(connection.recv_bytes())
        except EOFError:
            break
        command = request.pop("command")
        stage.enter(command)
        answer = answer_of(getattr(service, command), request, stage)
        stage.enter("answer")  # a child that the adapter forked ends here
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(encode(answer))
    if threads_left():
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
