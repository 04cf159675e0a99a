"""A board that is only a profile: it tells what work would take there, and has no sensors.

Time: t = flops / flops_per_s + read_bytes / bytes_per_s at the operating point it is held at, the
two not overlapping. Energy: busy_w * t. Where the task declares no FLOPs, or the profile no speed,
the time measured on this host stands in, and the source says so.
"""

from __future__ import annotations

from fedquilt import predict, profiles
from fedquilt.core import ClockError, Cost, JobError, OperatingPoint, Reading, Work


class SimulatedDevice:
    """A board by its profile, held at one operating point (the profile's first unless named).

    Raises:
        JobError: the profile has no such point.
    """

    def __init__(self, profile: profiles.Board, point: str | None = None) -> None:
        known = {held.name: held for held in profile.points}
        if point is not None and point not in known:
            raise JobError(f"board {profile.board!r} has no operating point {point!r}; it has {', '.join(known)}")
        self._own = self._point = profile.points[0] if point is None else known[point]
        self._profile = profile
        self.board = profile.board
        self.memory_bytes = int(profile.memory_bytes.value)
        self.points = tuple(held.operating_point() for held in profile.points)
        self.idle_w = None if profile.idle_w is None else profile.idle_w.value
        self.provenance: str = profile.provenance()

    adjustable = True

    @classmethod
    def named(cls, board: str, point: str | None = None) -> SimulatedDevice:
        """The board in `profiles/<board>.toml`. Raises JobError where there is none."""
        return cls(profiles.load(board), point)

    def read(self, now_s: float) -> Reading:
        """Nothing: the sensors of this host are not the board's."""
        return Reading()

    def hold(self, point: OperatingPoint) -> OperatingPoint:
        """See `fedquilt.core.Device`."""
        found = [held for held in self._profile.points if held.name == point.name]
        if not found:
            raise ClockError(f"board {self.board} has no operating point {point.name!r}")
        self._point = found[0]
        return self._point.operating_point()

    def release(self) -> None:
        self._point = self._own

    def cost(self, work: Work, measured: Cost) -> Cost:
        """What the profile predicts for the work."""
        point = self._point.operating_point()
        duration_s = predict.seconds(work, point)
        predicted = duration_s is not None
        if duration_s is None:
            duration_s = measured.duration_s
        power = self._point.busy_w
        if power is None:
            return Cost(duration_s=duration_s, point=point.name)
        speed, traffic = self._point.flops_per_s, self._point.bytes_per_s
        rests_on = self._profile.provenance(*((power, speed, traffic) if predicted else (power,)))
        source = f"profile {self.board} ({rests_on})" + ("" if predicted else ", time measured on this host")
        idle_j = None if self.idle_w is None else self.idle_w * duration_s
        return Cost(
            duration_s=duration_s,
            energy_j=predict.joules(duration_s, point),
            idle_j=idle_j,
            energy_source=source,
            point=point.name,
        )
