"""State of a release on a device, with its events and actions.

`state_machine.advance` takes an `Event` and a `ReleaseState` and returns the next `ReleaseState` and the `Action`s to
carry out.
"""

from __future__ import annotations

import math
import time
from typing import Literal

import msgspec

from fedquilt.core import AnyDigest, Label, Metrics, Reading, Sentence, WireMessage
from fedquilt.edge_agent.releases.release_kind import CheckResult
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
    failures: int = 0  # to fetch the blob, then kills of the check's process


# -- events and actions ---------------------------------------------------------------------------

Action = Literal["publish", "fetch", "cancel fetch", "check", "activate", "roll back", "confirm", "delete"]
"""Action on the release of the new state. "cancel fetch" is about the one of the state before."""


class ReleaseReceived(msgspec.Struct, frozen=True):
    release: DesiredRelease


class ReleaseCancelled(msgspec.Struct, frozen=True): ...


class ReleaseFetched(msgspec.Struct, frozen=True):
    error: str | None = None


class ActionDone(msgspec.Struct, frozen=True):
    """Completed action. `found` is whether a roll-back had a previous release."""

    action: Action
    found: bool = True


class ActionFailed(msgspec.Struct, frozen=True):
    """Failed action. `in_use` is whether the release has been activated nevertheless."""

    reason: str
    in_use: bool = False


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


Event = (
    ReleaseReceived
    | ReleaseCancelled
    | ReleaseFetched
    | CheckResult
    | ActionDone
    | ActionFailed
    | ProcessStarted
    | DeviceIdle
    | StatusPolled
)
Step = tuple[ReleaseState, tuple[Action, ...]]
