"""Events of a job, as stored in its event log.

`TRANSITIONS` lists the events allowed in each phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias, get_args

import msgspec

from fedquilt.coordinator.rounds.buffering import Mode
from fedquilt.coordinator.rounds.deadline import MemoryShortage
from fedquilt.coordinator.rounds.selection import UPDATE
from fedquilt.core import Action, BlobRef, EvaluationSums, FedquiltError, Update

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
# In buffered mode, devices work on while a round is committed and the next one begins.
_BETWEEN_ROUNDS: Final[Mapping[Phase, tuple[Phase, ...]]] = {
    **_LATE_RESULT_TRANSITIONS,
    "selecting": ("selecting",),
    "closing": ("closing",),
}
TRANSITIONS: Final[Mapping[str, Mapping[Phase, tuple[Phase, ...]]]] = {
    "NoteRecorded": {"new": ("new",), "stopped": ("stopped",), "failed": ("failed",)},  # before the start or a resume
    "JobStarted": {"new": ("selecting",), "stopped": ("stopped",), "failed": ("failed",)},
    "ModeChosen": {"selecting": ("selecting",)},
    "PrivacyPlanned": {"selecting": ("selecting",)},
    "EligibilityRecorded": {"selecting": ("selecting",), "open": ("open",)},
    "CohortSelected": {"selecting": ("open",), "open": ("open",)},
    "TaskDeclined": _BETWEEN_ROUNDS,
    "TasksCancelled": {"selecting": ("selecting",), "open": ("open",)},
    "UpdateAccepted": _LATE_RESULT_TRANSITIONS,
    "UpdateRejected": _BETWEEN_ROUNDS,
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
    """Start of a job with the method's first state, or of a site's round with the parent's state."""

    state: BlobRef
    has_evaluation_rounds: bool = False  # whether each evaluation is a round of its own (`core.EvaluationRound`)
    first_round: int = 0  # number of the round that starts, which may skip or repeat rounds
    # actions of that round's tasks from the parent coordinator, or () to follow the job's settings
    actions: tuple[Action, ...] = ()
    is_evaluation_round: bool = False  # whether that round is an evaluation round
    deadline_s: float | None = None  # from the parent coordinator, or None for the cohort's `deadline_s`
    class_shares: tuple[float, ...] = ()  # class shares of the whole fleet, from the parent


class ModeChosen(Event, frozen=True):
    """Choice of the mode of a job with `[cohort] mode = "auto"`."""

    round: int
    mode: Mode
    reason: str


class PrivacyPlanned(Event, frozen=True):
    """Choice of the noise of a job with [privacy], before its first round."""

    round: int
    devices: int  # number of devices that can take part
    contributions: int  # largest number of a device's updates that are aggregated
    noise_multiplier: float  # standard deviation of the noise on the sum of changes, in units of [privacy] clip


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
    # deadline of the round or, in buffered mode, of these devices' tasks. None: the cohort's `deadline_s`
    deadline_s: float | None = None
    coverage: tuple[str, ...] = ()  # sentences on the devices that can take part
    epochs: dict[str, int] = {}  # device -> epochs in this round, if different from the job's


class TaskDeclined(Event, frozen=True):
    round: int
    device: str
    code: str
    reason: str
    shortage: MemoryShortage | None = None  # requirements of the task after a memory decline
    agent_start_key: str = ""  # `DeviceRegistry.agent_start_key`, or "" if unknown


class TasksCancelled(Event, frozen=True):
    """Cancellation of open tasks in buffered mode, because they are late or their states are outdated."""

    round: int
    devices: tuple[str, ...]
    reason: Literal["deadline", "staleness"]


class UpdateAccepted(Event, frozen=True):
    """Acceptance of a device's update, which is validated and whose blobs are on disk."""

    round: int
    update: Update
    took_s: float | None = None  # seconds since the selection of the device
    expected_s: float | None = None  # duration predicted by the profile, at the operating point that was used

    @property
    def staleness(self) -> int:
        """Number of commits since the state from which the update was computed."""
        return self.round - self.update.round


class UpdateRejected(Event, frozen=True, omit_defaults=True):
    """Rejection of a device's update, or exclusion of the device from the round."""

    round: int
    device: str
    reason: str
    code: str = UPDATE  # key of `selection.DECLINE_REASONS`


class UpdateLost(Event, frozen=True):
    """Loss of an accepted update whose blob is missing or damaged. The device repeats its task."""

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
    """Expiry of a predicted deadline without a quorum. The round then closes as soon as it has a quorum."""

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
    earlier_states: tuple[BlobRef, ...] = ()  # states on which devices still work, in buffered mode
    spent_epsilon: float | None = None  # of [privacy] epsilon, this round included


class JobEnded(Event, frozen=True, omit_defaults=True):
    """End of a job, or its interruption until a `JobResumed` event."""

    status: Literal["done", "failed", "stopped"]
    reason: str = ""  # after a failed round: the cause, and the fix in a second line
    code: str = ""  # most frequent decline code of a failed round (`selection.DECLINE_REASONS`)


def failure_event(error: Exception) -> JobEnded:
    """Return the event that ends a job as failed with the error's message. Invalid Unicode is escaped."""
    text = str(error) if isinstance(error, FedquiltError) else f"{type(error).__name__}: {error}"
    return JobEnded("failed", text.encode("utf-8", "backslashreplace").decode())


class JobResumed(Event, frozen=True): ...


class NoteRecorded(Event, frozen=True):
    text: str


_AttemptEvent = (
    EligibilityRecorded
    | CohortSelected
    | TaskDeclined
    | TasksCancelled
    | UpdateAccepted
    | UpdateRejected
    | UpdateLost
    | UpdatesAggregated
    | DeadlineExtended
    | RoundRetried
    | AttemptResumed
)
_RoundEvent = _AttemptEvent | ModeChosen | PrivacyPlanned | RoundClosed | RoundCommitted
AnyEvent = NoteRecorded | JobStarted | _RoundEvent | JobEnded | JobResumed
