"""Readers of small kernel files that describe hardware. An unreadable file reads as None.

On most boards whole folders are readable by root only, such as debugfs with mode 0700. `Path.is_file`, `Path.exists`
and `Path.glob` raise PermissionError below such a folder, so callers use `is_visible` and `list_matches`.
"""

from __future__ import annotations

import glob as globs
import os
from collections.abc import Iterable
from pathlib import Path

LIMIT_BYTES = 1 << 16  # more than the size of any such file
PLAUSIBLE_C = (-40.0, 150.0)  # an inactive sensor reads -256
STUCK_ZONES = frozenset({"PMIC-Die"})  # reads 100 C on Nano, TX2 and Xavier, cold or hot


def read_text(path: str | Path) -> str | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return os.read(descriptor, LIMIT_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(descriptor)


def is_visible(path: str | Path) -> bool:
    return os.path.exists(path)


def list_matches(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder / name for name in globs.glob(pattern, root_dir=folder))


def is_forbidden(path: str | Path) -> bool:
    """Return whether the path may exist, but this user lacks permission to read it."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def read_line(path: str | Path) -> str | None:
    text = read_text(path)
    return text.strip("\0\n ") or None if text is not None else None


def read_strings(path: str | Path) -> list[str]:
    return [part for part in (read_text(path) or "").split("\0") if part.strip()]


def read_int(path: str | Path) -> int | None:
    try:
        return int(read_text(path) or "")
    except ValueError:
        return None


def device_tree_folder(root: Path) -> Path:
    """Return the folder of the board's device tree, in sysfs if present, else in /proc.

    The kernel's ABI notes (testing/sysfs-firmware-ofw) say that the name in /proc may be removed.
    """
    sysfs_folder = root / "sys/firmware/devicetree/base"
    return sysfs_folder if os.path.isdir(sysfs_folder) else root / "proc/device-tree"


def thermal_zone_files(thermal: Path) -> list[Path]:
    """Return the temperature files of the thermal zones that are not in STUCK_ZONES."""
    zones = list_matches(thermal, "thermal_zone*")
    return [zone / "temp" for zone in zones if read_line(zone / "type") not in STUCK_ZONES]


def hottest_temperature_c(sensors: Iterable[str | Path]) -> float | None:
    """Return the highest plausible temperature in °C, or None. The files contain thousandths of degrees."""
    low, high = PLAUSIBLE_C
    temperatures = [value / 1000 for value in map(read_int, sensors) if value is not None]
    return max((value for value in temperatures if low <= value <= high), default=None)
