"""Clock controls of a board in its kernel: CPU policies, GPU and memory clocks, and power modes.

A frequency is pinned by setting both limits to it under the board's own governor, as NVIDIA's `jetson_clocks` does. The
memory clock (EMC) is pinned by its cap and, where debugfs has them, by its rate and lock. Only listed frequencies are
planned. Nothing here writes.

The frequencies of the memory clock are in debugfs, which only root can read on nearly every board. Any other process
gets an empty list marked as hidden, and requests the list from the clock helper.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from fedquilt.core import ClockError, OperatingPoint, WireMessage
from fedquilt.edge_agent.clocks.power_modes import PowerMode, is_same_mode, read_modes
from fedquilt.host import sysfs

TOLERANCE: Final = 0.01  # 1421 is accepted for 1420.8 MHz
GPUS: Final = ("gv11b", "gp10b", "ga10b", "gb10b", "gpu")
EMC: Final = "sys/kernel/debug/bpmp/debug"  # readable by root alone
EMC_CAPS: Final = ("sys/kernel/nvpmodel_clk_cap/emc", "sys/kernel/nvpmodel_emc_cap/emc_iso_cap")  # JetPack 6; 4 and 5

Kind = Literal["cpu", "gpu", "emc"]


class ControlState(WireMessage, frozen=True):
    name: str
    governor: str | None = None
    low: int | None = None
    high: int | None = None
    rate: int | None = None
    lock: int | None = None


class BoardControlState(WireMessage, frozen=True):
    mode: str | None  # nvpmodel's, by name
    levers: tuple[ControlState, ...]


@dataclass(frozen=True)
class ClockControl:
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
        return tuple(float(value * self.unit_hz) for value in self.listed)

    def read_state(self) -> ControlState:
        low, high, rate, lock = (read_number(path) for path in (self.low, self.high, self.rate, self.lock))
        return ControlState(name=self.name, governor=read_line(self.governor), low=low, high=high, rate=rate, lock=lock)

    def nearest_value(self, hz: float) -> int:
        """Return the listed value nearest to `hz`, in the control's unit.

        Raises:
            ClockError: If no listed value is within 1 %.
        """
        nearest = min(self.listed, key=lambda value: abs(value * self.unit_hz - hz), default=None)
        if nearest is None or abs(nearest * self.unit_hz - hz) > TOLERANCE * hz:
            has = ", ".join(f"{value * self.unit_hz / 1e6:g}" for value in self.listed)
            raise ClockError(
                f"{self.name} ({self.kind}) has no {hz / 1e6:g} MHz: "
                + (f"it lists {has} MHz" if has else self._explain_missing_list())
            )
        return nearest

    def _explain_missing_list(self) -> str:
        if self.hidden:
            return "root alone may read its frequencies: run this as root, or through the clock helper"
        return "the board lists no frequencies for it, so leave it out"

    def limit_writes(self, value: int, *, low: int | None = None) -> list[ControlWrite]:
        """Return writes of both limits, ordered so that the lower limit never exceeds the upper."""
        writes = []
        if self.low is not None:
            writes.append(ControlWrite(self, self.low, min(self.listed[0], value if low is None else low)))
        if self.high is not None:
            writes.append(ControlWrite(self, self.high, value))
        if self.low is not None:
            writes.append(ControlWrite(self, self.low, value if low is None else low))
        return writes


@dataclass(frozen=True)
class ControlWrite:
    lever: ClockControl
    file: Path
    value: int | str

    def __str__(self) -> str:
        return f"write {self.value} to {self.file} ({self.lever.name})"

    def is_applied(self, value: str | None) -> bool:
        """Return whether the file has the value. A memory clock may round up to a listed one."""
        if value == str(self.value):
            return True
        if self.lever.kind != "emc" or self.file not in (self.lever.rate, self.lever.high):
            return False
        if value is None or not value.isdigit():
            return False
        near = [listed for listed in (*self.lever.listed, int(self.value)) if listed >= int(self.value)]
        return any(abs(int(value) - listed) <= TOLERANCE * listed for listed in near)


@dataclass(frozen=True)
class ClockControls:
    found: tuple[ClockControl, ...]
    modes: tuple[PowerMode, ...] = ()

    @property
    def hidden_controls(self) -> tuple[ClockControl, ...]:
        return tuple(lever for lever in self.found if lever.hidden)

    def controls_of_kind(self, kind: Kind) -> list[ClockControl]:
        return [lever for lever in self.found if lever.kind == kind]

    def read_state(self, mode: str | None) -> BoardControlState:
        """Return the present state of all controls, labelled with `mode`."""
        return BoardControlState(mode=mode, levers=tuple(lever.read_state() for lever in self.found))

    def find_mode(self, name: str | None) -> PowerMode | None:
        """Return a mode by name, whatever its capitals, blanks and prefix MODE_, or None."""
        return next((mode for mode in self.modes if is_same_mode(mode.name, name)), None)


# -- what there is --------------------------------------------------------------------------------


def discover_controls(root: Path = Path("/")) -> ClockControls:
    """Return the controls below `root`. Those without listed frequencies cannot be pinned."""
    modes = read_modes(root)
    return ClockControls((*_cpu_controls(root), *_devfreq_controls(root), *_emc_controls(root, modes)), modes)


def offline_policies(root: Path, saved: BoardControlState, mode: PowerMode | None) -> list[str]:
    """Return the saved CPU policies whose cores are all off, unless `mode` turns them off too.

    The kernel accepts no limit for such a policy and keeps the old limits until a core is on again.
    """
    system, found = root / "sys/devices/system/cpu", []
    for old in saved.levers:
        folder = system / "cpufreq" / old.name
        cores = {int(core) for core in (read_line(folder / "related_cpus") or "").split() if core.isdigit()}
        if cores and _is_policy_off(system, folder) and not (mode is not None and cores <= mode.off):
            found.append(old.name)
    return found


def hottest_zone_c(root: Path = Path("/")) -> float | None:
    """Return the temperature of the hottest thermal zone in °C, or None without a reading."""
    return sysfs.hottest_temperature_c(sysfs.thermal_zone_files(root / "sys/class/thermal"))


def _cpu_controls(root: Path) -> Iterable[ClockControl]:
    system = root / "sys/devices/system/cpu"
    folders = sysfs.list_matches(system, "cpufreq/policy[0-9]*") or sysfs.list_matches(system, "cpu[0-9]*/cpufreq")
    seen = {folder.resolve(): folder for folder in reversed(_sorted_by_number(folders))}
    for folder in reversed(seen.values()):
        if not sysfs.is_visible(folder / "scaling_max_freq") or _is_policy_off(system, folder):
            continue  # a control with an unreadable limit stays, for its restoration
        listed, hidden = _listed_values(folder / "scaling_available_frequencies")
        yield ClockControl(
            name=folder.name if folder.name != "cpufreq" else folder.parent.name,
            kind="cpu",
            listed=listed,
            unit_hz=1000,
            governor=_existing_or_none(folder / "scaling_governor"),
            low=_existing_or_none(folder / "scaling_min_freq"),
            high=_existing_or_none(folder / "scaling_max_freq"),
            now=_existing_or_none(folder / "scaling_cur_freq"),
            hidden=hidden,
        )


def _is_policy_off(system: Path, folder: Path) -> bool:
    # A core without a file "online" cannot be turned off. Without a list of cores, an unreadable limit means off.
    cores = (read_line(folder / "related_cpus") or "").split()
    if not cores:
        return read_number(folder / "scaling_max_freq") is None
    return all(read_line(system / f"cpu{core}/online") == "0" for core in cores)


def _devfreq_controls(root: Path) -> Iterable[ClockControl]:
    for folder in sysfs.list_matches(root / "sys/class/devfreq", "*"):
        name = read_line(folder / "device/of_node/name") or folder.name
        gpu = any(part in name for part in GPUS) and "nvd" not in name  # Thor's video engines are no GPU cores
        if (gpu or folder.name == "bwmgr") and sysfs.is_visible(folder / "max_freq"):
            listed, hidden = _listed_values(folder / "available_frequencies")
            yield ClockControl(
                name=folder.name if gpu else "emc",
                kind="gpu" if gpu else "emc",
                listed=listed,
                governor=_existing_or_none(folder / "governor"),
                low=_existing_or_none(folder / "min_freq"),
                high=_existing_or_none(folder / "max_freq"),
                now=_existing_or_none(folder / "cur_freq"),
                hidden=hidden,
            )


def _emc_controls(root: Path, modes: Sequence[PowerMode]) -> Iterable[ClockControl]:
    # Without debugfs the list stays empty, because the caps of the modes could be mistaken for all rates.
    cap = next((path for path in (root / cap for cap in EMC_CAPS) if sysfs.is_visible(path)), None)
    clock = root / EMC / "clk/emc"
    rate, lock = _existing_or_none(clock / "rate"), _existing_or_none(clock / "mrq_rate_locked")
    if rate is None or lock is None:
        rate = lock = None
    if cap is None and lock is None:
        return
    khz, hidden = _listed_values(root / EMC / "emc/possible_rates")
    listed, hidden = tuple(each * 1000 for each in khz), hidden or sysfs.is_forbidden(clock / "max_rate")
    if not listed and not hidden:
        told = {read_number(clock / "min_rate"), read_number(clock / "max_rate"), *(mode.emc_hz for mode in modes)}
        listed = tuple(sorted(hz for hz in told if hz))
    yield ClockControl("emc", "emc", listed, high=cap, now=rate, rate=rate, lock=lock, hidden=hidden and not listed)


# -- what to write --------------------------------------------------------------------------------


def pin_writes(levers: ClockControls, point: OperatingPoint) -> list[ControlWrite]:
    """Return the writes that pin the clocks at a point, in order, after its mode is set.

    Raises:
        ClockError: If the point names nothing to set, or a value that this board does not list.
    """
    wanted: tuple[tuple[Kind, float | None], ...] = (
        ("cpu", point.cpu_hz),
        ("gpu", point.gpu_hz),
        ("emc", point.emc_hz),
    )
    writes: list[ControlWrite] = []
    for kind, hz in wanted:
        if hz is None:
            continue
        if not levers.controls_of_kind(kind):
            raise ClockError(f"this board shows no {kind} clock that can be set: leave {kind} out of {point.name!r}")
        for lever in levers.controls_of_kind(kind):
            value = lever.nearest_value(hz)
            writes += lever.limit_writes(value)
            if lever.rate is not None and lever.lock is not None:
                writes += [ControlWrite(lever, lever.rate, value), ControlWrite(lever, lever.lock, 1)]
    if not writes and levers.find_mode(point.name) is None:
        known = ", ".join(mode.name for mode in levers.modes) or "none"
        raise ClockError(f"{point.name!r} says no frequency and is no mode of this board; its modes: {known}")
    return writes


def restore_writes(
    levers: ClockControls, saved: BoardControlState, kinds: Iterable[Kind] = ("cpu", "gpu", "emc")
) -> list[ControlWrite]:
    """Return the writes that restore clocks of these kinds, once the saved mode is set."""
    found = {lever.name: lever for lever in levers.found if lever.kind in kinds}
    writes: list[ControlWrite] = []
    for old in saved.levers:
        lever = found.get(old.name)
        if lever is None or not lever.listed:
            continue  # never held: clocks without a list cannot be
        if lever.governor is not None and old.governor and read_line(lever.governor) != old.governor:
            writes.append(ControlWrite(lever, lever.governor, old.governor))
        if old.high is not None:
            writes += lever.limit_writes(old.high, low=old.low)
        if lever.lock is not None and lever.rate is not None and old.lock is not None:
            if old.lock and old.rate is not None:
                writes.append(ControlWrite(lever, lever.rate, old.rate))
            writes.append(ControlWrite(lever, lever.lock, old.lock))
    return writes


def read_back(writes: Iterable[ControlWrite]) -> list[tuple[ControlWrite, str | None]]:
    """Return the last write to each file, with the present content of the file."""
    last = {write.file: write for write in writes}
    return [(write, read_line(write.file)) for write in last.values()]


# -- files ----------------------------------------------------------------------------------------


def read_line(path: Path | None) -> str | None:
    """Return the text of a file, or None without a path or a readable text."""
    return None if path is None else sysfs.read_line(path)


def read_number(path: Path | None) -> int | None:
    """Return the integer in a file, or None without a path or an integer."""
    return None if path is None else sysfs.read_int(path)


def _listed_values(path: Path) -> tuple[tuple[int, ...], bool]:
    """Return the positive integers of a list, ascending, and whether the list is hidden."""
    words = (read_line(path) or "").split()
    return tuple(sorted({int(word) for word in words if word.isdigit() and int(word) > 0})), sysfs.is_forbidden(path)


def _existing_or_none(path: Path) -> Path | None:
    return path if sysfs.is_visible(path) else None


def _sorted_by_number(folders: Iterable[Path]) -> list[Path]:
    return sorted(folders, key=lambda folder: [int(found) for found in re.findall(r"\d+", "/".join(folder.parts[-2:]))])
