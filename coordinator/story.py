"""What has happened, in plain sentences: `fedquilt run` while it happens, `fedquilt logs` afterwards."""

from __future__ import annotations

import time
from typing import Any

from fedquilt.coordinator import eligible, ledger
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
            return [f"round {fact.round}{again}: asked {', '.join(fact.devices)}{limit}", *fact.coverage]
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
        net_j = None if usage.idle_j is None else usage.energy_j - usage.idle_j
        parts.append(ledger.joules(usage.energy_j, net_j, usage.energy_error_j))
    if usage.peak_bytes is not None:
        parts.append(f"peak {usage.peak_bytes / 1e6:.0f} MB")
    parts.append(f"{usage.down_bytes / 1e6:.2f} MB down, {usage.up_bytes / 1e6:.2f} MB up")
    return ", ".join(parts)


def summary(row: Row, store: Store) -> dict[str, Any]:
    """One line of `fedquilt ls`."""
    facts = [fact for _, _, fact in store.facts(row.id)]
    rounds = sum(isinstance(fact, Committed) for fact in facts)
    taken = ledger.account(facts)
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.created))
    return {
        "run": row.id,
        "status": row.status,
        "method": row.job.method,
        "rounds": rounds,
        "began": began,
        "energy_j": taken.whole.energy_j,
        "net_j": taken.whole.net_j,
        "energy_error_j": taken.whole.energy_error_j,
        "task_j": taken.whole.task_j,
        "example_j": taken.whole.example_j,
        "point_j": taken.point_j,
        "round_j": [each.energy_j for each in taken.rounds.values()],
        "tasks": taken.whole.tasks,
        "metered": taken.whole.metered,
    }


def line(row: dict[str, Any]) -> str:
    """A summary for people."""
    joules = "-" if row["energy_j"] is None else ledger.short(row["energy_j"])
    return "{run:32} {status:9} {method:12} {rounds:>6} rounds  {joules:>10} J  {began}".format(joules=joules, **row)
