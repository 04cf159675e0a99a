"""Events, actions and state of the agent's state machine: values without behaviour.

`state_machine.advance` takes an `Event` and a `State` and returns the next `State` and the `Action`s to carry out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import field

from fedquilt.core import CODECS, BlobRef, Task, Update
from fedquilt.edge_agent.power.learned import Learned
from fedquilt.edge_agent.remembered import Counted
from fedquilt.edge_agent.task.budget import Caution
from fedquilt.wire import Claim, RefusalCode

RESEND_S: Final = 5.0  # an unanswered update is offered again after this, then after twice as long, and so on
REFETCH_S: Final = 2.0  # likewise for a blob that could not be fetched

Key = tuple[str, int]  # job, round

# -- events ---------------------------------------------------------------------------------------


class Connected(msgspec.Struct, frozen=True):
    """New session with the broker, or restart of the coordinator. Earlier messages may be lost."""


class Arrived(msgspec.Struct, frozen=True):
    task: Task
    missing: frozenset[BlobRef] = frozenset()


class Cleared(msgspec.Struct, frozen=True): ...


class Fetched(msgspec.Struct, frozen=True):
    sha256: str
    error: str | None = None


class Done(msgspec.Struct, frozen=True):
    update: Update
    private: bool  # the result includes private state
    learned: Learned = Learned()  # of its workload, this task included
    planned_bytes: int | None = None  # peak that its engine predicted, beside the bare process


class Failed(msgspec.Struct, frozen=True):
    code: RefusalCode
    reason: str
    overrun: bool = False  # memory ran out during the work
    killed: bool = False  # its process was killed from outside: the next attempt may succeed


class Acked(msgspec.Struct, frozen=True):
    """Final answer to an update, which is counted or rejected. The outbox drops the update."""

    key: Key
    accepted: bool
    epoch: int = 0  # start of the coordinator that answered
    attempt: int = 0  # at the round, of the update that it answered


class Tick(msgspec.Struct, frozen=True): ...


class Rest(msgspec.Struct, frozen=True):
    on: bool


Event = Connected | Arrived | Cleared | Fetched | Done | Failed | Acked | Tick | Rest

# -- actions --------------------------------------------------------------------------------------


class Say(msgspec.Struct, frozen=True):
    claim: Claim


class Fetch(msgspec.Struct, frozen=True):
    refs: tuple[BlobRef, ...]


class Abandon(msgspec.Struct, frozen=True):
    sha256: str


class Begin(msgspec.Struct, frozen=True):
    task: Task


class Stop(msgspec.Struct, frozen=True): ...


class Send(msgspec.Struct, frozen=True):
    update: Update


class Drop(msgspec.Struct, frozen=True):
    update: Update


class Learn(msgspec.Struct, frozen=True):
    learned: Mapping[str, Learned]


Action = Say | Fetch | Abandon | Begin | Stop | Send | Drop | Learn

# -- state ----------------------------------------------------------------------------------------


class Means(msgspec.Struct, frozen=True):
    """Capabilities and labels of a device. While the agent runs, only `runs_on` changes."""

    budget_bytes: int
    engines: tuple[str, ...]
    methods: tuple[str, ...]
    codecs: tuple[str, ...] = CODECS
    plugins: Mapping[str, str] = field(
        default_factory=dict
    )  # of other packages: `fedquilt.plugins.plugin_fingerprints`
    confined: tuple[str, ...] | None = None  # what a task's process gives up: `task.confine`; None: it has none
    labels: tuple[str, ...] = ()  # what its owner calls it by: `fedquilt.labels`
    carriers: tuple[str, ...] = ()  # of blobs, beside the broker
    boards: int = 0  # of a site
    runs_on: Mapping[str, str] = field(default_factory=dict)  # engine that may use a GPU -> what its latest task used


class Open(msgspec.Struct, frozen=True):
    task: Task
    missing: frozenset[BlobRef]
    due_s: float = math.inf  # its deadline by this device's own clock, set when it first arrived
    working: bool = False
    down_bytes: int = 0  # size of blobs that had to be fetched for it
    again: frozenset[BlobRef] = frozenset()  # part of `missing` that failed, to be fetched again at `again_s`
    again_s: float = math.inf
    patience_s: float = REFETCH_S
    killed: int = 0  # times its process was killed from outside

    @property
    def key(self) -> Key:
        return (self.task.job, self.task.round)


class Offer(msgspec.Struct, frozen=True):
    update: Update
    private: bool
    due_s: float
    patience_s: float = RESEND_S
    since_s: float | None = None  # when it was first offered; None: before this process began


class State(msgspec.Struct, frozen=True):
    means: Means
    open: Open | None = None
    outbox: Mapping[Key, Offer] = field(default_factory=dict)
    counted: Mapping[str, Counted] = field(default_factory=dict)  # by job
    refusal: Claim | None = None  # latest refusal, repeated with its task
    base_bytes: Mapping[str, int] = field(default_factory=dict)  # engine -> resident with nothing but it
    learned: Mapping[str, Learned] = field(default_factory=dict)  # by `workload_key`, the latest last
    sent: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # by job: latest seconds from offer to answer
    cautions: Mapping[tuple[str, str], Caution] = field(default_factory=dict)  # (method, engine) -> what was seen
    rests: bool = False  # whether no task is begun now


def workload_key(task: Task) -> str:
    """Return the key of learned costs for a task: its engine, method and kind of work."""
    return " ".join(filter(None, (task.engine, task.method, task.work.workload)))
