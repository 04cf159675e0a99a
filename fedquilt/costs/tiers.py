"""Tiers of devices by task memory, and the devices of each tier that fit some work.

FedStitch (arXiv 2409.07202, section V-A4) gives 30, 30, 30 and 10 % of its devices 1, 2, 4 and 8 GB for a task. Here
the tier of a device is the largest of these sizes within its budget. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from fedquilt.console import units
from fedquilt.core import Profile, WorkEstimate
from fedquilt.costs import peak_memory

GIGABYTE: Final = 10**9
BELOW: Final = "under 1GB"
SIZES: Final[dict[str, int]] = {f"{count}GB": count * GIGABYTE for count in (1, 2, 4, 8)}


class TierDevice(NamedTuple):
    profile: Profile
    examples: int | None = None  # of its own; None: not reported yet


@dataclass(frozen=True)
class TierCoverage:
    """Number of devices and examples of a tier, and those that could take part."""

    devices: int = 0
    able: int = 0
    examples: int = 0  # of the devices that have reported their number
    able_examples: int = 0
    unknown: int = 0  # devices that have not reported it

    def add_device(self, member: TierDevice, able: bool) -> TierCoverage:
        count = member.examples or 0
        return TierCoverage(
            self.devices + 1,
            self.able + able,
            self.examples + count,
            self.able_examples + count * able,
            self.unknown + (member.examples is None),
        )


def tier_from_profile(profile: Profile | None) -> str:
    """Return the largest tier within a device's budget, or "" if the device has sent no profile."""
    return "" if profile is None else tier_from_budget(profile.budget_bytes)


def tier_from_budget(budget_bytes: int) -> str:
    return next((name for name, size in reversed(SIZES.items()) if budget_bytes >= size), BELOW)


def fits_budget(budget_bytes: int, engines: Iterable[str], work: WorkEstimate) -> bool:
    """Return whether the budget suffices for the work on one of the engines."""
    return any(budget_bytes >= peak_memory.task_process_bytes(engine, work.peak_bytes) for engine in engines)


def tier_coverage(fleet: Iterable[TierDevice], engines: Iterable[str], work: WorkEstimate) -> dict[str, TierCoverage]:
    """Return which part of each tier could take part, smallest tier first, without empty tiers.

    Args:
        fleet: All devices.
        engines: Engines for the work. A device requires one of them, with enough budget for the engine and the work.
        work: The work. Only `peak_bytes` matters.
    """
    wanted = tuple(engines)
    found: dict[str, TierCoverage] = {}
    for member in fleet:
        own = [engine for engine in wanted if engine in member.profile.engines]
        able = fits_budget(member.profile.budget_bytes, own, work)
        name = tier_from_profile(member.profile)
        found[name] = found.get(name, TierCoverage()).add_device(member, able)
    return {name: found[name] for name in (BELOW, *SIZES) if name in found}


def format_coverage(found: Mapping[str, TierCoverage], work: WorkEstimate) -> list[str]:
    if not found:
        return []
    whole = _sum_counts(found.values())
    need = f"{units.format_bytes(work.peak_bytes)} beside the engine" if work.peak_bytes else "no more than the engine"
    told = [f"could take part ({need}): {_format_counts(whole)}"]
    if len(found) > 1:
        told += [f"  {name}: {_format_counts(share)}" for name, share in found.items()]
    return told


def _format_counts(share: TierCoverage) -> str:
    text = f"{share.able} of {share.devices} devices"
    if share.unknown < share.devices:
        text += f", {share.able_examples} of {share.examples} examples"
        if share.unknown:
            text += f" ({share.unknown} have not said how many)"
    return text


def _sum_counts(shares: Iterable[TierCoverage]) -> TierCoverage:
    total = TierCoverage()
    for one in shares:
        total = TierCoverage(
            total.devices + one.devices,
            total.able + one.able,
            total.examples + one.examples,
            total.able_examples + one.able_examples,
            total.unknown + one.unknown,
        )
    return total
