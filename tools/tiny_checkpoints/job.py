"""One model in one process. Apart from ``__main__``, which a spawned process cannot import under its name."""

from __future__ import annotations

import resource
from pathlib import Path

from tools.tiny_checkpoints.corpus import load_corpus
from tools.tiny_checkpoints.families import FAMILIES
from tools.tiny_checkpoints.measure import report
from tools.tiny_checkpoints.training import build


def run(name: str, out: Path, train: bool) -> list[str]:
    """Train (unless told not to) and measure one model; returns the lines to print."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    corpus = load_corpus()
    if train:
        build(FAMILIES[name], corpus, out, lambda line: print(line, flush=True))
    lines = report(out, corpus)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return [*lines, f"  {usage.ru_utime + usage.ru_stime:.0f} s CPU"]
