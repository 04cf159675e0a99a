"""Clock controls of a board, as its kernel offers them: CPU policies, GPU and memory clocks, nvpmodel's modes.

A frequency is held by lower limit = upper limit = frequency under the governor that the board has, as NVIDIA's
`jetson_clocks` does; the memory clock (EMC) by its cap and, where debugfs shows it, by the rate and its lock.
Only frequencies that the board lists are ever planned. Nothing here writes.

The memory clock's frequencies are in debugfs, which root alone may read on nearly every board. Any other process does
not know them: it finds the clock with an empty list, marked as hidden, and asks the clock helper for the list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from fedquilt.core import ClockError, OperatingPoint, Wired
from fedquilt.edge_agent import sysfs
from fedquilt.edge_agent.clocks.modes import Mode, catalogue, same

TOLERANCE: Final = 0.01  # 1421 is accepted for 1420.8 MHz
GPUS: Final = ("gv11b", "gp10b", "ga10b", "gb10b", "gpu")
EMC: Final = "sys/kernel/debug/bpmp/debug"  # readable by root alone
EMC_CAPS: Final = ("sys/kernel/nvpmodel_clk_cap/emc", "sys/kernel/nvpmodel_emc_cap/emc_iso_cap")  # JetPack 6; 4 and 5

Kind = Literal["cpu", "gpu", "emc"]


class Setting(Wired, frozen=True):
    """State of one lever. Values as in its files, in the lever's own unit; None: there is no such file."""

    name: str
    governor: str | None = None
    low: int | None = None
    high: int | None = None
    rate: int | None = None
    lock: int | None = None


class Settings(Wired, frozen=True):
    """State of a whole board: restored when its clocks are released."""

    mode: str | None  # nvpmodel's, by name
    levers: tuple[Setting, ...]


@dataclass(frozen=True)
class Lever:
    """One clock and its files, as far as they exist."""

    name: str  # "policy0", "17000000.gpu", "emc"
    kind: Kind
    listed: tuple[int, ...]  # ascending, in `unit_hz`; (): none listed, so it cannot be held
    unit_hz: int = 1
    governor: Path | None = None
    low: Path | None = None
    high: Path | None = None
    now: Path | None = None
    rate: Path | None = None  # the memory clock's, where debugfs shows it
    lock: Path | None = None
    hidden: bool = False  # nothing is listed because this process may not read the list

    @property
    def listed_hz(self) -> tuple[float, ...]:
        """The listed frequencies in hertz, ascending."""
        return tuple(float(value * self.unit_hz) for value in self.listed)

    def setting(self) -> Setting:
        """State of the lever now."""
        low, high, rate, lock = (number(path) for path in (self.low, self.high, self.rate, self.lock))
        return Setting(name=self.name, governor=text(self.governor), low=low, high=high, rate=rate, lock=lock)

    def choose(self, hz: float) -> int:
        """Listed value nearest to `hz`, in the lever's unit.

        Raises:
            ClockError: none is within 1 %.
        """
        nearest = min(self.listed, key=lambda value: abs(value * self.unit_hz - hz), default=None)
        if nearest is None or abs(nearest * self.unit_hz - hz) > TOLERANCE * hz:
            has = ", ".join(f"{value * self.unit_hz / 1e6:g}" for value in self.listed)
            raise ClockError(
                f"{self.name} ({self.kind}) has no {hz / 1e6:g} MHz: "
                + (f"it lists {has} MHz" if has else self._unlisted())
            )
        return nearest

    def _unlisted(self) -> str:
        if self.hidden:
            return "root alone may read its frequencies: run this as root, or through the clock helper"
        return "the board lists no frequencies for it, so leave it out"

    def to(self, value: int, *, low: int | None = None) -> list[Write]:
        """Writes for limits `low` (else `value`) and `value`. The lower goes down first: it never exceeds the upper."""
        writes = []
        if self.low is not None:
            writes.append(Write(self, self.low, min(self.listed[0], value if low is None else low)))
        if self.high is not None:
            writes.append(Write(self, self.high, value))
        if self.low is not None:
            writes.append(Write(self, self.low, value if low is None else low))
        return writes


@dataclass(frozen=True)
class Write:
    """One value for one file."""

    lever: Lever
    file: Path
    value: int | str

    def __str__(self) -> str:
        return f"write {self.value} to {self.file} ({self.lever.name})"

    def took(self, value: str | None) -> bool:
        """Whether the file's content then matches the value. Orin's memory clock rounds up to a listed one."""
        if value == str(self.value):
            return True
        if self.lever.kind != "emc" or self.file not in (self.lever.rate, self.lever.high):
            return False
        if value is None or not value.isdigit():
            return False
        near = [listed for listed in (*self.lever.listed, int(self.value)) if listed >= int(self.value)]
        return any(abs(int(value) - listed) <= TOLERANCE * listed for listed in near)


@dataclass(frozen=True)
class Levers:
    """All controls of a board."""

    found: tuple[Lever, ...]
    modes: tuple[Mode, ...] = ()

    @property
    def hidden(self) -> tuple[Lever, ...]:
        """Levers whose frequencies this process may not read."""
        return tuple(lever for lever in self.found if lever.hidden)

    def of(self, kind: Kind) -> list[Lever]:
        """Levers of a kind: cpu, gpu or emc."""
        return [lever for lever in self.found if lever.kind == kind]

    def settings(self, mode: str | None) -> Settings:
        """State of all levers now, in `mode`."""
        return Settings(mode=mode, levers=tuple(lever.setting() for lever in self.found))

    def mode(self, name: str | None) -> Mode | None:
        """Mode by name, with or without the prefix MODE_, blanks or capitals."""
        return next((mode for mode in self.modes if same(mode.name, name)), None)


# -- what there is --------------------------------------------------------------------------------


def discover(root: Path = Path("/")) -> Levers:
    """Find the controls below `root`; levers that are absent or list nothing cannot be held."""
    modes = catalogue(root)
    return Levers((*_cpus(root), *_devfreq(root), *_emc(root, modes)), modes)


def unplugged(root: Path, saved: Settings, mode: Mode | None) -> list[str]:
    """Names of saved CPU policies all of whose cores are off now, some of which are not in `mode`; None: no mode.

    The kernel takes no limit for such a policy, and keeps the ones that it has for when a core is on again.
    """
    system, found = root / "sys/devices/system/cpu", []
    for old in saved.levers:
        folder = system / "cpufreq" / old.name
        cores = {int(core) for core in (text(folder / "related_cpus") or "").split() if core.isdigit()}
        if cores and _off(system, folder) and not (mode is not None and cores <= mode.off):
            found.append(old.name)
    return found


def hottest_c(root: Path = Path("/")) -> float | None:
    """Temperature of the hottest thermal zone that answers; None: none does."""
    return sysfs.hottest_c(sysfs.zones(root / "sys/class/thermal"))


def _cpus(root: Path) -> Iterable[Lever]:
    system = root / "sys/devices/system/cpu"
    folders = sysfs.glob(system, "cpufreq/policy[0-9]*") or sysfs.glob(system, "cpu[0-9]*/cpufreq")
    seen = {folder.resolve(): folder for folder in reversed(_numbered(folders))}
    for folder in reversed(seen.values()):
        if not sysfs.there(folder / "scaling_max_freq") or _off(system, folder):
            continue  # one whose limit cannot be read now is no reason: it may be still to be restored
        listed, hidden = _listed(folder / "scaling_available_frequencies")
        yield Lever(
            name=folder.name if folder.name != "cpufreq" else folder.parent.name,
            kind="cpu",
            listed=listed,
            unit_hz=1000,
            governor=_there(folder / "scaling_governor"),
            low=_there(folder / "scaling_min_freq"),
            high=_there(folder / "scaling_max_freq"),
            now=_there(folder / "scaling_cur_freq"),
            hidden=hidden,
        )


def _off(system: Path, folder: Path) -> bool:
    """Whether every core of a policy is off; a core that cannot be turned off has no file for it, and is on.

    Where the kernel does not list the cores of a policy, one whose limit cannot be read is off.
    """
    cores = (text(folder / "related_cpus") or "").split()
    if not cores:
        return number(folder / "scaling_max_freq") is None
    return all(text(system / f"cpu{core}/online") == "0" for core in cores)


def _devfreq(root: Path) -> Iterable[Lever]:
    """GPU clocks by their names in the device tree; on Thor the memory clock too."""
    for folder in sysfs.glob(root / "sys/class/devfreq", "*"):
        name = text(folder / "device/of_node/name") or folder.name
        gpu = any(part in name for part in GPUS) and "nvd" not in name  # Thor's video engines are no GPU cores
        if (gpu or folder.name == "bwmgr") and sysfs.there(folder / "max_freq"):
            listed, hidden = _listed(folder / "available_frequencies")
            yield Lever(
                name=folder.name if gpu else "emc",
                kind="gpu" if gpu else "emc",
                listed=listed,
                governor=_there(folder / "governor"),
                low=_there(folder / "min_freq"),
                high=_there(folder / "max_freq"),
                now=_there(folder / "cur_freq"),
                hidden=hidden,
            )


def _emc(root: Path, modes: Sequence[Mode]) -> Iterable[Lever]:
    """Memory clock: debugfs lists its rates in kHz; without that, the rates that the board shows elsewhere.

    If this process may not read debugfs the list stays empty: the caps of the modes alone could pass for all rates.
    """
    cap = next((path for path in (root / cap for cap in EMC_CAPS) if sysfs.there(path)), None)
    clock = root / EMC / "clk/emc"
    rate, lock = _there(clock / "rate"), _there(clock / "mrq_rate_locked")
    if rate is None or lock is None:
        rate = lock = None
    if cap is None and lock is None:
        return
    khz, hidden = _listed(root / EMC / "emc/possible_rates")
    listed, hidden = tuple(each * 1000 for each in khz), hidden or sysfs.hidden(clock / "max_rate")
    if not listed and not hidden:
        told = {number(clock / "min_rate"), number(clock / "max_rate"), *(mode.emc_hz for mode in modes)}
        listed = tuple(sorted(hz for hz in told if hz))
    yield Lever("emc", "emc", listed, high=cap, now=rate, rate=rate, lock=lock, hidden=hidden and not listed)


# -- what to write --------------------------------------------------------------------------------


def plan(levers: Levers, point: OperatingPoint) -> list[Write]:
    """Writes that hold the board at a point, in order; nvpmodel's mode, if the point names one, is set before.

    Raises:
        ClockError: the point names nothing to set, or a value that this board does not have or list.
    """
    wanted: tuple[tuple[Kind, float | None], ...] = (
        ("cpu", point.cpu_hz),
        ("gpu", point.gpu_hz),
        ("emc", point.emc_hz),
    )
    writes: list[Write] = []
    for kind, hz in wanted:
        if hz is None:
            continue
        if not levers.of(kind):
            raise ClockError(f"this board shows no {kind} clock that can be set: leave {kind} out of {point.name!r}")
        for lever in levers.of(kind):
            value = lever.choose(hz)
            writes += lever.to(value)
            if lever.rate is not None and lever.lock is not None:
                writes += [Write(lever, lever.rate, value), Write(lever, lever.lock, 1)]
    if not writes and levers.mode(point.name) is None:
        known = ", ".join(mode.name for mode in levers.modes) or "none"
        raise ClockError(f"{point.name!r} says no frequency and is no mode of this board; its modes: {known}")
    return writes


def undo(levers: Levers, saved: Settings, kinds: Iterable[Kind] = ("cpu", "gpu", "emc")) -> list[Write]:
    """Writes that restore clocks of these kinds; the board is in the saved mode already."""
    found = {lever.name: lever for lever in levers.found if lever.kind in kinds}
    writes: list[Write] = []
    for old in saved.levers:
        lever = found.get(old.name)
        if lever is None or not lever.listed:
            continue  # never held: clocks without a list cannot be
        if lever.governor is not None and old.governor and text(lever.governor) != old.governor:
            writes.append(Write(lever, lever.governor, old.governor))
        if old.high is not None:
            writes += lever.to(old.high, low=old.low)
        if lever.lock is not None and lever.rate is not None and old.lock is not None:
            if old.lock and old.rate is not None:
                writes.append(Write(lever, lever.rate, old.rate))
            writes.append(Write(lever, lever.lock, old.lock))
    return writes


def said(writes: Iterable[Write]) -> list[tuple[Write, str | None]]:
    """Last write to each file, with the file's content now; `Write.took` compares them."""
    last = {write.file: write for write in writes}
    return [(write, text(write.file)) for write in last.values()]


# -- files ----------------------------------------------------------------------------------------


def text(path: Path | None) -> str | None:
    """First line of a file; None without one."""
    return None if path is None else sysfs.line(path)


def number(path: Path | None) -> int | None:
    """Whole number in a file; None without one."""
    return None if path is None else sysfs.whole(path)


def _listed(path: Path) -> tuple[tuple[int, ...], bool]:
    """Whole numbers above 0, ascending, without the unit that ends debugfs lists; and whether the list is hidden."""
    words = (text(path) or "").split()
    return tuple(sorted({int(word) for word in words if word.isdigit() and int(word) > 0})), sysfs.hidden(path)


def _there(path: Path) -> Path | None:
    return path if sysfs.there(path) else None


def _numbered(folders: Iterable[Path]) -> list[Path]:
    """policy10 after policy4."""
    return sorted(folders, key=lambda folder: [int(found) for found in re.findall(r"\d+", "/".join(folder.parts[-2:]))])
