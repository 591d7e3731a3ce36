"""predict, promote, list, status and the templates: scriptable, one source for the gates of all models."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llms.llama_kernel_builder.deployment import describe
from llms.llama_kernel_builder.model_config import ModelConfig, RopeScaling
from npu_deploy import errors, promote, scaffold
from npu_deploy.cli import app

LLMS = Path(__file__).resolve().parents[2] / "llms"
MODELS = ("llama32_1b", "qwen2", "qwen3_0_6b", "smollm2_135m")
THREE_B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 32768,
}


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


@pytest.fixture
def three_b(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(THREE_B))
    return path


@pytest.mark.parametrize(
    ("emb", "hidden", "heads", "kv_heads", "vocab"),
    [(1536, 8960, 12, 2, 151936), (2048, 11008, 16, 2, 151936), (3584, 18944, 28, 4, 152064)],
    ids=["1.5b", "3b", "7b"],
)
def test_the_registry_has_the_kernels_of_every_variant_of_qwen2(
    emb: int, hidden: int, heads: int, kv_heads: int, vocab: int
) -> None:
    """Sizes of Qwen2.5-1.5B, 3B and 7B; building a program asks the registry for its tile."""
    from llms.llama_kernel_builder.llama_loop import all_programs
    from llms.qwen2.qwen2_inference import SEQUENCE

    sizes = {"hidden_size": emb, "intermediate_size": hidden, "vocab_size": vocab}
    shape = {**THREE_B, **sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    found = ModelConfig.from_hf_dict({**shape, "eos_token_id": 151645})
    names = {program.name for program in all_programs(SEQUENCE, found)}
    assert {"rms_qkv_bias_rope_s2048", "flash_attn_s128", "down_gemv_add", "lm_head_gemv"} <= names


def test_predict_needs_a_configuration_only(three_b: Path) -> None:
    begin = time.monotonic()
    code, text = invoke("predict", str(three_b), "--json")
    assert time.monotonic() - begin < 5
    data = json.loads(text)
    assert code == 0
    assert data["device"] == "twin (modelled)"
    assert 0 < data["expected_error"]["ttft"] < 0.5
    # published silicon: 4.24 s and 285.7 ms per token (Xilinx/mlir-air e972f2942)
    assert data["published"]["id"] == "qwen25_3b"
    assert data["ttft_ms"] == pytest.approx(4240, rel=0.25)
    assert data["tpot_ms"] == pytest.approx(285.7, rel=0.25)
    prefill = sum(row["total_ms"] for row in data["breakdown"] if row["section"] == "prefill")
    assert prefill == pytest.approx(data["ttft_ms"], rel=1e-6)


def test_predict_a_shorter_prompt(three_b: Path) -> None:
    short = json.loads(invoke("predict", str(three_b), "--seq-len", "128", "--json")[1])
    long = json.loads(invoke("predict", str(three_b), "--json")[1])
    assert short["seq_len"] == 128
    assert short["ttft_ms"] < long["ttft_ms"] / 4
    assert "twin (modelled)" in invoke("predict", str(three_b))[1]


def test_predict_refuses_what_is_out_of_scope(three_b: Path) -> None:
    three_b.write_text(json.dumps({**THREE_B, "use_sliding_window": True}))
    code, text = invoke("predict", str(three_b))
    assert (code, "sliding window" in text) == (errors.OUT_OF_SCOPE, True)
    assert invoke("predict", "nobody/nothing")[0] == errors.BAD_CHECKPOINT


def test_predict_a_model_by_name() -> None:
    code, text = invoke("predict", "qwen2", "--json")
    assert code == 0
    assert json.loads(text)["published"]["id"] == "qwen25_0_5b"


def test_predict_says_what_a_folders_own_programs_take_and_what_is_beyond_the_published() -> None:
    """The published flow carries every result to the host, the toolkit does not; both are modelled."""
    data = json.loads(invoke("predict", "smollm2_135m", "--seq-len", "128", "--json")[1])
    assert 0 < data["own_programs"]["ttft_ms"] < data["ttft_ms"]
    assert 0 < data["own_programs"]["tpot_ms"] < data["tpot_ms"]
    text = invoke("predict", "smollm2_135m", "--seq-len", "128")[1]
    assert "the programs of this folder" in text
    assert "beyond what is published, so the error may be larger: 0.13 billion weights" in text


def config(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "model_type": "llama",
        "n_layers": 2,
        "emb_dim": 128,
        "n_heads": 2,
        "n_kv_heads": 1,
        "head_dim": 64,
        "hidden_dim": 256,
        "vocab_size": 512,
        "rope_theta": 1e4,
        "rope_scaling": RopeScaling(),
        "rms_eps": 1e-5,
        "tied_embeddings": True,
        "qkv_bias": False,
        "qk_norm": False,
        "max_position": 100,
        "eos_token_ids": (1,),
    }
    return ModelConfig(**{**fields, **changes})


def test_share_of_the_device_by_hand() -> None:
    found = describe.share(config(), 2048)
    assert found.seq_len == 100
    # per layer and row: q, o 128x128; k, v 128x64; gate, up, down 128x256; two operations each
    products = 2 * 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256)
    attention = 2 * 4 * 128 * sum(range(1, 101))
    assert found.prefill_total == products * 100 + 2 * 128 * 512 + attention
    assert found.prefill_device == found.prefill_total
    assert found.decode_total - found.decode_device == 2 * 4 * 128 * 100
    on_host = describe.share(config(head_dim=32, n_heads=4, n_kv_heads=2), 100)
    assert on_host.prefill_total - on_host.prefill_device == attention


def test_host_attention_is_part_of_the_prediction() -> None:
    found = describe.speed(config(head_dim=32, n_heads=4, max_position=2048))
    names = {row["name"] for row in found.breakdown if row["section"] == "prefill"}
    assert "prefill_attention_cpu" in names
    assert not any("flash_attn" in name for name in names)
    total = sum(row["total_ms"] for row in found.breakdown if row["section"] == "prefill")
    assert found.ttft_ms == pytest.approx(total, rel=1e-6)


def test_gates_of_every_model_come_from_the_suite() -> None:
    """A model may add tests below the import; it has no gate of its own."""
    for model in MODELS:
        for template in (scaffold.TEMPLATES / "tests").iterdir():
            name = template.name.removesuffix(".j2")
            text = (LLMS / model / "tests" / name).read_text(encoding="utf-8")
            assert text.startswith(template.read_text(encoding="utf-8")), f"{model}/tests/{name}"


@pytest.mark.parametrize("model", MODELS)
def test_templates_render_what_the_committed_models_are(model: str) -> None:
    """The templates are held against hand-written folders, docstrings and comments aside."""
    import ast

    from llms.verify.contract.deployment import load_adapter

    adapter = load_adapter(LLMS / model)
    context = scaffold.context_of(adapter.CONFIG, model, "T", local=False)
    context |= {"choice": "instruct", "source": '"x"', "checkpoint_words": "x"}
    rendered_files = scaffold.rendered(context)
    for path in (f"{model}_{part}.py" for part in ("prefill", "decode", "inference")):
        text = rendered_files[path]
        trees = [ast.parse(source) for source in (text, (LLMS / model / path).read_text())]
        for tree in trees:
            for node in ast.walk(tree):
                body = getattr(node, "body", None)
                if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
                    body.pop(0)
        if path != f"{model}_inference.py":
            rendered, committed = (
                {n.name: ast.dump(n) for n in t.body if isinstance(n, ast.FunctionDef)} for t in trees
            )
            kind = "prefill" if "prefill" in path else "decode"
            for name in (f"{kind}_blocks", f"{kind}_layer"):
                assert rendered[name] == committed[name]
        else:
            assert ast.dump(trees[0]) == ast.dump(trees[1])


def test_promote_sees_copies_renamed_copies_and_variants(tmp_path: Path) -> None:
    sources = {
        "one": (
            "def gate(x):\n    '''Doc.'''\n    return make_block(x)\n\n"
            "def twin_of(a):\n    return a * 2 + 1\n"
        ),
        "two": (
            "def gate(x):\n    return make_block(x, 2)\n\n"
            "def renamed(a):\n    '''Other.'''\n    return a * 2 + 1\n"
        ),
        "three": "def alone(x):\n    return x\n\ndef prefill_layer(x):\n    return x\n",
    }
    folders = []
    for name, text in sources.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}_prefill.py").write_text(text)
        folders.append((name, tmp_path / name))
    found = {
        entry["name"]: (entry["kind"], entry["relation"], len(entry["places"]))
        for entry in promote.candidates(folders).data["candidates"]
    }
    assert found == {"gate": ("block", "variant", 2), "renamed = twin_of": ("function", "copy", 2)}
    assert promote.candidates(folders[2:]).data["candidates"] == []


def test_promote_list_and_status_are_scriptable() -> None:
    code, text = invoke("promote", "--json")
    assert code == 0
    assert set(MODELS) <= set(json.loads(text)["models"])
    code, text = invoke("list", "--json")
    assert {"qwen2", "smollm2_135m"} <= {row["name"] for row in json.loads(text)}
    code, text = invoke("status", "qwen2", "--json")
    (row,) = json.loads(text)["models"]
    assert (code, row["model"], len(row["phases"])) == (0, "qwen2", 8)
    assert invoke("status", "no_such_model")[0] == errors.USAGE


def test_help_documents_the_exit_codes() -> None:
    for command in ("new", "run", "status", "predict", "promote", "list", "clean"):
        code, text = invoke(command, "--help")
        assert (code, "Exit codes" in text) == (0, True), command


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("run", "no_such_model"), errors.USAGE),
        (("run",), errors.USAGE),
        (("run", "qwen2", "--from", "5", "--to", "3"), errors.USAGE),
        (("run", "qwen2", "--from", "9"), 2),
        (("run", "qwen2", "--checkpoint", "/no/such/folder"), errors.USAGE),
        (("clean", "no_such_model"), errors.USAGE),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], code: int) -> None:
    assert invoke(*arguments)[0] == code


def test_a_new_folder_reads_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a gate run: files, documents, remembered checkpoint, own rows; lines fit the limit."""
    monkeypatch.setenv("PYTEST_NPU_CACHE", str(tmp_path / "cache"))
    checkpoint = tmp_path / "Some-Model.v2"
    shutil.copytree(LLMS / "qwen2" / "tiny", checkpoint)
    code, text = invoke("new", str(checkpoint), "--into", str(tmp_path / "m"), "--json")
    assert code == 0
    made = json.loads(text)
    folder = tmp_path / "m" / "some_model_v2"
    assert made["folder"] == str(folder)
    for path in (
        "README.md",
        "ARCHITECTURE.md",
        "TODO.md",
        "Makefile",
        ".gitignore",
        "LESSONS.md",
    ):
        assert (folder / path).read_text().strip(), path
    assert str(checkpoint) in (folder / "some_model_v2_weights.py").read_text()
    assert "| emb_dim | 256 |" in (folder / "ARCHITECTURE.md").read_text()
    assert "twin (modelled)" in (folder / "README.md").read_text()
    rows = json.loads((folder / "kernel_registry" / "details" / "gemm.json").read_text())["rows"]
    assert all(row["used_by"] == ["some_model_v2"] for row in rows)
    for path in folder.rglob("*.py"):
        lines = [line for line in path.read_text().splitlines() if str(tmp_path) not in line]
        assert max(map(len, lines), default=0) <= 110, path
    for name in ("some_model_v2_prefill.py", "some_model_v2_decode.py"):
        assert len((folder / name).read_text().splitlines()) < 120
    if shutil.which("make"):
        words = ["make", "--no-print-directory", "-C", str(folder), "-n", "compile"]
        made = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        assert made == (
            "cd .. && python3 -m some_model_v2.some_model_v2_inference  --model instruct --compile-only\n"
        )
    # the folder is found by name from now on
    assert any(row["folder"] == str(folder) for row in json.loads(invoke("list", "--json")[1]))
    assert json.loads(invoke("status", "some_model_v2", "--json")[1])["models"][0]["hash"]


@pytest.mark.parametrize("model", MODELS)
def test_documents_of_the_models_are_up_to_date(model: str) -> None:
    """After a change of templates, sizes or timing parameters: python -m npu_deploy.model_docs."""
    from npu_deploy import folders, model_docs

    for path, text in model_docs.texts(folders.find(model)).items():
        assert (LLMS / model / path).read_text() == text, f"{model}/{path} is out of date"
    for path in ("TODO.md", "LESSONS.md"):
        assert (LLMS / model / path).read_text().strip(), path


@pytest.mark.parametrize(
    ("longest", "expected"),
    [(64, (128,)), (128, (128,)), (129, (128, 256)), (200, (128, 256)), (1000, (128, 256, 512, 1024))],
)
def test_every_prompt_that_a_model_takes_has_its_bucket(longest: int, expected: tuple[int, ...]) -> None:
    from llms.llama_kernel_builder.llama_loop import bucket_for, buckets_of

    assert buckets_of(config(max_position=longest)) == expected
    needed = {bucket_for(length, longest) for length in range(1, longest + 1)}
    assert needed == set(expected)
