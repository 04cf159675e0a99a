"""Progress of a run, its cost and its use of time, computed from its events.

The evaluation of a round is that of the state at its start, and costs what all earlier rounds have cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedquilt import metrics
from fedquilt.coordinator.rounds.events import AnyEvent, JobEnded, RoundCommitted, UpdateAccepted
from fedquilt.coordinator.views import costs
from fedquilt.core import EvaluationSums, Update

Dated = tuple[float, AnyEvent]  # wall-clock seconds, and the fact


@dataclass(frozen=True)
class PersonalScores:
    weighted: float  # over all their examples
    mean: float  # over devices, however many examples each has
    worst_decile: float  # mean of the tenth of the devices, at least one, for which it is worst
    deviation: float  # standard deviation over devices
    count: int  # number of devices, those of sites among them
    loss: float  # over all their examples
    devices: dict[str, float]  # of devices and sites
    metric: str = "accuracy"  # a key of `fedquilt.metrics.KNOWN`


@dataclass(frozen=True)
class ProgressPoint:
    """State of a run after some rounds, with their total costs, or None where unknown."""

    rounds: int
    clock_s: float  # on the coordinator's clock: virtual in a simulation
    real_s: float  # from the log's dates, without pauses between a stop and the next fact
    boards_s: (
        float | None
    )  # the sum of the slowest task of each round, as its board tells: by its profile if it is simulated
    down_bytes: int
    up_bytes: int
    energy_j: float | None  # gross, of all boards
    personal: PersonalScores | None = None  # None without an evaluation


@dataclass(frozen=True)
class TimeBreakdown:
    """Time of a round by use, as means over its devices. The parts add up to `lasted_s`."""

    round: int
    lasted_s: float
    compute_s: float
    transfer_s: float  # down and up, and until the task began: a device reports them as one
    wait_s: float  # for others, or for the round to begin


def summarise_round(total: EvaluationSums | None, updates: Iterable[Update]) -> PersonalScores | None:
    return summarise_evaluation(total, {update.device: update.evaluation for update in updates})


def summarise_evaluation(
    total: EvaluationSums | None, devices: Mapping[str, EvaluationSums | None]
) -> PersonalScores | None:
    main, over = metrics.main_metric(total), metrics.summarise_over_devices(total)
    if total is None or main is None or over is None:
        return None
    known = {
        device: found[1] for device, each in sorted(devices.items()) if (found := metrics.main_metric(each)) is not None
    }
    return PersonalScores(
        weighted=main[1],
        mean=over.mean,
        worst_decile=over.worst_decile,
        deviation=over.deviation,
        count=over.devices,
        loss=math.fsum(total.loss) / total.examples,
        devices=known,
        metric=main[0].name,
    )


def progress_points(facts: Sequence[Dated], rounds: int) -> list[ProgressPoint]:
    """Return the progress of a run before every committed round and after the last round.

    Args:
        facts: All events of the run, with their times.
        rounds: The greatest number of rounds of the job, without the final evaluation.
    """
    answers = _updates_by_round(facts)
    found: list[ProgressPoint] = []
    clock_s, real_s, broken_off_s, down, up = 0.0, 0.0, 0.0, 0, 0
    boards_s: float | None = 0.0
    energy_j: float | None = 0.0
    since, over, extra = (facts[0][0] if facts else 0.0), False, 0
    for at, fact in facts:
        since = min(since, at)
        if isinstance(fact, JobEnded):
            broken_off_s, since = broken_off_s + at - since, math.inf  # until the run continues, if it does
        if not isinstance(fact, RoundCommitted):
            continue
        updates = [answer.update for answer in answers.get(fact.round, ())]
        counted, checked = fact.round - extra, summarise_round(fact.evaluation, updates)
        if fact.settled:  # its cost is in the next point's sums
            extra += 1
        else:
            found.append(ProgressPoint(counted, clock_s, real_s, boards_s, down, up, energy_j, checked))
            if over or counted >= rounds:
                return found
        clock_s, real_s = clock_s + fact.took_s, real_s + broken_off_s + at - since
        broken_off_s, since, over = 0.0, at, fact.finished
        taken = costs.sum_costs(updates)
        down, up = down + taken.down_bytes, up + taken.up_bytes
        if updates:
            slowest_s = max(update.usage.wall_s for update in updates)
            boards_s = None if boards_s is None else boards_s + slowest_s
            whole_j = taken.energy_j if taken.metered == taken.tasks else None
            energy_j = None if energy_j is None or whole_j is None else energy_j + whole_j
    if found:
        found.append(ProgressPoint(found[-1].rounds + 1, clock_s, real_s, boards_s, down, up, energy_j))
    return found


def count_completed_rounds(facts: Iterable[AnyEvent], rounds: int) -> int:
    count, over = 0, False
    for fact in facts:
        if isinstance(fact, RoundCommitted) and not fact.settled and not over and count < rounds:
            count, over = count + 1, fact.finished
    return count


def split_round_times(facts: Sequence[Dated]) -> list[TimeBreakdown]:
    answers = _updates_by_round(facts)
    found = []
    for _, fact in facts:
        if not isinstance(fact, RoundCommitted):
            continue
        timed = [
            (answer.took_s, answer.update.usage.wall_s)
            for answer in answers.get(fact.round, ())
            if answer.took_s is not None
        ]
        if not timed:
            continue
        found.append(split_round_time(fact.round, fact.took_s, timed))
    return found


def split_round_time(round: int, took_s: float, timed: Sequence[tuple[float, float]]) -> TimeBreakdown:
    """Return the use of time in a round.

    Args:
        round: The number of the round.
        took_s: The duration measured by the coordinator, in seconds.
        timed: For each device, at least one, the seconds from selection to update and the seconds spent on the task.
    """
    lasted_s = max(took_s, *(answered_s for answered_s, _ in timed))
    compute_s = sum(wall_s for _, wall_s in timed) / len(timed)
    mean_s = sum(answered_s for answered_s, _ in timed) / len(timed)
    return TimeBreakdown(round, lasted_s, compute_s, max(mean_s - compute_s, 0.0), lasted_s - mean_s)


def _updates_by_round(facts: Sequence[Dated]) -> dict[int, list[UpdateAccepted]]:
    found: dict[int, list[UpdateAccepted]] = {}
    for _, fact in facts:
        if isinstance(fact, UpdateAccepted):
            found.setdefault(fact.round, []).append(fact)
    return found
