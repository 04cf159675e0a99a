"""Tiers of devices by the memory of a task, and which devices could take part in some work.

FedStitch (arXiv 2409.07202, section V-A4) gives 30, 30, 30 and 10 % of its devices 1, 2, 4 and 8 GB for
a task. Here a device's tier is the largest of these that its budget reaches. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from fedquilt import footprint, units
from fedquilt.core import Profile, Work

GIGABYTE: Final = 10**9
BELOW: Final = "under 1GB"
SIZES: Final[dict[str, int]] = {f"{count}GB": count * GIGABYTE for count in (1, 2, 4, 8)}
PAPER_SHARES: Final[Mapping[str, float]] = {"1GB": 0.3, "2GB": 0.3, "4GB": 0.3, "8GB": 0.1}
"""Of the paper's devices."""


class Member(NamedTuple):
    """Device of a fleet."""

    profile: Profile
    examples: int | None = None  # of its own; None: not reported yet


@dataclass(frozen=True)
class Share:
    """Devices of a tier, and those that could take part."""

    devices: int = 0
    able: int = 0
    examples: int = 0  # of the devices that have reported their number
    able_examples: int = 0
    unknown: int = 0  # devices that have not reported it

    def plus(self, member: Member, able: bool) -> Share:
        """Counts with one more device."""
        count = member.examples or 0
        return Share(
            self.devices + 1,
            self.able + able,
            self.examples + count,
            self.able_examples + count * able,
            self.unknown + (member.examples is None),
        )


def tier(profile: Profile | None) -> str:
    """Largest tier that the device's budget reaches; "": it has sent no profile."""
    return "" if profile is None else of_budget(profile.budget_bytes)


def of_budget(budget_bytes: int) -> str:
    """Largest tier that a budget reaches."""
    return next((name for name, size in reversed(SIZES.items()) if budget_bytes >= size), BELOW)


def fits(profile: Profile, engine: str, work: Work) -> bool:
    """Whether the device's budget holds the engine and the work, in its smallest steps."""
    return profile.budget_bytes >= footprint.need_bytes(engine, work.peak_bytes)


def coverage(fleet: Iterable[Member], engines: Iterable[str], work: Work) -> dict[str, Share]:
    """Share of each tier that could take part, smallest tier first; tiers without devices are left out.

    Args:
        fleet: all devices.
        engines: engines for the work: a device without any of them, or whose budget holds none of them with the
            work, cannot take part.
        work: only `peak_bytes` matters; 0 fits wherever the engine does.
    """
    wanted = tuple(engines)
    found: dict[str, Share] = {}
    for member in fleet:
        own = [engine for engine in wanted if engine in member.profile.engines]
        able = any(fits(member.profile, engine, work) for engine in own)
        name = tier(member.profile)
        found[name] = found.get(name, Share()).plus(member, able)
    return {name: found[name] for name in (BELOW, *SIZES) if name in found}


def lines(found: Mapping[str, Share], work: Work) -> list[str]:
    """Sentences on the coverage: all devices first, then each tier."""
    if not found:
        return []
    whole = _sum(found.values())
    need = f"{units.size(work.peak_bytes)} beside the engine" if work.peak_bytes else "no more than the engine"
    told = [f"could take part ({need}): {_told(whole)}"]
    if len(found) > 1:
        told += [f"  {name}: {_told(share)}" for name, share in found.items()]
    return told


def _told(share: Share) -> str:
    text = f"{share.able} of {share.devices} devices"
    if share.unknown < share.devices:
        text += f", {share.able_examples} of {share.examples} examples"
        if share.unknown:
            text += f" ({share.unknown} have not said how many)"
    return text


def _sum(shares: Iterable[Share]) -> Share:
    total = Share()
    for one in shares:
        total = Share(
            total.devices + one.devices,
            total.able + one.able,
            total.examples + one.examples,
            total.able_examples + one.able_examples,
            total.unknown + one.unknown,
        )
    return total
