"""Releases on a device, as values without behaviour: where one stands, what happens to it, what is done for it.

`edge_agent.releases.plan.advance` takes an `Event` and a `State`, and returns the next `State` and the `Action`s to
carry out.
"""

from __future__ import annotations

import math
import time
from typing import Final, Literal

import msgspec

from fedquilt.core import AnyDigest, BlobRef, Label, Metrics, Reading, Sentence, Wired
from fedquilt.wire import Release

REFETCH_S: Final = 2.0  # a blob that could not be fetched is asked for again after this, then after twice as long

# -- state ----------------------------------------------------------------------------------------


class Noted(Wired, frozen=True, omit_defaults=True):
    """What is known on disk of the releases of one kind."""

    release: Release  # the latest
    step: Literal["wanted", "swapping", "soaking", "committed", "refused", "returning", "returned"] = "wanted"
    reason: Sentence = ""
    metrics: Metrics = msgspec.field(default_factory=dict)
    next: Release | None = None  # that has come while this one soaks
    origin: AnyDigest = ""  # what runs when the swap is about to be made
    rollout: Label = ""  # that brought what is in use; "": none that could be taken back
    name: Label = ""  # of what is in use
    before: AnyDigest = ""  # what ran before that
    before_name: Label = ""


class State(msgspec.Struct, frozen=True):
    """Where the releases of one kind are on this device."""

    noted: Noted | None = None
    stage: Literal["gate", "fetching", "fetched", "checking", "checked", "undone"] = "gate"  # within its step
    waits: str = ""  # what it waits for
    again_s: float = math.inf  # when to look again
    until_s: float = math.inf  # end of the soak
    patience_s: float = REFETCH_S


# -- events ---------------------------------------------------------------------------------------


class Wanted(msgspec.Struct, frozen=True):
    """A release has arrived."""

    release: Release


class Withdrawn(msgspec.Struct, frozen=True):
    """The release's topic was emptied."""


class Fetched(msgspec.Struct, frozen=True):
    """Its blob is here, or could not be fetched this time."""

    error: str | None = None


class Checked(msgspec.Struct, frozen=True):
    """The check has come to an end."""

    refused: str
    metrics: dict[str, float]
    note: str = ""


class Failed(msgspec.Struct, frozen=True):
    """An action could not be carried out."""

    reason: str


class Swapped(msgspec.Struct, frozen=True):
    """The release is in use."""


class Ill(msgspec.Struct, frozen=True):
    """What soaks does not hold up."""

    reason: str


class Undone(msgspec.Struct, frozen=True):
    """What ran before is in use again; `found`: there was something before."""

    found: bool = True


class Begun(msgspec.Struct, frozen=True):
    """A process begins with what an earlier one has noted. `ill`: what the kind says of what is in use."""

    current: str = ""
    ill: str = ""


class Look(msgspec.Struct, frozen=True):
    """It is time to look at the device, which is as follows."""

    current: str = ""
    here: bool = False  # the blob is on this device
    works: bool = False  # a task runs
    other: str = ""  # kind of another release that is being checked
    need_bytes: int = 0  # memory that the check will take
    reading: Reading = Reading()
    local: time.struct_time | None = None
    settled: bool = True  # no hook runs
    ill: str = ""  # of what is in use: asked while it soaks, and after a return
    min_battery: float = 0.0  # below this charge nothing is begun, unless it charges
    max_c: float | None = None  # hotter, and nothing is begun; None: no limit


Event = Wanted | Withdrawn | Fetched | Checked | Failed | Swapped | Ill | Undone | Begun | Look

# -- actions --------------------------------------------------------------------------------------


class Fetch(msgspec.Struct, frozen=True):
    """Fetch the blob; `Fetched` follows."""

    ref: BlobRef


class Abandon(msgspec.Struct, frozen=True):
    """Stop fetching the blob."""

    sha256: str


class Check(msgspec.Struct, frozen=True):
    """Stage the release and check it; `Checked` or `Failed` follows."""

    release: Release


class Swap(msgspec.Struct, frozen=True):
    """Put the release in use; `Swapped`, `Failed` or `Ill` follows."""

    release: Release


class Undo(msgspec.Struct, frozen=True):
    """Put what ran before, `before`, in use again; `Undone` or `Failed` follows."""

    before: str


class Drop(msgspec.Struct, frozen=True):
    """End a check and delete what is not in use."""


class Tell(msgspec.Struct, frozen=True):
    """Publish how far the device is, although nothing has changed."""


Action = Fetch | Abandon | Check | Swap | Undo | Drop | Tell
Step = tuple[State, tuple[Action, ...]]
