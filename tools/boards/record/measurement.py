"""Measurement of a board at a few operating points, in bounded time (for `fedquilt board record`).

Idle power is measured first. At each point (`profiles.fit.select_points_to_measure`) units of arithmetic and of
memory traffic are timed, then the probes of each workload. Points that do not fit the time limit are skipped. The
clocks are unpinned at the end.
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
from fedquilt.profiles import MAX_POINTS, fit
from fedquilt.profiles import clock_model as laws
from fedquilt.tools.boards.record.probes import TaskProbe, TimedWorkload
from fedquilt.tools.boards.record.probes import fit_rates as workload_rates

log = logging.getLogger("fedquilt.record")

CURRENT_POINT: Final = "as-is"  # for boards without settable clocks
SETTLE_S: Final = 0.5  # clocks and voltages settle after a change
MIN_POINT_S: Final = 1.5  # points with less time are skipped
MIN_UNITS: Final = 3  # points with fewer units are skipped
COMPUTE_SHARE: Final = 0.7  # share of arithmetic in the time of plain units. The rest is memory traffic
PLAIN_SHARE: Final = 0.4  # share of plain units in the time of a point with probes
IDLE_SHARE, IDLE_MOST_S = 0.05, 20.0  # share of the whole time for idle power, and its limit
IDLE_STEP_S: Final = 0.5


@dataclass(frozen=True)
class MeasurementSetup:
    work: TimedWorkload
    read: Callable[[float], Reading]
    clocks: ClockClient | None  # None to keep the board's clocks
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    # by workload: `probes.build_probes_by_workload`
    probes: Mapping[str, Sequence[TaskProbe]] = field(default_factory=dict)


@dataclass(frozen=True)
class PointMeasurement:
    point: OperatingPoint  # with flops_per_s, bytes_per_s, rates by workload and, where there is a meter, busy_w
    units: int  # timed units of arithmetic
    took_s: float


@dataclass(frozen=True)
class BoardMeasurements:
    idle_w: float | None
    points: tuple[PointMeasurement, ...]
    skipped: tuple[tuple[str, str], ...]  # (point, why)
    power_source: str | None
    took_s: float


def candidate_points(lists: dict[str, tuple[float, ...]]) -> list[OperatingPoint]:
    """Return the grid of operating points for lists of clock settings, at most `MAX_POINTS`."""
    grid = laws.make_grid(lists, MAX_POINTS)
    return [msgspec.convert({"name": laws.format_point_name(clocks), **clocks}, OperatingPoint) for clocks in grid]


def select_points(points: Sequence[OperatingPoint]) -> list[OperatingPoint]:
    """Select the points to measure, most informative first: 3 per varying clock, and 3 more."""
    clocks_by_point = [clocks_by_axis(point) for point in points]
    top = highest_clocks(points)
    varying = [axis for axis in top if len({clocks[axis] for clocks in clocks_by_point}) > 1]
    return [points[index] for index in fit.select_points_to_measure(clocks_by_point, 3 * len(varying) + 3, top)]


def clocks_by_axis(point: OperatingPoint) -> dict[str, float | None]:
    return {axis: getattr(point, axis) for axis in laws.AXES}


def highest_clocks(points: Sequence[OperatingPoint]) -> dict[str, float]:
    settings_by_axis = {axis: [hz for point in points if (hz := getattr(point, axis))] for axis in laws.AXES}
    return {axis: max(values) for axis, values in settings_by_axis.items() if values}


def measure_points(
    setup: MeasurementSetup,
    points: Sequence[OperatingPoint],
    limit_s: float,
    print_line: Callable[[str], None] = lambda line: None,
) -> BoardMeasurements:
    """Measure idle power and each point, and unpin the clocks at the end.

    A point that cannot be pinned or gets too little time is skipped. The time may exceed `limit_s` by one unit of
    work. Without a clock helper, only the current point is measured.
    """
    began_s = setup.clock()
    deadline_s = began_s + limit_s
    measurements: list[PointMeasurement] = []
    skipped: list[tuple[str, str]] = []
    with _unpin_on_exit(setup.clocks):
        idle_w, source = _measure_idle_power(setup, min(IDLE_SHARE * limit_s, IDLE_MOST_S))
        selected_points = [OperatingPoint(name=CURRENT_POINT)] if setup.clocks is None else list(points)
        for index, point in enumerate(selected_points):
            share_s = (deadline_s - setup.clock()) / (len(selected_points) - index)
            print_line(
                f"[{index + 1}/{len(selected_points)}] {point.name}, at most "
                f"{max(0.0, deadline_s - setup.clock()) / 60:.1f} min left"
            )
            try:
                if share_s < MIN_POINT_S:
                    raise _PointSkipped("no time left")
                measured = _measure_point(setup, point, setup.clock() + share_s)
            except (_PointSkipped, ClockError) as reason:
                skipped.append((point.name, str(reason)))
                print_line(f"{point.name}: skipped, {reason}")
                continue
            measurements.append(measured)
            print_line(_format_measurement(measured))
    return BoardMeasurements(idle_w, tuple(measurements), tuple(skipped), source, setup.clock() - began_s)


class _PointSkipped(Exception): ...


@contextlib.contextmanager
def _unpin_on_exit(clocks: ClockClient | None) -> Iterator[None]:
    try:
        yield
    finally:
        if clocks is not None:
            try:
                clocks.unpin()
            except ClockError as error:
                log.warning("clocks could not be unpinned: %s", error)


def _measure_idle_power(setup: MeasurementSetup, seconds: float) -> tuple[float | None, str | None]:
    now_s = setup.clock()
    account = EnergyAccount(now_s).with_reading(now_s, setup.read(now_s))
    if account.last_reading_s is None:
        return None, None
    deadline_s = now_s + seconds
    while setup.clock() < deadline_s:
        setup.sleep(min(IDLE_STEP_S, deadline_s - setup.clock()))
        account = account.with_reading(setup.clock(), setup.read(setup.clock()))
    cost = account.cost_until(setup.clock(), None)
    return mean_power_w(cost), cost.energy_source


def _measure_point(setup: MeasurementSetup, point: OperatingPoint, deadline_s: float) -> PointMeasurement:
    began_s = setup.clock()
    pinned = point
    if setup.clocks is not None:
        pinned = setup.clocks.pin(point)
        setup.sleep(SETTLE_S)
    setup.work.compute()  # the first run at new clocks is slower
    _keep_pin_and_require_time(setup, deadline_s)
    plain_s = (PLAIN_SHARE if setup.probes else 1.0) * (deadline_s - setup.clock())
    plain_end_s = setup.clock() + plain_s
    compute_s, busy_w = _measure_times_and_power(
        setup, setup.work.compute, plain_end_s - (1 - COMPUTE_SHARE) * plain_s, deadline_s
    )
    traffic_s, _ = _measure_times_and_power(setup, setup.work.traffic, plain_end_s, deadline_s)
    rates = {}
    for index, (workload, probes) in enumerate(setup.probes.items()):
        workload_end_s = setup.clock() + (deadline_s - setup.clock()) / (len(setup.probes) - index)
        if (rates_found := _measure_rates(setup, probes, workload_end_s, deadline_s)) is not None:
            rates[workload] = rates_found
    return PointMeasurement(
        point=OperatingPoint(
            name=point.name,
            cpu_hz=pinned.cpu_hz,
            gpu_hz=pinned.gpu_hz,
            emc_hz=pinned.emc_hz,
            flops_per_s=setup.work.flops / statistics.median(compute_s),
            bytes_per_s=setup.work.read_bytes / statistics.median(traffic_s),
            busy_w=busy_w,
            rates=rates,
        ),
        units=len(compute_s),
        took_s=setup.clock() - began_s,
    )


def _measure_rates(
    setup: MeasurementSetup, probes: Sequence[TaskProbe], target_end_s: float, deadline_s: float
) -> Rates | None:
    times: list[list[float]] = [[] for _ in probes]
    try:
        while setup.clock() < target_end_s or len(times[-1]) < MIN_UNITS:
            for probe, durations_s in zip(probes, times, strict=True):
                _keep_pin_and_require_time(setup, deadline_s)
                before_s = setup.clock()
                probe.run()
                durations_s.append(setup.clock() - before_s)
    except _PointSkipped:
        pass
    if len(times[-1]) < MIN_UNITS or not all(min(durations_s) > 0 for durations_s in times):
        return None
    rates = workload_rates(probes, [min(durations_s) for durations_s in times])
    return rates if rates.flops_per_s else None


def _measure_times_and_power(
    setup: MeasurementSetup, unit: Callable[[], object], target_end_s: float, deadline_s: float
) -> tuple[list[float], float | None]:
    times: list[float] = []
    now_s = setup.clock()
    account = EnergyAccount(now_s).with_reading(now_s, setup.read(now_s))
    while now_s < target_end_s or len(times) < MIN_UNITS:
        _keep_pin_and_require_time(setup, deadline_s)
        before_s = setup.clock()
        unit()
        now_s = setup.clock()
        times.append(now_s - before_s)
        account = account.with_reading(now_s, setup.read(now_s))
    cost = account.cost_until(now_s, None)
    return times, mean_power_w(cost)


def _keep_pin_and_require_time(setup: MeasurementSetup, deadline_s: float) -> None:
    now_s = setup.clock()
    if setup.clocks is not None:
        setup.clocks.send_keepalive(now_s)
    if now_s >= deadline_s:
        raise _PointSkipped(f"not enough time for {MIN_UNITS} units of work")


def mean_power_w(cost: Cost) -> float | None:
    """Return the mean power of a cost, or None if its energy is unknown or 0."""
    return None if not cost.energy_j or cost.duration_s <= 0 else cost.energy_j / cost.duration_s


def _format_measurement(measured: PointMeasurement) -> str:
    point = measured.point
    watts = "power not measurable" if point.busy_w is None else f"{point.busy_w:.2f} W"
    speed, traffic = (point.flops_per_s or 0) / 1e9, (point.bytes_per_s or 0) / 1e9
    return (
        f"{point.name}: {speed:.1f} GFLOP/s, {traffic:.1f} GB/s, {watts} ({measured.units} units, "
        f"{measured.took_s:.1f} s)"
    )
