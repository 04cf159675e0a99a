"""Power and energy sensors in hwmon, in microwatts and microjoules."""

from __future__ import annotations

from pathlib import Path

from fedquilt.core import Covers, Power
from fedquilt.edge_agent.devices.sensors.meters import PowerFromEnergy
from fedquilt.host import sysfs

WHOLE_METERS = ("power_meter", "macsmc_hwmon Total System Power")  # ACPI's meter, and Apple's: of the whole machine
SENSORS = ("power*_average", "power*_input", "energy*_input")


class Hwmon:
    """All power and energy sensors in hwmon, by chip name and label, as one `fedquilt.core.Meter`.

    The meter covers the board if a sensor measures the whole machine, otherwise only rails.
    """

    def __init__(self, hwmon: Path) -> None:
        self._powers: dict[str, Path] = {}
        self._energies: dict[str, tuple[Path, PowerFromEnergy]] = {}
        for chip in sysfs.list_matches(hwmon, "hwmon*"):
            name = sysfs.read_line(chip / "name") or chip.name
            for file in sorted(each for kind in SENSORS for each in sysfs.list_matches(chip, kind)):
                channel, _, kind = file.name.partition("_")
                label = sysfs.read_line(chip / f"{channel}_label") or channel
                rail = f"{name} {label}"
                if rail in self._powers and kind == "input" and sysfs.is_visible(chip / f"{channel}_average"):
                    continue  # the same channel, averaged
                if rail in self._powers or rail in self._energies:
                    rail = f"{name} {label} ({chip.name})"  # a second chip of this name
                if channel.startswith("energy"):
                    self._energies[rail] = (file, PowerFromEnergy())
                else:
                    self._powers[rail] = file
        whole = any(rail.startswith(WHOLE_METERS) for rail in (*self._powers, *self._energies))
        self.covers: Covers = "board" if whole else "rail"

    def read(self, now_s: float) -> Power:
        """Return the power of each readable rail, and the total if a sensor measures the whole machine."""
        micro = {rail: sysfs.read_int(file) for rail, file in self._powers.items()}
        rails = {rail: value / 1e6 for rail, value in micro.items() if value is not None}
        for rail, (file, rate) in self._energies.items():
            count_uj = sysfs.read_int(file)
            watts = None if count_uj is None else rate.mean_power_w(now_s, count_uj / 1e6)
            if watts is not None:
                rails[rail] = watts
        whole = next((rail for rail in rails if rail.startswith(WHOLE_METERS)), None)
        return Power(None if whole is None else rails[whole], None if whole is None else f"hwmon {whole}", rails)
