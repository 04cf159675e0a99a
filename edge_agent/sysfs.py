"""Readers for the small files in which a kernel describes its hardware. Unreadable ones are None, never an error.

An agent is an ordinary user, and on most boards whole folders are for root alone (debugfs has mode 0700).
`Path.is_file`, `Path.exists` and `Path.glob` raise PermissionError below such a folder; use `there` and `glob` instead.
"""

from __future__ import annotations

import glob as globs
import os
from collections.abc import Iterable
from pathlib import Path

LIMIT_BYTES = 1 << 16  # more than any of these files holds
PLAUSIBLE_C = (-40.0, 150.0)  # a sensor that is off reads -256
STUCK_ZONES = frozenset({"PMIC-Die"})  # reads 100 C on Nano, TX2 and Xavier, cold or hot


def text(path: str | Path) -> str | None:
    """Text of a file; None if it does not exist, may not be read, or the sensor does not answer."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return os.read(handle, LIMIT_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(handle)


def there(path: str | Path) -> bool:
    """Whether this user can see something at the path; below a folder closed to the user the answer is no."""
    return os.path.exists(path)


def glob(folder: Path, pattern: str) -> list[Path]:
    """Matches of the pattern below the folder, sorted, as far as this user can see them."""
    return sorted(folder / name for name in globs.glob(pattern, root_dir=folder))


def hidden(path: str | Path) -> bool:
    """Whether the path exists, or may exist, but this user may not read it."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def line(path: str | Path) -> str | None:
    """Text without its terminator, also a device tree's NUL; None if nothing is left."""
    found = text(path)
    return found.strip("\0\n ") or None if found is not None else None


def lines(path: str | Path) -> list[str]:
    """List of texts in a device tree's file, each ended by a NUL."""
    return [part for part in (text(path) or "").split("\0") if part.strip()]


def whole(path: str | Path) -> int | None:
    """Whole number in the file; None if it holds anything else."""
    try:
        return int(text(path) or "")
    except ValueError:
        return None


def device_tree(root: Path) -> Path:
    """Folder of the board's device tree: where the kernel promises it to programs, else its older name in /proc.

    The kernel's ABI notes (testing/sysfs-firmware-ofw) say that the name in /proc may go.
    """
    promised = root / "sys/firmware/devicetree/base"
    return promised if os.path.isdir(promised) else root / "proc/device-tree"


def zones(thermal: Path) -> list[Path]:
    """Readings of the thermal zones in sys/class/thermal, without the one known to be stuck."""
    found = glob(thermal, "thermal_zone*")
    return [zone / "temp" for zone in found if line(zone / "type") not in STUCK_ZONES]


def hottest_c(sensors: Iterable[str | Path]) -> float | None:
    """Hottest of the sensors that are on, given in thousandths of a degree; None: none is on."""
    low, high = PLAUSIBLE_C
    known = [milli / 1000 for milli in map(whole, sensors) if milli is not None and low <= milli / 1000 <= high]
    return max(known, default=None)
