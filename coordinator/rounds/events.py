"""Events of a job, as stored in its event log, and the job state that follows from them. Pure.

`apply_event` applies one event to the state. The server writes each event to the log before acting on the event, so
that replaying the log after a crash gives the same state. `TRANSITIONS` lists the events allowed in each phase. Any
other event, and an event of another round than the running one, is refused.

Limits of a job ([stop]) are compared with the totals and evaluations of the log between rounds. So a job can exceed a
limit by one round. Joules do not include tasks without a meter, whose number the job reports after each round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, get_args

import msgspec
from msgspec import field
from msgspec.structs import replace

from fedquilt import metrics
from fedquilt.coordinator.device_columns import ELIGIBLE, NEVER, CostColumn, LabelColumn, RoundBitmap, RoundColumn
from fedquilt.coordinator.rounds import deadline
from fedquilt.coordinator.rounds.deadline import DeviceWorkload, MemoryShortage
from fedquilt.coordinator.rounds.selection import (
    BUSY,
    DECLINE_REASONS,
    NO_WORK,
    SHARE,
    UNKNOWN_DECLINE,
    UPDATE,
    LastingDecline,
)
from fedquilt.coordinator.settings import CohortSettings, JobLimits, JobSettings
from fedquilt.core import Action, BlobRef, EvaluationSums, FedquiltError, JobError, Update, evaluation

GAIN_TOLERANCE: Final = 1e-9  # a gain may be this much below `min_gain`


class ResourceUsage(msgspec.Struct, frozen=True):
    joules: float = 0.0  # gross, of the metered tasks
    metered: int = 0  # number of metered tasks
    unmetered: int = 0  # number of tasks without a meter
    bytes: int = 0
    wall_s: float = 0.0  # of committed rounds

    def add_update(self, update: Update) -> ResourceUsage:
        usage = update.usage
        return replace(
            self,
            joules=self.joules + (usage.energy_j or 0.0),
            metered=self.metered + (usage.energy_j is not None),
            unmetered=self.unmetered + (usage.energy_j is None),
            bytes=self.bytes + update.down_bytes + update.up_bytes,
        )


class BestEvaluation(msgspec.Struct, frozen=True):
    """Best of the evaluations so far by the main metric, and the number of evaluations without a gain since."""

    metric: str  # a key of `metrics.METRICS`
    value: float
    rounds: int  # completed before the evaluation
    state: BlobRef  # evaluated state
    reference: float  # value from which the next gain is measured
    without_gain: int = 0

    def describe(self) -> str:
        value = metrics.format_value(metrics.METRICS[self.metric], self.value)
        return f"{metrics.METRICS[self.metric].title} {value} after {self.rounds} round{'s' * (self.rounds != 1)}"


def add_evaluation(
    best: BestEvaluation | None, sums: EvaluationSums | None, state: BlobRef | None, rounds: int, min_gain: float
) -> BestEvaluation | None:
    if (main := metrics.main_metric(sums)) is None or state is None:
        return best
    metric, value = main
    if best is None or best.metric != metric.name:
        return BestEvaluation(metric.name, value, rounds, state, value)
    sign = 1 if metric.higher else -1
    gain = sign * (value - best.reference)
    gained = gain > 0 and gain >= min_gain - GAIN_TOLERANCE
    best = (
        replace(best, reference=value, without_gain=0) if gained else replace(best, without_gain=best.without_gain + 1)
    )
    return replace(best, value=value, rounds=rounds, state=state) if sign * (value - best.value) > 0 else best


def describe_reached_limit(limits: JobLimits, usage: ResourceUsage, best: BestEvaluation | None = None) -> str | None:
    if limits.patience is not None and best is not None and best.without_gain >= limits.patience:
        min_gain = f" of {limits.min_gain:g}" if limits.min_gain else ""
        evaluations = f"{best.without_gain} evaluation{'s' * (best.without_gain > 1)}"
        return f"patience: no gain{min_gain} in {evaluations}; the best is {best.describe()}"
    if limits.max_joules is not None and usage.joules >= limits.max_joules:
        return f"max_joules: {usage.joules:.4g} J of {limits.max_joules:.4g} J are used up{_unmetered_suffix(usage)}"
    if limits.max_bytes is not None and usage.bytes >= limits.max_bytes:
        return f"max_bytes: {usage.bytes} bytes of {limits.max_bytes} are used up"
    if limits.max_wall_s is not None and usage.wall_s >= limits.max_wall_s:
        return f"max_wall_s: {usage.wall_s:.4g} s of {limits.max_wall_s:.4g} s are used up"
    return None


def describe_unmetered_tasks(limits: JobLimits, usage: ResourceUsage) -> str | None:
    """Return a sentence on tasks missing from the joules, or None without tasks or a limit."""
    if limits.max_joules is None or not usage.unmetered:
        return None
    if not usage.metered:
        return (
            f"max_joules = {limits.max_joules:.4g} ends nothing here: no board that has answered has a meter for its "
            "joules; the job runs to its rounds, or to another limit of [stop]"
        )
    return f"max_joules counts {usage.joules:.4g} J of {limits.max_joules:.4g} J{_unmetered_suffix(usage)}"


def _unmetered_suffix(usage: ResourceUsage) -> str:
    if not usage.unmetered:
        return ""
    return f", without {usage.unmetered} task{'s' * (usage.unmetered > 1)} on boards that have no meter"


class JobConstants(msgspec.Struct, frozen=True):
    seed: int
    rounds: int
    cohort: CohortSettings
    check_every: int  # rounds between evaluations, or 0 for none
    stop: JobLimits = JobLimits()
    check_beside: bool = False  # the coordinator's process evaluates, not the devices
    class_priors: bool = False  # devices also evaluate with class priors

    @staticmethod
    def from_job(job: JobSettings) -> JobConstants:
        priors = job.personal.prior == "auto"
        return JobConstants(job.seed, job.rounds, job.cohort, job.check.every, job.stop, job.check.beside, priors)


Phase: TypeAlias = Literal["new", "selecting", "open", "closing", "done", "failed", "stopped"]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
ENDED_PHASES: Final = ("done", "failed", "stopped")
_STAYS_OPEN: Final[Mapping[Phase, tuple[Phase, ...]]] = {"open": ("open",)}
# A message may follow the end of the job in one step of the server. Its event is recorded and counts after a resume.
_LATE_RESULT_TRANSITIONS: Final[Mapping[Phase, tuple[Phase, ...]]] = {
    **_STAYS_OPEN,
    "stopped": ("stopped",),
    "failed": ("failed",),
}
TRANSITIONS: Final[Mapping[str, Mapping[Phase, tuple[Phase, ...]]]] = {
    "NoteRecorded": {"new": ("new",), "stopped": ("stopped",), "failed": ("failed",)},  # before the start or a resume
    "JobStarted": {"new": ("selecting",), "stopped": ("stopped",), "failed": ("failed",)},
    "EligibilityRecorded": {"selecting": ("selecting",), "open": ("open",)},
    "CohortSelected": {"selecting": ("open",), "open": ("open",)},
    "TaskDeclined": _LATE_RESULT_TRANSITIONS,
    "UpdateAccepted": _LATE_RESULT_TRANSITIONS,
    "UpdateRejected": _LATE_RESULT_TRANSITIONS,
    "UpdateLost": {**_LATE_RESULT_TRANSITIONS, "closing": ("open",)},
    "UpdatesAggregated": {**_STAYS_OPEN, "closing": ("closing",)},
    "DeadlineExtended": _STAYS_OPEN,
    "RoundRetried": _STAYS_OPEN,
    "AttemptResumed": _STAYS_OPEN,
    "RoundClosed": {"open": ("closing",)},
    "RoundCommitted": {"closing": ("selecting",)},
    "JobEnded": {
        "new": ("failed", "stopped"),
        "selecting": ("done", "failed", "stopped"),
        "open": ("failed", "stopped"),
        "closing": ("failed", "stopped"),
        "failed": ("failed", "stopped"),  # resumed, and ended again before it could continue
        "stopped": ("failed", "stopped"),
    },
    "JobResumed": {"failed": ("selecting", "open"), "stopped": ("selecting", "open")},
}
"""Name of an event class -> phase before the event -> phases allowed after the event."""


class Event(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True): ...


class JobStarted(Event, frozen=True, omit_defaults=True):
    """Start of a job with the method's first state, or of a site's round with a state from above."""

    state: BlobRef
    has_evaluation_rounds: bool = False  # whether an evaluation round (`core.EvaluationRound`) precedes each evaluation
    first_round: int = 0  # number of the round that starts, which may skip or repeat rounds
    actions: tuple[
        Action, ...
    ] = ()  # actions of that round's tasks from the parent, or () to follow the job's settings
    is_evaluation_round: bool = False  # whether that round is an evaluation round
    deadline_s: float | None = None  # from the parent, or None for the cohort's `deadline_s`
    class_shares: tuple[float, ...] = ()  # class shares of the whole fleet, from the parent


class EligibilityRecorded(Event, frozen=True):
    round: int
    eligible: tuple[str, ...] = ()
    ineligible: dict[str, tuple[str, ...]] = {}  # code of `selection.REASONS` -> devices
    costs: dict[str, float] = {}  # device -> joules per FLOP, with `prefer = "energy"`


class CohortSelected(Event, frozen=True):
    round: int
    attempt: int
    devices: tuple[str, ...]
    work: dict[str, float] = {}  # device -> `deadline.work_amount` of the task, if predicted
    deadline_s: float | None = None  # deadline of the round, or None for the cohort's `deadline_s`
    coverage: tuple[str, ...] = ()  # sentences on the devices that can take part
    epochs: dict[str, int] = {}  # device -> epochs in this round, if different from the job's


class TaskDeclined(Event, frozen=True):
    round: int
    device: str
    code: str
    reason: str
    shortage: MemoryShortage | None = None  # requirements of the task after a memory decline
    agent_start_key: str = ""  # `DeviceRegistry.agent_start_key`, or "" if unknown


class UpdateAccepted(Event, frozen=True):
    """Acceptance of a device's update, which is validated and whose blobs are on disk."""

    round: int
    update: Update
    took_s: float | None = None  # seconds since the selection of the device
    expected_s: float | None = None  # duration predicted by the profile, at the operating point that was used


class UpdateRejected(Event, frozen=True, omit_defaults=True):
    """Rejection of a device's update, or exclusion of the device from the round."""

    round: int
    device: str
    reason: str
    code: str = UPDATE  # key of `selection.DECLINE_REASONS`


class UpdateLost(Event, frozen=True):
    """Loss of an accepted update whose blob is missing or damaged. The device works on its task again."""

    round: int
    device: str
    reason: str


class UpdatesAggregated(Event, frozen=True):
    """Storage of a partial aggregate. The blobs of the updates in the aggregate are no longer needed."""

    round: int
    devices: tuple[str, ...]
    sum: BlobRef


class RoundClosed(Event, frozen=True):
    round: int


class DeadlineExtended(Event, frozen=True):
    """Passing of a predicted deadline without a quorum. The round then closes at the first quorum."""

    round: int


class RoundRetried(Event, frozen=True):
    """Start of a new attempt after a deadline without a quorum. Accepted updates are kept."""

    round: int
    attempt: int


class AttemptResumed(Event, frozen=True):
    """Continuation of an attempt by another coordinator process, `passed_s` after the attempt's start."""

    round: int
    passed_s: float  # elapsed time of the attempt (`decisions.restart_event`)


class RoundCommitted(Event, frozen=True):
    round: int
    state: BlobRef
    finished: bool
    metrics: dict[str, float]  # of training
    notes: tuple[str, ...] = ()  # of the method
    took_s: float = 0.0  # seconds since the previous commit, or since the start of this process
    is_evaluation_round: bool = False  # whether the round had no training, and does not count as a round
    evaluation: EvaluationSums | None = None  # evaluation of the state at the start of the round
    best: bool = False  # whether that evaluation is the best so far
    warnings: tuple[str, ...] = ()  # of the coordinator


class JobEnded(Event, frozen=True, omit_defaults=True):
    """End of a job, or its interruption until a `JobResumed` event."""

    status: Literal["done", "failed", "stopped"]
    reason: str = ""  # after a failed round: the cause, and the fix in a second line
    code: str = ""  # most frequent decline code of a failed round (`selection.DECLINE_REASONS`)


def failure_event(error: Exception) -> JobEnded:
    """Return the event that ends a job with the error's message. Invalid Unicode is escaped."""
    text = str(error) if isinstance(error, FedquiltError) else f"{type(error).__name__}: {error}"
    return JobEnded("failed", text.encode("utf-8", "backslashreplace").decode())


class JobResumed(Event, frozen=True): ...


class NoteRecorded(Event, frozen=True):
    """Note on a run that has not started, such as its trigger or its approval."""

    text: str


_AttemptEvent = (
    EligibilityRecorded
    | CohortSelected
    | TaskDeclined
    | UpdateAccepted
    | UpdateRejected
    | UpdateLost
    | UpdatesAggregated
    | DeadlineExtended
    | RoundRetried
    | AttemptResumed
)
_RoundEvent = _AttemptEvent | RoundClosed | RoundCommitted
AnyEvent = NoteRecorded | JobStarted | _RoundEvent | JobEnded | JobResumed


class JobState(msgspec.Struct, frozen=True):
    """State of a job, as given by applying all its events in order (`apply_event`)."""

    constants: JobConstants
    phase: Phase = "new"
    round: int = 0
    attempt: int = 0
    opened_s: float = 0.0  # start of the running attempt, on this process's clock
    passed_s: float = 0.0  # elapsed seconds of the attempt at the latest restart of the coordinator
    restarts: int = 0  # restarts of the coordinator during the attempt
    attempt_limit_s: float | None = None  # duration of the attempt, or None for the cohort's `deadline_s`
    is_deadline_extended: bool = False  # whether a predicted deadline has passed without a quorum
    state: BlobRef | None = None
    pending_devices: frozenset[str] = frozenset()  # selected in this attempt, without a result yet
    cohort: frozenset[str] = frozenset()  # selected in the running or the last round, and not declined
    # devices that could take part at the latest selection of this attempt, if the cohort is the whole fleet
    expected_devices: frozenset[str] = frozenset()
    silent_devices: tuple[str, ...] = ()  # selected in earlier attempts without an answer, the latest last
    accepted_updates: Mapping[str, Update] = field(default_factory=dict)  # device -> update of the running round
    partial_aggregate: UpdatesAggregated | None = None  # stored partial aggregate, whose updates are deleted
    # device -> time of the selection, on this process's clock
    selected_s: Mapping[str, float] = field(default_factory=dict)
    work: Mapping[str, float] = field(default_factory=dict)  # device -> `deadline.work_amount` of the task
    epochs: Mapping[str, int] = field(default_factory=dict)  # device -> epochs, if different from the job's
    durations: deadline.DurationsByDevice = field(default_factory=dict)
    # label of each device, from the latest `EligibilityRecorded`
    eligibility: LabelColumn = field(default_factory=LabelColumn)
    costs: CostColumn = field(default_factory=CostColumn)
    # device -> round of the latest selection, or of the first eligibility record
    last_selected_rounds: RoundColumn = field(default_factory=RoundColumn)
    usage: ResourceUsage = ResourceUsage()
    best: BestEvaluation | None = None
    round_started_s: float = 0.0  # start of the running round, or of this process
    # device -> reason of a decline or rejection in this attempt
    decline_reasons: Mapping[str, str] = field(default_factory=dict)
    # device -> latest decline that excludes the device beyond the attempt
    lasting_declines: Mapping[str, LastingDecline] = field(default_factory=dict)
    # devices in `decline_reasons` for which the method has no task
    devices_without_work: frozenset[str] = frozenset()
    redoing_devices: frozenset[str] = frozenset()  # devices that repeat their task after a lost update
    history: Mapping[str, RoundBitmap] = field(default_factory=dict)  # device -> rounds with an accepted update
    is_method_done: bool = False
    is_final_evaluation_done: bool = False
    has_evaluation_rounds: bool = False  # whether an evaluation round precedes each evaluation
    is_evaluation_round: bool = False  # whether the running round is an evaluation round
    parent_order: JobStarted | None = None  # on a site, the parent's settings of the running round
    # device of a site -> site whose update in this round contains the device
    sites_by_device: Mapping[str, str] = field(default_factory=dict)
    evaluation_rounds: int = 0  # number of evaluation rounds so far
    class_counts: tuple[int, ...] = ()  # held-out examples of each class in the last evaluation
    reason: str = ""

    @property
    def eligible(self) -> frozenset[str]:
        return frozenset(device for device, label in self.eligibility.items() if label == ELIGIBLE)

    @property
    def ineligibility_reasons(self) -> dict[str, str]:
        return {device: label for device, label in self.eligibility.items() if label != ELIGIBLE}

    @property
    def cohort_size(self) -> int:
        """Number of wanted updates, or 0 for all devices, as in every evaluation round."""
        return 0 if self.is_evaluation_round else self.constants.cohort.size

    @property
    def completed_rounds(self) -> int:
        """Number of committed rounds, without evaluation rounds."""
        return self.round - self.evaluation_rounds

    @property
    def is_work_done(self) -> bool:
        """Whether all training rounds are complete."""
        return self.is_method_done or self.round - self.evaluation_rounds >= self.constants.rounds

    @property
    def task_actions(self) -> tuple[Action, ...]:
        """Actions of the running round's tasks: evaluation ("check"), training ("work") or both."""
        if self.parent_order is not None and self.parent_order.actions:
            return self.parent_order.actions
        every = 0 if self.constants.check_beside else self.constants.check_every
        if self.is_work_done and not self.is_evaluation_round:
            return ("check",)
        return (
            ("check", "work")
            if not self.is_evaluation_round and every and self.completed_rounds % every == 0
            else ("work",)
        )

    @property
    def reached_limit(self) -> str | None:
        return describe_reached_limit(self.constants.stop, self.usage, self.best)

    def best_after(self, sums: EvaluationSums | None) -> BestEvaluation | None:
        """Return the best evaluation after an evaluation of the state at the start of the running round."""
        if not self.constants.check_every:  # a site evaluates only for its parent
            return self.best
        return add_evaluation(self.best, sums, self.state, self.completed_rounds, self.constants.stop.min_gain)

    @property
    def deadline_s(self) -> float:
        return self.max_deadline_s if self.attempt_limit_s is None else self.attempt_limit_s

    @property
    def max_deadline_s(self) -> float:
        return (self.parent_order and self.parent_order.deadline_s) or self.constants.cohort.deadline_s

    def remaining_s(self, now_s: float) -> float:
        return max(self.opened_s + self.deadline_s - now_s, 0.0)

    def decline_event(
        self, device: str, code: str, reason: str, workload: DeviceWorkload, agent_start_key: str = ""
    ) -> TaskDeclined:
        lacks_memory = DECLINE_REASONS.get(code, UNKNOWN_DECLINE).duration == "rounds"
        return TaskDeclined(
            self.round,
            device,
            code,
            reason,
            MemoryShortage.from_workload(workload) if lacks_memory else None,
            agent_start_key,
        )

    def acceptance_event(
        self, update: Update, now_s: float, workload: DeviceWorkload = DeviceWorkload()
    ) -> UpdateAccepted:
        """Return the acceptance of a device's update, with the duration of its task.

        The duration is the time since the selection of the device, but at least the time that the device reports.
        After a restart of the coordinator only the latter is known.
        """
        waited_s = now_s - self.selected_s.get(update.device, now_s)
        usage = update.usage
        expected_s = deadline.predict_duration_s(workload.work, workload.profile, usage.point, usage.examples or 1)
        return UpdateAccepted(self.round, update, max(waited_s, usage.wall_s), expected_s)


def apply_event(state: JobState, event: AnyEvent, now_s: float) -> JobState:
    kind, event_round = type(event).__name__, getattr(event, "round", state.round)
    allowed_phases = TRANSITIONS[kind].get(state.phase, ())
    if event_round != state.round:
        raise JobError(
            f"{kind} of round {event_round + 1} in the log of a job whose running round is "
            f"{state.round + 1}{_FOREIGN_LOG_HINT}"
        )
    new_state = _apply_allowed_event(state, event, now_s) if allowed_phases else state
    if new_state.phase not in allowed_phases:
        raise JobError(
            f"{kind} in round {state.round + 1} cannot happen to a job that is {state.phase}{_FOREIGN_LOG_HINT}"
        )
    return new_state


_FOREIGN_LOG_HINT = ": the log was not written by this coordinator's rules; run the job anew"


def _apply_allowed_event(state: JobState, event: AnyEvent, now_s: float) -> JobState:
    match event:  # the most frequent first
        case UpdateAccepted():
            device, durations = event.update.device, state.durations
            if device in state.lasting_declines:
                state = replace(
                    state,
                    lasting_declines={
                        name: decline for name, decline in state.lasting_declines.items() if name != device
                    },
                )
            if state.constants.cohort.deadline != "fixed":
                durations = deadline.add_update_duration(
                    durations, event.update, state.work, event.took_s, event.expected_s
                )
            accepted_updates = {**state.accepted_updates, device: event.update}
            usage = state.usage.add_update(event.update)
            if event.update.site_devices:
                state = replace(
                    state, sites_by_device={**state.sites_by_device, **dict.fromkeys(event.update.site_devices, device)}
                )
            return replace(
                state,
                pending_devices=state.pending_devices - {device},
                accepted_updates=accepted_updates,
                usage=usage,
                durations=durations,
            )
        case JobStarted():
            next_phase: Phase = "selecting" if state.phase == "new" else state.phase
            state = replace(
                _restart_attempt_time(state, now_s), phase=next_phase, state=event.state, round_started_s=now_s
            )
            state = replace(
                state,
                has_evaluation_rounds=event.has_evaluation_rounds,
                parent_order=event if event.actions else None,
                is_evaluation_round=event.is_evaluation_round,
            )
            if event.first_round < state.round:
                return _rewind_to_round(state, event.first_round)
            return (
                state
                if event.first_round == state.round and not state.accepted_updates
                else _clear_round(state, event.first_round)
            )
        case NoteRecorded():
            return state
        case EligibilityRecorded():
            return _apply_eligibility(state, event)
        case JobResumed():
            phase: Phase = "open" if state.pending_devices or state.accepted_updates else "selecting"
            state = replace(
                _restart_attempt_time(state, now_s), phase=phase, is_deadline_extended=False, attempt=0, reason=""
            )
            return replace(
                state,
                decline_reasons={},
                lasting_declines={},
                devices_without_work=frozenset(),
                silent_devices=(),
                round_started_s=now_s,
            )
        case JobEnded():
            return replace(state, phase=event.status, reason=event.reason)
        case CohortSelected():
            return _apply_cohort_selected(state, event, now_s)
        case TaskDeclined() | UpdateRejected():
            declined = {**state.decline_reasons, event.device: event.reason}
            cohort = state.cohort - {event.device} if isinstance(event, TaskDeclined) else state.cohort
            lasting_declines = state.lasting_declines
            devices_without_work = state.devices_without_work
            pending_devices = state.pending_devices - {event.device}
            if DECLINE_REASONS.get(event.code, UNKNOWN_DECLINE).duration != "attempt":
                agent = (event.agent_start_key, event.shortage) if isinstance(event, TaskDeclined) else ("", None)
                decline = LastingDecline(event.round, event.code, event.reason, frozenset(state.task_actions), *agent)
                lasting_declines = {**lasting_declines, event.device: decline}
            if isinstance(event, TaskDeclined) and event.code == NO_WORK:
                devices_without_work = devices_without_work | {event.device}
            return replace(
                state,
                decline_reasons=declined,
                cohort=cohort,
                lasting_declines=lasting_declines,
                devices_without_work=devices_without_work,
                pending_devices=pending_devices,
            )
        case UpdateLost():
            return _apply_update_lost(state, event, now_s)
        case UpdatesAggregated():
            return replace(state, partial_aggregate=event)
        case RoundClosed():
            return replace(state, phase="closing", pending_devices=frozenset(), expected_devices=frozenset())
        case DeadlineExtended():
            return replace(state, attempt_limit_s=None, is_deadline_extended=True)
        case RoundRetried():
            state = replace(
                _restart_attempt_time(state, now_s),
                attempt=event.attempt,
                is_deadline_extended=False,
                expected_devices=frozenset(),
            )
            silent_devices = (
                *(device for device in state.silent_devices if device not in state.pending_devices),
                *sorted(state.pending_devices),
            )
            return replace(
                state,
                silent_devices=silent_devices,
                pending_devices=frozenset(),
                decline_reasons={},
                devices_without_work=frozenset(),
            )
        case AttemptResumed(passed_s=passed_s):
            return replace(state, opened_s=now_s - passed_s, passed_s=passed_s, restarts=state.restarts + 1)
        case RoundCommitted():
            return _apply_round_committed(state, event, now_s)


def _restart_attempt_time(state: JobState, now_s: float) -> JobState:
    return replace(state, opened_s=now_s, passed_s=0.0, restarts=0)


def _apply_cohort_selected(state: JobState, event: CohortSelected, now_s: float) -> JobState:
    if state.phase == "selecting":
        state = replace(
            _restart_attempt_time(state, now_s),
            phase="open",
            attempt_limit_s=event.deadline_s,
            is_deadline_extended=False,
        )
        state = replace(state, selected_s={}, work={}, cohort=frozenset())
    if not state.cohort_size:
        expected_devices = frozenset(
            device for device, label in state.eligibility.items() if label in (ELIGIBLE, BUSY, SHARE)
        )
        state = replace(state, expected_devices=expected_devices)
    return replace(
        state,
        pending_devices=state.pending_devices | set(event.devices),
        cohort=state.cohort | set(event.devices),
        selected_s={**state.selected_s, **dict.fromkeys(event.devices, now_s)},
        work={**state.work, **event.work},
        epochs={**state.epochs, **event.epochs},
        last_selected_rounds=state.last_selected_rounds.with_values(dict.fromkeys(event.devices, event.round)),
    )


def _apply_update_lost(state: JobState, event: UpdateLost, now_s: float) -> JobState:
    device, selected_s = event.device, {**state.selected_s, event.device: now_s}
    accepted_updates = {name: update for name, update in state.accepted_updates.items() if name != device}
    sites_by_device = (
        {board: site for board, site in state.sites_by_device.items() if site != device}
        if state.sites_by_device
        else {}
    )
    if state.phase == "closing":
        state = replace(_restart_attempt_time(state, now_s), phase="open", is_deadline_extended=False)
    # a partial aggregate that contains the lost update is useless
    partial_aggregate = (
        None if state.partial_aggregate and device in state.partial_aggregate.devices else state.partial_aggregate
    )
    state = replace(
        state,
        accepted_updates=accepted_updates,
        sites_by_device=sites_by_device,
        partial_aggregate=partial_aggregate,
        selected_s=selected_s,
    )
    return replace(
        state, pending_devices=state.pending_devices | {device}, redoing_devices=state.redoing_devices | {device}
    )


def _apply_eligibility(state: JobState, event: EligibilityRecorded) -> JobState:
    ineligible_devices = {device: code for code, devices in event.ineligible.items() for device in devices}
    labels_by_device = {**dict.fromkeys(event.eligible, ELIGIBLE), **ineligible_devices}
    return replace(
        state,
        eligibility=state.eligibility.with_values(labels_by_device),
        costs=state.costs.with_values(event.costs),
        last_selected_rounds=state.last_selected_rounds.with_values(
            {device: event.round for device in labels_by_device if device not in state.last_selected_rounds}
        ),
    )


def _clear_round(state: JobState, round: int) -> JobState:
    """Return the state before a round starts, without devices, updates and declines of the previous round."""
    state = replace(state, round=round, attempt=0, pending_devices=frozenset(), accepted_updates={}, decline_reasons={})
    lasting_declines = {
        name: decline
        for name, decline in state.lasting_declines.items()
        if DECLINE_REASONS[decline.code].duration != "round"
    }
    state = replace(
        state,
        epochs={},
        silent_devices=(),
        partial_aggregate=None,
        devices_without_work=frozenset(),
        redoing_devices=frozenset(),
        sites_by_device={},
    )
    return (
        replace(state, lasting_declines=lasting_declines)
        if len(lasting_declines) < len(state.lasting_declines)
        else state
    )


def _rewind_to_round(state: JobState, round: int) -> JobState:
    """Return the state before a round that the parent repeats, without updates of later rounds.

    A parent repeats rounds after it was restored from an older copy.
    """
    history = {device: rounds.rounds_before(round) for device, rounds in state.history.items()}
    last_selected_rounds = RoundColumn(
        {device: min(last_round, round) for device, last_round in state.last_selected_rounds.items()}
    )
    return replace(_clear_round(state, round), history=history, last_selected_rounds=last_selected_rounds)


def _apply_round_committed(state: JobState, event: RoundCommitted, now_s: float) -> JobState:
    histories = {device: state.history.get(device, NEVER).with_round(state.round) for device in state.accepted_updates}
    history = {**state.history, **histories}
    is_final_evaluation_done = state.is_work_done and not state.is_evaluation_round
    usage = replace(state.usage, wall_s=state.usage.wall_s + event.took_s)
    new_state = _restart_attempt_time(_clear_round(state, state.round + 1), now_s)
    new_state = replace(new_state, phase="selecting", round_started_s=now_s, state=event.state)
    new_state = replace(
        new_state,
        history=history,
        is_method_done=state.is_method_done or event.finished,
        is_final_evaluation_done=is_final_evaluation_done,
        is_evaluation_round=False,
    )
    new_state = replace(
        new_state,
        evaluation_rounds=state.evaluation_rounds + event.is_evaluation_round,
        usage=usage,
        best=state.best_after(event.evaluation),
    )
    if state.constants.class_priors and event.evaluation is not None:
        new_state = replace(new_state, class_counts=evaluation.count_classes(event.evaluation))
    return replace(
        new_state,
        is_evaluation_round=state.has_evaluation_rounds
        and not event.is_evaluation_round
        and _is_evaluation_round_next(new_state),
    )


def _is_evaluation_round_next(state: JobState) -> bool:
    is_evaluation_due = bool(every := state.constants.check_every) and state.completed_rounds % every == 0
    return not state.is_final_evaluation_done and (
        state.is_work_done or is_evaluation_due or state.reached_limit is not None
    )


class JobView(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def job(self) -> JobSettings: ...

    @property
    def job_state(self) -> JobState: ...


class EndedJob(NamedTuple):
    id: str
    job: JobSettings
    job_state: JobState
