"""Linux hosts and boards: sensors, memory, and operating points at this very board's frequencies."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from fedquilt import profiles
from fedquilt.core import ClockError, Cost, JobError, Meter, OperatingPoint, Reading, WorkEstimate
from fedquilt.edge_agent.clocks import controls, owner_limits
from fedquilt.edge_agent.clocks.client import ClockClient, ClockState, HelperStatus
from fedquilt.edge_agent.devices import jetson_meters, meters
from fedquilt.edge_agent.devices.jetson_meters import Ina3221
from fedquilt.edge_agent.devices.meters import Batteries, Hwmon, Rapl, WidestRangeMeter
from fedquilt.host import sysfs
from fedquilt.profiles.clock_model import AXES, format_point_name

log = logging.getLogger("fedquilt.devices")

PROCESSOR_CHIPS: Final = frozenset({"coretemp", "k10temp", "k8temp", "zenpower", "cpu_thermal"})
STATUS_INTERVAL_S: Final = 5.0  # interval of requests for the mode to the clock helper, if its status is hidden
ROOT: Final = Path("/")
NO_PROFILE: Final = ""  # for a board that differs from every profile
PROFILES: Final = {  # name of module or board in its device tree, without "nvidia," -> profile
    "p3541-0000": NO_PROFILE,  # Nano 2 GB, whose device tree also names the 4 GB model
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
    "raspberrypi,5-model-b": "raspberry-pi-5",
}


def detect(
    root: Path,
    *,
    profile: profiles.BoardProfile | None = None,
    clocks: ClockClient | None = None,
    custom_meter: Meter | None = None,
) -> LinuxDevice:
    detected_profile = find_profile(root)
    meter = _detect_rail_meter(root, detected_profile)
    return LinuxDevice(root, profile=profile or detected_profile, clocks=clocks, meter=meter, custom_meter=custom_meter)


def _detect_rail_meter(root: Path, profile: profiles.BoardProfile | None) -> Meter | None:
    compatible = sysfs.read_strings(sysfs.device_tree_folder(root) / "compatible")
    is_tegra = any(board.startswith("nvidia,tegra") for board in compatible)
    if not is_tegra and not sysfs.is_visible(root / "etc/nv_tegra_release"):
        return None if profile is None else meters.detect_pmic(root)
    rails = Ina3221(root)
    if root != ROOT or rails.read(0.0).rails_w:
        return rails
    return jetson_meters.connect_jtop() or rails  # no readable rails


class LinuxDevice:
    """Linux host, described by its files in /proc and /sys. For use in one thread only.

    Args:
        root: Folder of `proc` and `sys`, "/" except for tests and containers.
        profile: Speed and power of such a board at its operating points, or None for no points.
        clocks: Client that sets the clocks, or None to only read the clocks. The client also lists frequencies that
            only root reads.
        meter: Meter of the board's rails, or None for hwmon.
        custom_meter: Meter named in agent.toml, such as a plug, preferred among meters of equal coverage.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        profile: profiles.BoardProfile | None = None,
        clocks: ClockClient | None = None,
        meter: Meter | None = None,
        custom_meter: Meter | None = None,
    ) -> None:
        self._memory = MemorySensor(root)
        self.memory_bytes = self._memory.total_bytes
        self.board = _board_name(root)
        self.adjustable, self.clocks_unchanged = clocks is not None, False
        self.mode: str | None = None  # power mode of nvpmodel
        self._all_points: tuple[OperatingPoint, ...] = ()  # points in the board's widest mode
        self._mode_checked_s = 0.0
        self._mode_fingerprint = controls.status_fingerprint(root)
        self.idle_w: float | None = None
        self.provenance = "sysfs"
        self._status = None if clocks is None else _request_status(clocks)
        if profile is not None:
            self._all_points = fit_points(profile, _listed_frequencies(root, self._status))
            self.idle_w = None if profile.idle_w is None else profile.idle_w.value
            self.provenance = profile.provenance()
        self._root, self._clocks = root, clocks
        self.points: tuple[OperatingPoint, ...] = self._read_permitted_points()
        self._batteries = Batteries(root / "sys/class/power_supply")
        meter_choices = (
            custom_meter,
            self._batteries,
            meter or Hwmon(root / "sys/class/hwmon"),
            Rapl(root / "sys/class/powercap"),
        )
        self._meter = WidestRangeMeter(candidate for candidate in meter_choices if candidate is not None)
        self._sensors = [
            *sysfs.thermal_zone_files(root / "sys/class/thermal"),
            *_processor_sensors(root / "sys/class/hwmon"),
        ]

    def read_sensors(self, now_s: float) -> Reading:
        """Read all sensors, keep pinned clocks alive and follow changes of the power mode.

        Call this every few seconds, because pinned clocks expire and RAPL's counters wrap. Energy and power come from
        the responding meter with the widest coverage: discharging batteries, a meter of the whole board, else RAPL.
        """
        self._send_keepalive(now_s)
        self._update_points_after_mode_change(now_s)
        power = self._meter.read(now_s)
        return Reading(
            energy_j=power.energy_j,
            energy_source=power.source,
            power_w=power.total_w,
            rails_w=power.rails_w,
            temperature_c=sysfs.hottest_temperature_c(self._sensors),
            available_bytes=self._memory.read_available_bytes(),
            memory_pressure=self._memory.read_pressure(),
            battery=self._batteries.charge_fraction(),
            charging=self._batteries.is_charging(),
            mode=self.mode,
        )

    def pin_clocks(self, point: OperatingPoint) -> OperatingPoint:
        if self._clocks is None:
            raise ClockError(
                f"clocks of {self.board} cannot be set without a clock helper: start `fedquilt board clocks`"
            )
        if point.name not in {operating_point.name for operating_point in self.points}:
            raise ClockError(f"{self.board} has no operating point {point.name!r}")
        self.clocks_unchanged = False
        try:
            pinned_point = self._clocks.pin(point)
        except ClockError:
            self._update_points()  # the owner may have just changed the mode
            raise
        self.clocks_unchanged = True
        return pinned_point

    def unpin_clocks(self) -> None:
        self.clocks_unchanged = False
        if self._clocks is not None:
            self._clocks.unpin()

    def task_cost(self, work: WorkEstimate, measured: Cost) -> Cost:
        return measured

    def _read_permitted_points(self) -> tuple[OperatingPoint, ...]:
        """Read the present power mode, and return the permitted points.

        Without a clock helper only the point of the present mode is returned, if the profile has that point.
        """
        clock_controls = controls.discover_controls(self._root)
        helper_status = self._status
        self.mode = (None if helper_status is None else helper_status.mode) or controls.read_mode_name(self._root)
        mode = clock_controls.find_mode(self.mode)
        high_limits = (
            {}
            if self._clocks is not None
            else {control.name: controls.read_number(control.high) for control in clock_controls.controls}
        )
        limits_hz = owner_limits.permitted_hz(
            clock_controls, owner_limits.control_limits(clock_controls, mode, high_limits)
        )
        for clock in () if helper_status is None else helper_status.clocks:
            if clock.ceiling_hz is not None:
                axis = f"{clock.kind}_hz"
                limits_hz[axis] = min(clock.ceiling_hz, limits_hz.get(axis, clock.ceiling_hz))
        points = owner_limits.permitted_points(self._all_points, clock_controls, mode, limits_hz)
        if self.adjustable:
            return points
        return tuple(point for point in points if controls.is_same_mode(point.name, self.mode)) or points

    def _update_points_after_mode_change(self, now_s: float) -> None:
        if not self._all_points:
            return
        fingerprint = controls.status_fingerprint(self._root)
        is_status_due = (
            self._clocks is not None
            and now_s >= self._mode_checked_s + STATUS_INTERVAL_S
            and sysfs.is_forbidden(self._root / controls.STATUS)
        )
        if fingerprint != self._mode_fingerprint or is_status_due:
            self._mode_checked_s, self._mode_fingerprint = now_s, fingerprint
            self._update_points()

    def _update_points(self) -> None:
        if self._clocks is not None:
            self._status = _request_status(self._clocks)
        previous, self.points = self.points, self._read_permitted_points()
        if len(previous) != len(self.points):
            log.info("mode %s permits %d of %d operating points", self.mode, len(self.points), len(self._all_points))

    def _send_keepalive(self, now_s: float) -> None:
        if self._clocks is not None:
            try:
                self._clocks.send_keepalive(now_s)
            except ClockError as error:
                self.clocks_unchanged = False
                log.warning("clocks of this board are no longer pinned: %s", error)


def _request_status(clocks: ClockClient) -> HelperStatus | None:
    try:
        return clocks.request_status()
    except ClockError as error:
        log.warning("clock helper's status is unknown, some clocks are readable by root only: %s", error)
        return None


def _listed_frequencies(root: Path, helper_status: HelperStatus | None) -> Lists:
    clock_controls = controls.discover_controls(root)
    frequencies = {
        **common_frequencies(clock_controls.controls),
        **({} if helper_status is None else common_frequencies(helper_status.clocks)),
    }
    unknown = [control.name for control in clock_controls.hidden_controls if f"{control.kind}_hz" not in frequencies]
    if unknown:
        log.info(
            "frequencies of %s are unknown (only root can read them, and no clock helper runs): the board sets these",
            ", ".join(unknown),
        )
    return frequencies


def find_profile(root: Path) -> profiles.BoardProfile | None:
    """Return the shipped profile of the board named in the device tree, or None if there is none."""
    for board in sysfs.read_strings(sysfs.device_tree_folder(root) / "compatible"):
        for part in board.removeprefix("nvidia,").split("+"):
            profile_name = PROFILES.get(part)
            if profile_name == NO_PROFILE:
                return None
            if profile_name in profiles.board_names():
                return profiles.load_board_profile(str(profile_name))
    return None


def _board_name(root: Path) -> str:
    for path in (sysfs.device_tree_folder(root) / "model", root / "sys/class/dmi/id/product_name"):
        if name := sysfs.read_line(path):
            return name[:200]
    return f"linux-{platform.machine()}"


def _processor_sensors(hwmon: Path) -> list[Path]:
    # Most PCs have no thermal zone for the processor. Sensors of disks and radios are left out.
    chips = [chip for chip in sysfs.list_matches(hwmon, "hwmon*") if sysfs.read_line(chip / "name") in PROCESSOR_CHIPS]
    return [file for chip in chips for file in sysfs.list_matches(chip, "temp*_input")]


SLACK: Final = 0.01  # 1421 is accepted for 1420.8 MHz
CAP_TOLERANCE: Final = 0.1  # a cap of 1200 MHz is 1113.6 on a board that lists 1113.6 and 1267.2
HIGHEST_CLOCK_TOLERANCE: Final = 0.02

Lists = Mapping[str, tuple[float, ...]]  # axis -> hertz, rising; axes without listed frequencies are left out


def common_frequencies(clocks: Iterable[controls.ClockControl | ClockState]) -> Lists:
    """Return the frequencies that all clocks of a kind have in common, by axis such as "cpu_hz"."""
    shared_frequencies, clocks = {}, tuple(clocks)
    for axis in AXES:
        frequency_sets = [set(clock.listed_hz) for clock in clocks if f"{clock.kind}_hz" == axis]
        if shared := set[float].intersection(*frequency_sets) if frequency_sets else set():
            shared_frequencies[axis] = tuple(sorted(shared))
    return shared_frequencies


def fit_points(profile: profiles.BoardProfile, frequencies: Lists) -> tuple[OperatingPoint, ...]:
    """Return the profile's operating points that this board supports: modes first, then the grid.

    Clocks are set to this board's listed frequencies. Clocks without a list stay as the board sets them. The grid is
    left out if the board's highest clocks differ from the profile's.
    """
    modes = {mode.name for mode in profile.points}
    modes_at_caps = [_point_at_caps(point, frequencies) for point in profile.operating_points() if point.name in modes]
    points = [point for point in modes_at_caps if point is not None]
    used_clocks = {_clock_values(point) for point in points}
    for point in _grid_points(profile, frequencies):
        if point.name not in modes and _clock_values(point) not in used_clocks:
            used_clocks.add(_clock_values(point))
            points.append(point)
    return tuple(points[: profiles.MAX_POINTS])


def create_power_lookup(profile: profiles.BoardProfile, root: Path) -> Callable[[OperatingPoint], float | None]:
    """Return a function from an operating point to its watts in a profile, or None for unknown points."""

    def find_power_w(point: OperatingPoint) -> float | None:
        points = fit_points(profile, common_frequencies(controls.discover_controls(root).controls))
        return next(
            (
                candidate.busy_w
                for candidate in points
                if (candidate.name, _clock_values(candidate)) == (point.name, _clock_values(point))
            ),
            None,
        )

    return find_power_w


def _point_at_caps(point: OperatingPoint, frequencies: Lists) -> OperatingPoint | None:
    """Return the point with each clock at its highest listed frequency up to the cap of the point.

    The result is None if a clock lists no frequency near its cap. Clocks without a list are left out.
    """
    clocks: dict[str, float | None] = dict.fromkeys(AXES)
    for axis in AXES:
        cap = getattr(point, axis)
        if cap is None or axis not in frequencies:
            continue
        permitted = [hz for hz in frequencies[axis] if hz <= cap * (1 + SLACK)]
        if not permitted or permitted[-1] < cap * (1 - CAP_TOLERANCE):
            return None
        clocks[axis] = permitted[-1]
    return msgspec.structs.replace(point, **clocks)


def _grid_points(profile: profiles.BoardProfile, frequencies: Lists) -> tuple[OperatingPoint, ...]:
    """Return the profile's grid at this board's frequencies, or () if the highest frequencies differ."""
    # Without equal highest clocks the model of the profile is not valid for the board, which then has no grid.
    highest_clocks = profile.highest_clocks()
    for axis, hz in highest_clocks.items():
        if axis in frequencies and abs(frequencies[axis][-1] - hz) > HIGHEST_CLOCK_TOLERANCE * hz:
            return ()
    if not any(axis in frequencies for axis in highest_clocks) or profile.clocks is None:
        return ()
    steps = {
        axis: profiles.ClockSteps(frequencies.get(axis, (hz,)), getattr(profile.clocks, axis).source)
        for axis, hz in highest_clocks.items()
    }
    board = msgspec.structs.replace(profile, clocks=profiles.BoardClocks(**steps))
    modes = {mode.name for mode in profile.points}
    unlisted = {axis: None for axis in AXES if axis not in frequencies}
    grid = [point for point in board.operating_points() if point.name not in modes]
    return tuple(msgspec.structs.replace(point, name=_point_name(point, frequencies), **unlisted) for point in grid)


def _point_name(point: OperatingPoint, frequencies: Lists) -> str:
    return format_point_name({axis: getattr(point, axis) for axis in frequencies if getattr(point, axis) is not None})


def _clock_values(point: OperatingPoint) -> tuple[float | None, ...]:
    return tuple(getattr(point, axis) for axis in AXES)


class MemorySensor:
    """Memory from /proc/meminfo, within the limits of the process's control groups (cgroup v2).

    Limits are read once, at the start.
    """

    def __init__(self, root: Path) -> None:
        self._meminfo, self._pressure = root / "proc/meminfo", root / "proc/pressure/memory"
        total = _meminfo_bytes(self._meminfo, "MemTotal")
        if total is None:
            raise JobError(f"{self._meminfo} has no memory size: run on Linux, or set `board` to a profile to simulate")
        groups = {group: sysfs.read_int(group / "memory.max") for group in _memory_limited_groups(root)}
        self._limits = {group: limit for group, limit in groups.items() if limit is not None}
        self.total_bytes = min([total, *self._limits.values()])

    def read_available_bytes(self) -> int | None:
        group_bytes = [_group_available_bytes(group, limit) for group, limit in self._limits.items()]
        known_bytes = [
            size for size in (_meminfo_bytes(self._meminfo, "MemAvailable"), *group_bytes) if size is not None
        ]
        return min(known_bytes, default=None)

    def read_pressure(self) -> float | None:
        """Return the share of the last 10 s in which tasks waited for memory, or None before Linux 4.20."""
        for line in (sysfs.read_text(self._pressure) or "").splitlines():
            if line.startswith("some avg10="):
                try:
                    return float(line.split()[1].removeprefix("avg10=")) / 100
                except ValueError:
                    return None
        return None


def _meminfo_bytes(meminfo: Path, name: str) -> int | None:
    for line in (sysfs.read_text(meminfo) or "").splitlines():
        if line.startswith(f"{name}:"):
            fields = line.split()
            return int(fields[1]) * 1024 if len(fields) == 3 and fields[1].isdigit() and fields[2] == "kB" else None
    return None


def _memory_limited_groups(root: Path) -> list[Path]:
    for line in (sysfs.read_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, path = line.partition("::")
        own_group = PurePosixPath(path)
        if number == "0" and own_group.is_absolute() and ".." not in own_group.parts:
            folders = [root / "sys/fs/cgroup" / group.relative_to("/") for group in (own_group, *own_group.parents)]
            return [folder for folder in folders if sysfs.is_visible(folder / "memory.max")]
    return []


def _group_available_bytes(group: Path, limit_bytes: int) -> int | None:
    # The kernel evicts unused file pages first, so they count as available.
    used_bytes = sysfs.read_int(group / "memory.current")
    if used_bytes is None:
        return None
    stat = (sysfs.read_text(group / "memory.stat") or "").splitlines()
    cache_bytes = next(
        (fields[1] for fields in map(str.split, stat) if fields[0] == "inactive_file" and len(fields) == 2), ""
    )
    return max(0, limit_bytes - used_bytes + (min(int(cache_bytes), used_bytes) if cache_bytes.isdigit() else 0))
