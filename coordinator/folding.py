"""Incremental fold of a round's updates: each is folded once, as far as they arrive in sorted order of devices.

The round is committed in that order, whatever the order of arrival. The running sum covers the updates that came in
order; where one is missing in between, or differs from the expected one, the commit folds them all anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedquilt.core import BlobRef, Update

Told = tuple[float, Mapping[str, float], Mapping[str, BlobRef]]  # weight, metrics and bundles: the inputs of a fold


class Folding:
    """Running sum of one round."""

    def __init__(self) -> None:
        self._told: dict[str, Told] = {}  # by device, in sorted order
        self._last = ""
        self.total: Any = None  # sum of those; None: of nobody

    def __len__(self) -> int:
        return len(self._told)

    def follows(self, device: str) -> bool:
        """Whether a device sorts after all those folded."""
        return device > self._last

    def take(self, device: str, told: Told, total: Any) -> None:
        """Store the sum including the update of a device that `follows`."""
        self._told[device], self._last, self.total = told, device, total

    def holds(self, update: Update) -> bool:
        """Whether exactly this update is folded."""
        return self._told.get(update.device) == told(update)

    def of(self, updates: Mapping[str, Update]) -> tuple[Any, list[str]]:
        """Sum of the first updates in sorted order of devices, and the devices that are left to fold."""
        devices = sorted(updates)
        first = devices[: len(self)]
        if first == list(self._told) and all(self.holds(updates[device]) for device in first):
            return self.total, devices[len(self) :]
        return None, devices


def told(update: Update) -> Told:
    """Weight, metrics and bundles of an update."""
    return update.weight, update.metrics, update.bundles


def blobs(updates: Iterable[Update]) -> set[str]:
    """Hashes (sha256) of every blob in these updates."""
    return {ref.sha256 for update in updates for ref in update.bundles.values()}
