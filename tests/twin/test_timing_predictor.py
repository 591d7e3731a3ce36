"""The model-level predictor: which programs, how often, and how the times depend on the configuration."""

from __future__ import annotations

import dataclasses
import json
import time
from types import SimpleNamespace

import pytest

from npu_twin import timing
from npu_twin.timing import model_programs, models, parameters, predictor, rows, tiling
from npu_twin.timing.model_config import ModelSizes

LLAMA_3B = ModelSizes(28, 3072, 24, 8, 128, 8192, 128256)
SMOLLM2_135M = ModelSizes(30, 576, 9, 3, 64, 1536, 49152)
PUBLISHED = json.loads(models.PUBLISHED_MODELS.read_text(encoding="utf-8"))["models"]


def name_of(elf):
    """Program name without the number of launches in brackets."""
    return elf.split("(")[0]


def same_program(published, ours):
    """The o_ffn of the Qwen3 example carries the model in its name; it is the same program."""
    return published == ours or published == f"{ours}_qwen"


@pytest.mark.parametrize("record", PUBLISHED, ids=lambda r: r["id"])
def test_programs_of_the_published_models(record):
    sizes = models.sizes_of(record)
    ours = [p.name for p in model_programs.prefill_programs(sizes, record["seq_len"])]
    published = [name_of(e) for e in record["prefill_elfs"]]
    assert len(ours) == len(published)
    assert all(same_program(p, o) for p, o in zip(published, ours, strict=True))
    decode = [p.name for p in model_programs.decode_programs(sizes)]
    assert decode == [name_of(e) for e in record["decode_elfs"] if "cpu" not in e]
    if "lm_head_partitions" in record:
        expected = (record["lm_head_partitions"], record["lm_head_partition_rows"])
        assert model_programs.vocabulary_partitions(record["vocab_size"]) == expected


@pytest.mark.parametrize("record", PUBLISHED, ids=lambda r: r["id"])
def test_launch_counts_of_the_published_programs(record):
    for elf, program in zip(
        record["prefill_elfs"], model_programs.prefill_programs(models.sizes_of(record), 2048), strict=True
    ):
        if "(" in elf:
            assert len(program.launches) == int(elf.split("(")[1].rstrip(")"))


def test_a_3b_model_is_predicted_in_no_time_and_without_weights():
    start = time.perf_counter()
    found = timing.predict(LLAMA_3B, seq_len=2048)
    assert time.perf_counter() - start < 5.0
    assert 1.0 < found.ttft_s < 10.0
    assert 100.0 < found.decode_ms_per_token < 500.0
    assert found.merged_ffn
    assert not found.fused_decode


def test_the_breakdown_adds_up():
    found = timing.predict(LLAMA_3B)
    prefill = sum(p.total_ms for p in found.breakdown if p.section == "prefill")
    decode = sum(p.total_ms for p in found.breakdown if p.section == "decode")
    assert prefill == pytest.approx(found.ttft_s * 1e3)
    assert decode == pytest.approx(found.decode_ms_per_token)
    assert found.prefill_device_s < found.ttft_s
    assert {p.kind for p in found.breakdown} == {"elf", "bo_write", "bo_read", "host"}


def test_the_expected_error_is_stated():
    error = timing.predict(SMOLLM2_135M).expected_error
    assert 0.01 < error["ttft_s"] < 0.12
    assert 0.01 < error["decode_ms_per_token"] < 0.12


def test_a_listing_and_the_predictor_agree_on_a_program():
    sizes = LLAMA_3B
    programs = [*model_programs.prefill_programs(sizes, 2048), *model_programs.decode_programs(sizes)]
    for program in [*programs, model_programs.head_program(sizes)]:
        listing = SimpleNamespace(launches=program.launches)
        expected = predictor.program_us(parameters.current(), program)
        assert timing.run_us(listing).total_us == pytest.approx(expected)


def test_hosts_transpose_only_wide_heads():
    def names(config):
        return {p.name for p in timing.predict(config).breakdown}

    assert "head_first_transposes" in names(LLAMA_3B)
    assert "head_first_transposes" not in names(SMOLLM2_135M)


@pytest.mark.parametrize("seq_len", [1, 77, 128, 256, 1000, 2048, 4096])
def test_any_prefill_length(seq_len):
    found = timing.predict(SMOLLM2_135M, seq_len=seq_len)
    shorter = timing.predict(SMOLLM2_135M, seq_len=128)
    assert found.ttft_s >= shorter.ttft_s
    assert found.decode_ms_per_token == shorter.decode_ms_per_token


@pytest.mark.parametrize(
    "change",
    [
        {"emb": 960},
        {"hidden": 2688},
        {"q_heads": 15, "kv_heads": 5},
    ],
)
def test_odd_widths_are_predicted_too(change):
    config = dataclasses.replace(SMOLLM2_135M, head_dim=64, **change)
    assert 0.1 < timing.predict(config).ttft_s < 10.0


def test_split_and_merged_forms():
    sizes = ModelSizes(16, 2048, 32, 8, 64, 8192, 128256)
    assert model_programs.fused_decode(sizes)
    assert not model_programs.fused_decode(ModelSizes(16, 2560, 32, 8, 64, 8192, 128256))
    assert not model_programs.fused_decode(ModelSizes(16, 2048, 32, 8, 64, 8960, 128256))
    assert not model_programs.merged_ffn(ModelSizes(16, 2048, 32, 8, 64, 9728, 128256))


@pytest.mark.parametrize("head_dim", [32, 80, 96, 256])
def test_heads_without_a_kernel_are_attended_on_the_host(head_dim):
    p = parameters.current()
    found = timing.predict(dataclasses.replace(LLAMA_3B, head_dim=head_dim))
    names = [part.name for part in found.breakdown if part.section == predictor.PREFILL]
    assert not any("flash_attn" in name or "transposes" in name for name in names)
    (part,) = [part for part in found.breakdown if part.name == "prefill_attention_cpu"]
    flops = 4 * 24 * head_dim * 2048 * 2048  # scores and values, two operations each, no half saved
    moved = 4 * 2048 * (24 + 8) * head_dim  # bf16 in and f32-sized traffic as the host operation declares it
    expected = 5.0 + moved / p["host.copy_gbps"] * 1e-3 + flops / p["host.flops_per_us"]
    assert part.per_call_ms == pytest.approx(expected * 1e-3)
    assert part.calls == 28
    assert found.ttft_s == pytest.approx(
        sum(x.total_ms for x in found.breakdown if x.section == predictor.PREFILL) * 1e-3
    )


@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads_with_a_kernel_are_attended_on_the_device(head_dim):
    found = timing.predict(dataclasses.replace(LLAMA_3B, head_dim=head_dim))
    assert not any(part.name == "prefill_attention_cpu" for part in found.breakdown)
    assert sum(part.calls for part in found.breakdown if part.name == "flash_attn") == 3 * 28
    assert not any("attention" in note for note in found.notes)


def test_padding_to_a_kernel_that_is_not_used_leaves_attention_on_the_host():
    sizes = dataclasses.replace(LLAMA_3B, head_dim=64)
    padded = dataclasses.replace(sizes, unpadded_attention=(24 * 32, 8 * 32))
    (part,) = [x for x in timing.predict(padded).breakdown if x.name == "prefill_attention_cpu"]
    (own,) = [
        x
        for x in timing.predict(dataclasses.replace(LLAMA_3B, head_dim=32)).breakdown
        if x.name == "prefill_attention_cpu"
    ]
    assert part == own


@pytest.mark.parametrize("seq_len", [0, -1, 1.5, True, "2048", None, 10**9])
def test_an_impossible_length_is_refused(seq_len):
    with pytest.raises(ValueError, match="seq_len must be a whole number"):
        timing.predict(LLAMA_3B, seq_len=seq_len)


@pytest.mark.parametrize(
    ("change", "seq_len", "says"),
    [
        ({"head_dim": 80}, 2048, "attention on the host"),
        ({"head_dim": 256}, 2048, "attention on the host"),
        ({"hidden": 8200}, 2048, "padded by a deployment"),
        ({"n_layers": 80}, 2048, "billion weights"),
        ({}, 4096, "prefill of 4096 tokens"),
    ],
)
def test_what_no_measurement_covers_is_noted(change, seq_len, says):
    assert any(
        says in note
        for note in timing.predict(dataclasses.replace(LLAMA_3B, **change), seq_len=seq_len).notes
    )


@pytest.mark.parametrize(
    ("emb", "hidden", "layers", "heads", "kv", "head_dim", "vocab"),
    [
        (4096, 14336, 32, 32, 8, 128, 32768),
        (4096, 14336, 32, 32, 8, 128, 128256),
        (3584, 18944, 28, 28, 4, 128, 152064),
        (2048, 8192, 24, 32, 32, 64, 49152),
        (2560, 6912, 32, 32, 32, 80, 50304),
        (3072, 8192, 32, 32, 32, 96, 32064),
        (2048, 16384, 18, 8, 1, 256, 256000),
    ],
)
def test_other_models_lie_within_what_the_hardware_can_do(emb, hidden, layers, heads, kv, head_dim, vocab):
    """Decode reads every weight once, at 25 to 50 GB/s; a prefill computes at 2 to 6 TFLOPS on the device."""
    sizes = ModelSizes(layers, emb, heads, kv, head_dim, hidden, vocab)
    found = timing.predict(sizes)
    rate = 2e-6 * sizes.parameters / found.decode_ms_per_token
    assert 25.0 < rate < 50.0
    layer_flops = 2 * 2048 * (sizes.parameters - vocab * emb)
    host = sum(part.total_ms for part in found.breakdown if part.name == "prefill_attention_cpu") * 1e-3
    assert (host > 0) == (head_dim not in (64, 128))
    assert 2.0 < layer_flops / (found.ttft_s - host) / 1e12 < 6.0


def test_the_rules_choose_the_published_tiles():
    """34 shapes of 2048 rows with the tile that the published registry selects; four differ in one value."""
    published = {}
    for record in rows.read_records(rows.PUBLISHED_KERNELS):
        shape = tuple(record.get(key) for key in ("M", "K", "N"))
        if (record["kernel"], record["section"], record["status"]) != ("gemm", "tested_shapes", "pass"):
            continue
        if shape[0] != 2048 or record["dtype_out"] != "bf16" or not record.get("best_for_tier"):
            continue
        if shape not in published or record["precision_tier"] == "high":
            published[shape] = record
    keys = ("tile_m", "tile_k_l2", "tile_n")
    same = [
        (call.method, *(call.tile[key] for key in keys), *call.herd)
        == (r["method"], *(r[key] for key in keys), r["herd_x"], r["herd_y"])
        for shape, r in published.items()
        for call in [tiling.gemm(*shape)]
    ]
    assert (len(same), sum(same)) == (34, 30)


@pytest.mark.parametrize(
    ("sizes", "ttft_s"),
    [
        (ModelSizes(36, 4096, 32, 8, 128, 12288, 151936, qk_norm=True), 7.72),
        (ModelSizes(28, 3584, 28, 4, 128, 18944, 152064, qkv_bias=True), 9.59),
        (ModelSizes(32, 4096, 32, 8, 128, 14336, 128256), 6.22),
    ],
    ids=["qwen3_8b", "qwen25_7b", "llama31_8b"],
)
def test_prefill_of_models_that_no_fit_has_seen(sizes, ttft_s):
    """Published with 4-bit weights (Xilinx/mlir-air e972f2942), which a prefill unpacks to bf16."""
    assert timing.predict(sizes).ttft_s == pytest.approx(ttft_s, rel=0.12)
