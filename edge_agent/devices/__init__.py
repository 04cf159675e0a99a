"""Boards: meters, clocks and memory, real or simulated. One file per kind, found by its name.

A file with `detect(root, *, profile, clocks, own) -> Device | None` is a kind of real board; the others hold
common parts.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt import plugins
from fedquilt.core import Device, JobError, Meter
from fedquilt.edge_agent.devices.sensors.meters import WIDTH

if TYPE_CHECKING:
    from fedquilt import profiles

ROOT = Path("/")


def make(
    board: str,
    root: Path = ROOT,
    *,
    profile: profiles.Board | None = None,
    connect: Callable[[], Any] | None = None,
    meter: Meter | None = None,
) -> Device:
    """Device of this agent.

    Args:
        board: "auto" for this host; or a profile's name ("jetson-tx2"), or one and an operating point
            of it ("jetson-tx2:MAXQ"), for a simulated one.
        root: where `proc` and `sys` are.
        profile: of this very board, as `fedquilt record` writes it; None: the one shipped for its kind, if any.
        connect: returns the client that sets the clocks, or None; default: this machine's helper, if `root` is "/".
        meter: additional meter of this board, from agent.toml.

    Raises:
        JobError: no such profile or point, a profile or meter for a simulated board, or a host that cannot be read.
    """
    if board != "auto":
        if profile is not None:
            raise JobError(
                f"board {board!r} is simulated from its own profile: leave `profile` out, or say board = 'auto'"
            )
        if meter is not None:
            raise JobError(f"board {board!r} is simulated and has no meter: leave `meter` out, or say board = 'auto'")
        from fedquilt.edge_agent.devices.simulated import SimulatedDevice

        return SimulatedDevice.named(board)
    if connect is None and root == ROOT:
        from fedquilt.edge_agent.clocks.client import Clocks

        connect = Clocks.connect
    clocks = connect() if connect is not None else None
    for kind in sorted(_kinds(), key=lambda kind: (kind == "linux", kind)):  # any Linux is the last resort
        detect = getattr(importlib.import_module(f"{__name__}.{kind}"), "detect", None)
        device = None if detect is None else detect(root, profile=profile, clocks=clocks, own=meter)
        if device is not None:
            return device
    raise JobError("board 'auto' needs a Linux host with /proc/meminfo; name a profile to simulate one instead")


def shipped(root: Path) -> profiles.Board | None:
    """Profile that ships for the board whose files are under `root`; None: there is none for it."""
    from fedquilt.edge_agent.devices import jetson, linux

    return jetson.fitting(root) or linux.fitting(root, linux.FITS)


def meter(wanted: str | Mapping[str, Any]) -> Meter:
    """Create the meter that agent.toml names: a class or function of an entry point or `module:name`, called once.

    Args:
        wanted: its name, or a table with `name` and the arguments of the call.

    Raises:
        JobError: there is none, it fails, or its result is no `fedquilt.core.Meter`; names it and the mend.
    """
    table = {"name": wanted} if isinstance(wanted, str) else dict(wanted)
    name = table.pop("name", None)
    if not isinstance(name, str):
        raise JobError(
            'meter: give it a name, as in meter = "plug:Meter" or { name = "plug:Meter", host = "10.0.0.7" }'
        )
    plugin = plugins.find("meter", name)
    assert plugin is not None  # fedquilt's own meters have no names: they are found by the board's files
    factory = plugins.imported(plugin)
    if not callable(factory):
        raise plugins.refused(plugin, "a class or function that makes a meter", factory)
    try:
        made = factory(**table)
    except Exception as error:  # code from outside may raise anything
        raise JobError(f"{plugin} cannot be made from {table}: {type(error).__name__}: {error}") from None
    covers = getattr(made, "covers", None)
    if covers not in WIDTH or not callable(getattr(made, "read", None)):
        there = ", ".join(WIDTH)
        raise JobError(f"{plugin} is no meter: it needs `read(now_s)`, and `covers` one of {there}, not {covers!r}")
    return made


def _kinds() -> set[str]:
    return {module.name for module in pkgutil.iter_modules(__path__)} - {"simulated"}
