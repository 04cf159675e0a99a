"""Events, actions and state of the agent's state machine: values without behaviour.

`state_machine.advance` takes an `Event` and a `DeviceState` and returns the next `DeviceState` and the `Action`s to
carry out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from msgspec import field

from fedquilt.core import CODECS, BlobRef, Task, Update
from fedquilt.edge_agent.power.learned_model import LearnedModel
from fedquilt.edge_agent.storage.job_records import CountedRound
from fedquilt.edge_agent.task.memory_budget import MemoryMargin
from fedquilt.wire import Claim, RefusalCode

Key = tuple[str, int]  # job, round

# -- events ---------------------------------------------------------------------------------------


class SessionStarted(msgspec.Struct, frozen=True):
    """New session with the broker, or restart of the coordinator. Earlier messages may be lost."""


class TaskReceived(msgspec.Struct, frozen=True):
    task: Task
    missing: frozenset[BlobRef] = frozenset()


class TaskCancelled(msgspec.Struct, frozen=True): ...


class BlobFetched(msgspec.Struct, frozen=True):
    sha256: str
    error: str | None = None


class TaskCompleted(msgspec.Struct, frozen=True):
    update: Update
    private: bool  # the result includes private state
    learned: LearnedModel = LearnedModel()  # of its workload, this task included
    planned_bytes: int | None = None  # peak that its engine predicted, beside the bare process


class TaskFailed(msgspec.Struct, frozen=True):
    code: RefusalCode
    reason: str
    overrun: bool = False  # memory ran out during the work
    killed: bool = False  # its process was killed from outside: the next attempt may succeed


class UpdateAcked(msgspec.Struct, frozen=True):
    """Final answer to an update, which is counted or rejected. The outbox drops the update."""

    key: Key
    accepted: bool
    epoch: int = 0  # start of the coordinator that answered
    attempt: int = 0  # at the round, of the update that it answered


class TimerFired(msgspec.Struct, frozen=True): ...


class TaskPauseChanged(msgspec.Struct, frozen=True):
    on: bool


Event = (
    SessionStarted
    | TaskReceived
    | TaskCancelled
    | BlobFetched
    | TaskCompleted
    | TaskFailed
    | UpdateAcked
    | TimerFired
    | TaskPauseChanged
)

# -- actions --------------------------------------------------------------------------------------


class PublishClaim(msgspec.Struct, frozen=True):
    claim: Claim


class FetchBlobs(msgspec.Struct, frozen=True):
    refs: tuple[BlobRef, ...]


class CancelFetch(msgspec.Struct, frozen=True):
    sha256: str


class StartTask(msgspec.Struct, frozen=True):
    task: Task


class StopTask(msgspec.Struct, frozen=True): ...


class SendUpdate(msgspec.Struct, frozen=True):
    update: Update


class DeleteUpdate(msgspec.Struct, frozen=True):
    update: Update


class StoreLearnedCosts(msgspec.Struct, frozen=True):
    learned: Mapping[str, LearnedModel]


Action = PublishClaim | FetchBlobs | CancelFetch | StartTask | StopTask | SendUpdate | DeleteUpdate | StoreLearnedCosts

# -- state ----------------------------------------------------------------------------------------


class Capabilities(msgspec.Struct, frozen=True):
    """Capabilities and labels of a device. While the agent runs, only `runs_on` changes."""

    budget_bytes: int
    engines: tuple[str, ...]
    methods: tuple[str, ...]
    codecs: tuple[str, ...] = CODECS
    plugins: Mapping[str, str] = field(
        default_factory=dict
    )  # of other packages: `fedquilt.plugins.plugin_fingerprints`
    confined: tuple[str, ...] | None = None  # by `task.sandbox`, or None without a process
    labels: tuple[str, ...] = ()  # labels given by the owner: `fedquilt.formats.labels`
    boards: int = 0  # of a site
    runs_on: Mapping[str, str] = field(default_factory=dict)  # engine that may use a GPU -> what its latest task used


class OpenTask(msgspec.Struct, frozen=True):
    task: Task
    missing: frozenset[BlobRef]
    due_s: float = math.inf  # its deadline by this device's own clock, set when it first arrived
    working: bool = False
    down_bytes: int = 0  # size of the fetched blobs
    again: frozenset[BlobRef] = frozenset()  # part of `missing` that failed, to be fetched again at `again_s`
    again_s: float = math.inf
    failures: int = 0  # to fetch a blob, since one last arrived
    killed: int = 0  # times its process was killed from outside


class OutboxUpdate(msgspec.Struct, frozen=True):
    update: Update
    private: bool
    due_s: float
    sends: int = 0  # in this session with the coordinator
    since_s: float | None = None  # when it was first offered; None: before this process began


class DeviceState(msgspec.Struct, frozen=True):
    means: Capabilities
    open: OpenTask | None = None
    outbox: Mapping[Key, OutboxUpdate] = field(default_factory=dict)
    counted: Mapping[str, CountedRound] = field(default_factory=dict)  # by job
    refusal: Claim | None = None  # latest refusal, repeated with its task
    base_bytes: Mapping[str, int] = field(default_factory=dict)  # engine -> resident with nothing but it
    learned: Mapping[str, LearnedModel] = field(default_factory=dict)  # by `workload_key`, the latest last
    sent: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # by job: latest seconds from offer to answer
    cautions: Mapping[tuple[str, str], MemoryMargin] = field(default_factory=dict)  # (method, engine) -> what was seen
    rests: bool = False  # whether no task is begun now


def workload_key(task: Task) -> str:
    """Return the key of learned costs for a task: its engine, method and kind of work."""
    return " ".join(filter(None, (task.engine, task.method, task.work.workload)))
