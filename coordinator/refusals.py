"""Reasons why devices decline tasks and why updates are rejected."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from fedquilt.coordinator.deadline import Short

Lasts: TypeAlias = Literal["attempt", "round", "rounds", "start"]
"""How long a device is not selected. "attempt": until the next attempt. "round": until the next round.
"rounds": for `AGAIN_ROUNDS` rounds, for as much work. "start": until the device's agent starts anew or announces
another profile."""

NOTHING: Final = "none"  # code of a device that the method has no task for
UPDATE: Final = "update"  # code of an update that was rejected for its content
FULL: Final = "full"  # code of a device whose disk is full
AGAIN_ROUNDS: Final = 10  # rounds until a device that declined for lack of memory is asked again for such work


class Refusal(NamedTuple):
    """Properties of a reason to decline a task.

    Attributes:
        lasts: Time for which the device is not selected.
        recurs: Whether the device would fail again with the same task, so that no attempt is spent on it.
        cause: The reason as part of "CAUSE in round 3 on 2 of 5 devices".
        fix: What to do about it.
    """

    lasts: Lasts
    recurs: bool
    cause: str
    fix: str


_RESUME: Final = "then `fedquilt resume` the run"
_UPGRADE: Final = "install the coordinator's fedquilt and packages on these devices"

REFUSALS: Final[Mapping[str, Refusal]] = {
    "data": Refusal(
        "start", True, "the data cannot be used", f"correct the data or [data], restart these agents, {_RESUME}"
    ),
    "engine": Refusal("start", True, "the engine cannot run the task", f"{_UPGRADE}, or set another engine"),
    "method": Refusal(
        "start", True, "the method refused the task", f"change the job as the reason says, or {_UPGRADE}"
    ),
    "codec": Refusal("start", True, "the codec is unknown", f"{_UPGRADE}, or set another [wire] codec"),
    "budget": Refusal(
        "rounds",
        True,
        "the task does not fit the memory budget",
        "raise the devices' budget (agent.toml, or [fleet] budgets), or make the model or [params] batch smaller",
    ),
    "memory": Refusal(
        "rounds", False, "memory ran out", f"free memory on these devices or make the task smaller, {_RESUME}"
    ),
    "model": Refusal("round", True, "the model does not fit", "change the model or donor as the reason says"),
    "diverged": Refusal(
        "round",
        True,
        "training diverged",
        "lower [params] lr (0.01 to 0.1 is usual with SGD); if feature scales differ, set [input] standardise = true",
    ),
    "exception": Refusal(
        "round", True, "the method's code failed", "correct the code at the line named, install it on the devices"
    ),
    FULL: Refusal("round", True, "the disk is full", f"free disk space on these devices, {_RESUME}"),
    UPDATE: Refusal(
        "round", True, "the update was rejected", f"remove these devices, or correct what they send, {_RESUME}"
    ),
    "disk": Refusal("attempt", False, "the disk failed", f"check the disks, {_RESUME}"),
    "failed": Refusal("attempt", False, "the work failed", f"see to these devices, {_RESUME}"),
    "flooding": Refusal("attempt", False, "the device sent too much", f"remove it, {_RESUME}"),
    "removed": Refusal("attempt", False, "the device was removed from the fleet", "none is needed"),
    NOTHING: Refusal("attempt", False, "the method has no task", "none is needed"),
}
"""Code -> what is known of refusals with it."""

UNKNOWN: Final = REFUSALS["failed"]  # of a code that only later versions have


class Refused(msgspec.Struct, frozen=True):
    round: int
    code: str
    reason: str
    actions: frozenset[str]
    start: str = ""  # as of `Registry.agent_start_key`; "": not known
    short: Short | None = None

    def would_recur(self, round: int, actions: Collection[str], start: str, short: Short) -> bool:
        """Return whether the device would decline the present task again.

        Args:
            round: The number of the running round.
            actions: The actions of a task of this round. The decline does not apply to a task with fewer actions.
            start: The key of the agent's present start.
            short: The requirements of the task on the device.
        """
        kind = REFUSALS[self.code]
        if (start != self.start and self.code != UPDATE) or not self.actions.issubset(actions):
            return False
        if round == self.round or kind.lasts == "start":
            return kind.recurs
        within = kind.lasts == "rounds" and round < self.round + AGAIN_ROUNDS
        return within and self.short is not None and self.short.is_at_least(short)
