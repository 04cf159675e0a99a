"""NVIDIA's Jetson boards: rails by label, the profile by the module's part number, the mode by its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fedquilt import profiles
from fedquilt.core import Meter
from fedquilt.edge_agent import sysfs
from fedquilt.edge_agent.clocks import controls
from fedquilt.edge_agent.devices.linux import ClockHelper, LinuxDevice
from fedquilt.edge_agent.devices.sensors import jtop
from fedquilt.edge_agent.devices.sensors.ina3221 import Ina3221

STATUS: Final = "var/lib/nvpmodel/status"  # the mode set last by nvpmodel
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
    "p3767-0000": "jetson-orin-nx",
    "p3701-0000": "jetson-agx-orin",
    "p3701-0005": "jetson-agx-orin",
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
        self.mode = (None if self._status is None else self._status.mode) or mode(root)
        if clocks is None and self.mode is not None:
            held = [point for point in self.points if controls.plain(point.name) == controls.plain(self.mode)]
            self.points = tuple(held) or self.points


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


def mode(root: Path) -> str | None:
    """Name of the board's present nvpmodel mode; None: unknown. Ids differ between releases.

    nvpmodel keeps the id in /var/lib/nvpmodel/status ("pmode:0002"); before it was ever set, the catalogue's
    default holds. Where this user may not read that file, the mode is not known.
    """
    if sysfs.hidden(root / STATUS):
        return None
    status = re.search(r"pmode:(\d+)", sysfs.text(root / STATUS) or "")
    default = re.search(r"<\s*PM_CONFIG\s+DEFAULT=(\d+)", sysfs.text(root / "etc/nvpmodel.conf") or "")
    found = status or default
    known = {mode.id: mode.name for mode in controls.discover(root).modes}
    return known.get(int(found[1])) if found is not None else None
