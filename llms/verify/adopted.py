"""Gates over deployments that exist already: folders with a `verify_adapter.py` in the shape of mlir-air's examples.

The adapter contract, its verifier and that verifier's weak spots: Xilinx/mlir-air e972f2942,
`programming_examples/llms`. Nothing of the folder is imported here; every gate starts a worker
(`adopted_worker.py`) that runs the adapter in a process of its own and hands over by files. The reference is the
one of our own models, unless the adapter brings `build_hf_model`.

Each gate answers with what it saw; a habit that makes a verdict worthless fails it and is named, one that is
harmless as long as something else holds is a note.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llms.checkpoints import Checkpoint, CheckpointError, cache_root, resolve
from llms.verify.capture import DiagnosisCapture
from llms.verify.chat import EncodedPrompt, encode_prompt
from llms.verify.diagnosis import cosines, diagnose
from llms.verify.gates import diagnosis_problems
from llms.verify.prompts import STYLES, PromptStyle, load_prompts
from llms.verify.records import Array, PrefillRecord
from llms.verify.reference import HFReference, ReferenceRun
from llms.verify.reference_cache import ReferenceCache
from llms.verify.report_model import describe_failure, diagnosis_payload, topk_gate_payload
from llms.verify.topk import K, TokenStep, TokenTrace, judge

WORKER = Path(__file__).with_name("adopted_worker.py")
ADAPTER = "verify_adapter.py"
#: Length that the examples compile their prefill for (mlir-air e972f2942).
MAX_SEQ = 2048
#: Cosine of two logit rows that are the same row computed twice by one device in different programs.
SAME_ROW = 0.99
#: Layers of a transformer differ; equal to this many digits they are one and the same record.
LOG_TAIL = 4000
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


class AdoptedError(Exception):
    """The adapter could not be judged; the text says at which stage and why."""


@dataclass(frozen=True)
class Verdict:
    """Outcome of a gate on an adopted deployment. `payload` is JSON-able; `notes` are weaknesses that passed."""

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
                if job.get("problems"):
                    raise AdoptedError("; ".join(job["problems"]))
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
        try:
            return resolve(name, explicit=Path(name) if Path(name).exists() else None)
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
            log = self._run_worker(asked)
            if not answer.is_file():
                raise AdoptedError(f"the process of the adapter died\n{log[-LOG_TAIL:]}")
            values = json.loads(answer.read_text(encoding="utf-8"))
            failed = values.get("failed")
            if failed:
                raise AdoptedError(f"{failed['stage']}: {failed['error']}\n{failed['traceback']}")
            with np.load(answer.with_suffix(".npz")) as stored:
                arrays = {name: stored[name] for name in stored.files}
        return Answered(values, arrays)

    def _run_worker(self, request: Path) -> str:
        process = subprocess.Popen(
            [sys.executable, str(WORKER), str(request)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=self._working_folder(),
            start_new_session=True,
        )
        try:
            return process.communicate(timeout=self.settings.limit_s or None)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            log = process.communicate()[0]
            raise AdoptedError(
                f"the adapter did not answer within {self.settings.limit_s:.0f} s\n{log[-LOG_TAIL:]}"
            ) from None
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise

    def _working_folder(self) -> Path:
        """The build folder of the example's Makefile when it is there, else one of ours: nothing is left behind."""
        built = self.folder / ("build_peano" if os.environ.get("PEANO_INSTALL_DIR") else "build_chess")
        if built.is_dir():
            return built
        own = cache_root() / "adopted" / self.name
        own.mkdir(parents=True, exist_ok=True)
        return own


@dataclass(frozen=True)
class Reference:
    """One run of the reference: its trace, its logits [steps, vocab], and the inside view when there is one."""

    trace: TokenTrace
    logits: Array
    run: ReferenceRun | None


def trace_of(ids: Sequence[int], steps: Sequence[Mapping[str, Any]]) -> TokenTrace:
    """The hand-over of a worker as the gates know it."""
    made = (TokenStep(s["token"], tuple(s["topk"]), s["finite"], s["vocab"]) for s in steps)
    return TokenTrace(tuple(int(token) for token in ids), tuple(made))


# -- the gates ------------------------------------------------------------------------------------


def contract(adopted: Adopted) -> Verdict:
    """Names and signatures of the contract, and the configuration against the checkpoint's own."""
    problems = list(adopted.description["problems"])
    notes: list[str] = []
    if not problems:
        text = (adopted.checkpoint.path / "config.json").read_text(encoding="utf-8")
        published = json.loads(text)
        heads = published.get("num_attention_heads")
        if heads and "head_dim" not in published:
            published["head_dim"] = published["hidden_size"] // heads
        for ours, theirs in CONFIG_FIELDS.items():
            stated, real = adopted.description["config"].get(ours), published.get(theirs)
            if stated is not None and real is not None and stated != real:
                problems.append(f"build_config() says {ours} = {stated}, the checkpoint {theirs} = {real}")
        if adopted.prompt_file is None:
            notes.append("no prompts of its own: our prompt set is used")
    return _verdict("adopted_contract", problems, notes, {"config": adopted.description.get("config", {})})


def records(adopted: Adopted) -> Verdict:
    """Records are copies of what happened, complete, finite, and of the production run."""
    prompt = adopted.prompts()[0]
    job = {"name": "records", "ids": list(prompt.ids), "n_tokens": 2, "inside": True, "spy": True}
    answer = adopted.capture([job], lite_mode=False)
    index, seen = answer.job("records")
    problems = [*_view_problems(seen), *_shape_problems(adopted, seen, len(prompt))]
    problems += [
        f"step {i} has logits that are not finite" for i, s in enumerate(seen["steps"]) if not s["finite"]
    ]
    problems += [
        f"step {i}: top1_token {s['token']} is not the argmax {s['topk'][0]} of its own logits"
        for i, s in enumerate(seen["steps"])
        if s["token"] != s["topk"][0]
    ]
    problems += _head_problems(adopted, answer, index)
    notes = _spy_notes(adopted, seen["spy"])
    return _verdict("adopted_records", problems, notes, {"shapes": seen["shapes"], "spy": seen["spy"]})


def consistency(adopted: Adopted) -> Verdict:
    """What needs no reference: state is reset, decode continues prefill, a prompt that is too long is refused."""
    prompts = adopted.prompts()
    first = list(prompts[0].ids)
    other = list(prompts[-1].ids) if len(prompts) > 1 else first[::-1]
    jobs: list[dict[str, Any]] = [
        {"name": "first", "ids": first, "n_tokens": 2, "keep_logits": True},
        {"name": "other", "ids": other, "n_tokens": 2, "keep_logits": True},
        {"name": "again", "ids": first, "n_tokens": 2, "keep_logits": True},
    ]
    longer = adopted.capture(jobs, lite_mode=True)
    token = longer.job("first")[1]["steps"][0]["token"]
    too_long = (first * (MAX_SEQ // len(first) + 1))[: MAX_SEQ + 1]
    rest = adopted.capture(
        [
            {"name": "one more", "ids": [*first, token], "n_tokens": 1, "keep_logits": True},
            {"name": "too long", "ids": too_long, "n_tokens": 1, "must_fail": True},
        ],
        lite_mode=True,
    )
    problems = []
    if not np.array_equal(longer.arrays["0/logits"], longer.arrays["2/logits"]):
        problems.append("the same prompt gives other logits after another one: per-prompt state is not reset")
    decoded, prefilled = longer.arrays["0/logits"][1], rest.arrays["0/logits"][0]
    cosine = float(cosines(decoded, prefilled))
    if not cosine >= SAME_ROW:
        problems.append(
            f"prefill of n+1 tokens and prefill of n plus one decode step disagree (cosine {cosine:.4f}, limit "
            f"{SAME_ROW}): look at decode positions, the KV cache and the prediction row"
        )
    notes = []
    refused = rest.job("too long")[1]["error"]
    if refused is None:
        notes.append(f"a prompt of {MAX_SEQ + 1} tokens is taken without an error: it is cut silently")
    payload = {"prefill_decode_cosine": cosine, "too_long": refused}
    return _verdict("adopted_consistency", problems, notes, payload)


def token_set(adopted: Adopted) -> Verdict:
    """The token-set gate, as for our own models."""
    settings, prompts = adopted.settings, adopted.prompts()
    jobs = [
        {"name": f"prompt {i}", "ids": list(p.ids), "n_tokens": settings.n_tokens}
        for i, p in enumerate(prompts)
    ]
    answer = adopted.capture(jobs, lite_mode=True)
    npu = [trace_of(p.ids, answer.job(f"prompt {i}")[1]["steps"]) for i, p in enumerate(prompts)]
    hf = adopted.reference([(f"prompt {i}", p.ids, settings.n_tokens) for i, p in enumerate(prompts)])
    result = judge(npu, [run.trace for run in hf], n_tokens=settings.n_tokens)
    payload = topk_gate_payload(result, [prompt.text for prompt in prompts], adopted.tokenizer)
    payload["pyxrt"] = answer.values["pyxrt"]
    return Verdict(result.ok, "topk_gate", payload, "" if result.ok else describe_failure(payload))


def end_of_text(adopted: Adopted) -> Verdict:
    """A prompt that holds end-of-text tokens, as every second turn of a chat does: which row is predicted from?"""
    eos = adopted.tokenizer.eos_token_id
    plain = [token for token in adopted.prompts()[0].ids if token != eos]
    middle = len(plain) // 2
    if eos is None or middle < 2:
        return _verdict("adopted_end_of_text", [], ["no end-of-text token, or too short a prompt"], {})
    ids = [*plain[:middle], eos, eos, *plain[middle:]]
    answer = adopted.capture(
        [{"name": "eos", "ids": ids, "n_tokens": 2, "keep_logits": True}], lite_mode=True
    )
    runs = adopted.reference(
        [(f"{n} tokens", ids[:n], 2 if n == len(ids) else 1) for n in range(len(ids), len(ids) - 3, -1)]
    )
    rows = answer.arrays["0/logits"]
    fits = [float(cosines(rows[0], np.asarray(run.logits[0], np.float32))) for run in runs]
    best = int(np.argmax(fits))
    problems = []
    if best:
        problems.append(
            f"a prompt of {len(ids)} tokens with 2 end-of-text tokens inside is predicted from position "
            f"{len(ids) - 1 - best} instead of {len(ids) - 1}: the prompt length is recounted as the number of tokens that "
            "differ from end-of-text. Chat templates that end a turn with it get a wrong row and wrong decode "
            "positions; pass the length on instead"
        )
    else:
        npu = trace_of(ids, answer.job("eos")[1]["steps"])
        result = judge([npu], [runs[0].trace], n_tokens=2)
        problems += result.reasons
    payload = {"tokens": len(ids), "cosine_by_rows_back": fits}
    return _verdict("adopted_end_of_text", problems, [], payload)


def diagnosis(adopted: Adopted) -> Verdict:
    """Cosine per layer against the reference, once the record shows the layers at all."""
    prompt = adopted.prompts()[0]
    job = {"name": "layers", "ids": list(prompt.ids), "n_tokens": 1, "inside": True}
    answer = adopted.capture([job], lite_mode=False)
    index, seen = answer.job("layers")
    problems = _view_problems(seen)
    (run,) = adopted.reference([("layers", prompt.ids, 1)])
    if run.run is None:
        return _verdict("adopted_diagnosis", problems, ["own reference model: no per-layer comparison"], {})
    layers = [{"ffn_out": _array(answer, index, f"layer {i}")} for i in range(seen["n_layers"])]
    record = PrefillRecord(
        [layer if layer["ffn_out"].size else {} for layer in layers],
        _array(answer, index, "final_hidden_normed"),
        _array(answer, index, "logits_at_pred"),
        seen["steps"][0]["token"],
    )
    found = diagnose(DiagnosisCapture(record, (), (), False), run.run)
    payload = diagnosis_payload(found, prompt.text)
    hidden = _no_decode(diagnosis_problems(found))
    message = "\n".join([*problems, *([] if problems else hidden)])
    return Verdict(not message, "diagnosis", payload, message)


def _array(answer: Answered, index: int, name: str) -> Array:
    return answer.arrays.get(f"{index}/{name}", np.empty(0, np.float32))


def _no_decode(problems: Sequence[str]) -> list[str]:
    """The contract's runners show no layers of decode steps; that is not offered, not missing."""
    return [problem for problem in problems if not problem.startswith("decode")]


def _view_problems(seen: Mapping[str, Any]) -> list[str]:
    problems = []
    if seen["shared_memory"]:
        pairs = ", ".join(f"{a} and {b}" for a, b in seen["shared_memory"][:3])
        problems.append(
            f"layer_intermediates are views of one buffer ({pairs}{', ...' if len(seen['shared_memory']) > 3 else ''}): "
            "every entry shows the layer that ran last. Copy what is recorded: np.array(x, copy=True)"
        )
    for cause, names in seen["changed"].items():
        if names:
            problems.append(
                f"the prefill record changes when the runner goes on ({cause}): {', '.join(names[:4])}"
                f"{', ...' if len(names) > 4 else ''} are views of device buffers, not copies"
            )
    return problems


def _shape_problems(adopted: Adopted, seen: Mapping[str, Any], count: int) -> list[str]:
    config, shapes = adopted.description["config"], seen["shapes"]
    wanted = {f"layer {i}": [count, config["emb_dim"]] for i in range(config["n_layers"])}
    wanted["final_hidden_normed"] = [count, config["emb_dim"]]
    found = seen["n_layers"]
    problems = []
    if found != config["n_layers"]:
        problems.append(
            f"{found} entries in layer_intermediates, the configuration has {config['n_layers']} layers"
        )
    for name, shape in wanted.items():
        if name in shapes and shapes[name] != shape:
            problems.append(
                f"{name} has shape {shapes[name]}, the contract wants {shape}: real positions only"
            )
        elif name not in shapes and name != f"layer {config['n_layers'] - 1}":
            problems.append(f"{name} is missing")
    return problems


def _head_problems(adopted: Adopted, answer: Answered, index: int) -> list[str]:
    """The recorded hidden state must lead to the recorded logits through the checkpoint's own head."""
    hidden, logits = _array(answer, index, "final_hidden_normed"), _array(answer, index, "logits_at_pred")
    head = _lm_head(adopted.checkpoint.path)
    if head is None or not hidden.size or hidden.ndim != 2 or hidden.shape[1] != head.shape[1]:
        return []
    implied = head @ hidden[-1]
    size = min(implied.size, logits.size)
    cosine = float(cosines(implied[:size], logits[:size]))
    if cosine >= SAME_ROW:
        return []
    return [
        f"final_hidden_normed of the last position does not lead to logits_at_pred (cosine {cosine:.4f}, limit "
        f"{SAME_ROW}): the inside view is not that of the run that made the logits, or the row is another one"
    ]


def _lm_head(folder: Path) -> Array | None:
    from llms.checkpoints import CheckpointError, load_tensors, resolve

    try:
        tensors = load_tensors(resolve(str(folder), explicit=folder))
    except CheckpointError:
        return None
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        if name in tensors:
            found: Array = np.asarray(tensors[name]).astype(np.float32)
            return found
    return None


def _spy_notes(adopted: Adopted, spy: Mapping[str, Any]) -> list[str]:
    notes = []
    repeated = {
        name: calls
        for name, calls in spy["after"].items()
        if calls >= adopted.description["config"]["n_layers"]
    }
    if repeated:
        text = ", ".join(f"{name} {calls} times" for name, calls in sorted(repeated.items()))
        notes.append(
            f"the inside view comes from a second pass after the production prefill ({text}): it diagnoses "
            "that pass, not the run that was judged"
        )
    pads, others = set(spy["pads"]["production"]), set(spy["pads"]["after"])
    if pads and others and pads != others:
        notes.append(
            f"the second pass pads with token {sorted(others)}, production with {sorted(pads)}: equal only as "
            "long as attention is causal and padding reaches no real position"
        )
    return notes


def _verdict(kind: str, problems: list[str], notes: list[str], payload: dict[str, Any]) -> Verdict:
    content = {**payload, "problems": problems, "notes": notes}
    return Verdict(not problems, kind, content, "\n".join(problems), tuple(notes))


@dataclass(frozen=True)
class Gate:
    """A gate on adopted adapters: its name, its phase, and the function that judges."""

    name: str
    phase: int
    judge: Callable[[Adopted], Verdict]


GATES = (
    Gate("contract", 0, contract),
    Gate("records", 3, records),
    Gate("consistency", 3, consistency),
    Gate("topk_gate", 6, token_set),
    Gate("end_of_text", 6, end_of_text),
    Gate("diagnosis", 6, diagnosis),
)
