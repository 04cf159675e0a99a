"""Boards of a fleet as a table: who is there, what each does, and how it is. From what a coordinator has noted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from fedquilt import columns, labels, units
from fedquilt.coordinator.boards import Board, Doing, Reading, Runs
from fedquilt.coordinator.boards_store import BoardStore
from fedquilt.core import shorten_error

STATES: Final = ("online", "offline", "silent", "working", "idle", "refused")  # what --state takes
SKEW_SAID_S: Final = 1.0  # smaller differences between clocks may be the network's
REASON_LEAST: Final = 20  # columns for the reason of a refusal, however narrow the terminal
HEAD: Final = ("board", "state", "for", "W", "°C", "memory", "doing")
LOOK_S: Final = 0.5  # between two looks of `watch`


class Device(msgspec.Struct, frozen=True):
    """One board as it is now."""

    board: Board
    reading: Reading  # its latest; nothing is known where there is no recent one

    @property
    def state(self) -> str:
        """State in a word: offline, silent, idle, or the step of its task."""
        if not self.board.online:
            return "silent" if self.board.silent else "offline"
        return "idle" if self.board.doing is None else self.board.doing.step

    def row(self) -> dict[str, Any]:
        """All of it for programs, times in wall-clock seconds."""
        told: dict[str, Any] = msgspec.to_builtins(msgspec.structs.asdict(self.board))
        reading = msgspec.structs.asdict(self.reading)
        reading["reading_at"] = reading.pop("at") or None
        return {**told, "state": self.state, **reading}


def look(home: Path, now: float | None = None) -> list[Device]:
    """Every board that a coordinator of this home has heard of, by name.

    Raises:
        StoreError: what is kept of boards cannot be read.
    """
    with BoardStore(home) as store:
        latest = store.latest(time.time() if now is None else now)
        return [Device(each, latest.get(each.device, Reading(0))) for each in store.boards()]


def away(home: Path, now: float) -> str:
    """For how long the coordinator that serves a home has not reached its broker, in words; "": it does.

    Raises:
        StoreError: what is kept of boards cannot be read.
    """
    with BoardStore(home) as store:
        since = store.away()
    return "" if since is None else f"its broker, which it has not reached for {units.duration(now - since)}"


def chosen(devices: Iterable[Device], wanted: Sequence[str] = (), state: str | None = None) -> list[Device]:
    """The boards that a selection by labels names and that are in a state of STATES."""
    return [
        each
        for each in devices
        if labels.selects(wanted, each.board.labels) and (state is None or state in states_of(each))
    ]


def states_of(device: Device) -> set[str]:
    """Return those of STATES that a device is in."""
    board = device.board
    refused = {"refused"} if board.refusal is not None else set()
    if not board.online:
        return {"silent" if board.silent else "offline", *refused}
    return {"online", "idle" if board.doing is None else "working", *refused}


def format_devices(
    devices: Sequence[Device], now: float, *, served: bool = True, away: str = "", wide: int | None = None
) -> list[str]:
    """Return the fleet as lines: a count, then each device with its description and last refusal.

    Args:
        devices: to show.
        now: wall-clock seconds.
        served: whether a coordinator is there; without one nobody knows who is online.
        away: as of `away`.
        wide: largest width of a line; None: as `columns.width`.
    """
    wide = columns.width() if wide is None else wide
    told = [_format_counts(devices)]
    if not served:
        told.append("no coordinator serves this home: the boards are shown as the last one knew them")
    elif away:
        told.append(f"the coordinator waits for {away}: the boards are shown as they were known then")
    table = columns.table([HEAD, *(_cells(each, now) for each in devices)], "<<>>>><", 10**6)
    told += ["", _cut(table[0], wide)] if devices else []
    for device, line in zip(devices, table[1:], strict=True):
        told += [_cut(line, wide), _cut(f"  {_describe_board(device.board, now)}", wide)]
        if said := _serves(device.reading):
            told.append(_cut(f"  {said}", wide))
        for runs in device.board.runs:
            told.append(_cut(f"  {_runs(runs, now)}", wide))
        if (refusal := device.board.refusal) is not None:
            what = f" {_job(refusal.job)}, round {refusal.round}," if refusal.job else ""
            when = units.duration(now - refusal.at)
            first = f"  refused{what} {when} ago ({refusal.code}): "
            told.append(_cut(first + shorten_error(refusal.reason, max(wide - len(first), REASON_LEAST)), wide))
    return told


def _format_counts(devices: Sequence[Device]) -> str:
    """Return how many devices there are, and how many are online, at work, offline and silent."""
    online = [each for each in devices if each.board.online]
    working = sum(each.board.doing is not None for each in online)
    boards = f"{len(devices)} board{'' if len(devices) == 1 else 's'}"
    silent = sum(each.board.silent for each in devices)
    lost = f", {silent} silent" if silent else ""
    offline = len(devices) - len(online) - silent
    return f"{boards}: {len(online)} online, {working} of them at work; {offline} offline{lost}"


def _cells(device: Device, now: float) -> tuple[str, ...]:
    board, reading = device.board, device.reading
    return (
        board.device,
        device.state,
        "-" if board.since is None else units.duration(now - board.since),
        "-" if reading.power_w is None else f"{reading.power_w:.3g}",
        "-" if reading.temperature_c is None else f"{reading.temperature_c:.0f}",
        _memory(reading.task_bytes or 0, board.budget_bytes),
        "" if board.doing is None else _doing(board.doing, now),
    )


def _memory(task: int, budget: int) -> str:
    """What the task's process holds of what it may: "0.31/2 GB"."""
    if not budget:
        return "-"
    scale, prefix = units.unit(budget)
    return f"{_digits(task / scale, 2)}/{_digits(budget / scale, 3)} {prefix}B"


def _digits(value: float, digits: int) -> str:
    """A number in so many digits, and in as many more as a whole one needs: never with an exponent."""
    return f"{value:.{digits}g}" if value < 10**digits - 0.5 else f"{value:.0f}"


def _doing(doing: Doing, now: float) -> str:
    share = f" {100 * doing.fraction:.0f} %" if doing.fraction is not None else ""
    return f"{_job(doing.job)}, round {doing.round}:{share} {units.duration(now - doing.since)}"


def _job(run: str) -> str:
    """Name of a run's job: its id without the time."""
    return run.rsplit("-", 3)[0]


def _serves(reading: Reading) -> str:
    """Return the answers, drift and accuracy of the model runner as text, or "" without a runner."""
    if reading.served is None and reading.drift is None and reading.accuracy is None:
        return ""
    parts = [] if reading.served is None else [f"{reading.served} answers"]
    parts.append("drift not known yet" if reading.drift is None else f"drift {reading.drift:.2f}")
    parts += [] if reading.accuracy is None else [f"accuracy {100 * reading.accuracy:.0f} %"]
    return f"serves: {', '.join(parts)}"


def _runs(runs: Runs, now: float) -> str:
    """What a board runs, and how far it is with the latest release unless it has committed that."""
    what = runs.name or runs.current[:12] or "as flashed"
    if runs.phase == "committed":
        return f"{runs.kind} {what}, for {units.duration(now - runs.at)}"
    why = f": {runs.reason}" if runs.reason else ""
    return f"{runs.kind} {what}; {runs.rollout} {runs.phase} {units.duration(now - runs.at)} ago{why}"


def _describe_board(board: Board, now: float) -> str:
    """Return a board's hardware, mode, agent version, clock error, last contact and labels as text."""
    parts = [board.board or "has not said what it is", board.mode and f"mode {board.mode}"]
    parts.append(board.version and f"agent {board.version}")
    if board.skew_s is not None and board.online:
        said = f"clock {board.skew_s:+.1f} s" if abs(board.skew_s) >= SKEW_SAID_S else "clock right"
        parts.append(said)
    if board.silent and board.since is not None:
        parts.append(f"silent since {units.format_time_of_day(board.since, now)}")
    elif (not board.online or board.quiet) and board.seen is not None:
        parts.append(f"last heard {units.duration(now - board.seen)} ago")
    return "; ".join(filter(None, [", ".join(filter(None, parts)), " ".join(board.labels)]))


def _cut(line: str, wide: int) -> str:
    """A line without what would move a terminal's cursor, no longer than `wide`."""
    if not line.isprintable():
        line = "".join(each if each.isprintable() else "?" for each in line)
    clean = line.rstrip()
    return clean if len(clean) <= wide else f"{clean[: wide - 1]}…"


def watch(
    show: Callable[[list[Device]], None],
    look: Callable[[], list[Device]],
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Show the boards now, and again whenever something about them has changed, for ever."""
    before: list[Device] | None = None
    while True:
        now = look()
        if now != before:
            before = now
            show(now)
        wait(LOOK_S)
