"""What has happened, in plain sentences: `fedquilt run` while it happens, `fedquilt logs` afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fedquilt.coordinator import eligible
from fedquilt.coordinator.rounds import (
    Answered,
    AnyFact,
    Asked,
    Closed,
    Committed,
    Declined,
    Ended,
    Extended,
    Rejected,
    Reopened,
    Resumed,
    Started,
    Surveyed,
)
from fedquilt.coordinator.store import Row, Store
from fedquilt.core import Usage


def sentences(fact: AnyFact) -> list[str]:
    """One fact, in sentences; the first says what happened, the rest why."""
    match fact:
        case Started():
            return ["started"]
        case Surveyed():
            changes = [f"{', '.join(devices)}: {eligible.REASONS.get(c, c)}" for c, devices in fact.passed.items()]
            can = [f"{', '.join(fact.eligible)} can be asked"] if fact.eligible else []
            return [f"round {fact.round}: {'; '.join([*can, *changes]) or 'joules for a FLOP are known anew'}"]
        case Asked():
            again = f", attempt {fact.attempt + 1}" if fact.attempt else ""
            limit = f"; deadline {fact.deadline_s:.0f} s, predicted" if fact.deadline_s is not None else ""
            return [f"round {fact.round}{again}: asked {', '.join(fact.devices)}{limit}"]
        case Declined():
            return [f"round {fact.round}: {fact.device} declined ({fact.code}): {fact.reason}"]
        case Answered():
            return [f"round {fact.round}: {fact.update.device} answered {took(fact.update.usage)}"]
        case Rejected():
            return [f"round {fact.round}: {fact.device}'s update was refused: {fact.reason}"]
        case Closed():
            return [f"round {fact.round}: closed"]
        case Extended():
            return [f"round {fact.round}: no quorum by the deadline, going on until there is one"]
        case Reopened():
            return [f"round {fact.round}: no quorum by the deadline, trying again"]
        case Committed():
            told = {n: v for n, v in fact.metrics.items() if n.startswith("check.") or not fact.notes}
            shown = ", ".join(f"{name} {value:.4g}" for name, value in sorted(told.items()))
            return [f"round {fact.round}: committed" + (f" ({shown})" if shown else ""), *fact.notes]
        case Ended():
            return [f"{fact.status}" + (f": {fact.reason}" if fact.reason else "")]
        case Resumed():
            return ["resumed"]


def took(usage: Usage) -> str:
    """What a task took; what was not measured is left out."""
    parts = [f"in {usage.wall_s:.2f} s"]
    if usage.energy_j is not None:
        parts.append(f"{usage.energy_j:.2f} J")
    if usage.peak_bytes is not None:
        parts.append(f"peak {usage.peak_bytes / 1e6:.0f} MB")
    parts.append(f"{usage.down_bytes / 1e6:.2f} MB down, {usage.up_bytes / 1e6:.2f} MB up")
    return ", ".join(parts)


@dataclass
class Ledger:
    """What one device has put into a job so far. None: no device ever measured it."""

    tasks: int = 0
    declined: int = 0
    wall_s: float = 0.0
    energy_j: float | None = None
    energy_source: str | None = None
    peak_bytes: int | None = None
    base_bytes: int | None = None
    down_bytes: int = 0
    up_bytes: int = 0

    def add(self, usage: Usage) -> None:
        self.tasks += 1
        self.wall_s += usage.wall_s
        self.down_bytes += usage.down_bytes
        self.up_bytes += usage.up_bytes
        if usage.energy_j is not None:
            self.energy_j = (self.energy_j or 0.0) + usage.energy_j
            self.energy_source = usage.energy_source
        if usage.peak_bytes is not None and usage.peak_bytes > (self.peak_bytes or -1):
            self.peak_bytes, self.base_bytes = usage.peak_bytes, usage.base_bytes


def ledgers(facts: Iterable[AnyFact]) -> dict[str, Ledger]:
    """Every device's ledger, from a job's facts."""
    found: dict[str, Ledger] = {}
    for fact in facts:
        if isinstance(fact, Answered):
            found.setdefault(fact.update.device, Ledger()).add(fact.update.usage)
        elif isinstance(fact, Declined | Rejected):
            found.setdefault(fact.device, Ledger()).declined += 1
    return found


def summary(row: Row, store: Store) -> dict[str, Any]:
    """One line of `fedquilt ls`."""
    rounds = sum(isinstance(fact, Committed) for _, _, fact in store.facts(row.id))
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.created))
    return {"run": row.id, "status": row.status, "method": row.job.method, "rounds": rounds, "began": began}
