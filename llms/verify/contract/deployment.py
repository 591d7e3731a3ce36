"""A model folder as the gates see it: adapter, checkpoint, tokenizer, runner, reference.

The adapter contract is that of the LLM examples of Xilinx/mlir-air (e972f2942): an adapter written for them
loads here unmodified. Ours may offer more, all optional:

* ``checkpoint(model_name) -> Checkpoint`` resolves a model name to a folder on disk, for the reference, the
  tokenizer and the report; without it the name goes through :func:`llms.checkpoints.resolve` as it is;
* ``build_config(model_name)`` with one parameter is given the model name; the contract's own has none;
* ``hf_reference`` and ``build_hf_model`` as in the contract.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from llms.checkpoints import Checkpoint, resolve
from llms.verify.contract.abilities import offered
from llms.verify.contract.adapter import load_adapter as load_adapter
from llms.verify.contract.chat import EncodedPrompt, encode_prompt
from llms.verify.contract.models import ADAPTER
from llms.verify.contract.models import DeploymentError as DeploymentError
from llms.verify.contract.models import find_folder as find_folder
from llms.verify.contract.prompts import STYLES, PromptStyle, load_prompts
from llms.verify.contract.records import NpuRunner
from llms.verify.contract.topk import N_TOKENS
from llms.verify.reference.cache import ReferenceCache
from llms.verify.reference.hf import HFReference
from llms.verify.reference.matched import MatchedReference

MAX_SEQ = 2048
# Tokens that a gate generates at most: those of the token-set gate, and the decode step that is profiled.
GENERATED = N_TOKENS + 1
# Positions that hold every chat prompt of the sets with its generation: nothing has to be encoded to know it.
_ROOMY = 512
CONFIG_FIELDS = ("n_layers", "emb_dim", "n_kv_heads", "head_dim")
_RUNNER_MEMBERS = ("name", "prefill", "decode_step")

Device = AbstractContextManager[Any]
"""Held while a gate works on the device: the NPU lock on silicon."""

NO_DEVICE: Device = nullcontext()
"""For a device that nobody else can use."""

_T = TypeVar("_T")


class Deployment:
    """One model under test. Cheap to make: weights, tokenizer, runner and reference are built on first use.

    Attributes:
        folder: the model's folder.
        name: its name, which reports use.
        adapter: the loaded adapter module, or an object with the names of the contract.
        use_cache: whether reference runs come from and go to the disk cache.
        choice: key of ``MODEL_CHOICES`` in use, or ``None`` for an explicit checkpoint.
        model_name: what ``resolve_model`` answered: a checkpoint id or a path.
    """

    def __init__(
        self,
        folder: Path,
        adapter: Any,
        *,
        checkpoint: Path | str | None = None,
        model_choice: str | None = None,
        use_cache: bool = True,
    ) -> None:
        self.folder = folder
        self.name = folder.name
        self.adapter = adapter
        self.use_cache = use_cache
        choices: Mapping[str, str] = adapter.MODEL_CHOICES
        self.choice: str | None = None
        if checkpoint is not None:
            wanted = str(Path(checkpoint).expanduser().absolute())
        else:
            wanted = model_choice or getattr(adapter, "DEFAULT_MODEL", None) or next(iter(choices))
            self.choice = wanted if wanted in choices else None
            if self.choice is None and model_choice is not None and not _names_checkpoint(wanted):
                raise DeploymentError(
                    f"{self.name} has no model {wanted!r}: choose one of {', '.join(choices)}, "
                    f"a checkpoint id (org/model) or a path"
                )
        self.model_name = str(adapter.resolve_model(wanted))
        self._runners: dict[tuple[int, bool, bool], NpuRunner] = {}
        self._references: dict[str, HFReference] = {}
        self._kept: dict[Hashable, tuple[Any, Exception | None]] = {}

    @classmethod
    def from_folder(
        cls,
        path_or_model_name: str | Path,
        *,
        checkpoint: Path | str | None = None,
        model_choice: str | None = None,
        use_cache: bool = True,
    ) -> Deployment:
        """Load a deployment.

        Args:
            path_or_model_name: ``smollm2_135m``, ``llms/smollm2_135m`` or the folder of a foreign adapter.
            checkpoint: HF folder or GGUF file to use instead of the model's own; goes through
                ``resolve_model``.
            model_choice: key of ``MODEL_CHOICES`` (``base``, ``instruct``), an id or a path.
            use_cache: ``False`` bypasses the disk cache of reference runs.

        Raises:
            DeploymentError: unknown folder, unusable adapter, unknown choice.
        """
        folder = find_folder(path_or_model_name)
        adapter = load_adapter(folder)
        return cls(folder, adapter, checkpoint=checkpoint, model_choice=model_choice, use_cache=use_cache)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The resolved checkpoint of the device side.

        Raises:
            llms.checkpoints.CheckpointError: there is none, or it is torn.
        """
        return self._resolve(self.model_name)

    @cached_property
    def reference_checkpoint(self) -> Checkpoint:
        """The checkpoint of the reference: the same, unless ``hf_reference`` of the adapter names another."""
        name = self.model_name
        if callable(getattr(self.adapter, "hf_reference", None)):
            name = str(self.adapter.hf_reference(name))
        return self.checkpoint if name == self.model_name else self._resolve(name)

    def _resolve(self, name: str) -> Checkpoint:
        if callable(getattr(self.adapter, "checkpoint", None)):
            found = self.adapter.checkpoint(name)
            if not isinstance(found, Checkpoint):
                raise DeploymentError(
                    f"{self.folder / ADAPTER}: checkpoint() returned {type(found).__name__}"
                )
            return found
        return resolve(name)

    @cached_property
    def _config(self) -> Any:
        build = self.adapter.build_config
        config = build(self.model_name) if takes_model_name(build) else build()
        missing = [name for name in CONFIG_FIELDS if not hasattr(config, name)]
        if missing:
            raise DeploymentError(f"{self.folder / ADAPTER}: build_config() lacks {', '.join(missing)}")
        return config

    def config(self) -> Any:
        """Return the adapter's model configuration (n_layers, emb_dim, n_kv_heads, head_dim and more)."""
        return self._config

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the reference checkpoint."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.reference_checkpoint.path, local_files_only=True)

    @cached_property
    def prompt_style(self) -> PromptStyle:
        """The style that fits the model: its choice when that names a style, else by its chat template.

        Chat templates are long: a model whose positions do not hold one prompt of the set and its generation
        gets plain prompts.
        """
        if self.choice in STYLES:
            return "instruct" if self.choice == "instruct" and self._chat_fits() else "base"
        has_template = bool(getattr(self.tokenizer, "chat_template", None))
        return "instruct" if has_template and self._chat_fits() else "base"

    def _chat_fits(self) -> bool:
        room = self.prompt_room
        if room is None or not getattr(self.tokenizer, "chat_template", None):
            return True
        return max(len(self.encode(text, "instruct")) for text in load_prompts("instruct")) <= room

    @property
    def prompt_room(self) -> int | None:
        """Tokens that a prompt may have, so that the model's positions hold the generation of every gate too.

        None where every prompt of the sets fits anyway.
        """
        limit = getattr(self.config(), "max_position", None)
        return None if limit is None or limit >= _ROOMY else int(limit) - GENERATED

    def encode(self, text: str, style: PromptStyle | None = None) -> EncodedPrompt:
        """Encode one prompt in the given style (default: the model's), chat template applied once."""
        return encode_prompt(self.tokenizer, text, style or self.prompt_style)

    def prompts(
        self, n: int | None = None, style: PromptStyle | None = None, *, file: Path | None = None
    ) -> tuple[EncodedPrompt, ...]:
        """Return the first ``n`` prompts (all when None) of the style's set or of ``file``, encoded.

        A model of few positions gets the beginning of a prompt of the set, see :attr:`prompt_room`; ``text``
        is what was encoded. A user's prompts are never cut.

        Raises:
            DeploymentError: not even the first letter of a prompt leaves room for the generation.
        """
        chosen = style or self.prompt_style
        fit = self._fitting if file is None else self.encode
        return tuple(fit(text, chosen) for text in load_prompts(chosen, n, file=file))

    def _fitting(self, text: str, style: PromptStyle) -> EncodedPrompt:
        """Encode a prompt; while it is too long, leave out its last word, and of a single word letters."""
        whole, room = text, self.prompt_room
        prompt = self.encode(text, style)
        while room is not None and len(prompt) > room:
            text = text.rpartition(" ")[0] or text[:-1]
            if not text:
                raise DeploymentError(
                    f"{self.name}: prompt {whole!r} and {GENERATED} generated tokens do not fit the model's "
                    f"{self.config().max_position} positions, however short the prompt is cut"
                )
            prompt = self.encode(text, style)
        return prompt

    def runner(self, max_seq: int = MAX_SEQ, *, npu_attn: bool = True, lite_mode: bool = False) -> NpuRunner:
        """Return the device side, built once per set of arguments.

        Raises:
            DeploymentError: what ``build_runner`` returns is no runner.
        """
        key = (max_seq, npu_attn, lite_mode)
        if key not in self._runners:
            runner = self.adapter.build_runner(
                self.model_name,
                self.config(),
                max_seq,
                self.tokenizer,
                npu_attn=npu_attn,
                lite_mode=lite_mode,
            )
            lacking = [name for name in _RUNNER_MEMBERS if not hasattr(runner, name)]
            if lacking:
                raise DeploymentError(
                    f"{self.folder / ADAPTER}: build_runner() returned {type(runner).__name__} "
                    f"without {', '.join(lacking)}"
                )
            self._runners[key] = runner
        return self._runners[key]

    def release_runners(self) -> None:
        """Drop the built runners (a runner's optional ``close()`` is called), so that the device is free."""
        while self._runners:
            _, runner = self._runners.popitem()
            _close(runner)

    @contextmanager
    def on_device(
        self,
        device: Device = NO_DEVICE,
        lengths: Collection[int] = (),
        *,
        max_seq: int = MAX_SEQ,
        runner: NpuRunner | None = None,
        keep: bool = False,
    ) -> Iterator[NpuRunner]:
        """Build and prepare a runner, then hold ``device`` until the runner's contexts are closed again.

        Loading weights and compiling need no device, so they come before it is taken.

        Args:
            device: what is held, see :data:`Device`.
            lengths: numbers of prompt tokens to prepare for.
            max_seq: positions of the KV cache.
            runner: one that was built elsewhere, instead of :meth:`runner`.
            keep: leave the runners open at the end.
        """
        used = runner if runner is not None else self.runner(max_seq)
        prepare = offered(used, "prepare")
        if prepare is not None:
            for length in sorted(set(lengths)):
                prepare(length)
        with device:
            try:
                yield used
            finally:
                if not keep:
                    if runner is not None:
                        _close(runner)
                    self.release_runners()

    def once(self, key: Hashable, compute: Callable[[], _T], *, retry: bool = False) -> _T:
        """What ``compute`` returns, computed once per deployment and key: several tests judge one pass.

        An error is kept as well and raised again, so that a device that fails is not tried by every test;
        ``retry`` computes again after an error.
        """
        kept = self._kept.get(key)
        if kept is None or (retry and kept[1] is not None):
            try:
                kept = self._kept[key] = compute(), None
            except Exception as error:
                self._kept[key] = None, error
                raise
        elif kept[1] is not None:
            raise kept[1].with_traceback(None)
        value: _T = kept[0]
        return value

    def hf_reference(self, *, dtype: str = "bfloat16") -> HFReference:
        """Return the HF reference of this deployment, one object per ``dtype`` (``bfloat16`` for gates).

        The disk cache is bypassed where the deployment was opened so, and everywhere by
        ``PYTEST_NPU_NO_REFERENCE_CACHE=1``.
        """
        if dtype not in self._references:
            self._references[dtype] = HFReference(
                self.reference_checkpoint, dtype=dtype, cache=self._cache(), model=self._own_model()
            )
        return self._references[dtype]

    def matched_reference(self, *, reorder: int | None = None) -> MatchedReference:
        """Return a new arithmetic-matched reference of this deployment; disk cache as for HF's.

        ``reorder``: seed of another order of its sums, see
        :class:`llms.verify.reference.matched.MatchedReference`.

        An adapter's own ``build_hf_model`` is built anew for it, as the injection changes the model.
        """
        return MatchedReference(
            self.reference_checkpoint, cache=self._cache(), model=self._own_model(), reorder=reorder
        )

    def _cache(self) -> ReferenceCache | None:
        return ReferenceCache.default() if self.use_cache else None

    def _own_model(self) -> Any:
        """The Hugging Face model that the adapter builds, None when it leaves that to the reference."""
        build = getattr(self.adapter, "build_hf_model", None)
        if not callable(build):
            return None
        return build(self.model_name, str(self.reference_checkpoint.path), self.config())


def _close(runner: NpuRunner) -> None:
    close = offered(runner, "close")
    if close is not None:
        close()


def takes_model_name(build_config: Callable[..., Any]) -> bool:
    """Whether a ``build_config`` has a positional parameter; the contract's own has none."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(item.kind in kinds for item in inspect.signature(build_config).parameters.values())


def _names_checkpoint(name: str) -> bool:
    return "/" in name or Path(name).exists()
