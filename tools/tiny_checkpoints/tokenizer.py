"""Byte-level BPE tokenizers, trained on the corpus and written in the layout of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.tiny_checkpoints.corpus import Corpus
from tools.tiny_checkpoints.families import MAX_POSITION, TokenizerSpec

# The published pre-tokenisation of Llama 3 and Qwen2 (tokenizer.json); they differ in the digits only.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(spec: TokenizerSpec, corpus: Corpus) -> Any:
    """Return a trained ``tokenizers.Tokenizer`` with exactly ``spec.entries`` tokens.

    Raises:
        RuntimeError: the corpus is too small for that many.
    """
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE())
    if spec.nfc:
        tokenizer.normalizer = normalizers.NFC()
    if spec.special_first:  # SmolLM2's way
        steps = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    else:
        digits = f"{{1,{spec.digits}}}" if spec.digits > 1 else ""
        steps = [
            pre_tokenizers.Split(Regex(_SPLIT.format(digits=digits)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in spec.special]
    trainer = trainers.BpeTrainer(
        vocab_size=spec.entries if spec.special_first else spec.entries - len(special),
        special_tokens=special if spec.special_first else [],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    questions = [turn.question for turn in corpus.turns]
    texts = [*corpus.documents, *corpus.held_out, *questions, "system\nuser\nassistant\n\n"]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(special)
    if tokenizer.get_vocab_size() != spec.entries:
        raise RuntimeError(f"the corpus gives {tokenizer.get_vocab_size()} tokens, {spec.entries} are wanted")
    if spec.add_bos and spec.bos is not None:
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{spec.bos} $A",
                    pair=f"{spec.bos} $A {spec.bos} $B:1",
                    special_tokens=[(spec.bos, tokenizer.token_to_id(spec.bos))],
                ),
            ]
        )
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def save_tokenizer(tokenizer: Any, spec: TokenizerSpec, folder: Path) -> dict[str, int]:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``; return the special tokens' ids."""
    ids = {token: int(tokenizer.token_to_id(token)) for token in spec.special}
    config = {
        "added_tokens_decoder": {
            str(index): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for token, index in sorted(ids.items(), key=lambda pair: pair[1])
        },
        "bos_token": spec.bos,
        "chat_template": spec.chat_template,
        "clean_up_tokenization_spaces": False,
        "eos_token": spec.eos,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": MAX_POSITION,
        "pad_token": spec.pad,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    # One merge per line would triple the file's size in version control; one line per section stays readable.
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    return ids
