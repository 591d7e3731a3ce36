"""Rules of whole programs: what launches may share one ELF, how names, arguments and buffers relate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from npu_twin.constraints import _tables as tables
from npu_twin.constraints import gemv
from npu_twin.constraints._types import Findings, Found, LaunchLike
from npu_twin.constraints.rules import HW_CONTEXTS, MAX_BUFFER_BYTES

FUSED_DECODE_K = 8160
FUSED_DECODE_K_KNOWN = frozenset({8192})
MOST_LAUNCHES = 10
PRACTICAL_LAUNCHES = 8
PING_PONG_K = 8192
TARGET = "npu2"
_GEMV_OPS = ("gemv", "gemv_add")


class ArgumentLike(Protocol):
    """An argument of a program: ``nbytes`` is its size in bytes."""

    @property
    def name(self) -> str:
        """Name within the program."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""


class NamedLaunch(LaunchLike, Protocol):
    """A launch of a program."""

    @property
    def symbol(self) -> str:
        """External symbol of its object code; empty where nothing depends on it."""

    @property
    def name(self) -> str:
        """Name within the program."""

    @property
    def operands(self) -> Mapping[str, Any]:
        """Operand name to a reference with ``arg``, ``offset`` and ``shape``."""


class ListingLike(Protocol):
    """The part of ``npu_twin.listing.Listing`` that rules read."""

    @property
    def name(self) -> str:
        """Name of the program."""

    @property
    def target(self) -> str:
        """Device name."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Compiler options: ``ping_pong``, ``output_format``, ``placeholders``, ``instance_name``,
        ``rank_reducing_subviews``.
        """

    @property
    def arguments(self) -> Iterable[Any]:
        """Arguments in signature order."""

    @property
    def launches(self) -> Iterable[Any]:
        """Launches in order."""


def check_program(listing: ListingLike, switches: frozenset[str]) -> Findings:
    """Yield every broken rule that needs more than one launch or the arguments to see."""
    launches: list[NamedLaunch] = list(listing.launches)
    options = listing.options
    if listing.target != TARGET:
        yield Found("D8", f"code for {listing.target} returns zeros on {TARGET}", {"target": listing.target})
    yield from _arguments(listing, launches)
    yield from _names(listing, launches)
    limit = PRACTICAL_LAUNCHES if "M6" in switches else MOST_LAUNCHES
    if len(launches) > limit:
        yield Found(
            "M6",
            f"more than {limit} launches overflow the compiler's stack; split the program",
            {"launches": len(launches)},
        )
    ops = Counter(launch.op for launch in launches)
    if ops["flash_attention"] and len(launches) > 1:
        yield Found(
            "F16",
            "attention uses channels and the cascade and is not merged with other launches",
            {"launches": len(launches)},
        )
    if options.get("output_format", "elf") != "elf" and any(x.method == "fused-cast" for x in launches):
        yield Found(
            "G13",
            "the two launches of a fused-cast GEMM need ELF output",
            {"output_format": options["output_format"]},
        )
    yield from _symbols(launches)
    yield from _fused_decode(launches, options)
    yield from _switched(launches, switches)


def _arguments(listing: ListingLike, launches: list[NamedLaunch]) -> Findings:
    used = {operand.arg for launch in launches for operand in launch.operands.values()}
    placeholders = set(listing.options.get("placeholders", ()))
    for argument in listing.arguments:
        if argument.nbytes > MAX_BUFFER_BYTES:
            yield Found(
                "B14",
                f"argument {argument.name} is larger than 4 GiB: addresses wrap",
                {"argument": argument.name, "bytes": argument.nbytes},
            )
        if argument.name not in used and argument.name not in placeholders:
            yield Found("M3", f"argument {argument.name} is used by no launch", {"argument": argument.name})
    scratch = Counter(
        (x.operands["scratch"].arg, x.operands["scratch"].offset)
        for x in launches
        if x.method == "fused-cast" and "scratch" in x.operands
    )
    for (arg, offset), count in scratch.items():
        if count > 1:
            yield Found(
                "M4",
                f"{count} fused-cast GEMMs share the scratch {arg}; each needs its own",
                {"argument": arg, "offset": offset, "gemms": count},
            )
    if listing.options.get("rank_reducing_subviews", True) is False:
        for launch in launches:
            for key, operand in launch.operands.items():
                if operand.offset:
                    yield Found(
                        "M9",
                        "an alias on a part of an argument needs rank-reducing sub-views",
                        {"launch": launch.name, "operand": key, "argument": operand.arg},
                    )


def _names(listing: ListingLike, launches: list[NamedLaunch]) -> Findings:
    for name, count in Counter(launch.name for launch in launches).items():
        if count > 1:
            yield Found("M2", f"{count} launches are called {name}", {"name": name})
    instance = listing.options.get("instance_name", listing.name)
    if instance != listing.name:
        yield Found(
            "M11",
            "the instance name must be the function name of the module",
            {"instance_name": instance, "function": listing.name},
        )
    for launch in launches:
        if launch.attrs.get("bare_herd", False):
            yield Found("M1", "a herd without launch and segment is dropped", {"launch": launch.name})


def _symbols(launches: list[NamedLaunch]) -> Findings:
    """Launches that name the same external symbol must agree on what it was compiled for."""
    seen: dict[str, NamedLaunch] = {}
    for launch in launches:
        symbol = launch.attrs.get("symbol") or launch.symbol
        if not symbol:
            continue
        first = seen.setdefault(symbol, launch)
        names = {"symbol": symbol, "launches": f"{first.name}, {launch.name}"}
        if launch.op == first.op == "gemm" and _gemm_object(launch) != _gemm_object(first):
            yield Found("G14", "two GEMMs of different tiles share one symbol", names)
        elif launch.op == first.op == "gemv" and launch.dims["K"] != first.dims["K"]:
            yield Found("V8", "two GEMVs of different K share one symbol", names)
        elif launch.op == first.op == "rope" and launch.method != first.method:
            yield Found("E7", "half-split and interleaved RoPE share one symbol", names)


def _gemm_object(launch: LaunchLike) -> tuple[Any, ...]:
    return (launch.method, *(launch.tile.get(k) for k in ("tile_m", "tile_n", "tile_k_l1")))


def _fused_decode(launches: list[NamedLaunch], options: Mapping[str, Any]) -> Findings:
    matvecs = [x for x in launches if x.op in _GEMV_OPS or x.op == "norm_gateup_swiglu"]
    if options.get("ping_pong", False):
        for launch in launches:
            if launch.op == "gemv":
                if launch.dims["K"] >= PING_PONG_K:
                    yield Found(
                        "V5",
                        f"{launch.name}: switch ping-pong off for the whole module",
                        {"launch": launch.name, "K": launch.dims["K"]},
                    )
                for found in gemv.check_l1(launch, ping_pong=True):
                    yield Found(found.rule_id, f"{launch.name}: {found.message}", found.values)
    if len(matvecs) < 3 and not any(x.op == "norm_gateup_swiglu" for x in matvecs):
        return
    for launch in matvecs:
        if launch.op not in _GEMV_OPS:
            continue
        K = launch.dims["K"]
        if K in tables.FUSED_FFN_REFUSED_HIDDEN:
            yield Found(
                "M10",
                f"{launch.name}: O projection and FFN of this hidden size do not fit one ELF",
                {"hidden": K},
            )
        elif K > FUSED_DECODE_K and K not in FUSED_DECODE_K_KNOWN:
            yield Found(
                "B5",
                f"{launch.name}: K is above {FUSED_DECODE_K} in a fused decode ELF; give it its own",
                {"K": K},
            )


def _switched(launches: list[NamedLaunch], switches: frozenset[str]) -> Findings:
    gemms = [(i, x) for i, x in enumerate(launches) if x.op == "gemm"]
    if "G16" in switches and len(launches) > 1:
        for _, launch in gemms:
            if launch.method == "drain":
                yield Found("G16", f"{launch.name}: drain in a stitched ELF", {"launch": launch.name})
    if "G15" in switches:
        for i, launch in gemms:
            if i and launch.dims["K"] > launch.dims["N"] and len(launches) > 1:
                yield Found("G15", f"{launch.name}: down projection is not first", {"position": i})


def check_session(elfs: int) -> Findings:
    """R1 for a process that keeps ``elfs`` programs loaded at the same time."""
    if elfs >= HW_CONTEXTS:
        yield Found(
            "R1",
            f"about {HW_CONTEXTS} loaded ELFs exhaust the driver's hardware contexts (error -22)",
            {"elfs": elfs},
        )
