"""Conditions that slow a board or falsify its figures: pinned clocks, throttling, a lost GPU, slow swap.

`look` reads each from the kernel's own files, as any user may; `check` judges them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fedquilt.edge_agent import sysfs
from fedquilt.edge_agent.clocks import controls
from fedquilt.tools.doctor.findings import Finding, ok, there, warning

THROTTLES: Final = re.compile(r"throttle|cpufreq|devfreq")  # types of cooling devices that slow a clock; fans do not


@dataclass(frozen=True)
class Conditions:
    """Conditions of a board at one moment."""

    tegra: bool = False
    gpu_listed: bool = False  # its GPU is among the kernel's devices with a clock (devfreq)
    clocks: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # name -> lower and upper limit, equal: pinned
    held: bool = False  # the clock helper holds them for a task
    slowed: tuple[str, ...] = ()  # cooling devices at work
    over_current: Mapping[str, int] = field(default_factory=dict)  # counter -> events since the board was started
    swap_on_card: str | None = None  # device or file of a swap that lies on an SD card


def look(root: Path, *, tegra: bool, held: bool = False) -> Conditions:
    """Read the conditions of the board whose files are under `root`.

    Args:
        root: folder of `proc` and `sys`.
        tegra: whether it is a Jetson.
        held: whether the clock helper holds its clocks now.
    """
    found = controls.discover(root)
    limits = {}
    for lever in (*found.of("cpu"), *found.of("gpu")):
        setting = lever.setting()
        if len(lever.listed) > 1 and setting.low is not None and setting.high is not None:
            limits[lever.name] = (setting.low * lever.unit_hz, setting.high * lever.unit_hz)
    return Conditions(
        tegra=tegra,
        gpu_listed=bool(found.of("gpu")),
        clocks=limits,
        held=held,
        slowed=_slowed(root / "sys/class/thermal"),
        over_current=_over_current(root / "sys/class/hwmon"),
        swap_on_card=_swap_on_card(root),
    )


def check(seen: Conditions) -> list[Finding]:
    """All findings about the conditions of a board."""
    return there(one(seen) for one in CHECKS)


def pinned(seen: Conditions) -> Finding | None:
    """Check that clocks are free to move; None: they are, or none is listed."""
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


def hot(seen: Conditions) -> Finding | None:
    """Check that the kernel slows no clock for heat; None: it does not."""
    if not seen.slowed:
        return None
    return warning(
        "FQ154",
        f"the kernel slows clocks for heat now ({', '.join(seen.slowed)}): tasks take longer than predicted",
        "give it air, or a lower power mode (nvpmodel)" if seen.tegra else "give it air",
    )


def over_current(seen: Conditions) -> Finding | None:
    """Check the counters of over-current events; None: none has counted."""
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


def gpu(seen: Conditions) -> Finding | None:
    """Check that a Jetson's GPU is listed with a clock; None: another board."""
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


def swap(seen: Conditions) -> Finding | None:
    """Check that no swap lies on an SD card; None: none does."""
    if seen.swap_on_card is None:
        return None
    return warning(
        "FQ131",
        f"swap is on the SD card ({seen.swap_on_card}): a task that swaps is slow, and wears the card out",
        f"sudo swapoff {seen.swap_on_card}, and take it out of /etc/fstab (Raspberry Pi OS: sudo apt remove "
        "dphys-swapfile); zram or an NVMe disk are places for swap",
    )


CHECKS: Final[Sequence[Callable[[Conditions], Finding | None]]] = (pinned, hot, over_current, gpu, swap)


# -- reading --------------------------------------------------------------------------------------


def _slowed(thermal: Path) -> tuple[str, ...]:
    """Types of cooling devices that slow a clock and are at work (kernel, Documentation/driver-api/thermal)."""
    told = []
    for device in sysfs.glob(thermal, "cooling_device*"):
        kind = sysfs.line(device / "type") or ""
        if THROTTLES.search(kind) and (sysfs.whole(device / "cur_state") or 0) > 0:
            told.append(kind)
    return tuple(told)


def _over_current(hwmon: Path) -> dict[str, int]:
    """Read how many over-current events each counter of the kernel has, by its name without "_event_cnt".

    JetPack 5 and newer have `oc1_event_cnt` to `oc3_event_cnt` (Jetson Linux Developer Guide).
    """
    found = {}
    for file in sysfs.glob(hwmon, "hwmon*/oc*_event_cnt"):
        events = sysfs.whole(file)
        if events is not None:
            found[file.name.removesuffix("_event_cnt")] = events
    return found


def _swap_on_card(root: Path) -> str | None:
    """The first swap on an SD card, as /proc/swaps names it. eMMC has the same device names; its type is MMC."""
    for name, kind in _first_columns(root / "proc/swaps")[1:]:
        device = name if kind == "partition" else _device_of(root, name)
        disk = re.match(r"/dev/(mmcblk\d+)", device or "")
        if disk is not None and sysfs.line(root / f"sys/block/{disk[1]}/device/type") == "SD":
            return name
    return None


def _device_of(root: Path, file: str) -> str | None:
    """Device of the file system that holds a file, by /proc/mounts: the longest mount point counts."""
    best, device = "", None
    for source, place in _first_columns(root / "proc/mounts"):
        if (file == place or file.startswith(place.rstrip("/") + "/")) and len(place) >= len(best):
            best, device = place, source
    return device


def _first_columns(table: Path) -> list[tuple[str, str]]:
    """Return the first two words of each line. A line with fewer is left out: a long file is cut anywhere."""
    rows = (line.split(None, 2) for line in (sysfs.text(table) or "").splitlines())
    return [(row[0], row[1]) for row in rows if len(row) > 1]
