"""Table of a fleet's devices, from the data that a coordinator has stored."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from fedquilt.console import table as console_table
from fedquilt.console import units
from fedquilt.coordinator.fleet.device_status import (
    CurrentTask,
    DeviceStatus,
    InstalledRelease,
    LatestDecline,
    TelemetrySample,
    TelemetryStore,
)
from fedquilt.formats import labels

STATES: Final = ("online", "offline", "silent", "working", "idle", "refused")  # values of --state
MIN_REPORTED_SKEW_S: Final = 1.0  # smaller differences between clocks may be the network's
HEAD: Final = ("device", "state", "for", "W", "°C", "memory", "doing")
WATCH_INTERVAL_S: Final = 0.5  # between two checks of `watch_devices`


class DeviceRow(msgspec.Struct, frozen=True):
    board: DeviceStatus
    reading: TelemetrySample  # latest reading, empty without a recent one

    @property
    def state(self) -> str:
        if not self.board.online:
            return "silent" if self.board.silent else "offline"
        return "idle" if self.board.doing is None else self.board.doing.step

    def to_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.to_builtins(msgspec.structs.asdict(self.board))
        reading = msgspec.structs.asdict(self.reading)
        reading["reading_at"] = reading.pop("at") or None
        return {**fields, "state": self.state, **reading}


def load_devices(home: Path, now: float | None = None) -> list[DeviceRow]:
    """Return the readable devices of a home, sorted by name, with their readings that are fresh at `now`."""
    with TelemetryStore(home) as store:
        latest = store.latest_readings(time.time() if now is None else now)
        return [DeviceRow(status, latest.get(status.device, TelemetrySample(0))) for status in store.load_statuses()]


def describe_outage(home: Path, now: float) -> str:
    """Return text to follow "waits for", as "its broker, unreachable for 5 min", or "" without an outage."""
    with TelemetryStore(home) as store:
        since = store.broker_outage_start()
    return "" if since is None else f"its broker, unreachable for {units.format_duration(now - since)}"


def filter_devices(
    devices: Iterable[DeviceRow], selection: Sequence[str] = (), state: str | None = None
) -> list[DeviceRow]:
    return [
        device
        for device in devices
        if labels.is_selected(selection, device.board.labels) and (state is None or state in matching_states(device))
    ]


def matching_states(device: DeviceRow) -> set[str]:
    board = device.board
    decline_state = {"refused"} if board.refusal is not None else set()
    if not board.online:
        return {"silent" if board.silent else "offline", *decline_state}
    return {"online", "idle" if board.doing is None else "working", *decline_state}


def format_devices(
    devices: Sequence[DeviceRow], now: float, *, is_served: bool = True, outage: str = "", width: int | None = None
) -> list[str]:
    """Return the fleet as lines: the number of devices, then each device with its state and last decline."""
    width = console_table.line_width() if width is None else width
    lines = [_format_counts(devices)]
    if not is_served:
        lines.append("no coordinator is running for this home: this is the last known state")
    elif outage:
        lines.append(f"the coordinator waits for {outage}: this is the last known state")
    table = console_table.format_table([HEAD, *(_format_cells(each, now) for each in devices)], "<<>>>><", 10**6)
    lines += ["", _truncate_line(table[0], width)] if devices else []
    for device, line in zip(devices, table[1:], strict=True):
        lines += [_truncate_line(line, width), _truncate_line(f"  {_describe_device(device.board, now)}", width)]
        if runner_text := _format_runner(device.reading):
            lines.append(_truncate_line(f"  {runner_text}", width))
        for release in device.board.runs:
            lines += _wrap_line(f"  {_format_release(release, now)}", width)
        if (refusal := device.board.refusal) is not None:
            task_text = f" {_format_round(refusal)}," if refusal.job else ""
            elapsed = units.format_duration(now - refusal.at)
            lines += _wrap_line(f"  refused{task_text} {elapsed} ago ({refusal.code}): {refusal.reason}", width)
    return lines


def _format_counts(devices: Sequence[DeviceRow]) -> str:
    online = [device for device in devices if device.board.online]
    working = sum(device.board.doing is not None for device in online)
    total = f"{len(devices)} device{'' if len(devices) == 1 else 's'}"
    silent = sum(device.board.silent for device in devices)
    silent_text = f", {silent} silent" if silent else ""
    offline = len(devices) - len(online) - silent
    return f"{total}: {len(online)} online, {working} of them working; {offline} offline{silent_text}"


def _format_cells(device: DeviceRow, now: float) -> tuple[str, ...]:
    board, reading = device.board, device.reading
    return (
        board.device,
        device.state,
        "-" if board.since is None else units.format_duration(now - board.since),
        "-" if reading.power_w is None else f"{reading.power_w:.3g}",
        "-" if reading.temperature_c is None else f"{reading.temperature_c:.0f}",
        _format_memory(reading.task_bytes or 0, board.budget_bytes),
        "" if board.doing is None else _format_task(board.doing, now),
    )


def _format_memory(task_bytes: int, budget_bytes: int) -> str:
    if not budget_bytes:
        return "-"
    scale, prefix = units.select_prefix(budget_bytes)
    return f"{_format_digits(task_bytes / scale, 2)}/{_format_digits(budget_bytes / scale, 3)} {prefix}B"


def _format_digits(value: float, digits: int) -> str:
    return f"{value:.{digits}g}" if value < 10**digits - 0.5 else f"{value:.0f}"


def _format_task(doing: CurrentTask, now: float) -> str:
    share = f" {100 * doing.fraction:.0f} %" if doing.fraction is not None else ""
    return f"{_format_round(doing)}:{share} {units.format_duration(now - doing.since)}"


def _format_round(task: CurrentTask | LatestDecline) -> str:
    return f"{_job_name(task.job)}, {'final evaluation' if task.is_evaluation else f'round {task.round + 1}'}"


def _job_name(run: str) -> str:
    # a run's id ends in date, time and a random part
    return run.rsplit("-", 3)[0]


def _format_runner(reading: TelemetrySample) -> str:
    if reading.served is None and reading.drift is None and reading.accuracy is None:
        return ""
    parts = [] if reading.served is None else [f"{reading.served} answers"]
    parts.append("drift not known yet" if reading.drift is None else f"drift {reading.drift:.2f}")
    parts += [] if reading.accuracy is None else [f"accuracy {100 * reading.accuracy:.0f} %"]
    return f"serves: {', '.join(parts)}"


def _format_release(release: InstalledRelease, now: float) -> str:
    name = release.name or release.current[:12] or "as flashed"
    if release.phase == "committed":
        return f"{release.kind} {name}, for {units.format_duration(now - release.at)}"
    reason_text = f": {release.reason}" if release.reason else ""
    return (
        f"{release.kind} {name}; {release.rollout} {release.phase} {units.format_duration(now - release.at)} "
        f"ago{reason_text}"
    )


def _describe_device(board: DeviceStatus, now: float) -> str:
    parts = [board.board or "unknown hardware", board.mode and f"mode {board.mode}"]
    parts.append(board.version and f"agent {board.version}")
    if board.skew_s is not None and board.online:
        clock_text = f"clock {board.skew_s:+.1f} s" if abs(board.skew_s) >= MIN_REPORTED_SKEW_S else "clock right"
        parts.append(clock_text)
    if board.silent and board.since is not None:
        parts.append(f"silent since {units.format_time_of_day(board.since, now)}")
    elif (not board.online or board.quiet) and board.seen is not None:
        parts.append(f"last message {units.format_duration(now - board.seen)} ago")
    return "; ".join(filter(None, [", ".join(filter(None, parts)), " ".join(board.labels)]))


def _truncate_line(line: str, width: int) -> str:
    stripped = _replace_unprintable(line).rstrip()
    return stripped if len(stripped) <= width else f"{stripped[: width - 1]}…"


def _wrap_line(line: str, width: int) -> list[str]:
    return textwrap.wrap(_replace_unprintable(line), width, initial_indent="", subsequent_indent="    ")


def _replace_unprintable(line: str) -> str:
    # unprintable characters could move the terminal's cursor
    return "".join(character if character.isprintable() else "?" for character in line)


def watch_devices(
    show: Callable[[list[DeviceRow]], None],
    load: Callable[[], list[DeviceRow]],
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Show the devices now and after every change. Never return."""
    previous: list[DeviceRow] | None = None
    while True:
        current = load()
        if current != previous:
            previous = current
            show(current)
        wait(WATCH_INTERVAL_S)
