"""Rules of whole programs: what launches may share one ELF, how names, arguments and buffers relate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from npu_twin.npu2 import MAX_BO_BYTES
from npu_twin.ops import gemv
from npu_twin.opset import Finding, Findings

if TYPE_CHECKING:
    from npu_twin.listing import Launch, Listing

FUSED_DECODE_K = 8160
FUSED_DECODE_K_KNOWN = frozenset({8192})
MOST_LAUNCHES = 10
PRACTICAL_LAUNCHES = 8
PING_PONG_K = 8192
TARGET = "npu2"
HW_CONTEXTS = 10
"""Loading about this many ELFs in one process exhausts the driver's contexts."""
FUSED_FFN_REFUSED_HIDDEN = frozenset({8960, 9728, 11008})
"""Hidden sizes whose O projection and FFN do not fit one decode ELF; 3072, 6144 and 8192 do (Xilinx/mlir-air
e972f2942, kernel registry)."""
_GEMV_OPS = ("gemv", "gemv_add")


def check_program(listing: Listing, switches: frozenset[str]) -> Findings:
    """Yield every broken rule that needs more than one launch or the arguments to see."""
    launches: list[Launch] = list(listing.launches)
    options = listing.options
    if listing.target != TARGET:
        yield Finding(
            "D8", f"code for {listing.target} returns zeros on {TARGET}", {"target": listing.target}
        )
    yield from _arguments(listing, launches)
    yield from _names(listing, launches)
    limit = PRACTICAL_LAUNCHES if "M6" in switches else MOST_LAUNCHES
    if len(launches) > limit:
        yield Finding(
            "M6",
            f"more than {limit} launches overflow the compiler's stack; split the program",
            {"launches": len(launches)},
        )
    ops = Counter(launch.op for launch in launches)
    if ops["flash_attention"] and len(launches) > 1:
        yield Finding(
            "F16",
            "attention uses channels and the cascade and is not merged with other launches",
            {"launches": len(launches)},
        )
    if options.get("output_format", "elf") != "elf" and any(x.method == "fused-cast" for x in launches):
        yield Finding(
            "G13",
            "the two launches of a fused-cast GEMM need ELF output",
            {"output_format": options["output_format"]},
        )
    yield from _symbols(launches)
    yield from _fused_decode(launches, options)
    yield from _switched(launches, switches)


def _arguments(listing: Listing, launches: list[Launch]) -> Findings:
    used = {operand.arg for launch in launches for operand in launch.operands.values()}
    placeholders = set(listing.options.get("placeholders", ()))
    for argument in listing.arguments:
        if argument.nbytes > MAX_BO_BYTES:
            yield Finding(
                "B14",
                f"argument {argument.name} is larger than 4 GiB: addresses wrap",
                {"argument": argument.name, "bytes": argument.nbytes},
            )
        if argument.name not in used and argument.name not in placeholders:
            yield Finding("M3", f"argument {argument.name} is used by no launch", {"argument": argument.name})
    scratch = Counter(
        (x.operands["scratch"].arg, x.operands["scratch"].offset)
        for x in launches
        if x.method == "fused-cast" and "scratch" in x.operands
    )
    for (arg, offset), count in scratch.items():
        if count > 1:
            yield Finding(
                "M4",
                f"{count} fused-cast GEMMs share the scratch {arg}; each needs its own",
                {"argument": arg, "offset": offset, "gemms": count},
            )
    if listing.options.get("rank_reducing_subviews", True) is False:
        for launch in launches:
            for key, operand in launch.operands.items():
                if operand.offset:
                    yield Finding(
                        "M9",
                        "an alias on a part of an argument needs rank-reducing sub-views",
                        {"launch": launch.name, "operand": key, "argument": operand.arg},
                    )


def _names(listing: Listing, launches: list[Launch]) -> Findings:
    for name, count in Counter(launch.name for launch in launches).items():
        if count > 1:
            yield Finding("M2", f"{count} launches are called {name}", {"name": name})
    instance = listing.options.get("instance_name", listing.name)
    if instance != listing.name:
        yield Finding(
            "M11",
            "the instance name must be the function name of the module",
            {"instance_name": instance, "function": listing.name},
        )
    for launch in launches:
        if launch.attrs.get("bare_herd", False):
            yield Finding("M1", "a herd without launch and segment is dropped", {"launch": launch.name})


def _symbols(launches: list[Launch]) -> Findings:
    """Launches that name the same external symbol must agree on what it was compiled for."""
    seen: dict[str, Launch] = {}
    for launch in launches:
        symbol = launch.attrs.get("symbol") or launch.symbol
        if not symbol:
            continue
        first = seen.setdefault(symbol, launch)
        names = {"symbol": symbol, "launches": f"{first.name}, {launch.name}"}
        if launch.op == first.op == "gemm" and _gemm_object(launch) != _gemm_object(first):
            yield Finding("G14", "two GEMMs of different tiles share one symbol", names)
        elif launch.op == first.op == "gemv" and launch.dims["K"] != first.dims["K"]:
            yield Finding("V8", "two GEMVs of different K share one symbol", names)
        elif launch.op == first.op == "rope" and launch.method != first.method:
            yield Finding("E7", "half-split and interleaved RoPE share one symbol", names)


def _gemm_object(launch: Launch) -> tuple[Any, ...]:
    return (launch.method, *(launch.tile.get(k) for k in ("tile_m", "tile_n", "tile_k_l1")))


def _fused_decode(launches: list[Launch], options: Mapping[str, Any]) -> Findings:
    matvecs = [x for x in launches if x.op in _GEMV_OPS or x.op == "norm_gateup_swiglu"]
    if options.get("ping_pong", False):
        for launch in launches:
            if launch.op == "gemv":
                if launch.dims["K"] >= PING_PONG_K:
                    yield Finding(
                        "V5",
                        f"{launch.name}: switch ping-pong off for the whole module",
                        {"launch": launch.name, "K": launch.dims["K"]},
                    )
                for finding in gemv.check_l1(launch, ping_pong=True):
                    message = f"{launch.name}: {finding.message}"
                    yield Finding(finding.rule_id, message, finding.values)
    if len(matvecs) < 3 and not any(x.op == "norm_gateup_swiglu" for x in matvecs):
        return
    for launch in matvecs:
        if launch.op not in _GEMV_OPS:
            continue
        K = launch.dims["K"]
        if K in FUSED_FFN_REFUSED_HIDDEN:
            yield Finding(
                "M10",
                f"{launch.name}: O projection and FFN of this hidden size do not fit one ELF",
                {"hidden": K},
            )
        elif K > FUSED_DECODE_K and K not in FUSED_DECODE_K_KNOWN:
            yield Finding(
                "B5",
                f"{launch.name}: K is above {FUSED_DECODE_K} in a fused decode ELF; give it its own",
                {"K": K},
            )


def _switched(launches: list[Launch], switches: frozenset[str]) -> Findings:
    gemms = [(i, x) for i, x in enumerate(launches) if x.op == "gemm"]
    if "G16" in switches and len(launches) > 1:
        for _, launch in gemms:
            if launch.method == "drain":
                yield Finding("G16", f"{launch.name}: drain in a stitched ELF", {"launch": launch.name})
    if "G15" in switches:
        for i, launch in gemms:
            if i and launch.dims["K"] > launch.dims["N"] and len(launches) > 1:
                yield Finding("G15", f"{launch.name}: down projection is not first", {"position": i})


def check_session(elfs: int) -> Findings:
    """R1 for a process that keeps ``elfs`` programs loaded at the same time."""
    if elfs >= HW_CONTEXTS:
        yield Finding(
            "R1",
            f"about {HW_CONTEXTS} loaded ELFs exhaust the driver's hardware contexts (error -22)",
            {"elfs": elfs},
        )
