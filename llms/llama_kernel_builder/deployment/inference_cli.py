"""Command line of a model's inference driver: streams text, prints TTFT and TPS with their device.

Used as ``python -m llms.<model>.<model>_inference``; `make run`, `chat`, `profile` and `compile` call it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from llms.llama_kernel_builder.deployment.session import Generation, Session


def run(package: str | None) -> int:
    """Run the driver of the model package that holds `verify_adapter`."""
    return main(importlib.import_module(f"{package}.verify_adapter"))


def main(adapter: Any, argv: Sequence[str] | None = None) -> int:
    """Run the driver of one adapter. Exit codes: 0 done, 2 bad input, 4 no such device, 130 interrupted."""
    from llms.checkpoints import CheckpointError
    from llms.llama_kernel_builder import driver
    from llms.llama_kernel_builder.exceptions import DriverUnavailable, ToolkitError

    args = _parser(adapter).parse_args(argv)
    try:
        driver.select(driver.NPU2 if args.npu else driver.TWIN)
        return _run(adapter, args)
    except DriverUnavailable as error:
        print(f"error: --npu: {error}", file=sys.stderr)
        return 4
    except (CheckpointError, ToolkitError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _parser(adapter: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=adapter.__name__.rsplit(".", 1)[0], description=adapter.__doc__)
    parser.add_argument(
        "--model",
        default=adapter.DEFAULT_MODEL,
        help=f"{', '.join(adapter.MODEL_CHOICES)}, an HF id or a path",
    )
    parser.add_argument("--checkpoint", help="HF folder or GGUF file to use instead")
    parser.add_argument("--prompt", default="What is gravity?", help="prompt text (default: %(default)r)")
    parser.add_argument(
        "--n-tokens", type=_positive, default=100, help="tokens to generate (default: %(default)s)"
    )
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--interactive", action="store_true", help="chat: read prompts until end of input")
    parser.add_argument("--compile-only", action="store_true", help="compile all ELFs and stop")
    parser.add_argument("--cpu-attn", action="store_true", help="compute prefill attention on the host")
    parser.add_argument("--npu", action="store_true", help="run on silicon (default: the digital twin)")
    parser.add_argument(
        "--json", action="store_true", help="print figures as one JSON object instead of text"
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def _run(adapter: Any, args: argparse.Namespace) -> int:
    from llms.llama_kernel_builder.exceptions import BadArgument
    from llms.llama_kernel_builder.llama_loop import BUCKETS

    if args.compile_only:
        return _compile(adapter)
    name = adapter.resolve_model(args.checkpoint or args.model)
    checkpoint = adapter.checkpoint(name)
    tokenizer = _tokenizer(checkpoint)
    chat = tokenizer.chat_template is not None and args.model != "base"
    prompts = _typed_prompts() if args.interactive else iter([args.prompt])
    session: Session | None = None
    for prompt in prompts:
        tokenise = _tokenise(tokenizer, prompt, chat)
        try:
            needed = min(len(tokenise()) + args.n_tokens, BUCKETS[-1])
        except ValueError as error:
            raise BadArgument(f"--prompt {prompt!r}: {error}") from error
        if session is None or session.max_seq < needed:
            if session is not None:
                session.close()
            runner = adapter.build_runner(
                name, adapter.build_config(name), needed, tokenizer, npu_attn=not args.cpu_attn
            )
            session = runner.session
        _one(session, tokenizer, tokenise, args)
    return 0


def _one(
    session: Session, tokenizer: Any, tokenise: Callable[[], Sequence[int]], args: argparse.Namespace
) -> None:
    session.profiler.reset()
    session.profiler.enabled = args.profile or args.json
    stream = (lambda token: None) if args.json else _Stream(tokenizer)
    result = session.generate(tokenise, args.n_tokens, on_token=stream)
    figures = _figures(session, result)
    if args.json:
        figures["breakdown"] = session.profiler.breakdown()
        print(json.dumps(figures, indent=1))
        return
    print(
        f"\n\nTTFT {figures['ttft_ms']:.1f} ms | TPS {figures['tps']:.1f} "
        f"({figures['tpot_ms']:.1f} ms per token) | {figures['device']} | {figures['checkpoint']} | "
        f"{len(result.prompt_ids)} prompt tokens, {len(result.tokens)} generated"
        f"{', stopped at end of turn' if result.stopped else ''}"
    )
    if args.profile:
        _print_breakdown(session)


def _figures(session: Session, result: Generation) -> dict[str, Any]:
    return {
        "ttft_ms": result.ttft_s * 1e3,
        "tpot_ms": result.tpot_s * 1e3,
        "tps": result.tps,
        "device": session.driver.label,
        "checkpoint": session.checkpoint.label,
        "seq_len": session.max_seq,
        "prompt_tokens": len(result.prompt_ids),
        "generated_tokens": len(result.tokens),
        "stopped": result.stopped,
        "text": result.text,
    }


def _print_breakdown(session: Session) -> None:
    from rich.console import Console
    from rich.table import Table

    texts = ("section", "kind", "name")
    numbers = {"calls": ("calls", "d"), "total ms": ("total_ms", ".2f")}
    numbers |= {"ms per call": ("per_call_ms", ".3f"), "MB": ("mb", ".1f")}
    table = Table(*texts, title=f"Where the time goes, {session.driver.label}")
    for heading in numbers:
        table.add_column(heading, justify="right")
    for row in session.profiler.breakdown():
        table.add_row(*map(row.get, texts), *(format(row[key], form) for key, form in numbers.values()))
    Console().print(table)


def _compile(adapter: Any) -> int:
    from llms.llama_kernel_builder.deployment.session import compile_all
    from llms.llama_kernel_builder.driver import current

    device = current().name
    for program, artefact in compile_all(adapter.inference, adapter.CONFIG, device=device):
        print(f"{'built' if artefact.built else 'kept '} {program:28} {artefact.path.name}")
    return 0


class _Stream:
    """Print text as it is generated: a token may be a part of a character, so whole text is compared."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = ""

    def __call__(self, token: int) -> None:
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        if text.endswith("�"):
            return
        print(text[len(self._shown) :], end="", flush=True)
        self._shown = text


def _tokenizer(checkpoint: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(checkpoint.path))


def _tokenise(tokenizer: Any, prompt: str, chat: bool) -> Callable[[], Sequence[int]]:
    """Prompt to ids: the chat template exactly once for instruct models, plain text for base models."""
    from llms.verify.contract.chat import encode_prompt

    return lambda: encode_prompt(tokenizer, prompt, "instruct" if chat else "base").ids


def _typed_prompts() -> Any:
    while True:
        try:
            text = input("\n> ").strip()
        except EOFError:
            return
        if text:
            yield text
