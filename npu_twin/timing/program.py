"""Device time of a whole program (one ELF): its launches and what starting it costs."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from npu_twin.timing.launch import launch_us
from npu_twin.timing.types import ListingLike

_RUN_FLOOR_US = 72.0
_CACHE_LIMIT = 1024


@dataclass(frozen=True)
class RunTiming:
    """Modelled device time of one run of a program.

    Attributes:
        total_us: time from start to completion, in microseconds.
        launches: name and microseconds of every launch, in order.
        overhead_us: the part of the total that belongs to no launch.
    """

    total_us: float
    launches: tuple[tuple[str, float], ...]
    overhead_us: float


# Keyed by identity: a listing holds mappings and need not be hashable. The entry keeps the listing alive, so
# an identity cannot be reused while its entry exists.
_cache: OrderedDict[int, tuple[ListingLike, RunTiming]] = OrderedDict()


def run_us(listing: ListingLike) -> RunTiming:
    """Return the modelled time of one run of `listing`; the answer for a listing object is computed once."""
    key = id(listing)
    hit = _cache.get(key)
    if hit is not None:
        return hit[1]
    launches = tuple((launch.name, launch_us(launch)) for launch in listing.launches)
    timing = RunTiming(_RUN_FLOOR_US + sum(us for _, us in launches), launches, _RUN_FLOOR_US)
    _cache[key] = (listing, timing)
    if len(_cache) > _CACHE_LIMIT:
        _cache.popitem(last=False)
    return timing
