"""Measurement of a board at a few operating points, in bounded time (for `fedquilt board record`).

Idle power is measured first. At each point (`profiles.fit.select_points_to_measure`) units of arithmetic and of
memory traffic are timed, then the probes of each workload. Points that do not fit the time limit are skipped. The
clocks are released at the end.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from fedquilt.core import ClockError, Cost, OperatingPoint, Rates, Reading
from fedquilt.edge_agent.clocks.client import ClockClient
from fedquilt.edge_agent.power.task_power import EnergyAccount
from fedquilt.profiles import MOST_POINTS, fit
from fedquilt.profiles import clock_model as laws
from fedquilt.tools.boards.record.probes import TaskProbe, TimedWorkload
from fedquilt.tools.boards.record.probes import fit_rates as workload_rates

log = logging.getLogger("fedquilt.record")

OWN: Final = "as-is"  # the one point of a board whose clocks cannot be set
SETTLE_S: Final = 0.5  # clocks and voltages after a change
LEAST_S: Final = 1.5  # of one point; with less it is skipped
LEAST_UNITS: Final = 3  # timed at a point, or it is skipped
COMPUTING: Final = 0.7  # of the time of plain units at a point; the rest is memory traffic
PLAIN: Final = 0.4  # of a point's time for plain units, where there are workloads to probe
IDLE_SHARE, IDLE_MOST_S = 0.05, 20.0  # of the whole time for idle power
IDLE_STEP_S: Final = 0.5  # between its readings


@dataclass(frozen=True)
class MeasurementSetup:
    work: TimedWorkload
    read: Callable[[float], Reading]
    clocks: ClockClient | None  # None to keep the board's clocks
    now: Callable[[], float]
    sleep: Callable[[float], None]
    probes: Mapping[str, Sequence[TaskProbe]] = field(
        default_factory=dict
    )  # by workload: `probes.build_probes_by_workload`


@dataclass(frozen=True)
class PointMeasurement:
    point: OperatingPoint  # with flops_per_s, bytes_per_s, rates by workload and, where there is a meter, busy_w
    units: int  # of arithmetic that were timed
    took_s: float


@dataclass(frozen=True)
class BoardMeasurements:
    idle_w: float | None
    points: tuple[PointMeasurement, ...]
    skipped: tuple[tuple[str, str], ...]  # (point, why)
    power_source: str | None
    took_s: float


def candidate_points(lists: dict[str, tuple[float, ...]]) -> list[OperatingPoint]:
    """Return the grid of operating points for lists of clock settings, at most `MOST_POINTS`."""
    grid = laws.make_grid(lists, MOST_POINTS)
    return [msgspec.convert({"name": laws.format_point_name(clocks), **clocks}, OperatingPoint) for clocks in grid]


def select_points(points: Sequence[OperatingPoint]) -> list[OperatingPoint]:
    """Select the points to measure, most informative first: 3 per varying clock, and 3 more."""
    every = [clocks_by_axis(point) for point in points]
    top = highest_clocks(points)
    varying = [axis for axis in top if len({clocks[axis] for clocks in every}) > 1]
    return [points[place] for place in fit.select_points_to_measure(every, 3 * len(varying) + 3, top)]


def clocks_by_axis(point: OperatingPoint) -> dict[str, float | None]:
    return {axis: getattr(point, axis) for axis in laws.AXES}


def highest_clocks(points: Sequence[OperatingPoint]) -> dict[str, float]:
    known = {axis: [hz for point in points if (hz := getattr(point, axis))] for axis in laws.AXES}
    return {axis: max(values) for axis, values in known.items() if values}


def measure_points(
    rig: MeasurementSetup,
    points: Sequence[OperatingPoint],
    limit_s: float,
    say: Callable[[str], None] = lambda line: None,
) -> BoardMeasurements:
    """Measure idle power and each point, and release the clocks at the end.

    The time may exceed `limit_s` by one unit of work. If the clocks cannot be set, only the current point is measured.
    """
    began_s = rig.now()
    end_s = began_s + limit_s
    done: list[PointMeasurement] = []
    skipped: list[tuple[str, str]] = []
    with _unpin_on_exit(rig.clocks):
        idle_w, source = _measure_idle_power(rig, min(IDLE_SHARE * limit_s, IDLE_MOST_S))
        wanted = [OperatingPoint(name=OWN)] if rig.clocks is None else list(points)
        for place, point in enumerate(wanted):
            share_s = (end_s - rig.now()) / (len(wanted) - place)
            say(f"[{place + 1}/{len(wanted)}] {point.name}; at most {max(0.0, end_s - rig.now()) / 60:.1f} min more")
            try:
                if share_s < LEAST_S:
                    raise _PointSkipped("no time was left")
                found = _measure_point(rig, point, rig.now() + share_s)
            except (_PointSkipped, ClockError) as reason:
                skipped.append((point.name, str(reason)))
                say(f"{point.name}: skipped, {reason}")
                continue
            done.append(found)
            say(_format_measurement(found))
    return BoardMeasurements(idle_w, tuple(done), tuple(skipped), source, rig.now() - began_s)


class _PointSkipped(Exception):
    """Why a point was not measured."""


@contextlib.contextmanager
def _unpin_on_exit(clocks: ClockClient | None) -> Iterator[None]:
    try:
        yield
    finally:
        if clocks is not None:
            try:
                clocks.unpin()
            except ClockError as error:
                log.warning("the clocks could not be given back: %s", error)


def _measure_idle_power(rig: MeasurementSetup, seconds: float) -> tuple[float | None, str | None]:
    now_s = rig.now()
    ledger = EnergyAccount(now_s).with_reading(now_s, rig.read(now_s))
    if ledger.last_reading_s is None:
        return None, None
    end_s = now_s + seconds
    while rig.now() < end_s:
        rig.sleep(min(IDLE_STEP_S, end_s - rig.now()))
        ledger = ledger.with_reading(rig.now(), rig.read(rig.now()))
    cost = ledger.cost_until(rig.now(), None)
    return mean_power_w(cost), cost.energy_source


def _measure_point(rig: MeasurementSetup, point: OperatingPoint, end_s: float) -> PointMeasurement:
    began_s = rig.now()
    held = point
    if rig.clocks is not None:
        held = rig.clocks.pin(point)
        rig.sleep(SETTLE_S)
    rig.work.compute()  # the first one at new clocks is not like the others
    _keep_pin_and_require_time(rig, end_s)
    plain_s = (PLAIN if rig.probes else 1.0) * (end_s - rig.now())
    plain_end_s = rig.now() + plain_s
    compute_s, busy_w = _time_units(rig, rig.work.compute, plain_end_s - (1 - COMPUTING) * plain_s, end_s)
    traffic_s, _ = _time_units(rig, rig.work.traffic, plain_end_s, end_s)
    rates = {}
    for place, (workload, some) in enumerate(rig.probes.items()):
        until_s = rig.now() + (end_s - rig.now()) / (len(rig.probes) - place)
        if (found := _measure_rates(rig, some, until_s, end_s)) is not None:
            rates[workload] = found
    return PointMeasurement(
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


def _measure_rates(rig: MeasurementSetup, probes: Sequence[TaskProbe], until_s: float, end_s: float) -> Rates | None:
    times: list[list[float]] = [[] for _ in probes]
    try:
        while rig.now() < until_s or len(times[-1]) < LEAST_UNITS:
            for probe, seen in zip(probes, times, strict=True):
                _keep_pin_and_require_time(rig, end_s)
                before_s = rig.now()
                probe.run()
                seen.append(rig.now() - before_s)
    except _PointSkipped:
        pass
    if len(times[-1]) < LEAST_UNITS or not all(min(seen) > 0 for seen in times):
        return None
    found = workload_rates(probes, [min(seen) for seen in times])
    return found if found.flops_per_s else None


def _time_units(
    rig: MeasurementSetup, unit: Callable[[], object], until_s: float, end_s: float
) -> tuple[list[float], float | None]:
    times: list[float] = []
    now_s = rig.now()
    ledger = EnergyAccount(now_s).with_reading(now_s, rig.read(now_s))
    while now_s < until_s or len(times) < LEAST_UNITS:
        _keep_pin_and_require_time(rig, end_s)
        before_s = rig.now()
        unit()
        now_s = rig.now()
        times.append(now_s - before_s)
        ledger = ledger.with_reading(now_s, rig.read(now_s))
    cost = ledger.cost_until(now_s, None)
    return times, mean_power_w(cost)


def _keep_pin_and_require_time(rig: MeasurementSetup, end_s: float) -> None:
    now_s = rig.now()
    if rig.clocks is not None:
        rig.clocks.send_keepalive(now_s)
    if now_s >= end_s:
        raise _PointSkipped(f"its time did not suffice for {LEAST_UNITS} units of work")


def mean_power_w(cost: Cost) -> float | None:
    return None if not cost.energy_j or cost.duration_s <= 0 else cost.energy_j / cost.duration_s


def _format_measurement(found: PointMeasurement) -> str:
    point = found.point
    watts = "power not measurable" if point.busy_w is None else f"{point.busy_w:.2f} W"
    speed, traffic = (point.flops_per_s or 0) / 1e9, (point.bytes_per_s or 0) / 1e9
    return f"{point.name}: {speed:.1f} GFLOP/s, {traffic:.1f} GB/s, {watts} ({found.units} units, {found.took_s:.1f} s)"
