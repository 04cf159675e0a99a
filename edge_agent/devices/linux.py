"""Linux hosts: memory, pressure, RAPL, hwmon, batteries, temperatures; clocks if a helper sets them."""

from __future__ import annotations

import logging
import platform
from pathlib import Path
from typing import Final, Protocol

from fedquilt import profiles
from fedquilt.core import ClockError, Cost, Meter, OperatingPoint, Reading, Work
from fedquilt.edge_agent import sysfs
from fedquilt.edge_agent.clocks import controls, envelope, modes
from fedquilt.edge_agent.clocks.client import Status
from fedquilt.edge_agent.devices import points
from fedquilt.edge_agent.devices.sensors.battery import Batteries
from fedquilt.edge_agent.devices.sensors.hwmon import Hwmon
from fedquilt.edge_agent.devices.sensors.memory import Memory
from fedquilt.edge_agent.devices.sensors.meters import Widest
from fedquilt.edge_agent.devices.sensors.rapl import Rapl

log = logging.getLogger("fedquilt.devices")

PROCESSOR_CHIPS: Final = frozenset({"coretemp", "k10temp", "k8temp", "zenpower", "cpu_thermal"})
ASK_S: Final = 5.0  # interval between questions to the clock helper about the mode, where its status is hidden
FITS: Final = {"raspberrypi,5-model-b": "raspberry-pi-5"}  # device tree -> profile


class ClockHelper(Protocol):
    """Client that sets clocks for a device: `fedquilt.edge_agent.clocks.client.Clocks`, or a fake."""

    def hold(self, point: OperatingPoint) -> OperatingPoint:
        """Hold the clocks at a point; returns the point the board reports."""
        ...

    def release(self) -> None:
        """Return the clocks to the board."""
        ...

    def keepalive(self, now_s: float) -> None:
        """Signal that the holder is alive; raises ClockError once the clocks were released."""
        ...

    def status(self) -> Status:
        """Status of the board's clocks."""
        ...


def detect(
    root: Path,
    *,
    profile: profiles.Board | None = None,
    clocks: ClockHelper | None = None,
    own: Meter | None = None,
) -> LinuxDevice | None:
    """Detect a Linux host; None: `proc/meminfo` does not exist. Arguments as of `LinuxDevice`."""
    if not sysfs.there(root / "proc/meminfo"):
        return None
    return LinuxDevice(root, profile=profile or fitting(root, FITS), clocks=clocks, own=own)


class LinuxDevice:
    """Host described by its own files. Read, hold and release it in one thread only.

    Args:
        root: where `proc` and `sys` are; "/" except for tests and containers.
        profile: speed and power of such a board at its points. None: it has no points.
        clocks: sets the clocks; None: they are only read. Run by root, it also lists the frequencies that this
            process may not read.
        meter: power of the board's rails; None: hwmon.
        own: meter that agent.toml names, such as a plug: preferred among those of equal coverage.

    Raises:
        JobError: `proc/meminfo` cannot be read.
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
        self._memory = Memory(root)
        self.memory_bytes = self._memory.total_bytes
        self.board = _board(root)
        self.adjustable, self.holds = clocks is not None, False
        self.mode: str | None = None  # nvpmodel's
        self._all: tuple[OperatingPoint, ...] = ()  # in the board's widest mode
        self._looked_s, self._mark = 0.0, modes.mark(root)  # of the latest look at the mode
        self.idle_w: float | None = None
        self.provenance = "sysfs"
        self._status = None if clocks is None else _asked(clocks)
        if profile is not None:
            self._all = points.fit(profile, _lists(root, self._status))
            self.idle_w = None if profile.idle_w is None else profile.idle_w.value
            self.provenance = profile.provenance()
        self._root, self._clocks = root, clocks
        self.points: tuple[OperatingPoint, ...] = self._offered()
        self._batteries = Batteries(root / "sys/class/power_supply")
        meters = (own, self._batteries, meter or Hwmon(root / "sys/class/hwmon"), Rapl(root / "sys/class/powercap"))
        self._meter = Widest(each for each in meters if each is not None)
        self._sensors = [*sysfs.zones(root / "sys/class/thermal"), *_processors(root / "sys/class/hwmon")]

    def read(self, now_s: float) -> Reading:
        """Read all sensors. RAPL's counters wrap after some minutes under full load: read more often than that.

        Energy and power come from one meter, the widest that answers: the meter that agent.toml names,
        batteries if they alone feed the board, a meter of the whole board, and only then RAPL's processor and memory.
        """
        self._keep(now_s)
        self._follow(now_s)
        power = self._meter.read(now_s)
        return Reading(
            energy_j=power.energy_j,
            energy_source=power.source,
            power_w=power.total_w,
            rails_w=power.rails_w,
            temperature_c=sysfs.hottest_c(self._sensors),
            available_bytes=self._memory.available_bytes(),
            memory_pressure=self._memory.pressure(),
            battery=self._batteries.charge(),
            charging=self._batteries.charging(),
            mode=self.mode,
        )

    def hold(self, point: OperatingPoint) -> OperatingPoint:
        """See `fedquilt.core.Device`."""
        if self._clocks is None:
            raise ClockError(
                f"the clocks of {self.board} are only read: no clock helper runs here; start `fedquilt clocks`"
            )
        if point.name not in {known.name for known in self.points}:
            raise ClockError(f"{self.board} has no operating point {point.name!r}")
        self.holds = False
        try:
            taken = self._clocks.hold(point)
        except ClockError:
            self._look()  # the owner may have changed the mode a moment ago
            raise
        self.holds = True
        return taken

    def release(self) -> None:
        """Release the clocks to the board's own governor."""
        self.holds = False
        if self._clocks is not None:
            self._clocks.release()

    def cost(self, work: Work, measured: Cost) -> Cost:
        """The measured cost."""
        return measured

    def _offered(self) -> tuple[OperatingPoint, ...]:
        """Points within the owner's present mode: by its catalogue, and by what the clock helper permits."""
        found = controls.discover(self._root)
        told = self._status
        self.mode = (None if told is None else told.mode) or modes.present(self._root)
        mode = found.mode(self.mode)
        before = {} if self._clocks is not None else {lever.name: controls.number(lever.high) for lever in found.found}
        most = envelope.most_hz(found, envelope.bounds(found, mode, before))
        for clock in () if told is None else told.clocks:
            if clock.ceiling_hz is not None:
                axis = f"{clock.kind}_hz"
                most[axis] = min(clock.ceiling_hz, most.get(axis, clock.ceiling_hz))
        return envelope.offered(self._all, found, mode, most)

    def _follow(self, now_s: float) -> None:
        """Look whether the owner has changed the mode: at nvpmodel's status, or else by asking the clock helper."""
        if not self._all:
            return
        mark = modes.mark(self._root)
        asked = self._clocks is not None and now_s >= self._looked_s + ASK_S and sysfs.hidden(self._root / modes.STATUS)
        if mark != self._mark or asked:
            self._looked_s, self._mark = now_s, mark
            self._look()

    def _look(self) -> None:
        if self._clocks is not None:
            self._status = _asked(self._clocks)
        before, self.points = self.points, self._offered()
        if len(before) != len(self.points):
            log.info("%d of %d operating points are within mode %s", len(self.points), len(self._all), self.mode)

    def _keep(self, now_s: float) -> None:
        """Signal the clock helper, which releases the clocks after some seconds of silence."""
        if self._clocks is not None:
            try:
                self._clocks.keepalive(now_s)
            except ClockError as error:
                self.holds = False
                log.warning("the clocks of this board are its own again: %s", error)


def _asked(clocks: ClockHelper) -> Status | None:
    """Status of the board from the clock helper; None if it does not answer."""
    try:
        return clocks.status()
    except ClockError as error:
        log.warning("this board's clocks are known only as far as this user can read them: %s", error)
        return None


def _lists(root: Path, told: Status | None) -> points.Lists:
    """Frequencies of each clock from the clock helper, else from the files that this process may read."""
    found = controls.discover(root)
    lists = {**points.lists(found.found), **({} if told is None else points.lists(told.clocks))}
    unknown = [lever.name for lever in found.hidden if f"{lever.kind}_hz" not in lists]
    if unknown:
        log.info(
            "the frequencies of %s are not known here: root alone may read them, and no clock helper tells them; "
            "the board sets them itself",
            ", ".join(unknown),
        )
    return lists


def fitting(root: Path, fits: dict[str, str]) -> profiles.Board | None:
    """Profile of the first of the device tree's compatible boards that has one."""
    for board in sysfs.lines(sysfs.device_tree(root) / "compatible"):
        if fits.get(board) in profiles.names():
            return profiles.load(fits[board])
    return None


def _board(root: Path) -> str:
    """Name of this machine in its firmware."""
    for place in (sysfs.device_tree(root) / "model", root / "sys/class/dmi/id/product_name"):
        if name := sysfs.line(place):
            return name[:200]
    return f"linux-{platform.machine()}"


def _processors(hwmon: Path) -> list[Path]:
    """Temperature files of the processor, which most PCs have no thermal zone for; not of disks or radios."""
    chips = [chip for chip in sysfs.glob(hwmon, "hwmon*") if sysfs.line(chip / "name") in PROCESSOR_CHIPS]
    return [file for chip in chips for file in sysfs.glob(chip, "temp*_input")]
