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
from fedquilt.coordinator.rounds.selection import BUSY, NOTHING, REFUSALS, SHARE, UNKNOWN, UPDATE, LastingDecline
from fedquilt.coordinator.settings import CohortSettings, JobLimits, JobSettings
from fedquilt.core import Action, BlobRef, EvaluationSums, FedquiltError, JobError, Update, evaluation

ROUNDING: Final = 1e-9  # by which a gain may be below `min_gain`


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

    metric: str  # a key of `metrics.KNOWN`
    value: float
    rounds: int  # completed before it
    state: BlobRef  # that was evaluated
    reference: float  # value from which the next gain is measured
    without_gain: int = 0

    def describe(self) -> str:
        value = metrics.format_value(metrics.KNOWN[self.metric], self.value)
        return f"{metrics.KNOWN[self.metric].title} {value} after {self.rounds} round{'s' * (self.rounds != 1)}"


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
    gained = gain > 0 and gain >= min_gain - ROUNDING
    best = (
        replace(best, reference=value, without_gain=0) if gained else replace(best, without_gain=best.without_gain + 1)
    )
    return replace(best, value=value, rounds=rounds, state=state) if sign * (value - best.value) > 0 else best


def describe_reached_limit(limits: JobLimits, spent: ResourceUsage, best: BestEvaluation | None = None) -> str | None:
    if limits.patience is not None and best is not None and best.without_gain >= limits.patience:
        least = f" of {limits.min_gain:g}" if limits.min_gain else ""
        some = f"{best.without_gain} evaluation{'s' * (best.without_gain > 1)}"
        return f"patience: no gain{least} in {some}; the best is {best.describe()}"
    if limits.max_joules is not None and spent.joules >= limits.max_joules:
        return f"max_joules: {spent.joules:.4g} J of {limits.max_joules:.4g} J are used up{_unmetered_suffix(spent)}"
    if limits.max_bytes is not None and spent.bytes >= limits.max_bytes:
        return f"max_bytes: {spent.bytes} bytes of {limits.max_bytes} are used up"
    if limits.max_wall_s is not None and spent.wall_s >= limits.max_wall_s:
        return f"max_wall_s: {spent.wall_s:.4g} s of {limits.max_wall_s:.4g} s are used up"
    return None


def describe_unmetered_tasks(limits: JobLimits, spent: ResourceUsage) -> str | None:
    """Return a sentence on tasks missing from the joules, or None without tasks or a limit."""
    if limits.max_joules is None or not spent.unmetered:
        return None
    if not spent.metered:
        return (
            f"max_joules = {limits.max_joules:.4g} ends nothing here: no board that has answered has a meter for its "
            "joules; the job runs to its rounds, or to another limit of [stop]"
        )
    return f"max_joules counts {spent.joules:.4g} J of {limits.max_joules:.4g} J{_unmetered_suffix(spent)}"


def _unmetered_suffix(spent: ResourceUsage) -> str:
    if not spent.unmetered:
        return ""
    return f", without {spent.unmetered} task{'s' * (spent.unmetered > 1)} on boards that have no meter"


class JobConstants(msgspec.Struct, frozen=True):
    seed: int
    rounds: int
    cohort: CohortSettings
    check_every: int  # rounds between evaluations, or 0 for none
    stop: JobLimits = JobLimits()
    check_beside: bool = False  # evaluation rounds take place, and no device evaluates
    class_priors: bool = False  # evaluations count with them too

    @staticmethod
    def from_job(job: JobSettings) -> JobConstants:
        priors = job.personal.prior == "auto"
        return JobConstants(job.seed, job.rounds, job.cohort, job.check.every, job.stop, job.check.beside, priors)


Phase: TypeAlias = Literal["new", "selecting", "open", "closing", "done", "failed", "stopped"]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
ENDED: Final = ("done", "failed", "stopped")  # phases, and statuses of runs, in which no round is under way
_STAYS: Final[Mapping[Phase, tuple[Phase, ...]]] = {"open": ("open",)}
# A job that was stopped or failed between two messages of one turn still records the second one: the work counts
# when the job is resumed.
_ARRIVES: Final[Mapping[Phase, tuple[Phase, ...]]] = {**_STAYS, "stopped": ("stopped",), "failed": ("failed",)}
TRANSITIONS: Final[Mapping[str, Mapping[Phase, tuple[Phase, ...]]]] = {
    "NoteRecorded": {"new": ("new",), "stopped": ("stopped",), "failed": ("failed",)},  # of a run that waits to begin
    "JobStarted": {"new": ("selecting",), "stopped": ("stopped",), "failed": ("failed",)},
    "EligibilityRecorded": {"selecting": ("selecting",), "open": ("open",)},
    "CohortSelected": {"selecting": ("open",), "open": ("open",)},
    "TaskDeclined": _ARRIVES,
    "UpdateAccepted": _ARRIVES,
    "UpdateRejected": _ARRIVES,
    "UpdateLost": {**_ARRIVES, "closing": ("open",)},
    "UpdatesAggregated": {**_STAYS, "closing": ("closing",)},
    "DeadlineExtended": _STAYS,
    "RoundRetried": _STAYS,
    "AttemptResumed": _STAYS,
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
"""Name of a fact's class -> phase before it -> phases that it may lead to."""


class Event(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True): ...


class JobStarted(Event, frozen=True, omit_defaults=True):
    """Start of a job with the method's first state, or of a site's round with a state from above."""

    state: BlobRef
    settles: bool = False  # whether an evaluation round (`core.EvaluationRound`) precedes each evaluation
    begins: int = 0  # number of the round that begins with it: a later one than the next, or one to work for anew
    actions: tuple[Action, ...] = ()  # of that round's tasks, as ordered from above; (): by the job's settings
    settling: bool = False  # whether that round is a settling one
    deadline_s: float | None = None  # of that round's attempt; None: the cohort's
    class_shares: tuple[float, ...] = ()  # of the whole fleet, as ordered from above


class EligibilityRecorded(Event, frozen=True):
    round: int
    eligible: tuple[str, ...] = ()
    passed: dict[str, tuple[str, ...]] = {}  # a key of `eligible.REASONS` -> devices
    costs: dict[str, float] = {}  # device -> joules per FLOP, where the cohort prefers by it


class CohortSelected(Event, frozen=True):
    round: int
    attempt: int
    devices: tuple[str, ...]
    work: dict[str, float] = {}  # device -> `deadline.work_amount` of its task, where the method predicts it
    deadline_s: float | None = None  # of the round that this fact opens; None: the cohort's
    coverage: tuple[str, ...] = ()  # sentences on which devices could take part, where that has changed
    epochs: dict[str, int] = {}  # device -> epochs to train for in this round, where they are not the job's


class TaskDeclined(Event, frozen=True):
    round: int
    device: str
    code: str
    reason: str
    short: MemoryShortage | None = None  # requirements of the task, where it lacked memory
    start: str = ""  # of its agent, as of `DeviceRegistry.agent_start_key`; "": not known


class UpdateAccepted(Event, frozen=True):
    """Acceptance of a device's update, which is validated and whose blobs are on disk."""

    round: int
    update: Update
    took_s: float | None = None  # seconds since it was asked; None: not noted
    expected_s: float | None = None  # duration predicted by its profile, at the point at which the task ran


class UpdateRejected(Event, frozen=True, omit_defaults=True):
    """Rejection of a device's update, or exclusion of the device from the round."""

    round: int
    device: str
    reason: str
    code: str = UPDATE  # as of `eligibility.REFUSALS`


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
    passed_s: float  # of the deadline, as `decisions.restart_event` counts them


class RoundCommitted(Event, frozen=True):
    round: int
    state: BlobRef
    finished: bool
    metrics: dict[str, float]  # of training
    notes: tuple[str, ...] = ()  # of the method
    took_s: float = 0.0  # seconds since the round before, as far as the running coordinator has seen
    settled: bool = False  # it trained nobody, gathered statistics for an evaluation, and does not count
    evaluation: EvaluationSums | None = None  # of the state that the round began with
    best: bool = False  # whether that evaluation is the best so far
    warnings: tuple[str, ...] = ()  # of the coordinator


class JobEnded(Event, frozen=True, omit_defaults=True):
    """End of a job, or its interruption until a `JobResumed` event."""

    status: Literal["done", "failed", "stopped"]
    reason: str = ""  # of a round that failed: the cause, and in a second line the fix
    code: str = ""  # most frequent refusal of a round that failed, as of `eligibility.REFUSALS`


def failure_event(error: Exception) -> JobEnded:
    """Return the event that ends a job with the error's message. Invalid Unicode is escaped."""
    said = str(error) if isinstance(error, FedquiltError) else f"{type(error).__name__}: {error}"
    return JobEnded("failed", said.encode("utf-8", "backslashreplace").decode())


class JobResumed(Event, frozen=True): ...


class NoteRecorded(Event, frozen=True):
    """Note on a run that has not started, such as its trigger or its approval."""

    said: str


_OfAttempt = (
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
_OfRound = _OfAttempt | RoundClosed | RoundCommitted
AnyEvent = NoteRecorded | JobStarted | _OfRound | JobEnded | JobResumed


class JobState(msgspec.Struct, frozen=True):
    """State of a job, as given by applying all its events in order (`apply_event`)."""

    plan: JobConstants
    phase: Phase = "new"
    round: int = 0
    attempt: int = 0
    opened_s: float = 0.0  # start of the running attempt, on this process's clock
    passed_s: float = 0.0  # seconds of the attempt at the latest restart of the coordinator within it
    restarts: int = 0  # of the coordinator within the attempt
    allowed_s: float | None = None  # duration allowed for it; None: the cohort's deadline_s
    extended: bool = False  # it has passed its first deadline
    state: BlobRef | None = None
    asked: frozenset[str] = frozenset()  # asked in this attempt, and not answered, declined or rejected
    roll: frozenset[str] = frozenset()  # asked in this or else the last round, and not declined
    # where all are wanted: who took part when devices were last asked in this attempt
    due: frozenset[str] = frozenset()
    silent: tuple[str, ...] = ()  # asked in earlier attempts at this round and not heard, the latest asked last
    answered: Mapping[str, Update] = field(default_factory=dict)  # device -> its update of this round
    folded: UpdatesAggregated | None = None  # stored partial aggregate, whose updates are deleted
    asked_s: Mapping[str, float] = field(default_factory=dict)  # device -> when it was asked, on this process's clock
    work: Mapping[str, float] = field(default_factory=dict)  # device -> amount of work of its task in this round
    epochs: Mapping[str, int] = field(default_factory=dict)  # device -> epochs in this round, where not the job's
    took: deadline.Known = field(default_factory=dict)
    labels: LabelColumn = field(default_factory=LabelColumn)  # who can be asked, by the latest `EligibilityRecorded`
    costs: CostColumn = field(default_factory=CostColumn)
    since: RoundColumn = field(default_factory=RoundColumn)  # round in which it was last asked, or first seen
    spent: ResourceUsage = ResourceUsage()
    best: BestEvaluation | None = None
    began_s: float = 0.0  # start of the running round, or when this process took up the job
    declined: Mapping[str, str] = field(default_factory=dict)  # device -> reason; not asked again in this attempt
    # device -> its last refusal, if that kind lasts
    refused: Mapping[str, LastingDecline] = field(default_factory=dict)
    idle: frozenset[str] = frozenset()  # of these: devices that the method has no task for in this round
    lost: frozenset[str] = frozenset()  # devices that have counted this round already, and work on it again
    history: Mapping[str, RoundBitmap] = field(default_factory=dict)  # device -> rounds it contributed to
    finished: bool = False  # the method is done
    checked: bool = False  # the final evaluation is complete
    settles: bool = False  # the method has evaluation rounds, before an evaluation and at the end
    settling: bool = False  # the running round is one
    ordered: JobStarted | None = None  # of a site: what the coordinator above has ordered of the running round
    through: Mapping[str, str] = field(default_factory=dict)  # a site's board -> the site, whose update of now has it
    extra: int = 0  # number of evaluation rounds so far
    class_counts: tuple[int, ...] = ()  # held-out examples of each class in the last evaluation
    reason: str = ""

    @property
    def eligible(self) -> frozenset[str]:
        return frozenset(device for device, label in self.labels.items() if label == ELIGIBLE)

    @property
    def passed(self) -> dict[str, str]:
        return {device: label for device, label in self.labels.items() if label != ELIGIBLE}

    @property
    def cohort_size(self) -> int:
        """Number of wanted updates, or 0 for all devices, as in every evaluation round."""
        return 0 if self.settling else self.plan.cohort.size

    @property
    def completed_rounds(self) -> int:
        """Number of committed rounds, without evaluation rounds."""
        return self.round - self.extra

    @property
    def is_work_done(self) -> bool:
        """Whether only an evaluation round and the final evaluation may be left."""
        return self.finished or self.round - self.extra >= self.plan.rounds

    @property
    def task_actions(self) -> tuple[Action, ...]:
        """Actions of the running round's tasks: evaluation ("check"), training ("work") or both."""
        if self.ordered is not None and self.ordered.actions:
            return self.ordered.actions
        every = 0 if self.plan.check_beside else self.plan.check_every
        if self.is_work_done and not self.settling:
            return ("check",)
        return ("check", "work") if not self.settling and every and self.completed_rounds % every == 0 else ("work",)

    @property
    def reached_limit(self) -> str | None:
        return describe_reached_limit(self.plan.stop, self.spent, self.best)

    def best_after(self, sums: EvaluationSums | None) -> BestEvaluation | None:
        """Return the best evaluation after one of the state that the running round began with."""
        if not self.plan.check_every:  # a site evaluates for the coordinator above
            return self.best
        return add_evaluation(self.best, sums, self.state, self.completed_rounds, self.plan.stop.min_gain)

    @property
    def deadline_s(self) -> float:
        return self.max_deadline_s if self.allowed_s is None else self.allowed_s

    @property
    def max_deadline_s(self) -> float:
        return (self.ordered and self.ordered.deadline_s) or self.plan.cohort.deadline_s

    def remaining_s(self, now_s: float) -> float:
        return max(self.opened_s + self.deadline_s - now_s, 0.0)

    def decline_event(self, device: str, code: str, reason: str, ask: DeviceWorkload, start: str = "") -> TaskDeclined:
        lacks_memory = REFUSALS.get(code, UNKNOWN).lasts == "rounds"
        return TaskDeclined(
            self.round, device, code, reason, MemoryShortage.from_workload(ask) if lacks_memory else None, start
        )

    def acceptance_event(self, update: Update, now_s: float, ask: DeviceWorkload = DeviceWorkload()) -> UpdateAccepted:
        """Return the event that a device's update is accepted, with the duration of its task.

        The duration is the time since the selection of the device, but at least the time that the device reports.
        After a restart of the coordinator only the latter is known.
        """
        waited_s = now_s - self.asked_s.get(update.device, now_s)
        usage = update.usage
        expected_s = deadline.predict_duration_s(ask.work, ask.profile, usage.point, usage.examples or 1)
        return UpdateAccepted(self.round, update, max(waited_s, usage.wall_s), expected_s)


def apply_event(state: JobState, fact: AnyEvent, now_s: float) -> JobState:
    kind, of = type(fact).__name__, getattr(fact, "round", state.round)
    to = TRANSITIONS[kind].get(state.phase, ())
    if of != state.round:
        raise JobError(
            f"{kind} of round {of + 1} in the log of a job whose running round is {state.round + 1}{_NOT_OURS}"
        )
    after = _apply_allowed_event(state, fact, now_s) if to else state
    if after.phase not in to:
        raise JobError(f"{kind} in round {state.round + 1} cannot happen to a job that is {state.phase}{_NOT_OURS}")
    return after


_NOT_OURS = ": the log was not written by this coordinator's rules; run the job anew"


def _apply_allowed_event(state: JobState, fact: AnyEvent, now_s: float) -> JobState:
    match fact:  # the most frequent first
        case UpdateAccepted():
            device, took = fact.update.device, state.took
            if device in state.refused:
                state = replace(state, refused={name: kept for name, kept in state.refused.items() if name != device})
            if state.plan.cohort.deadline != "fixed":  # later deadlines are predicted from what tasks took so far
                took = deadline.add_update_duration(took, fact.update, state.work, fact.took_s, fact.expected_s)
            answered, spent = {**state.answered, device: fact.update}, state.spent.add_update(fact.update)
            if fact.update.site_devices:
                state = replace(state, through={**state.through, **dict.fromkeys(fact.update.site_devices, device)})
            return replace(state, asked=state.asked - {device}, answered=answered, spent=spent, took=took)
        case JobStarted():
            begun: Phase = "selecting" if state.phase == "new" else state.phase
            state = replace(_restart_attempt_time(state, now_s), phase=begun, state=fact.state, began_s=now_s)
            state = replace(state, settles=fact.settles, ordered=fact if fact.actions else None, settling=fact.settling)
            if fact.begins < state.round:
                return _rewind_to_round(state, fact.begins)
            return state if fact.begins == state.round and not state.answered else _clear_round(state, fact.begins)
        case NoteRecorded():
            return state
        case EligibilityRecorded():
            return _apply_eligibility(state, fact)
        case JobResumed():
            phase: Phase = "open" if state.asked or state.answered else "selecting"
            state = replace(_restart_attempt_time(state, now_s), phase=phase, extended=False, attempt=0, reason="")
            return replace(state, declined={}, refused={}, idle=frozenset(), silent=(), began_s=now_s)
        case JobEnded():
            return replace(state, phase=fact.status, reason=fact.reason)
        case CohortSelected():
            return _apply_cohort_selected(state, fact, now_s)
        case TaskDeclined() | UpdateRejected():
            declined = {**state.declined, fact.device: fact.reason}
            roll = state.roll - {fact.device} if isinstance(fact, TaskDeclined) else state.roll
            refused, idle, asked = state.refused, state.idle, state.asked - {fact.device}
            if REFUSALS.get(fact.code, UNKNOWN).lasts != "attempt":
                agent = (fact.start, fact.short) if isinstance(fact, TaskDeclined) else ("", None)
                known = LastingDecline(fact.round, fact.code, fact.reason, frozenset(state.task_actions), *agent)
                refused = {**refused, fact.device: known}
            if isinstance(fact, TaskDeclined) and fact.code == NOTHING:
                idle = idle | {fact.device}
            return replace(state, declined=declined, roll=roll, refused=refused, idle=idle, asked=asked)
        case UpdateLost():
            return _apply_update_lost(state, fact, now_s)
        case UpdatesAggregated():
            return replace(state, folded=fact)
        case RoundClosed():
            return replace(state, phase="closing", asked=frozenset(), due=frozenset())
        case DeadlineExtended():
            return replace(state, allowed_s=None, extended=True)
        case RoundRetried():
            state = replace(_restart_attempt_time(state, now_s), attempt=fact.attempt, extended=False, due=frozenset())
            silent = (*(device for device in state.silent if device not in state.asked), *sorted(state.asked))
            return replace(state, silent=silent, asked=frozenset(), declined={}, idle=frozenset())
        case AttemptResumed(passed_s=passed_s):
            return replace(state, opened_s=now_s - passed_s, passed_s=passed_s, restarts=state.restarts + 1)
        case RoundCommitted():
            return _apply_round_committed(state, fact, now_s)


def _restart_attempt_time(state: JobState, now_s: float) -> JobState:
    return replace(state, opened_s=now_s, passed_s=0.0, restarts=0)


def _apply_cohort_selected(state: JobState, fact: CohortSelected, now_s: float) -> JobState:
    if state.phase == "selecting":
        state = replace(_restart_attempt_time(state, now_s), phase="open", allowed_s=fact.deadline_s, extended=False)
        state = replace(state, asked_s={}, work={}, roll=frozenset())
    if not state.cohort_size:  # else no round waits for more devices than are asked
        due = frozenset(device for device, label in state.labels.items() if label in (ELIGIBLE, BUSY, SHARE))
        state = replace(state, due=due)
    return replace(
        state,
        asked=state.asked | set(fact.devices),
        roll=state.roll | set(fact.devices),
        asked_s={**state.asked_s, **dict.fromkeys(fact.devices, now_s)},
        work={**state.work, **fact.work},
        epochs={**state.epochs, **fact.epochs},
        since=state.since.with_values(dict.fromkeys(fact.devices, fact.round)),
    )


def _apply_update_lost(state: JobState, fact: UpdateLost, now_s: float) -> JobState:
    device, asked_s = fact.device, {**state.asked_s, fact.device: now_s}
    answered = {name: update for name, update in state.answered.items() if name != device}
    through = {board: site for board, site in state.through.items() if site != device} if state.through else {}
    if state.phase == "closing":
        state = replace(_restart_attempt_time(state, now_s), phase="open", extended=False)
    folded = None if state.folded and device in state.folded.devices else state.folded  # no sum can do without it
    state = replace(state, answered=answered, through=through, folded=folded, asked_s=asked_s)
    return replace(state, asked=state.asked | {device}, lost=state.lost | {device})


def _apply_eligibility(state: JobState, fact: EligibilityRecorded) -> JobState:
    barred = {device: code for code, devices in fact.passed.items() for device in devices}
    labels = {**dict.fromkeys(fact.eligible, ELIGIBLE), **barred}
    return replace(
        state,
        labels=state.labels.with_values(labels),
        costs=state.costs.with_values(fact.costs),
        since=state.since.with_values({device: fact.round for device in labels if device not in state.since}),
    )


def _clear_round(state: JobState, round: int) -> JobState:
    """Return the state before round `round` starts, without devices, updates and refusals of the last one."""
    state = replace(state, round=round, attempt=0, asked=frozenset(), answered={}, declined={})
    refused = {name: kept for name, kept in state.refused.items() if REFUSALS[kept.code].lasts != "round"}
    state = replace(state, epochs={}, silent=(), folded=None, idle=frozenset(), lost=frozenset(), through={})
    return replace(state, refused=refused) if len(refused) < len(state.refused) else state


def _rewind_to_round(state: JobState, round: int) -> JobState:
    """Return the state before a round that the parent repeats, without later contributions."""
    # the coordinator above runs from an older copy, and repeats a round that the site has worked for
    history = {device: rounds.rounds_before(round) for device, rounds in state.history.items()}
    since = RoundColumn({device: min(last, round) for device, last in state.since.items()})
    return replace(_clear_round(state, round), history=history, since=since)


def _apply_round_committed(state: JobState, fact: RoundCommitted, now_s: float) -> JobState:
    took_part = {device: state.history.get(device, NEVER).with_round(state.round) for device in state.answered}
    history, checked = {**state.history, **took_part}, state.is_work_done and not state.settling
    spent = replace(state.spent, wall_s=state.spent.wall_s + fact.took_s)
    after = _restart_attempt_time(_clear_round(state, state.round + 1), now_s)
    after = replace(after, phase="selecting", began_s=now_s, state=fact.state)
    after = replace(after, history=history, finished=state.finished or fact.finished, checked=checked, settling=False)
    after = replace(after, extra=state.extra + fact.settled, spent=spent, best=state.best_after(fact.evaluation))
    if state.plan.class_priors and fact.evaluation is not None:
        after = replace(after, class_counts=evaluation.count_classes(fact.evaluation))
    return replace(after, settling=state.settles and not fact.settled and _is_evaluation_round_next(after))


def _is_evaluation_round_next(state: JobState) -> bool:
    due = bool(every := state.plan.check_every) and state.completed_rounds % every == 0
    return not state.checked and (state.is_work_done or due or state.reached_limit is not None)


class JobView(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def job(self) -> JobSettings: ...

    @property
    def rounds(self) -> JobState: ...


class EndedJob(NamedTuple):  # without a controller
    id: str
    job: JobSettings
    rounds: JobState
