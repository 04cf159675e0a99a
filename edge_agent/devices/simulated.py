"""A board that is only a profile: it tells what work would take there, and has no sensors.

Time: t = flops / flops_per_s + read_bytes / bytes_per_s at the operating point it is held at, the
two not overlapping. Energy: busy_w * t. Where the task declares no FLOPs, or the profile no speed,
the time measured on this host stands in, and the source says so.
"""

from __future__ import annotations

from fedquilt import profiles
from fedquilt.core import Cost, JobError, Reading, Work


class SimulatedDevice:
    """A board by its profile, held at one operating point (the profile's first unless named).

    Raises:
        JobError: the profile has no such point.
    """

    def __init__(self, profile: profiles.Board, point: str | None = None) -> None:
        known = {held.name: held for held in profile.points}
        if point is not None and point not in known:
            raise JobError(f"board {profile.board!r} has no operating point {point!r}; it has {', '.join(known)}")
        self._point = profile.points[0] if point is None else known[point]
        self._profile = profile
        self.board = profile.board
        self.memory_bytes = int(profile.memory_bytes.value)
        self.points = tuple(held.operating_point() for held in profile.points)
        self.idle_w = None if profile.idle_w is None else profile.idle_w.value
        self.provenance: str = profile.provenance()

    @classmethod
    def named(cls, board: str, point: str | None = None) -> SimulatedDevice:
        """The board in `profiles/<board>.toml`. Raises JobError where there is none."""
        return cls(profiles.load(board), point)

    def read(self, now_s: float) -> Reading:
        """Nothing: the sensors of this host are not the board's."""
        return Reading()

    def cost(self, work: Work, measured_s: float, before: Reading, after: Reading) -> Cost:
        """What the profile predicts for the work."""
        speed, traffic, power = self._point.flops_per_s, self._point.bytes_per_s, self._point.busy_w
        predicted = work.flops > 0 and speed is not None
        duration_s = measured_s
        if predicted and speed is not None:
            duration_s = work.flops / speed.value + (work.read_bytes / traffic.value if traffic else 0.0)
        if power is None:
            return Cost(duration_s=duration_s)
        rests_on = self._profile.provenance(*((power, speed, traffic) if predicted else (power,)))
        source = f"profile {self.board} ({rests_on})" + ("" if predicted else ", time measured on this host")
        return Cost(duration_s=duration_s, energy_j=power.value * duration_s, energy_source=source)
