"""Deadline of a round, computed when the round opens from device profiles and earlier durations.

Pure functions of `TaskDuration`, the durations of each device's recent tasks, and `DeviceWorkload`, the work of each
selected device. Policies, `[cohort] deadline`:
    fixed      `deadline_s`
    predicted  Per device, the time that its profile predicts at the fastest operating point, times the ratio of its
               recent tasks to that prediction, at the 90th percentile. The deadline is a high percentile of these
               times over the cohort, plus SLACK. Without a profile, the device's own pace is used
    paper      FedStitch (arXiv 2409.07202), section 4.4: the slowest time of the last round, d = max t_i, times the
               ratio of work, which the paper expresses by the depth factor mu and the pool factor sigma. This
               deadline never falls once devices slow down until they just meet it. Kept for comparison
    energy     The time that needs the fewest joules of the cohort, idle energy included. Where the method allows it,
               epochs move to devices that need fewer joules: `energy_scheduling`. Times are those of "predicted", at
               every operating point. A device without known joules keeps its epochs and its time. In the first
               round, or without profiles, the policy is "predicted"

A duration runs from the selection of the device to the arrival of its update, transfers included. With a profile, the
time outside the task is separate, as it does not grow with the work. The time of a task is compared with the profile
at the operating point that was used, so that devices which slow down to meet a deadline do not lengthen the next
deadline. No prediction exceeds `deadline_s`. If a predicted deadline passes without a quorum, the round continues
until there is a quorum, or until `deadline_s`. So a prediction can end a round earlier than "fixed", and never fails a
round that "fixed" would complete.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from fedquilt.coordinator.rounds import energy_scheduling
from fedquilt.coordinator.settings import CohortSettings
from fedquilt.core import OperatingPoint, Profile, Update, WorkEstimate
from fedquilt.core.messages import ADDITIVE_FIELDS
from fedquilt.costs import cost_model

SLACK = 0.5  # share added with "predicted"
MOST_WORK = 2.0  # most epochs of a device with "energy", as a multiple of the job's
RECENT = 5  # rounds remembered of each device
PERCENTILE = 0.9  # share of the devices asked that is expected in time, or the quorum if that is more
FLOOR_S = 10.0  # messages, claims and small blobs take some time even without computation
Z90 = statistics.NormalDist().inv_cdf(0.9)
OWN_SPREAD = 0.2  # of log(time / profile), between a device's rounds: assumed, and worth PRIOR observations
FLEET_SPREAD = 0.5  # likewise between devices, and of a profile without any observation
PRIOR = 2
ASSUMED = cost_model.LinkCost(bytes_per_s=1e6)  # until the fleet has shown what transfers take


class TaskDuration(NamedTuple):
    round: int
    seconds: float  # from request to the arrival of its update
    work: float  # `DeviceWorkload.work_amount` of its task
    busy_s: float = 0.0  # part of `seconds` within the task itself
    expected_s: float | None = None  # duration predicted by the board's profile, at the point at which the task ran
    examples: int = 1  # of the device's own, that `expected_s` counts
    bytes: int = 0  # of blobs, down and up

    @property
    def rest_s(self) -> float:
        return max(self.seconds - self.busy_s, 0.0)


class DeviceWorkload(NamedTuple):
    work: WorkEstimate = WorkEstimate()
    profile: Profile | None = None
    bytes: int = 0  # of blobs, some of which the device may have
    epochs: int = 0  # in `work`, where the method lets devices train for unequal numbers of them; 0: it does not
    epoch: WorkEstimate = WorkEstimate()  # one of them, the only part of `work` that grows with their number

    def with_epochs(self, epochs: int) -> DeviceWorkload:
        more = epochs - self.epochs
        sums = {name: getattr(self.work, name) + more * getattr(self.epoch, name) for name in ADDITIVE_FIELDS}
        return self._replace(work=msgspec.structs.replace(self.work, **sums), epochs=epochs)

    @property
    def work_amount(self) -> float:
        """Work as one number, or 1 if the method predicts no work, so that all rounds count alike."""
        return work_amount(self.work) or 1.0

    def predict_duration_s(self, examples: int = 1) -> float | None:
        return predict_duration_s(self.work, self.profile, examples=examples)


class MemoryShortage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requirements of a task for which a device lacked memory. 0 and None mean unknown."""

    peak_bytes: int = 0
    flops: float = 0.0
    budget_bytes: int | None = None

    @staticmethod
    def from_workload(ask: DeviceWorkload) -> MemoryShortage:
        return MemoryShortage(
            ask.work.peak_bytes, ask.work.total_for_examples(1).flops, ask.profile.budget_bytes if ask.profile else None
        )

    def is_at_least(self, other: MemoryShortage) -> bool:
        """Return whether the requirement is no lower than `other`, False with another memory budget."""
        if self.budget_bytes != other.budget_bytes:
            return False
        if self.peak_bytes and other.peak_bytes:
            return other.peak_bytes >= self.peak_bytes
        return other.flops >= self.flops


Known: TypeAlias = Mapping[str, tuple[TaskDuration, ...]]  # device -> its last rounds, oldest first
Asks: TypeAlias = Mapping[str, DeviceWorkload]


def add_update_duration(
    known: Known, update: Update, work: Mapping[str, float], took_s: float | None, expected_s: float | None
) -> Known:
    if took_s is None:
        return known
    usage = update.usage
    amount = work.get(update.device, 1.0)
    moved = usage.down_bytes + usage.up_bytes
    took = TaskDuration(update.round, took_s, amount, usage.wall_s, expected_s, usage.examples or 1, moved)
    return add_duration(known, update.device, took)


class DeadlineDecision(NamedTuple):
    seconds: float | None = None  # until its deadline; None: `deadline_s`, for lack of a prediction
    epochs: Mapping[str, int] = {}  # device -> epochs, where they are not those of `DeviceWorkload`


Policy: TypeAlias = Callable[[CohortSettings, Known, Asks], DeadlineDecision]


def work_amount(work: WorkEstimate) -> float:
    """Return the operations of a task with the number of examples that the task may use, or with one example.

    Only the device knows its number of examples. The ratio of its measured times contains this number.
    """
    return work.total_for_examples(work.max_examples or 1).flops


def predict_duration_s(
    work: WorkEstimate, profile: Profile | None, point: str | None = None, examples: int = 1
) -> float | None:
    """Return the duration of a task that a profile predicts, or None without a prediction.

    Args:
        work: Work of the task.
        profile: Profile of the device, or None.
        point: Operating point as in `Usage`. None selects the fastest point. "a, then b" means that the point changed
            during the task, and the mean is predicted.
        examples: Number of the device's own examples.
    """
    points: Sequence[OperatingPoint] = profile.points if profile else ()
    work = work.total_for_examples(examples)
    if point is None:
        every = [cost_model.work_seconds(work, each) for each in points]
        return min((time for time in every if time is not None), default=None)
    named = {each.name: each for each in points}
    held = [named.get(name) for name in point.split(", then ")]
    times = [None if each is None else cost_model.work_seconds(work, each) for each in held]
    found = [time for time in times if time is not None]
    return statistics.fmean(found) if len(found) == len(times) else None


def add_duration(known: Known, device: str, took: TaskDuration) -> Known:
    return {**known, device: (*known.get(device, ()), took)[-RECENT:]}


def decide_deadline(cohort: CohortSettings, known: Known, asked: Asks) -> DeadlineDecision:
    found = POLICIES[cohort.deadline](cohort, known, asked)
    if found.seconds is None:
        return found
    return found._replace(seconds=min(max(found.seconds, FLOOR_S), cohort.deadline_s))


def decide_fixed(cohort: CohortSettings, known: Known, asked: Asks) -> DeadlineDecision:
    return DeadlineDecision()


def decide_by_prediction(cohort: CohortSettings, known: Known, asked: Asks) -> DeadlineDecision:
    """Decide a high percentile of the devices' 90th percentiles, plus SLACK, if all can be predicted."""
    fleet = FleetDurations.from_durations(known)
    found = [_predict_p90_s(known.get(device, ()), ask, fleet) for device, ask in asked.items()]
    times = sorted(time for time in found if time is not None)
    if not times or len(times) < len(found):
        return DeadlineDecision()
    needed = max(PERCENTILE, cohort.quorum / (1 + cohort.over_select))
    return DeadlineDecision((1 + SLACK) * times[math.ceil(needed * len(times)) - 1])


class FleetDurations(NamedTuple):
    """Statistics of the fleet's durations, for devices without any."""

    logs: tuple[float, ...]  # median of log(time / profile) of each device
    rest_s: float  # longest time outside the task itself
    pace_s: float | None  # slowest pace
    examples: int = 0  # most that a device has; 0: none has told
    link: cost_model.LinkCost = ASSUMED

    def predict_rest_s(self, ask: DeviceWorkload) -> float:
        return max(self.rest_s, self.link.transfer_seconds(ask.bytes))

    def assumed_examples(self, took: Sequence[TaskDuration], ask: DeviceWorkload) -> int:
        """Return a device's number of examples: reported, else the fleet's largest, else the task's."""
        told = took[-1].examples if took else self.examples
        return told or ask.work.max_examples or 1

    @staticmethod
    def from_durations(known: Known) -> FleetDurations:
        logs = tuple(statistics.median(own) for took in known.values() if (own := _log_ratios(took)))
        rest_s = max((_longest_rest_s(took) for took in known.values()), default=0.0)
        examples = max((each.examples for took in known.values() for each in took), default=0)
        slowest = max((slowest_pace(took) for took in known.values()), default=None)
        link = cost_model.LinkCost.fit_link([(each.bytes, each.rest_s) for took in known.values() for each in took])
        return FleetDurations(logs, rest_s, slowest, examples, link or ASSUMED)


def _predict_p90_s(took: Sequence[TaskDuration], ask: DeviceWorkload, fleet: FleetDurations) -> float | None:
    """Return the seconds that a device exceeds once in ten rounds, or None without any data."""
    base_s, own = ask.predict_duration_s(fleet.assumed_examples(took, ask)), _log_ratios(took)
    if base_s is not None and own:
        return _longest_rest_s(took) + base_s * _p90_ratio(own, OWN_SPREAD)
    if took:
        return slowest_pace(took) * ask.work_amount
    if base_s is not None and fleet.logs:
        return fleet.predict_rest_s(ask) + base_s * _p90_ratio(fleet.logs, FLEET_SPREAD)
    if fleet.pace_s is not None:
        return fleet.pace_s * ask.work_amount
    if base_s is not None and (ask.work.max_examples or not ask.work.flops_per_example):  # else it is half a prediction
        return fleet.predict_rest_s(ask) + base_s * _p90_ratio((), FLEET_SPREAD)
    return None


def slowest_pace(took: Sequence[TaskDuration]) -> float:
    """Return the seconds per unit of work in the slowest recent task of a device."""
    return max(each.seconds / each.work for each in took)


def _longest_rest_s(took: Sequence[TaskDuration]) -> float:
    return max(each.rest_s for each in took)


def _log_ratios(took: Sequence[TaskDuration]) -> list[float]:
    return [math.log(each.busy_s / each.expected_s) for each in took if each.expected_s and each.busy_s > 0]


def _p90_ratio(logs: Sequence[float], spread: float) -> float:
    """Return the 90th percentile of the next ratio, from a log-normal distribution around the median.

    The variance combines that of the ratios and the square of `spread`, which has the weight of PRIOR observations.
    """
    if not logs:
        return math.exp(Z90 * spread)
    middle = statistics.median(logs)
    squares = sum((each - middle) ** 2 for each in logs) + PRIOR * spread**2
    variance = squares / (len(logs) - 1 + PRIOR) * (1 + 1 / len(logs))
    return math.exp(middle + Z90 * math.sqrt(variance))


def decide_by_paper(cohort: CohortSettings, known: Known, asked: Asks) -> DeadlineDecision:
    """Decide the last round's slowest duration times the ratio of work (FedStitch, 4.4), if any is known."""
    every = [each for took in known.values() for each in took]
    if not every:
        return DeadlineDecision()
    last = max(each.round for each in every)
    before = [each for each in every if each.round == last]
    ratio = max(ask.work_amount for ask in asked.values()) / max(each.work for each in before)  # mu * sigma
    return DeadlineDecision(max(each.seconds for each in before) * ratio)


def decide_by_energy(cohort: CohortSettings, known: Known, asked: Asks) -> DeadlineDecision:
    """Decide the plan of fewest joules or, with a joule limit, the shortest. Without a plan, decide by prediction."""
    problem = energy_problem(cohort, known, asked)
    plan = problem and plan_energy(cohort, *problem)
    if not plan:
        return decide_by_prediction(cohort, known, asked)
    moved = {device: plan.epochs[device] for device, ask in asked.items() if ask.epochs not in (0, plan.epochs[device])}
    return DeadlineDecision(plan.seconds, moved)


def plan_energy(
    cohort: CohortSettings, boards: Mapping[str, energy_scheduling.DeviceForecast], passes: int
) -> energy_scheduling.EnergyPlan | None:
    """Return the energy plan within the cohort's limits, or None. `boards` and `passes` are from `energy_problem`."""
    if cohort.joules_per_round is not None:
        return energy_scheduling.plan_least_time(boards, passes, cohort.joules_per_round)
    return energy_scheduling.plan_least_energy(boards, passes, cohort.deadline_s)


def energy_problem(
    cohort: CohortSettings, known: Known, asked: Asks
) -> tuple[dict[str, energy_scheduling.DeviceForecast], int] | None:
    """Return each device's options, and the examples to train on in total over all epochs.

    The result is None if the duration of some device, or the joules of all devices, cannot be predicted.
    """
    fleet, boards, priced = FleetDurations.from_durations(known), {}, False
    for device, ask in asked.items():
        took = known.get(device, ())
        choices = _forecast_epoch_choices(cohort, took, ask, fleet)
        priced = priced or bool(choices)
        if not choices and (upper_s := _predict_p90_s(took, ask, fleet)) is not None:
            choices = (energy_scheduling.EpochChoice(upper_s, 0.0, ask.epochs or 1),)
        if not choices:
            return None
        examples = fleet.assumed_examples(took, ask)
        idle_w = ask.profile.idle_w if ask.profile else None
        boards[device] = energy_scheduling.DeviceForecast(choices, examples, idle_w or 0.0)
    passes = sum(boards[device].examples * (ask.epochs or 1) for device, ask in asked.items())
    return (boards, passes) if priced else None


def _forecast_epoch_choices(
    cohort: CohortSettings, took: Sequence[TaskDuration], ask: DeviceWorkload, fleet: FleetDurations
) -> tuple[energy_scheduling.EpochChoice, ...]:
    """Return a device's options of time and joules, or none without a profile or known durations."""
    # A device without known durations keeps its epochs. Operating points that are both slower and costlier than another
    # point are left out.
    own = _log_ratios(took)
    logs = own or fleet.logs
    if ask.profile is None or not logs:
        return ()
    spread = OWN_SPREAD if own else FLEET_SPREAD
    rest_s = _longest_rest_s(took) if took else fleet.predict_rest_s(ask)
    middle, high = math.exp(statistics.median(logs)), _p90_ratio(logs, spread)
    examples, idle_w = fleet.assumed_examples(took, ask), ask.profile.idle_w or 0.0
    points: list[OperatingPoint] = list(ask.profile.points)
    found: list[energy_scheduling.EpochChoice] = []
    most = int(ask.epochs * MOST_WORK) if own else ask.epochs
    numbers = [ask.epochs, *(each for each in range(1, most + 1) if each != ask.epochs)] if ask.epochs else [0]
    for epochs in numbers:
        work = (ask.with_epochs(epochs) if epochs else ask).work.total_for_examples(examples)
        timed = [(cost_model.work_seconds(work, point), point) for point in points if point.busy_w is not None]
        rising = sorted(((each_s, point) for each_s, point in timed if each_s is not None), key=lambda each: each[0])
        points, least = [], math.inf
        for each_s, point in rising:
            above_j = max((cost_model.work_joules(each_s, point) or 0.0) - idle_w * each_s, 0.0) * middle
            if above_j < least:
                least = above_j
                points.append(point)
                found.append(energy_scheduling.EpochChoice(rest_s + each_s * high, above_j, epochs or 1))
    return tuple(found)


POLICIES: Mapping[str, Policy] = {
    "fixed": decide_fixed,
    "predicted": decide_by_prediction,
    "paper": decide_by_paper,
    "energy": decide_by_energy,
}
