"""Deployments that exist already: a folder with a `verify_adapter.py` in the shape of mlir-air's examples.

The adapter contract: Xilinx/mlir-air e972f2942, `programming_examples/llms`. Nothing of the folder is
imported here; every gate starts a worker (`adopted_worker.py`) that runs the adapter in a process of its own
and hands over by files. The reference is the one of our own models, unless the adapter brings
`build_hf_model`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llms.checkpoints import Checkpoint, CheckpointError, cache_root, resolve
from llms.verify.contract.chat import EncodedPrompt, encode_prompt
from llms.verify.contract.prompts import STYLES, PromptStyle, load_prompts
from llms.verify.contract.records import Array
from llms.verify.contract.topk import K, TokenStep, TokenTrace
from llms.verify.foreign.process import AdoptedError, Ended, run_worker
from llms.verify.reference.cache import ReferenceCache
from llms.verify.reference.hf import HFReference, ReferenceRun

ADAPTER = "verify_adapter.py"
#: Length that the examples compile their prefill for (mlir-air e972f2942).
MAX_SEQ = 2048
CONFIG_FIELDS = {
    "n_layers": "num_hidden_layers",
    "emb_dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}
PROMPT_FILES = ("prompts.txt", "verify_prompts.txt", "prompts_{style}.txt", "prompts/{style}.txt")


@dataclass(frozen=True)
class Verdict:
    """Outcome of a gate. `payload` is JSON-able; `notes` are weaknesses that did not fail it."""

    ok: bool
    kind: str
    payload: dict[str, Any]
    message: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Settings:
    """How adapters are run. `device` is held while a worker runs, as it owns the device; times in seconds."""

    checkpoint: Path | None = None
    choice: str | None = None
    prompts: int | None = 2
    n_tokens: int = 32
    silicon: bool = False
    use_cache: bool = True
    limit_s: float = 900.0
    device: Callable[[], AbstractContextManager[Any]] | None = None


@dataclass(frozen=True)
class Answered:
    """What a worker answered: plain values and arrays."""

    values: Mapping[str, Any]
    arrays: Mapping[str, Array] = field(default_factory=dict)

    def job(self, name: str) -> tuple[int, Mapping[str, Any]]:
        """Index and answer of one job."""
        for index, job in enumerate(self.values["jobs"]):
            if job["name"] == name:
                return index, job
        raise AdoptedError(f"the worker gave no answer for '{name}'")


def find_adapters(path: Path) -> tuple[Path, ...]:
    """Folders with an adapter: `path` itself, or its direct subfolders. Empty when there is none."""
    if (path / ADAPTER).is_file():
        return (path.resolve(),)
    return tuple(sorted(found.parent.resolve() for found in path.glob(f"*/{ADAPTER}")))


class Adopted:
    """One adopted adapter and what its workers have said so far."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder
        self.name = folder.name
        self.settings = settings
        self.remarks: dict[str, None] = {}

    # -- facts about the adapter -------------------------------------------------------------

    @cached_property
    def description(self) -> Mapping[str, Any]:
        """Names, signatures and configuration. Raises AdoptedError."""
        checkpoint = self.settings.checkpoint
        choice = str(checkpoint.absolute()) if checkpoint is not None else self.settings.choice
        return self._work({"command": "describe", "choice": choice}).values

    def _usable(self) -> Mapping[str, Any]:
        problems = self.description["problems"]
        if problems:
            raise AdoptedError(f"the adapter does not fulfil the contract: {'; '.join(problems)}")
        return self.description

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint of the reference. Raises AdoptedError."""
        name = str(self._usable()["reference"])
        folder = Path(self.description["folder"] or name)
        try:
            return resolve(name, explicit=folder if folder.exists() else None)
        except CheckpointError as error:
            raise AdoptedError(
                f"no weights for '{name}': {error}. Give them with --checkpoint PATH"
            ) from error

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer of the reference checkpoint."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.checkpoint.path, local_files_only=True)

    @cached_property
    def style(self) -> PromptStyle:
        """instruct or base, by the choice's name, else by the tokenizer's chat template."""
        choices = {value: key for key, value in self.description["choices"].items()}
        key = choices.get(self.description["model_name"])
        if key in STYLES:
            return "instruct" if key == "instruct" and self.tokenizer.chat_template else "base"
        return "instruct" if getattr(self.tokenizer, "chat_template", None) else "base"

    @cached_property
    def prompt_file(self) -> Path | None:
        """The adapter's own prompts, when its folder or the one above holds a file of prompts."""
        places = [self.folder, self.folder.parent / "verify", self.folder.parent]
        names = [name.format(style=self.style) for name in PROMPT_FILES]
        return next((p / n for p in places for n in names if (p / n).is_file()), None)

    def prompts(self) -> list[EncodedPrompt]:
        """The prompts of the gates, encoded once with the chat template where there is one."""
        texts = load_prompts(self.style, file=self.prompt_file)
        wanted = texts if self.settings.prompts is None else texts[: self.settings.prompts]
        return [encode_prompt(self.tokenizer, text, self.style) for text in wanted]

    def facts(self) -> dict[str, Any]:
        """What a report says about the deployment."""
        checkpoint = self.checkpoint
        return {
            "checkpoint": {
                "label": checkpoint.label,
                "kind": checkpoint.kind,
                "path": str(checkpoint.path),
                "content_hash": checkpoint.content_hash,
            },
            "variant": self.description["model_name"],
            "config": {
                key: value for key, value in self.description["config"].items() if key in CONFIG_FIELDS
            },
        }

    # -- both sides --------------------------------------------------------------------------

    def capture(self, jobs: list[dict[str, Any]], *, lite_mode: bool) -> Answered:
        """Run the adapter's runner over jobs, in a process of its own."""
        request = {
            "command": "capture",
            "model_name": self._usable()["model_name"],
            "tokenizer": str(self.checkpoint.path),
            "max_seq": MAX_SEQ,
            "lite_mode": lite_mode,
            "k": K,
            "jobs": jobs,
        }
        device = self.settings.device
        if device is None:
            answer = self._work(request)
        else:
            with device():
                answer = self._work(request)
        if answer.values["problems"]:
            raise AdoptedError("; ".join(answer.values["problems"]))
        return answer

    @cached_property
    def inside(self) -> Answered:
        """The first prompt with layer outputs, watched by the spy, and one decode step; captured once."""
        ids = list(self.prompts()[0].ids)
        job = {"name": "inside", "ids": ids, "n_tokens": 2, "inside": True, "spy": True}
        return self.capture([job], lite_mode=False)

    def reference(self, jobs: list[tuple[str, Sequence[int], int]]) -> list[Reference]:
        """Run the reference over (name, ids, n_tokens)."""
        if self._usable()["own_reference"]:
            return self._own_reference(jobs)
        cache = ReferenceCache.default() if self.settings.use_cache else None
        model = HFReference(self.checkpoint, cache=cache)
        runs = [model.run(ids, n_tokens) for _, ids, n_tokens in jobs]
        model.release()
        return [Reference(run.trace(), run.logits, run) for run in runs]

    def _own_reference(self, jobs: list[tuple[str, Sequence[int], int]]) -> list[Reference]:
        request = {
            "command": "reference",
            "model_name": self.description["model_name"],
            "reference": str(self.checkpoint.path),
            "k": K,
            "jobs": [{"name": name, "ids": list(ids), "n_tokens": count} for name, ids, count in jobs],
        }
        answer = self._work(request)
        return [
            Reference(
                trace_of(ids, answer.job(name)[1]["steps"]),
                answer.arrays[f"{answer.job(name)[0]}/logits"],
                None,
            )
            for name, ids, _ in jobs
        ]

    def _work(self, request: dict[str, Any]) -> Answered:
        """Start a worker and wait for its answer. Raises AdoptedError with the stage and the traceback."""
        with tempfile.TemporaryDirectory(prefix="adopted-") as work:
            answer = Path(work) / "answer.json"
            content = {
                **request,
                "folder": str(self.folder),
                "silicon": self.settings.silicon,
                "answer": str(answer),
            }
            asked = Path(work) / "request.json"
            asked.write_text(json.dumps(content), encoding="utf-8")
            cwd = self._working_folder()
            ended = run_worker(asked, answer, cwd, self.settings.limit_s)
            if not answer.is_file():
                raise AdoptedError(f"the process of the adapter died ({ended.how})\n{ended.printed}")
            values = json.loads(answer.read_text(encoding="utf-8"))
            failed = values.get("failed")
            if failed:
                printed = f"\nprinted before:\n{ended.printed}" if ended.printed else ""
                raise AdoptedError(
                    f"{failed['stage']}: {failed['error']} (started in {cwd})\n{failed['traceback']}{printed}"
                )
            with np.load(answer.with_suffix(".npz")) as stored:
                arrays = {name: stored[name] for name in stored.files}
        self._remark(values["threads"], ended)
        return Answered(values, arrays)

    def _remark(self, threads: list[str], ended: Ended) -> None:
        if threads:
            self.remarks[f"leaves threads running that its process waits for ({', '.join(threads[:3])})"] = (
                None
            )
        if ended.left:
            self.remarks[f"leaves {ended.left} processes behind, which keep the device; they were ended"] = (
                None
            )

    def take_remarks(self) -> tuple[str, ...]:
        """What the processes of the adapter did since the last call."""
        taken, self.remarks = tuple(self.remarks), {}
        return taken

    def _working_folder(self) -> Path:
        """The build folder of the example's Makefile when it is there, else one of ours."""
        built = self.folder / ("build_peano" if os.environ.get("PEANO_INSTALL_DIR") else "build_chess")
        if built.is_dir():
            return built
        own = cache_root() / "adopted" / self.name
        own.mkdir(parents=True, exist_ok=True)
        return own


@dataclass(frozen=True)
class Reference:
    """One run of the reference: trace, logits [steps, vocab], and the inside view when there is one."""

    trace: TokenTrace
    logits: Array
    run: ReferenceRun | None


def trace_of(ids: Sequence[int], steps: Sequence[Mapping[str, Any]]) -> TokenTrace:
    """The hand-over of a worker as the gates know it."""
    made = (TokenStep(s["token"], tuple(s["topk"]), s["finite"], s["vocab"]) for s in steps)
    return TokenTrace(tuple(int(token) for token in ids), tuple(made))
