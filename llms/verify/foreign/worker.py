"""The process in which a foreign adapter runs. Started by path, imports nothing of this project.

A deployment that exists brings module names of its own (`llms`, `inference`, `weights`, ...), which clash
with ours and with those of the next adapter; hence one process per gate and a hand-over by files.

Usage: python adopted_worker.py REQUEST.json. The request names the command (`describe`, `capture` or
`reference`), the adapter's folder and the file for the answer; arrays go to an .npz beside it. The answer is
written in every case: what went wrong stands in it with the stage it happened in.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Answer = dict[str, Any]

PRODUCTION_PREFILL = "run_npu_prefill"
RECORD_FIELDS = ("layer_intermediates", "final_hidden_normed", "logits_at_pred", "top1_token")


class Stage:
    """Remembers what the worker is doing, for the answer of a failing one.

    An adapter that forks and lets its child run on would have every job done twice: the child ends at its
    next stage.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._name = "start"

    @property
    def name(self) -> str:
        """What is being done."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        if os.getpid() != self._pid:
            os._exit(0)
        self._name = name


def top_k(logits: Any, k: int) -> list[int]:
    """Ids of the k largest logits, largest first, ties by smaller id; NaN counts as smallest."""
    values = np.nan_to_num(np.asarray(logits).astype(np.float64), nan=-np.inf)
    return [int(token) for token in np.lexsort((np.arange(values.size), -values))[:k]]


def as_array(value: Any) -> np.ndarray[Any, Any]:
    """What an adapter handed over as a numpy array: lists and torch tensors, too (bf16 ones as float32)."""
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        return np.asarray(tensor.float() if "bfloat16" in str(tensor.dtype) else tensor)
    return np.asarray(value)


def row_of(logits: Any) -> np.ndarray[Any, Any]:
    """Logits as a float32 copy [vocab]."""
    return np.array(as_array(logits), np.float32).reshape(-1)


def step_of(token: Any, row: np.ndarray[Any, Any], k: int) -> Answer:
    """One generated token as the token-set gate sees it."""
    return {
        "token": int(as_array(token).reshape(1)[0]),
        "topk": top_k(row, k),
        "finite": bool(np.isfinite(row).all()),
        "vocab": int(row.size),
    }


def prepare_imports(folder: Path, silicon: bool) -> None:
    """The import rules such a folder expects: its own modules, its siblings and `<parent>.<sibling>`.

    A parent without `__init__.py` becomes a package of its own, so that a folder called `llms` is the
    adapter's and not an installed one. Without silicon `pyxrt` is the digital twin's.
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
    if not silicon and importlib.util.find_spec("npu_twin") is not None:
        sys.meta_path.insert(0, TwinFinder())


class RelativeFinder:
    """Finds modules by relative entries of sys.path, as if started in the adapter's folder or its build."""

    def __init__(self, folder: Path) -> None:
        self._starts = (folder / "build", folder)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Part of the import protocol; asked last."""
        entries = [Path(entry) for entry in sys.path if entry and not Path(entry).is_absolute()]
        places = [os.path.normpath(start / entry) for start in self._starts for entry in entries]
        return importlib.machinery.PathFinder.find_spec(name, places) if path is None else None


class TwinFinder:
    """Imports `npu_twin.pyxrt` under the name pyxrt, and knows whether anybody did."""

    used = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Part of the import protocol."""
        if name != "pyxrt":
            return None
        TwinFinder.used = True
        return importlib.util.spec_from_loader(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Any:
        """The twin's own module object."""
        return importlib.import_module("npu_twin.pyxrt")

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


def model_name(adapter: Any, choice: str | None) -> str:
    """What `resolve_model` answers for the wanted choice, or for the adapter's default."""
    wanted = choice or getattr(adapter, "DEFAULT_MODEL", None) or next(iter(adapter.MODEL_CHOICES))
    return str(adapter.resolve_model(wanted))


def build_config(adapter: Any, name: str) -> Any:
    """Call `build_config`, with the model name when it takes one (the contract's own takes none)."""
    parameters = inspect.signature(adapter.build_config).parameters.values()
    takes = any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    return adapter.build_config(name) if takes else adapter.build_config()


def describe(request: Answer, stage: Stage) -> Answer:
    """Names, signatures, configuration; builds and runs nothing."""
    stage.name = "import"
    adapter = load_adapter(Path(request["folder"]))
    problems = []
    choices: Any = getattr(adapter, "MODEL_CHOICES", None)
    if not isinstance(choices, dict) or not choices:
        problems.append("MODEL_CHOICES is no non-empty dict of key -> checkpoint id")
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
    stage.name = "resolve_model"
    name = model_name(adapter, request["choice"])
    stage.name = "build_config"
    config = build_config(adapter, name)
    problems += [
        f"build_config() has no {field}"
        for field in ("n_layers", "emb_dim", "n_kv_heads", "head_dim")
        if not hasattr(config, field)
    ]
    fields = {key: getattr(config, key) for key in dir(config) if not key.startswith("_")}
    stage.name = "hf_reference"
    reference = str(adapter.hf_reference(name)) if callable(getattr(adapter, "hf_reference", None)) else name
    stage.name = "checkpoint"
    return {
        "problems": problems,
        "folder": checkpoint_folder(adapter, reference, Path(request["folder"])),
        "choices": {str(key): str(value) for key, value in choices.items()},
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
    found = {f"layer {i}": (layer or {}).get("ffn_out") for i, layer in layers}
    found["final_hidden_normed"] = record.final_hidden_normed
    found["logits_at_pred"] = record.logits_at_pred
    return {name: value for name, value in found.items() if value is not None and as_array(value).size}


def digests(arrays: dict[str, Any]) -> dict[str, str]:
    """Content of arrays, to see later whether it changed."""
    return {
        name: hashlib.sha256(np.ascontiguousarray(as_array(value)).tobytes()).hexdigest()
        for name, value in arrays.items()
    }


def sharing(arrays: dict[str, Any]) -> list[list[str]]:
    """Pairs of layer records that are one piece of memory."""
    layers = [name for name in arrays if name.startswith("layer ")]
    return [
        [a, b]
        for i, a in enumerate(layers)
        for b in layers[i + 1 :]
        if isinstance(arrays[a], np.ndarray) and np.shares_memory(arrays[a], arrays[b])
    ]


class Capture:
    """Drives a runner over the jobs of a request."""

    def __init__(self, request: Answer, stage: Stage) -> None:
        self.request = request
        self.stage = stage
        self.folder = Path(request["folder"])
        self.k = int(request["k"])
        self.arrays: dict[str, Any] = {}
        self.answers: list[Answer] = []

    def run(self) -> Answer:
        """Build the runner and do all jobs."""
        request, stage = self.request, self.stage
        stage.name = "import"
        adapter = load_adapter(self.folder)
        stage.name = "build_config"
        config = build_config(adapter, request["model_name"])
        stage.name = "build_runner"
        runner = adapter.build_runner(
            request["model_name"],
            config,
            request["max_seq"],
            tokenizer_of(request["tokenizer"]),
            npu_attn=True,
            lite_mode=request["lite_mode"],
        )
        lacking = [name for name in ("name", "prefill", "decode_step") if not hasattr(runner, name)]
        if lacking:
            return {"problems": [f"the runner has no {', '.join(lacking)}"]}
        answer: Answer = {"problems": [], "jobs": self.answers}
        for index, job in enumerate(request["jobs"]):
            stage.name = f"job {index} ({job['name']})"
            self.answers.append(self._job(runner, index, job))
            answer["problems"] += [
                f"job {index} ({job['name']}): {p}" for p in self.answers[-1].get("problems", ())
            ]
            if answer["problems"]:
                break  # later jobs may build on this one
        close = getattr(runner, "close", None)
        if callable(close):
            close()
        return answer

    def _first_token_of(self, name: str | None) -> list[int]:
        return [answer["steps"][0]["token"] for answer in self.answers if answer["name"] == name]

    def _job(self, runner: Any, index: int, job: Answer) -> Answer:
        ids = np.array([*job["ids"], *self._first_token_of(job.get("and_token_of"))], np.int64)
        answer: Answer = {"name": job["name"]}
        if job.get("must_fail"):
            try:
                runner.prefill(ids)
            except Exception as error:
                return {**answer, "error": f"{type(error).__name__}: {error}"}
            return {**answer, "error": None}
        spy = Spy(self.folder, ids)
        if job.get("spy"):
            sys.setprofile(spy)
        try:
            record = runner.prefill(ids)
        finally:
            sys.setprofile(None)
        missing = [name for name in RECORD_FIELDS if not hasattr(record, name)]
        if missing:
            return {**answer, "problems": [f"the prefill record has no {', '.join(missing)}"]}
        handed = arrays_of(record)
        before = digests(handed)
        row = row_of(record.logits_at_pred)
        answer["steps"] = [step_of(record.top1_token, row, self.k)]
        if job.get("keep_logits"):
            rows = [row]
        answer["shapes"] = {name: list(as_array(value).shape) for name, value in handed.items()}
        if job.get("inside"):
            answer["spy"] = spy.answer()
            answer["shared_memory"] = sharing(handed)
            answer["n_layers"] = len(record.layer_intermediates or ())
            for name, value in handed.items():
                self.arrays[f"{index}/{name}"] = np.array(as_array(value), np.float32)
        forced = job.get("forced")
        for step in range(job["n_tokens"] - 1):
            token = int(forced[step]) if forced is not None else answer["steps"][-1]["token"]
            done = runner.decode_step(token, ids.size + step)
            row = row_of(done.lm_head_logits)
            answer["steps"].append(step_of(done.top1_token, row, self.k))
            if job.get("keep_logits"):
                rows.append(row)
        if job.get("keep_logits"):
            self.arrays[f"{index}/logits"] = np.stack(rows)
        if job.get("inside"):
            after_decode = digests(handed)
            runner.prefill(ids[::-1].copy())
            after_prefill = digests(handed)
            answer["changed"] = {
                "decode_step": [name for name in before if before[name] != after_decode[name]],
                "prefill": [name for name in before if before[name] != after_prefill[name]],
            }
        return answer


def reference(request: Answer, stage: Stage) -> tuple[Answer, dict[str, Any]]:
    """The adapter's own reference model, fed greedily: logits, tokens and hidden states."""
    import torch

    stage.name = "import"
    adapter = load_adapter(Path(request["folder"]))
    stage.name = "build_config"
    config = build_config(adapter, request["model_name"])
    stage.name = "build_hf_model"
    model = adapter.build_hf_model(request["model_name"], request["reference"], config).eval()
    arrays: dict[str, Any] = {}
    answers = []
    for index, job in enumerate(request["jobs"]):
        stage.name = f"reference job {index} ({job['name']})"
        ids = [int(token) for token in job["ids"]]
        rows: list[Any] = []
        with torch.inference_mode():
            for step in range(job["n_tokens"]):
                output = model(input_ids=torch.tensor([ids]), output_hidden_states=step == 0, use_cache=False)
                row = output.logits[0, -1].float().numpy()
                if step == 0:
                    for layer, hidden in enumerate(output.hidden_states[1:]):
                        arrays[f"{index}/layer {layer}"] = hidden[0].float().numpy()
                rows.append(row)
                ids.append(int(np.argmax(row)))
        arrays[f"{index}/logits"] = np.stack(rows)
        steps = [step_of(np.argmax(row), row, request["k"]) for row in rows]
        answers.append({"name": job["name"], "steps": steps})
    return {"problems": [], "jobs": answers}, arrays


def write(path: Path, answer: Answer) -> None:
    """Write the answer so that it is there whole or not at all."""
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(answer), encoding="utf-8")
    temporary.replace(path)


def main(arguments: Sequence[str]) -> int:
    """Answer one request."""
    request: Answer = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    target = Path(request["answer"])
    stage = Stage()
    arrays: dict[str, Any] = {}
    commands: dict[str, Callable[[], Answer]] = {"describe": lambda: describe(request, stage)}
    capture = Capture(request, stage) if request["command"] == "capture" else None
    if capture is not None:
        commands["capture"] = capture.run
        arrays = capture.arrays
    try:
        prepare_imports(Path(request["folder"]), request["silicon"])
        if request["command"] == "reference":
            answer, arrays = reference(request, stage)
        else:
            answer = commands[request["command"]]()
    except BaseException as error:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        answer = {
            "failed": {
                "stage": stage.name,
                "error": f"{type(error).__name__}: {error}",
                "traceback": "".join(lines[-12:]),
            }
        }
    stage.name = "answer"  # a child that the adapter forked ends here
    answer["pyxrt"] = (
        "npu_twin.pyxrt" if TwinFinder.used else getattr(sys.modules.get("pyxrt"), "__file__", None)
    )
    own = threading.current_thread()
    left = [t.name for t in threading.enumerate() if t is not own and not t.daemon]
    answer["threads"] = left
    with target.with_suffix(".npz").open("wb") as file:
        np.savez(file, **arrays)
    write(target, answer)
    if left:  # the interpreter would wait for them for ever
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
