"""The measuring part of `fedquilt record`: a board at a few operating points, in bounded time.

Idle power first, where there is a meter. Then at each of a few operating points (`profiles.fit.design`: the
fastest, the middle, then mostly corners) two units of work are repeated: arithmetic and memory traffic. The
median time of each and the mean power go into the profile, and the model of `profiles.model` is fitted to
them. Probes of each workload (`probes`) follow: an engine's own small trainings and runs, whose least times
tell what a launch and a task cost. Sensors are read between units. What the time does not suffice for is left
out, and that is said. The clocks are given back however this ends; the clock helper sees to it even if this
process is killed.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from fedquilt.core import ClockError, OperatingPoint, Rates, Reading
from fedquilt.edge_agent.power.energy import Ledger
from fedquilt.profiles import MOST_POINTS, fit
from fedquilt.profiles import model as laws
from fedquilt.tools.board.probes import Probe
from fedquilt.tools.board.probes import rates as workload_rates
from fedquilt.tools.board.workloads import Workload

log = logging.getLogger("fedquilt.record")

OWN: Final = "as-is"  # the one point of a board whose clocks cannot be set
SETTLE_S: Final = 0.5  # clocks and voltages after a change
LEAST_S: Final = 1.5  # of one point; with less it is skipped
LEAST_UNITS: Final = 3  # timed at a point, or it is skipped
COMPUTING: Final = 0.7  # of the time of plain units at a point; the rest is memory traffic
PLAIN: Final = 0.4  # of a point's time for plain units, where there are workloads to probe
IDLE_SHARE, IDLE_MOST_S = 0.05, 20.0  # of the whole time for idle power
IDLE_STEP_S: Final = 0.5  # between its readings


class Setter(Protocol):
    """Client that sets the clocks: `fedquilt.edge_agent.clocks.client.Clocks`, or a fake."""

    def hold(self, point: OperatingPoint) -> OperatingPoint:
        """Hold the clocks at a point; returns the point the board reports."""
        ...

    def keepalive(self, now_s: float) -> None:
        """Signal that the holder is alive."""
        ...

    def release(self) -> None:
        """Return the clocks to the board."""
        ...


@dataclass(frozen=True)
class Rig:
    """Plan of a measurement."""

    work: Workload
    read: Callable[[float], Reading]
    clocks: Setter | None  # None: they stay as the board has them
    now: Callable[[], float]
    sleep: Callable[[float], None]
    probes: Mapping[str, Sequence[Probe]] = field(default_factory=dict)  # by workload: `probes.available`


@dataclass(frozen=True)
class Measured:
    """One point, as the board said that it was held."""

    point: OperatingPoint  # with flops_per_s, bytes_per_s, rates by workload and, where there is a meter, busy_w
    units: int  # of arithmetic that were timed
    took_s: float


@dataclass(frozen=True)
class Recording:
    """All that was measured."""

    idle_w: float | None
    points: tuple[Measured, ...]
    skipped: tuple[tuple[str, str], ...]  # (point, why)
    power_source: str | None
    took_s: float


def candidates(lists: dict[str, tuple[float, ...]]) -> list[OperatingPoint]:
    """Every point worth measuring, from what the board's clocks can be set to: as in a profile's grid."""
    grid = laws.grid(lists, MOST_POINTS)
    return [msgspec.convert({"name": laws.name(clocks), **clocks}, OperatingPoint) for clocks in grid]


def chosen(points: Sequence[OperatingPoint]) -> list[OperatingPoint]:
    """A small subset, most telling first: three for each clock that varies, and three more."""
    every = [clocks_of(point) for point in points]
    top = highest(points)
    varying = [axis for axis in top if len({clocks[axis] for clocks in every}) > 1]
    return [points[place] for place in fit.design(every, 3 * len(varying) + 3, top)]


def clocks_of(point: OperatingPoint) -> dict[str, float | None]:
    """Clocks of a point by axis, in hertz."""
    return {axis: getattr(point, axis) for axis in laws.AXES}


def highest(points: Sequence[OperatingPoint]) -> dict[str, float]:
    """Highest clock among the points, by axis."""
    known = {axis: [hz for point in points if (hz := getattr(point, axis))] for axis in laws.AXES}
    return {axis: max(values) for axis, values in known.items() if values}


def measure(
    rig: Rig,
    points: Sequence[OperatingPoint],
    limit_s: float,
    say: Callable[[str], None] = lambda line: None,
) -> Recording:
    """Idle power, then each point, within `limit_s` but for one unit of work; clocks are given back at the end.

    Without anything that sets clocks, `points` is not looked at: it is the one the board is at.
    """
    began_s = rig.now()
    end_s = began_s + limit_s
    done: list[Measured] = []
    skipped: list[tuple[str, str]] = []
    with _restored(rig.clocks):
        idle_w, source = _idle(rig, min(IDLE_SHARE * limit_s, IDLE_MOST_S))
        wanted = [OperatingPoint(name=OWN)] if rig.clocks is None else list(points)
        for place, point in enumerate(wanted):
            share_s = (end_s - rig.now()) / (len(wanted) - place)
            say(f"[{place + 1}/{len(wanted)}] {point.name}; at most {max(0.0, end_s - rig.now()) / 60:.1f} min more")
            try:
                if share_s < LEAST_S:
                    raise _Skip("no time was left")
                found = _point(rig, point, rig.now() + share_s)
            except (_Skip, ClockError) as reason:
                skipped.append((point.name, str(reason)))
                say(f"{point.name}: skipped, {reason}")
                continue
            done.append(found)
            say(_said(found))
    return Recording(idle_w, tuple(done), tuple(skipped), source, rig.now() - began_s)


class _Skip(Exception):
    """Why a point was not measured."""


@contextlib.contextmanager
def _restored(clocks: Setter | None) -> Iterator[None]:
    try:
        yield
    finally:
        if clocks is not None:
            try:
                clocks.release()
            except ClockError as error:
                log.warning("the clocks could not be given back: %s", error)


def _idle(rig: Rig, seconds: float) -> tuple[float | None, str | None]:
    """(watts, where from) of the board at rest, before anything is held; (None, None) without a meter."""
    now_s = rig.now()
    ledger = Ledger(now_s).seen(now_s, rig.read(now_s))
    if ledger.at_s is None:
        return None, None
    end_s = now_s + seconds
    while rig.now() < end_s:
        rig.sleep(min(IDLE_STEP_S, end_s - rig.now()))
        ledger = ledger.seen(rig.now(), rig.read(rig.now()))
    cost = ledger.cost(rig.now(), None)
    return _watts(cost.energy_j, cost.duration_s), cost.energy_source


def _point(rig: Rig, point: OperatingPoint, end_s: float) -> Measured:
    began_s = rig.now()
    held = point
    if rig.clocks is not None:
        held = rig.clocks.hold(point)
        rig.sleep(SETTLE_S)
    rig.work.compute()  # the first one at new clocks is not like the others
    _check(rig, end_s)
    plain_s = (PLAIN if rig.probes else 1.0) * (end_s - rig.now())
    plain_end_s = rig.now() + plain_s
    compute_s, busy_w = _timed(rig, rig.work.compute, plain_end_s - (1 - COMPUTING) * plain_s, end_s)
    traffic_s, _ = _timed(rig, rig.work.traffic, plain_end_s, end_s)
    rates = {}
    for place, (workload, some) in enumerate(rig.probes.items()):
        until_s = rig.now() + (end_s - rig.now()) / (len(rig.probes) - place)
        if (found := _rates(rig, some, until_s, end_s)) is not None:
            rates[workload] = found
    return Measured(
        point=OperatingPoint(
            name=point.name,
            cpu_hz=held.cpu_hz,
            gpu_hz=held.gpu_hz,
            emc_hz=held.emc_hz,
            flops_per_s=rig.work.flops / statistics.median(compute_s),
            bytes_per_s=rig.work.read_bytes / statistics.median(traffic_s),
            busy_w=busy_w,
            rates=rates,
        ),
        units=len(compute_s),
        took_s=rig.now() - began_s,
    )


def _rates(rig: Rig, probes: Sequence[Probe], until_s: float, end_s: float) -> Rates | None:
    """Rates of one workload from the least time of each probe; None: the time does not suffice, or none fits."""
    times: list[list[float]] = [[] for _ in probes]
    try:
        while rig.now() < until_s or len(times[-1]) < LEAST_UNITS:
            for probe, seen in zip(probes, times, strict=True):
                _check(rig, end_s)
                before_s = rig.now()
                probe.run()
                seen.append(rig.now() - before_s)
    except _Skip:
        pass
    if len(times[-1]) < LEAST_UNITS or not all(min(seen) > 0 for seen in times):
        return None
    found = workload_rates(probes, [min(seen) for seen in times])
    return found if found.flops_per_s else None


def _timed(rig: Rig, unit: Callable[[], object], until_s: float, end_s: float) -> tuple[list[float], float | None]:
    """Seconds of each unit, and the mean watts meanwhile. A few are done past `until_s`, none past `end_s`."""
    times: list[float] = []
    now_s = rig.now()
    ledger = Ledger(now_s).seen(now_s, rig.read(now_s))
    while now_s < until_s or len(times) < LEAST_UNITS:
        _check(rig, end_s)
        before_s = rig.now()
        unit()
        now_s = rig.now()
        times.append(now_s - before_s)
        ledger = ledger.seen(now_s, rig.read(now_s))
    cost = ledger.cost(now_s, None)
    return times, _watts(cost.energy_j, cost.duration_s)


def _check(rig: Rig, end_s: float) -> None:
    """Raises _Skip when the point's time is up, ClockError when the clocks are no longer held."""
    now_s = rig.now()
    if rig.clocks is not None:
        rig.clocks.keepalive(now_s)
    if now_s >= end_s:
        raise _Skip(f"its time did not suffice for {LEAST_UNITS} units of work")


def _watts(energy_j: float | None, duration_s: float) -> float | None:
    return None if not energy_j or duration_s <= 0 else energy_j / duration_s


def _said(found: Measured) -> str:
    point = found.point
    watts = "power not measurable" if point.busy_w is None else f"{point.busy_w:.2f} W"
    speed, traffic = (point.flops_per_s or 0) / 1e9, (point.bytes_per_s or 0) / 1e9
    return f"{point.name}: {speed:.1f} GFLOP/s, {traffic:.1f} GB/s, {watts} ({found.units} units, {found.took_s:.1f} s)"
