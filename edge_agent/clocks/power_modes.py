"""Power modes of a Jetson: nvpmodel's catalogue in /etc/nvpmodel.conf and the present mode.

A mode turns cores off and caps clocks. Ids differ between releases, so a mode is identified by its name. nvpmodel
stores the id of the mode set last in /var/lib/nvpmodel/status ("pmode:0002").
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from fedquilt.host import sysfs

CONF: Final = "etc/nvpmodel.conf"
STATUS: Final = "var/lib/nvpmodel/status"
UNCAPPED: Final = 1 << 62  # a cap of -1 (CPU, GPU) or 0 (memory) means none


class ClockCap(NamedTuple):
    """Highest value of one clock in a mode, in the unit of the clock's file."""

    clock: str  # "CPU_A78_0", "GPU", "EMC"
    value: int
    files: tuple[str, ...] = ()  # resolved paths of the files that nvpmodel writes it to


@dataclass(frozen=True)
class PowerMode:
    name: str
    id: int
    masks: tuple[str, ...] = ()  # parts of the GPU that are off in it: that changes only at boot
    caps: tuple[ClockCap, ...] = ()
    off: frozenset[int] = frozenset()  # cores that it turns off

    @property
    def emc_hz(self) -> int | None:
        return next((cap.value for cap in self.caps if cap.clock == "EMC" and cap.value < UNCAPPED), None)

    def caps_for_clock(self, kind: str, file: Path | None) -> list[int]:
        """Return the caps on the clock of a kind (cpu, gpu or emc) with its upper limit in `file`.

        All caps of the kind are returned if the catalogue does not name the file.
        """
        mine = [cap for cap in self.caps if _clock_kind(cap.clock) == kind]
        own = os.path.realpath(file) if file is not None else ""
        return [cap.value for cap in [cap for cap in mine if own in cap.files] or mine]


def read_modes(root: Path) -> tuple[PowerMode, ...]:
    """Return the modes in the order of the catalogue, or () without a catalogue.

    Lines are `< PARAM TYPE=CLOCK NAME=GPU >` with `MAX_FREQ path`, and `< POWER_MODEL ID=1 NAME=MAXQ >` with
    `PARAMETER ARGUMENT value`.
    """
    text = sysfs.read_text(root / CONF)
    return () if text is None else _parse_modes(root, text)


@lru_cache(maxsize=32)
def _parse_modes(root: Path, text: str) -> tuple[PowerMode, ...]:
    modes: list[PowerMode] = []
    files: dict[str, list[str]] = {}
    param = ""
    for line in text.splitlines():
        words = line.split()
        if header := re.match(r"<\s*(\w+)(?:\s+ID=(\d+))?(?:\s+TYPE=\w+)?(?:\s+NAME=([^\s>]+))?", line):
            param = header[3] or "" if header[1] == "PARAM" else ""
            if header[1] == "POWER_MODEL" and header[2] and header[3]:
                modes.append(PowerMode(header[3], int(header[2])))
            elif modes:
                break  # the modes end here
        elif param and len(words) == 2 and words[0].startswith("MAX_FREQ"):
            files.setdefault(param, []).append(os.path.realpath(root / words[1].lstrip("/")))
        elif modes and len(words) == 3 and not line.startswith("#"):
            modes[-1] = _parse_mode_line(modes[-1], words, files)
    return tuple(modes)


def _parse_mode_line(mode: PowerMode, words: list[str], files: dict[str, list[str]]) -> PowerMode:
    clock, argument, value = words
    if argument.endswith("PG_MASK"):
        return replace(mode, masks=(*mode.masks, " ".join(words)))
    if argument == "MAX_FREQ" and _clock_kind(clock) and re.fullmatch(r"-?\d+", value):
        most = int(value) if int(value) > 0 else UNCAPPED
        return replace(mode, caps=(*mode.caps, ClockCap(clock, most, tuple(files.get(clock, ())))))
    if clock == "CPU_ONLINE" and value == "0" and (core := re.fullmatch(r"CORE_(\d+)", argument)):
        return replace(mode, off=mode.off | {int(core[1])})
    return mode


def _clock_kind(clock: str) -> str:
    return "cpu" if clock.startswith("CPU_") else {"GPU": "gpu", "EMC": "emc"}.get(clock, "")


def read_mode_name(root: Path) -> str | None:
    """Return the name of the present mode, or the catalogue's default if none was ever set.

    The result is None without a catalogue, if it lacks the mode, or if this user may not read the status.
    """
    if sysfs.is_forbidden(root / STATUS):
        return None
    status = re.search(r"pmode:(\d+)", sysfs.read_text(root / STATUS) or "")
    default = re.search(r"<\s*PM_CONFIG\s+DEFAULT=(\d+)", sysfs.read_text(root / CONF) or "")
    found = status or default
    known = {mode.id: mode.name for mode in read_modes(root)}
    return known.get(int(found[1])) if found is not None else None


def status_fingerprint(root: Path) -> str | None:
    """Return a text that changes whenever nvpmodel sets a mode, or None without a status."""
    text = sysfs.read_text(root / STATUS)
    try:
        return None if text is None else f"{text.strip()}@{(root / STATUS).stat().st_mtime_ns}"
    except OSError:
        return None


def normalize_mode_name(name: str) -> str:
    """Return a mode's name without the differences between releases: MODE_15W, "MAXN SUPER"."""
    return name.lower().replace(" ", "_").removeprefix("mode_")


def is_same_mode(one: str | None, other: str | None) -> bool:
    """Return whether two names mean the same mode, which is False for None."""
    return one is not None and other is not None and normalize_mode_name(one) == normalize_mode_name(other)
