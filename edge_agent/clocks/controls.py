"""Clock controls of a board in its kernel: CPU policies, GPU and memory clocks, and power modes.

A frequency is pinned by setting both limits to it under the board's own governor, as NVIDIA's `jetson_clocks` does. The
memory clock (EMC) is pinned by its cap and, where debugfs has them, by its rate and lock. Only listed frequencies can
be pinned. This module plans writes and writes nothing.

The frequencies of the memory clock are in debugfs, which only root can read on nearly every board. Other users get an
empty list marked as hidden, and request the list from the clock helper.

A power mode of a Jetson turns cores off and caps clocks. nvpmodel's catalogue of modes is in /etc/nvpmodel.conf. Ids
differ between releases, so a mode is identified by its name. nvpmodel stores the id of the mode set last in
/var/lib/nvpmodel/status ("pmode:0002").
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal, NamedTuple

from fedquilt.core import ClockError, OperatingPoint, WireMessage
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
    gpu_masks: tuple[str, ...] = ()  # masks of GPU parts that are off, which change only at boot
    caps: tuple[ClockCap, ...] = ()
    offline_cores: frozenset[int] = frozenset()  # cores that the mode turns off

    @property
    def emc_hz(self) -> int | None:
        return next((cap.value for cap in self.caps if cap.clock == "EMC" and cap.value < UNCAPPED), None)

    def caps_for_clock(self, kind: str, file: Path | None) -> list[int]:
        """Return the caps of a clock in this mode, in the unit of `file`, which limits the clock.

        All caps of the kind (cpu, gpu or emc) are returned if the catalogue does not name the file.
        """
        caps_of_kind = [cap for cap in self.caps if _clock_kind(cap.clock) == kind]
        control_path = os.path.realpath(file) if file is not None else ""
        return [cap.value for cap in [cap for cap in caps_of_kind if control_path in cap.files] or caps_of_kind]


def read_modes(root: Path) -> tuple[PowerMode, ...]:
    """Return the modes in the order of the catalogue, or () without a catalogue.

    Sections are `< PARAM TYPE=CLOCK NAME=GPU >` with lines `MAX_FREQ path`, and `< POWER_MODEL ID=1 NAME=MAXQ >` with
    lines `PARAMETER ARGUMENT value`.
    """
    text = sysfs.read_text(root / CONF)
    return () if text is None else _parse_modes(root, text)


@lru_cache(maxsize=32)
def _parse_modes(root: Path, text: str) -> tuple[PowerMode, ...]:
    modes: list[PowerMode] = []
    files_by_clock: dict[str, list[str]] = {}
    clock_name = ""
    for line in text.splitlines():
        fields = line.split()
        if header := re.match(r"<\s*(\w+)(?:\s+ID=(\d+))?(?:\s+TYPE=\w+)?(?:\s+NAME=([^\s>]+))?", line):
            clock_name = header[3] or "" if header[1] == "PARAM" else ""
            if header[1] == "POWER_MODEL" and header[2] and header[3]:
                modes.append(PowerMode(header[3], int(header[2])))
            elif modes:
                break  # the modes end here
        elif clock_name and len(fields) == 2 and fields[0].startswith("MAX_FREQ"):
            files_by_clock.setdefault(clock_name, []).append(os.path.realpath(root / fields[1].lstrip("/")))
        elif modes and len(fields) == 3 and not line.startswith("#"):
            modes[-1] = _parse_mode_line(modes[-1], fields, files_by_clock)
    return tuple(modes)


def _parse_mode_line(mode: PowerMode, fields: list[str], files_by_clock: dict[str, list[str]]) -> PowerMode:
    clock, argument, value = fields
    if argument.endswith("PG_MASK"):
        return replace(mode, gpu_masks=(*mode.gpu_masks, " ".join(fields)))
    if argument == "MAX_FREQ" and _clock_kind(clock) and re.fullmatch(r"-?\d+", value):
        cap = int(value) if int(value) > 0 else UNCAPPED
        return replace(mode, caps=(*mode.caps, ClockCap(clock, cap, tuple(files_by_clock.get(clock, ())))))
    if clock == "CPU_ONLINE" and value == "0" and (core := re.fullmatch(r"CORE_(\d+)", argument)):
        return replace(mode, offline_cores=mode.offline_cores | {int(core[1])})
    return mode


def _clock_kind(clock: str) -> str:
    return "cpu" if clock.startswith("CPU_") else {"GPU": "gpu", "EMC": "emc"}.get(clock, "")


def read_mode_name(root: Path) -> str | None:
    """Return the name of the present mode, or the catalogue's default if none was ever set.

    The result is None if there is no catalogue, the catalogue lacks the mode, or this user may not read the status.
    """
    if sysfs.is_forbidden(root / STATUS):
        return None
    status = re.search(r"pmode:(\d+)", sysfs.read_text(root / STATUS) or "")
    default = re.search(r"<\s*PM_CONFIG\s+DEFAULT=(\d+)", sysfs.read_text(root / CONF) or "")
    match = status or default
    mode_names = {mode.id: mode.name for mode in read_modes(root)}
    return mode_names.get(int(match[1])) if match is not None else None


def status_fingerprint(root: Path) -> str | None:
    """Return a text that changes whenever nvpmodel sets a mode, or None without nvpmodel's status."""
    text = sysfs.read_text(root / STATUS)
    try:
        return None if text is None else f"{text.strip()}@{(root / STATUS).stat().st_mtime_ns}"
    except OSError:
        return None


def normalize_mode_name(name: str) -> str:
    """Return a mode's name in the same form for all JetPack releases: lower case and without "MODE_"."""
    return name.lower().replace(" ", "_").removeprefix("mode_")


def is_same_mode(left: str | None, right: str | None) -> bool:
    return left is not None and right is not None and normalize_mode_name(left) == normalize_mode_name(right)


TOLERANCE: Final = 0.01  # 1421 is accepted for 1420.8 MHz
GPUS: Final = ("gv11b", "gp10b", "ga10b", "gb10b", "gpu")
EMC: Final = "sys/kernel/debug/bpmp/debug"  # readable by root only
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
    mode: str | None  # power modes by name
    controls: tuple[ControlState, ...]


@dataclass(frozen=True)
class ClockControl:
    name: str  # "policy0", "17000000.gpu", "emc"
    kind: Kind
    listed_values: tuple[int, ...]  # ascending, in `unit_hz`, or () if none is listed and the clock cannot be pinned
    unit_hz: int = 1
    governor: Path | None = None
    low: Path | None = None
    high: Path | None = None
    current: Path | None = None
    rate: Path | None = None  # rate file of the memory clock, if debugfs has it
    lock: Path | None = None
    is_list_hidden: bool = False  # whether this process may not read the list

    @property
    def listed_hz(self) -> tuple[float, ...]:
        return tuple(float(value * self.unit_hz) for value in self.listed_values)

    def read_state(self) -> ControlState:
        low, high, rate, lock = (read_number(path) for path in (self.low, self.high, self.rate, self.lock))
        return ControlState(name=self.name, governor=read_line(self.governor), low=low, high=high, rate=rate, lock=lock)

    def listed_value_at(self, hz: float) -> int:
        """Return the listed value at `hz`, in `unit_hz`. Raise ClockError if none is within TOLERANCE."""
        nearest = min(self.listed_values, key=lambda value: abs(value * self.unit_hz - hz), default=None)
        if nearest is None or abs(nearest * self.unit_hz - hz) > TOLERANCE * hz:
            listed_text = ", ".join(f"{value * self.unit_hz / 1e6:g}" for value in self.listed_values)
            raise ClockError(
                f"{self.name} ({self.kind}) has no {hz / 1e6:g} MHz: "
                + (f"choose one of {listed_text} MHz" if listed_text else self._explain_missing_list())
            )
        return nearest

    def _explain_missing_list(self) -> str:
        if self.is_list_hidden:
            return "only root can read the list of frequencies, so run as root or start the clock helper"
        return "the board lists no frequencies of this clock, so leave the clock out"

    def limit_writes(self, value: int, *, low: int | None = None) -> list[ControlWrite]:
        """Return the writes that set the upper limit to `value` and the lower to `low` (default: `value`)."""
        writes = []
        if self.low is not None:
            writes.append(ControlWrite(self, self.low, min(self.listed_values[0], value if low is None else low)))
        if self.high is not None:
            writes.append(ControlWrite(self, self.high, value))
        if self.low is not None:
            writes.append(ControlWrite(self, self.low, value if low is None else low))
        return writes


@dataclass(frozen=True)
class ControlWrite:
    control: ClockControl
    file: Path
    value: int | str

    def __str__(self) -> str:
        return f"write {self.value} to {self.file} ({self.control.name})"

    def is_applied(self, value: str | None) -> bool:
        """Return whether the value read back matches the written one. Memory clocks may be rounded up."""
        if value == str(self.value):
            return True
        if self.control.kind != "emc" or self.file not in (self.control.rate, self.control.high):
            return False
        if value is None or not value.isdigit():
            return False
        candidates = [
            listed_value
            for listed_value in (*self.control.listed_values, int(self.value))
            if listed_value >= int(self.value)
        ]
        return any(abs(int(value) - listed_value) <= TOLERANCE * listed_value for listed_value in candidates)


@dataclass(frozen=True)
class ClockControls:
    controls: tuple[ClockControl, ...]
    modes: tuple[PowerMode, ...] = ()

    @property
    def hidden_controls(self) -> tuple[ClockControl, ...]:
        return tuple(control for control in self.controls if control.is_list_hidden)

    def controls_of_kind(self, kind: Kind) -> list[ClockControl]:
        return [control for control in self.controls if control.kind == kind]

    def read_state(self, mode: str | None) -> BoardControlState:
        return BoardControlState(mode=mode, controls=tuple(control.read_state() for control in self.controls))

    def find_mode(self, name: str | None) -> PowerMode | None:
        """Return the mode of this name, or None. Capitals, blanks and the prefix MODE_ are ignored."""
        return next((mode for mode in self.modes if is_same_mode(mode.name, name)), None)


# -- discovery ------------------------------------------------------------------------------------


def discover_controls(root: Path = Path("/")) -> ClockControls:
    """Return the clock controls below `root`. Clocks without listed frequencies cannot be pinned."""
    modes = read_modes(root)
    return ClockControls((*_cpu_controls(root), *_devfreq_controls(root), *_emc_controls(root, modes)), modes)


def offline_policies(root: Path, saved: BoardControlState, mode: PowerMode | None) -> list[str]:
    """Return the saved CPU policies whose cores are all off, unless `mode` turns them off too.

    The kernel accepts no limit for such a policy and keeps the old limits until a core is on again.
    """
    system, policies = root / "sys/devices/system/cpu", []
    for state in saved.controls:
        folder = system / "cpufreq" / state.name
        cores = {int(core) for core in (read_line(folder / "related_cpus") or "").split() if core.isdigit()}
        if cores and _is_policy_off(system, folder) and not (mode is not None and cores <= mode.offline_cores):
            policies.append(state.name)
    return policies


def hottest_zone_c(root: Path = Path("/")) -> float | None:
    return sysfs.hottest_temperature_c(sysfs.thermal_zone_files(root / "sys/class/thermal"))


def _cpu_controls(root: Path) -> Iterable[ClockControl]:
    system = root / "sys/devices/system/cpu"
    folders = sysfs.list_matches(system, "cpufreq/policy[0-9]*") or sysfs.list_matches(system, "cpu[0-9]*/cpufreq")
    unique_folders = {folder.resolve(): folder for folder in reversed(_sorted_by_number(folders))}
    for folder in reversed(unique_folders.values()):
        if not sysfs.is_visible(folder / "scaling_max_freq") or _is_policy_off(system, folder):
            continue  # a control with an unreadable limit stays, for its restoration
        listed_values, is_list_hidden = _listed_values(folder / "scaling_available_frequencies")
        yield ClockControl(
            name=folder.name if folder.name != "cpufreq" else folder.parent.name,
            kind="cpu",
            listed_values=listed_values,
            unit_hz=1000,
            governor=_existing_or_none(folder / "scaling_governor"),
            low=_existing_or_none(folder / "scaling_min_freq"),
            high=_existing_or_none(folder / "scaling_max_freq"),
            current=_existing_or_none(folder / "scaling_cur_freq"),
            is_list_hidden=is_list_hidden,
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
        is_gpu = any(part in name for part in GPUS) and "nvd" not in name  # Thor's video engines are no GPU cores
        if (is_gpu or folder.name == "bwmgr") and sysfs.is_visible(folder / "max_freq"):
            listed_values, is_list_hidden = _listed_values(folder / "available_frequencies")
            yield ClockControl(
                name=folder.name if is_gpu else "emc",
                kind="gpu" if is_gpu else "emc",
                listed_values=listed_values,
                governor=_existing_or_none(folder / "governor"),
                low=_existing_or_none(folder / "min_freq"),
                high=_existing_or_none(folder / "max_freq"),
                current=_existing_or_none(folder / "cur_freq"),
                is_list_hidden=is_list_hidden,
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
    khz, is_list_hidden = _listed_values(root / EMC / "emc/possible_rates")
    listed_values, is_list_hidden = (
        tuple(value * 1000 for value in khz),
        is_list_hidden or sysfs.is_forbidden(clock / "max_rate"),
    )
    if not listed_values and not is_list_hidden:
        known_hz = {read_number(clock / "min_rate"), read_number(clock / "max_rate"), *(mode.emc_hz for mode in modes)}
        listed_values = tuple(sorted(hz for hz in known_hz if hz))
    yield ClockControl(
        "emc",
        "emc",
        listed_values,
        high=cap,
        current=rate,
        rate=rate,
        lock=lock,
        is_list_hidden=is_list_hidden and not listed_values,
    )


# -- planned writes -------------------------------------------------------------------------------


def pin_writes(clock_controls: ClockControls, point: OperatingPoint) -> list[ControlWrite]:
    """Return the writes that pin a point. Raise ClockError if the board has no such clock or frequency."""
    requested_clocks: tuple[tuple[Kind, float | None], ...] = (
        ("cpu", point.cpu_hz),
        ("gpu", point.gpu_hz),
        ("emc", point.emc_hz),
    )
    writes: list[ControlWrite] = []
    for kind, hz in requested_clocks:
        if hz is None:
            continue
        if not clock_controls.controls_of_kind(kind):
            raise ClockError(f"{point.name!r} sets the {kind} clock, which this board cannot set: leave {kind} out")
        for control in clock_controls.controls_of_kind(kind):
            value = control.listed_value_at(hz)
            writes += control.limit_writes(value)
            if control.rate is not None and control.lock is not None:
                writes += [ControlWrite(control, control.rate, value), ControlWrite(control, control.lock, 1)]
    if not writes and clock_controls.find_mode(point.name) is None:
        mode_names = ", ".join(mode.name for mode in clock_controls.modes) or "none"
        raise ClockError(f"{point.name!r} has no frequency and is not a mode of this board: choose one of {mode_names}")
    return writes


def restore_writes(
    clock_controls: ClockControls, saved: BoardControlState, kinds: Iterable[Kind] = ("cpu", "gpu", "emc")
) -> list[ControlWrite]:
    controls_by_name = {control.name: control for control in clock_controls.controls if control.kind in kinds}
    writes: list[ControlWrite] = []
    for state in saved.controls:
        control = controls_by_name.get(state.name)
        if control is None or not control.listed_values:
            continue  # clocks without a list cannot be pinned
        if control.governor is not None and state.governor and read_line(control.governor) != state.governor:
            writes.append(ControlWrite(control, control.governor, state.governor))
        if state.high is not None:
            writes += control.limit_writes(state.high, low=state.low)
        if control.lock is not None and control.rate is not None and state.lock is not None:
            if state.lock and state.rate is not None:
                writes.append(ControlWrite(control, control.rate, state.rate))
            writes.append(ControlWrite(control, control.lock, state.lock))
    return writes


def read_back(writes: Iterable[ControlWrite]) -> list[tuple[ControlWrite, str | None]]:
    """Return (last write, present content or None if unreadable) of each written file."""
    last_writes = {write.file: write for write in writes}
    return [(write, read_line(write.file)) for write in last_writes.values()]


# -- files ----------------------------------------------------------------------------------------


def read_line(path: Path | None) -> str | None:
    return None if path is None else sysfs.read_line(path)


def read_number(path: Path | None) -> int | None:
    return None if path is None else sysfs.read_int(path)


def _listed_values(path: Path) -> tuple[tuple[int, ...], bool]:
    fields = (read_line(path) or "").split()
    values = {int(field) for field in fields if field.isdigit()} - {0}
    return tuple(sorted(values)), sysfs.is_forbidden(path)


def _existing_or_none(path: Path) -> Path | None:
    return path if sysfs.is_visible(path) else None


def _sorted_by_number(folders: Iterable[Path]) -> list[Path]:
    return sorted(
        folders, key=lambda folder: [int(digits) for digits in re.findall(r"\d+", "/".join(folder.parts[-2:]))]
    )
