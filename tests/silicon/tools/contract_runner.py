"""A verifier that knows the deployment contract of the mlir-air LLM examples and nothing of this project.

It follows the runner of those examples (Xilinx/mlir-air e972f2942): the adapter is a dotted module path,
found by `sys.path`; `auto` runs two processes, first the device, then the reference, and hands over as JSON
(prompt index -> chosen, topk); a prompt is encoded plainly and cut at the maximum length; the first
divergence is judged. Our adapters must work in it as they are.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

K = 5
MAX_SEQ = 2048


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The flags of the contract that a gate needs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runner", required=True, help="dotted path of the adapter module")
    parser.add_argument("--path", action="append", default=[], help="folder to add to sys.path")
    parser.add_argument("--model")
    parser.add_argument("--prompts-file", required=True)
    parser.add_argument("--max-prompts", type=int)
    parser.add_argument("--n-tokens", type=int, default=32)
    parser.add_argument("--max-seq", type=int, default=MAX_SEQ)
    parser.add_argument(
        "--gate-phase", choices=("auto", "capture-npu", "compare-hf", "records"), default="auto"
    )
    parser.add_argument("--gate-file")
    return parser.parse_args(arguments)


def adapter_of(args: argparse.Namespace) -> Any:
    """Import the adapter as the contract says."""
    sys.path += args.path
    module = importlib.import_module(args.runner)
    for name in ("MODEL_CHOICES", "DEFAULT_MODEL", "resolve_model", "build_config", "build_runner"):
        assert hasattr(module, name), f"the adapter has no {name}"
    return module


def folder_of(module: Any, name: str) -> str:
    """The checkpoint folder: this verifier does not download."""
    if Path(name).is_dir():
        return name
    if hasattr(module, "checkpoint"):
        return str(module.checkpoint(name).path)
    from huggingface_hub import snapshot_download

    return str(snapshot_download(name, local_files_only=True))


def prompts_of(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Plain encoding, cut at the maximum length."""
    lines = [line.strip() for line in Path(args.prompts_file).read_text(encoding="utf-8").splitlines()]
    texts = [line for line in lines if line and not line.startswith("#")][: args.max_prompts]
    return [tokenizer.encode(text)[: args.max_seq] for text in texts]


def top_k(logits: Any) -> list[int]:
    """Largest first, ties by smaller id."""
    row = np.asarray(logits, np.float32)
    return [int(token) for token in np.lexsort((np.arange(row.size), -row))[:K]]


def build(args: argparse.Namespace, *, lite_mode: bool) -> tuple[Any, Any, Any, Any]:
    """(module, runner, tokenizer, config); build_config takes no argument in the contract."""
    from transformers import AutoTokenizer

    module = adapter_of(args)
    name = module.resolve_model(args.model or module.DEFAULT_MODEL)
    tokenizer = AutoTokenizer.from_pretrained(folder_of(module, name))
    config = module.build_config()
    runner = module.build_runner(name, config, args.max_seq, tokenizer, npu_attn=True, lite_mode=lite_mode)
    return module, runner, tokenizer, config


def capture(args: argparse.Namespace) -> None:
    """The device's half: greedy tokens and their top k, as JSON."""
    _, runner, tokenizer, _ = build(args, lite_mode=True)
    gate: dict[str, Any] = {}
    for index, ids in enumerate(prompts_of(args, tokenizer)):
        record = runner.prefill(np.array(ids, np.int64))
        chosen, topk = [int(record.top1_token)], [top_k(record.logits_at_pred)]
        for step in range(args.n_tokens - 1):
            done = runner.decode_step(chosen[-1], len(ids) + step)
            chosen.append(int(done.top1_token))
            topk.append(top_k(done.lm_head_logits))
        gate[str(index)] = {"chosen": chosen, "topk": topk}
    Path(args.gate_file).write_text(json.dumps(gate), encoding="utf-8")


def compare(args: argparse.Namespace) -> int:
    """The reference's half and the verdict."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = adapter_of(args)
    name = module.resolve_model(args.model or module.DEFAULT_MODEL)
    reference = getattr(module, "hf_reference", lambda same: same)(name)
    folder = folder_of(module, reference)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    gate = json.loads(Path(args.gate_file).read_text(encoding="utf-8"))
    failed = 0
    for index, ids in enumerate(prompts_of(args, tokenizer)):
        fed = list(ids)
        verdict = "OK: no divergence"
        for step, (token, own) in enumerate(zip(*gate[str(index)].values(), strict=True)):
            with torch.inference_mode():
                row = model(torch.tensor([fed]), logits_to_keep=1).logits[0, -1].float().numpy()
            best = top_k(row)
            if best[0] != token:
                inside = token in best and best[0] in own
                verdict = f"{'OK' if inside else 'FAIL'}: step {step}, npu {token}, hf {best[0]}"
                failed += not inside
                break
            fed.append(token)
        print(f"prompt {index}: {verdict}")
    print(f"{failed} of {len(gate)} failed")
    return 1 if failed else 0


def records(args: argparse.Namespace) -> int:
    """The inside view: what diagnosis reads."""
    _, runner, tokenizer, config = build(args, lite_mode=False)
    ids = np.array(prompts_of(args, tokenizer)[0], np.int64)
    record = runner.prefill(ids)
    assert isinstance(runner.name, str)
    assert len(record.layer_intermediates) == config.n_layers
    for layer in record.layer_intermediates[:-1]:
        assert np.asarray(layer["ffn_out"]).shape == (ids.size, config.emb_dim)
    assert np.asarray(record.final_hidden_normed).shape == (ids.size, config.emb_dim)
    logits = np.asarray(record.logits_at_pred)
    assert logits.ndim == 1
    assert int(np.argmax(logits)) == record.top1_token
    step = runner.decode_step(record.top1_token, ids.size)
    assert np.asarray(step.lm_head_logits).shape == logits.shape
    print(f"records of {config.n_layers} layers, heads {config.n_kv_heads} x {config.head_dim}")
    return 0


def auto(arguments: list[str], args: argparse.Namespace) -> int:
    """Two processes, so that only one set of weights is in memory."""
    with tempfile.TemporaryDirectory() as work:
        gate = args.gate_file or str(Path(work) / "gate.json")
        for phase in ("capture-npu", "compare-hf"):
            command = [sys.executable, __file__, *arguments, "--gate-phase", phase, "--gate-file", gate]
            code = subprocess.call(command)
            if code:
                return code
    return 0


def main(arguments: list[str]) -> int:
    """Command line."""
    args = parse(arguments)
    if args.gate_phase == "auto":
        return auto(arguments, args)
    if args.gate_phase == "capture-npu":
        capture(args)
        return 0
    return compare(args) if args.gate_phase == "compare-hf" else records(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
