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
    """Parse an operating point, such as "MAXQ" or "cpu=1.2GHz,gpu=850MHz", or raise JobError."""
    mode_name, *clock_settings = text.split(",")
    has_mode = "=" not in mode_name
    clocks_hz: dict[str, float] = {}
    for part in clock_settings if has_mode else [mode_name, *clock_settings]:
        match = re.fullmatch(r"\s*(cpu|gpu|emc)\s*=\s*(\d+(?:\.\d+)?)\s*([kmg]?)(?:hz)?\s*", part, re.IGNORECASE)
        if match is None or f"{match[1].lower()}_hz" in clocks_hz:
            raise JobError(f"clock {part.strip()!r} is invalid: write cpu=1.2GHz, gpu=850MHz or emc=1600MHz, each once")
        clocks_hz[f"{match[1].lower()}_hz"] = float(match[2]) * UNITS[match[3].lower()]
    if has_mode and not 0 < len(mode_name.strip()) <= 200:
        raise JobError("operating point is empty or too long: name a power mode, or clocks as in cpu=1.2GHz,gpu=850MHz")
    return msgspec.convert({"name": mode_name.strip() if has_mode else text.strip()[:200], **clocks_hz}, OperatingPoint)


def read_status(root: Path) -> tuple[HelperStatus, bool]:
    """Return the machine's clocks, and whether the clock helper and not files reported them."""
    clocks = ClockClient.connect(root / SOCKET)
    if clocks is not None:
        with contextlib.closing(clocks):
            return clocks.request_status(), True
    clock_controls = controls.discover_controls(root)
    status = HelperStatus(
        clocks=tuple(read_clock_state(control) for control in clock_controls.controls),
        modes=tuple(mode.name for mode in clock_controls.modes),
        temperature_c=controls.hottest_zone_c(root),
    )
    return status, False


def print_status(root: Path, format: str) -> None:
    status, has_helper = read_status(root)
    if format == "json":
        print(msgspec.json.encode({"helper": has_helper, **msgspec.to_builtins(status)}).decode())
    else:
        print("\n".join(_format_status(status, None if has_helper else root / SOCKET)))


def pin_point(text: str, root: Path, *, dry_run: bool = False) -> None:
    """Pin the clocks until KeyboardInterrupt, or with `dry_run` only print the settings.

    Raise JobError if the text is no point, and ClockError without a clock helper or a suitable frequency.
    """
    point = parse_point(text)
    if dry_run:
        clock_controls = controls.discover_controls(root)
        mode = clock_controls.find_mode(point.name)
        writes = [str(write) for write in controls.pin_writes(clock_controls, point)]
        print("\n".join([*([f"nvpmodel -m {mode.id} ({mode.name})"] if mode else []), *writes]))
        return
    clocks = ClockClient.connect(root / SOCKET)
    if clocks is None:
        raise ClockError(f"no clock helper at {root / SOCKET}: start one with `sudo fedquilt board clocks serve`")
    try:
        pinned = clocks.pin(point)
        print(f"pinned: {_format_point(pinned)} (Ctrl-C to unpin)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(1.0)
                clocks.send_keepalive(time.monotonic())
        clocks.unpin()
        print("unpinned: the board's own settings are restored")
    finally:
        clocks.close()


def _format_point(point: OperatingPoint) -> str:
    clocks = {"cpu": point.cpu_hz, "gpu": point.gpu_hz, "emc": point.emc_hz}
    clocks_text = ", ".join(f"{kind} {hz / 1e6:g} MHz" for kind, hz in clocks.items() if hz is not None)
    return clocks_text or f"mode {point.name}"


def _format_status(status: HelperStatus, missing_socket: Path | None) -> list[str]:
    lines = [_format_clock(clock) for clock in status.clocks] or ["no clock of this machine is visible"]
    if status.modes:
        lines.append(f"mode    {status.mode or 'unknown'} of {', '.join(status.modes)}")
    if status.temperature_c is not None:
        limit = "" if status.max_temperature_c is None else f"; above {status.max_temperature_c:g} C no clock is pinned"
        lines.append(f"hottest {status.temperature_c:g} C{limit}")
    if missing_socket is not None:
        lines.append(f"helper  none at {missing_socket}: `sudo fedquilt board clocks serve` starts one")
    elif status.point is None or status.holder is None:
        lines.append("helper  no clock is pinned")
    else:
        lines.append(f"helper  {status.holder} pins {status.point.name}: {_format_point(status.point)}")
    return [*lines, *(f"NOT RESTORED: {sentence}" for sentence in status.unrestored_settings)]


def _format_clock(clock: ClockState) -> str:
    def format_mhz(hz: float | None) -> str:
        return "?" if hz is None else f"{hz / 1e6:g}"

    settings = " ".join(format_mhz(hz) for hz in clock.listed_hz)
    limits = f"{format_mhz(clock.now_hz)} now, limits {format_mhz(clock.low_hz)} to {format_mhz(clock.high_hz)} MHz"
    governor = f", {clock.governor}" if clock.governor else ""
    missing_reason = "frequencies readable only by root" if clock.hidden else "no list of frequencies: cannot be pinned"
    return f"{clock.kind:7} {clock.name}: {limits}{governor}; " + (f"lists {settings}" if settings else missing_reason)
