"""NVIDIA's Jetson boards: rails by label, the profile by the module's part number, the mode by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from fedquilt import profiles
from fedquilt.core import Meter, OperatingPoint
from fedquilt.edge_agent import sysfs
from fedquilt.edge_agent.clocks import modes
from fedquilt.edge_agent.devices.linux import ClockHelper, LinuxDevice
from fedquilt.edge_agent.devices.sensors import jtop
from fedquilt.edge_agent.devices.sensors.ina3221 import Ina3221

NONE: Final = ""  # for a board known to differ from every profile
FITS: Final = {  # name of module or board after "nvidia," in its device tree -> profile
    "p3541-0000": NONE,  # Nano 2 GB, which calls itself a 4 GB one too
    "p3450-0000": "jetson-nano",
    "p3450-0002": "jetson-nano",
    "p3310-1000": "jetson-tx2",
    "p2771-0000": "jetson-tx2",
    "p3668-0000": "jetson-xavier-nx",
    "p3668-0001": "jetson-xavier-nx",
    "p3668-0003": "jetson-xavier-nx",  # 16 GB
    "p2972-0000": "jetson-agx-xavier",
    "p3767-0003": "jetson-orin-nano",
    "p3767-0005": "jetson-orin-nano",
    "p3767-0003-super": "jetson-orin-nano-super",
    "p3767-0005-super": "jetson-orin-nano-super",
    "p3767-0000-super": "jetson-orin-nx-super",
    "p3767-0000": "jetson-orin-nx",
    "p3767-0001": "jetson-orin-nx-8gb",
    "p3767-0004-super": "jetson-orin-nano-4gb-super",
    "p3767-0004": "jetson-orin-nano-4gb",
    "p3701-0000": "jetson-agx-orin",
    "p3701-0005": "jetson-agx-orin",
    "p3701-0004": "jetson-agx-orin-32gb",
    "p3701-0008": "jetson-agx-orin-industrial",
    "p3834-0008": "jetson-agx-thor",
}


def detect(
    root: Path,
    *,
    profile: profiles.Board | None = None,
    clocks: ClockHelper | None = None,
    own: Meter | None = None,
    other: Callable[[], Meter | None] | None = None,
) -> JetsonDevice | None:
    """Detect a Jetson; None: this host is another board.

    Args:
        root: where `proc` and `sys` are.
        profile: of this very board; None: the one shipped for its module.
        clocks: client that sets the clocks; None: they are only read.
        own: meter that agent.toml names.
        other: makes another meter of its rails, used only if the board's own files show none; default: jtop, which
            reads this machine, if `root` is "/".
    """
    compatible = sysfs.lines(sysfs.device_tree(root) / "compatible")
    tegra = any(board.startswith("nvidia,tegra") for board in compatible)
    if not tegra and not sysfs.there(root / "etc/nv_tegra_release"):
        return None
    meter: Meter = Ina3221(root)
    if not meter.read(0.0).rails_w:  # no rails, or none that this user may read
        other = other or (jtop.connect if root == Path("/") else None)
        meter = (other() if other is not None else None) or meter
    return JetsonDevice(root, profile=profile or fitting(root), clocks=clocks, meter=meter, own=own)


class JetsonDevice(LinuxDevice):
    """A Jetson by its own files. Arguments and errors as in `LinuxDevice`; unless given, the meter is its INA3221.

    Without control over its clocks, its one point is that of its present mode, if the profile has it: it cannot
    choose others.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        profile: profiles.Board | None = None,
        clocks: ClockHelper | None = None,
        meter: Meter | None = None,
        own: Meter | None = None,
    ) -> None:
        super().__init__(root, profile=profile, clocks=clocks, meter=meter or Ina3221(root), own=own)

    def _offered(self) -> tuple[OperatingPoint, ...]:
        found = super()._offered()
        held = () if self.adjustable else tuple(point for point in found if modes.same(point.name, self.mode))
        return held or found


def fitting(root: Path) -> profiles.Board | None:
    """Profile of the module that the device tree names, the most specific name first."""
    for board in sysfs.lines(sysfs.device_tree(root) / "compatible"):
        for part in board.removeprefix("nvidia,").split("+"):
            name = FITS.get(part)
            if name == NONE:
                return None
            if name in profiles.names():
                return profiles.load(str(name))
    return None
