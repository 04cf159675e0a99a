"""Devices: meters, clocks and memory, real or simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt import plugins
from fedquilt.core import Device, JobError, Meter
from fedquilt.edge_agent.devices.meters import COVERAGE_ORDER

if TYPE_CHECKING:
    from fedquilt import profiles
    from fedquilt.edge_agent.clocks.client import ClockClient

ROOT = Path("/")


def create_device(
    board: str,
    root: Path = ROOT,
    *,
    profile: profiles.BoardProfile | None = None,
    connect: Callable[[], ClockClient | None] | None = None,
    meter: Meter | None = None,
) -> Device:
    """Create the device of this agent.

    Args:
        board: "auto" for this host. For a simulated device, a profile's name with an operating point and traits if
            needed, as in "jetson-tx2:MAXQ".
        root: Folder of `proc` and `sys`.
        profile: Profile of this very board, or None for the shipped profile of its kind.
        connect: Function that returns a client of the clock helper or None. By default, this machine's helper is used
            if `root` is "/".
        meter: Additional meter from agent.toml.
    """
    if board != "auto":
        if profile is not None:
            raise JobError(
                f"board {board!r} is simulated and uses its own profile: remove `profile`, or set board = 'auto'"
            )
        if meter is not None:
            raise JobError(f"board {board!r} is simulated and has no meter: remove `meter`, or set board = 'auto'")
        from fedquilt.edge_agent.devices.simulated_device import SimulatedDevice

        return SimulatedDevice.from_name(board)
    from fedquilt.edge_agent.devices import linux

    if connect is None and root == ROOT:
        from fedquilt.edge_agent.clocks.client import ClockClient

        connect = ClockClient.connect
    clocks = connect() if connect is not None else None
    return linux.detect(root, profile=profile, clocks=clocks, custom_meter=meter)


def create_meter(meter_spec: str | Mapping[str, Any]) -> Meter:
    """Create the meter named in agent.toml, from an entry point or `module:name`, or raise JobError."""
    table = {"name": meter_spec} if isinstance(meter_spec, str) else dict(meter_spec)
    name = table.pop("name", None)
    if not isinstance(name, str):
        raise JobError('meter has no name: write meter = "plug:Meter" or { name = "plug:Meter", host = "10.0.0.7" }')
    plugin = plugins.find_plugin("meter", name)
    assert plugin is not None  # fedquilt's own meters are detected by the board's files and have no names
    factory = plugins.import_plugin(plugin)
    if not callable(factory):
        raise plugins.wrong_kind_error(plugin, "a class or function that returns a meter", factory)
    try:
        meter = factory(**table)
    except Exception as error:  # plug-ins may raise any exception
        raise JobError(f"{plugin} cannot be created from {table}: {type(error).__name__}: {error}") from None
    coverage = getattr(meter, "coverage", None)
    if coverage not in COVERAGE_ORDER or not callable(getattr(meter, "read", None)):
        coverages = ", ".join(COVERAGE_ORDER)
        raise JobError(
            f"{plugin} is not a meter: define `read(now_s)`, and `coverage` as one of {coverages}, not {coverage!r}"
        )
    return meter
