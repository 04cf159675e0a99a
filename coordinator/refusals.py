"""Reasons for which a board refuses a task, and for how long each holds: the one table of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

import msgspec

from fedquilt.coordinator.deadline import Short

Lasts: TypeAlias = Literal["attempt", "rounds", "start"]
"""Duration of a refusal. "attempt": until the next attempt. "rounds": `AGAIN_ROUNDS` rounds, for as much work.
"start": until the board's agent starts anew or announces another profile, as nothing else mends it."""

NOTHING: Final = "none"  # code of a device that the method has no task for
AGAIN_ROUNDS: Final = 10  # rounds until a device that declined for lack of memory is asked again for such work

LASTS: Final[Mapping[str, Lasts]] = {
    "data": "start",
    "engine": "start",
    "method": "start",
    "codec": "start",
    "memory": "rounds",
    "model": "attempt",  # what is sent changes from round to round, and what was damaged is fetched again
    "disk": "attempt",
    "failed": "attempt",
    NOTHING: "attempt",
}
"""Code of a refusal -> how long it holds."""


class Refused(msgspec.Struct, frozen=True):
    """A lasting refusal of a device: the task that it was of, and the start of the agent that refused it."""

    round: int
    code: str
    reason: str
    actions: frozenset[str]
    start: str  # as of `Registry.start`; "": not known
    short: Short | None

    def holds(self, round: int, actions: tuple[str, ...], start: str, short: Short) -> bool:
        """Whether the device would refuse again.

        Args:
            round: number of the running round.
            actions: of a task of the running round; the refusal says nothing of a task that asks for less.
            start: of the device's agent, as it is now.
            short: requirements of the task on the device.
        """
        if start != self.start or not self.actions.issubset(actions):
            return False
        if LASTS[self.code] == "start":
            return True
        within = self.round < round < self.round + AGAIN_ROUNDS  # another attempt may find memory free
        return within and self.short is not None and self.short.same(short)
