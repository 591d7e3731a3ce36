"""The reference: Hugging Face transformers in bf16, from the same checkpoint, greedy with its KV cache.

:class:`HFRunner` is a live model with the interface of a device runner. :class:`HFReference` is what gates
use: it returns complete runs and keeps them on disk, since bf16 matrix products are slow on CPUs without
native support (about 0.1 s per prompt token and 60 ms per decode step for a 135 M model on two cores).
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llms.checkpoints import Checkpoint
from llms.verify.contract.abilities import NotOffered
from llms.verify.contract.records import Array, DecodeProbe, DecodeStepRecord, PrefillRecord, frozen_copy
from llms.verify.contract.topk import N_TOKENS, K, TokenStep, TokenTrace
from llms.verify.reference.cache import ReferenceCache, key_hash
from llms.verify.reference.runs import CachedReference, Run, check_request

# Raise it when the content or meaning of a cached run changes.
FORMAT_VERSION = 2
_log = logging.getLogger("llms.verify.reference.hf")


@dataclass(frozen=True, eq=False)
class ReferenceRun(Run):
    """A run with the outputs of all layers; they have size 0 where the reference gives logits only.

    Attributes:
        prefill_layers: ``[n_layers, n, emb]``, raw block outputs after the second residual, last layer
            included.
        prefill_final: ``[n, emb]`` after the final norm.
        decode_layers: ``[n_tokens - 1, n_layers, emb]``.
        decode_final: ``[n_tokens - 1, emb]``.
    """

    prefill_layers: Array
    prefill_final: Array
    decode_layers: Array
    decode_final: Array

    def trace(self, k: int = K) -> TokenTrace:
        """Condense the run for the token-set gate."""
        steps = (TokenStep.from_logits(t, row, k) for t, row in zip(self.tokens, self.logits, strict=True))
        return TokenTrace(self.prompt_ids, tuple(steps))

    def with_layers(self) -> ReferenceRun:
        """Return this run for a comparison layer by layer.

        Raises:
            NotOffered: the adapter's own reference model gives logits only.
        """
        if not self.prefill_layers.size:
            raise NotOffered("own reference model: no per-layer comparison")
        return self


class HFRunner:
    """A live Hugging Face model with the interface of :class:`llms.verify.contract.records.ProbedRunner`.

    Args:
        checkpoint: HF folder with weights; nothing is fetched.
        dtype: ``bfloat16`` (what gates use) or ``float32``.

    Raises:
        ValueError: another dtype, asked for or loaded, or a model without ``model.layers`` and
            ``model.norm``.
    """

    def __init__(self, checkpoint: Checkpoint | Path, dtype: str = "bfloat16") -> None:
        self.name = f"HF {dtype}"
        self._model: Any = load_hf_model(checkpoint, dtype)
        self._adopt(self._model)

    @classmethod
    def from_model(cls, model: Any, name: str = "HF model") -> HFRunner:
        """Wrap a model that is already there, e.g. one with dequantised weights from an adapter."""
        runner = cls.__new__(cls)
        runner.name = name
        runner._model = model.eval()
        runner._adopt(model)
        return runner

    def _adopt(self, model: Any) -> None:
        body = getattr(model, "model", None)
        if body is None or not hasattr(body, "layers") or not hasattr(body, "norm"):
            raise ValueError(f"{type(model).__name__} has no model.layers and model.norm to observe")
        self.n_layers = len(body.layers)
        self._seen: dict[int, Array] = {}
        for index, layer in enumerate(body.layers):
            layer.register_forward_hook(self._keep(index))
        body.norm.register_forward_hook(self._keep(self.n_layers))
        self._cache_name = cache_parameter(model)
        self._cache: Any = None
        self._length = 0

    def _keep(self, index: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            self._seen[index] = to_numpy(tensor[0])

        return hook

    def prefill(self, prompt_tokens: NDArray[np.int64]) -> PrefillRecord:
        """Run the prompt ``int64[n]`` from an empty cache."""
        self._cache, self._length = None, 0
        logits = self._forward(np.asarray(prompt_tokens, np.int64))
        layers = [{"ffn_out": self._seen[index]} for index in range(self.n_layers)]
        return PrefillRecord(layers, self._seen[self.n_layers], logits, int(np.argmax(logits)))

    def decode_step(self, input_token: int, current_pos: int) -> DecodeStepRecord:
        """Run one token at ``current_pos``, which must be the number of tokens in the cache."""
        return self.decode_step_probed(input_token, current_pos).record

    def decode_step_probed(self, input_token: int, current_pos: int) -> DecodeProbe:
        """As ``decode_step``, with the outputs of all layers.

        Raises:
            RuntimeError: there was no prefill, or ``current_pos`` leaves a gap or overwrites the cache.
        """
        if self._cache is None:
            raise RuntimeError("decode_step before prefill: there is no KV cache yet")
        if current_pos != self._length:
            raise RuntimeError(f"decode position {current_pos}, but the cache holds {self._length} tokens")
        logits = self._forward(np.array([input_token], np.int64))
        layers = [{"ffn_out": self._seen[index][0]} for index in range(self.n_layers)]
        return DecodeProbe(
            DecodeStepRecord(logits, int(np.argmax(logits))), layers, self._seen[self.n_layers][0]
        )

    def kv_cache(self) -> tuple[Array, Array]:
        """Copies of K and V, each ``[n_layers, n_kv_heads, positions, head_dim]``."""
        import torch

        layers = self._cache.layers
        return tuple(  # type: ignore[return-value]
            to_numpy(torch.stack([getattr(layer, name)[0] for layer in layers]))
            for name in ("keys", "values")
        )

    def _forward(self, tokens: NDArray[np.int64]) -> Array:
        import torch

        self._seen.clear()
        arguments: dict[str, Any] = {"input_ids": torch.from_numpy(tokens)[None], "use_cache": True}
        if self._cache is not None:
            arguments[self._cache_name] = self._cache
        with torch.inference_mode():
            # Only the last row is judged: the head over all rows would cost more than the layers.
            output = self._model(**arguments, logits_to_keep=1)
        self._cache = output[self._cache_name]
        self._length += len(tokens)
        return to_numpy(output.logits[0, -1])


def cache_parameter(model: Any) -> str:
    """Name of the KV cache in a model's calls and results."""
    parameters = inspect.signature(type(model).forward).parameters
    # transformers renames past_key_values to cache in the course of 5.x.
    return "cache" if "cache" in parameters else "past_key_values"


def load_hf_model(checkpoint: Checkpoint | Path, dtype: str = "bfloat16") -> Any:
    """Load a causal language model of transformers from a folder, nothing fetched, in evaluation mode.

    Raises:
        ValueError: another dtype than ``bfloat16`` or ``float32``, asked for or loaded.
    """
    _calm_openmp()
    import torch
    import transformers

    _check_dtype(dtype)
    folder = checkpoint.path if isinstance(checkpoint, Checkpoint) else checkpoint
    with _quiet_loading():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True
        )
    model.eval()
    unlike = {str(item.dtype) for item in model.parameters()} - {f"torch.{dtype}"}
    if unlike:
        raise ValueError(f"the reference was asked for in {dtype}, transformers loaded {sorted(unlike)}")
    return model


def _check_dtype(dtype: str) -> None:
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"reference dtype must be bfloat16 or float32, not {dtype!r}")


def _calm_openmp() -> None:
    """Let idle OpenMP threads sleep instead of spin; only effective before torch is first imported.

    Measured with two torch threads on two busy cores, SmolLM2-135M in bf16: 60 ms per decode step with
    sleeping threads, 400 to 1400 ms with spinning ones (32 ms on an idle machine).
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Keep the progress bar of transformers off a stderr that is no terminal."""
    from transformers.utils import logging as transformers_logging

    if sys.stderr.isatty() or not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()


def to_numpy(tensor: Any) -> Array:
    """Copy a torch tensor to numpy, bf16 as ``ml_dtypes.bfloat16`` with the same bits."""
    import torch

    plain = tensor.detach().contiguous()
    if plain.dtype != torch.bfloat16:
        return np.array(plain.numpy(), copy=True)
    import ml_dtypes

    bits: Array = np.array(plain.view(torch.int16).numpy(), copy=True)
    return bits.view(ml_dtypes.bfloat16)


def to_torch(array: Array) -> Any:
    """Copy a numpy array of ``ml_dtypes.bfloat16`` to torch, bit by bit."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(array).view(np.int16).copy()).view(torch.bfloat16)


class HFReference(CachedReference[ReferenceRun]):
    """Reference runs of one checkpoint, cached on disk.

    Args:
        checkpoint: the checkpoint of the deployment under test.
        dtype: ``bfloat16``, or ``float32`` for studies.
        cache: where runs are kept; ``None`` bypasses the disk: nothing is read or written there.
        model: a model built by an adapter (``build_hf_model``); its runs are never cached.

    The key of a run covers checkpoint content, prompt ids, forced tokens, number of tokens, dtype, versions
    of torch and transformers, the CPU, the instruction sets that it may use and the threads (they select
    torch's kernels), and the format version.
    """

    record = ReferenceRun

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: str = "bfloat16",
        cache: ReferenceCache | None = None,
        model: Any = None,
    ) -> None:
        _check_dtype(dtype)
        super().__init__(checkpoint, cache, model)
        self.dtype = dtype

    @property
    def runner(self) -> HFRunner:
        """The live model, loaded on first use."""
        if self._live is None:
            given = self._given
            self._live = (
                HFRunner(self.checkpoint, self.dtype) if given is None else HFRunner.from_model(given)
            )
        runner: HFRunner = self._live
        return runner

    def key(
        self, prompt_ids: Sequence[int], n_tokens: int, forced: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """Return what identifies a run, as JSON-able values; reports may show it."""
        more = {"dtype": self.dtype, "cpu": _cpu_capability(), "format": FORMAT_VERSION}
        return {**self._key(prompt_ids, n_tokens, forced), **more}

    def key_hash(self, prompt_ids: Sequence[int], n_tokens: int = N_TOKENS) -> str:
        """Return the SHA-256 (hex) of :meth:`key`, by which a report names the inputs of a reference run."""
        return key_hash(self.key(prompt_ids, n_tokens))

    def run(
        self, prompt_ids: Sequence[int], n_tokens: int = N_TOKENS, *, forced: Sequence[int] | None = None
    ) -> ReferenceRun:
        """Return the run for a prompt, from disk when it is there and intact.

        Args:
            prompt_ids: token ids of the prompt, at least one.
            n_tokens: tokens to generate, end-of-text or not.
            forced: tokens to feed to the decode steps instead of the own choices, at least ``n_tokens - 1``.

        Raises:
            ValueError: empty prompt, ``n_tokens`` below 1, or too few forced tokens.
        """
        check_request(prompt_ids, n_tokens, forced)
        keys = [self.key(prompt_ids, n_tokens, forced)]
        if forced is None and n_tokens < N_TOKENS:
            # Greedy choices do not depend on how many follow: the gate's run begins with this one.
            keys.append(self.key(prompt_ids, N_TOKENS))
        return _head(self._obtain(keys, lambda: self._compute(prompt_ids, n_tokens, forced)), n_tokens)

    def _compute(
        self, prompt_ids: Sequence[int], n_tokens: int, forced: Sequence[int] | None
    ) -> ReferenceRun:
        runner = self.runner
        ids = np.array(prompt_ids, np.int64)
        first = runner.prefill(ids)
        logits, tokens, fed = [first.logits_at_pred], [first.top1_token], []
        layers, finals = [], []
        for index in range(n_tokens - 1):
            fed.append(tokens[-1] if forced is None else int(forced[index]))
            probe = runner.decode_step_probed(fed[-1], len(ids) + index)
            logits.append(probe.record.lm_head_logits)
            tokens.append(probe.record.top1_token)
            layers.append(np.stack([layer["ffn_out"] for layer in probe.layer_intermediates]))
            finals.append(probe.final_hidden_normed)
        prefill_layers = np.stack([layer["ffn_out"] for layer in first.layer_intermediates])
        width, dtype = prefill_layers.shape[-1], prefill_layers.dtype
        keys, values = runner.kv_cache()
        return ReferenceRun(
            prompt_ids=tuple(int(token) for token in prompt_ids),
            tokens=tuple(tokens),
            fed=tuple(fed),
            logits=frozen_copy(np.stack(logits)),
            prefill_layers=frozen_copy(prefill_layers),
            prefill_final=first.final_hidden_normed,
            decode_layers=frozen_copy(
                np.stack(layers) if layers else np.empty((0, runner.n_layers, width), dtype)
            ),
            decode_final=frozen_copy(np.stack(finals) if finals else np.empty((0, width), dtype)),
            keys=frozen_copy(keys),
            values=frozen_copy(values),
        )


def _head(run: ReferenceRun, n_tokens: int) -> ReferenceRun:
    """Return the first ``n_tokens`` of a run."""
    if len(run.tokens) == n_tokens:
        return run
    return replace(
        run,
        tokens=run.tokens[:n_tokens],
        fed=run.fed[: n_tokens - 1],
        logits=run.logits[:n_tokens],
        decode_layers=run.decode_layers[: n_tokens - 1],
        decode_final=run.decode_final[: n_tokens - 1],
        keys=run.keys[:, :, : len(run.prompt_ids) + n_tokens - 1],
        values=run.values[:, :, : len(run.prompt_ids) + n_tokens - 1],
    )


def _cpu_capability() -> str:
    """What decides torch's bits besides its version: CPU, instruction sets allowed, threads.

    Plain HF is a reference with noise: no setting makes oneDNN and MKL sum in one order on all CPUs. So a run
    is found again only where it would come out the same.
    """
    import torch

    from fixed_order.instruction_sets import cpu_model, limits

    parts = [str(torch.backends.cpu.get_cpu_capability()), cpu_model(), f"{torch.get_num_threads()} threads"]
    return "; ".join([*parts, *(f"{name}={value}" for name, value in limits().items())])
