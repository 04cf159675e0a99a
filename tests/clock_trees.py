"""A board's files that a clock helper works on."""

from __future__ import annotations

import socket
from pathlib import Path

from fedquilt.edge_agent.clocks import controls
from fedquilt.edge_agent.clocks.client import SOCKET
from fedquilt.edge_agent.clocks.clock_pin import ClockPin
from fedquilt.edge_agent.clocks.helper import STATE, ClockHelper
from tests.fake_boards import write_fake_board

POLICY = "sys/devices/system/cpu/cpufreq/policy0"


class Place:
    """A TX2 made of files, and where its helper keeps what it has."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.state, self.socket = self.root / STATE, self.root / SOCKET
        write_fake_board(self.root, "jetson-tx2", 4)
        self.before = self.settings()
        self.lines: list[socket.socket] = []

    def settings(self) -> object:
        return controls.discover_controls(self.root).read_state(None)

    def held(self) -> bool:
        read = [(self.root / POLICY / f"scaling_{limit}_freq").read_text().strip() for limit in ("min", "max")]
        return read == ["345600", "345600"]

    def restored(self) -> bool:
        return self.settings() == self.before

    def heat(self, celsius: float) -> None:
        (self.root / "sys/class/thermal/thermal_zone1/temp").write_text(f"{celsius * 1000:.0f}\n")

    def helper(self, **given: object) -> ClockHelper:
        return ClockHelper(ClockPin(self.root, self.state), self.socket, self.state, **given)  # type: ignore[arg-type]
