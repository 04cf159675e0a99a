"""A round's updates folded as they come, each once, as far as they come in sorted order of devices.

The round is committed in that order, whatever order updates come in. The sum of those that came in order is kept;
where one is missing in between, or was not what it was expected to be, the commit folds them all anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedquilt.core import BlobRef, Update

Told = tuple[float, Mapping[str, float], Mapping[str, BlobRef]]  # weight, metrics, bundles: what a fold is made of


class Folding:
    """Of one round."""

    def __init__(self) -> None:
        self._told: dict[str, Told] = {}  # by device, in sorted order
        self._last = ""
        self.total: Any = None  # of those; None: of nobody

    def __len__(self) -> int:
        return len(self._told)

    def follows(self, device: str) -> bool:
        """Whether a device comes after all that are folded."""
        return device > self._last

    def take(self, device: str, told: Told, total: Any) -> None:
        """Keep the sum with the update of a device that `follows`."""
        self._told[device], self._last, self.total = told, device, total

    def holds(self, update: Update) -> bool:
        """Whether this very update is folded."""
        return self._told.get(update.device) == told(update)

    def of(self, updates: Mapping[str, Update]) -> tuple[Any, list[str]]:
        """The sum of the first of the updates in sorted order of devices, and the devices that are left to fold."""
        devices = sorted(updates)
        first = devices[: len(self)]
        if first == list(self._told) and all(self.holds(updates[device]) for device in first):
            return self.total, devices[len(self) :]
        return None, devices


def told(update: Update) -> Told:
    return update.weight, update.metrics, update.bundles


def blobs(updates: Iterable[Update]) -> set[str]:
    """The sha256 of every blob that updates are made of."""
    return {ref.sha256 for update in updates for ref in update.bundles.values()}
