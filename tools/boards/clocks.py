"""Clock status and manual operating points of a board (`fedquilt board clocks`)."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

import msgspec

from fedquilt.core import ClockError, JobError, OperatingPoint
from fedquilt.edge_agent.clocks import controls
from fedquilt.edge_agent.clocks.client import SOCKET, ClockClient, ClockState, HelperStatus
from fedquilt.edge_agent.clocks.helper import read_clock_state

UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


def parse_point(text: str) -> OperatingPoint:
    """Parse an operating point, such as "MAXQ", "cpu=1.2GHz,gpu=850MHz" or "MAXQ,emc=1600M"."""
    first, *rest = text.split(",")
    named = "=" not in first
    hz: dict[str, float] = {}
    for part in rest if named else [first, *rest]:
        found = re.fullmatch(r"\s*(cpu|gpu|emc)\s*=\s*(\d+(?:\.\d+)?)\s*([kmg]?)(?:hz)?\s*", part, re.IGNORECASE)
        if found is None or f"{found[1].lower()}_hz" in hz:
            raise JobError(f"{part.strip()!r} is no clock: write cpu=1.2GHz, gpu=850MHz or emc=1600MHz, each once")
        hz[f"{found[1].lower()}_hz"] = float(found[2]) * UNITS[found[3].lower()]
    if named and not 0 < len(first.strip()) <= 200:
        raise JobError("name a mode of the board, or clocks as in cpu=1.2GHz,gpu=850MHz")
    return msgspec.convert({"name": first.strip() if named else text.strip()[:200], **hz}, OperatingPoint)


def read_status(root: Path) -> tuple[HelperStatus, bool]:
    """Return the clocks of this machine, and whether the clock helper was asked."""
    clocks = ClockClient.connect(root / SOCKET)
    if clocks is not None:
        with contextlib.closing(clocks):
            return clocks.request_status(), True
    found = controls.discover_controls(root)
    told = HelperStatus(
        clocks=tuple(read_clock_state(lever) for lever in found.controls),
        modes=tuple(mode.name for mode in found.modes),
        temperature_c=controls.hottest_zone_c(root),
    )
    return told, False


def print_status(root: Path, format: str) -> int:
    told, has_helper = read_status(root)
    if format == "json":
        print(msgspec.json.encode({"helper": has_helper, **msgspec.to_builtins(told)}).decode())
    else:
        print("\n".join(_format_status(told, None if has_helper else root / SOCKET)))
    return 0


def pin_point(text: str, root: Path, *, dry_run: bool = False) -> int:
    """Pin the clocks to a point until an interrupt, or with `dry_run` only print the settings. Return 0."""
    wanted = parse_point(text)
    if dry_run:
        found = controls.discover_controls(root)
        mode = found.find_mode(wanted.name)
        writes = [str(write) for write in controls.pin_writes(found, wanted)]
        print("\n".join([*([f"nvpmodel -m {mode.id} ({mode.name})"] if mode else []), *writes]))
        return 0
    clocks = ClockClient.connect(root / SOCKET)
    if clocks is None:
        raise ClockError(f"no clock helper at {root / SOCKET}: start one with `sudo fedquilt board clocks serve`")
    try:
        became = clocks.pin(wanted)
        print(f"held: {_format_point(became)} (interrupt to let go)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(1.0)
                clocks.send_keepalive(time.monotonic())
        clocks.unpin()
        print("let go: the board's own settings are back")
    finally:
        clocks.close()
    return 0


def _format_point(point: OperatingPoint) -> str:
    clocks = {"cpu": point.cpu_hz, "gpu": point.gpu_hz, "emc": point.emc_hz}
    told = ", ".join(f"{kind} {hz / 1e6:g} MHz" for kind, hz in clocks.items() if hz is not None)
    return told or f"mode {point.name}"


def _format_status(told: HelperStatus, missing: Path | None) -> list[str]:
    lines = [_format_clock(one) for one in told.clocks] or ["no clock of this machine can be seen"]
    if told.modes:
        lines.append(f"mode    {told.mode or 'not known'} of {', '.join(told.modes)}")
    if told.temperature_c is not None:
        limit = "" if told.max_temperature_c is None else f"; above {told.max_temperature_c:g} C nothing is held"
        lines.append(f"hottest {told.temperature_c:g} C{limit}")
    if missing is not None:
        lines.append(f"helper  none at {missing}: `sudo fedquilt board clocks serve` starts one")
    elif told.point is None or told.holder is None:
        lines.append("helper  nobody holds the clocks")
    else:
        lines.append(f"helper  {told.holder} holds {told.point.name}: {_format_point(told.point)}")
    return [*lines, *(f"NOT PUT BACK: {sentence}" for sentence in told.unrestored_settings)]


def _format_clock(one: ClockState) -> str:
    def format_mhz(hz: float | None) -> str:
        return "?" if hz is None else f"{hz / 1e6:g}"

    listed = " ".join(format_mhz(hz) for hz in one.listed_hz)
    limits = f"{format_mhz(one.now_hz)} now, limits {format_mhz(one.low_hz)} to {format_mhz(one.high_hz)} MHz"
    governor = f", {one.governor}" if one.governor else ""
    none = "its list is for root alone to read" if one.hidden else "lists none: not settable"
    return f"{one.kind:7} {one.name}: {limits}{governor}; " + (f"lists {listed}" if listed else none)
