"""Boards: meters, clocks and memory, real or simulated. One file per kind, found by its name.

Every file but `simulated.py` is a kind of real board and has `detect(root) -> Device | None`.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from fedquilt.core import Device, JobError

ROOT = Path("/")


def make(board: str, root: Path = ROOT) -> Device:
    """The board this agent speaks for.

    Args:
        board: "auto" for this host; or a profile's name ("jetson-tx2"), or one and an operating point
            of it ("jetson-tx2:MAXQ"), for a simulated one.
        root: where `proc` and `sys` are.

    Raises:
        JobError: no such profile or point, or a host that cannot be read.
    """
    if board != "auto":
        from fedquilt.edge_agent.devices.simulated import SimulatedDevice

        name, _, point = board.partition(":")
        return SimulatedDevice.named(name, point or None)
    kinds = {module.name for module in pkgutil.iter_modules(__path__)} - {"simulated"}
    for kind in sorted(kinds, key=lambda kind: (kind == "linux", kind)):  # any Linux is the last resort
        device = importlib.import_module(f"{__name__}.{kind}").detect(root)
        if device is not None:
            return device
    raise JobError("board 'auto' needs a Linux host with /proc/meminfo; name a profile to simulate one instead")
