"""Incremental aggregation of a round's updates: each update is folded once, on arrival.

Mergeable accumulators (`Aggregation.accumulator`) take updates in any order, with bit-identical results. Any others
take updates in the order of device ids, as far as they arrive in this order. If a folded update does not count in the
end, or differs from the update that does, the commit folds all updates again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fedquilt.arrays import exact_sums
from fedquilt.coordinator.rounds.events import JobState
from fedquilt.core import BlobRef, Update

Told = tuple[float, Mapping[str, float], Mapping[str, BlobRef]]  # weight, metrics and bundles: the inputs of a fold


class PartialAggregate:
    """Partial aggregate of one round.

    Args:
        any_order: Whether updates may be folded in any order.
    """

    def __init__(self, any_order: bool = False) -> None:
        self._any_order = any_order
        self.reset()

    def reset(self) -> None:
        self._told: dict[str, Told] = {}  # by device, in the order in which they were folded
        self.total: Any = None  # aggregate of these updates, or None without updates
        self._apart: list[tuple[dict[str, Told], Callable[[], Any]]] = []  # further aggregates, each with its inputs

    def can_fold_now(self, device: str, answered: Mapping[str, Update], asked: Iterable[str]) -> bool:
        """Return whether a device's update can be folded on arrival.

        Args:
            device: Id of the device.
            answered: Updates accepted so far, by device.
            asked: Devices whose updates may still arrive.
        """
        if self._any_order:
            return not self._contains_device(device)
        return len(self._told) == len(answered) and self.can_fold_in_order(device) and device == min(asked, default="")

    def can_fold_in_order(self, device: str) -> bool:
        """Return whether a device's update can be folded once all devices that precede it are folded."""
        return not self._contains_device(device) if self._any_order else device > next(reversed(self._told), "")

    def include_update(self, device: str, told: Told, total: Any) -> None:
        self._told[device], self.total = told, total

    def add_pending_sum(self, given: Mapping[str, Told], total: Callable[[], Any]) -> None:
        """Add the sum of several updates that a worker of the simulation is computing.

        Args:
            given: Fold inputs of the updates in the sum, by device.
            total: Waits for the sum and returns it, or None if the worker failed. The updates are then folded singly.
        """
        self._apart.append((dict(given), total))

    def merge_pending_sums(self, updates: Mapping[str, Update]) -> None:
        """Merge the pending sums whose updates all count unchanged, and drop the rest."""
        for given, waits in self._apart:
            counts = all(device in updates and fold_inputs(updates[device]) == each for device, each in given.items())
            if counts and (total := waits()) is not None:
                self.total = total if self.total is None else exact_sums.merge_accumulators(self.total, total)
                self._told |= given
        self._apart = []

    def contains_update(self, update: Update) -> bool:
        """Return whether exactly this update is folded, or in a pending sum."""
        device, is_told = update.device, fold_inputs(update)
        return self._told.get(device) == is_told or any(each.get(device) == is_told for each, _ in self._apart)

    def _contains_device(self, device: str) -> bool:
        return device in self._told or any(device in each for each, _ in self._apart)

    def __len__(self) -> int:
        return len(self._told)

    def consists_of(self, updates: Mapping[str, Update]) -> bool:
        return len(updates) == len(self) and all(self.contains_update(update) for update in updates.values())

    def is_part_of(self, updates: Mapping[str, Update]) -> bool:
        """Return whether the aggregate contains only these updates, in order if the order matters."""
        in_order = self._any_order or sorted(updates)[: len(self._told)] == list(self._told)
        return in_order and all(device in updates and self.contains_update(updates[device]) for device in self._told)

    def remaining_devices(self, updates: Mapping[str, Update]) -> list[str]:
        """Return the devices left to fold, sorted.

        Reset the aggregate first if it contains any other update.
        """
        if not self.is_part_of(updates):
            self.reset()
        return [device for device in sorted(updates) if device not in self._told]


def foldable_updates(rounds: JobState, any_order: bool) -> dict[str, Update]:
    """Return the accepted updates that may be in the running round's aggregate now, by device."""
    if any_order or rounds.phase == "closing":
        return dict(rounds.answered)
    first = min(rounds.asked, default="")  # without open tasks, the next device may have any name
    return {device: update for device, update in rounds.answered.items() if device < first}


def fold_inputs(update: Update) -> Told:
    return update.weight, update.metrics, update.bundles


def total_blob_bytes(update: Update) -> int:
    return sum(ref.size for ref in update.bundles.values())


def blob_hashes(updates: Iterable[Update]) -> set[str]:
    return {ref.sha256 for update in updates for ref in update.bundles.values()}
