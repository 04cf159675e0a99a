"""Values of releases on a device: the state of a release, events that happen to it, and actions to take.

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

REFETCH_S: Final = 2.0  # pause before a blob is fetched again; it doubles with each failure

# -- state ----------------------------------------------------------------------------------------


class Noted(Wired, frozen=True, omit_defaults=True):
    """Notes on disk about the releases of one kind."""

    release: Release  # the latest one
    step: Literal["wanted", "swapping", "soaking", "committed", "refused", "returning", "returned"] = "wanted"
    reason: Sentence = ""
    metrics: Metrics = msgspec.field(default_factory=dict)
    next: Release | None = None  # a release that arrived while `release` soaks
    origin: AnyDigest = ""  # release in use (sha256) when the swap is about to be made
    rollout: Label = ""  # rollout that brought the release in use; "": none that could be taken back
    name: Label = ""  # name of the release in use
    before: AnyDigest = ""  # release (sha256) that ran before the one in use
    before_name: Label = ""


class State(msgspec.Struct, frozen=True):
    """State of one kind's releases on this device."""

    noted: Noted | None = None
    stage: Literal["gate", "fetching", "fetched", "checking", "checked", "undone"] = "gate"  # stage within the step
    waits: str = ""  # condition that the release waits for
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
    """The release's blob is here, or could not be fetched this time."""

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


class Kept(msgspec.Struct, frozen=True):
    """The kind has noted that the release in use has held."""


class Ill(msgspec.Struct, frozen=True):
    """The soaking release does not hold up."""

    reason: str


class Undone(msgspec.Struct, frozen=True):
    """The release before is in use again; `found`: there was one."""

    found: bool = True


class Begun(msgspec.Struct, frozen=True):
    """A process begins from the notes of an earlier one. `ill`: the kind's verdict on the release in use."""

    current: str = ""
    ill: str = ""


class Idle(msgspec.Struct, frozen=True):
    """A task has ended, and the next one has not begun."""


class Look(msgspec.Struct, frozen=True):
    """Facts about the device at a look."""

    current: str = ""
    here: bool = False  # the blob is on this device
    works: bool = False  # whether a task runs
    other: str = ""  # kind of another release that is being checked
    need_bytes: int = 0  # memory that the check will take
    reading: Reading = Reading()
    local: time.struct_time | None = None
    settled: bool = True  # no hook runs
    ill: str = ""  # verdict on the release in use: asked while it soaks, and after a return
    min_battery: float = 0.0  # least charge at which a release begins, unless the battery is being charged
    max_c: float | None = None  # highest temperature at which a release begins; None: no limit


Event = Wanted | Withdrawn | Fetched | Checked | Failed | Swapped | Kept | Ill | Undone | Begun | Idle | Look

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
    """Put the release `before` in use again; `Undone` or `Failed` follows."""

    before: str


class Keep(msgspec.Struct, frozen=True):
    """Let the kind note that the release in use has held; `Kept` or `Failed` follows."""


class Drop(msgspec.Struct, frozen=True):
    """End a check and delete releases that are not in use."""


class Tell(msgspec.Struct, frozen=True):
    """Publish the release's progress although it has not changed."""


Action = Fetch | Abandon | Check | Swap | Undo | Keep | Drop | Tell
Step = tuple[State, tuple[Action, ...]]
