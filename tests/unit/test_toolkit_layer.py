"""Layers: builders that are named as their ELFs, programs as they were, stages bound to a layer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from llms.llama_kernel_builder import blocks, driver, elfs
from llms.llama_kernel_builder.block_runner import BlockRunner
from llms.llama_kernel_builder.cache import KernelCache
from llms.llama_kernel_builder.deployment.production import ProductionFunctions
from llms.llama_kernel_builder.exceptions import ConfigError, UnknownKernel
from llms.llama_kernel_builder.layer import Layer, LayerRun
from llms.llama_kernel_builder.layers import run_ffn, run_ffn_gemv
from llms.llama_kernel_builder.llama_loop import KernelSequence, buckets_of
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.llama_kernel_builder.rope_table import rope_table
from llms.llama_kernel_builder.weights import expected_tensors, load_weights, pad_weights
from llms.production import ProductionFunctions as EarlierFunctions
from llms.verify.contract.deployment import load_adapter

ROOT = Path(__file__).resolve().parents[2]
LLMS = ROOT / "llms"
RECORDED: dict[str, list[list[str]]] = json.loads(
    (ROOT / "tests" / "data" / "programs_c7ea232.json").read_text(encoding="utf-8")
)
QWEN3 = ModelConfig.from_hf_folder(LLMS / "qwen3_0_6b" / "tiny")


@pytest.mark.parametrize("model", RECORDED)
def test_programs_are_those_of_c7ea232(model: str) -> None:
    """Artefacts and caches are keyed by these digests: of all ELFs, merged and one per kernel."""
    adapter = load_adapter(LLMS / model)
    sequence, config = adapter.inference.SEQUENCE, adapter.CONFIG
    built = [
        block.named(f"_s{seq_len}")
        for seq_len in buckets_of(config)
        for block in sequence.prefill_blocks(config, seq_len)
    ]
    built += [*sequence.decode_blocks(config), sequence.lm_head(config)]
    programs = [program for block in built for program in (block.merged(), *block.unmerged())]
    assert [[program.name, program.digest[:16]] for program in programs] == RECORDED[model]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_a_builder_is_named_as_its_elf(bias: bool, norm: bool) -> None:
    config = replace(QWEN3, qkv_bias=bias, qk_norm=norm)
    prefill, decode = elfs.qkv_of(config)
    names = [[block.name for block in stage.blocks] for stage in (prefill(config, 128), decode(config))]
    if bias and norm:
        assert names == [["rms_qkv_bias", "qknorm_rope"], ["rms_qkv_bias_gemv", "qknorm_rope_gemv"]]
    else:
        assert names == [[prefill.__name__], [decode.__name__]]


def test_a_builder_of_another_architecture_names_the_right_one() -> None:
    with pytest.raises(ConfigError, match="build rms_qkv_qknorm_rope_gemv instead"):
        elfs.rms_gemv_rope(QWEN3)


def test_a_layer_gives_its_blocks_in_the_order_of_execution() -> None:
    layer = Layer(
        ffn=elfs.o_ffn(QWEN3, 128),
        qkv=elfs.rms_qkv_qknorm_rope(QWEN3, 128),
        attention=elfs.flash_attn(QWEN3, 128),
    )
    assert [block.name for block in layer] == ["rms_qkv_qknorm_rope", "flash_attn", "o_ffn"]
    assert [block.name for block in layer.map(lambda block: block.named("_s1"))][1] == "flash_attn_s1"


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[KernelCache]:
    made = KernelCache(tmp_path, driver=driver.select("twin"))
    yield made
    made.close()


def test_a_layer_that_was_not_added_is_named(cache: KernelCache) -> None:
    with pytest.raises(UnknownKernel, match="no layer '_s128' was added to this runner; known: none"):
        LayerRun(BlockRunner(cache), "_s128", 0)


BIASED = replace(QWEN3, qkv_bias=True, n_layers=2)


def new_form() -> KernelSequence:
    def prefill_layer(run: Any, x: Any) -> Any:
        q, k, v = run.qkv(x)
        return run.ffn(run.attention(q, k, v), residual=x), k, v

    def decode_layer(run: Any, x: Any) -> Any:
        q, k, v = run.qkv(x)
        return run.ffn(run.attention(q, k, v), residual=x)

    return KernelSequence(
        lambda config, seq_len: Layer(
            qkv=elfs.rms_qkv_bias_qknorm_rope(config, seq_len),
            attention=elfs.flash_attn(config, seq_len),
            ffn=elfs.o_ffn(config, seq_len),
        ),
        prefill_layer,
        lambda config: Layer(qkv=elfs.rms_qkv_bias_qknorm_rope_gemv(config), ffn=elfs.o_gemv_ffn(config)),
        decode_layer,
        elfs.lm_head_gemv,
    )


def earlier_form() -> KernelSequence:
    """As `npu-deploy new` rendered a model with bias and per-head norm at c7ea232."""

    def prefill_blocks(config: Any, seq_len: int) -> Any:
        return (
            *blocks.qkv(config, seq_len),
            *blocks.flash_attn(config, seq_len),
            *blocks.ffn(config, seq_len),
        )

    def prefill_layer(run: Any, suffix: str, layer: int, x: Any) -> Any:
        qkv = run.chain((f"rms_qkv_bias{suffix}", f"qknorm_rope{suffix}"), layer, x=x)
        q, k, v = qkv["q_roped"], qkv["k_roped"], qkv["v_biased"]
        attn = run(f"flash_attn{suffix}", layer, q=q, k=k, v=v)["attn"]
        return run_ffn(run, suffix, layer, attn, x), k, v

    def decode_layer(run: Any, layer: int, x: Any, table_q: Any, table_k: Any, attend: Any) -> Any:
        names = ("rms_qkv_bias_gemv", "qknorm_rope_gemv")
        qkv = run.chain(names, layer, x=x, table_q=table_q, table_k=table_k)
        attn = attend(qkv["q_roped"], qkv["k_roped"], qkv["v_biased"])
        return run_ffn_gemv(run, layer, attn, x)

    def decode_blocks(config: Any) -> Any:
        return (*blocks.qkv_gemv(config), *blocks.ffn_gemv(config))

    earlier: Any = (prefill_blocks, prefill_layer, decode_blocks, decode_layer, blocks.lm_head_gemv)
    return KernelSequence(*earlier)


def generated(functions: Any, cache: KernelCache, *, npu_attn: bool = True) -> list[Any]:
    """Logits of a prompt and of two decode steps, and the KV cache."""
    rng = np.random.default_rng(3)
    tensors = {
        name: (rng.standard_normal(shape) * 0.05 + ("norm" in name)).astype(bfloat16)
        for name, shape in expected_tensors(BIASED).items()
    }
    weights = pad_weights(load_weights(tensors, BIASED), BIASED)
    prefill, decode = BlockRunner(cache), BlockRunner(cache)
    table = rope_table(BIASED, 128)
    functions.prepare_runtime(prefill, decode, weights, BIASED, 128, table, npu_attn=npu_attn)
    layers: list[Any] = []
    token, logits, keys, values, position = functions.run_npu_prefill(
        [5, 9, 2, 7], weights, BIASED, prefill, decode, table, 128, layer_outputs=layers
    )
    seen = [logits, *layers]
    for _ in range(2):
        x = weights.embedding[token]
        token, logits = functions.run_npu_decode_step(
            x, weights, BIASED, decode, table, keys, values, position
        )
        position += 1
        seen.append(logits)
    return [np.asarray(array).astype(np.float32) for array in (*seen, keys, values)]


def test_layers_that_call_elfs_by_name_compute_the_same(cache: KernelCache) -> None:
    for mine, theirs in zip(
        generated(ProductionFunctions(new_form), cache),
        generated(EarlierFunctions(earlier_form), cache),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, theirs)


def test_attention_of_the_host_is_that_of_the_device(cache: KernelCache) -> None:
    on_device = generated(ProductionFunctions(new_form), cache)[0]
    for functions in (ProductionFunctions(new_form), EarlierFunctions(earlier_form)):
        on_host = generated(functions, cache, npu_attn=False)[0]
        assert not np.array_equal(on_host, on_device)
        cosine = on_host @ on_device / np.linalg.norm(on_host) / np.linalg.norm(on_device)
        assert cosine > 0.98
