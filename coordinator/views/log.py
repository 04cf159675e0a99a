"""What has happened, in plain sentences: `fedquilt run` while it happens, `fedquilt logs` afterwards."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedquilt import units
from fedquilt.coordinator import eligibility, rounds
from fedquilt.coordinator.facts import (
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
    Rounds,
    Started,
    Surveyed,
)
from fedquilt.coordinator.store import Row, Store, Unreadable
from fedquilt.coordinator.views import costs, progress
from fedquilt.core import JobError, Usage


def closing(state: Rounds, fact: AnyFact) -> bool:
    """Whether a fact belongs to the evaluation after the last round; `state` is as of after it."""
    if isinstance(fact, Committed):
        return state.checked
    return state.over and getattr(fact, "round", None) == state.round


def sentences(fact: AnyFact, closing: bool = False) -> list[str]:
    """One fact, in sentences; the first says what happened, the rest why. `closing`: see there.

    A round's evaluation is of the state that its devices got, so it is told with the round that this state came from.
    """
    first, *more = _sentences(fact, closing)
    return [first.replace(f"round {getattr(fact, 'round', '')}", "closing evaluation", 1) if closing else first, *more]


def waiting(state: Rounds, engines: Sequence[str], able: Collection[str]) -> str | None:
    """What the running round cannot go on without, in a sentence; None: somebody is at work, or nothing runs.

    Args:
        able: who is online and has one of the engines.
    """
    if not rounds.idle(state, able):
        return None
    if state.asked:
        return f"{_names(sorted(state.asked))}: offline"
    barred = [code for device, code in state.passed.items() if device in able]
    alone = "".join(f", {barred.count(code)} left alone ({code})" for code in sorted(set(barred)))
    declined = f", {len(state.declined)} of them declined" if state.declined else ""
    there = f"devices that run {' or '.join(engines)}: {len(able)} online{alone}{declined}"
    if state.phase == "selecting":
        return f"{there}, at least {rounds.needed(state)} needed"
    want = rounds.wanted(state, set(able) - state.passed.keys())
    least = rounds.quorum(state, want)
    return f"{there}, {len(state.answered)} of {want} updates are here, at least {least} needed"


def _names(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _shown(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in sorted(metrics.items()))


def _sentences(fact: AnyFact, closing: bool) -> list[str]:
    match fact:
        case Started():
            return ["started"]
        case Surveyed():
            changes = [f"{', '.join(devices)}: {eligibility.told(c)}" for c, devices in fact.passed.items()]
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
            own = {name: value for name, value in fact.metrics.items() if not name.startswith("check.")}
            checked = {name: value for name, value in fact.metrics.items() if name not in own}
            shown = [_shown(own)] if own and not fact.notes else []
            if checked and closing:
                shown.append(_shown(checked))
            elif checked:
                shown.append(
                    f"{'at the start' if not fact.round else f'after round {fact.round - 1}'}: {_shown(checked)}"
                )
            return [f"round {fact.round}: committed" + (f" ({'; '.join(shown)})" if shown else ""), *fact.notes]
        case Ended():
            return [f"{fact.status}" + (f": {fact.reason}" if fact.reason else "")]
        case Resumed():
            return ["resumed"]


def took(usage: Usage) -> str:
    """What a task took; what was not measured is left out."""
    scale, prefix = units.unit(usage.wall_s) if usage.wall_s < 0.1 else (1.0, "")
    parts = [f"in {usage.wall_s / scale:.2f} {prefix}s"]
    if usage.energy_j is not None:
        net_j = None if usage.idle_j is None else usage.energy_j - usage.idle_j
        parts.append(costs.joules(usage.energy_j, net_j, usage.energy_error_j))
    if usage.peak_bytes is not None:
        parts.append(f"peak {units.size(usage.peak_bytes)}")
    parts.append(f"{units.size(usage.down_bytes)} down, {units.size(usage.up_bytes)} up")
    return ", ".join(parts)


def summary(row: Row | Unreadable, store: Store) -> dict[str, Any]:
    """One line of `fedquilt ls`; of a run that cannot be read, what is known, and under "problem" why."""
    facts: list[AnyFact] = []
    problem = row.reason if isinstance(row, Unreadable) else None
    if isinstance(row, Row):
        try:
            facts = [fact for _, _, fact in store.facts(row.id)]
        except JobError as error:
            problem = str(error)
    taken = costs.account(facts)
    return {
        "run": row.id,
        "status": store.standing(row) if isinstance(row, Row) else row.status,
        "method": row.job.method if isinstance(row, Row) else None,
        "rounds": progress.done(facts, row.job.rounds) if isinstance(row, Row) and problem is None else None,
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.created)),
        "problem": problem,
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
    if row["problem"] is not None:
        return "{run:38} {status:11} cannot be read: {problem}".format(**row)
    joules = "-" if row["energy_j"] is None else costs.short(row["energy_j"])
    return "{run:38} {status:11} {method:12} {rounds:>6} rounds  {joules:>10} J  {began}".format(joules=joules, **row)


def _short(value: float) -> str:
    """Four digits, and of a count all."""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
