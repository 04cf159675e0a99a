"""Files of Jetson boards in a root file system, and the profiles expected from agents there."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedquilt.core import OperatingPoint, Profile
from fedquilt.edge_agent import devices
from fedquilt.edge_agent.clocks import controls
from fedquilt.edge_agent.clocks.client import HelperStatus
from fedquilt.edge_agent.clocks.helper import read_clock_state
from fedquilt.wire import Telemetry
from tests.fake_boards import BOARDS, write_fake_board

Layout = tuple[str, int]  # board, JetPack
EVERY: Final[tuple[Layout, ...]] = tuple(
    (board, jetpack) for board, layout in BOARDS.items() for jetpack in layout.jetpacks
)
DEBUG: Final = "sys/kernel/debug"
ROOT_ONLY: Final = 0o700
KEPT: Final = ("etc/nv_tegra_release", "etc/nvpmodel.conf", "etc/nvpmodel", "var/lib/nvpmodel")  # L4T's, on its disk
SAME: Final = 1e-6  # of readings that went over the wire as numbers


def write_layout(layout: Layout, tree: Path, root: Path) -> Path:
    shutil.rmtree(tree, ignore_errors=True)
    write_fake_board(tree, *layout)
    shutil.rmtree(tree / "sys/fs", ignore_errors=True)  # control groups are the kernel's own that it runs on
    (tree / "sys/fs/cgroup").mkdir(parents=True)
    (tree / DEBUG).chmod(ROOT_ONLY)
    for policy in (tree / "sys/devices/system/cpu/cpufreq").glob("policy*"):
        shutil.copyfile(policy / "scaling_cur_freq", policy / "cpuinfo_cur_freq")
        (policy / "cpuinfo_cur_freq").chmod(0o400)  # as kernels have it
    for name in KEPT:
        _replace(tree / name, root / name)
    return tree / "sys"


def _replace(source: Path, target: Path) -> None:
    if target.is_symlink() or target.is_file():
        target.unlink()
    elif target.is_dir():
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


@dataclass(frozen=True)
class ExpectedProfile:
    board: str
    points: tuple[OperatingPoint, ...]
    provenance: str
    power_w: float | None
    temperature_c: float | None


class _FakeClockHelper:
    def __init__(self, tree: Path) -> None:
        self._tree = tree

    def request_status(self) -> HelperStatus:
        found = controls.discover_controls(self._tree)
        return HelperStatus(
            clocks=tuple(map(read_clock_state, found.controls)), modes=tuple(mode.name for mode in found.modes)
        )

    def pin(self, point: OperatingPoint) -> OperatingPoint:
        return point

    def unpin(self) -> None: ...

    def send_keepalive(self, now_s: float) -> None: ...


def read_expected_profile(tree: Path) -> ExpectedProfile:
    device = devices.create_device("auto", tree, connect=lambda: _FakeClockHelper(tree))
    reading = device.read_sensors(0.0)
    return ExpectedProfile(
        device.board, tuple(device.points), device.provenance, reading.power_w, reading.temperature_c
    )


def find_differences(wanted: ExpectedProfile, profile: Profile, telemetry: Telemetry | None) -> list[str]:
    found = []
    if profile.board != wanted.board:
        found.append(f"it calls itself {profile.board!r} and is {wanted.board!r}")
    missing = {point.name for point in wanted.points} - {point.name for point in profile.points}
    if missing or len(profile.points) != len(wanted.points):
        found.append(f"it tells {len(profile.points)} of {len(wanted.points)} operating points")
    elif tuple(profile.points) != wanted.points:
        found.append("its operating points have other figures")
    if profile.provenance != wanted.provenance:
        found.append(f"its figures come from {profile.provenance!r}, not {wanted.provenance!r}")
    if telemetry is None:
        found.append("it tells no readings")
        return found
    for name, unit in (("power_w", "W"), ("temperature_c", "degrees")):
        true, said = getattr(wanted, name), getattr(telemetry, name)
        if (true is None) != (said is None) or (true is not None and not math.isclose(true, said, rel_tol=SAME)):
            found.append(f"it tells {said} {unit} where the board has {true}")
    return found


def read_clock_files(tree: Path) -> dict[str, str]:
    names = {"scaling_min_freq", "scaling_max_freq", "scaling_governor", "min_freq", "max_freq", "governor"}
    names |= {"emc", "emc_iso_cap", "mrq_rate_locked"}
    found = {}
    for folder, _, files in os.walk(tree / "sys"):
        for name in sorted(names.intersection(files)):
            path = Path(folder) / name
            found[str(path.relative_to(tree))] = path.read_text().strip()
    return found
