"""An adapter and a runner in another process, behind the contract of those in this one.

The adapter contract is that of Xilinx/mlir-air e972f2942, `programming_examples/llms`. Nothing of the foreign
folder is imported here: :class:`RemoteAdapter` has the names of the contract, and every runner that it builds
is a process of its own (`worker.py`). Every gate takes a :class:`RemoteDeployment`::

    deployment = RemoteDeployment(RemoteAdapter(folder, RemoteSettings(checkpoint=weights)))
    outcome = topk_gate(deployment, deployment.hf_reference(), deployment.prompts(2))
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llms.checkpoints import Checkpoint, CheckpointError, resolve
from llms.verify.contract.chat import EncodedPrompt
from llms.verify.contract.deployment import MAX_SEQ, Deployment
from llms.verify.contract.prompts import PromptStyle, load_prompts
from llms.verify.contract.records import Array, DecodeProbe, DecodeStepRecord, PrefillRecord, frozen_copy
from llms.verify.foreign.process import RemoteError, Worker, WorkerExit
from llms.verify.reference.arithmetic import DeviceArithmetic
from llms.verify.reference.hf import HFReference, ReferenceRun

PROMPT_FILES = ("prompts.txt", "verify_prompts.txt", "prompts_{style}.txt", "prompts/{style}.txt")
#: Optional methods of a runner that can be asked for in another process.
ABILITIES = ("decode_step_probed", "kv_cache", "prompt_limits", "rope_table", "device_arithmetic")
#: Fields of a foreign configuration that have one meaning everywhere.
CONFIG_FIELDS = ("n_layers", "emb_dim", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size")


class AdoptedWeakness(UserWarning):
    """A foreign deployment does something that is harmless only as long as something else holds."""


@dataclass(frozen=True)
class RemoteSettings:
    """How a foreign adapter is run.

    Attributes:
        checkpoint: weights instead of the adapter's own.
        choice: key of its ``MODEL_CHOICES``, or an id.
        pyxrt: module that its process imports in place of ``pyxrt``; None for the real one.
        limit_s: longest time of one answer in seconds, 0 for no limit.
        device: makes what is held while a runner's process lives, as that process owns the device.
    """

    checkpoint: Path | None = None
    choice: str | None = None
    pyxrt: str | None = None
    limit_s: float = 900.0
    device: Callable[[], AbstractContextManager[Any]] | None = None


class RemoteAdapter:
    """The names of the adapter contract, answered by an adapter that is imported in another process only."""

    def __init__(self, folder: Path, settings: RemoteSettings) -> None:
        self.folder = folder
        self.settings = settings
        #: Optional methods of its runners; None until one was built.
        self.abilities: Sequence[str] | None = None

    @cached_property
    def described(self) -> Mapping[str, Any]:
        """What the adapter says of itself, ``problems`` included; starts a process. Raises RemoteError."""
        checkpoint = self.settings.checkpoint
        choice = str(checkpoint.absolute()) if checkpoint is not None else self.settings.choice
        worker = self.worker()
        try:
            described: Mapping[str, Any] = worker.call("describe", choice=choice)
        finally:
            self.warn_of(worker.close())
        return described

    @property
    def description(self) -> Mapping[str, Any]:
        """The same of an adapter that fulfils the contract. Raises RemoteError naming what it lacks."""
        problems = self.described["problems"]
        if problems:
            raise RemoteError(f"the adapter does not fulfil the contract: {'; '.join(problems)}")
        return self.described

    @property
    def MODEL_CHOICES(self) -> Mapping[str, str]:  # noqa: N802 (the contract's name)
        """Key -> checkpoint id."""
        choices: Mapping[str, str] = self.description["choices"]
        return choices

    @property
    def DEFAULT_MODEL(self) -> str:  # noqa: N802
        """Key of the model that was asked for, or of the adapter's default."""
        return str(self.description["choice"])

    def resolve_model(self, choice: str) -> str:
        """The model of the choice in the settings; the adapter was asked for no other one."""
        return str(self.description["model_name"])

    def build_config(self) -> SimpleNamespace:
        """The configuration, as far as its fields have one meaning everywhere."""
        config = self.description["config"]
        return SimpleNamespace(**{name: config[name] for name in CONFIG_FIELDS if name in config})

    def checkpoint(self, name: str) -> Checkpoint:
        """The checkpoint of the reference, on which the device is judged. Raises RemoteError."""
        reference = str(self.description["reference"])
        folder = Path(self.description["folder"] or reference)
        try:
            return resolve(reference, explicit=folder if folder.exists() else None)
        except CheckpointError as error:
            raise RemoteError(
                f"no weights for '{reference}': {error}. Give them with --checkpoint PATH"
            ) from error

    def build_runner(
        self,
        model_name: str,
        config: object,
        max_seq: int,
        tokenizer: Any,
        *,
        npu_attn: bool = True,
        lite_mode: bool = False,
    ) -> RemoteRunner:
        """A runner whose process starts when it is first asked for something.

        ``max_seq`` is at least the length that the examples compile their prefill for.
        """
        request = {
            "model_name": model_name,
            "tokenizer": str(tokenizer.name_or_path),
            "max_seq": max(max_seq, MAX_SEQ),
            "npu_attn": npu_attn,
            "lite_mode": lite_mode,
        }
        return RemoteRunner(self, request)

    def prompt_file(self, style: str) -> Path | None:
        """The adapter's own prompts, when its folder or the one above holds a file of prompts."""
        places = [self.folder, self.folder.parent / "verify", self.folder.parent]
        names = [name.format(style=style) for name in PROMPT_FILES]
        return next((p / n for p in places for n in names if (p / n).is_file()), None)

    def worker(self) -> Worker:
        """A new process; whoever asked for it closes it."""
        return Worker(self.folder, pyxrt=self.settings.pyxrt, limit_s=self.settings.limit_s)

    def warn_of(self, ended: WorkerExit) -> None:
        """Warn of what a process left behind."""
        if ended.threads:
            names = ", ".join(ended.threads[:3])
            self.warn(f"leaves threads running that its process waits for ({names})")
        if ended.left:
            self.warn(f"leaves {ended.left} processes behind, which keep the device; they were ended")

    def warn(self, text: str) -> None:
        """Warn of a habit of this adapter."""
        warnings.warn(AdoptedWeakness(f"{self.folder.name}: {text}"), stacklevel=2)


class RemoteRunner:
    """A runner in another process; see :class:`llms.verify.contract.records.NpuRunner`.

    The device is held from the start of the process to :meth:`close`, as that process owns it. Records are
    copied when they are made, whatever the adapter does with its buffers later. Optional methods are there
    when the foreign runner has them. Every method raises RemoteError for what the adapter raises.
    """

    def __init__(self, adapter: RemoteAdapter, request: Mapping[str, Any]) -> None:
        self.name = f"{adapter.folder.name} in a process of its own"
        self._adapter = adapter
        self._request = request
        self._held = ExitStack()
        self._ended: WorkerExit | None = None
        self._arithmetics: dict[int, DeviceArithmetic] = {}
        self._lengths: set[int] = set()
        weakref.finalize(self, self._held.close)
        self._offer()

    @cached_property
    def _worker(self) -> Worker:
        """The process, started and with the foreign runner built in it."""
        settings, adapter = self._adapter.settings, self._adapter
        with ExitStack() as undo:
            undo.callback(self._held.close)
            if settings.device is not None:
                self._held.enter_context(settings.device())
            worker = adapter.worker()
            undo.callback(lambda: adapter.warn_of(worker.close()))
            adapter.abilities = worker.call("build_runner", **self._request)
            undo.pop_all()
        self._offer()
        return worker

    def _offer(self) -> None:
        for ability in self._adapter.abilities or ():
            setattr(self, ability, partial(self._ask, ability))

    def __getattr__(self, name: str) -> Any:
        """Optional methods: whether they are there is only known when a runner was built once."""
        if name in ABILITIES and self._adapter.abilities is None:
            _ = self._worker
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"{self.name} has no {name}")

    def prefill(self, prompt_tokens: NDArray[np.int64]) -> PrefillRecord:
        """Run the prompt ``int64[n]``."""
        record = PrefillRecord(**self._worker.call("prefill", ids=_integers(prompt_tokens)))
        self._lengths.add(len(prompt_tokens))
        return record

    def prefill_watched(self, prompt_tokens: NDArray[np.int64]) -> tuple[PrefillRecord, Mapping[str, Any]]:
        """As ``prefill``, and what was seen on the way: ``spy``, see `habits.py`."""
        watched = self._worker.call("prefill_watched", ids=_integers(prompt_tokens))
        return PrefillRecord(**watched["record"]), watched

    def changed(self) -> tuple[str, ...]:
        """Arrays of the watched record that the adapter has changed since."""
        changed: tuple[str, ...] = self._worker.call("changed")
        return changed

    def decode_step(self, input_token: int, current_pos: int) -> DecodeStepRecord:
        """Run one decode step."""
        answer = self._worker.call("decode_step", token=int(input_token), position=int(current_pos))
        return DecodeStepRecord(**answer)

    def close(self) -> WorkerExit | None:
        """End the process and release the device; how it ended, None when it was never started."""
        if self._ended is not None or "_worker" not in self.__dict__:
            return self._ended
        try:
            if "device_arithmetic" in self.__dict__:
                for length in self._lengths:  # asked for when both sides are compared
                    self.device_arithmetic(length)
        finally:
            with self._held:
                self._ended = self._worker.close()
        self._adapter.warn_of(self._ended)
        return self._ended

    def _ask(self, ability: str, *arguments: int) -> Any:
        if ability == "device_arithmetic" and arguments[0] in self._arithmetics:
            return self._arithmetics[arguments[0]]
        answer = self._worker.call("ability", name=ability, arguments=_integers(arguments))
        if ability == "decode_step_probed":
            return DecodeProbe(DecodeStepRecord(**answer["record"]), answer["layers"], answer["final"])
        if ability == "device_arithmetic":
            return self._arithmetics.setdefault(arguments[0], DeviceArithmetic.from_dict(answer))
        return answer


def _integers(values: Any) -> list[int]:
    return [int(value) for value in values]


class RemoteDeployment(Deployment):
    """A foreign deployment as the gates see it. Raises RemoteError for an adapter that cannot be asked."""

    adapter: RemoteAdapter

    def __init__(self, adapter: RemoteAdapter, *, use_cache: bool = True) -> None:
        settings = adapter.settings
        super().__init__(
            adapter.folder,
            adapter,
            checkpoint=settings.checkpoint,
            model_choice=settings.choice,
            use_cache=use_cache,
        )

    @property
    def prompt_style(self) -> PromptStyle:
        """``base`` for a model of that name or without a chat template, which nobody else would notice."""
        has_template = bool(getattr(self.tokenizer, "chat_template", None))
        return "instruct" if has_template and self.choice != "base" else "base"

    def prompts(
        self, n: int | None = None, style: PromptStyle | None = None, *, file: Path | None = None
    ) -> tuple[EncodedPrompt, ...]:
        """The adapter's own prompts first, then those of our set."""
        chosen = style or self.prompt_style
        own = file or self.adapter.prompt_file(chosen)
        texts = load_prompts(chosen, file=own) if own is not None else ()
        if file is None:
            texts = tuple(dict.fromkeys((*texts, *load_prompts(chosen))))
        return tuple(self.encode(text, chosen) for text in texts[:n])

    def hf_reference(self, *, dtype: str = "bfloat16") -> HFReference:
        """As for any deployment; an adapter's own reference model stays in the adapter's process."""
        if not self.adapter.description["own_reference"]:
            return super().hf_reference(dtype=dtype)
        return RemoteReference(self.adapter, self.model_name, self.reference_checkpoint)


class RemoteReference(HFReference):
    """An adapter's own reference model (``build_hf_model``): tokens and logits, no view inside.

    The arrays of layers and of the KV cache of its runs are empty, and nothing is kept on disk.
    """

    def __init__(self, adapter: RemoteAdapter, model_name: str, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint, cache=None)
        self._adapter = adapter
        self._model_name = model_name
        self._worker: Worker | None = None

    def release(self) -> None:
        """End its process; the next run starts another one."""
        worker, self._worker = self._worker, None
        if worker is not None:
            self._adapter.warn_of(worker.close())

    def _compute(
        self, prompt_ids: Sequence[int], n_tokens: int, forced: Sequence[int] | None
    ) -> ReferenceRun:
        if forced is not None:
            raise RemoteError("the adapter's own reference model cannot be fed with given tokens")
        if self._worker is None:
            self._worker = self._adapter.worker()
        logits: Array = self._worker.call(
            "reference",
            model_name=self._model_name,
            checkpoint=str(self.checkpoint.path),
            ids=_integers(prompt_ids),
            n_tokens=n_tokens,
        )
        tokens = tuple(int(token) for token in logits.argmax(-1))
        none = [frozen_copy(np.empty((0,) * axes, np.float32)) for axes in range(5)]
        return ReferenceRun(
            prompt_ids=tuple(int(token) for token in prompt_ids),
            tokens=tokens,
            fed=tokens[:-1],
            logits=frozen_copy(logits),
            prefill_layers=none[3],
            prefill_final=none[2],
            decode_layers=none[3],
            decode_final=none[2],
            keys=none[4],
            values=none[4],
        )
