"""Faults of kernels, driver and device, planted below the seam of the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from npu_twin import injection
from npu_twin.faults._types import Fault, Kind, Plant
from npu_twin.listing import Launch, Listing
from npu_twin.memory import OperandView
from npu_twin.ops import OPS

Array = np.ndarray[Any, Any]
Test = Callable[[Launch], bool]

_REGISTRY = "Xilinx/mlir-air e972f2942, programming_examples/kernel_registry/details/"
_SKILLS = "Xilinx/mlir-air e972f2942, .claude/skills/"
_GEMM = _REGISTRY + "GEMM_bf16_in_bf16_out.md"
_ATTENTION = "Xilinx/mlir-air e972f2942, programming_examples/flash_attention"
_XRT = "XRT 2.25.0, run::wait and ert_cmd_state"


def launches(change: Callable[[Launch], Launch]) -> Plant:
    """Change launches of every program that is loaded inside."""

    def rewrite(listing: Listing) -> Listing:
        return replace(listing, launches=tuple(change(launch) for launch in listing.launches))

    return injection.rewrite_listing(rewrite)


def where(test: Test, change: Callable[[Launch], Launch]) -> Plant:
    """Change the launches that pass a test."""
    return launches(lambda launch: change(launch) if test(launch) else launch)


def is_op(op: str, **dims: int) -> Test:
    """Test for an operation, and for dimensions."""
    return lambda launch: launch.op == op and all(launch.dims[name] == value for name, value in dims.items())


def with_attrs(**attrs: Any) -> Callable[[Launch], Launch]:
    """Set attributes of a launch."""
    return lambda launch: replace(launch, attrs={**launch.attrs, **attrs})


def after(test: Test, corrupt: Callable[[Launch, Mapping[str, OperandView]], None]) -> Plant:
    """Let ``corrupt`` overwrite the outputs of the launches that pass a test."""

    def change(launch: Launch, views: Mapping[str, OperandView]) -> None:
        if test(launch):
            corrupt(launch, views)

    return injection.corrupt_launch(change)


def _out(views: Mapping[str, OperandView]) -> Array:
    return views["out"].array


# -- wrong numbers of a kernel -----------------------------------------------------------------------------


def _permuted_depth(launch: Launch, views: Mapping[str, OperandView]) -> None:
    """The product with the blocks of A along K one further than those of B."""
    a = (views["a"].u16.astype(np.uint32) << 16).view(np.float32)
    b = (views["b"].u16.astype(np.uint32) << 16).view(np.float32)
    product = np.roll(a, launch.tile.get("tile_k_l1", 32), axis=1) @ b
    _store(views["out"], product)


def _store(view: OperandView, values: Array) -> None:
    if view.array.dtype == np.float32:
        view.f32[...] = values.reshape(view.shape)
    else:
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16
        view.u16[...] = bits.astype(np.uint16).reshape(view.shape)


def _zero_tail(launch: Launch, views: Mapping[str, OperandView]) -> None:
    out = _out(views).reshape(-1)
    out[min(2 * launch.tile.get("tile", 16), out.size // 2) :] = 0


@contextlib.contextmanager
def _stale_rows() -> Iterator[None]:
    """From its second run on, a GEMM leaves every second row as it was after the first."""
    kept: dict[tuple[str, tuple[int, ...]], Array] = {}

    def corrupt(launch: Launch, views: Mapping[str, OperandView]) -> None:
        rows = _out(views)[1::2]
        key = (launch.name, rows.shape)
        if key in kept:
            rows[...] = kept[key]
        else:
            kept[key] = rows.copy()

    with after(is_op("gemm"), corrupt):
        yield


def _no_cast(launch: Launch, views: Mapping[str, OperandView]) -> None:
    _out(views)[...] = 0


def _other_columns(launch: Launch, views: Mapping[str, OperandView]) -> None:
    """Columns as an object of half the tile width leaves them: the halves of every tile change places."""
    out, width = _out(views), launch.tile["tile_n"]
    tiles = out.reshape(out.shape[0], -1, 2, width // 2)
    out[...] = tiles[:, :, ::-1].reshape(out.shape).copy()


def _other_rows(launch: Launch, views: Mapping[str, OperandView]) -> None:
    out, rows = _out(views), launch.tile["tile_m"]
    if rows >= 2:
        out[...] = out.reshape(-1, 2, rows // 2)[:, ::-1].reshape(out.shape).copy()


def _several_rows(launch: Launch, views: Mapping[str, OperandView]) -> None:
    """Four rows in one transfer: three of four stay zero."""
    out = _out(views).reshape(-1, launch.dims["head_dim"])
    for first in (1, 2, 3):
        out[first::4] = 0


def _scaled(launch: Launch, views: Mapping[str, OperandView]) -> None:
    view = views["out"]
    if view.array.dtype != np.float32:
        _store(view, (view.u16.astype(np.uint32) << 16).view(np.float32) * np.float32(1.07))


def _unnormalised(launch: Launch, views: Mapping[str, OperandView]) -> None:
    """Without its soft-max the attention returns a constant."""
    _store(views["out"], np.full(views["out"].shape, 32.0, np.float32))


def _mask_late(launch: Launch, views: Mapping[str, OperandView]) -> None:
    """At block edges the mask is one late: a block's first row shows what the row after it attends to."""
    out, block = _out(views), launch.tile["lkp"]
    rows = out if launch.method == "seq_first" else out.swapaxes(0, 1)
    rows[0 : len(rows) - 1 : block] = rows[1 : len(rows) : block].copy()


def _tiled_heads(launch: Launch, views: Mapping[str, OperandView]) -> None:
    """Query heads that meet the wrong KV heads: their results stand at the place of another group's."""
    out, heads = _out(views), launch.dims["q_heads"]
    per_group = heads // launch.dims["kv_heads"]
    order = [g * per_group + i for i in range(per_group) for g in range(launch.dims["kv_heads"])]
    if launch.method == "seq_first":
        out[...] = out.reshape(out.shape[0], heads, -1)[:, order].reshape(out.shape).copy()
    else:
        chunks = out.reshape(heads, -1, *out.shape[1:])
        out[...] = chunks[order].reshape(out.shape).copy()


@contextlib.contextmanager
def _sporadic_nan(seed: int = 3) -> Iterator[None]:
    """Once in eight launches attention leaves a NaN in the row of a real token (seeded)."""
    generator = np.random.default_rng(seed)

    def corrupt(launch: Launch, views: Mapping[str, OperandView]) -> None:
        if generator.random() < 1 / 8:
            row = _out(views)[0] if launch.method == "seq_first" else _out(views)[:, 0]
            row[..., 0] = 0x7FC0

    with after(is_op("flash_attention"), corrupt):
        yield


def _hits(launch: Launch) -> bool:
    return launch.name == "ffn_add"


@contextlib.contextmanager
def rare_tile(rate: float = 5e-4, seed: int | None = None, width: int = 64) -> Iterator[list[int]]:
    """A tile of a layer's output reads zero, ``rate`` times per layer call; yields the calls that it hit.

    The default seed strikes in the decode steps of the first prompt whatever the number of layers: few layers
    make few layer calls.
    """
    generator = np.random.default_rng(_striking_seed(rate) if seed is None else seed)
    events: list[int] = []
    calls = 0

    def corrupt(launch: Launch, views: Mapping[str, OperandView]) -> None:
        nonlocal calls
        calls += 1
        if generator.random() >= rate:
            return
        out = _out(views).reshape(-1)
        start = int(generator.integers(max(1, out.size // width))) * width
        out[start : start + width] = 0
        events.append(calls)

    with after(_hits, corrupt):
        yield events


def _striking_seed(rate: float) -> int:
    """First seed whose first event is among layer calls 31 to 60."""
    for seed in range(10_000):
        draws = np.random.default_rng(seed).random(60)
        if (draws[30:] < rate).any() and not (draws[:30] < rate).any():
            return seed
    raise ValueError(f"no seed strikes at a rate of {rate}")


def _older_target(listing: Listing) -> Listing:
    return replace(listing, target="npu1")


def _sequence_first(launch: Launch) -> Launch:
    """The other layout over the same bytes."""
    signature = OPS[launch.op].signature(launch.dims, "seq_first", launch.tile)
    operands = {key: replace(one, shape=signature[key].shape) for key, one in launch.operands.items()}
    return replace(launch, method="seq_first", operands=operands)


def _narrow(launch: Launch) -> Launch:
    """Half the rows per core: legal for the builder, too small for the kernel at this head size."""
    tile = {**launch.tile, "lqp": launch.tile["lqp"] // 2}
    return replace(launch, tile=tile)


def _without(*names: str) -> Plant:
    def rewrite(listing: Listing) -> Listing:
        kept = tuple(launch for launch in listing.launches if launch.name not in names)
        return replace(listing, launches=kept) if kept else listing

    return injection.rewrite_listing(rewrite)


def _silent(
    entry: str,
    name: str,
    what: str,
    origin: str,
    plant: Callable[[], Plant],
    *ops: str,
    expected: str = "phase1",
    kind: Kind = "silent",
    **more: Any,
) -> Fault:
    return Fault(name, kind, what, origin, expected, plant, entry, ops=ops, **more)


def _refused(
    entry: str, name: str, kind: Kind, what: str, origin: str, plant: Callable[[], Plant], **more: Any
) -> Fault:
    return Fault(name, kind, what, origin, "runtime", plant, entry, raises="KernelRunError", **more)


def _stitched(launch: Launch) -> bool:
    """A leaf program names its launch after the kernel, a stitched one after its place in the layer."""
    return launch.op == "gemm" and launch.name in ("q_gemm", "o_gemm", "down_gemm")


def _swap_rows(launch: Launch, views: Mapping[str, OperandView]) -> None:
    out = _out(views)
    out[0:2] = out[1::-1].copy()


def _grouped(model: Any) -> bool:
    config = model.config()
    return bool(1 < config.n_kv_heads < config.n_heads)


def _grouped_on_device(model: Any) -> bool:
    return _grouped(model) and _device_attention(model)


def _wide_heads(model: Any) -> bool:
    return bool(model.config().head_dim >= 128)


def _device_attention(model: Any) -> bool:
    """A head size with an attention kernel; the host attends for others."""
    return bool(model.config().head_dim in (64, 128))


def _bf16_gemm(method: str) -> Test:
    return lambda launch: launch.op == "gemm" and launch.method == method


FAULTS: tuple[Fault, ...] = (
    _silent(
        "A2", "gemm_k_tiling", "blocks along K of A and B out of step", _GEMM,
        lambda: after(is_op("gemm"), _permuted_depth), "gemm",
    ),
    _silent(
        "A3", "add_zero_tail", "element-wise add leaves zeros after its first two tiles",
        _REGISTRY + "EltwiseAdd_bf16.md", lambda: after(is_op("eltwise_add"), _zero_tail), "eltwise_add",
    ),
    _silent(
        "A4", "gemm_stale_rows", "half of the rows of a GEMM stale from its second run on", _GEMM,
        _stale_rows, "gemm", expected="phase2", prompts=2,
    ),
    _silent(
        "A5", "cast_launch_dropped", "the cast of a GEMM never runs, as in an xclbin instead of an ELF",
        _GEMM,
        lambda: after(is_op("gemm"), _no_cast), "gemm", kind="zeros",
    ),
    _silent(
        "A6", "gemm_object_tile", "GEMM object compiled for another tile_n", _GEMM,
        lambda: after(is_op("gemm"), _other_columns), "gemm",
    ),
    _silent(
        "A7", "gemv_object_tile", "GEMV object compiled for another tile_m", _REGISTRY + "GEMV_bf16.md",
        lambda: after(is_op("gemv"), _other_rows), "gemv",
    ),
    _silent(
        "A8", "down_low_precision", "down projection of the prompt in the low-precision tier", _GEMM,
        lambda: where(lambda launch: launch.name == "down_gemm", lambda x: replace(x, method="direct")),
        expected="phase3",
    ),
    _silent(
        "A8", "gemm_low_precision", "every bf16 GEMM in the low-precision tier", _GEMM,
        lambda: where(_bf16_gemm("drain"), lambda launch: replace(launch, method="direct")), "gemm",
    ),
    _silent(
        "A11", "rope_rows_per_dma", "RoPE with four rows per transfer", _REGISTRY + "RoPE_bf16.md",
        lambda: after(is_op("rope"), _several_rows), "rope", kind="zeros",
    ),
    _silent(
        "A12", "rope_interleaved", "RoPE turns neighbours instead of halves", _REGISTRY + "RoPE_bf16.md",
        lambda: where(is_op("rope"), lambda launch: replace(launch, method="interleaved")), "rope",
    ),
    _refused(
        "A21", "herd_fails", "runtime", "a herd that builds and ends in an error state", _GEMM,
        lambda: injection.force_state("ERROR", skip=3), says="ERROR",
    ),
    _refused(
        "A22", "lm_head_hangs", "hang", "the LM head never completes", _REGISTRY + "GEMV_bf16.md",
        lambda: injection.never_complete(kernel="lm_head_gemv"),
    ),
    _silent(
        "A26", "gemm_scaled", "every bf16 GEMM result 7 % too large: cosine 1", _GEMM,
        lambda: after(is_op("gemm"), _scaled), "gemm",
    ),
    _silent(
        "A28", "older_target", "objects built for the older array: all zeros",
        "Xilinx/mlir-aie, device npu1 and npu2", lambda: injection.rewrite_listing(_older_target),
        "gemm", "gemv", "rms_norm", kind="zeros",
    ),
    _silent(
        "A30", "decode_norm_bf16_sum", "one-row norm with a bf16 sum of squares, several percent too large",
        "Xilinx/mlir-air e972f2942, one-row norm of the decode ELF of the LLM examples",
        lambda: where(is_op("rms_norm", M=1), lambda launch: replace(launch, method="weighted_bf16_sum")),
        "rms_norm",
    ),
    _refused(
        "B1", "attention_layout", "hang", "sequence-first attention above head_dim 64", _ATTENTION,
        lambda: where(is_op("flash_attention"), _sequence_first),
        applies=_wide_heads, where="head_dim of 128 and more",
    ),
    _silent(
        "B2", "attention_object", "attention object of other sizes: constants, no soft-max", _ATTENTION,
        lambda: after(is_op("flash_attention"), _unnormalised), "flash_attention",
        applies=_device_attention, where="heads of 64 or 128, which attend on the device",
    ),
    _refused(
        "B3", "attention_loop_omitted", "hang", "attention built without its infinite loop", _ATTENTION,
        lambda: where(is_op("flash_attention"), with_attrs(omit_infinite_loop=True)),
        applies=_device_attention, where="heads of 64 or 128, which attend on the device",
    ),
    _refused(
        "B4", "attention_rows", "hang", "attention with 32 instead of 64 rows per core", _ATTENTION,
        lambda: where(is_op("flash_attention"), _narrow),
        applies=_device_attention, where="heads of 64 or 128, which attend on the device",
    ),
    _silent(
        "B5", "mask_off_by_one", "causal mask one late at block edges", _ATTENTION,
        lambda: after(is_op("flash_attention"), _mask_late), "flash_attention",
        applies=_device_attention, where="heads of 64 or 128, which attend on the device",
    ),
    _silent(
        "B6", "attention_heads_tiled", "attention meets KV head h mod kv_heads", _ATTENTION,
        lambda: after(is_op("flash_attention"), _tiled_heads), "flash_attention",
        applies=_grouped_on_device,
        where="more than one KV head, fewer than query heads, heads of 64 or 128, which attend on the device",
    ),
    _silent(
        "B7", "no_causal_mask", "prefill attention without its mask", _ATTENTION,
        lambda: where(is_op("flash_attention"), with_attrs(causal=False)), "flash_attention",
        applies=_device_attention, where="heads of 64 or 128, which attend on the device",
    ),
    _silent(
        "B8", "attention_sporadic_nan", "a NaN in one of eight attention launches, seeded",
        _ATTENTION, _sporadic_nan, expected="phase3", kind="nan",
        applies=_device_attention, where="heads of 64 or 128, which attend on the device",
    ),
    _silent(
        "C8", "write_not_synced", "what the host writes does not reach the device", "XRT 2.25.0, bo::sync",
        lambda: injection.drop_sync("to_device", times=None), expected="phase3",
    ),
    _silent(
        "C8", "read_not_synced", "the host reads what it had", "XRT 2.25.0, bo::sync",
        lambda: injection.drop_sync("from_device", times=None, skip=12), expected="phase3",
    ),
    _refused(
        "C17", "never_completes", "hang", "a run without an end", _XRT,
        lambda: injection.never_complete(skip=20),
    ),
    _refused(
        "C16", "run_times_out", "runtime", "a run ends in the time-out state", _XRT,
        lambda: injection.force_state("TIMEOUT", skip=20, times=1), says="TIMEOUT",
    ),
    _silent(
        "D1", "launch_dropped", "a herd outside of launch and segment is dropped: the last add of a layer",
        _SKILLS + "merge-multi-launch-kernels/SKILL.md", lambda: _without("ffn_add"), expected="phase2",
    ),
    _silent(
        "D12", "stitched_rows", "rows of a GEMM permuted when it is not alone in its ELF", _GEMM,
        lambda: after(_stitched, _swap_rows), expected="phase2",
    ),
    Fault(
        "rare_bad_tile", "silent", "a tile of a layer's output zero, 5e-4 per layer call (seeded)",
        "marginal cell or voltage droop; hyperscaler reports on silent data corruption", "phase3", rare_tile,
    ),
)  # fmt: skip
