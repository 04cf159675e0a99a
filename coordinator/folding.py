"""Incremental fold of a round's updates: each is folded once, as they arrive.

A fold that adds up (`core.adds_up`) takes them in any order, with the same bits. Any other takes them in sorted order
of devices, as far as they arrive so. Where one that is folded does not count in the end, or differs from the one that
does, the commit folds them all anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fedquilt import exact
from fedquilt.coordinator.facts import Rounds
from fedquilt.core import BlobRef, Update

Told = tuple[float, Mapping[str, float], Mapping[str, BlobRef]]  # weight, metrics and bundles: the inputs of a fold


class Folding:
    """Running sum of one round.

    Args:
        any_order: whether the fold adds up in any order of devices.
    """

    def __init__(self, any_order: bool = False) -> None:
        self._any_order = any_order
        self.forget()

    def forget(self) -> None:
        """Begin again, with the sum of nobody."""
        self._told: dict[str, Told] = {}  # by device, in the order in which they were folded
        self.total: Any = None  # sum of those; None: of nobody
        self._apart: list[tuple[dict[str, Told], Callable[[], Any]]] = []  # sums of others, each with what is in it

    def follows(self, device: str, answered: Mapping[str, Update], asked: Iterable[str]) -> bool:
        """Whether a device can be folded next, as if it came last.

        Args:
            device: id.
            answered: updates that count already.
            asked: devices whose updates may still come.
        """
        if self._any_order:
            return not self._has(device)
        return len(self._told) == len(answered) and self.foreseen(device) and device == min(asked, default="")

    def foreseen(self, device: str) -> bool:
        """Whether a device can be folded next, if all that sort before it are folded already."""
        return not self._has(device) if self._any_order else device > next(reversed(self._told), "")

    def take(self, device: str, told: Told, total: Any) -> None:
        """Store the sum including the update of a device."""
        self._told[device], self.total = told, total

    def put_apart(self, given: Mapping[str, Told], total: Callable[[], Any]) -> None:
        """Take a sum of several devices' updates that a worker of the simulation makes, before it is there.

        Args:
            given: the devices, each with what tells its update.
            total: waits for the sum; returns None if the worker could not make it: these are folded one by one then.
        """
        self._apart.append((dict(given), total))

    def gather(self, updates: Mapping[str, Update]) -> None:
        """Merge the sums of which exactly these updates are part; the others' are folded one by one."""
        for given, waits in self._apart:
            counts = all(device in updates and told(updates[device]) == each for device, each in given.items())
            if counts and (total := waits()) is not None:
                self.total = total if self.total is None else exact.join(self.total, total)
                self._told |= given
        self._apart = []

    def holds(self, update: Update) -> bool:
        """Whether exactly this update is folded."""
        device, is_told = update.device, told(update)
        return self._told.get(device) == is_told or any(each.get(device) == is_told for each, _ in self._apart)

    def _has(self, device: str) -> bool:
        return device in self._told or any(device in each for each, _ in self._apart)

    def __len__(self) -> int:
        return len(self._told)

    def holds_all(self, updates: Mapping[str, Update]) -> bool:
        """Whether all of these are folded, and nothing else."""
        return len(updates) == len(self) and all(self.holds(update) for update in updates.values())

    def fits(self, updates: Mapping[str, Update]) -> bool:
        """Whether the sum holds some of these updates, the first of them where order matters, and nothing else."""
        in_order = self._any_order or sorted(updates)[: len(self._told)] == list(self._told)
        return in_order and all(device in updates and self.holds(updates[device]) for device in self._told)

    def left(self, updates: Mapping[str, Update]) -> list[str]:
        """Devices left to fold, in sorted order; all of them if the sum has others, which is then forgotten."""
        if not self.fits(updates):
            self.forget()
        return [device for device in sorted(updates) if device not in self._told]


def ready(rounds: Rounds, any_order: bool) -> dict[str, Update]:
    """Updates that the running round's sum may hold already, by device."""
    if any_order or rounds.phase == "closing":
        return dict(rounds.answered)
    first = min(rounds.asked, default="")  # whoever is asked next may sort before anybody, if nobody is asked now
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
