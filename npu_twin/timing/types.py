"""The few attributes of a launch that its time depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class LaunchLike(Protocol):
    """A launch as the timing model sees it; `npu_twin.listing.Launch` satisfies it."""

    @property
    def op(self) -> str: ...  # noqa: D102

    @property
    def method(self) -> str: ...  # noqa: D102

    @property
    def dims(self) -> Mapping[str, int]: ...  # noqa: D102

    @property
    def tile(self) -> Mapping[str, int]: ...  # noqa: D102

    @property
    def herd(self) -> tuple[int, int]: ...  # noqa: D102

    @property
    def attrs(self) -> Mapping[str, object]: ...  # noqa: D102


class NamedLaunchLike(LaunchLike, Protocol):
    """A launch with the name it has in its program."""

    @property
    def name(self) -> str: ...  # noqa: D102


class ListingLike(Protocol):
    """A program: launches in the order in which they run; `npu_twin.listing.Listing` satisfies it."""

    @property
    def launches(self) -> Sequence[NamedLaunchLike]: ...  # noqa: D102
