"""Summary of a run and its costs, computed event by event. All views of a run derive from it.

The evaluation in a round is that of the state at the round's start, and is shown with the costs of all earlier rounds.
Joules are gross (all energy used meanwhile) and net (above idle power). A sum covers the metered tasks, whose number is
given too, and is None if nothing was measured. Errors are added up, because the errors of one meter are correlated: the
sum is a bound. Rejected updates are in no sum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from fedquilt import metrics
from fedquilt.console import units
from fedquilt.coordinator.rounds import events
from fedquilt.coordinator.rounds.job_state import JobConstants, JobState, apply_event
from fedquilt.coordinator.settings import JobSettings
from fedquilt.core import EvaluationSums, Update

COLUMNS: Final = (
    *("tasks", "metered", "declined", "examples", "wall_s", "energy_j", "net_j", "energy_error_j", "energy_source"),
    *("task_j", "example_j", "peak_bytes", "base_bytes", "down_bytes", "up_bytes"),
)


class CostLedger(msgspec.Struct, frozen=True):
    tasks: int = 0
    metered: int = 0  # number of metered tasks
    declined: int = 0
    staleness: int = 0  # sum over updates of the commits since their states, in buffered mode
    examples: float = 0  # weights of the updates, mostly their numbers of examples
    metered_examples: float = 0  # weights of the metered updates
    wall_s: float = 0
    energy_j: float | None = None
    idle_j: float | None = None
    energy_error_j: float | None = None
    meters: frozenset[str] = frozenset()  # sources of the joules
    peak_bytes: int | None = None
    base_bytes: int | None = None  # base memory of the task with the peak
    down_bytes: int = 0
    up_bytes: int = 0

    @property
    def net_j(self) -> float | None:
        return None if self.energy_j is None or self.idle_j is None else self.energy_j - self.idle_j

    @property
    def whole_j(self) -> float | None:
        return self.energy_j if self.metered == self.tasks else None

    @property
    def task_j(self) -> float | None:
        return None if self.energy_j is None else self.energy_j / self.metered

    @property
    def example_j(self) -> float | None:
        return None if self.energy_j is None or not self.metered_examples else self.energy_j / self.metered_examples

    @property
    def mean_staleness(self) -> float | None:
        return self.staleness / self.tasks if self.tasks else None

    @property
    def energy_source(self) -> str | None:
        return "; ".join(sorted(self.meters)) or None

    @property
    def energy_word(self) -> str:
        return describe_source(self.meters)

    def add_update(self, update: Update, staleness: int = 0) -> CostLedger:
        usage, ledger = update.usage, self
        if usage.energy_j is not None:
            first = not self.metered
            ledger = replace(
                ledger,
                metered=self.metered + 1,
                metered_examples=self.metered_examples + update.weight,
                energy_j=(self.energy_j or 0.0) + usage.energy_j,
                idle_j=_add_known(0.0 if first else self.idle_j, usage.idle_j),
                energy_error_j=_add_known(0.0 if first else self.energy_error_j, usage.energy_error_j),
                meters=self.meters | {str(usage.energy_source)},
            )
        if not self.tasks or (usage.peak_bytes or -1) > (self.peak_bytes or -1):
            ledger = replace(ledger, peak_bytes=usage.peak_bytes, base_bytes=usage.base_bytes)
        return replace(
            ledger,
            tasks=self.tasks + 1,
            staleness=self.staleness + staleness,
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


def format_contribution(cost: CostLedger, total: CostLedger) -> tuple[str, str]:
    """Return a device's share of all updates, and the mean staleness of its updates in commits, as text."""
    share = f"{100 * cost.tasks / total.tasks:.1f} %" if total.tasks else "-"
    return share, "-" if cost.mean_staleness is None else f"{cost.mean_staleness:.1f}"


def describe_source(meters: Collection[str]) -> str:
    """Return " predicted" if all joules are from a board's profile, " partly predicted" if some, else ""."""
    predicted = sum("profile " in meter for meter in meters)
    return "" if not predicted else " predicted" if predicted == len(meters) else " partly predicted"


def format_energy(energy_j: float, net_j: float | None, error_j: float | None) -> str:
    more = [] if net_j is None else [f"{format_number(net_j)} J above idle"]
    more += [] if error_j is None else [f"± {format_number(error_j)} J"]
    return f"{format_number(energy_j)} J" + (f" ({', '.join(more)})" if more else "")


@dataclass(frozen=True)
class PersonalScores:
    weighted: float  # mean over all examples
    mean: float  # mean over devices
    worst_decile: float  # mean of the worst tenth of the devices, at least one
    gap: float  # between the means of the best and the worst tenth of the devices
    deviation: float  # standard deviation over devices
    count: int  # number of devices, including devices of sites
    loss: float  # mean over all examples
    devices: dict[str, float]  # value of each device or site
    metric: str = "accuracy"  # a key of `fedquilt.metrics.METRICS`
    with_priors: float | None = None  # mean over all examples with class priors


@dataclass(frozen=True)
class ProgressPoint:
    rounds: int
    clock_s: float  # on the coordinator's clock: virtual in a simulation
    real_s: float  # from the log's dates, without pauses between a stop and the next event
    boards_s: float | None  # sum of the slowest task of each round, measured or predicted
    down_bytes: int
    up_bytes: int
    energy_j: float | None  # gross joules of all devices
    personal: PersonalScores | None = None  # None without an evaluation


@dataclass(frozen=True)
class TimeBreakdown:
    """Parts of a round's time, as means over the devices of the round. The parts add up to `lasted_s`."""

    round: int
    lasted_s: float
    compute_s: float
    transfer_s: float  # transfers, and the delay before the task starts
    wait_s: float  # wait for other devices or for the round to start


def summarise_round(total: EvaluationSums | None, updates: Iterable[Update]) -> PersonalScores | None:
    return summarise_evaluation(total, {update.device: update.evaluation for update in updates})


def summarise_evaluation(
    total: EvaluationSums | None, devices: Mapping[str, EvaluationSums | None]
) -> PersonalScores | None:
    main_metric, device_summary = metrics.main_metric(total), metrics.summarise_over_devices(total)
    if total is None or main_metric is None or device_summary is None:
        return None
    values = {
        device: device_metric[1]
        for device, sums in sorted(devices.items())
        if (device_metric := metrics.main_metric(sums)) is not None
    }
    return PersonalScores(
        weighted=main_metric[1],
        mean=device_summary.mean,
        worst_decile=device_summary.worst_decile,
        gap=device_summary.gap,
        deviation=device_summary.deviation,
        count=device_summary.devices,
        loss=math.fsum(total.loss) / total.examples,
        devices=values,
        metric=main_metric[0].name,
        with_priors=None if total.correct_with_priors is None else total.correct_with_priors / total.examples,
    )


class RoundSummary(msgspec.Struct, frozen=True):
    number: int = 0
    cost: CostLedger = CostLedger()
    slowest_s: float = 0.0  # longest reported task
    max_staleness: int = 0  # most commits since the state of an update, in buffered mode
    is_committed: bool = False
    # only for a committed round:
    rounds_before: int = 0  # number of earlier completed rounds
    selected: int = 0  # number of devices, in all attempts
    is_work: bool = False  # False for evaluation rounds and the final evaluation
    is_evaluation_round: bool = False
    duration_s: float = 0.0  # on the coordinator's clock
    real_s: float = 0.0  # from the log's dates, without pauses between a stop and the next event
    train_loss: float | None = None
    scores: PersonalScores | None = None  # without single devices, or None without an evaluation
    time_breakdown: TimeBreakdown | None = None  # None if no update was timed


class DeviceScore(NamedTuple):
    rounds: int  # completed before the device's last evaluation
    value: float  # value of the main metric
    examples: int  # held out on the device


class RunSummary(msgspec.Struct, frozen=True):
    """Immutable summary of a run up to one of its events, with totals by round and totals by device.

    The running round and its devices are not yet in `earlier_rounds` and `devices`: see `committed_rounds`,
    `round_costs` and `device_costs`.
    """

    state: JobState
    total: CostLedger = CostLedger()
    running: RoundSummary = RoundSummary()
    earlier_rounds: Mapping[int, RoundSummary] = {}
    devices: Mapping[str, CostLedger] = {}
    scores: Mapping[str, DeviceScore] = {}  # latest evaluation by device
    selected: frozenset[str] = frozenset()  # devices of the running round, in any of its attempts
    accepted_updates: tuple[events.UpdateAccepted, ...] = ()  # accepted and lost updates of the running round
    declining_devices: tuple[str, ...] = ()  # device of each decline or rejection in the running round
    final_evaluation_round: int | None = None  # number of the evaluation after the last round
    work_started_s: float = math.inf  # start of the running round, or of the latest resume in the round
    earlier_work_s: float = 0.0  # seconds of the running round before the last stop

    @staticmethod
    def from_job(job: JobSettings) -> RunSummary:
        return RunSummary(JobState(JobConstants.from_job(job)))

    def with_event(self, event: events.AnyEvent, time_s: float = 0.0, state: JobState | None = None) -> RunSummary:
        """Return the summary after an event. `state` is the job state after the event, if known."""
        state = apply_event(self.state, event, time_s) if state is None else state
        number = getattr(event, "round", self.running.number)
        summary = self if number == self.running.number else self._open_round(number)
        selected = summary.selected or state.pending_devices.union(state.accepted_updates)
        work_started_s, earlier_work_s = min(summary.work_started_s, time_s), summary.earlier_work_s
        match event:
            case events.CohortSelected():
                selected = selected.union(event.devices)
            case events.UpdateAccepted():
                summary = summary._add_update(event)
            case events.TaskDeclined() | events.UpdateRejected():
                running = replace(summary.running, cost=summary.running.cost.add_decline())
                summary = replace(
                    summary,
                    total=summary.total.add_decline(),
                    running=running,
                    declining_devices=(*summary.declining_devices, event.device),
                )
            case events.RoundCommitted():
                summary = summary._commit_round(event, earlier_work_s + time_s - work_started_s)
                selected, work_started_s, earlier_work_s = frozenset(), time_s, 0.0
            case events.JobEnded():
                work_started_s, earlier_work_s = math.inf, earlier_work_s + time_s - work_started_s
        final_evaluation_round = number if is_of_final_evaluation(state, event) else summary.final_evaluation_round
        return replace(
            summary,
            state=state,
            selected=selected,
            final_evaluation_round=final_evaluation_round,
            work_started_s=work_started_s,
            earlier_work_s=earlier_work_s,
        )

    @property
    def completed_rounds(self) -> int:
        """Number of committed rounds, without evaluation rounds and the final evaluation."""
        return sum(summary.is_work for summary in self.committed_rounds())

    @property
    def spent_epsilon(self) -> float | None:
        return None if self.state.constants.privacy is None else self.state.spent_epsilon

    def committed_rounds(self) -> list[RoundSummary]:
        return [summary for summary in (*self.earlier_rounds.values(), self.running) if summary.is_committed]

    def round_costs(self) -> dict[int, CostLedger]:
        costs = {summary.number: summary.cost for summary in (*self.earlier_rounds.values(), self.running)}
        return {number: cost for number, cost in sorted(costs.items()) if cost.tasks or cost.declined}

    def device_costs(self) -> dict[str, CostLedger]:
        costs = dict(self.devices)
        for acceptance in self.accepted_updates:
            device = acceptance.update.device
            costs[device] = costs.get(device, CostLedger()).add_update(acceptance.update, acceptance.staleness)
        for device in self.declining_devices:
            costs[device] = costs.get(device, CostLedger()).add_decline()
        return dict(sorted(costs.items()))

    def _open_round(self, number: int) -> RunSummary:
        earlier = {**self.earlier_rounds, self.running.number: self.running}
        running = earlier.get(number, RoundSummary(number))
        return replace(
            self,
            running=running,
            earlier_rounds=earlier,
            devices=self.device_costs(),
            accepted_updates=(),
            declining_devices=(),
        )

    def _add_update(self, event: events.UpdateAccepted) -> RunSummary:
        update, running = event.update, self.running
        slowest_s = max(running.slowest_s, update.usage.wall_s)
        max_staleness = max(running.max_staleness, event.staleness)
        cost = running.cost.add_update(update, event.staleness)
        running = replace(running, cost=cost, slowest_s=slowest_s, max_staleness=max_staleness)
        total = self.total.add_update(update, event.staleness)
        return replace(self, total=total, running=running, accepted_updates=(*self.accepted_updates, event))

    def _commit_round(self, event: events.RoundCommitted, real_s: float) -> RunSummary:
        completed_rounds = self.state.completed_rounds
        updates = [answer.update for answer in self.accepted_updates]
        device_scores = self.scores
        scores = None if event.is_evaluation_round else summarise_round(event.evaluation, updates)
        if scores is not None:
            held_out = {update.device: update.evaluation.examples for update in updates if update.evaluation}
            device_scores = {
                **device_scores,
                **{
                    name: DeviceScore(completed_rounds, value, held_out[name]) for name, value in scores.devices.items()
                },
            }
            scores = dataclasses.replace(scores, devices={})
        durations = [
            (acceptance.took_s, acceptance.update.usage.wall_s)
            for acceptance in self.accepted_updates
            if acceptance.took_s is not None
        ]
        running = replace(
            self.running,
            is_committed=True,
            rounds_before=completed_rounds,
            selected=len(self.selected),
            is_work=not event.is_evaluation_round and not self.state.is_work_done,
            is_evaluation_round=event.is_evaluation_round,
            duration_s=event.took_s,
            real_s=real_s,
            train_loss=event.metrics.get("loss"),
            scores=scores,
            time_breakdown=split_round_time(event.round, event.took_s, durations) if durations else None,
        )
        return replace(self, running=running, scores=device_scores)


def summarise_events(job: JobSettings, logged_events: Iterable[tuple[int, float, events.AnyEvent]]) -> RunSummary:
    summary = RunSummary.from_job(job)
    for _, time_s, event in logged_events:
        summary = summary.with_event(event, time_s)
    return summary


def is_of_final_evaluation(state: JobState, event: events.AnyEvent) -> bool:
    """Return whether an event belongs to the evaluation after the job's last round.

    `state` is the job state after the event.
    """
    if isinstance(event, events.RoundCommitted):
        return state.is_final_evaluation_done
    return state.is_work_done and not state.is_evaluation_round and getattr(event, "round", None) == state.round


def progress_points(summary: RunSummary) -> list[ProgressPoint]:
    """Return the progress before every committed round and after the last, or [] before the first commit."""
    points, point = list[ProgressPoint](), ProgressPoint(0, 0.0, 0.0, 0.0, 0, 0, 0.0)
    for round_summary in summary.committed_rounds():
        if not round_summary.is_evaluation_round:  # the next point includes the cost of an evaluation round
            points.append(dataclasses.replace(point, rounds=round_summary.rounds_before, personal=round_summary.scores))
            if not round_summary.is_work:
                return points
        cost, boards_s, energy_j = round_summary.cost, point.boards_s, point.energy_j
        if cost.tasks:
            boards_s = None if boards_s is None else boards_s + round_summary.slowest_s
            energy_j = None if energy_j is None or cost.whole_j is None else energy_j + cost.whole_j
        point = ProgressPoint(
            rounds=round_summary.rounds_before + round_summary.is_work,
            clock_s=point.clock_s + round_summary.duration_s,
            real_s=point.real_s + round_summary.real_s,
            boards_s=boards_s,
            down_bytes=point.down_bytes + cost.down_bytes,
            up_bytes=point.up_bytes + cost.up_bytes,
            energy_j=energy_j,
        )
    return [*points, point] if points else []


def energy_per_point_j(points: Sequence[ProgressPoint]) -> float | None:
    """Return the gross joules per percentage point gained from first to best evaluation, or None.

    None means that the main metric is not a share, that there was no gain, or that joules are unknown.
    """
    evaluated_points = [(point.energy_j, point.personal) for point in points if point.personal is not None]
    if not evaluated_points or not metrics.METRICS[evaluated_points[0][1].metric].share:
        return None
    (first_j, first), (best_j, best) = evaluated_points[0], max(evaluated_points, key=lambda check: check[1].weighted)
    percent = 100 * (best.weighted - first.weighted)
    if percent <= 0 or first_j is None or best_j is None or best_j <= first_j:
        return None
    return (best_j - first_j) / percent


def split_round_time(round: int, round_time_s: float, durations: Sequence[tuple[float, float]]) -> TimeBreakdown:
    """Return the mean times of a round's devices in computation, transfers and waits.

    `durations` has, for each device, the seconds from its selection to its update and the seconds of its task.
    """
    lasted_s = max(round_time_s, *(update_time_s for update_time_s, _ in durations))
    compute_s = sum(wall_s for _, wall_s in durations) / len(durations)
    mean_s = sum(update_time_s for update_time_s, _ in durations) / len(durations)
    return TimeBreakdown(round, lasted_s, compute_s, max(mean_s - compute_s, 0.0), lasted_s - mean_s)
