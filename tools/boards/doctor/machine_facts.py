"""Facts of a machine, read once for all checks, without root rights."""

from __future__ import annotations

import os
import re
import shutil
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple

from fedquilt.core import ClockError, Device, JobError, Reading
from fedquilt.edge_agent import devices
from fedquilt.edge_agent.clocks import controls
from fedquilt.edge_agent.clocks.client import SOCKET, ClockClient, HelperStatus
from fedquilt.edge_agent.devices.jetson_meters import Ina3221
from fedquilt.host import sysfs
from fedquilt.host.disk import REAL

ROOT: Final = Path("/")
FLASHED_ENVIRONMENT: Final = "opt/fedquilt/current"  # packages of the agent, installed by `fedquilt board flash`
UNIT: Final = "etc/systemd/system/fedquilt-agent.service"
JETPACK: Final = {32: 4, 35: 5, 36: 6, 38: 7, 39: 7}  # major version of Linux for Tegra -> JetPack
# types of cooling devices that slow a clock; fans do not
THROTTLING_DEVICES: Final = re.compile(r"throttle|cpufreq|devfreq")
SIZE_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}  # systemd's


FreeBytes = Callable[[Path], int]  # folder -> bytes free on its disk


class HelperFault(NamedTuple):
    kind: Literal["not permitted", "no answer"]
    sentence: str


@dataclass(frozen=True)
class MachineFacts:
    """Facts of a machine. None if a fact is unknown or the part is missing."""

    clock_s: float  # since 1970
    root: Path = ROOT
    board: str = ""
    python_bits: int = 64
    python_version: tuple[int, int] | None = None
    is_tegra: bool = False
    jetpack: int | None = None
    has_gpu: bool = False  # an NVIDIA GPU with driver
    memory_bytes: int | None = None
    available_bytes: int | None = None
    swap_bytes: int | None = None
    swap_free_bytes: int | None = None
    controllers: frozenset[str] | None = None  # controllers of cgroup v2, or None without cgroup v2
    unit: Mapping[str, str] | None = None  # settings of the agent's unit, or None if not installed
    power_w: float | None = None
    rail_fault: str | None = None  # reason why the rails give no total power
    temperature_c: float | None = None
    undervoltage: bool | None = None
    power_mode: str | None = None  # name in nvpmodel
    is_mode_hidden: bool = False  # this user may not read nvpmodel's status
    power_modes: tuple[str, ...] = ()
    hidden_clocks: tuple[str, ...] = ()  # clocks whose frequencies this user may not read
    helper: HelperStatus | HelperFault | None = None  # None without a clock helper
    paths: tuple[Path, ...] = field(default=())  # folders of Python packages
    is_flashed: bool = False  # installed by `fedquilt board flash`, so without pip
    gpu_listed: bool = False  # the kernel lists the GPU under devfreq
    # clock -> lower and upper limit, equal if pinned
    clock_limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    throttling_devices: tuple[str, ...] = ()  # active cooling devices that slow clocks
    over_current: Mapping[str, int] = field(default_factory=dict)  # counter -> events since the board was started
    swap_on_card: str | None = None  # device or file of a swap that lies on an SD card


def read_machine(root: Path, clock_s: float, now_s: float) -> MachineFacts:
    """Return the facts of the machine whose root file system is at `root`. `now_s` is a monotonic time."""
    is_this_machine = root == ROOT
    release = re.search(r"# R(\d+)", sysfs.read_text(root / "etc/nv_tegra_release") or "")
    compatible = sysfs.read_strings(sysfs.device_tree_folder(root) / "compatible")
    tegra = release is not None or any(name.startswith("nvidia,tegra") for name in compatible)
    device, reading = _detect_device_and_reading(root, now_s)
    meminfo = sysfs.read_text(root / "proc/meminfo") or ""
    controllers = sysfs.read_text(root / "sys/fs/cgroup/cgroup.controllers")
    clock_controls, helper = controls.discover_controls(root), _read_helper_status(root / SOCKET)
    return MachineFacts(
        clock_s=clock_s,
        root=root,
        board=device.board if device is not None else "",
        python_bits=8 * struct.calcsize("P") if is_this_machine else 64,
        python_version=sys.version_info[:2] if is_this_machine else _find_python_version(root),
        is_tegra=tegra,
        jetpack=JETPACK.get(int(release[1])) if release else None,
        has_gpu=tegra or sysfs.is_visible(root / "proc/driver/nvidia/version"),
        memory_bytes=device.memory_bytes if device is not None else None,
        available_bytes=reading.available_bytes if reading is not None else None,
        swap_bytes=_meminfo_bytes(meminfo, "SwapTotal"),
        swap_free_bytes=_meminfo_bytes(meminfo, "SwapFree"),
        controllers=None if controllers is None else frozenset(controllers.split()),
        unit=_read_agent_unit(root / UNIT),
        power_w=reading.power_w if reading is not None else None,
        rail_fault=_read_rail_fault(root, now_s) if tegra else None,
        temperature_c=reading.temperature_c if reading is not None else None,
        undervoltage=_read_undervoltage_alarm(root / "sys/class/hwmon"),
        power_mode=(controls.read_mode_name(root) or (helper.mode if isinstance(helper, HelperStatus) else None))
        if tegra
        else None,
        is_mode_hidden=sysfs.is_forbidden(root / controls.STATUS),
        power_modes=tuple(mode.name for mode in clock_controls.modes) if tegra else (),
        hidden_clocks=tuple(control.name for control in clock_controls.hidden_controls),
        helper=helper,
        paths=tuple(Path(path) for path in sys.path if path) if is_this_machine else _find_package_folders(root),
        is_flashed=sys.prefix.startswith("/opt/fedquilt/")
        if is_this_machine
        else sysfs.is_visible(root / FLASHED_ENVIRONMENT),
        gpu_listed=bool(clock_controls.controls_of_kind("gpu")),
        clock_limits=_read_clock_limits(clock_controls),
        throttling_devices=_find_throttling_devices(root / "sys/class/thermal"),
        over_current=_read_over_current_counts(root / "sys/class/hwmon"),
        swap_on_card=_find_swap_on_card(root),
    )


def parse_systemd_size(text: str) -> int | None:
    """Return the bytes of a systemd size such as "1536M", or None for "infinity" and invalid sizes."""
    match = re.fullmatch(r"(\d+)([KMGT]?)", text.strip())
    return int(match[1]) * SIZE_UNITS[match[2]] if match else None


def _detect_device_and_reading(root: Path, now_s: float) -> tuple[Device | None, Reading | None]:
    try:
        device = devices.create_device("auto", root, connect=lambda: None)
    except JobError:
        return None, None
    return device, device.read_sensors(now_s)


def _read_rail_fault(root: Path, now_s: float) -> str | None:
    meter = Ina3221(root)
    return meter.fault if meter.read(now_s).rails_w else None


def _meminfo_bytes(meminfo: str, name: str) -> int | None:
    match = re.search(rf"^{name}:\s+(\d+) kB$", meminfo, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _find_python_version(root: Path) -> tuple[int, int] | None:
    for pattern in ("opt/fedquilt/current/lib/python3.*", "usr/bin/python3.*"):
        matches = [re.fullmatch(r"python3\.(\d+)", path.name) for path in sysfs.list_matches(root, pattern)]
        minors = [int(match[1]) for match in matches if match is not None]
        if minors:
            return 3, max(minors)
    return None


def _find_package_folders(root: Path) -> tuple[Path, ...]:
    patterns = (
        "opt/fedquilt/current/lib/python3*/site-packages",
        "usr/local/lib/python3*/dist-packages",
        "usr/lib/python3/dist-packages",
    )
    return tuple(path for pattern in patterns for path in sysfs.list_matches(root, pattern))


def _read_agent_unit(path: Path) -> dict[str, str] | None:
    # settings of drop-ins override those of the unit (systemd.unit(5))
    texts = [sysfs.read_text(file) for file in (path, *sysfs.list_matches(path.with_name(f"{path.name}.d"), "*.conf"))]
    if texts[0] is None:
        return None
    assignments = [line.partition("=") for text in texts for line in (text or "").splitlines()]
    return {key.strip(): value.strip() for key, sign, value in assignments if sign and not key.startswith(("#", ";"))}


def _read_undervoltage_alarm(hwmon: Path) -> bool | None:
    # alarm since the start, from the Raspberry Pi's firmware (kernel driver raspberrypi-hwmon)
    for chip in sysfs.list_matches(hwmon, "hwmon*"):
        if sysfs.read_line(chip / "name") == "rpi_volt":
            alarm = sysfs.read_int(chip / "in0_lcrit_alarm")
            return None if alarm is None else bool(alarm)
    return None


def _read_helper_status(path: Path) -> HelperStatus | HelperFault | None:
    try:
        path.stat()
    except PermissionError:
        pass  # the socket may exist in a folder that this user cannot read
    except OSError:
        return None
    if not os.access(path, os.W_OK):
        return HelperFault("not permitted", f"this user may not connect to the clock helper at {path}")
    clocks = ClockClient.connect(path)
    if clocks is None:
        return HelperFault("no answer", f"no clock helper responds at {path}")
    try:
        return clocks.request_status()
    except ClockError as problem:
        return HelperFault("no answer", str(problem))
    finally:
        clocks.close()


def _read_clock_limits(clock_controls: controls.ClockControls) -> dict[str, tuple[int, int]]:
    limits = {}
    for control in (*clock_controls.controls_of_kind("cpu"), *clock_controls.controls_of_kind("gpu")):
        setting = control.read_state()
        if len(control.listed_values) > 1 and setting.low is not None and setting.high is not None:
            limits[control.name] = (setting.low * control.unit_hz, setting.high * control.unit_hz)
    return limits


def _find_throttling_devices(thermal: Path) -> tuple[str, ...]:
    throttling = []
    for device in sysfs.list_matches(thermal, "cooling_device*"):
        kind = sysfs.read_line(device / "type") or ""
        if THROTTLING_DEVICES.search(kind) and (sysfs.read_int(device / "cur_state") or 0) > 0:
            throttling.append(kind)
    return tuple(throttling)


def _read_over_current_counts(hwmon: Path) -> dict[str, int]:
    # JetPack 5 and newer have `oc1_event_cnt` to `oc3_event_cnt` (Jetson Linux Developer Guide)
    counts = {}
    for file in sysfs.list_matches(hwmon, "hwmon*/oc*_event_cnt"):
        events = sysfs.read_int(file)
        if events is not None:
            counts[file.name.removesuffix("_event_cnt")] = events
    return counts


def _find_swap_on_card(root: Path) -> str | None:
    # an eMMC has the same device names as an SD card, but its type is MMC
    for name, kind in _first_columns(root / "proc/swaps")[1:]:
        device = name if kind == "partition" else _find_mounted_device(root, name)
        disk = re.match(r"/dev/(mmcblk\d+)", device or "")
        if disk is not None and sysfs.read_line(root / f"sys/block/{disk[1]}/device/type") == "SD":
            return name
    return None


def _find_mounted_device(root: Path, file: str) -> str | None:
    best, device = "", None
    for source, mount_point in _first_columns(root / "proc/mounts"):
        if (file == mount_point or file.startswith(mount_point.rstrip("/") + "/")) and len(mount_point) >= len(best):
            best, device = mount_point, source
    return device


def _first_columns(table: Path) -> list[tuple[str, str]]:
    rows = (line.split(None, 2) for line in (sysfs.read_text(table) or "").splitlines())
    return [(row[0], row[1]) for row in rows if len(row) > 1]


# -- folders --------------------------------------------------------------------------------------


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def nearest_existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))


def is_locked(home: Path) -> bool:
    """Return whether a running process holds the folder's lock. An unreadable lock counts as free."""
    try:
        return REAL.is_locked(home / "lock")
    except OSError:
        return False
