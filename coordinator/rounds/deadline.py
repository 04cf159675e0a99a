"""Deadline of a round, computed when the round opens from device profiles and earlier durations.

Pure functions of `TaskDuration`, the durations of each device's recent tasks, and `DeviceWorkload`, the work of each
selected device. Policies, `[cohort] deadline`:
    fixed      `deadline_s`
    predicted  Per device, the time that its profile predicts at the fastest operating point, times the ratio of its
               recent tasks to that prediction, at the 90th percentile. The deadline is a high percentile of these
               times over the cohort, plus PREDICTION_SLACK. Without a profile, the device's own pace is used
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

PREDICTION_SLACK = 0.5  # share added with "predicted"
MAX_EPOCH_FACTOR = 2.0  # most epochs of a device with "energy", as a multiple of the job's
KEPT_DURATIONS = 5  # durations stored of each device
PERCENTILE = 0.9  # share of the cohort that should meet the deadline, unless the quorum is higher
MIN_DEADLINE_S = 10.0  # time for messages and small blobs
Z90 = statistics.NormalDist().inv_cdf(0.9)
OWN_SPREAD = 0.2  # assumed standard deviation of log(time / profile) between a device's rounds
FLEET_SPREAD = 0.5  # the same between devices
PRIOR_WEIGHT = 2
DEFAULT_LINK = cost_model.LinkCost(bytes_per_s=1e6)  # before the first transfers are measured


class TaskDuration(NamedTuple):
    round: int
    seconds: float  # from the selection of the device to the arrival of the update
    work: float  # `DeviceWorkload.work_amount` of the task
    busy_s: float = 0.0  # part of `seconds` within the task itself
    expected_s: float | None = None  # duration predicted by the profile, at the operating point that was used
    examples: int = 1  # the device's examples, as assumed by `expected_s`
    bytes: int = 0  # transferred bytes of blobs, down and up

    @property
    def rest_s(self) -> float:
        return max(self.seconds - self.busy_s, 0.0)


class DeviceWorkload(NamedTuple):
    work: WorkEstimate = WorkEstimate()
    profile: Profile | None = None
    bytes: int = 0  # bytes of the task's blobs, some of which the device may already have
    epochs: int = 0  # epochs in `work`, or 0 if the method needs equal numbers of epochs
    epoch: WorkEstimate = WorkEstimate()  # work of one epoch

    def with_epochs(self, epochs: int) -> DeviceWorkload:
        extra_epochs = epochs - self.epochs
        sums = {name: getattr(self.work, name) + extra_epochs * getattr(self.epoch, name) for name in ADDITIVE_FIELDS}
        return self._replace(work=msgspec.structs.replace(self.work, **sums), epochs=epochs)

    @property
    def work_amount(self) -> float:
        return work_amount(self.work) or 1.0

    def predict_duration_s(self, examples: int = 1) -> float | None:
        return predict_duration_s(self.work, self.profile, examples=examples)


class MemoryShortage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requirements of a task that a device declined for lack of memory. 0 and None mean unknown."""

    peak_bytes: int = 0
    flops: float = 0.0
    budget_bytes: int | None = None

    @staticmethod
    def from_workload(workload: DeviceWorkload) -> MemoryShortage:
        return MemoryShortage(
            workload.work.peak_bytes,
            workload.work.total_for_examples(1).flops,
            workload.profile.budget_bytes if workload.profile else None,
        )

    def is_at_most(self, other: MemoryShortage) -> bool:
        """Return whether `other` needs at least as much memory as this task, under the same memory budget."""
        if self.budget_bytes != other.budget_bytes:
            return False
        if self.peak_bytes and other.peak_bytes:
            return other.peak_bytes >= self.peak_bytes
        return other.flops >= self.flops


DurationsByDevice: TypeAlias = Mapping[str, tuple[TaskDuration, ...]]  # device -> recent durations, oldest first
WorkloadByDevice: TypeAlias = Mapping[str, DeviceWorkload]


def add_update_duration(
    durations: DurationsByDevice,
    update: Update,
    work: Mapping[str, float],
    took_s: float | None,
    expected_s: float | None,
) -> DurationsByDevice:
    """Return the durations with the update's duration added, or unchanged if `took_s` is None."""
    if took_s is None:
        return durations
    usage, amount = update.usage, work.get(update.device, 1.0)
    transferred_bytes = usage.down_bytes + usage.up_bytes
    examples = usage.examples or 1
    duration = TaskDuration(update.round, took_s, amount, usage.wall_s, expected_s, examples, transferred_bytes)
    return add_duration(durations, update.device, duration)


class DeadlineDecision(NamedTuple):
    seconds: float | None = None  # duration until the deadline, or None for the cohort's `deadline_s`
    epochs: Mapping[str, int] = {}  # device -> epochs, if different from `DeviceWorkload.epochs`


Policy: TypeAlias = Callable[[CohortSettings, DurationsByDevice, WorkloadByDevice], DeadlineDecision]


def work_amount(work: WorkEstimate) -> float:
    """Return the FLOPs of a task for its maximum number of examples, or for one without a maximum.

    The coordinator does not know a device's number of examples. Ratios of measured to predicted times include it.
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
        all_times = [cost_model.work_seconds(work, operating_point) for operating_point in points]
        return min((time for time in all_times if time is not None), default=None)
    points_by_name = {operating_point.name: operating_point for operating_point in points}
    used_points = [points_by_name.get(name) for name in point.split(", then ")]
    times = [None if used is None else cost_model.work_seconds(work, used) for used in used_points]
    known_times = [time for time in times if time is not None]
    return statistics.fmean(known_times) if len(known_times) == len(times) else None


def add_duration(durations: DurationsByDevice, device: str, duration: TaskDuration) -> DurationsByDevice:
    return {**durations, device: (*durations.get(device, ()), duration)[-KEPT_DURATIONS:]}


def decide_deadline(
    cohort: CohortSettings, durations: DurationsByDevice, workloads: WorkloadByDevice
) -> DeadlineDecision:
    """Return the decision of the cohort's policy, between MIN_DEADLINE_S and the cohort's `deadline_s`."""
    decision = POLICIES[cohort.deadline](cohort, durations, workloads)
    if decision.seconds is None:
        return decision
    return decision._replace(seconds=min(max(decision.seconds, MIN_DEADLINE_S), cohort.deadline_s))


def decide_fixed(cohort: CohortSettings, durations: DurationsByDevice, workloads: WorkloadByDevice) -> DeadlineDecision:
    return DeadlineDecision()


def decide_by_prediction(
    cohort: CohortSettings, durations: DurationsByDevice, workloads: WorkloadByDevice
) -> DeadlineDecision:
    """Return a deadline from the predicted times, or the cohort's `deadline_s` if one time is unknown."""
    fleet = FleetDurations.from_durations(durations)
    predictions = [_predict_p90_s(durations.get(device, ()), workload, fleet) for device, workload in workloads.items()]
    times = sorted(time for time in predictions if time is not None)
    if not times or len(times) < len(predictions):
        return DeadlineDecision()
    percentile = max(PERCENTILE, cohort.quorum / (1 + cohort.over_select))
    return DeadlineDecision((1 + PREDICTION_SLACK) * times[math.ceil(percentile * len(times)) - 1])


class FleetDurations(NamedTuple):
    """Statistics of the fleet's durations, for devices without known durations."""

    log_ratios: tuple[float, ...]  # median of log(time / profile) of each device
    rest_s: float  # longest time outside the task itself
    pace_s: float | None  # slowest pace, in seconds per unit of work
    examples: int = 0  # largest reported number of examples, or 0 if unknown
    link: cost_model.LinkCost = DEFAULT_LINK

    def predict_rest_s(self, workload: DeviceWorkload) -> float:
        return max(self.rest_s, self.link.transfer_seconds(workload.bytes))

    def assumed_examples(self, own_durations: Sequence[TaskDuration], workload: DeviceWorkload) -> int:
        """Return a device's latest number of examples, or else the fleet's largest, the task's maximum, or 1."""
        reported_examples = own_durations[-1].examples if own_durations else self.examples
        return reported_examples or workload.work.max_examples or 1

    @staticmethod
    def from_durations(durations: DurationsByDevice) -> FleetDurations:
        ratios_by_device = [_log_ratios(own_durations) for own_durations in durations.values()]
        log_ratios = tuple(statistics.median(ratios) for ratios in ratios_by_device if ratios)
        all_durations = [duration for own_durations in durations.values() for duration in own_durations]
        rest_s = max((duration.rest_s for duration in all_durations), default=0.0)
        examples = max((duration.examples for duration in all_durations), default=0)
        slowest = max((slowest_pace(own_durations) for own_durations in durations.values()), default=None)
        link = cost_model.LinkCost.fit_link([(duration.bytes, duration.rest_s) for duration in all_durations])
        return FleetDurations(log_ratios, rest_s, slowest, examples, link or DEFAULT_LINK)


def _predict_p90_s(
    own_durations: Sequence[TaskDuration], workload: DeviceWorkload, fleet: FleetDurations
) -> float | None:
    """Return the duration that a device exceeds once in ten rounds, or None if nothing is known."""
    base_s = workload.predict_duration_s(fleet.assumed_examples(own_durations, workload))
    log_ratios = _log_ratios(own_durations)
    if base_s is not None and log_ratios:
        return _longest_rest_s(own_durations) + base_s * _p90_ratio(log_ratios, OWN_SPREAD)
    if own_durations:
        return slowest_pace(own_durations) * workload.work_amount
    if base_s is not None and fleet.log_ratios:
        return fleet.predict_rest_s(workload) + base_s * _p90_ratio(fleet.log_ratios, FLEET_SPREAD)
    if fleet.pace_s is not None:
        return fleet.pace_s * workload.work_amount
    # a prediction per example is incomplete while the number of examples is unknown
    if base_s is not None and (workload.work.max_examples or not workload.work.flops_per_example):
        return fleet.predict_rest_s(workload) + base_s * _p90_ratio((), FLEET_SPREAD)
    return None


def slowest_pace(own_durations: Sequence[TaskDuration]) -> float:
    """Return the seconds per unit of work in the slowest recent task of a device."""
    return max(duration.seconds / duration.work for duration in own_durations)


def _longest_rest_s(own_durations: Sequence[TaskDuration]) -> float:
    return max(duration.rest_s for duration in own_durations)


def _log_ratios(own_durations: Sequence[TaskDuration]) -> list[float]:
    return [
        math.log(duration.busy_s / duration.expected_s)
        for duration in own_durations
        if duration.expected_s and duration.busy_s > 0
    ]


def _p90_ratio(log_ratios: Sequence[float], spread: float) -> float:
    """Return the 90th percentile of a task's ratio of measured to predicted time.

    Ratios are log-normal. `spread` squared is a prior variance, with the weight of PRIOR_WEIGHT observations.
    """
    if not log_ratios:
        return math.exp(Z90 * spread)
    median = statistics.median(log_ratios)
    squares = sum((log_ratio - median) ** 2 for log_ratio in log_ratios) + PRIOR_WEIGHT * spread**2
    variance = squares / (len(log_ratios) - 1 + PRIOR_WEIGHT) * (1 + 1 / len(log_ratios))
    return math.exp(median + Z90 * math.sqrt(variance))


def decide_by_paper(
    cohort: CohortSettings, durations: DurationsByDevice, workloads: WorkloadByDevice
) -> DeadlineDecision:
    """Return the longest duration of the last round times the ratio of work, or `deadline_s` without one."""
    all_durations = [duration for own_durations in durations.values() for duration in own_durations]
    if not all_durations:
        return DeadlineDecision()
    last_round = max(duration.round for duration in all_durations)
    last_durations = [duration for duration in all_durations if duration.round == last_round]
    last_work = max(duration.work for duration in last_durations)
    ratio = max(workload.work_amount for workload in workloads.values()) / last_work  # mu * sigma
    return DeadlineDecision(max(duration.seconds for duration in last_durations) * ratio)


def decide_by_energy(
    cohort: CohortSettings, durations: DurationsByDevice, workloads: WorkloadByDevice
) -> DeadlineDecision:
    """Return the duration and epochs of `plan_energy`, or `decide_by_prediction` if there is no plan."""
    problem = energy_problem(cohort, durations, workloads)
    plan = problem and plan_energy(cohort, *problem)
    if not plan:
        return decide_by_prediction(cohort, durations, workloads)
    changed_epochs = {
        device: plan.epochs[device]
        for device, workload in workloads.items()
        if workload.epochs not in (0, plan.epochs[device])
    }
    return DeadlineDecision(plan.seconds, changed_epochs)


def plan_energy(
    cohort: CohortSettings, forecasts: Mapping[str, energy_scheduling.DeviceForecast], passes: int
) -> energy_scheduling.EnergyPlan | None:
    """Return the shortest plan within `joules_per_round`, or if unset the cheapest within `deadline_s`.

    If no plan meets the limit, the plan closest to the limit is returned. The result is None if the devices cannot do
    all the work. `forecasts` and `passes` come from `energy_problem`.
    """
    if cohort.joules_per_round is not None:
        return energy_scheduling.plan_least_time(forecasts, passes, cohort.joules_per_round)
    return energy_scheduling.plan_least_energy(forecasts, passes, cohort.deadline_s)


def energy_problem(
    cohort: CohortSettings, durations: DurationsByDevice, workloads: WorkloadByDevice
) -> tuple[dict[str, energy_scheduling.DeviceForecast], int] | None:
    """Return the forecast of each device, and the examples to train on, summed over epochs and devices.

    The result is None if the duration of some device, or the joules of all devices, cannot be predicted.
    """
    fleet, forecasts, has_known_joules = FleetDurations.from_durations(durations), {}, False
    for device, workload in workloads.items():
        own_durations = durations.get(device, ())
        choices = _forecast_epoch_choices(cohort, own_durations, workload, fleet)
        has_known_joules = has_known_joules or bool(choices)
        if not choices and (upper_s := _predict_p90_s(own_durations, workload, fleet)) is not None:
            choices = (energy_scheduling.EpochChoice(upper_s, 0.0, workload.epochs or 1),)
        if not choices:
            return None
        examples = fleet.assumed_examples(own_durations, workload)
        idle_w = workload.profile.idle_w if workload.profile else None
        forecasts[device] = energy_scheduling.DeviceForecast(choices, examples, idle_w or 0.0)
    passes = sum(forecasts[device].examples * (workload.epochs or 1) for device, workload in workloads.items())
    return (forecasts, passes) if has_known_joules else None


def _forecast_epoch_choices(
    cohort: CohortSettings, own_durations: Sequence[TaskDuration], workload: DeviceWorkload, fleet: FleetDurations
) -> tuple[energy_scheduling.EpochChoice, ...]:
    """Return a device's choices of time, joules and epochs, or () without a profile or known durations.

    A number of epochs has one choice for each operating point that is the fastest for its joules. Seconds are the 90th
    percentile, and joules are above idle.
    """
    own_ratios = _log_ratios(own_durations)
    log_ratios = own_ratios or fleet.log_ratios
    if workload.profile is None or not log_ratios:
        return ()
    spread = OWN_SPREAD if own_ratios else FLEET_SPREAD
    rest_s = _longest_rest_s(own_durations) if own_durations else fleet.predict_rest_s(workload)
    median_ratio, p90_ratio = math.exp(statistics.median(log_ratios)), _p90_ratio(log_ratios, spread)
    examples, idle_w = fleet.assumed_examples(own_durations, workload), workload.profile.idle_w or 0.0
    points: list[OperatingPoint] = list(workload.profile.points)
    choices: list[energy_scheduling.EpochChoice] = []
    # without own durations, a device does not train for more epochs than the job's
    max_epochs = int(workload.epochs * MAX_EPOCH_FACTOR) if own_ratios else workload.epochs
    for epochs in [workload.epochs, *(number for number in range(1, max_epochs + 1) if number != workload.epochs)]:
        work = (workload.with_epochs(epochs) if epochs else workload).work.total_for_examples(examples)
        efficient_points = _find_efficient_points(points, work, idle_w, median_ratio)
        points = [point for _, _, point in efficient_points]  # these are enough for the other numbers of epochs
        choices += [
            energy_scheduling.EpochChoice(rest_s + seconds * p90_ratio, joules, epochs or 1)
            for seconds, joules, _ in efficient_points
        ]
    return tuple(choices)


def _find_efficient_points(
    points: Sequence[OperatingPoint], work: WorkEstimate, idle_w: float, joule_ratio: float
) -> list[tuple[float, float, OperatingPoint]]:
    """Return (seconds, joules above idle, point) of points that need fewer joules than all faster points."""
    timed_points = [(cost_model.work_seconds(work, point), point) for point in points if point.busy_w is not None]
    known_points = [(seconds, point) for seconds, point in timed_points if seconds is not None]
    efficient_points: list[tuple[float, float, OperatingPoint]] = []
    for seconds, point in sorted(known_points, key=lambda timed: timed[0]):
        net_joules = max((cost_model.work_joules(seconds, point) or 0.0) - idle_w * seconds, 0.0) * joule_ratio
        if not efficient_points or net_joules < efficient_points[-1][1]:
            efficient_points.append((seconds, net_joules, point))
    return efficient_points


POLICIES: Mapping[str, Policy] = {
    "fixed": decide_fixed,
    "predicted": decide_by_prediction,
    "paper": decide_by_paper,
    "energy": decide_by_energy,
}
