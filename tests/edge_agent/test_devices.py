"""Boards: a fake tree of proc and sys stands for the real one; simulated ones are checked by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedquilt import profiles
from fedquilt.core import Cost, JobError, Reading, Work
from fedquilt.edge_agent import devices
from fedquilt.edge_agent.devices.linux import LinuxDevice
from fedquilt.edge_agent.devices.simulated import SimulatedDevice

TOY = """
board = "toy"
title = "for these tests"
memory_bytes = { value = 1000, source = "sheet" }

[sources.sheet]
provenance = "datasheet"
text = "Read in a data sheet that does not exist."

[sources.guess]
provenance = "assumed"
text = "Assumed for the sake of this test."

[[points]]
name = "fast"
flops_per_s = { value = 100, source = "sheet" }
bytes_per_s = { value = 10, source = "guess" }
busy_w = { value = 4, source = "sheet" }

[[points]]
name = "slow"
flops_per_s = { value = 50, source = "sheet" }
busy_w = { value = 3, source = "sheet" }

[[points]]
name = "unknown"
"""


class Tree:
    """A folder that looks like / of a board."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write(
            "proc/meminfo", "MemTotal:        2000 kB\nMemFree: 1 kB\nMemAvailable:    500 kB\nHugePages_Total: 0\n"
        )

    def write(self, path: str, text: object) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{text}\n")

    def zone(self, number: str, name: str, energy_uj: int, range_uj: int = 1000) -> None:
        folder = f"sys/class/powercap/intel-rapl:{number}"
        self.write(f"{folder}/name", name)
        self.write(f"{folder}/energy_uj", energy_uj)
        self.write(f"{folder}/max_energy_range_uj", range_uj)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


# -- this host ------------------------------------------------------------------------------------


def test_what_a_host_cannot_measure_is_none(tree: Tree):
    """With memory alone, every other reading is None, and a task's energy is unknown, never 0."""
    device = LinuxDevice(tree.root)
    assert device.memory_bytes == 2000 * 1024
    reading = device.read(0.0)
    assert reading == Reading(available_bytes=500 * 1024)
    cost = device.cost(Work(flops=1e9), Cost(duration_s=3.0))
    assert (cost.duration_s, cost.energy_j, cost.energy_source) == (3.0, None, None)


def test_energy_is_counted_from_the_start_across_a_wrap(tree: Tree):
    """900 -> 990 -> (wraps at 1000) 40 microjoules is 90, then 90 + 50."""
    tree.zone("0", "package-0", 900)
    device = LinuxDevice(tree.root)
    tree.zone("0", "package-0", 990)
    before = device.read(10.0)
    tree.zone("0", "package-0", 40)
    after = device.read(12.0)
    assert before.energy_j == pytest.approx(90e-6)
    assert after.energy_j == pytest.approx(140e-6)
    assert (before.power_w, after.power_w) == (None, pytest.approx(25e-6))
    assert after.energy_source == "rapl"


def test_packages_and_memory_are_summed_and_nothing_twice(tree: Tree):
    """core is part of package and psys of everything: 10 + 1 + 20 count, 500 and 900 do not."""
    zones = {"0": "package-0", "0:0": "core", "0:1": "dram", "1": "package-1-die-0", "2": "psys"}
    for number, name in zones.items():
        tree.zone(number, name, 0)
    device = LinuxDevice(tree.root)
    for (number, name), spent in zip(zones.items(), (10, 500, 1, 20, 900), strict=True):
        tree.zone(number, name, spent)
    assert device.read(1.0).energy_j == pytest.approx(31e-6)


def test_one_unreadable_package_makes_energy_unknown(tree: Tree):
    """Half of a host's energy would pass for all of it."""
    tree.zone("0", "package-0", 0)
    tree.zone("1", "package-1", 0)
    (tree.root / "sys/class/powercap/intel-rapl:1/energy_uj").unlink()
    assert LinuxDevice(tree.root).read(1.0).energy_j is None


def test_temperature_is_the_hottest_sensor_that_is_on(tree: Tree):
    """A sensor that is off says -256; one that does not answer is left out."""
    for number, text in enumerate(("41500", "-256000", "not ready", "38000")):
        tree.write(f"sys/class/thermal/thermal_zone{number}/temp", text)
    assert LinuxDevice(tree.root).read(0.0).temperature_c == 41.5


def test_the_board_is_called_what_its_firmware_calls_it(tree: Tree):
    """The device tree first, as on ARM boards, then DMI, as on PCs, then the architecture."""
    assert LinuxDevice(tree.root).board.startswith("linux-")
    tree.write("sys/class/dmi/id/product_name", "Mini PC 7")
    assert LinuxDevice(tree.root).board == "Mini PC 7"
    tree.write("proc/device-tree/model", "Some Board Rev 1.0\0")
    assert LinuxDevice(tree.root).board == "Some Board Rev 1.0"


def test_a_host_that_is_no_linux_is_told_what_to_do(tmp_path: Path):
    """The message names the way out: a simulated board."""
    with pytest.raises(JobError, match="name a profile to simulate"):
        devices.make("auto", tmp_path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("")
    with pytest.raises(JobError, match="does not tell the memory"):
        devices.make("auto", tmp_path)


def test_auto_is_this_host():
    """The real tree: memory is known, and what is available is no more than there is."""
    device = devices.make("auto")
    available = device.read(0.0).available_bytes
    assert available is not None
    assert 0 < available <= device.memory_bytes


# -- simulated boards -----------------------------------------------------------------------------


def test_a_simulated_board_takes_the_time_its_profile_says():
    """300 / 100 + 20 / 10 = 5 s at 4 W is 20 J, whatever this host took."""
    device = SimulatedDevice(profiles.parse(TOY, "toy"))
    assert device.read(0.0) == Reading()
    cost = device.cost(Work(flops=300, read_bytes=20), Cost(duration_s=0.01))
    assert (cost.duration_s, cost.energy_j, cost.energy_source) == (5.0, 20.0, "profile toy (assumed)")


def test_another_operating_point_takes_another_time():
    """300 / 50 = 6 s at 3 W is 18 J; no bandwidth in the profile, no time for bytes; all from a data sheet."""
    device = SimulatedDevice(profiles.parse(TOY, "toy"), "slow")
    cost = device.cost(Work(flops=300, read_bytes=20), Cost(duration_s=0.01))
    assert (cost.duration_s, cost.energy_j, cost.energy_source) == (6.0, 18.0, "profile toy (datasheet)")


def test_undeclared_work_takes_the_measured_time_and_says_so():
    """2 s measured here, at 4 W."""
    cost = SimulatedDevice(profiles.parse(TOY, "toy")).cost(Work(read_bytes=20), Cost(duration_s=2.0))
    assert (cost.duration_s, cost.energy_j) == (2.0, 8.0)
    assert cost.energy_source == "profile toy (datasheet), time measured on this host"


def test_a_profile_without_power_predicts_no_energy():
    """None, never 0."""
    cost = SimulatedDevice(profiles.parse(TOY, "toy"), "unknown").cost(Work(flops=300), Cost(duration_s=2.0))
    assert (cost.duration_s, cost.energy_j, cost.energy_source) == (2.0, None, None)


def test_a_board_is_made_by_name_and_point():
    """Every point of the profile is known to it, whichever it is held at."""
    device = devices.make("jetson-tx2:MAXQ")
    assert (device.board, device.memory_bytes) == ("jetson-tx2", 7854 * 2**20)
    assert [point.name for point in device.points] == ["MAXN", "MAXP_CORE_ALL", "MAXP_CORE_ARM", "MAXQ"]
    assert device.cost(Work(flops=130.6e9), Cost(duration_s=0.0)).duration_s == pytest.approx(1.0)
    with pytest.raises(JobError, match="no operating point 'MAXX'; it has MAXN"):
        devices.make("jetson-tx2:MAXX")
    with pytest.raises(JobError, match="'tx3' is unknown"):
        devices.make("tx3")


def test_devices_need_no_numpy():
    """They belong to the daemon, which stays small."""
    check = (
        "import sys; from fedquilt.edge_agent import devices; devices.make('auto'); devices.make('x86-host');"
        "sys.exit('numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
