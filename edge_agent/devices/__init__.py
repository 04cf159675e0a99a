"""Boards: meters, clocks and memory, real or simulated. One file per kind, found by its name.

A file with `detect(root, *, profile, clocks, own) -> Device | None` is a kind of real board; beside them is what
they share.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt.core import Device, JobError, Meter

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
    """The board this agent speaks for.

    Args:
        board: "auto" for this host; or a profile's name ("jetson-tx2"), or one and an operating point
            of it ("jetson-tx2:MAXQ"), for a simulated one.
        root: where `proc` and `sys` are.
        profile: of this very board, as `fedquilt record` writes it; else the one that ships for its kind, if any.
        connect: gives what sets the clocks, or None; the clock helper of this machine, if `root` is "/".
        meter: one that this board has beside its own, by agent.toml.

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


def _kinds() -> set[str]:
    return {module.name for module in pkgutil.iter_modules(__path__)} - {"simulated"}
