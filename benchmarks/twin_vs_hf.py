"""How fast the loop is: the twin against Hugging Face on the same weights, CPU and threads, in one run.

``python -m benchmarks.twin_vs_hf [--json FILE] [--skip-rss]`` prints, from one process tree:

* ``decode_ratio``: wall time of one decode step of the twin over the faster of HF bf16 and HF f32;
* ``prefill_ratio``: the same for a prefill of 256 tokens, weights warm on both sides;
* ``verify_rss_gib``: peak resident memory (PSS where the kernel tells it) of the process tree of the
  verify job, reference not cached.

Rounds of the sides alternate, so a busy machine hits all of them; the median of each side counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PREFILL_TOKENS = 256
DECODE_STEPS = 24
ROUNDS = 5


def main() -> int:
    """Measure and print; see the module docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--model", default="smollm2_135m", help="model folder (default: %(default)s)")
    parser.add_argument("--skip-rss", action="store_true", help="leave out the memory of the verify job")
    args = parser.parse_args()
    figures = measure(args.model)
    if not args.skip_rss:
        figures["verify_rss_gib"] = verify_memory(args.model)
    for key, value in figures.items():
        print(f"{key:24} {value:.4f}" if isinstance(value, float) else f"{key:24} {value}")
    if args.json:
        partial = args.json.with_name(f".{args.json.name}.{os.getpid()}")
        partial.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        partial.replace(args.json)
    return 0


def measure(model: str) -> dict[str, Any]:
    """Time prefill and decode of all sides, alternating."""
    import numpy as np
    import torch

    from llms.verify.contract.deployment import Deployment
    from llms.verify.reference.hf import HFRunner

    deployment = Deployment.from_folder(model)
    text_ids = deployment.encode("The history of computing began long before electronic machines. " * 40).ids
    prompt = np.asarray(text_ids[:PREFILL_TOKENS], dtype=np.int64)
    twin = deployment.runner(2 * PREFILL_TOKENS, lite_mode=True)
    sides: dict[str, Any] = {
        "twin": twin,
        "hf_bf16": HFRunner(deployment.checkpoint, "bfloat16"),
        "hf_f32": HFRunner(deployment.checkpoint, "float32"),
    }
    prefill: dict[str, list[float]] = {name: [] for name in sides}
    decode: dict[str, list[float]] = {name: [] for name in sides}
    for name, side in sides.items():
        _timed(lambda side=side: side.prefill(prompt))  # warm-up: caches of both sides fill here
        for step in range(3):
            side.decode_step(1, PREFILL_TOKENS + step)
        if name == "hf_bf16":
            # torch's bf16 prefill takes tens of seconds on CPUs without AVX512: one round is enough to
            # see that f32 is the faster one
            prefill[name].append(_timed(lambda side=side: side.prefill(prompt)))
    for _ in range(ROUNDS):
        for name, side in sides.items():
            if name != "hf_bf16":
                prefill[name].append(_timed(lambda side=side: side.prefill(prompt)))
            else:
                side.prefill(prompt[:1])
            start = PREFILL_TOKENS if name != "hf_bf16" else 1
            decode[name].append(_timed(lambda side=side, start=start: _steps(side, start)) / DECODE_STEPS)
    pre = {name: statistics.median(times) for name, times in prefill.items()}
    dec = {name: statistics.median(times) for name, times in decode.items()}
    return {
        "decode_ratio": dec["twin"] / min(dec["hf_bf16"], dec["hf_f32"]),
        "prefill_ratio": pre["twin"] / min(pre["hf_bf16"], pre["hf_f32"]),
        **{f"decode_ms_{name}": seconds * 1e3 for name, seconds in dec.items()},
        **{f"prefill_{PREFILL_TOKENS}_ms_{name}": seconds * 1e3 for name, seconds in pre.items()},
        "checkpoint": deployment.checkpoint.label,
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
    }


def _steps(side: Any, start: int) -> None:
    for step in range(DECODE_STEPS):
        side.decode_step(1, start + step)


def _timed(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def verify_memory(model: str) -> float:
    """Peak memory in GiB of the verify job's process tree, with the reference computed anew."""
    import psutil

    from llms.verify.contract.models import find_model

    test = find_model(model).tests / "test_phase6_topk_gate.py"
    with tempfile.TemporaryDirectory() as reports:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "phase6", "--npu-no-cache"]
        command += ["--npu-report-dir", reports, str(test)]
        job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        root = psutil.Process(job.pid)
        peak = 0
        while job.poll() is None:
            peak = max(peak, _tree_memory(root))
            time.sleep(0.05)
        output = job.stdout.read() if job.stdout else ""
    if job.returncode != 0:
        raise SystemExit(f"the verify job failed, its memory is no figure:\n{output[-2000:]}")
    return peak / 2**30


def _tree_memory(root: Any) -> int:
    import psutil

    total = 0
    try:
        processes = [root, *root.children(recursive=True)]
    except psutil.Error:
        return 0
    for process in processes:
        try:
            full = process.memory_full_info()
            total += getattr(full, "pss", full.rss)
        except psutil.Error:
            continue
    return total


if __name__ == "__main__":
    sys.exit(main())
