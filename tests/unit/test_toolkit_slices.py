"""A down projection whose columns no GEMV holds: slices, their sum, and what the gates expect of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ml_dtypes import bfloat16

from kernel_registry.measure import TwinMeasurer
from kernel_registry.registry_lookup import ENV
from kernel_registry.shapes import Request, from_config
from kernel_registry.sweep import sweep
from llms.llama_kernel_builder import blocks, driver
from llms.llama_kernel_builder.block import Block
from llms.llama_kernel_builder.block_runner import BlockRunner
from llms.llama_kernel_builder.cache import KernelCache
from llms.llama_kernel_builder.deployment.arithmetic_of import describe_arithmetic
from llms.llama_kernel_builder.device_config import column_slices, deviations, gemv_slices
from llms.llama_kernel_builder.generic import generic_sequence
from llms.llama_kernel_builder.kernels import recording
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.verify.reference.arithmetic import DescriptionError, LinearArithmetic, products
from npu_twin import constraints, timing

HIDDEN, ROWS = 18944, 64
SLICED = ("down0", "down1", "down")
TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": ROWS,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "max_position_embeddings": 128,
    "eos_token_id": 0,
}
SEVEN_B = {
    **TINY,
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}
EIGHT_B = {
    **TINY,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def widths(rows: int, k: int) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in gemv_slices(rows, k))


@pytest.mark.parametrize("rows", [64, 576, 2048, 2112, 3584, 4096, 8192])
def test_slices_are_the_fewest_that_the_rules_of_the_device_allow(rows: int) -> None:
    for k in (64, 4864, 8192, 10688, 10752, 11008, 14336, 16064, 16128, 18944, 19008, 21440, 28672, 32128):
        assert widths(rows, k) == constraints.gemv_slices(rows, k), (rows, k)
        assert sum(widths(rows, k)) == k


def test_what_was_whole_before_stays_whole() -> None:
    # published rows of the mlir-air kernel registry: 2048x11008 (Qwen2.5-3B), 2560x9728 (Qwen3-4B)
    assert widths(2048, 11008) == (11008,)
    assert widths(2560, 9728) == (9728,)
    assert constraints.gemv_slices(64, 100) == ()


@pytest.mark.parametrize("fields", [SEVEN_B, EIGHT_B], ids=["7b", "8b"])
def test_every_kernel_of_the_published_large_sizes_is_legal(fields: dict[str, Any]) -> None:
    config = ModelConfig.from_hf_dict(fields)
    sequence = generic_sequence()
    with recording() as needs:
        sequence.prefill_blocks(config, 2048)
        sequence.decode_blocks(config)
        sequence.lm_head(config)
    for need in needs:
        dims = Request(need.op, need.shape, causal=need.causal).dims
        assert constraints.legal_configs(need.op, dims, causal=need.causal), need
    (text,) = deviations(config)
    assert "down projection of decode in 2 GEMVs" in text
    half = fields["intermediate_size"] // 2
    assert Request("gemv", (fields["hidden_size"], half)) in from_config(fields)


def test_the_prediction_counts_the_slices() -> None:
    whole, cut = (
        timing.predict(timing.ModelSizes(28, 3584, 28, 4, 128, hidden, 152064, qkv_bias=True))
        for hidden in (9472, 18944)
    )
    one, two = (
        next(p.per_call_ms for p in found.breakdown if p.kind == "elf" and p.name == "down_gemv")
        for found in (whole, cut)
    )
    assert 1.8 < two / one < 2.3


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Block]:
    """The ELF of a down projection in two slices, with registry rows of its own."""
    config = ModelConfig.from_hf_dict(TINY)
    root = tmp_path_factory.mktemp("registry")
    with recording() as needs:
        blocks.ffn_gemv(config)
    for need in needs:
        sweep(Request(need.op, need.shape), TwinMeasurer(), root, only_missing=True, with_numerics=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENV, str(root))
        (found,) = (b for b in blocks.ffn_gemv(config) if b.name == "down_gemv_add")
        yield found


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    shapes = {"swiglu": (HIDDEN,), "w_down": (ROWS, HIDDEN), "res1": (ROWS,)}
    return {name: rng.standard_normal(shape).astype(bfloat16) for name, shape in shapes.items()}


def run(block: Block, values: dict[str, Any], folder: Path, *, merged: bool) -> Any:
    cache = KernelCache(folder, driver=driver.select("twin"))
    runner = BlockRunner(cache, merged=merged)
    runner.add(block.name, block)
    static = {
        name: np.ascontiguousarray(values[whole][:, columns])
        for name, (whole, columns) in column_slices(ModelConfig.from_hf_dict(TINY)).items()
    }
    runner.preload(block.name, 0, static, {})
    try:
        return runner(block.name, 0, swiglu=values["swiglu"], res1=values["res1"])["out"]
    finally:
        cache.close()


def tensor(array: Any) -> Any:
    return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)


def expected(values: dict[str, Any], how: LinearArithmetic) -> Any:
    from llms.verify.reference.arithmetic import elementwise

    down = products.gemv(tensor(values["swiglu"])[None], tensor(values["w_down"]), how)[0]
    return elementwise.add(down, tensor(values["res1"]), "floor").view(torch.int16).numpy()


def test_merged_and_unmerged_are_what_the_matched_reference_expects(
    block: Block, values: dict[str, Any], tmp_path: Path
) -> None:
    how = describe_arithmetic(sequence_of(block), ModelConfig.from_hf_dict(TINY), 256).decode
    assert how.linears["down_proj"] == LinearArithmetic("gemv", slices=(HIDDEN // 2, HIDDEN // 2))
    assert how.roundings["mlp_add"] == "floor"
    merged = run(block, values, tmp_path / "merged", merged=True)
    unmerged = run(block, values, tmp_path / "unmerged", merged=False)
    np.testing.assert_array_equal(merged.view(np.int16), unmerged.view(np.int16))
    agree = merged.view(np.int16) == expected(values, how.linears["down_proj"])
    # f32 sums in another order may cross a rounding boundary
    assert agree.mean() > 0.95
    whole = merged.view(np.int16) == expected(values, LinearArithmetic("gemv"))
    assert whole.mean() < 0.9, "the sum of slices is not told from one sum"


def sequence_of(block: Block) -> Any:
    """The whole decode of the model; its other shapes need no rows to be described."""
    with recording():
        found = generic_sequence()
        prefill = found.prefill_blocks(ModelConfig.from_hf_dict(TINY), 256)
        decode = found.decode_blocks(ModelConfig.from_hf_dict(TINY))
        head = found.lm_head(ModelConfig.from_hf_dict(TINY))
    assert [b.name for b in decode][-1] == block.name
    return replace(
        found, prefill_blocks=lambda *_: prefill, decode_blocks=lambda _: decode, lm_head=lambda _: head
    )


@pytest.mark.parametrize("fault", ["slices swapped", "second slice lost", "columns of the first twice"])
def test_a_slice_in_the_wrong_place_is_seen(
    fault: str, block: Block, values: dict[str, Any], tmp_path: Path
) -> None:
    steps = list(block.steps)
    one, two, total = (next(i for i, s in enumerate(steps) if s.names["out"] == o) for o in SLICED)
    if fault == "slices swapped":
        first, second = steps[one].operands["x"], steps[two].operands["x"]
        steps[one] = replace(steps[one], operands={**steps[one].operands, "x": second})
        steps[two] = replace(steps[two], operands={**steps[two].operands, "x": first})
    elif fault == "second slice lost":
        steps[total] = replace(steps[total], operands={**steps[total].operands, "b": "down0"})
    else:
        steps[two] = replace(steps[two], operands={**steps[two].operands, "x": steps[one].operands["x"]})
    got = run(replace(block, steps=tuple(steps)), values, tmp_path, merged=True)
    wanted = expected(values, LinearArithmetic("gemv", slices=(HIDDEN // 2, HIDDEN // 2)))
    assert (got.view(np.int16) == wanted).mean() < 0.2


def test_slices_that_contradict_the_product_are_refused() -> None:
    with pytest.raises(DescriptionError, match="only gemv has slices"):
        LinearArithmetic("drain", slices=(64, 64))
    x = torch.zeros(1, 192, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="leave out columns of K = 192"):
        products.gemv(
            x, torch.zeros(64, 192, dtype=torch.bfloat16), LinearArithmetic("gemv", slices=(64, 64))
        )
