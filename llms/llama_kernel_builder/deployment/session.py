"""A deployment ready to generate: set up once, then prefill and decode.

Set-up (checkpoint, weights, compilation, buffers) is here and outside every timed region; the timed
part calls nothing but the model's production functions `run_npu_prefill` and `run_npu_decode_step`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llms.checkpoints import Checkpoint, cache_root, load_tensors
from llms.llama_kernel_builder import host_ops, timeline
from llms.llama_kernel_builder.artefacts import Artefact, ArtefactStore
from llms.llama_kernel_builder.block_runner import BlockRunner
from llms.llama_kernel_builder.cache import KernelCache
from llms.llama_kernel_builder.driver import TWIN, current
from llms.llama_kernel_builder.exceptions import SequenceTooLong
from llms.llama_kernel_builder.llama_loop import BUCKETS, KernelSequence, all_programs, bucket_for
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.llama_kernel_builder.profiler import Profiler
from llms.llama_kernel_builder.resident import ResidentCache
from llms.llama_kernel_builder.rope_table import rope_table
from llms.llama_kernel_builder.timeline import Timeline
from llms.llama_kernel_builder.toolchains.seam import Toolchain, toolchain_for
from llms.llama_kernel_builder.weights import load_weights, pad_weights

Array = np.ndarray[Any, Any]


class InferenceModule(Protocol):
    """A model's `<m>_inference.py`; what the functions take and return stands in `ProductionFunctions`."""

    MODEL: str
    SEQUENCE: KernelSequence
    prepare_runtime: Callable[..., None]
    run_npu_prefill: Callable[..., tuple[int, Array, Array, Array, int]]
    run_npu_decode_step: Callable[..., tuple[int, Array]]


@dataclass(frozen=True)
class Generation:
    """One generated text with its times on the device clock.

    ttft_s: from before tokenising to the first token. tpot_s: mean time per output token after it
    (0 when only one token was generated). stopped: an end-of-turn token ended it.
    """

    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    ttft_s: float
    tpot_s: float
    stopped: bool

    @property
    def tps(self) -> float:
        """Steady-state tokens per second, prefill and first token excluded."""
        return 1.0 / self.tpot_s if self.tpot_s else 0.0


ARTEFACTS_ENV = "PYTEST_NPU_ARTEFACTS"


def artefact_folder(model: str) -> Path:
    """Where the compiled ELFs of a model are kept: in `$PYTEST_NPU_ARTEFACTS`, else in the cache."""
    root = os.environ.get(ARTEFACTS_ENV)
    return (Path(root) if root else cache_root() / "artefacts") / model


def compile_all(
    module: InferenceModule,
    config: ModelConfig,
    *,
    device: str = TWIN,
    folder: Path | None = None,
) -> Iterator[tuple[str, Artefact]]:
    """Compile every prefill bucket and the decode ELFs for a device; needs neither weights nor the device."""
    store = ArtefactStore(folder or artefact_folder(module.MODEL), toolchain_for(device, module.MODEL))
    for program in all_programs(module.SEQUENCE, config):
        yield program.name, store.get(program)


class Session:
    """Weights, kernels and buffers of one model on the current device.

    max_seq: positions of the KV cache, the smallest bucket that holds prompt and generation. `merged`: one
    ELF per block instead of one per kernel. `resident`: activations stay on the device between ELFs.
    Raises CheckpointError, ConfigError, CompileFailed, ArtefactMissing, DriverUnavailable,
    SequenceTooLong from its parts.
    """

    def __init__(
        self,
        module: InferenceModule,
        checkpoint: Checkpoint,
        tokenizer: Any,
        max_seq: int,
        *,
        config: ModelConfig | None = None,
        npu_attn: bool = True,
        merged: bool = True,
        resident: bool = True,
        toolchain: Toolchain | None = None,
        artefacts: Path | None = None,
    ) -> None:
        self.module = module
        self.checkpoint = checkpoint
        self.tokenizer = tokenizer
        self.config = config if config is not None else ModelConfig.from_hf_folder(checkpoint.path)
        limit = self.config.max_position
        self.max_seq = min(bucket_for(max_seq, limit), limit)
        self.npu_attn = npu_attn
        self.driver = current()
        self.profiler = Profiler(self.driver.clock)
        folder = artefacts if artefacts is not None else artefact_folder(module.MODEL)
        toolchain = toolchain or toolchain_for(self.driver.name, module.MODEL)
        cache = ResidentCache if resident else KernelCache
        self.cache: KernelCache = cache(
            folder, driver=self.driver, profiler=self.profiler, toolchain=toolchain, shared_nonstatic=True
        )
        self.prefill_cache = BlockRunner(self.cache, merged=merged)
        self.decode_cache = BlockRunner(self.cache, merged=merged)
        self.tensors = load_tensors(checkpoint)
        self.loaded = load_weights(self.tensors, self.config)
        self.weights = pad_weights(self.loaded, self.config)
        self.rope_lut = rope_table(self.config, BUCKETS[-1])
        self._kv: tuple[Array, Array] | None = None

    def prepare(self, prompt_len: int) -> None:
        """Compile and preload what a prompt of this length needs; call it before the timed region."""
        bucket = bucket_for(prompt_len, self.config.max_position)
        runs, model = (self.prefill_cache, self.decode_cache), (self.weights, self.config)
        self.module.prepare_runtime(*runs, *model, bucket, self.rope_lut, npu_attn=self.npu_attn)

    def prefill(
        self, token_ids: Sequence[int], layer_outputs: list[Array] | None = None
    ) -> tuple[int, Array, int]:
        """Call the production prefill: (first token, its logits, prompt length); a new KV cache is kept."""
        self._kv = None
        runs, model = (self.prefill_cache, self.decode_cache), (self.weights, self.config)
        rest = (self.rope_lut, self.max_seq, self.tokenizer)
        track = (self.driver.clock, timeline.SECTIONS, "forward")
        with timeline.span(*track, "prefill forward", tokens=len(token_ids)):
            token, logits, keys, values, length = self.module.run_npu_prefill(
                token_ids, *model, *runs, *rest, layer_outputs=layer_outputs
            )
        self._kv = keys, values
        return token, logits, length

    @property
    def kv_cache(self) -> tuple[Array, Array]:
        """K and V of the last prompt, to which decode steps add. Raises SequenceTooLong before a prefill."""
        if self._kv is None:
            raise SequenceTooLong("decode_step before prefill: there is no KV cache yet")
        return self._kv

    def decode(
        self, token: int, position: int, layer_outputs: list[Array] | None = None
    ) -> tuple[int, Array]:
        """Call the production decode step for one token. Raises SequenceTooLong before a prefill."""
        state = (self.rope_lut, *self.kv_cache, position)
        track = (self.driver.clock, timeline.SECTIONS, "forward")
        with timeline.span(*track, "decode forward", position=position):
            x = host_ops.embed(self.profiler, self.weights.embedding, np.asarray([token]))[0]
            model = (self.weights, self.config)
            return self.module.run_npu_decode_step(
                x, *model, self.decode_cache, *state, layer_outputs=layer_outputs
            )

    def generate(
        self,
        tokenise: Callable[[], Sequence[int]],
        n_tokens: int,
        *,
        on_token: Callable[[int], None] = lambda token: None,
        stop_at_eos: bool = True,
    ) -> Generation:
        """Greedy generation of up to `n_tokens`; stops at an end-of-turn token.

        `tokenise` is called inside the timed region, as TTFT starts before it. Raises
        SequenceTooLong when prompt and generation do not fit the KV cache.
        """
        planned = len(tokenise())
        if planned + n_tokens > self.max_seq:
            raise SequenceTooLong(
                f"{planned} prompt tokens and {n_tokens} to generate do not fit the {self.max_seq} positions "
                "of the KV cache; shorten the prompt or generate fewer tokens"
            )
        self.prepare(planned)
        now = self.driver.clock.now
        begin = now()
        with self.profiler.section("prefill"):
            with host_ops.host_op(self.profiler, "tokenize", nbytes=16 * planned):
                ids = tuple(int(token) for token in tokenise())
            token, _, position = self.prefill(ids)
        first = now()
        tokens = [token]
        on_token(token)
        with self.profiler.section("decode"):
            while len(tokens) < n_tokens and not (stop_at_eos and token in self.config.eos_token_ids):
                token, _ = self.decode(token, position)
                position += 1
                tokens.append(token)
                on_token(token)
        last = now()
        steps = len(tokens) - 1
        return Generation(
            prompt_ids=ids,
            tokens=tuple(tokens),
            text=self.tokenizer.decode(tokens, skip_special_tokens=True),
            ttft_s=first - begin,
            tpot_s=(last - first) / steps if steps else 0.0,
            stopped=tokens[-1] in self.config.eos_token_ids,
        )

    @contextmanager
    def profiled(self, section: str = "") -> Iterator[Profiler]:
        """Collect a breakdown of everything inside, as one section where it is named."""
        self.profiler.reset()
        self.profiler.enabled = True
        try:
            with self.profiler.section(section) if section else nullcontext():
                yield self.profiler
        finally:
            self.profiler.enabled = False

    def timeline(self, path: str | os.PathLike[str]) -> Timeline:
        """A context manager that writes everything inside to a Chrome trace, for ui.perfetto.dev."""
        return Timeline(path, device=self.driver)

    def close(self) -> None:
        """Release buffers and contexts."""
        self._kv = None
        self.cache.close()
