"""Conditions that slow a board or falsify its measurements, such as pinned clocks.

`read_conditions` reads the kernel's files without root rights. `check_conditions` returns the findings. A check returns
None if no problem exists or the board does not have the part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fedquilt.edge_agent.clocks import controls
from fedquilt.host import sysfs
from fedquilt.tools.boards.doctor.findings import Finding, drop_missing, ok, warning

THROTTLES: Final = re.compile(r"throttle|cpufreq|devfreq")  # types of cooling devices that slow a clock; fans do not


@dataclass(frozen=True)
class Conditions:
    tegra: bool = False
    gpu_listed: bool = False  # its GPU is among the kernel's devices with a clock (devfreq)
    clocks: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # name -> lower and upper limit, equal: pinned
    held: bool = False  # the clock helper holds them for a task
    slowed: tuple[str, ...] = ()  # cooling devices at work
    over_current: Mapping[str, int] = field(default_factory=dict)  # counter -> events since the board was started
    swap_on_card: str | None = None  # device or file of a swap that lies on an SD card


def read_conditions(root: Path, *, tegra: bool, held: bool = False) -> Conditions:
    """Read the conditions of the board with files under `root`.

    Args:
        root: Folder with `proc` and `sys`.
        tegra: Whether the board is a Jetson.
        held: Whether the clock helper pins the clocks for a task now.
    """
    found = controls.discover_controls(root)
    limits = {}
    for lever in (*found.controls_of_kind("cpu"), *found.controls_of_kind("gpu")):
        setting = lever.read_state()
        if len(lever.listed) > 1 and setting.low is not None and setting.high is not None:
            limits[lever.name] = (setting.low * lever.unit_hz, setting.high * lever.unit_hz)
    return Conditions(
        tegra=tegra,
        gpu_listed=bool(found.controls_of_kind("gpu")),
        clocks=limits,
        held=held,
        slowed=_throttling_devices(root / "sys/class/thermal"),
        over_current=_count_over_current(root / "sys/class/hwmon"),
        swap_on_card=_find_swap_on_card(root),
    )


def check_conditions(seen: Conditions) -> list[Finding]:
    return drop_missing(one(seen) for one in CHECKS)


def check_pinned_clocks(seen: Conditions) -> Finding | None:
    fixed = {name: low for name, (low, high) in seen.clocks.items() if low == high}
    if not fixed or seen.held or len(fixed) < len(seen.clocks):
        return None
    told = ", ".join(f"{name} at {hz / 1e6:.0f} MHz" for name, hz in fixed.items())
    return warning(
        "FQ161",
        f"every clock is pinned ({told}), as jetson_clocks does it: the board draws that power when it idles too, and "
        "no operating point can be compared with its own choice",
        "sudo jetson_clocks --restore, or reboot; and disable what pins them at boot",
    )


def check_thermal_throttling(seen: Conditions) -> Finding | None:
    if not seen.slowed:
        return None
    return warning(
        "FQ154",
        f"the kernel slows clocks for heat now ({', '.join(seen.slowed)}): tasks take longer than predicted",
        "give it air, or a lower power mode (nvpmodel)" if seen.tegra else "give it air",
    )


def check_over_current(seen: Conditions) -> Finding | None:
    counted = {name: events for name, events in seen.over_current.items() if events}
    if not counted:
        return None
    told = ", ".join(f"{name} {events} times" for name, events in counted.items())
    return warning(
        "FQ155",
        f"the hardware has cut its clocks for too much current or too low a voltage since the board was started "
        f"({told}): what a task takes then is not that of its operating point",
        "a stronger supply and a shorter cable, or a lower power mode; `grep . /sys/class/hwmon/hwmon*/oc*_event_cnt`",
    )


def check_gpu(seen: Conditions) -> Finding | None:
    if not seen.tegra:
        return None
    if seen.gpu_listed:
        return ok("FQ173", "the GPU is among the devices with a clock (devfreq)")
    return warning(
        "FQ173",
        "the GPU is not among the devices with a clock (/sys/class/devfreq): its driver was not loaded, so nothing "
        "runs on it",
        "sudo dmesg | grep -iE 'nvgpu|ga10b|gv11b|gp10b'; after an upgrade of the kernel: "
        "sudo apt install --reinstall nvidia-l4t-kernel nvidia-l4t-kernel-dtbs, and reboot",
    )


def check_swap_on_card(seen: Conditions) -> Finding | None:
    if seen.swap_on_card is None:
        return None
    return warning(
        "FQ131",
        f"swap is on the SD card ({seen.swap_on_card}): a task that swaps is slow, and wears the card out",
        f"sudo swapoff {seen.swap_on_card}, and take it out of /etc/fstab (Raspberry Pi OS: sudo apt remove "
        "dphys-swapfile); zram or an NVMe disk are places for swap",
    )


CHECKS: Final[Sequence[Callable[[Conditions], Finding | None]]] = (
    check_pinned_clocks,
    check_thermal_throttling,
    check_over_current,
    check_gpu,
    check_swap_on_card,
)


# -- reading --------------------------------------------------------------------------------------


def _throttling_devices(thermal: Path) -> tuple[str, ...]:
    told = []
    for device in sysfs.list_matches(thermal, "cooling_device*"):
        kind = sysfs.read_line(device / "type") or ""
        if THROTTLES.search(kind) and (sysfs.read_int(device / "cur_state") or 0) > 0:
            told.append(kind)
    return tuple(told)


def _count_over_current(hwmon: Path) -> dict[str, int]:
    # JetPack 5 and newer have `oc1_event_cnt` to `oc3_event_cnt` (Jetson Linux Developer Guide)
    found = {}
    for file in sysfs.list_matches(hwmon, "hwmon*/oc*_event_cnt"):
        events = sysfs.read_int(file)
        if events is not None:
            found[file.name.removesuffix("_event_cnt")] = events
    return found


def _find_swap_on_card(root: Path) -> str | None:
    # an eMMC has the same device names as an SD card, but its type is MMC
    for name, kind in _first_columns(root / "proc/swaps")[1:]:
        device = name if kind == "partition" else _device_of_file(root, name)
        disk = re.match(r"/dev/(mmcblk\d+)", device or "")
        if disk is not None and sysfs.read_line(root / f"sys/block/{disk[1]}/device/type") == "SD":
            return name
    return None


def _device_of_file(root: Path, file: str) -> str | None:
    best, device = "", None
    for source, place in _first_columns(root / "proc/mounts"):
        if (file == place or file.startswith(place.rstrip("/") + "/")) and len(place) >= len(best):
            best, device = place, source
    return device


def _first_columns(table: Path) -> list[tuple[str, str]]:
    rows = (line.split(None, 2) for line in (sysfs.read_text(table) or "").splitlines())
    return [(row[0], row[1]) for row in rows if len(row) > 1]
