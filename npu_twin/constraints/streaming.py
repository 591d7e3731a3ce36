"""Rules of the kernels that stream: adds, SiLU-and-Mul, GELU, norms and RoPE.

Their limit is the number of shim channels: a core with two input streams blocks two of the array's sixteen
host-to-array channels, so eight such cores fill it.
"""

from __future__ import annotations

from typing import Any

from npu_twin.constraints import _tables as tables
from npu_twin.constraints._types import Findings, Found, LaunchLike
from npu_twin.constraints.rules import L1_BYTES, SHIM_STREAMS

ADD_TILE_MAX = 4096
SILU_TILE_MAX = 5120
GELU_TILE = (512, 6144)
NORM_HERDS = (1, 2, 4, 8)


def _cores(launch: LaunchLike) -> int:
    return launch.herd[0] * launch.herd[1]


def _channels(launch: LaunchLike, rule_id: str, inputs: int) -> Findings:
    limit = SHIM_STREAMS // inputs
    if _cores(launch) > limit:
        yield Found(
            rule_id,
            f"{inputs} input stream(s) per core exhaust the shim channels above {limit} cores",
            {"herd": f"{launch.herd[0]}x{launch.herd[1]}", "cores": _cores(launch)},
        )


def _tiles(launch: LaunchLike, rule_id: str, key: str, least: int, most: int) -> Findings:
    n, tile, cores = launch.dims["n"], launch.tile[key], _cores(launch)
    if n % (tile * cores):
        yield Found(
            rule_id,
            f"n must be a multiple of {key}*cores = {tile * cores}",
            {"n": n, key: tile, "cores": cores},
            "build",
        )
    if tile % 16:
        yield Found(rule_id, f"{key} must be a multiple of the 16 lanes", {key: tile}, "build")
    if not least <= tile <= most:
        yield Found(rule_id, f"{key} must be {least} to {most}", {key: tile})


def check_eltwise_add(launch: LaunchLike, switches: frozenset[str]) -> Findings:
    """Yield every broken rule of one element-wise add."""
    yield from _channels(launch, "S1", 2)
    yield from _tiles(launch, "E1", "tile", 16, ADD_TILE_MAX)
    n, tile = launch.dims["n"], launch.tile["tile"]
    if (n, tile, _cores(launch)) in tables.ADD_ZERO_TAIL:
        yield Found("E2", "everything after the first two tiles stays zero", {"n": n, "tile": tile})


def check_bias_add(launch: LaunchLike, switches: frozenset[str]) -> Findings:
    """Yield every broken rule of one bias add, which streams whole rows like a norm."""
    rows, n, cores = launch.dims["rows"], launch.dims["n"], _cores(launch)
    yield from _channels(launch, "S7", 2)
    if n % 16 or rows % cores:
        yield Found(
            "E1",
            "n must be a multiple of the 16 lanes, rows one of the cores",
            {"rows": rows, "n": n, "cores": cores},
            "build",
        )
    need = 10 * n  # two copies of input and output rows, one of the bias, 2 bytes each
    if need > L1_BYTES:
        yield Found("E1", f"the rows of one core need {need} bytes, L1 has {L1_BYTES}", {"n": n})


def check_silu_mul(launch: LaunchLike, switches: frozenset[str]) -> Findings:
    """Yield every broken rule of one SiLU-and-Mul."""
    yield from _channels(launch, "S1", 2)
    yield from _tiles(launch, "E3", "tile_n", 16, SILU_TILE_MAX)
    n, tile, cores = launch.dims["n"], launch.tile["tile_n"], _cores(launch)
    iterations = n // (tile * cores)
    if n % (tile * cores) == 0 and iterations in tables.SILU_DESCRIPTOR_ITERATIONS:
        values: dict[str, Any] = {"n": n, "tile_n": tile, "cores": cores, "iterations": iterations}
        wide = n % 18944 == 0 and iterations == 1024
        if wide:
            yield Found("B16", "1024 iterations exceed the shim descriptors; split the rows in two", values)
        else:
            yield Found("B10", f"{iterations} inner iterations exhaust the descriptor ids", values)


def check_gelu(launch: LaunchLike, switches: frozenset[str]) -> Findings:
    """Yield every broken rule of one GELU."""
    yield from _channels(launch, "S3", 1)
    yield from _tiles(launch, "E4", "tile_n", *GELU_TILE)


def _norm(launch: LaunchLike, herd_rule: str) -> Findings:
    M, N = launch.dims["M"], launch.dims["N"]
    hx, hy = launch.herd
    if hx not in NORM_HERDS or hy != 1:
        yield Found(herd_rule, "the herd of a norm is 1x1, 2x1, 4x1 or 8x1", {"herd": f"{hx}x{hy}"})
    if N % 16 or M % hx:
        yield Found(
            "E5",
            "N must be a multiple of the 16 lanes, M one of herd_x",
            {"M": M, "N": N, "herd_x": hx},
        )


def check_rms_norm(launch: LaunchLike, switches: frozenset[str]) -> Findings:
    """Yield every broken rule of one RMSNorm."""
    yield from _norm(launch, "S4")


def check_layer_norm(launch: LaunchLike, switches: frozenset[str]) -> Findings:
    """Yield every broken rule of one LayerNorm; weight and bias must lie side by side in one argument."""
    yield from _norm(launch, "S5")
    operands = getattr(launch, "operands", None) or {}
    if "w" in operands and "b" in operands:
        w, b, N = operands["w"], operands["b"], launch.dims["N"]
        if w.arg != b.arg or abs(w.offset - b.offset) != N:
            yield Found(
                "S5",
                "a fourth stream does not route: pack weight and bias into one argument, one after the other",
                {"w": f"{w.arg}+{w.offset}", "b": f"{b.arg}+{b.offset}"},
            )


def check_rope(launch: LaunchLike, switches: frozenset[str]) -> Findings:
    """Yield every broken rule of one RoPE launch."""
    yield from _channels(launch, "S2", 2)
    rows, hd = launch.dims["rows"], launch.dims["head_dim"]
    if hd % 16 or rows % _cores(launch):
        yield Found(
            "E6",
            "head_dim must be a multiple of the 16 lanes, rows one of the cores",
            {"rows": rows, "head_dim": hd, "cores": _cores(launch)},
        )
    per_transfer = launch.tile.get("rows_per_dma", launch.attrs.get("rows_per_dma", 1))
    if per_transfer != 1:
        # Two rows fail to run; four give zeros or NaN without an error.
        yield Found(
            "E6",
            "exactly one row per transfer",
            {"rows_per_dma": per_transfer},
            "silent" if per_transfer > 2 else "build",
        )
