"""A Linux host by its own files: a tree of proc and sys stands for the real one, as the kernel documents them."""

from __future__ import annotations

import os

import pytest
from trees import Tree

from fedquilt import profiles
from fedquilt.core import ClockError, Cost, OperatingPoint, Reading, WorkEstimate
from fedquilt.edge_agent.clocks.client import HelperStatus
from fedquilt.edge_agent.devices.linux import LinuxDevice, detect

OWN = """
board = "own"
title = "this very board"
memory_bytes = { value = 1000, source = "run" }
idle_w = { value = 2, source = "run" }

[sources.run]
provenance = "measured"
text = "Measured by a run that never was."

[[points]]
name = "fast"
cpu_hz = { value = 2.0e9, source = "run" }
busy_w = { value = 5, source = "run" }

[[points]]
name = "slow"
cpu_hz = { value = 1.0e9, source = "run" }
busy_w = { value = 3, source = "run" }
"""


class FakeClocks:
    """Takes any point, until told that it has let go."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.kept_s: list[float] = []
        self.gone = False

    def pin(self, point: OperatingPoint) -> OperatingPoint:
        self.held.append(point.name)
        return point

    def unpin(self) -> None:
        self.held.append("released")

    def send_keepalive(self, now_s: float) -> None:
        self.kept_s.append(now_s)
        if self.gone:
            raise ClockError("let go: too hot")

    def request_status(self) -> HelperStatus:
        return HelperStatus(clocks=())


def test_what_a_host_cannot_measure_is_none(tree: Tree):
    """With memory alone, every other reading is None, and a task's energy is unknown, never 0."""
    device = LinuxDevice(tree.root)
    assert device.memory_bytes == 2000 * 1024
    reading = device.read_sensors(0.0)
    assert reading == Reading(available_bytes=500 * 1024)
    cost = device.task_cost(WorkEstimate(flops=1e9), Cost(duration_s=3.0))
    assert (cost.duration_s, cost.energy_j, cost.energy_source) == (3.0, None, None)


# -- temperature and memory -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zones", "celsius"),
    [
        (("41500", "-256000", "not ready", "38000"), 41.5),  # one that is off says -256, one does not answer
        (("-256000", "200000"), None),  # nor does a processor live to tell 200
        ((None, "30000"), 30.0),  # a folder where a file should be
    ],
)
def test_temperature_is_the_hottest_sensor_that_is_on(tree: Tree, zones: tuple[str | None, ...], celsius: float | None):
    for number, text in enumerate(zones):
        file = f"sys/class/thermal/thermal_zone{number}/temp"
        if text is None:
            (tree.root / file).mkdir(parents=True)
        else:
            tree.write(file, text)
    assert LinuxDevice(tree.root).read_sensors(0.0).temperature_c == celsius


def test_the_processors_own_sensor_counts_and_a_disks_does_not(tree: Tree):
    tree.files("sys/class/hwmon/hwmon0", name="coretemp", temp1_input=62_000, temp2_input=58_000)
    tree.files("sys/class/hwmon/hwmon1", name="nvme", temp1_input=71_000)
    assert LinuxDevice(tree.root).read_sensors(0.0).temperature_c == 62.0


def test_memory_pressure_is_a_share(tree: Tree):
    """avg10=2.50 percent."""
    tree.write(
        "proc/pressure/memory",
        "some avg10=2.50 avg60=0.10 avg300=0.00 total=1\nfull avg10=9.00 avg60=0 avg300=0 total=0",
    )
    assert LinuxDevice(tree.root).read_sensors(0.0).memory_pressure == pytest.approx(0.025)
    tree.write("proc/pressure/memory", "some avg10=soon")
    assert LinuxDevice(tree.root).read_sensors(0.0).memory_pressure is None


def test_a_control_groups_limit_is_the_hosts_memory(tree: Tree):
    """The group above is the tighter one: 1000 kB, of which 900 are used and 100 of these can be let go."""
    tree.write("proc/self/cgroup", "1:cpu:/elsewhere\n0::/box/agent")
    tree.write("sys/fs/cgroup/box/agent/memory.max", "max")
    tree.files("sys/fs/cgroup/box", **{"memory.max": 1000 * 1024, "memory.current": 900 * 1024})
    tree.write("sys/fs/cgroup/box/memory.stat", f"anon 1\ninactive_file {100 * 1024}\nactive_file 7")
    device = LinuxDevice(tree.root)
    assert device.memory_bytes == 1000 * 1024
    assert device.read_sensors(0.0).available_bytes == 200 * 1024


def test_a_group_over_its_limit_has_nothing_left(tree: Tree):
    """Never below 0; and a group above the host's memory limits nothing."""
    tree.write("proc/self/cgroup", "0::/")
    tree.files("sys/fs/cgroup", **{"memory.max": 4096, "memory.current": 8192})
    assert LinuxDevice(tree.root).read_sensors(0.0).available_bytes == 0
    tree.files("sys/fs/cgroup", **{"memory.max": 2**40, "memory.current": 8192})
    device = LinuxDevice(tree.root)
    assert (device.memory_bytes, device.read_sensors(0.0).available_bytes) == (2000 * 1024, 500 * 1024)


def test_a_group_outside_the_tree_is_not_followed(tree: Tree):
    tree.write("proc/self/cgroup", "0::/../../../proc")
    tree.write("sys/fs/cgroup/memory.max", "max")
    tree.write("proc/memory.max", 1)
    assert LinuxDevice(tree.root).memory_bytes == 2000 * 1024


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_the_right_to_read_it_is_unknown(tree: Tree):
    tree.rapl("0", "package-0", 0)
    (tree.root / "sys/class/powercap/intel-rapl:0/energy_uj").chmod(0)
    assert LinuxDevice(tree.root).read_sensors(1.0).energy_j is None


def test_the_board_is_called_what_its_firmware_calls_it(tree: Tree):
    assert LinuxDevice(tree.root).board.startswith("linux-")
    tree.write("sys/class/dmi/id/product_name", "Mini PC 7")
    assert LinuxDevice(tree.root).board == "Mini PC 7"
    tree.write("proc/device-tree/model", "Some Board Rev 1.0\0")
    assert LinuxDevice(tree.root).board == "Some Board Rev 1.0"


def test_the_device_tree_is_read_where_the_kernel_promises_it(tree: Tree):
    tree.write("sys/firmware/devicetree/base/model", "Some Board Rev 1.0\0")
    tree.write("sys/firmware/devicetree/base/compatible", "raspberrypi,5-model-b\0brcm,bcm2712\0")
    device = detect(tree.root)
    assert device is not None
    assert device.board == "Some Board Rev 1.0"
    assert device.provenance == profiles.load_board_profile("raspberry-pi-5").provenance()


# -- points and clocks ----------------------------------------------------------------------------


def test_points_are_never_invented(tree: Tree):
    tree.cores("1000000 2000000")
    device = LinuxDevice(tree.root, clocks=FakeClocks())
    assert (device.points, device.idle_w, device.provenance) == ((), None, "sysfs")


def test_a_recorded_profile_gives_the_points_that_the_board_lists(tree: Tree):
    """2 GHz is not listed any more: a point that cannot be held is none."""
    tree.cores("1000000 1500000")
    device = LinuxDevice(tree.root, profile=profiles.parse_board_profile(OWN, "own"))
    assert [(point.name, point.cpu_hz, point.busy_w) for point in device.points] == [("slow", 1e9, 3.0)]
    assert (device.idle_w, device.provenance, device.adjustable) == (2.0, "measured", False)


def test_without_a_helper_no_clock_is_set(tree: Tree):
    device = LinuxDevice(tree.root, profile=profiles.parse_board_profile(OWN, "own"))
    with pytest.raises(ClockError, match="start `fedquilt board clocks`"):
        device.pin_clocks(device.points[0])
    device.unpin_clocks()


def test_a_helper_that_let_go_does_not_stop_the_sensors(tree: Tree, caplog: pytest.LogCaptureFixture):
    clocks = FakeClocks()
    clocks.gone = True
    device = LinuxDevice(tree.root, clocks=clocks)
    assert device.read_sensors(1.0).available_bytes == 500 * 1024
    assert "let go: too hot" in caplog.text


def test_the_helper_holds_and_is_told_that_we_live(tree: Tree):
    clocks = FakeClocks()
    device = LinuxDevice(tree.root, profile=profiles.parse_board_profile(OWN, "own"), clocks=clocks)
    assert (device.adjustable, device.clocks_unchanged) == (True, False)
    assert device.pin_clocks(device.points[1]).name == "slow"
    with pytest.raises(ClockError, match="no operating point 'warp'"):
        device.pin_clocks(OperatingPoint(name="warp"))
    device.read_sensors(7.0)
    assert device.clocks_unchanged
    device.unpin_clocks()
    assert not device.clocks_unchanged
    assert (clocks.held, clocks.kept_s) == (["slow", "released"], [7.0])
    device.pin_clocks(device.points[0])
    clocks.gone = True
    device.read_sensors(8.0)  # it is told then that the helper has let go
    assert not device.clocks_unchanged


def test_a_raspberry_pi_has_its_profile(tree: Tree):
    tree.write("proc/device-tree/compatible", "raspberrypi,5-model-b\0brcm,bcm2712\0")
    tree.cores("1500000 1600000 1700000 1800000 1900000 2000000 2100000 2200000 2300000 2400000")
    device = detect(tree.root)
    assert device is not None
    shipped = profiles.load_board_profile("raspberry-pi-5")
    assert {point.name for point in shipped.points} & {point.name for point in device.points}
    assert device.provenance == shipped.provenance()
