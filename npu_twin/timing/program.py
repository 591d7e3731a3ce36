"""Device time of a whole program (one ELF): its launches and what starting it costs."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npu_twin.timing import kernels
from npu_twin.timing.parameters import current

if TYPE_CHECKING:
    from npu_twin.listing import Listing

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


# Keyed by identity: hashing a whole listing at every run would cost more than the run. The entry keeps the
# listing alive, so an identity cannot be reused while its entry exists.
_cache: OrderedDict[int, tuple[Listing, RunTiming]] = OrderedDict()


def run_us(listing: Listing) -> RunTiming:
    """Return the modelled time of one run of `listing`; the answer for a listing object is computed once."""
    key = id(listing)
    hit = _cache.get(key)
    if hit is not None:
        return hit[1]
    p = current()
    names = (launch.name for launch in listing.launches)
    launches = tuple(zip(names, kernels.launches_us(p, listing.launches), strict=True))
    overhead = p["program.start_us"]
    timing = RunTiming(overhead + sum(us for _, us in launches), launches, overhead)
    _cache[key] = (listing, timing)
    if len(_cache) > _CACHE_LIMIT:
        _cache.popitem(last=False)
    return timing
