"""What kernels that stream their operands share: adds, SiLU-and-Mul, GELU, norms and RoPE.

Their limit is the number of shim channels: a core with two input streams blocks two of the array's sixteen
host-to-array channels, so eight such cores fill it.
"""

from __future__ import annotations

from collections.abc import Iterator

from npu_twin.npu2 import COLUMNS, SHIM_STREAMS
from npu_twin.opset import Config, Dims, Finding, Findings, LaunchLike, Values

BF16 = 2
"""Bytes of an element."""
NORM_HERDS = (8, 4, 2, 1)


def ceil_div(size: int, part: int) -> int:
    """Number of parts that cover ``size``."""
    return -(-size // max(part, 1))


def divisors(n: int, most: int, step: int = 1) -> list[int]:
    """Divisors of ``n`` up to ``most`` that are multiples of ``step``."""
    return [d for d in range(step, min(n, most) + 1, step) if n % d == 0]


def cores(launch: LaunchLike) -> int:
    """Number of cores of a launch."""
    return launch.herd[0] * launch.herd[1]


def check_channels(launch: LaunchLike, rule_id: str, inputs: int) -> Findings:
    """Whether the shim channels suffice for ``inputs`` streams per core."""
    limit = SHIM_STREAMS // inputs
    if cores(launch) > limit:
        yield Finding(
            rule_id,
            f"{inputs} input stream(s) per core exhaust the shim channels above {limit} cores",
            {"herd": f"{launch.herd[0]}x{launch.herd[1]}", "cores": cores(launch)},
        )


def check_tiles(launch: LaunchLike, rule_id: str, key: str, least: int, most: int) -> Findings:
    """Whether the tile ``key`` divides ``n`` over the cores, fits the lanes and is from least to most."""
    n, tile, count = launch.dims["n"], launch.tile[key], cores(launch)
    if n % (tile * count):
        yield Finding(
            rule_id,
            f"n must be a multiple of {key}*cores = {tile * count}",
            {"n": n, key: tile, "cores": count},
            "build",
        )
    if tile % 16:
        yield Finding(rule_id, f"{key} must be a multiple of the 16 lanes", {key: tile}, "build")
    if not least <= tile <= most:
        yield Finding(rule_id, f"{key} must be {least} to {most}", {key: tile})


def check_norm(launch: LaunchLike, herd_rule: str) -> Findings:
    """Whether a norm's herd is one of those in use and its sizes divide."""
    M, N = launch.dims["M"], launch.dims["N"]
    hx, hy = launch.herd
    if hx not in NORM_HERDS or hy != 1:
        yield Finding(herd_rule, "the herd of a norm is 1x1, 2x1, 4x1 or 8x1", {"herd": f"{hx}x{hy}"})
    if N % 16 or M % hx:
        yield Finding(
            "E5",
            "N must be a multiple of the 16 lanes, M one of herd_x",
            {"M": M, "N": N, "herd_x": hx},
        )


def tile_space(
    op: str, method: str, d: Dims, key: str, tiles: tuple[int, int], most: int
) -> Iterator[Config]:
    """The five largest tiles (from, to) for each herd of the published sweeps.

    Herds run along the columns, then over two and four rows; ``most`` cores have channels.
    """
    n = d["n"]
    for herd in ((8, 1), (4, 1), (2, 1), (1, 1), *([(2, 4)] if most == 8 else [(8, 2), (4, 4)])):
        count = herd[0] * herd[1]
        if n % count:
            continue
        sizes = [t for t in divisors(n // count, tiles[1], 16) if t >= tiles[0]]
        for tile in sizes[-5:]:
            yield Config(op, method, d, {key: tile}, herd)


def row_space(op: str, method: str, d: Dims, key: str, any_herd: bool = False) -> Iterator[Config]:
    """Herds along the columns that divide the rows; with ``any_herd`` also sizes that are no power of two,
    where those leave one core.
    """
    herds = [h for h in NORM_HERDS if d[key] % h == 0]
    if herds == [1] and any_herd:
        herds = [h for h in range(COLUMNS, 0, -1) if d[key] % h == 0]
    for h in herds:
        yield Config(op, method, d, {}, (h, 1))


def stream_us(p: Values, launch: LaunchLike, n: int, parameter: str, traffic: int) -> float:
    """Work on ``n`` elements: the slower of the cores and of DDR, which moves ``traffic`` bytes each."""
    ns = p[f"stream.{parameter}"]
    return max(n / cores(launch) * ns, BF16 * traffic * n / p["stream.ddr_gbps"]) * 1e-3
