"""From prompt text to token ids: chat template once, no second begin token, length counted.

The template is applied by the tokenizer with tokenisation in the same call. Encoding the template's *text*
would add the special tokens again; counting "tokens that are not EOS" would be wrong for every template whose
turn end is the EOS token. Both are known bugs of deployments, so :class:`EncodedPrompt` carries the ids and
their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llms.verify.contract.prompts import PromptStyle


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt ready for both sides.

    Attributes:
        text: what the user wrote.
        ids: token ids, template and special tokens included.
        style: ``instruct`` (chat template applied) or ``base`` (plain text).
    """

    text: str
    ids: tuple[int, ...]
    style: PromptStyle

    def __len__(self) -> int:
        return len(self.ids)


def encode_prompt(tokenizer: Any, text: str, style: PromptStyle) -> EncodedPrompt:
    """Encode one user prompt for a model of the given style.

    Raises:
        ValueError: empty text, an instruct style without chat template, or a doubled begin token.
    """
    if not text.strip():
        raise ValueError("the prompt is empty")
    if style == "instruct":
        ids = encode_chat(tokenizer, [{"role": "user", "content": text}])
    elif style == "base":
        ids = tuple(int(token) for token in tokenizer(text)["input_ids"])
    else:
        raise ValueError(f"unknown prompt style {style!r}")
    _check_begin(tokenizer, ids)
    return EncodedPrompt(text, ids, style)


def encode_chat(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[int, ...]:
    """Apply the tokenizer's own chat template to ``messages`` and open the assistant's turn.

    Raises:
        ValueError: the tokenizer has no chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("this tokenizer has no chat template: use the base prompt style (MODEL=base)")
    encoded = tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True
    )
    return tuple(int(token) for token in encoded["input_ids"])


def _check_begin(tokenizer: Any, ids: tuple[int, ...]) -> None:
    if not ids:
        raise ValueError("the prompt has no tokens after encoding")
    begin = getattr(tokenizer, "bos_token_id", None)
    if begin is not None and len(ids) > 1 and ids[0] == ids[1] == begin:
        raise ValueError(
            f"the begin token {begin} stands twice: a template was encoded with special tokens again"
        )
