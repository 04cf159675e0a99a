"""State of a release on a device, with its events and actions.

`state_machine.advance` takes an `Event` and a `ReleaseState` and returns the next `ReleaseState` and the `Action`s to
carry out.
"""

from __future__ import annotations

import math
import time
from typing import Literal

import msgspec

from fedquilt.core import AnyDigest, BlobRef, Label, Metrics, Reading, Sentence, WireMessage
from fedquilt.wire import DesiredRelease

# -- state ----------------------------------------------------------------------------------------


class ReleaseRecord(WireMessage, frozen=True, omit_defaults=True):
    release: DesiredRelease  # the latest one
    step: Literal["wanted", "swapping", "soaking", "committed", "refused", "returning", "returned"] = "wanted"
    reason: Sentence = ""
    metrics: Metrics = msgspec.field(default_factory=dict)
    next: DesiredRelease | None = None  # a release that arrived while `release` soaks
    origin: AnyDigest = ""  # release in use (sha256) when the swap is about to be made
    rollout: Label = ""  # rollout that brought the release in use; "": none that could be taken back
    name: Label = ""  # name of the release in use
    before: AnyDigest = ""  # release (sha256) that ran before the one in use
    before_name: Label = ""


class ReleaseState(msgspec.Struct, frozen=True):
    noted: ReleaseRecord | None = None
    stage: Literal["gate", "fetching", "fetched", "checking", "checked", "undone"] = "gate"  # stage within the step
    waits: str = ""  # condition that the release waits for
    again_s: float = math.inf  # when to look again
    until_s: float = math.inf  # end of the soak
    failures: int = 0  # to fetch the blob


# -- events ---------------------------------------------------------------------------------------


class ReleaseReceived(msgspec.Struct, frozen=True):
    release: DesiredRelease


class ReleaseCancelled(msgspec.Struct, frozen=True): ...


class ReleaseFetched(msgspec.Struct, frozen=True):
    error: str | None = None


class CheckFinished(msgspec.Struct, frozen=True):
    refused: str
    metrics: dict[str, float]
    note: str = ""


class ActionFailed(msgspec.Struct, frozen=True):
    reason: str


class ReleaseActivated(msgspec.Struct, frozen=True): ...


class ReleaseConfirmed(msgspec.Struct, frozen=True):
    """Confirmation of the release in use by its kind."""


class ReleaseUnhealthy(msgspec.Struct, frozen=True):
    reason: str


class ReleaseRolledBack(msgspec.Struct, frozen=True):
    """Completed roll-back. `found` is whether there was a previous release."""

    found: bool = True


class ProcessStarted(msgspec.Struct, frozen=True):
    """Start of a process with the records of an earlier one."""

    current: str = ""
    ill: str = ""


class DeviceIdle(msgspec.Struct, frozen=True): ...


class StatusPolled(msgspec.Struct, frozen=True):
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


Event = (
    ReleaseReceived
    | ReleaseCancelled
    | ReleaseFetched
    | CheckFinished
    | ActionFailed
    | ReleaseActivated
    | ReleaseConfirmed
    | ReleaseUnhealthy
    | ReleaseRolledBack
    | ProcessStarted
    | DeviceIdle
    | StatusPolled
)

# -- actions --------------------------------------------------------------------------------------


class FetchRelease(msgspec.Struct, frozen=True):
    ref: BlobRef


class CancelReleaseFetch(msgspec.Struct, frozen=True):
    sha256: str


class CheckRelease(msgspec.Struct, frozen=True):
    release: DesiredRelease


class ActivateRelease(msgspec.Struct, frozen=True):
    release: DesiredRelease


class RollBackRelease(msgspec.Struct, frozen=True):
    """Request to activate the release `before` again. `ReleaseRolledBack` or `ActionFailed` follows."""

    before: str


class ConfirmRelease(msgspec.Struct, frozen=True): ...


class DeleteReleases(msgspec.Struct, frozen=True): ...


class PublishStatus(msgspec.Struct, frozen=True): ...


Action = (
    FetchRelease
    | CancelReleaseFetch
    | CheckRelease
    | ActivateRelease
    | RollBackRelease
    | ConfirmRelease
    | DeleteReleases
    | PublishStatus
)
Step = tuple[ReleaseState, tuple[Action, ...]]
