"""Energy, traffic, time and memory used by a job, computed from its events.

Joules are gross (all energy used meanwhile) and net (above idle power). A sum covers the metered tasks, whose number is
given too, and is None if nothing was measured. Errors are added up, because the errors of one meter are correlated: the
sum is a bound. Rejected updates are in no sum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import reduce
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from fedquilt.console import units
from fedquilt.core import Update

COLUMNS: Final = (
    *("tasks", "metered", "declined", "examples", "wall_s", "energy_j", "net_j", "energy_error_j", "energy_source"),
    *("task_j", "example_j", "peak_bytes", "base_bytes", "down_bytes", "up_bytes"),
)


class CostLedger(msgspec.Struct, frozen=True):
    tasks: int = 0
    metered: int = 0  # of them
    declined: int = 0
    examples: float = 0  # weights of the updates, mostly their numbers of examples
    metered_examples: float = 0  # of the metered tasks
    wall_s: float = 0
    energy_j: float | None = None
    idle_j: float | None = None
    energy_error_j: float | None = None
    meters: frozenset[str] = frozenset()  # sources of the joules
    peak_bytes: int | None = None
    base_bytes: int | None = None  # of the task with that peak
    down_bytes: int = 0
    up_bytes: int = 0

    @property
    def net_j(self) -> float | None:
        return None if self.energy_j is None or self.idle_j is None else self.energy_j - self.idle_j

    @property
    def whole_j(self) -> float | None:
        """Gross joules of all tasks, or None if one of them was not metered."""
        return self.energy_j if self.metered == self.tasks else None

    @property
    def task_j(self) -> float | None:
        """Gross joules of a metered task on average."""
        return None if self.energy_j is None else self.energy_j / self.metered

    @property
    def example_j(self) -> float | None:
        return None if self.energy_j is None or not self.metered_examples else self.energy_j / self.metered_examples

    @property
    def energy_source(self) -> str | None:
        """Meters of the metered tasks, each once."""
        return "; ".join(sorted(self.meters)) or None

    @property
    def energy_word(self) -> str:
        return describe_source(self.meters)

    def add_update(self, update: Update) -> CostLedger:
        usage, found = update.usage, self
        if usage.energy_j is not None:
            first = not self.metered
            found = replace(
                found,
                metered=self.metered + 1,
                metered_examples=self.metered_examples + update.weight,
                energy_j=(self.energy_j or 0.0) + usage.energy_j,
                idle_j=_add_known(0.0 if first else self.idle_j, usage.idle_j),
                energy_error_j=_add_known(0.0 if first else self.energy_error_j, usage.energy_error_j),
                meters=self.meters | {str(usage.energy_source)},
            )
        if not self.tasks or (usage.peak_bytes or -1) > (self.peak_bytes or -1):
            found = replace(found, peak_bytes=usage.peak_bytes, base_bytes=usage.base_bytes)
        return replace(
            found,
            tasks=self.tasks + 1,
            examples=self.examples + update.weight,
            wall_s=self.wall_s + usage.wall_s,
            down_bytes=self.down_bytes + update.down_bytes,
            up_bytes=self.up_bytes + update.up_bytes,
        )

    def to_table(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in COLUMNS}

    def add_decline(self) -> CostLedger:
        return replace(self, declined=self.declined + 1)


def sum_costs(updates: Iterable[Update]) -> CostLedger:
    return reduce(CostLedger.add_update, updates, CostLedger())


def _add_known(total: float | None, value: float | None) -> float | None:
    return None if total is None or value is None else total + value


def format_number(value: float) -> str:
    """Return a number of joules as text: two decimals from 1 on, else three digits."""
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def format_joules(value: float) -> str:
    """Return joules as text in three digits: "12 J", "1.25 kJ"."""
    scale, prefix = units.select_prefix(value)
    return f"{value / scale:.3g} {prefix}J"


def describe_source(meters: Collection[str]) -> str:
    """Return " predicted" if a board's profile gives the joules, " partly predicted" if only some, else ""."""
    predicted = sum("profile " in meter for meter in meters)
    return "" if not predicted else " predicted" if predicted == len(meters) else " partly predicted"


def format_energy(energy_j: float, net_j: float | None, error_j: float | None) -> str:
    more = [] if net_j is None else [f"{format_number(net_j)} J above idle"]
    more += [] if error_j is None else [f"± {format_number(error_j)} J"]
    return f"{format_number(energy_j)} J" + (f" ({', '.join(more)})" if more else "")
