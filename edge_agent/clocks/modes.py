"""Power modes of a Jetson: nvpmodel's catalogue in /etc/nvpmodel.conf, which every user may read, and the present one.

A mode turns cores off and caps clocks. Ids differ between releases, so a mode is identified by its name. nvpmodel
keeps the id of the mode that was set last in /var/lib/nvpmodel/status ("pmode:0002").
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from fedquilt.edge_agent import sysfs

CONF: Final = "etc/nvpmodel.conf"
STATUS: Final = "var/lib/nvpmodel/status"
UNCAPPED: Final = 1 << 62  # a cap of -1 (CPU, GPU) or 0 (memory) means none


class Cap(NamedTuple):
    """Highest value that a mode permits one clock, in the unit of the clock's own file."""

    clock: str  # "CPU_A78_0", "GPU", "EMC"
    value: int
    files: tuple[str, ...] = ()  # resolved paths of the files that nvpmodel writes it to


@dataclass(frozen=True)
class Mode:
    """One mode of the catalogue."""

    name: str
    id: int
    masks: tuple[str, ...] = ()  # parts of the GPU that are off in it: that changes only at boot
    caps: tuple[Cap, ...] = ()
    off: frozenset[int] = frozenset()  # cores that it turns off

    @property
    def emc_hz(self) -> int | None:
        """Cap of the memory clock in hertz; None: none."""
        return next((cap.value for cap in self.caps if cap.clock == "EMC" and cap.value < UNCAPPED), None)

    def caps_of(self, kind: str, file: Path | None) -> list[int]:
        """Caps on the clock of a kind (cpu, gpu or emc) whose upper limit is in `file`.

        Where the catalogue names no such file, all caps of the kind count.
        """
        mine = [cap for cap in self.caps if _kind(cap.clock) == kind]
        own = os.path.realpath(file) if file is not None else ""
        return [cap.value for cap in [cap for cap in mine if own in cap.files] or mine]


def catalogue(root: Path) -> tuple[Mode, ...]:
    """Modes in the order of the catalogue; (): there is none.

    Lines are `< PARAM TYPE=CLOCK NAME=GPU >` with `MAX_FREQ path`, and `< POWER_MODEL ID=1 NAME=MAXQ >` with
    `PARAMETER ARGUMENT value`.
    """
    text = sysfs.text(root / CONF)
    return () if text is None else _parsed(root, text)


@lru_cache(maxsize=32)
def _parsed(root: Path, text: str) -> tuple[Mode, ...]:
    modes: list[Mode] = []
    files: dict[str, list[str]] = {}
    param = ""
    for line in text.splitlines():
        words = line.split()
        if header := re.match(r"<\s*(\w+)(?:\s+ID=(\d+))?(?:\s+TYPE=\w+)?(?:\s+NAME=([^\s>]+))?", line):
            param = header[3] or "" if header[1] == "PARAM" else ""
            if header[1] == "POWER_MODEL" and header[2] and header[3]:
                modes.append(Mode(header[3], int(header[2])))
            elif modes:
                break  # the modes end here
        elif param and len(words) == 2 and words[0].startswith("MAX_FREQ"):
            files.setdefault(param, []).append(os.path.realpath(root / words[1].lstrip("/")))
        elif modes and len(words) == 3 and not line.startswith("#"):
            modes[-1] = _with(modes[-1], words, files)
    return tuple(modes)


def _with(mode: Mode, words: list[str], files: dict[str, list[str]]) -> Mode:
    """The mode with one more of its lines."""
    clock, argument, value = words
    if argument.endswith("PG_MASK"):
        return replace(mode, masks=(*mode.masks, " ".join(words)))
    if argument == "MAX_FREQ" and _kind(clock) and re.fullmatch(r"-?\d+", value):
        most = int(value) if int(value) > 0 else UNCAPPED
        return replace(mode, caps=(*mode.caps, Cap(clock, most, tuple(files.get(clock, ())))))
    if clock == "CPU_ONLINE" and value == "0" and (core := re.fullmatch(r"CORE_(\d+)", argument)):
        return replace(mode, off=mode.off | {int(core[1])})
    return mode


def _kind(clock: str) -> str:
    """Kind of a clock by its name in the catalogue; "": one that is not set here, such as a video engine's."""
    return "cpu" if clock.startswith("CPU_") else {"GPU": "gpu", "EMC": "emc"}.get(clock, "")


def present(root: Path) -> str | None:
    """Name of the present mode by nvpmodel's status; before it was ever set, the catalogue's default.

    None: there is no catalogue, it lacks the mode, or this user may not read the status.
    """
    if sysfs.hidden(root / STATUS):
        return None
    status = re.search(r"pmode:(\d+)", sysfs.text(root / STATUS) or "")
    default = re.search(r"<\s*PM_CONFIG\s+DEFAULT=(\d+)", sysfs.text(root / CONF) or "")
    found = status or default
    known = {mode.id: mode.name for mode in catalogue(root)}
    return known.get(int(found[1])) if found is not None else None


def mark(root: Path) -> str | None:
    """Text that changes whenever nvpmodel sets a mode, be it the same again; None: it keeps no status here."""
    text = sysfs.text(root / STATUS)
    try:
        return None if text is None else f"{text.strip()}@{(root / STATUS).stat().st_mtime_ns}"
    except OSError:
        return None


def plain(name: str) -> str:
    """Name of a mode without the parts in which releases differ: MODE_15W, "MAXN SUPER"."""
    return name.lower().replace(" ", "_").removeprefix("mode_")


def same(one: str | None, other: str | None) -> bool:
    """Whether two names mean the same mode; an unknown mode is none."""
    return one is not None and other is not None and plain(one) == plain(other)
