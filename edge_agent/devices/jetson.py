"""NVIDIA's Jetson boards: rails by label, profiles by part number of the module, and power modes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from fedquilt import profiles
from fedquilt.core import Meter, OperatingPoint
from fedquilt.edge_agent.clocks import power_modes
from fedquilt.edge_agent.devices.linux import ClockClientProtocol, LinuxDevice
from fedquilt.edge_agent.devices.sensors import jtop
from fedquilt.edge_agent.devices.sensors.ina3221 import Ina3221
from fedquilt.host import sysfs

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
    profile: profiles.BoardProfile | None = None,
    clocks: ClockClientProtocol | None = None,
    own: Meter | None = None,
    other: Callable[[], Meter | None] | None = None,
) -> JetsonDevice | None:
    """Return a Jetson device, or None if this host is another board.

    Args:
        root: Folder of `proc` and `sys`.
        profile: Profile of this very board, or None for the shipped profile of its module.
        clocks: Client that sets the clocks, or None to only read the clocks.
        own: Meter named in agent.toml.
        other: Function that creates another meter of the rails, used only if the board's files show none. By default,
            jtop if `root` is "/".
    """
    compatible = sysfs.read_strings(sysfs.device_tree_folder(root) / "compatible")
    tegra = any(board.startswith("nvidia,tegra") for board in compatible)
    if not tegra and not sysfs.is_visible(root / "etc/nv_tegra_release"):
        return None
    meter: Meter = Ina3221(root)
    if not meter.read(0.0).rails_w:  # no rails, or none that this user may read
        other = other or (jtop.connect_jtop if root == Path("/") else None)
        meter = (other() if other is not None else None) or meter
    return JetsonDevice(root, profile=profile or find_profile(root), clocks=clocks, meter=meter, own=own)


class JetsonDevice(LinuxDevice):
    """Jetson described by its own files, with arguments and errors of `LinuxDevice`.

    The default meter is the board's INA3221. Without control of the clocks, the only operating point is the point of
    the present power mode, if the profile has it.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        profile: profiles.BoardProfile | None = None,
        clocks: ClockClientProtocol | None = None,
        meter: Meter | None = None,
        own: Meter | None = None,
    ) -> None:
        super().__init__(root, profile=profile, clocks=clocks, meter=meter or Ina3221(root), own=own)

    def _read_permitted_points(self) -> tuple[OperatingPoint, ...]:
        """Return the permitted points or, without control of the clocks, that of the present mode if known."""
        found = super()._read_permitted_points()
        held = (
            ()
            if self.adjustable
            else tuple(point for point in found if power_modes.is_same_mode(point.name, self.mode))
        )
        return held or found


def find_profile(root: Path) -> profiles.BoardProfile | None:
    for board in sysfs.read_strings(sysfs.device_tree_folder(root) / "compatible"):
        for part in board.removeprefix("nvidia,").split("+"):
            name = FITS.get(part)
            if name == NONE:
                return None
            if name in profiles.board_names():
                return profiles.load_board_profile(str(name))
    return None
