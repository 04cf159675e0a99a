"""Energy, traffic, time and memory used by a job, computed from its events.

Joules are gross (all energy used meanwhile) and net (above idle power). A sum covers the metered tasks, whose number is
given too, and is None if nothing was measured. Errors are added up, because the errors of one meter are correlated: the
sum is a bound. Rejected updates are in no sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedquilt import metrics
from fedquilt.coordinator.rounds.events import AnyEvent, RoundCommitted, TaskDeclined, UpdateAccepted, UpdateRejected
from fedquilt.core import Update
from fedquilt.metrics import ACCURACY, Metric


@dataclass(frozen=True)
class CostLedger:
    tasks: int = 0
    metered: int = 0  # of them
    declined: int = 0
    examples: float = 0.0  # weights of the updates, mostly their numbers of examples
    wall_s: float = 0.0
    energy_j: float | None = None
    net_j: float | None = None
    energy_error_j: float | None = None
    energy_source: str | None = None  # of the metered tasks, each source once
    task_j: float | None = None  # gross, of a metered task on average
    example_j: float | None = None
    peak_bytes: int | None = None
    base_bytes: int | None = None  # of the task with that peak
    down_bytes: int = 0
    up_bytes: int = 0


def sum_costs(updates: Sequence[Update], declined: int = 0) -> CostLedger:
    usages = [update.usage for update in updates]
    metered = [update for update in updates if update.usage.energy_j is not None]
    energy_j = _sum_known([update.usage.energy_j for update in metered])
    idle_j = _sum_known([update.usage.idle_j for update in metered])
    examples = sum(update.weight for update in metered)
    highest = max(usages, key=lambda usage: usage.peak_bytes or -1, default=None)
    return CostLedger(
        tasks=len(updates),
        metered=len(metered),
        declined=declined,
        examples=sum(update.weight for update in updates),
        wall_s=sum(usage.wall_s for usage in usages),
        energy_j=energy_j,
        net_j=None if energy_j is None or idle_j is None else energy_j - idle_j,
        energy_error_j=_sum_known([update.usage.energy_error_j for update in metered]),
        energy_source="; ".join(sorted({str(update.usage.energy_source) for update in metered})) or None,
        task_j=None if energy_j is None else energy_j / len(metered),
        example_j=None if energy_j is None or not examples else energy_j / examples,
        peak_bytes=highest.peak_bytes if highest else None,
        base_bytes=highest.base_bytes if highest else None,
        down_bytes=sum(update.down_bytes for update in updates),
        up_bytes=sum(update.up_bytes for update in updates),
    )


def _sum_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


@dataclass(frozen=True)
class EvaluationCost:
    round: int
    value: float  # of `metric`; accuracy runs from 0 to 1
    energy_j: float | None  # gross; None: some task was not metered
    metric: Metric = ACCURACY


@dataclass(frozen=True)
class JobCost:
    whole: CostLedger
    rounds: dict[int, CostLedger]
    devices: dict[str, CostLedger]
    checks: tuple[EvaluationCost, ...] = ()
    point_j: float | None = None  # gross, for each per cent of the main metric from the first check to the best


def compute_job_cost(facts: Iterable[AnyEvent]) -> JobCost:
    updates: list[Update] = []
    checked: dict[int, tuple[Metric, float]] = {}
    refused: dict[str, int] = defaultdict(int)
    refused_in: dict[int, int] = defaultdict(int)
    for fact in facts:
        if isinstance(fact, UpdateAccepted):
            updates.append(fact.update)
        elif isinstance(fact, TaskDeclined | UpdateRejected):
            refused[fact.device] += 1
            refused_in[fact.round] += 1
        elif isinstance(fact, RoundCommitted) and (main := metrics.main_metric(fact.evaluation)) is not None:
            checked[fact.round] = main
    by_device, by_round = defaultdict(list), defaultdict(list)
    for update in updates:
        by_device[update.device].append(update)
        by_round[update.round].append(update)
    rounds = {n: sum_costs(by_round[n], refused_in[n]) for n in sorted({*by_round, *refused_in})}
    devices = {name: sum_costs(by_device[name], refused[name]) for name in sorted({*by_device, *refused})}
    checks = tuple(
        EvaluationCost(n, value, _energy_before_round_j(rounds, n), metric)
        for n, (metric, value) in sorted(checked.items())
    )
    return JobCost(sum_costs(updates, sum(refused.values())), rounds, devices, checks, _energy_per_point_j(checks))


def _energy_before_round_j(rounds: dict[int, CostLedger], round: int) -> float | None:
    earlier = [ledger for n, ledger in rounds.items() if n < round]
    if any(ledger.metered < ledger.tasks for ledger in earlier):
        return None
    return sum(ledger.energy_j or 0.0 for ledger in earlier)


def _energy_per_point_j(checks: Sequence[EvaluationCost]) -> float | None:
    if not checks or not checks[0].metric.share:
        return None
    first, best = checks[0], max(checks, key=lambda check: check.value)
    points = 100 * (best.value - first.value)
    if points <= 0 or first.energy_j is None or best.energy_j is None or best.energy_j <= first.energy_j:
        return None
    return (best.energy_j - first.energy_j) / points


def format_number(value: float) -> str:
    """Return a number of joules as text: two decimals from 1 on, else three digits."""
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def format_energy(energy_j: float, net_j: float | None, error_j: float | None) -> str:
    more = [] if net_j is None else [f"{format_number(net_j)} J above idle"]
    more += [] if error_j is None else [f"± {format_number(error_j)} J"]
    return f"{format_number(energy_j)} J" + (f" ({', '.join(more)})" if more else "")


def format_energy_summary(found: JobCost) -> list[str]:
    whole = found.whole
    if whole.energy_j is None or whole.task_j is None:
        return []
    parts = [f"{format_number(whole.task_j)} J per task"]
    if found.rounds:
        parts.append(f"{format_number(whole.energy_j / len(found.rounds))} J per round")
    if whole.example_j is not None:
        parts.append(f"{format_number(whole.example_j)} J per example")
    if found.point_j is not None:
        parts.append(f"{format_number(found.point_j)} J per point of {found.checks[0].metric.title}")
    took = format_energy(whole.energy_j, whole.net_j, whole.energy_error_j)
    tasks = f"{whole.metered} task{'s' * (whole.metered != 1)}"
    some = "" if whole.metered == whole.tasks else f" of {whole.tasks}; the others were not metered"
    return [f"energy: {took} for {tasks}{some}: {', '.join(parts)}", f"energy measured by: {whole.energy_source}"]
