"""Events, actions and state of a device: values without behaviour.

`edge_agent.plan.advance` takes an `Event` and a `State`, and returns the next `State` and the `Action`s to carry out.
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
    """New session with the broker, or restart of the coordinator: earlier messages may be lost."""


class Arrived(msgspec.Struct, frozen=True):
    """A task arrived; `missing` are its blobs that are not on this device."""

    task: Task
    missing: frozenset[BlobRef] = frozenset()


class Cleared(msgspec.Struct, frozen=True):
    """The coordinator withdrew the task."""


class Fetched(msgspec.Struct, frozen=True):
    """A blob arrived, or could not be fetched this time."""

    sha256: str
    error: str | None = None


class Done(msgspec.Struct, frozen=True):
    """The open task's result is on disk, in the outbox."""

    update: Update
    private: bool  # the result includes private state
    learned: Learned = Learned()  # of its workload, this task included
    planned_bytes: int | None = None  # peak that its engine predicted, beside the bare process


class Failed(msgspec.Struct, frozen=True):
    """The open task cannot be completed here."""

    code: RefusalCode
    reason: str
    overrun: bool = False  # memory ran out during the work
    killed: bool = False  # its process was killed from outside: the next attempt may succeed


class Acked(msgspec.Struct, frozen=True):
    """The coordinator counted an update, or refused it for good; the outbox no longer holds it."""

    key: Key
    accepted: bool
    epoch: int = 0  # start of the coordinator that answered
    attempt: int = 0  # at the round, of the update that it answered


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


class Rest(msgspec.Struct, frozen=True):
    """No task is to be begun from now on, as its memory is needed for something else; or tasks are begun again."""

    on: bool


Event = Connected | Arrived | Cleared | Fetched | Done | Failed | Acked | Tick | Rest

# -- actions --------------------------------------------------------------------------------------


class Say(msgspec.Struct, frozen=True):
    """Publish a claim."""

    claim: Claim


class Fetch(msgspec.Struct, frozen=True):
    """Fetch blobs."""

    refs: tuple[BlobRef, ...]


class Abandon(msgspec.Struct, frozen=True):
    """Stop fetching a blob, and forget the part received."""

    sha256: str


class Begin(msgspec.Struct, frozen=True):
    """Start the worker on the task."""

    task: Task


class Stop(msgspec.Struct, frozen=True):
    """Kill the worker's task."""


class Send(msgspec.Struct, frozen=True):
    """Publish an update."""

    update: Update


class Drop(msgspec.Struct, frozen=True):
    """Remove an update from the disk that nobody will ask for."""

    update: Update


class Learn(msgspec.Struct, frozen=True):
    """Write down what the board has learned, by workload."""

    learned: Mapping[str, Learned]


Action = Say | Fetch | Abandon | Begin | Stop | Send | Drop | Learn

# -- state ----------------------------------------------------------------------------------------


class Means(msgspec.Struct, frozen=True):
    """Capabilities and labels of this device. While the agent runs, tasks show what engines run on; the rest stays."""

    budget_bytes: int
    engines: tuple[str, ...]
    methods: tuple[str, ...]
    codecs: tuple[str, ...] = CODECS
    plugins: Mapping[str, str] = field(default_factory=dict)  # of other packages: `fedquilt.plugins.modules`
    confined: tuple[str, ...] | None = None  # what a task's process gives up: `task.confine`; None: it has none
    labels: tuple[str, ...] = ()  # what its owner calls it by: `fedquilt.labels`
    carriers: tuple[str, ...] = ()  # of blobs, beside the broker
    boards: int = 0  # of a site
    runs_on: Mapping[str, str] = field(default_factory=dict)  # engine that may use a GPU -> what its latest task used


class Open(msgspec.Struct, frozen=True):
    """Task in hand."""

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
        """Job and round of the task."""
        return (self.task.job, self.task.round)


class Offer(msgspec.Struct, frozen=True):
    """Update in the outbox."""

    update: Update
    private: bool
    due_s: float
    patience_s: float = RESEND_S
    since_s: float | None = None  # when it was first offered; None: before this process began


class State(msgspec.Struct, frozen=True):
    """State of the agent."""

    means: Means
    open: Open | None = None
    outbox: Mapping[Key, Offer] = field(default_factory=dict)
    counted: Mapping[str, Counted] = field(default_factory=dict)  # by job
    refusal: Claim | None = None  # latest refusal, repeated with its task
    base_bytes: Mapping[str, int] = field(default_factory=dict)  # engine -> resident with nothing but it
    learned: Mapping[str, Learned] = field(default_factory=dict)  # by `workload`, the latest last
    sent: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # by job: latest seconds from offer to answer
    cautions: Mapping[tuple[str, str], Caution] = field(default_factory=dict)  # (method, engine) -> what was seen
    rests: bool = False  # whether no task is begun now


def workload(task: Task) -> str:
    """Kind of work that a task is, for what is learned of it: its engine, its method, and how its work is made up."""
    return " ".join(filter(None, (task.engine, task.method, task.work.workload)))
