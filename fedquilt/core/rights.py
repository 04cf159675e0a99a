"""Rights of a site, which speaks for devices that the coordinator does not reach itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated, Final

import msgspec
from msgspec import Meta

SITE_BUNDLES: Final = "site."  # prefix of the names of bundles in a site's update

NamePattern = Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9._-]{0,63}|[a-z0-9][a-z0-9._-]{0,62}\*|\*)\Z")]
"""The name of a device, or the beginning of names: "cam-*"."""


class SiteRight(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Right of a site to submit updates of other devices."""

    boards: Annotated[tuple[NamePattern, ...], Meta(min_length=1, max_length=10_000)]  # names of these devices
    most: Annotated[int, Meta(ge=1, le=1_000_000)]  # number of them in one round

    def covers(self, name: str) -> bool:
        """Return whether the site may speak for a device."""
        return not self.uncovered([name])

    def uncovered(self, names: Iterable[str]) -> list[str]:
        """Return the devices that the site may not speak for."""
        known = frozenset(self.boards)
        beginnings = tuple(pattern[:-1] for pattern in known if pattern.endswith("*"))
        return [name for name in names if name not in known and not name.startswith(beginnings)]

    def overlaps(self, other: SiteRight) -> bool:
        """Return whether a name could belong to both sites."""
        return any(
            _matches(one.removesuffix("*"), another) or _matches(another.removesuffix("*"), one)
            for one in self.boards
            for another in other.boards
        )


def has_site_bundles(names: Collection[str]) -> bool:
    """Return whether bundles of these names are those of a site's update."""
    return any(name.startswith(SITE_BUNDLES) for name in names)


def _matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
