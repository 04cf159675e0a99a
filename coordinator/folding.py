"""Sum of a running round: which updates are in it, and in what order they may come.

Updates are folded in sorted order of devices, whatever the order of arrival, unless the method's sums are exact: these
take them in any order. The running sum covers the updates that came in order; where one is missing in between, or
differs from the one that was folded, all are folded anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedquilt.coordinator.facts import Rounds
from fedquilt.core import BlobRef, Update

Told = tuple[float, Mapping[str, float], Mapping[str, BlobRef]]  # weight, metrics and bundles: the inputs of a fold


class Folding:
    """Running sum of one round.

    Args:
        exact: the order of updates does not matter.
    """

    def __init__(self, exact: bool = False) -> None:
        self._exact = exact
        self._told: dict[str, Told] = {}  # by device, in the order in which they were folded
        self._last = ""
        self.total: Any = None  # sum of those; None: of nobody

    def __len__(self) -> int:
        return len(self._told)

    def follows(self, device: str) -> bool:
        """Whether a device may be folded after those that are."""
        return device not in self._told if self._exact else device > self._last

    def take(self, device: str, told: Told, total: Any) -> None:
        """Store the sum including the update of a device that `follows`."""
        self._told[device], self._last, self.total = told, device, total

    def holds(self, update: Update) -> bool:
        """Whether exactly this update is folded."""
        return self._told.get(update.device) == told(update)

    def of(self, updates: Mapping[str, Update]) -> tuple[Any, list[str]]:
        """Sum of some of these updates, and the devices that are left to fold, in sorted order.

        The sum is None, and all are left, where it holds anything else, or not the first of them.
        """
        devices = sorted(updates)
        folded = self._told.keys() if self._exact else devices[: len(self)]
        if folded == (self._told.keys() & updates.keys() if self._exact else list(self._told)) and all(
            self.holds(updates[device]) for device in folded
        ):
            return self.total, [device for device in devices if device not in self._told]
        return None, devices


def ready(rounds: Rounds, exact: bool) -> dict[str, Update]:
    """Updates that the running round's sum may hold already, by device."""
    if exact or rounds.phase == "closing":
        return dict(rounds.answered)
    first = min(rounds.asked, default="")  # whoever is asked next may sort before anybody, if nobody is
    return {device: update for device, update in rounds.answered.items() if device < first}


def told(update: Update) -> Told:
    """Weight, metrics and bundles of an update."""
    return update.weight, update.metrics, update.bundles


def size_of(update: Update) -> int:
    """Bytes of an update's blobs."""
    return sum(ref.size for ref in update.bundles.values())


def blobs(updates: Iterable[Update]) -> set[str]:
    """Hashes (sha256) of every blob in these updates."""
    return {ref.sha256 for update in updates for ref in update.bundles.values()}
