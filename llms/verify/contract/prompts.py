"""The prompt sets of the gates: eight instruct prompts and eight for base models, one per line."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Literal, get_args

PromptStyle = Literal["instruct", "base"]
STYLES: tuple[PromptStyle, ...] = get_args(PromptStyle)


def parse_prompts(text: str, source: str) -> tuple[str, ...]:
    """Return the prompts of a file's text: one per line, empty lines and lines starting with ``#`` skipped.

    Raises:
        ValueError: no prompt at all, or the same prompt twice; ``source`` names the file in the message.
    """
    lines = tuple(line.strip() for line in text.splitlines())
    prompts = tuple(line for line in lines if line and not line.startswith("#"))
    if not prompts:
        raise ValueError(f"{source} holds no prompts: write one per line, comments start with #")
    if len(set(prompts)) != len(prompts):
        twice = next(line for line in prompts if prompts.count(line) > 1)
        raise ValueError(f"{source} holds the same prompt twice: {twice!r}")
    return prompts


def load_prompts(style: PromptStyle, n: int | None = None, *, file: Path | None = None) -> tuple[str, ...]:
    """Return the first ``n`` prompts (all when None) of a set, or of a user's file.

    Raises:
        ValueError: unknown style, ``n`` below 1 or above what the set holds, or an unusable file.
    """
    if style not in STYLES:
        raise ValueError(f"unknown prompt style {style!r}: choose one of {', '.join(STYLES)}")
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"prompt file {file} cannot be read: {error}") from error
        prompts = parse_prompts(text, str(file))
    else:
        text = (
            files("llms.verify.contract").joinpath("prompt_sets", f"{style}.txt").read_text(encoding="utf-8")
        )
        prompts = parse_prompts(text, f"{style}.txt")
    if n is None:
        return prompts
    if not 1 <= n <= len(prompts):
        raise ValueError(f"{n} prompts asked for, the set holds {len(prompts)}")
    return prompts[:n]
