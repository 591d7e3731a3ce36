"""How long a deployment should take: its own loop on the twin's clock, walked without computing.

The production functions run as they are, over the model's kernel sequence, on a twin in timing-only mode:
every program, transfer and host operation moves the clock, and nothing else is done. No weights are needed.
`describe.speed` predicts the published flow instead, where every result visits the host.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ml_dtypes import bfloat16

from llms.llama_kernel_builder import driver, host_ops
from llms.llama_kernel_builder.block_runner import BlockRunner
from llms.llama_kernel_builder.cache import _BufferSet
from llms.llama_kernel_builder.deployment.production import ProductionFunctions
from llms.llama_kernel_builder.device_config import device_config
from llms.llama_kernel_builder.llama_loop import bucket_for
from llms.llama_kernel_builder.profiler import Profiler
from llms.llama_kernel_builder.resident import ResidentCache
from llms.llama_kernel_builder.rope_table import rope_table
from llms.llama_kernel_builder.toolchains.seam import toolchain_for
from llms.llama_kernel_builder.weights import ModelWeights

if TYPE_CHECKING:
    from llms.llama_kernel_builder.llama_loop import KernelSequence
    from llms.llama_kernel_builder.model_config import ModelConfig

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PredictedTime:
    """Milliseconds (twin, modelled) of one prefill and of the decode step behind it.

    ttft_ms: prefill and tokenising. The transfers are buffers that a pass writes to or reads from the device.
    """

    ttft_ms: float
    prefill_ms: float
    decode_ms: float
    prefill_transfers: int
    decode_transfers: int


class _WeightlessCache(ResidentCache):
    """Weights are never written; all weights of one size share a buffer."""

    def _bind(self, *args: Any) -> _BufferSet:
        bound = super()._bind(*args)
        bound.static_seen = dict.fromkeys(bound.sets[0], 0)
        return bound

    def _allocate(self, program: Any, index: int, static: bool, shared: Any) -> Any:
        buffer = program.buffers[index]
        pools = {buffer.name: f"{buffer.nbytes} bytes"} if static else shared
        return super()._allocate(program, index, static, pools)

    def _write_static(self, *args: Any) -> None:
        """Nothing to write."""


def predicted_time(
    sequence: KernelSequence, config: ModelConfig, tokens: int, *, recorded: bool = False
) -> PredictedTime:
    """Time of a prefill of `tokens` and of the decode step behind it, as the production functions make them.

    recorded: as the runner of the gates does it, the host also looks at the output of every layer of the
    prefill, and norms that of the last one token by token. Raises UnmeasuredShape for a kernel without a
    registry row, SequenceTooLong for a prompt that fits no bucket.
    """
    rows = bucket_for(tokens, config.max_position)
    functions = ProductionFunctions(lambda: sequence)
    weights = _no_weights(config)
    table = rope_table(config, max(rows, tokens + 1))
    # buffers hold whatever lies in memory
    with driver.timing_only() as twin, tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        profiler = Profiler(twin.clock)
        cache = _WeightlessCache(
            Path(folder),
            driver=twin,
            profiler=profiler,
            toolchain=toolchain_for(twin.name),
            shared_nonstatic=True,
        )
        run = BlockRunner(cache)
        functions.prepare_runtime(run, run, weights, config, rows, table)
        profiler.enabled = True
        now = twin.clock.now
        begin = now()
        with host_ops.host_op(profiler, "tokenize", nbytes=16 * tokens):
            ids = (0,) * tokens
        tokenised = now()
        layers: list[Array] | None = [] if recorded else None
        _, _, keys, values, position = functions.run_npu_prefill(
            ids, weights, config, run, run, table, tokens + 1, layer_outputs=layers
        )
        for row in layers[-1] if layers else ():
            host_ops.final_rms_norm(profiler, row, weights.final_norm, config.rms_eps)
        first, prefill_transfers = now(), _transfers(profiler)
        profiler.reset()
        x = host_ops.embed(profiler, weights.embedding, np.zeros(1, np.int64))[0]
        functions.run_npu_decode_step(x, weights, config, run, table, keys, values, position)
        last, decode_transfers = now(), _transfers(profiler)
        cache.close()
    return PredictedTime(
        (first - begin) * 1e3,
        (first - tokenised) * 1e3,
        (last - first) * 1e3,
        prefill_transfers,
        decode_transfers,
    )


def predicted_apart(folder: Path, config: ModelConfig, tokens: int) -> PredictedTime:
    """The recorded `predicted_time` of a model folder, in a process where nothing was patched or planted.

    Raises RuntimeError with the last line of what that process said.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    request = pickle.dumps((folder, config, tokens))
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, input=request, capture_output=True, check=False, env=environment)
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"the prediction ended with exit code {done.returncode}")
    return PredictedTime(**json.loads(done.stdout.splitlines()[-1]))


def _main() -> None:
    from llms.llama_kernel_builder.deployment.watch import production_module
    from llms.verify.contract.deployment import load_adapter

    folder, config, tokens = pickle.load(sys.stdin.buffer)
    sequence = production_module(folder, load_adapter(folder)).SEQUENCE
    print(json.dumps(asdict(predicted_time(sequence, config, tokens, recorded=True))))


def _no_weights(config: ModelConfig) -> ModelWeights:
    """What the loop itself looks at: embedding and final norm of zeros, which take no memory."""
    width = device_config(config).emb_dim
    zero = np.zeros((), bfloat16)
    embedding = np.broadcast_to(zero, (config.vocab_size, width))
    norm = np.broadcast_to(zero, (config.emb_dim,))
    return ModelWeights(embedding, layers=[], final_norm=norm, lm_head=np.zeros((0, width), bfloat16))


def _transfers(profiler: Profiler) -> int:
    kinds = ("bo_write", "bo_read")
    return sum(entry.calls for (_, kind, _), entry in profiler.entries.items() if kind in kinds)


if __name__ == "__main__":
    _main()
