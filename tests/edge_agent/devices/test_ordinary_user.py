"""Boards read by an ordinary user, to whom debugfs is shut: what root alone may read is not known, and no error."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ordinary import Served, User

from fedquilt import profiles
from fedquilt.core import ClockError, Device, JobError, OperatingPoint
from fedquilt.edge_agent import devices
from fedquilt.edge_agent.clocks import controls
from fedquilt.edge_agent.clocks.client import ClockClient, HelperStatus
from fedquilt.edge_agent.devices.linux import LinuxDevice
from fedquilt.tools.boards import doctor
from fedquilt.tools.boards.doctor import machine_facts
from fedquilt.tools.boards.doctor.agent import Facts
from fedquilt.tools.boards.doctor.findings import run_checks
from tests.fake_boards import BOARDS, write_fake_board

EVERY = [(board, jetpack) for board, layout in BOARDS.items() for jetpack in layout.jetpacks]
ONE_EACH = list({jetpack: (board, jetpack) for board, jetpack in EVERY}.values())  # a board of each JetPack
DEBUG = "sys/kernel/debug"
# operating points that each board offers in the power mode it is planted in
OFFERED = {
    "jetson-nano": 180,
    "jetson-tx2": 198,
    "jetson-xavier-nx": 83,
    "jetson-agx-xavier": 186,
    "jetson-orin-nano": 190,
    "jetson-orin-nano-4gb": 191,
    "jetson-orin-nano-super": 127,
    "jetson-orin-nx": 192,
    "jetson-orin-nx-8gb": 85,
    "jetson-orin-nx-super": 147,
    "jetson-agx-orin": 56,
    "jetson-agx-orin-32gb": 74,
    "jetson-agx-orin-industrial": 180,
    "jetson-agx-thor": 40,
}


class Unheard:
    """A clock helper that tells nothing: what a board has then is what its process reads."""

    def request_status(self) -> HelperStatus:
        return HelperStatus(clocks=())

    def send_keepalive(self, now_s: float) -> None:
        pass


@pytest.fixture
def planted(user: User) -> Callable[..., tuple[Path, Path]]:
    """Plants boards twice: as the user sees it, debugfs shut, and as root does."""

    def both(board: str, jetpack: int) -> tuple[Path, Path]:
        seen, whole = user.folder / "seen", user.folder / "whole"
        for root in (seen, whole):
            write_fake_board(root, board, jetpack)
        user.shut(seen / DEBUG)
        return seen, whole

    return both


def board_of(root: Path, connect: Callable[[], Any] = lambda: None) -> Device:
    return devices.create_device("auto", root, connect=connect)


def shown(points: tuple[OperatingPoint, ...]) -> list[Any]:
    return [[point.name, point.cpu_hz, point.gpu_hz, point.emc_hz] for point in points]


def reads_all(seen: Path) -> Any:
    assert not os.access(seen / DEBUG, os.R_OK)
    device = board_of(seen)
    assert isinstance(device, LinuxDevice)
    return [device.mode, device.memory_bytes, [point.name for point in device.points], device.read_sensors(0.0)]


@pytest.mark.parametrize(("board", "jetpack"), ONE_EACH)
def test_a_board_is_read_with_debugfs_shut(user: User, planted: Any, board: str, jetpack: int):
    seen, whole = planted(board, jetpack)
    device = board_of(whole)
    reading = device.read_sensors(0.0)
    assert isinstance(device, LinuxDevice)
    mode, memory_bytes, points, told = user.does(reads_all, seen)
    assert (mode, memory_bytes) == (device.mode, device.memory_bytes)
    assert points == [point.name for point in device.points]
    assert (told["power_w"], told["temperature_c"]) == (reading.power_w, reading.temperature_c)


def finds_levers(seen: Path) -> Any:
    found = controls.discover_controls(seen)
    assert [lever.name for lever in found.hidden_controls] == ["emc"]
    return [[lever.name, lever.listed_values] for lever in found.controls]


@pytest.mark.parametrize(("board", "jetpack"), [pair for pair in ONE_EACH if pair[1] < 7])  # Thor has a devfreq device
def test_the_memory_clock_is_known_and_its_frequencies_are_not(user: User, planted: Any, board: str, jetpack: int):
    """The caps of the modes are no list: on a TX2 they end below its highest clock, and 3 of 198 points were left."""
    seen, whole = planted(board, jetpack)
    as_root = [
        [lever.name, [] if lever.kind == "emc" else list(lever.listed_values)]
        for lever in controls.discover_controls(whole).controls
    ]
    assert user.does(finds_levers, seen) == as_root
    assert controls.discover_controls(whole).hidden_controls == ()


def holds_one(seen: Path, socket: Path) -> Any:
    device = board_of(seen, lambda: ClockClient.connect(socket))
    point = next(point for point in reversed(device.points) if point.emc_hz is not None)
    held = device.pin_clocks(point)
    device.unpin_clocks()
    assert (held.cpu_hz, held.gpu_hz, held.emc_hz) == (point.cpu_hz, point.gpu_hz, point.emc_hz)
    return shown(device.points)


@pytest.mark.parametrize(("board", "jetpack"), [pair for pair in EVERY if pair[0] in profiles.board_names()])
def test_with_the_helper_a_board_has_every_point_that_root_sees(user: User, planted: Any, board: str, jetpack: int):
    seen, whole = planted(board, jetpack)
    wanted = shown(board_of(whole, Unheard).points)
    with Served(whole if not user.root else seen, user.folder / "run", user.gid) as served:
        assert user.does(holds_one, seen, served.path) == wanted
    assert len(wanted) == OFFERED[board]
    assert any(emc is not None for *_, emc in wanted)


class Handler(logging.Handler):
    said: list[str] = []  # noqa: RUF012

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def reads_thrice(seen: Path) -> Any:
    logger = logging.getLogger("fedquilt.devices")
    logger.setLevel(logging.INFO)
    logger.addHandler(Handler())
    device = board_of(seen, Unheard)
    for second in range(3):
        assert device.points
        device.read_sensors(float(second))
    return [Handler.said, shown(device.points)]


def test_a_helper_that_cannot_read_the_lists_either_is_no_error(user: User, planted: Any):
    seen, _ = planted("jetson-orin-nx", 6)
    said, points = user.does(reads_thrice, seen)
    assert len(said) == 1
    assert said[0].startswith("frequencies of emc are unknown")
    assert len(points) > 50
    assert {emc for *_, emc in points} == {None}


def is_refused(seen: Path, socket: Path) -> Any:
    device = board_of(seen, lambda: ClockClient.connect(socket))
    with pytest.raises(ClockError, match="cannot be set without a clock helper"):
        device.pin_clocks(device.points[0])
    return [device.adjustable, machine_facts._read_helper_status(socket)]


def test_whom_the_helper_does_not_know_has_the_board_without_its_clocks(user: User, planted: Any):
    if not user.root:
        pytest.skip("the helper of an ordinary user's suite is that user's own")
    seen, _ = planted("jetson-orin-nx", 6)
    with Served(seen, user.folder / "run", None) as served:
        told = user.does(is_refused, seen, served.path)
        fault = machine_facts.HelperFault(
            "not permitted", f"this user may not connect to the clock helper at {served.path}"
        )
        assert told == [False, list(fault)]


# -- everything else that root alone may read -----------------------------------------------------


def looked_at(root: Path) -> Any:
    """Read a board, its clocks and what the doctor asks about; numbers of findings that are not ok."""
    device = board_of(root)
    device.read_sensors(0.0)
    device.read_sensors(1.0)
    controls.discover_controls(root).read_state(None)
    controls.hottest_zone_c(root)
    seen = machine_facts.read_machine(root, 1.8e9, 0.0)
    return [one.number for one in run_checks(doctor.CHECKS, Facts(seen)) if one.severity == "error"]


def richly(root: Path, board: str, jetpack: int) -> None:
    """A board with everything else that is read on some host."""
    write_fake_board(root, board, jetpack)
    for folder, files in {
        "sys/class/powercap/intel-rapl:0": {"name": "package-0", "energy_uj": 5, "max_energy_range_uj": 100},
        "sys/class/power_supply/BAT0": {"type": "Battery", "status": "Discharging", "power_now": 5},
        "sys/class/hwmon/hwmon9": {"name": "coretemp", "temp1_input": 40000, "power1_input": 5, "power1_average": 5},
        "sys/fs/cgroup": {"cgroup.controllers": "memory"},
        "sys/class/dmi/id": {"product_name": "a board"},
        "proc/driver/nvidia": {"version": "x"},
        "run/fedquilt": {},
        "usr/sbin": {"nvpmodel": "x"},
        "etc/systemd/system/fedquilt-agent.service.d": {"memory.conf": "x"},
    }.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (root / folder / name).write_text(f"{text}\n")


def folders_of(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_dir() and not path.is_symlink())


def looked_at_with_each_shut(root: Path) -> dict[str, Any]:
    """What is found with each of this user's own folders shut in turn, where anything is."""
    found: dict[str, Any] = {}
    for folder in folders_of(root):
        mode = folder.stat().st_mode & 0o777
        folder.chmod(0)
        assert not os.access(folder, os.R_OK)
        try:
            found[str(folder.relative_to(root))] = looked_at(root)
        except JobError as error:
            found[str(folder.relative_to(root))] = str(error)
        folder.chmod(mode)
    return {name: told for name, told in found.items() if told != []}


@pytest.mark.parametrize(
    ("board", "jetpack"), [pytest.param("jetson-tx2", 4, marks=pytest.mark.nightly), ("jetson-orin-nx", 6)]
)
def test_any_folder_may_be_shut(user: User, board: str, jetpack: int):
    root = user.folder / "board"
    richly(root, board, jetpack)
    folders = folders_of(root)
    assert len(folders) > 50
    for folder in folders:
        user.owns(folder)
    found = user.does(looked_at_with_each_shut, root)
    assert found.keys() == {"proc"}
    assert "run on Linux" in found["proc"]


def reads_what_is_left(root: Path) -> Any:
    assert looked_at(root) == []
    device = board_of(root)
    reading = device.read_sensors(0.0)
    assert (reading.power_w, reading.energy_j, reading.temperature_c, reading.battery) == (None, None, None, None)
    assert reading.available_bytes is not None
    return [shown(device.points), controls.read_mode_name(root)]


@pytest.mark.parametrize(("board", "jetpack"), [("jetson-tx2", 4), ("jetson-orin-nx", 6)])
def test_all_files_may_be_shut_but_that_of_the_memory(user: User, board: str, jetpack: int):
    """RAPL's counters (0400 since 2020), rails, limits of clocks, nvpmodel's: nothing is known, nothing is guessed."""
    root = user.folder / "board"
    richly(root, board, jetpack)
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.name != "meminfo":
            user.shut(path)
    points, mode = user.does(reads_what_is_left, root)
    assert mode is None
    assert all(hz is None for _, *clocks in points for hz in clocks)


def asks_for_the_mode(root: Path) -> Any:
    device = board_of(root)
    seen = Facts(machine_facts.read_machine(root, 1.8e9, 0.0))
    told = {one.number: one.sentence for one in run_checks(doctor.CHECKS, seen)}
    assert isinstance(device, LinuxDevice)
    return [device.mode, len(device.points) > 1, told["FQ160"]]


def test_a_mode_that_may_not_be_read_is_not_the_catalogues_default(user: User):
    root = user.folder / "board"
    write_fake_board(root, "jetson-tx2", 4)
    user.shut(root / "var/lib/nvpmodel/status")
    mode, several, said = user.does(asks_for_the_mode, root)
    assert (mode, several) == (None, True)
    assert said.startswith("the power mode is unknown: only root")


def is_no_board(root: Path) -> str:
    with pytest.raises(JobError) as raised:
        board_of(root)
    return str(raised.value)


def test_a_memory_file_that_may_not_be_read_is_told(user: User):
    root = user.folder / "board"
    write_fake_board(root, "jetson-tx2", 4)
    user.shut(root / "proc/meminfo")
    assert "has no memory size" in user.does(is_no_board, root)
