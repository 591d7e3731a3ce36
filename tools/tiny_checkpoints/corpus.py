"""The training text: prose paragraphs of Python's own documentation, plain and as chat turns.

Source: ``pydoc_data.topics``, the text behind ``help("with")``, which every CPython installation carries
(PSF-2.0). Grammar, code, tables and lists are left out. The text differs a little between Python versions, so
:attr:`Corpus.sha256` tells which one a checkpoint was trained on.
"""

from __future__ import annotations

import hashlib
import random
import re
import textwrap
from dataclasses import dataclass

# Topics that read as prose; the order fixes the corpus.
TOPICS = {
    "assignment": "assignment statements",
    "attribute-access": "attribute access",
    "booleans": "boolean operations",
    "calls": "calls",
    "class": "class definitions",
    "comparisons": "comparisons",
    "compound": "compound statements",
    "context-managers": "context managers",
    "conversions": "arithmetic conversions",
    "exceptions": "exceptions",
    "execmodel": "the execution model",
    "for": "the for statement",
    "function": "function definitions",
    "global": "the global statement",
    "import": "the import statement",
    "naming": "naming and binding",
    "objects": "objects, values and types",
    "raise": "the raise statement",
    "return": "the return statement",
    "specialnames": "special method names",
    "strings": "string literals",
    "try": "the try statement",
    "types": "the standard type hierarchy",
    "typesmapping": "mapping types",
    "typesseq": "sequence types",
    "while": "the while statement",
    "with": "the with statement",
    "yield": "yield expressions",
}
_QUESTIONS = (
    "Explain in simple words {0}.",
    "Tell me about {0}.",
    "What should I know about {0}?",
    "Describe {0} and why it matters.",
    "Write a short text about {0}.",
    "What are the main rules of {0}?",
    "Give me a short explanation of {0}.",
    "Summarise {0} in a few sentences.",
)
_PLAIN = re.compile(r"""[A-Za-z0-9 .,;:'"()\-_/=]+""")
_REPLACEMENTS = {"’": "'", "‘": "'", "“": '"', "”": '"', "—": "-", "–": "-", "…": "..."}
_HELD_OUT_EVERY = 20
_MIN_CHARS, _MAX_CHARS = 120, 900
_ANSWER_CHARS = 420
_DOCUMENT_CHARS = 3000  # of one topic: little enough that a small model learns it by heart in minutes


@dataclass(frozen=True)
class Turn:
    """One question and its answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class Corpus:
    """The training text.

    Attributes:
        documents: one text per topic, its kept paragraphs separated by empty lines.
        turns: questions on a topic or on a sentence's beginning, with an answer from the text.
        held_out: paragraphs that neither ``documents`` nor ``turns`` contain; only tokenizers see them.
        sha256: over everything above, in order.
    """

    documents: tuple[str, ...]
    turns: tuple[Turn, ...]
    held_out: tuple[str, ...]
    sha256: str


def paragraphs(text: str) -> list[str]:
    """Return the prose paragraphs of one documentation topic, each on one line of plain ASCII.

    A paragraph is prose when it is written in whole sentences and in letters and common punctuation only.
    """
    kept = []
    for block in re.split(r"\n\s*\n", text):
        line = " ".join(textwrap.dedent(block).split())
        for old, new in _REPLACEMENTS.items():
            line = line.replace(old, new)
        line = re.sub(r"\*(\w+)\*", r"\1", line)  # emphasis
        line = re.sub(r"\s*\[\d+\]", "", line)  # footnotes
        line = re.sub(r"^(?:\d+\.|- |\(\d+\)) ?", "", line)
        letters = sum(character.isalpha() or character == " " for character in line)
        if (
            _MIN_CHARS <= len(line) <= _MAX_CHARS
            and line[0].isupper()
            and line.endswith(".")
            and _PLAIN.fullmatch(line)
            and letters > 0.9 * len(line)
            and "==" not in line
            and "::" not in line
        ):
            kept.append(line)
    return kept


def load_corpus() -> Corpus:
    """Build the corpus from the documentation of the running Python.

    Raises:
        RuntimeError: this Python carries no ``pydoc_data`` or no usable prose in it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RuntimeError("this Python has no pydoc_data.topics: install its standard library") from error
    seen: set[str] = set()
    documents: list[str] = []
    held_out: list[str] = []
    turns: list[Turn] = []
    number = 0
    for key, title in TOPICS.items():
        kept: list[str] = []
        for paragraph in paragraphs(topics.get(key, "")):
            if paragraph in seen:
                continue
            seen.add(paragraph)
            number += 1
            enough = sum(map(len, kept)) >= _DOCUMENT_CHARS
            (held_out if enough or number % _HELD_OUT_EVERY == 0 else kept).append(paragraph)
        if kept:
            documents.append("\n\n".join(kept))
            turns += _turns(title, kept)
    if len(documents) < len(TOPICS) // 2:
        raise RuntimeError(f"pydoc_data.topics has prose for {len(documents)} of {len(TOPICS)} topics only")
    everything = repr((documents, [(turn.question, turn.answer) for turn in turns], held_out))
    digest = hashlib.sha256(everything.encode()).hexdigest()
    return Corpus(tuple(documents), tuple(turns), tuple(held_out), digest)


def _turns(title: str, kept: list[str]) -> list[Turn]:
    chooser = random.Random(title)
    turns = []
    following = [*kept[1:], ""]
    pairs = list(zip(kept, following, strict=True))
    for template, (paragraph, after) in zip(chooser.sample(_QUESTIONS, len(_QUESTIONS)), pairs, strict=False):
        turns.append(Turn(template.format(title), _sentences(f"{paragraph} {after}".strip())))
    for paragraph, after in pairs[len(_QUESTIONS) :]:
        words = f"{paragraph} {after}".split()
        turns.append(Turn(f"Continue: {' '.join(words[:6])}", _sentences(" ".join(words[6:]))))
    return turns


def _sentences(text: str) -> str:
    """Cut after the last whole sentence within the answer's length, or after the first long one."""
    if len(text) <= _ANSWER_CHARS:
        return text
    end = text.rfind(". ", 0, _ANSWER_CHARS)
    end = end if end > _ANSWER_CHARS // 3 else text.find(". ", _ANSWER_CHARS // 3)
    return text[: end + 1] if end > 0 else text
