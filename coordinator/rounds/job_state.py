"""Job state, computed from a job's constants and events without I/O.

`apply_event` applies one event to the state. The server writes each event to the log before acting on the event, so
that replaying the log after a crash gives the same state. An event raises JobError if `events.TRANSITIONS` does not
allow the event in this phase, or if it is of another round than the running one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import field
from msgspec.structs import replace

from fedquilt.coordinator.device_columns import ELIGIBLE, NEVER, CostColumn, LabelColumn, RoundBitmap, RoundColumn
from fedquilt.coordinator.privacy_settings import PrivacySettings
from fedquilt.coordinator.rounds import deadline, events
from fedquilt.coordinator.rounds.buffering import MAX_SELECTIONS, Backoff, Mode
from fedquilt.coordinator.rounds.deadline import DeviceWorkload, MemoryShortage
from fedquilt.coordinator.rounds.job_limits import (
    BestEvaluation,
    ResourceUsage,
    add_evaluation,
    describe_reached_limit,
)
from fedquilt.coordinator.rounds.selection import (
    BUSY,
    DECLINE_REASONS,
    NO_WORK,
    SHARE,
    UNKNOWN_DECLINE,
    CohortDraw,
    LastingDecline,
)
from fedquilt.coordinator.settings import CohortSettings, JobLimits, JobSettings
from fedquilt.core import Action, BlobRef, EvaluationSums, JobError, Update, evaluation

T = TypeVar("T")


class JobConstants(msgspec.Struct, frozen=True):
    seed: int
    rounds: int
    cohort: CohortSettings
    check_every: int  # rounds between evaluations, or 0 for none
    stop: JobLimits = JobLimits()
    check_beside: bool = False  # the coordinator's process evaluates, not the devices
    class_priors: bool = False  # devices also evaluate with class priors
    privacy: PrivacySettings | None = None

    @staticmethod
    def from_job(job: JobSettings) -> JobConstants:
        priors = job.personal.prior == "auto"
        return JobConstants(
            job.seed, job.rounds, job.cohort, job.check.every, job.stop, job.check.beside, priors, job.privacy
        )


class TaskVersion(msgspec.Struct, frozen=True):
    round: int
    attempt: int
    state: BlobRef | None


class JobState(msgspec.Struct, frozen=True):
    constants: JobConstants
    phase: events.Phase = "new"
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
    partial_aggregate: events.UpdatesAggregated | None = None  # stored partial aggregate, whose updates are deleted
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
    parent_order: events.JobStarted | None = None  # on a site, the parent's settings of the running round
    # device of a site -> site whose update in this round contains the device
    sites_by_device: Mapping[str, str] = field(default_factory=dict)
    evaluation_rounds: RoundBitmap = NEVER
    class_counts: tuple[int, ...] = ()  # held-out examples of each class in the last evaluation
    reason: str = ""
    privacy_plan: events.PrivacyPlanned | None = None
    spent_epsilon: float = 0.0  # of [privacy] epsilon
    # buffered mode: device -> its task of an earlier round, which is open or whose update this round has accepted
    earlier_versions: Mapping[str, TaskVersion] = field(default_factory=dict)
    earlier_states: tuple[BlobRef, ...] = ()  # states of `RoundCommitted` on which devices still worked
    chosen_mode: Mode | None = None  # of mode = "auto"
    selection_count: int = 0  # buffered mode: number of `CohortSelected` events
    # buffered mode: device -> numbers of its latest selections, oldest first
    latest_selections: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    task_limits_s: Mapping[str, float] = field(default_factory=dict)  # buffered mode: predicted deadlines of tasks
    backoffs: Mapping[str, Backoff] = field(default_factory=dict)

    @property
    def eligible(self) -> frozenset[str]:
        return frozenset(device for device, label in self.eligibility.items() if label == ELIGIBLE)

    @property
    def ineligibility_reasons(self) -> dict[str, str]:
        return {device: label for device, label in self.eligibility.items() if label != ELIGIBLE}

    @property
    def draw(self) -> CohortDraw:
        constants = self.constants
        if constants.privacy is not None:  # the devices with the fewest contributions precede all others
            contributions = RoundColumn({device: len(rounds) for device, rounds in self.history.items()})
            return CohortDraw(constants.seed, self.round, self.costs, contributions, turns=0.0)
        return CohortDraw(constants.seed, self.round, self.costs, self.last_selected_rounds, constants.cohort.turns)

    @property
    def training_size(self) -> int:
        """Number of wanted updates in rounds that train, or 0 for all devices."""
        cohort = self.constants.cohort
        return cohort.concurrency if self.chosen_mode == "synchronous" else cohort.size

    @property
    def cohort_size(self) -> int:
        """Number of wanted updates, or 0 for all devices, as in every evaluation round."""
        return 0 if self.is_evaluation_round else self.training_size

    @property
    def is_buffered(self) -> bool:
        return (self.chosen_mode or self.constants.cohort.mode) == "buffered"

    def task_version(self, device: str) -> TaskVersion:
        """Return the round, attempt and state of a device's task, which may be earlier in buffered mode."""
        return self.earlier_versions.get(device) or TaskVersion(self.round, self.attempt, self.state)

    def is_new_contributor(self, device: str) -> bool:
        """Return whether no update of a device has been aggregated, evaluations aside."""
        return not self.history.get(device, NEVER).without(self.evaluation_rounds)

    @property
    def completed_rounds(self) -> int:  # without evaluation rounds
        return self.round - len(self.evaluation_rounds)

    @property
    def is_work_done(self) -> bool:
        return self.is_method_done or self.completed_rounds >= self.constants.rounds

    @property
    def task_actions(self) -> tuple[Action, ...]:
        """Actions of the running round's tasks: evaluation ("check"), training ("work") or both."""
        if self.parent_order is not None and self.parent_order.actions:
            return self.parent_order.actions
        if self.is_evaluation_round:
            return ("work",)
        if self.is_work_done and not self.is_buffered:
            return ("check",)
        every = 0 if self.constants.check_beside else self.constants.check_every
        return ("check", "work") if every and self.completed_rounds % every == 0 else ("work",)

    @property
    def reached_limit(self) -> str | None:
        return describe_reached_limit(self.constants.stop, self.usage, self.best)

    def best_after(self, sums: EvaluationSums | None) -> BestEvaluation | None:
        if not self.constants.check_every:  # a site evaluates only for its parent
            return self.best
        return add_evaluation(self.best, sums, self.state, self.completed_rounds, self.constants.stop.min_gain)

    @property
    def deadline_s(self) -> float:
        return self.max_deadline_s if self.attempt_limit_s is None else self.attempt_limit_s

    @property
    def max_deadline_s(self) -> float:
        return (self.parent_order and self.parent_order.deadline_s) or self.constants.cohort.deadline_s

    def task_deadline_s(self, device: str) -> float:
        """Return when a device's task is late: at the attempt's deadline or, if buffered, at its own."""
        if not self.is_buffered:
            return self.opened_s + self.deadline_s
        return self.selected_s.get(device, self.opened_s) + self.task_limits_s.get(device, self.deadline_s)

    @property
    def remaining_updates(self) -> int:
        """Number of updates until the last round is complete, in buffered mode."""
        return (self.constants.rounds - self.completed_rounds) * self.cohort_size - len(self.accepted_updates)

    def remaining_s(self, device: str, now_s: float) -> float:
        return max(self.task_deadline_s(device) - now_s, 0.0)

    def decline_event(
        self, device: str, code: str, reason: str, workload: DeviceWorkload, agent_start_key: str = ""
    ) -> events.TaskDeclined:
        """Return the event of a declined task, with its memory requirements if the device lacked memory."""
        lacks_memory = DECLINE_REASONS.get(code, UNKNOWN_DECLINE).duration == "rounds"
        return events.TaskDeclined(
            self.round,
            device,
            code,
            reason,
            MemoryShortage.from_workload(workload) if lacks_memory else None,
            agent_start_key,
        )

    def acceptance_event(
        self, update: Update, now_s: float, workload: DeviceWorkload = DeviceWorkload()
    ) -> events.UpdateAccepted:
        """Return the event of an accepted update, with the duration of the task.

        The duration is the time since the selection of the device, but at least the time that the device reports.
        After a restart of the coordinator only the latter is known.
        """
        waited_s = now_s - self.selected_s.get(update.device, now_s)
        usage = update.usage
        expected_s = deadline.predict_duration_s(workload.work, workload.profile, usage.point, usage.examples or 1)
        return events.UpdateAccepted(self.round, update, max(waited_s, usage.wall_s), expected_s)


def apply_event(state: JobState, event: events.AnyEvent, now_s: float) -> JobState:
    """Return the state after an event, or raise JobError if the round or the phase forbids the event."""
    kind, event_round = type(event).__name__, getattr(event, "round", state.round)
    allowed_phases = events.TRANSITIONS[kind].get(state.phase, ())
    if event_round != state.round:
        raise JobError(
            f"event log: {kind} belongs to round {event_round + 1}, but the running round is {state.round + 1}"
            f"{_FOREIGN_LOG_HINT}"
        )
    new_state = _apply_allowed_event(state, event, now_s) if allowed_phases else state
    if new_state.phase not in allowed_phases:
        raise JobError(
            f"event log: {kind} in round {state.round + 1} is not allowed while the job is {state.phase!r}"
            f"{_FOREIGN_LOG_HINT}"
        )
    return new_state


_FOREIGN_LOG_HINT = ". Another version of the coordinator wrote this log: submit the job again"


def _apply_allowed_event(state: JobState, event: events.AnyEvent, now_s: float) -> JobState:
    match event:  # the most frequent first
        case events.UpdateAccepted():
            device, durations = event.update.device, state.durations
            if device in state.lasting_declines:
                state = replace(
                    state,
                    lasting_declines={
                        name: decline for name, decline in state.lasting_declines.items() if name != device
                    },
                )
            if state.constants.cohort.deadline != "fixed" or state.is_buffered:
                durations = deadline.add_update_duration(
                    durations, event.update, state.work, event.took_s, event.expected_s
                )
            if event.update.site_devices:
                state = replace(
                    state, sites_by_device={**state.sites_by_device, **dict.fromkeys(event.update.site_devices, device)}
                )
            return replace(
                state,
                pending_devices=state.pending_devices - {device},
                accepted_updates={**state.accepted_updates, device: event.update},
                usage=state.usage.add_update(event.update),
                durations=durations,
                backoffs=_without_devices(state.backoffs, {device}),
            )
        case events.JobStarted():
            next_phase: events.Phase = "selecting" if state.phase == "new" else state.phase
            state = replace(
                _restart_attempt_time(state, now_s),
                phase=next_phase,
                state=event.state,
                round_started_s=now_s,
                has_evaluation_rounds=event.has_evaluation_rounds,
                parent_order=event if event.actions else None,
                is_evaluation_round=event.is_evaluation_round,
            )
            if event.first_round < state.round:
                return _rewind_to_round(state, event.first_round)
            if event.first_round == state.round and not state.accepted_updates:
                return state
            return _clear_round(state, event.first_round)
        case events.NoteRecorded():
            return state
        case events.ModeChosen(mode=mode):
            return replace(state, chosen_mode=mode)
        case events.PrivacyPlanned():
            return replace(state, privacy_plan=event)
        case events.EligibilityRecorded():
            return _apply_eligibility(state, event)
        case events.JobResumed():
            phase: events.Phase = "open" if state.pending_devices or state.accepted_updates else "selecting"
            return replace(
                _restart_attempt_time(state, now_s),
                phase=phase,
                is_deadline_extended=False,
                attempt=0,
                reason="",
                decline_reasons={},
                lasting_declines={},
                devices_without_work=frozenset(),
                silent_devices=(),
                round_started_s=now_s,
            )
        case events.JobEnded():
            return replace(state, phase=event.status, reason=event.reason)
        case events.CohortSelected():
            return _apply_cohort_selected(state, event, now_s)
        case events.TaskDeclined() | events.UpdateRejected():
            agent_start_key, shortage = "", None
            if isinstance(event, events.TaskDeclined):
                agent_start_key, shortage = event.agent_start_key, event.shortage
                state = replace(state, cohort=state.cohort - {event.device})
                if event.code == NO_WORK:
                    state = replace(state, devices_without_work=state.devices_without_work | {event.device})
            if DECLINE_REASONS.get(event.code, UNKNOWN_DECLINE).duration != "attempt":
                actions = frozenset(state.task_actions)
                decline = LastingDecline(event.round, event.code, event.reason, actions, agent_start_key, shortage)
                state = replace(state, lasting_declines={**state.lasting_declines, event.device: decline})
            return replace(
                state,
                decline_reasons={**state.decline_reasons, event.device: event.reason},
                pending_devices=state.pending_devices - {event.device},
                earlier_versions=_without_devices(state.earlier_versions, {event.device}),
            )
        case events.TasksCancelled():
            if event.reason == "staleness":
                state = replace(state, backoffs={**state.backoffs, **_extend_backoffs(state, event.devices)})
            return _end_tasks_without_update(state, frozenset(event.devices))
        case events.UpdateLost():
            return _apply_update_lost(state, event, now_s)
        case events.UpdatesAggregated():
            return replace(state, partial_aggregate=event)
        case events.RoundClosed():
            pending_devices = state.pending_devices if state.is_buffered else frozenset[str]()
            return replace(state, phase="closing", pending_devices=pending_devices, expected_devices=frozenset())
        case events.DeadlineExtended():
            return replace(state, attempt_limit_s=None, is_deadline_extended=True)
        case events.RoundRetried():
            return replace(
                _restart_attempt_time(_end_tasks_without_update(state, state.pending_devices), now_s),
                attempt=event.attempt,
                is_deadline_extended=False,
                expected_devices=frozenset(),
                decline_reasons={},
                devices_without_work=frozenset(),
            )
        case events.AttemptResumed(passed_s=passed_s):
            return replace(state, opened_s=now_s - passed_s, passed_s=passed_s, restarts=state.restarts + 1)
        case events.RoundCommitted():
            return _apply_round_committed(state, event, now_s)


def _end_tasks_without_update(state: JobState, devices: frozenset[str]) -> JobState:
    """Return the state after these devices' tasks end without update. They are now selected last."""
    silent_devices = [device for device in state.silent_devices if device not in devices]
    return replace(
        state,
        silent_devices=(*silent_devices, *sorted(devices)),
        pending_devices=state.pending_devices - devices,
        earlier_versions=_without_devices(state.earlier_versions, devices),
    )


def _extend_backoffs(state: JobState, devices: Sequence[str]) -> dict[str, Backoff]:
    max_staleness = state.constants.cohort.staleness.max
    return {device: Backoff.after_task(state.backoffs.get(device), state.round, max_staleness) for device in devices}


def _without_devices(values: Mapping[str, T], devices: AbstractSet[str]) -> Mapping[str, T]:
    return {device: value for device, value in values.items() if device not in devices}


def _restart_attempt_time(state: JobState, now_s: float) -> JobState:
    return replace(state, opened_s=now_s, passed_s=0.0, restarts=0)


def _apply_cohort_selected(state: JobState, event: events.CohortSelected, now_s: float) -> JobState:
    if state.phase == "selecting":
        state = replace(
            _restart_attempt_time(state, now_s),
            phase="open",
            attempt_limit_s=None if state.is_buffered else event.deadline_s,
            is_deadline_extended=False,
            selected_s={device: state.selected_s.get(device, now_s) for device in state.pending_devices},
            work={device: state.work[device] for device in state.pending_devices if device in state.work},
            cohort=state.pending_devices,
        )
    if not state.cohort_size:
        expected_labels = (ELIGIBLE, BUSY, SHARE)
        expected_devices = (device for device, label in state.eligibility.items() if label in expected_labels)
        state = replace(state, expected_devices=frozenset(expected_devices))
    if state.is_buffered:
        state = _number_selections(state, event)
    return replace(
        state,
        pending_devices=state.pending_devices | set(event.devices),
        cohort=state.cohort | set(event.devices),
        earlier_versions=_without_devices(state.earlier_versions, set(event.devices)),
        selected_s={**state.selected_s, **dict.fromkeys(event.devices, now_s)},
        work={**state.work, **event.work},
        epochs={**state.epochs, **event.epochs},
        last_selected_rounds=state.last_selected_rounds.with_values(dict.fromkeys(event.devices, event.round)),
    )


def _number_selections(state: JobState, event: events.CohortSelected) -> JobState:
    numbers = {
        device: (*state.latest_selections.get(device, ()), state.selection_count)[-MAX_SELECTIONS:]
        for device in event.devices
    }
    limits_s = {} if event.deadline_s is None else dict.fromkeys(event.devices, event.deadline_s)
    return replace(
        state,
        selection_count=state.selection_count + 1,
        latest_selections={**state.latest_selections, **numbers},
        task_limits_s={**_without_devices(state.task_limits_s, set(event.devices)), **limits_s},
    )


def _apply_update_lost(state: JobState, event: events.UpdateLost, now_s: float) -> JobState:
    """Return the state in which the device repeats its task. A closing round is open again."""
    device, partial_aggregate = event.device, state.partial_aggregate
    if state.phase == "closing":
        state = replace(_restart_attempt_time(state, now_s), phase="open", is_deadline_extended=False)
    if partial_aggregate is not None and device in partial_aggregate.devices:
        partial_aggregate = None  # the aggregate contains the lost update
    return replace(
        state,
        accepted_updates={name: update for name, update in state.accepted_updates.items() if name != device},
        sites_by_device={board: site for board, site in state.sites_by_device.items() if site != device},
        partial_aggregate=partial_aggregate,
        selected_s={**state.selected_s, device: now_s},
        pending_devices=state.pending_devices | {device},
        redoing_devices=state.redoing_devices | {device},
    )


def _apply_eligibility(state: JobState, event: events.EligibilityRecorded) -> JobState:
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
    return replace(
        state,
        round=round,
        attempt=0,
        pending_devices=frozenset(),
        accepted_updates={},
        decline_reasons={},
        lasting_declines={
            device: decline
            for device, decline in state.lasting_declines.items()
            if DECLINE_REASONS[decline.code].duration != "round"
        },
        epochs={},
        silent_devices=(),
        partial_aggregate=None,
        devices_without_work=frozenset(),
        redoing_devices=frozenset(),
        sites_by_device={},
        earlier_versions={},
    )


def _rewind_to_round(state: JobState, round: int) -> JobState:
    """Return the state at the start of an earlier round, without updates of that and later rounds.

    A parent repeats rounds after it was restored from an older copy.
    """
    history = {device: rounds.rounds_before(round) for device, rounds in state.history.items()}
    last_selected_rounds = RoundColumn(
        {device: min(last_round, round) for device, last_round in state.last_selected_rounds.items()}
    )
    state = replace(_clear_round(state, round), history=history, last_selected_rounds=last_selected_rounds)
    return replace(state, evaluation_rounds=state.evaluation_rounds.rounds_before(round))


def _apply_round_committed(state: JobState, event: events.RoundCommitted, now_s: float) -> JobState:
    histories = {
        device: state.history.get(device, NEVER).with_round(update.round)
        for device, update in state.accepted_updates.items()
    }
    new_state = replace(
        _restart_attempt_time(_clear_round(state, state.round + 1), now_s),
        phase="selecting",
        pending_devices=state.pending_devices,
        earlier_versions={device: state.task_version(device) for device in state.pending_devices},
        earlier_states=event.earlier_states,
        spent_epsilon=event.spent_epsilon or state.spent_epsilon,
        round_started_s=now_s,
        state=event.state,
        history={**state.history, **histories},
        is_method_done=state.is_method_done or event.finished,
        is_final_evaluation_done=state.is_work_done and not state.is_evaluation_round,
        is_evaluation_round=False,
        evaluation_rounds=state.evaluation_rounds.with_round(state.round, is_in=event.is_evaluation_round),
        usage=replace(state.usage, wall_s=state.usage.wall_s + event.took_s),
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
    is_due = is_evaluation_due or state.is_work_done or state.reached_limit is not None
    return is_due and not state.is_final_evaluation_done


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
