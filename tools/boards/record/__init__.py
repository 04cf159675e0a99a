"""Recording of a board's profile: measurement, model fit and TOML file (`fedquilt board record`)."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from fedquilt import profiles
from fedquilt.core import ClockError, OperatingPoint, Rates
from fedquilt.edge_agent import devices
from fedquilt.edge_agent.clocks.client import SOCKET, ClockClient, ClockState
from fedquilt.formats import toml
from fedquilt.host import disk
from fedquilt.profiles import BoardProfile, ClockSteps, NumberSource, ProfilePoint, SourcedValue, add_checksum, fit
from fedquilt.profiles import clock_model as laws
from fedquilt.tools.boards.record import measurement, probes
from fedquilt.tools.boards.record.measurement import BoardMeasurements, PointMeasurement

MEASURED, FITTED, HOST, LISTED = "measured", "fit", "host", "clocks"  # sources
KINDS: Final = {"cpu": "cpu_hz", "gpu": "gpu_hz", "emc": "emc_hz"}

Lists: TypeAlias = dict[str, tuple[float, ...]]
Errors: TypeAlias = dict[str, fit.RelativeErrors]  # of time, traffic, and power where there is a meter


@dataclass(frozen=True)
class BoardFacts:
    board: str
    memory_bytes: int
    description: str  # kernel, versions, date and load


@dataclass(frozen=True)
class FittedProfile:
    board: BoardProfile
    recording: BoardMeasurements
    errors: Errors  # {} with too few points for a model


def record_profile(
    out: Path | None,
    minutes: float,
    *,
    root: Path = devices.ROOT,
    dry_run: bool = False,
    format: str = "text",
    print_line: Callable[[str], None] = print,
) -> int:
    """Measure a board and write its profile, or only print the points. Return 1 if points were skipped.

    The default of `out` is BOARD.toml in the current folder. `root` is the folder with `proc` and `sys`, in a container
    the mount of the host's root. Raise ClockError if no point could be measured.
    """
    if out is not None:
        disk.make_output_folder(out)  # fail before the measurement
    clocks = ClockClient.connect(root / SOCKET)
    try:
        device = devices.create_device("auto", root, connect=lambda: None)
        clock_states = () if clocks is None else clocks.request_status().clocks
        lists = common_settings(clock_states)
        points = measurement.select_points(measurement.candidate_points(permitted_settings(clock_states)))
        if dry_run:
            plan = [point.name for point in points] or [measurement.CURRENT_POINT]
            if format == "json":
                print_line(msgspec.json.encode({"points": plan, "minutes": minutes}).decode())
            else:
                print_line("\n".join(["points to measure:", *(f"    {name}" for name in plan)]))
            return 0
        work, probes_by_workload = probes.build_workload(), probes.build_probes_by_workload()
        load = f"{os.getloadavg()[0]:.1f} other"
        setup = measurement.MeasurementSetup(
            work, device.read_sensors, clocks if lists else None, time.monotonic, time.sleep, probes_by_workload
        )
        is_json = format == "json"
        recording = measurement.measure_points(
            setup, points, 60 * minutes, (lambda line: None) if is_json else print_line
        )
    finally:
        if clocks is not None:
            clocks.close()
    result = build_profile(recording, BoardFacts(device.board, device.memory_bytes, _describe_setup(work, load)), lists)
    path = out or Path(f"{result.board.board}.toml")
    disk.write_output(path, format_board(result.board))
    next_step = f'wrote {path}; `profile = "{path.resolve()}"` in agent.toml makes the agent use it'
    print_line(
        msgspec.json.encode(make_json_report(result, path)).decode()
        if is_json
        else "\n".join([*format_fitted_profile(result), next_step])
    )
    return 1 if recording.skipped else 0


def common_settings(clocks: Sequence[ClockState]) -> Lists:
    """Return the frequencies in Hz that all clocks of a kind support, ascending, by axis such as "cpu_hz"."""
    settings_by_axis: Lists = {}
    for kind, axis in KINDS.items():
        settings_per_clock = [set(clock.listed_hz) for clock in clocks if clock.kind == kind and clock.listed_hz]
        if settings_per_clock and (shared := set.intersection(*settings_per_clock)):
            settings_by_axis[axis] = tuple(sorted(shared))
    return settings_by_axis


def permitted_settings(clocks: Sequence[ClockState]) -> Lists:
    """Return the common settings that are within all ceilings of clocks, such as a power mode's cap."""

    def limit_clock(clock: ClockState) -> ClockState:
        max_hz = float("inf") if clock.ceiling_hz is None else clock.ceiling_hz
        return msgspec.structs.replace(clock, listed_hz=tuple(hz for hz in clock.listed_hz if hz <= max_hz))

    return common_settings([limit_clock(clock) for clock in clocks])


def build_profile(recording: BoardMeasurements, facts: BoardFacts, lists: Lists) -> FittedProfile:
    """Return a profile of the measured points, with a model if enough different points were measured.

    `lists` has the frequencies of each axis, from `common_settings`. Raise ClockError if no point was measured.
    """
    measured_points = recording.points
    if not measured_points:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in recording.skipped)
        raise ClockError(f"no point could be measured ({reasons}): increase --minutes, or let the board cool")
    sources = {
        HOST: NumberSource("measured", f"MemTotal of /proc/meminfo on the board itself. {facts.description}"),
        MEASURED: NumberSource("measured", _describe_method(recording, facts)),
    }
    top = {axis: values[-1] for axis, values in lists.items()}
    varying = [
        axis for axis in top if len({getattr(measured.point, axis) or top[axis] for measured in measured_points}) > 1
    ]
    model, clocks = None, None
    errors: Errors = {}
    if varying and len(measured_points) >= len(varying) + 2:
        model, errors = _fit_time_and_power(recording, top)
        axes = {axis: ClockSteps(values, LISTED) for axis, values in lists.items()}
        clocks = profiles.BoardClocks(**axes)
        sources[LISTED] = NumberSource(
            "measured", "Frequencies in the board's clock files, reported by the clock helper."
        )
        sources[FITTED] = NumberSource("measured", _describe_fit(len(measured_points), errors))
    board = BoardProfile(
        board=_slug(facts.board),
        title=facts.board[:200],
        memory_bytes=SourcedValue(facts.memory_bytes, HOST),
        idle_w=_to_figure(recording.idle_w, MEASURED),
        sources=sources,
        clocks=clocks,
        model=model,
        workloads=_fit_workload_rates(recording, top if model is not None else {}),
        points=tuple(_to_profile_point(measured.point) for measured in measured_points),
    )
    return FittedProfile(board, recording, errors)


def _fit_time_and_power(
    recording: BoardMeasurements, top: dict[str, float]
) -> tuple[profiles.ModelCoefficients, Errors]:
    def observations(value: Callable[[OperatingPoint], float | None]) -> list[fit.MeasuredPoint]:
        pairs = [(measurement.clocks_by_axis(measured.point), value(measured.point)) for measured in recording.points]
        return [fit.MeasuredPoint(clocks, measured_value) for clocks, measured_value in pairs if measured_value]

    errors: Errors = {}
    times, errors["time"] = fit.fit_time_law(observations(lambda point: 1 / (point.flops_per_s or 1.0)), top)
    traffic, errors["traffic"] = fit.fit_time_law(observations(lambda point: 1 / (point.bytes_per_s or 1.0)), top)
    numbers = {"flop_s": times.fixed_s, "byte_s": traffic.fixed_s}
    for axis in laws.AXES:
        numbers[f"flop_{axis[:-3]}_cycles"] = times.cycles.get(axis, 0.0)
        numbers[f"byte_{axis[:-3]}_cycles"] = traffic.cycles.get(axis, 0.0)
    powers = observations(lambda point: point.busy_w)
    if len(powers) == len(recording.points):
        draw, errors["power"] = fit.fit_power_model(powers, top, recording.idle_w or 0.0)
        numbers |= {"base_w": draw.base_w, "exponent": draw.exponent}
        numbers |= {key: draw.axes_w.get(axis, 0.0) for axis, key in laws.POWERED.items()}
    figures = {key: _to_figure(value, FITTED) for key, value in numbers.items() if value > 0}
    return profiles.ModelCoefficients(**figures), errors


def _fit_workload_rates(recording: BoardMeasurements, top: dict[str, float]) -> dict[str, profiles.TimeCoefficients]:
    coefficients = {}
    for workload in sorted({name for measured in recording.points for name in measured.point.rates}):
        numbers: dict[str, float] = {}
        points = [measured.point for measured in recording.points if workload in measured.point.rates]
        for key, unit in profiles.UNITS.items():
            pairs = [
                (measurement.clocks_by_axis(point), _seconds_per_unit(getattr(point.rates[workload], key), key))
                for point in points
            ]
            times = [fit.MeasuredPoint(clocks, value) for clocks, value in pairs if value]
            if not times:
                continue
            law = fit.fit_time_law(times, top)[0] if top else laws.InverseTimeLaw(times[0].value)
            numbers[f"{unit}_s"] = law.fixed_s
            numbers |= {f"{unit}_{axis[:-3]}_cycles": count for axis, count in law.cycles.items()}
        source = FITTED if top else MEASURED
        coefficients[workload] = profiles.TimeCoefficients(
            **{key: _to_figure(value, source) for key, value in numbers.items() if value > 0}
        )
    return coefficients


def _seconds_per_unit(value: float | None, key: str) -> float | None:
    return 1 / value if value and key.endswith("_per_s") else value


def _to_profile_point(point: OperatingPoint) -> ProfilePoint:
    clocks = {axis: _to_figure(getattr(point, axis), MEASURED) for axis in laws.AXES}
    numbers = {key: _to_figure(getattr(point, key), MEASURED) for key in profiles.BEHIND}  # rates are in [workloads]
    return ProfilePoint(name=point.name, **clocks, **numbers)


def _to_figure(value: float | None, source: str) -> SourcedValue | None:
    return None if value is None else SourcedValue(float(f"{value:.12g}"), source)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._")[:64] or "board"


# -- output ---------------------------------------------------------------------------------------


def _describe_setup(work: probes.TimedWorkload, load: str) -> str:
    versions = {"kernel": platform.release(), "python": platform.python_version(), **work.versions}
    on = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{work.name}; {on}; {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC; {load} processes ran before."


def _describe_method(recording: BoardMeasurements, facts: BoardFacts) -> str:
    mean_s = sum(measured.took_s for measured in recording.points) / len(recording.points)
    power = "power could not be measured" if recording.power_source is None else f"power: {recording.power_source}"
    skipped = f"; {len(recording.skipped)} more points were skipped" if recording.skipped else ""
    return (
        f"fedquilt board record on {facts.board}: median time of a unit of work, {len(recording.points)} "
        f"point(s) in {mean_s:.1f} s each{skipped}; {power}. {facts.description}"
    )


def _describe_fit(count: int, errors: Errors) -> str:
    descriptions = [
        f"{name} off by {_format_percent(error.median)} (median) and {_format_percent(error.worst)} (worst)"
        for name, error in errors.items()
    ]
    return (
        f"Fitted to the {count} measured points; at points left out of the fit, one at a time: "
        f"{'; '.join(descriptions)}."
    )


def _format_percent(value: float | None) -> str:
    return "an unknown share" if value is None else f"{100 * value:.1f} %"


def format_fitted_profile(result: FittedProfile) -> list[str]:
    recording = result.recording
    idle = "not measurable here" if recording.idle_w is None else f"{recording.idle_w:.2f} W"
    lines = [f"idle power: {idle}"]
    if recording.power_source is None:
        lines.append("no power meter: the profile has no power")
    if not result.errors:
        lines.append(f"no model: {len(recording.points)} point(s) at known clocks are too few to fit one")
    else:
        lines += [
            f"    {measured.point.name:28} {_format_errors(result, index)}"
            for index, measured in enumerate(recording.points)
        ]
        lines.append(result.board.sources[FITTED].text)
        lines += describe_accuracy(result)
    lines += [_format_rates(name, rates) for name, rates in recording.points[0].point.rates.items()]
    lines += [f"skipped {name}: {reason}" for name, reason in recording.skipped]
    return lines


def _format_rates(workload: str, rates: Rates) -> str:
    parts = [f"{(rates.flops_per_s or 0) / 1e9:.3g} GFLOP/s"]
    parts += [f"{rates.bytes_per_s / 1e9:.3g} GB/s"] if rates.bytes_per_s else []
    parts += [f"{1e6 * rates.launch_s:.3g} us a launch"] if rates.launch_s else []
    parts += [f"{1e3 * rates.task_s:.3g} ms a task"] if rates.task_s else []
    return f"{workload} at {parts[0]}{''.join(f', {part}' for part in parts[1:])}"


ACCURACY_LIMITS: Final = ((0.1, "well"), (0.25, "roughly"))  # worst error at points left out of the fit


def describe_accuracy(result: FittedProfile) -> list[str]:
    lines = []
    for name, errors in result.errors.items():
        if errors.worst is None:
            lines.append(f"{name}: not cross-validated, too few points were measured: increase --minutes")
            continue
        quality = next((quality for limit, quality in ACCURACY_LIMITS if errors.worst <= limit), "badly")
        percent = _format_percent(errors.worst)
        lines.append(
            f"{name}: the model predicts other points {quality}, within {percent} at points left out of the fit"
        )
    return lines


def _format_errors(result: FittedProfile, index: int) -> str:
    def format_percent(value: float | None) -> str:
        return "?" if value is None else f"{100 * value:+.1f} %"

    return ", ".join(
        f"{name} {format_percent(error.fitted[index])} (left out {format_percent(error.left_out[index])})"
        for name, error in result.errors.items()
    )


def make_json_report(result: FittedProfile, path: Path) -> dict[str, Any]:
    recording = result.recording

    def report_point(index: int, result_point: PointMeasurement) -> dict[str, Any]:
        left_out = {name: errors.left_out[index] for name, errors in result.errors.items()}
        return {
            **msgspec.to_builtins(result_point.point),
            "units": result_point.units,
            "took_s": result_point.took_s,
            "left_out": left_out,
        }

    return {
        "profile": str(path),
        "board": result.board.board,
        "idle_w": recording.idle_w,
        "power_source": recording.power_source,
        "points": [report_point(index, error) for index, error in enumerate(recording.points)],
        "skipped": [{"point": name, "why": reason} for name, reason in recording.skipped],
        "error": {name: {"median": error.median, "worst": error.worst} for name, error in result.errors.items()},
        "took_s": recording.took_s,
    }


def format_board(board: BoardProfile) -> str:
    table = msgspec.to_builtins(board)
    table_values = {key: value for key, value in table.items() if value is not None}
    keys = ("board", "title", "memory_bytes", "idle_w")
    parts = [_format_table({key: table_values[key] for key in keys if key in table_values})]
    parts += [
        f"[sources.{toml.key_text(key)}]\n{_format_table(source)}" for key, source in table_values["sources"].items()
    ]
    parts += [
        f"[clocks.{axis}]\n{_format_table(steps)}" for axis, steps in table_values.get("clocks", {}).items() if steps
    ]
    parts += [f"[{key}]\n{_format_table(table_values[key])}" for key in ("model", "thermal") if key in table_values]
    parts += [
        f"[workloads.{toml.key_text(key)}]\n{_format_table(times)}" for key, times in table_values["workloads"].items()
    ]
    parts += [f"[[points]]\n{_format_table(point)}" for point in table_values["points"]]
    return add_checksum("\n".join(parts))


def _format_table(table: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {toml.format_value(value)}\n" for key, value in table.items() if value is not None)
