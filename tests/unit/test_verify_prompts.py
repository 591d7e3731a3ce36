"""Prompt sets, chat encoding and the payload a report reads."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llms.verify.contract.chat import encode_prompt
from llms.verify.contract.prompts import load_prompts, parse_prompts
from llms.verify.contract.topk import TokenStep, TokenTrace, judge
from llms.verify.gates.payloads import describe_failure, token_text, topk_gate_payload

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<t>{{ m['content'] }}</t>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A word tokenizer whose turn end ``</t>`` is the EOS token and which adds a begin token by itself."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</t>", "<t>", "<a>", "?", "hello", "world", "[U]"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[U]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</t>",
        unk_token="[U]",
        additional_special_tokens=["<t>", "<a>"],
    )
    made.chat_template = TEMPLATE
    return made


@pytest.mark.parametrize("style", ["instruct", "base"])
def test_each_set_has_eight_distinct_prompts(style: Any) -> None:
    prompts = load_prompts(style)
    assert len(set(prompts)) == 8
    assert load_prompts(style, 2) == prompts[:2]
    assert not any(prompt.startswith("#") for prompt in prompts)
    assert all(3 <= len(prompt.split()) <= 20 for prompt in prompts)


def test_a_prompt_file_may_hold_comments_and_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("# a comment\n\n  first one \nsecond\n", encoding="utf-8")
    assert load_prompts("base", file=path) == ("first one", "second")


@pytest.mark.parametrize(("text", "says"), [("# only\n\n", "no prompts"), ("a\nb\na\n", "twice: 'a'")])
def test_useless_prompt_files_are_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_prompts(text, "mine.txt")


def test_wrong_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown prompt style 'poem'"):
        load_prompts("poem")  # type: ignore[arg-type]
    for n in (0, 9):
        with pytest.raises(ValueError, match="the set holds 8"):
            load_prompts("base", n)
    with pytest.raises(ValueError, match="cannot be read"):
        load_prompts("base", file=tmp_path / "absent.txt")


def test_the_chat_template_is_applied_once_and_the_length_is_counted(tokenizer: Any) -> None:
    prompt = encode_prompt(tokenizer, "hello world", "instruct")
    assert prompt.ids == (0, 2, 5, 6, 1, 3)  # one begin token; EOS (1) inside the prompt counts
    assert len(prompt) == 6
    assert encode_prompt(tokenizer, "hello world", "base").ids == (0, 5, 6)


def test_a_doubled_begin_token_is_refused(tokenizer: Any) -> None:
    class Doubling:
        bos_token_id = 0
        chat_template = TEMPLATE

        def apply_chat_template(self, messages: Any, **_: Any) -> Any:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return {"input_ids": tokenizer(text)["input_ids"]}  # the known bug: special tokens again

    with pytest.raises(ValueError, match="begin token 0 stands twice"):
        encode_prompt(Doubling(), "hello", "instruct")


def test_prompts_that_cannot_be_encoded_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="empty"):
        encode_prompt(tokenizer, "  ", "base")
    with pytest.raises(ValueError, match="no chat template"):
        encode_prompt(SimpleNamespace(chat_template=None, bos_token_id=None), "hello", "instruct")


def _gate(tokenizer: Any, fail: bool) -> dict[str, Any]:
    same = [TokenStep(5, (5, 6, 4, 3, 2), True, 8)] * 2
    npu = TokenStep(6, (6, 4, 3, 2, 1), True, 8) if fail else TokenStep(6, (6, 5, 3, 2, 1), True, 8)
    hf = TokenStep(5, (5, 6, 4, 3, 2), True, 8)
    result = judge([TokenTrace((1,), (*same, npu))], [TokenTrace((1,), (*same, hf))], n_tokens=3)
    return topk_gate_payload(result, ["say hello"], tokenizer)


def test_the_gate_payload_has_the_agreed_fields_and_is_json(tokenizer: Any) -> None:
    payload = _gate(tokenizer, fail=False)
    assert json.loads(json.dumps(payload, allow_nan=False)) == payload
    assert (payload["k"], payload["n_tokens"]) == (5, 3)
    (prompt,) = payload["prompts"]
    wanted = (
        "index text n_steps divergence_step npu_token hf_token npu_token_text hf_token_text npu_topk hf_topk "
        "npu_rank_in_hf hf_rank_in_npu npu_text hf_text agreed_prefix status reason"
    )
    assert set(wanted.split()) <= set(prompt)
    assert prompt["status"] == "OK"
    assert (prompt["divergence_step"], prompt["npu_token_text"], prompt["hf_token_text"]) == (
        2,
        "world",
        "hello",
    )
    assert (prompt["npu_rank_in_hf"], prompt["hf_rank_in_npu"]) == (2, 2)
    assert (prompt["npu_text"], prompt["agreed_prefix"]) == ("hello hello world", "hello hello")


def test_a_failure_reads_with_token_text_of_both_sides(tokenizer: Any) -> None:
    payload = _gate(tokenizer, fail=True)
    text = describe_failure(payload)
    assert payload["status"] == "FAIL"
    assert "npu: 6 'world', rank 2 in hf" in text
    assert "hf: 5 'hello', not in the top of npu" in text
    assert "'hello hello world'" in text


def test_control_characters_of_a_token_are_visible() -> None:
    tokenizer = SimpleNamespace(decode=lambda ids: {1: "\n", 2: "", 3: "a"}[ids[0]])
    assert [token_text(tokenizer, index) for index in (1, 2, 3, 4, None)] == [
        "\\n",
        "<id 2>",
        "a",
        "<id 4>",
        None,
    ]
