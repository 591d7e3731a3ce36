"""Loading an adapter: ours or a foreign one, complete or not."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llms.checkpoints import CheckpointError
from llms.verify.contract.capture import capture
from llms.verify.contract.deployment import Deployment
from llms.verify.contract.models import DeploymentError, find_folder, known_models

ADAPTER = """
from types import SimpleNamespace
import numpy as np
import model_helper                       # a sibling module, as scripts of such a folder expect

MODEL_CHOICES = {"base": "org/base-model", "instruct": "org/instruct-model"}
DEFAULT_MODEL = "instruct"
calls = []

def resolve_model(choice):
    return MODEL_CHOICES.get(choice, choice)

def build_config():
    return SimpleNamespace(n_layers=2, emb_dim=8, n_kv_heads=1, head_dim=4)

class Runner:
    name = "foreign"
    closed = False
    def prefill(self, prompt_tokens):
        self.row = np.zeros(32); self.row[len(prompt_tokens)] = 1
        return SimpleNamespace(layer_intermediates=[], final_hidden_normed=np.empty(0),
                               logits_at_pred=self.row, top1_token=len(prompt_tokens))
    def decode_step(self, input_token, current_pos):
        self.row[:] = 0; self.row[current_pos % 32] = 1
        return SimpleNamespace(lm_head_logits=self.row, top1_token=current_pos % 32)
    def close(self):
        self.closed = True

def build_runner(model_name, config, max_seq, tokenizer, *, npu_attn=True, lite_mode=False):
    calls.append((model_name, config.n_layers, max_seq, npu_attn, lite_mode))
    return Runner()
"""


def write(tmp_path: Path, adapter: str, name: str = "foreign_model") -> Path:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "verify_adapter.py").write_text(textwrap.dedent(adapter))
    (folder / "model_helper.py").write_text("")
    return folder


@pytest.fixture
def tiny_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deployment, "tokenizer", None)


def test_a_foreign_adapter_loads_unmodified(tmp_path: Path, tiny_tokenizer: None) -> None:
    folder = write(tmp_path, ADAPTER)
    deployment = Deployment.from_folder(folder)
    assert (deployment.name, deployment.choice) == ("foreign_model", "instruct")
    assert deployment.model_name == "org/instruct-model"
    assert deployment.config().emb_dim == 8
    runner = deployment.runner(512)
    assert deployment.runner(512) is runner
    assert deployment.adapter.calls == [("org/instruct-model", 2, 512, True, False)]
    assert deployment.runner(512, lite_mode=True) is not runner
    deployment.release_runners()
    assert runner.closed  # type: ignore[attr-defined]
    assert deployment.runner(512) is not runner


def test_a_capture_of_a_foreign_runner_is_a_copy(tmp_path: Path, tiny_tokenizer: None) -> None:

    deployment = Deployment.from_folder(write(tmp_path, ADAPTER))
    done = capture(deployment.runner(), (1, 2, 3), n_tokens=4, keep_logits=True)
    assert done.trace.tokens == (3, 3, 4, 5)
    assert [int(np.argmax(row)) for row in done.logits] == [3, 3, 4, 5]  # the runner reuses one row


def test_choice_and_checkpoint_pass_through_resolve_model(tmp_path: Path) -> None:
    folder = write(tmp_path, ADAPTER)
    assert Deployment.from_folder(folder, model_choice="base").model_name == "org/base-model"
    assert Deployment.from_folder(folder, model_choice="other/model").model_name == "other/model"
    with pytest.raises(DeploymentError, match=r"no model 'bsae': choose one of base, instruct"):
        Deployment.from_folder(folder, model_choice="bsae")
    explicit = Deployment.from_folder(folder, checkpoint=tmp_path / "weights")
    assert explicit.model_name == str(tmp_path / "weights")
    assert explicit.choice is None
    with pytest.raises(CheckpointError, match="does not exist"):
        _ = explicit.checkpoint


def test_the_prompt_style_follows_the_model_not_a_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, ADAPTER)
    assert Deployment.from_folder(folder, model_choice="base").prompt_style == "base"
    assert Deployment.from_folder(folder, model_choice="instruct").prompt_style == "instruct"

    class Plain:
        chat_template = None

    monkeypatch.setattr(Deployment, "tokenizer", Plain())
    assert Deployment.from_folder(folder, model_choice="any/thing").prompt_style == "base"


@pytest.mark.parametrize(
    ("cut", "says"),
    [
        ("MODEL_CHOICES", "MODEL_CHOICES"),
        ("def resolve_model", "resolve_model"),
        ("def build_config", "build_config"),
        ("def build_runner", "build_runner"),
    ],
)
def test_a_missing_name_of_the_contract_is_listed(tmp_path: Path, cut: str, says: str) -> None:
    adapter = ADAPTER.replace(cut, cut.replace("def ", "def other_").replace("MODEL_CHOICES", "OTHER"))
    with pytest.raises(DeploymentError, match=f"missing: .*{says}"):
        Deployment.from_folder(write(tmp_path, adapter))


def test_other_breaches_of_the_contract_are_named(tmp_path: Path, tiny_tokenizer: None) -> None:
    no_lite = ADAPTER.replace(", lite_mode=False", "").replace(", lite_mode))", "))")
    with pytest.raises(DeploymentError, match="does not accept lite_mode"):
        Deployment.from_folder(write(tmp_path, no_lite, "a"))
    with pytest.raises(DeploymentError, match="cannot be imported: SyntaxError"):
        Deployment.from_folder(write(tmp_path, "def (", "b"))
    poor = Deployment.from_folder(write(tmp_path, ADAPTER.replace(", head_dim=4", ""), "c"))
    with pytest.raises(DeploymentError, match="lacks head_dim"):
        poor.config()
    halting = Deployment.from_folder(write(tmp_path, ADAPTER.replace("def decode_step", "def step"), "d"))
    with pytest.raises(DeploymentError, match="Runner without decode_step"):
        halting.runner(128)


def test_a_failed_import_is_tried_again(tmp_path: Path) -> None:
    folder = write(tmp_path, "def (")
    with pytest.raises(DeploymentError):
        Deployment.from_folder(folder)
    (folder / "verify_adapter.py").write_text(ADAPTER)
    assert Deployment.from_folder(folder).name == "foreign_model"


def test_an_unknown_model_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match=r"unknown model 'no_such_model'. Known models: .*smollm2_135m"):
        find_folder("no_such_model")
    with pytest.raises(DeploymentError, match=r"has no verify_adapter.py"):
        find_folder(tmp_path)
    assert "smollm2_135m" in known_models()


@pytest.mark.parametrize("name", ["smollm2_135m", "llms/smollm2_135m", Path("llms/smollm2_135m/")])
def test_our_own_model_is_found_by_name_and_path(name: Any) -> None:
    deployment = Deployment.from_folder(name)
    assert deployment.adapter.__name__ == "llms.smollm2_135m.verify_adapter"
    assert deployment.config().n_layers == 30
    assert len(deployment.adapter.MODEL_CHOICES) >= 1


class Letters:
    """A tokenizer with one token per letter."""

    chat_template = None
    bos_token_id = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def short_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, positions: int) -> Deployment:
    monkeypatch.setattr(Deployment, "tokenizer", Letters())
    adapter = ADAPTER.replace("head_dim=4)", f"head_dim=4, max_position={positions})")
    return Deployment.from_folder(write(tmp_path, adapter, f"model_of_{positions}"))


def test_prompts_of_a_short_context_leave_room_for_the_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = short_model(tmp_path, monkeypatch, 512).prompts(2, "base")
    assert whole[0].text == "The capital of France is"
    cut = short_model(tmp_path, monkeypatch, 45).prompts(2, "base")
    assert [prompt.text for prompt in cut] == ["The capital", "Water boils"]
    assert max(map(len, cut)) + 33 <= 45
    assert [len(prompt) for prompt in short_model(tmp_path, monkeypatch, 34).prompts(2, "base")] == [1, 1]
    with pytest.raises(DeploymentError, match="33 generated tokens do not fit the model's 33 positions"):
        short_model(tmp_path, monkeypatch, 33).prompts(1, "base")


def test_prompts_of_a_user_are_never_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("A prompt that is a little longer than that\n")
    (prompt,) = short_model(tmp_path, monkeypatch, 45).prompts(style="base", file=file)
    assert len(prompt) == 42
