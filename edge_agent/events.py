"""What happens to a device, what it then does, and where it stands: values without behaviour.

`edge_agent.plan.advance` takes an `Event` and a `State`, and returns the next `State` and the `Action`s to carry out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Literal

import msgspec
from msgspec import field

from fedquilt.core import CODECS, BlobRef, Task, Update
from fedquilt.edge_agent.task.budget import Caution
from fedquilt.wire import Claim

RESEND_S: Final = 5.0  # an unanswered update is offered again after this, then after twice as long, and so on
REFETCH_S: Final = 2.0  # likewise for a blob that could not be fetched

Key = tuple[str, int]  # job, round

# -- events ---------------------------------------------------------------------------------------


class Connected(msgspec.Struct, frozen=True):
    """A new session with the broker, or the coordinator has just come up: whatever was said may be lost."""


class Arrived(msgspec.Struct, frozen=True):
    """A task, and which of its blobs are not on this device."""

    task: Task
    missing: frozenset[BlobRef] = frozenset()


class Cleared(msgspec.Struct, frozen=True):
    """The coordinator has withdrawn the task."""


class Fetched(msgspec.Struct, frozen=True):
    """A blob is here, or could not be had this time."""

    sha256: str
    error: str | None = None


class Done(msgspec.Struct, frozen=True):
    """The open task's result is on disk, in the outbox."""

    update: Update
    private: bool  # it leaves a private state behind
    pace: float | None = None  # seconds it took over those predicted; None: nothing was predicted
    planned_bytes: int | None = None  # what its engine expected of its peak, beside the bare process


class Failed(msgspec.Struct, frozen=True):
    """The open task cannot be carried out here."""

    code: RefusalCode
    reason: str
    overrun: bool = False  # memory ran out while it worked
    killed: bool = False  # its process was, from outside: it may go well the next time


class Acked(msgspec.Struct, frozen=True):
    """The coordinator has counted an update, or refused it for good; the outbox no longer holds it."""

    key: Key
    accepted: bool


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


Event = Connected | Arrived | Cleared | Fetched | Done | Failed | Acked | Tick
RefusalCode = Literal["memory", "data", "engine", "method", "model", "codec", "disk", "failed"]

# -- actions --------------------------------------------------------------------------------------


class Say(msgspec.Struct, frozen=True):
    """Publish a claim."""

    claim: Claim


class Fetch(msgspec.Struct, frozen=True):
    """Pull blobs."""

    refs: tuple[BlobRef, ...]


class Abandon(msgspec.Struct, frozen=True):
    """Stop pulling a blob, and forget what there is of it."""

    sha256: str


class Begin(msgspec.Struct, frozen=True):
    """Have the task carried out."""

    task: Task


class Stop(msgspec.Struct, frozen=True):
    """Kill what is being carried out."""


class Send(msgspec.Struct, frozen=True):
    """Publish an update."""

    update: Update


Action = Say | Fetch | Abandon | Begin | Stop | Send

# -- state ----------------------------------------------------------------------------------------


class Means(msgspec.Struct, frozen=True):
    """What this device has; it does not change while the agent runs."""

    budget_bytes: int
    engines: tuple[str, ...]
    methods: tuple[str, ...]
    codecs: tuple[str, ...] = CODECS
    plugins: Mapping[str, str] = field(default_factory=dict)  # of other packages: `fedquilt.plugins.modules`
    confined: tuple[str, ...] | None = None  # what a task's process gives up: `task.confine`; None: it has none


class Open(msgspec.Struct, frozen=True):
    """The task in hand."""

    task: Task
    missing: frozenset[BlobRef]
    due_s: float = math.inf  # its deadline by this device's own clock, from when it was first heard of
    working: bool = False
    down_bytes: int = 0  # of blobs that had to be fetched for it
    again: frozenset[BlobRef] = frozenset()  # of `missing`: failed, to be fetched again at `again_s`
    again_s: float = math.inf
    patience_s: float = REFETCH_S
    killed: int = 0  # how often its process was killed from outside

    @property
    def key(self) -> Key:
        return (self.task.job, self.task.round)


class Offer(msgspec.Struct, frozen=True):
    """An update in the outbox."""

    update: Update
    private: bool
    due_s: float
    patience_s: float = RESEND_S


class State(msgspec.Struct, frozen=True):
    """Where the agent stands."""

    means: Means
    open: Open | None = None
    outbox: Mapping[Key, Offer] = field(default_factory=dict)
    counted: Mapping[str, int] = field(default_factory=dict)  # job -> last round it was counted in
    refusal: Claim | None = None  # the last one: repeated when its task is
    base_bytes: Mapping[str, int] = field(default_factory=dict)  # engine -> resident with nothing but it
    paces: Mapping[str, float] = field(default_factory=dict)  # method -> seconds seen over seconds predicted
    cautions: Mapping[tuple[str, str], Caution] = field(default_factory=dict)  # (method, engine) -> what was seen
