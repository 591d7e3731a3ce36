"""Planted faults of the device and driver, for tests and for the fault catalogue.

Each function is a context manager; inside the block the fault is armed, outside there is nothing. An unused
interface costs the hot path one comparison. Faults nest; the innermost one that matches a run decides.

    with injection.force_state("ERROR", kernel="o_ffn"):
        ...
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from npu_twin.listing import Launch, Listing
from npu_twin.memory import OperandView

Direction = Literal["to_device", "from_device"]

STATES = {
    "COMPLETED": 4,
    "ERROR": 5,
    "ABORT": 6,
    "TIMEOUT": 8,
    "NORESPONSE": 9,
    "SKERROR": 10,
    "SKCRASHED": 11,
}
"""Final states that a run can be forced into (``ert_cmd_state`` without its prefix)."""


@dataclass
class Fault:
    """One armed fault. ``hits`` counts how often it struck, so a test can prove that it did."""

    kernel: str | None = None
    skip: int = 0
    times: int | None = None
    state: int | None = None
    hang: bool = False
    delay_us: float = 0.0
    drop_sync: Direction | None = None
    nbytes: int | None = None
    rewrite: Callable[[Listing], Listing] | None = None
    corrupt: Callable[[Launch, Mapping[str, OperandView]], None] | None = None
    submit_errno: int | None = None
    hits: int = 0

    def strikes(self) -> bool:
        """Count one opportunity; True when the fault acts on it."""
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.times is not None and self.hits >= self.times:
            return False
        self.hits += 1
        return True


active: tuple[Fault, ...] = ()
"""Armed faults, outermost first. Empty in normal operation."""

epoch = 0
"""Grows whenever ``active`` changes; bindings made under another epoch are made again."""


@contextlib.contextmanager
def plant(fault: Fault) -> Iterator[Fault]:
    """Arm any fault for the block; the other functions are shorthands for it."""
    global active, epoch
    active = (*active, fault)
    epoch += 1
    try:
        yield fault
    finally:
        active = tuple(f for f in active if f is not fault)
        epoch += 1


def force_state(
    state: str, *, kernel: str | None = None, times: int | None = None, skip: int = 0
) -> contextlib.AbstractContextManager[Fault]:
    """Runs end in ``state`` (``ERROR``, ``TIMEOUT`` ...), for both ``wait`` and ``state``, and compute
    nothing.

    ``kernel`` limits it to one program, ``skip`` lets that many runs pass first, ``times`` stops after that
    many.
    """
    if state not in STATES:
        raise ValueError(f"{state!r} is not one of {', '.join(STATES)}")
    return plant(Fault(kernel=kernel, times=times, skip=skip, state=STATES[state]))


def never_complete(
    *, kernel: str | None = None, times: int | None = None, skip: int = 0
) -> contextlib.AbstractContextManager[Fault]:
    """Runs stay in flight for ever."""
    return plant(Fault(kernel=kernel, times=times, skip=skip, hang=True))


def delay(
    us: float, *, kernel: str | None = None, times: int | None = None, skip: int = 0
) -> contextlib.AbstractContextManager[Fault]:
    """Runs take ``us`` microseconds more on the virtual clock."""
    return plant(Fault(kernel=kernel, times=times, skip=skip, delay_us=us))


def drop_sync(
    direction: Direction, *, nbytes: int | None = None, times: int | None = 1, skip: int = 0
) -> contextlib.AbstractContextManager[Fault]:
    """A sync in that direction (of buffers of ``nbytes``, if given) does nothing and reports success."""
    return plant(Fault(times=times, skip=skip, drop_sync=direction, nbytes=nbytes))


def fail_submit(
    errno: int, *, kernel: str | None = None, times: int | None = None, skip: int = 0
) -> contextlib.AbstractContextManager[Fault]:
    """The driver refuses to start the run with that errno."""
    return plant(Fault(kernel=kernel, times=times, skip=skip, submit_errno=errno))


def rewrite_listing(
    change: Callable[[Listing], Listing], *, kernel: str | None = None
) -> contextlib.AbstractContextManager[Fault]:
    """Programs loaded inside the block run as ``change(listing)``: the artefact on disk stays as it is."""
    return plant(Fault(kernel=kernel, rewrite=change))


def corrupt_launch(
    change: Callable[[Launch, Mapping[str, OperandView]], None], *, kernel: str | None = None
) -> contextlib.AbstractContextManager[Fault]:
    """Call ``change(launch, operands)`` after every launch; it may overwrite the outputs in device memory."""
    return plant(Fault(kernel=kernel, corrupt=change))


def let_go(run: Any) -> None:
    """Forget that a run is in flight, so that it can be freed: the array of the twin takes no harm."""
    run._in_flight = False


def remove_launch(name: str) -> Callable[[Listing], Listing]:
    """Change for :func:`rewrite_listing`: leave out one launch. Raises KeyError when there is none."""

    def change(listing: Listing) -> Listing:
        rest = tuple(launch for launch in listing.launches if launch.name != name)
        if len(rest) == len(listing.launches):
            raise KeyError(f"program {listing.name} has no launch {name!r}")
        return dataclasses.replace(listing, launches=rest)

    return change


def run_fault(kernel: str) -> Fault | None:
    """The armed fault that decides the fate of this run of ``kernel``, or None. For the device model."""
    for fault in reversed(active):
        if fault.kernel not in (None, kernel):
            continue
        acts = fault.state is not None or fault.hang or fault.delay_us or fault.submit_errno is not None
        if acts and fault.strikes():
            return fault
    return None


def sync_dropped(direction: Direction, nbytes: int) -> bool:
    """Whether this sync is to be dropped. For the device model."""
    for fault in reversed(active):
        if fault.drop_sync == direction and fault.nbytes in (None, nbytes) and fault.strikes():
            return True
    return False


def rewritten(listing: Listing) -> Listing:
    """The listing that really runs. For the device model."""
    for fault in active:
        if fault.rewrite is not None and fault.kernel in (None, listing.name):
            fault.hits += 1
            listing = fault.rewrite(listing)
    return listing


def corrupted(
    kernel: str, launch: Launch, views: Mapping[str, OperandView], compute: Callable[[], None]
) -> Callable[[], None]:
    """``compute`` followed by the armed corruptions. For the device model."""
    for fault in active:
        if fault.corrupt is not None and fault.kernel in (None, kernel):
            compute = _followed(compute, fault, launch, views)
    return compute


def _followed(
    compute: Callable[[], None], fault: Fault, launch: Launch, views: Mapping[str, OperandView]
) -> Callable[[], None]:
    def both() -> None:
        compute()
        assert fault.corrupt is not None
        fault.hits += 1
        fault.corrupt(launch, views)

    return both
