"""A Linux host by its own files: a tree of proc and sys stands for the real one, as the kernel documents them."""

from __future__ import annotations

import os

import pytest
from trees import Tree

from fedquilt import profiles
from fedquilt.core import ClockError, Cost, Covers, OperatingPoint, Power, Reading, Work
from fedquilt.edge_agent.clocks.client import Status
from fedquilt.edge_agent.devices.linux import LinuxDevice, detect
from fedquilt.edge_agent.devices.sensors.meters import PATIENCE_S
from fedquilt.edge_agent.power.energy import Ledger

BATTERY = "sys/class/power_supply/BAT0"
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

    def hold(self, point: OperatingPoint) -> OperatingPoint:
        self.held.append(point.name)
        return point

    def release(self) -> None:
        self.held.append("released")

    def keepalive(self, now_s: float) -> None:
        self.kept_s.append(now_s)
        if self.gone:
            raise ClockError("let go: too hot")

    def status(self) -> Status:
        return Status(clocks=())


def test_what_a_host_cannot_measure_is_none(tree: Tree):
    """With memory alone, every other reading is None, and a task's energy is unknown, never 0."""
    device = LinuxDevice(tree.root)
    assert device.memory_bytes == 2000 * 1024
    reading = device.read(0.0)
    assert reading == Reading(available_bytes=500 * 1024)
    cost = device.cost(Work(flops=1e9), Cost(duration_s=3.0))
    assert (cost.duration_s, cost.energy_j, cost.energy_source) == (3.0, None, None)


# -- RAPL -----------------------------------------------------------------------------------------


def test_energy_is_counted_from_the_start_across_a_wrap(tree: Tree):
    """900 -> 990 -> (wraps at 1000) 40 microjoules is 90, then 90 + 50."""
    tree.rapl("0", "package-0", 900)
    device = LinuxDevice(tree.root)
    tree.rapl("0", "package-0", 990)
    before = device.read(10.0)
    tree.rapl("0", "package-0", 40)
    after = device.read(12.0)
    assert before.energy_j == pytest.approx(90e-6)
    assert after.energy_j == pytest.approx(140e-6)
    assert (before.power_w, after.power_w) == (None, pytest.approx(25e-6))
    assert after.energy_source == "rapl"


def test_packages_and_memory_are_summed_and_nothing_twice(tree: Tree):
    """core is part of package and psys of everything: 10 + 1 + 20 count, 500 and 900 do not."""
    zones = {"0": "package-0", "0:0": "core", "0:1": "dram", "1": "package-1-die-0", "2": "psys"}
    for number, name in zones.items():
        tree.rapl(number, name, 0)
    device = LinuxDevice(tree.root)
    for (number, name), spent in zip(zones.items(), (10, 500, 1, 20, 900), strict=True):
        tree.rapl(number, name, spent)
    assert device.read(1.0).energy_j == pytest.approx(31e-6)


def test_one_unreadable_package_makes_energy_unknown(tree: Tree):
    """Half of a host's energy would pass for all of it."""
    tree.rapl("0", "package-0", 0)
    tree.rapl("1", "package-1", 0)
    (tree.root / "sys/class/powercap/intel-rapl:1/energy_uj").unlink()
    assert LinuxDevice(tree.root).read(1.0).energy_j is None


def test_a_wrap_without_a_range_makes_energy_unknown(tree: Tree):
    """Where it wrapped is not told, so how much is not known."""
    tree.rapl("0", "package-0", 900)
    (tree.root / "sys/class/powercap/intel-rapl:0/max_energy_range_uj").unlink()
    device = LinuxDevice(tree.root)
    tree.write("sys/class/powercap/intel-rapl:0/energy_uj", 40)
    assert device.read(1.0).energy_j is None


def test_time_that_goes_back_gives_no_power_and_no_crash(tree: Tree):
    """Energy still counts; power comes back with the next reading that is later than the one before."""
    tree.rapl("0", "package-0", 0, 10**9)
    device = LinuxDevice(tree.root)
    powers, energies = [], []
    for now_s, count in ((100.0, 1_000_000), (50.0, 2_000_000), (50.0, 2_500_000), (51.0, 3_500_000)):
        tree.rapl("0", "package-0", count, 10**9)
        reading = device.read(now_s)
        powers.append(reading.power_w)
        energies.append(reading.energy_j)
    assert powers == [None, None, None, 1.0]
    assert energies == [1.0, 2.0, 2.5, 3.5]


# -- hwmon and batteries --------------------------------------------------------------------------


def test_hwmon_rails_are_named_by_chip_and_label(tree: Tree):
    """A graphics card's watts are a rail, and no part of the board passes for all of it."""
    tree.files("sys/class/hwmon/hwmon0", name="amdgpu", power1_label="PPT", power1_input=15_000_000)
    tree.files("sys/class/hwmon/hwmon1", name="amdgpu", power1_label="PPT", power1_average=7_000_000)
    tree.files("sys/class/hwmon/hwmon2", name="ina226", power1_input="not ready")
    reading = LinuxDevice(tree.root).read(0.0)
    assert reading.rails_w == {"amdgpu PPT": 15.0, "amdgpu PPT (hwmon1)": 7.0}
    assert (reading.power_w, reading.energy_source) == (None, None)


def test_an_averaged_channel_is_read_once(tree: Tree):
    """power1_average and power1_input are one sensor; the average is the steadier one."""
    tree.files("sys/class/hwmon/hwmon0", name="chip", power1_average=2_000_000, power1_input=9_000_000)
    assert LinuxDevice(tree.root).read(0.0).rails_w == {"chip power1": 2.0}


def test_an_energy_sensor_gives_watts_from_one_reading_to_the_next(tree: Tree):
    """6 J in 2 s is 3 W; a count that goes back gives nothing."""
    chip = "sys/class/hwmon/hwmon0"
    tree.files(chip, name="amd_energy", energy1_label="Esocket0", energy1_input=1_000_000)
    device = LinuxDevice(tree.root)
    assert device.read(1.0).rails_w == {}
    tree.write(f"{chip}/energy1_input", 7_000_000)
    assert device.read(3.0).rails_w == {"amd_energy Esocket0": 3.0}
    tree.write(f"{chip}/energy1_input", 100)
    assert device.read(4.0).rails_w == {}


def test_a_meter_of_the_whole_machine_is_its_power(tree: Tree):
    """ACPI's power meter sees the power supply."""
    tree.files("sys/class/hwmon/hwmon0", name="power_meter", power1_average=120_000_000)
    reading = LinuxDevice(tree.root).read(0.0)
    assert (reading.power_w, reading.energy_source) == (120.0, "hwmon power_meter power1")


def test_a_laptop_on_its_battery_tells_what_it_takes(tree: Tree):
    """9 W flow out, written with or without a minus; 30 of 40 Wh are left."""
    tree.files(BATTERY, type="Battery", status="Discharging", power_now=9_000_000)
    tree.files(BATTERY, energy_now=30_000_000, energy_full=40_000_000)
    reading = LinuxDevice(tree.root).read(0.0)
    assert (reading.power_w, reading.energy_source) == (9.0, "battery")
    assert (reading.battery, reading.charging) == (0.75, False)
    tree.write(f"{BATTERY}/power_now", -9_000_000)
    assert LinuxDevice(tree.root).read(0.0).power_w == 9.0


def test_volts_and_amperes_do_where_no_power_is_told(tree: Tree):
    """12 V times 0.5 A is 6 W; charge in ampere-hours gives the same share as energy would."""
    tree.files(BATTERY, type="Battery", status="Discharging", voltage_now=12_000_000, current_now=-500_000)
    tree.files(BATTERY, charge_now=1_000_000, charge_full=4_000_000)
    reading = LinuxDevice(tree.root).read(0.0)
    assert (reading.power_w, reading.battery) == (6.0, 0.25)


@pytest.mark.parametrize(
    ("status", "charging"), [("Charging", True), ("Full", True), ("Not charging", True), ("Unknown", None)]
)
def test_on_the_mains_a_battery_does_not_tell_the_power(tree: Tree, status: str, charging: bool | None):
    """What flows into a battery is not what the host takes."""
    tree.files(BATTERY, type="Battery", status=status, power_now=20_000_000, capacity=80)
    reading = LinuxDevice(tree.root).read(0.0)
    assert (reading.power_w, reading.battery, reading.charging) == (None, 0.8, charging)


def test_a_mouse_is_not_the_hosts_battery(tree: Tree):
    """Its scope is Device; the mains are no battery either."""
    tree.files("sys/class/power_supply/hid-1", type="Battery", scope="Device", capacity=10, status="Discharging")
    tree.files("sys/class/power_supply/AC", type="Mains", online=1)
    reading = LinuxDevice(tree.root).read(0.0)
    assert (reading.battery, reading.charging) == (None, None)


def test_one_battery_that_does_not_say_makes_their_power_unknown(tree: Tree):
    """Two batteries feed the host and one of them tells 5 W: that is not the host's power. Charge is their mean."""
    tree.files(BATTERY, type="Battery", status="Discharging", power_now=5_000_000, capacity=40)
    tree.files("sys/class/power_supply/BAT1", type="Battery", status="Discharging", capacity=60)
    reading = LinuxDevice(tree.root).read(0.0)
    assert (reading.power_w, reading.battery) == (None, pytest.approx(0.5))


def test_a_meter_of_the_whole_machine_wins_over_the_processors_counter(tree: Tree):
    """60 W at the supply, 15 J a second counted in the processor: two seconds of a task are 120 J, not 30."""
    tree.files("sys/class/hwmon/hwmon0", name="power_meter", power1_average=60_000_000)
    tree.rapl("0", "package-0", 0, 10**9)
    device, ledger = LinuxDevice(tree.root), Ledger(0.0)
    for second in range(3):
        tree.rapl("0", "package-0", 15_000_000 * second, 10**9)
        ledger = ledger.seen(float(second), device.read(float(second)))
    cost = ledger.cost(2.0, None)
    assert cost.energy_j == 120.0
    assert cost.energy_source == "hwmon power_meter power1, 1 Hz, trapezoids"


def test_energy_and_power_of_a_reading_are_one_meters(tree: Tree):
    """On its battery a host takes 9 W; RAPL, which sees the processor alone, is a rail then and counts for nothing."""
    tree.files(BATTERY, type="Battery", status="Discharging", power_now=9_000_000)
    tree.rapl("0", "package-0", 0, 10**9)
    device = LinuxDevice(tree.root)
    device.read(0.0)
    tree.rapl("0", "package-0", 4_000_000, 10**9)
    reading = device.read(1.0)
    assert (reading.power_w, reading.energy_j, reading.energy_source) == (9.0, None, "battery")
    assert reading.rails_w == {"rapl": 4.0}


class Plug:
    """A wall plug: it says what a test has set, or raises it."""

    covers: Covers = "board"

    def __init__(self, said: Power | Exception) -> None:
        self.said = said

    def read(self, now_s: float) -> Power:
        if isinstance(self.said, Exception):
            raise self.said
        return self.said


def test_the_owners_meter_goes_before_all_that_cover_as_much(tree: Tree):
    """The plug says 70 W where the supply's own meter says 60 W and the processor's counter counts."""
    tree.files("sys/class/hwmon/hwmon0", name="power_meter", power1_average=60_000_000)
    tree.rapl("0", "package-0", 0, 10**9)
    device = LinuxDevice(tree.root, own=Plug(Power(70.0, "plug", energy_j=5.0)))
    reading = device.read(0.0)
    assert (reading.power_w, reading.energy_j, reading.energy_source) == (70.0, 5.0, "plug")
    assert reading.rails_w["power_meter power1"] == 60.0


def test_a_meter_of_a_rail_is_never_taken_for_the_board(tree: Tree):
    """It stands among the rails; the processor's counter covers more."""
    tree.rapl("0", "package-0", 0, 10**9)
    rail = Plug(Power(3.0, "usb port 2"))
    rail.covers = "rail"
    reading = LinuxDevice(tree.root, own=rail).read(0.0)
    assert (reading.power_w, reading.energy_j, reading.energy_source) == (None, 0.0, "rapl")
    assert reading.rails_w == {"usb port 2": 3.0}


def test_a_meter_that_falls_silent_is_waited_for_before_a_narrower_one_stands_in(tree: Tree):
    """A plug that answers once a second is not mixed with the counter; one that is gone for long is given up."""
    tree.rapl("0", "package-0", 0, 10**9)
    plug = Plug(Power(70.0, "plug"))
    device = LinuxDevice(tree.root, own=plug)
    assert device.read(0.0).energy_source == "plug"
    plug.said = Power()
    assert device.read(0.5) == Reading(available_bytes=500 * 1024, rails_w=device.read(0.6).rails_w)
    assert device.read(PATIENCE_S + 1.0).energy_source == "rapl"


@pytest.mark.parametrize("said", [ValueError("no such plug"), Power(-1.0, "plug"), Power(float("nan"), "plug")])
def test_a_meter_that_fails_or_says_nonsense_is_passed_over(
    tree: Tree, said: Power | Exception, caplog: pytest.LogCaptureFixture
):
    """The agent goes on with the next widest, and the log says once what the meter raised."""
    tree.rapl("0", "package-0", 0, 10**9)
    device = LinuxDevice(tree.root, own=Plug(said))
    assert [device.read(at_s).energy_source for at_s in (0.0, 1.0)] == ["rapl", "rapl"]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == isinstance(said, Exception)
    assert all("Plug" in line and "no such plug" in line for line in told)


# -- temperature and memory -----------------------------------------------------------------------


def test_temperature_is_the_hottest_sensor_that_is_on(tree: Tree):
    """A sensor that is off says -256; one that does not answer is left out."""
    for number, text in enumerate(("41500", "-256000", "not ready", "38000")):
        tree.write(f"sys/class/thermal/thermal_zone{number}/temp", text)
    assert LinuxDevice(tree.root).read(0.0).temperature_c == 41.5


def test_sensors_that_are_all_off_tell_no_temperature(tree: Tree):
    """Not -256, and not the 200 that no processor lives to tell."""
    tree.write("sys/class/thermal/thermal_zone0/temp", "-256000")
    tree.write("sys/class/thermal/thermal_zone1/temp", "200000")
    assert LinuxDevice(tree.root).read(0.0).temperature_c is None


def test_the_processors_own_sensor_counts_and_a_disks_does_not(tree: Tree):
    """Most PCs have no thermal zone for the processor."""
    tree.files("sys/class/hwmon/hwmon0", name="coretemp", temp1_input=62_000, temp2_input=58_000)
    tree.files("sys/class/hwmon/hwmon1", name="nvme", temp1_input=71_000)
    assert LinuxDevice(tree.root).read(0.0).temperature_c == 62.0


def test_memory_pressure_is_a_share(tree: Tree):
    """avg10=2.50 percent."""
    tree.write(
        "proc/pressure/memory",
        "some avg10=2.50 avg60=0.10 avg300=0.00 total=1\nfull avg10=9.00 avg60=0 avg300=0 total=0",
    )
    assert LinuxDevice(tree.root).read(0.0).memory_pressure == pytest.approx(0.025)
    tree.write("proc/pressure/memory", "some avg10=soon")
    assert LinuxDevice(tree.root).read(0.0).memory_pressure is None


def test_a_control_groups_limit_is_the_hosts_memory(tree: Tree):
    """The group above is the tighter one: 1000 kB, of which 900 are used and 100 of these can be let go."""
    tree.write("proc/self/cgroup", "1:cpu:/elsewhere\n0::/box/agent")
    tree.write("sys/fs/cgroup/box/agent/memory.max", "max")
    tree.files("sys/fs/cgroup/box", **{"memory.max": 1000 * 1024, "memory.current": 900 * 1024})
    tree.write("sys/fs/cgroup/box/memory.stat", f"anon 1\ninactive_file {100 * 1024}\nactive_file 7")
    device = LinuxDevice(tree.root)
    assert device.memory_bytes == 1000 * 1024
    assert device.read(0.0).available_bytes == 200 * 1024


def test_a_group_over_its_limit_has_nothing_left(tree: Tree):
    """Never below 0; and a group above the host's memory limits nothing."""
    tree.write("proc/self/cgroup", "0::/")
    tree.files("sys/fs/cgroup", **{"memory.max": 4096, "memory.current": 8192})
    assert LinuxDevice(tree.root).read(0.0).available_bytes == 0
    tree.files("sys/fs/cgroup", **{"memory.max": 2**40, "memory.current": 8192})
    device = LinuxDevice(tree.root)
    assert (device.memory_bytes, device.read(0.0).available_bytes) == (2000 * 1024, 500 * 1024)


def test_a_group_outside_the_tree_is_not_followed(tree: Tree):
    """A process in another cgroup namespace sees its group as /../x."""
    tree.write("proc/self/cgroup", "0::/../../../proc")
    tree.write("sys/fs/cgroup/memory.max", "max")
    tree.write("proc/memory.max", 1)
    assert LinuxDevice(tree.root).memory_bytes == 2000 * 1024


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_the_right_to_read_it_is_unknown(tree: Tree):
    """As RAPL's counters are for all but root."""
    tree.rapl("0", "package-0", 0)
    (tree.root / "sys/class/powercap/intel-rapl:0/energy_uj").chmod(0)
    assert LinuxDevice(tree.root).read(1.0).energy_j is None


def test_a_folder_where_a_file_should_be_is_unknown(tree: Tree):
    """It opens, and reading it fails: so do sensors that are switched off."""
    (tree.root / "sys/class/thermal/thermal_zone0/temp").mkdir(parents=True)
    tree.write("sys/class/thermal/thermal_zone1/temp", "30000")
    assert LinuxDevice(tree.root).read(0.0).temperature_c == 30.0


def test_the_board_is_called_what_its_firmware_calls_it(tree: Tree):
    """The device tree first, as on ARM boards, then DMI, as on PCs, then the architecture."""
    assert LinuxDevice(tree.root).board.startswith("linux-")
    tree.write("sys/class/dmi/id/product_name", "Mini PC 7")
    assert LinuxDevice(tree.root).board == "Mini PC 7"
    tree.write("proc/device-tree/model", "Some Board Rev 1.0\0")
    assert LinuxDevice(tree.root).board == "Some Board Rev 1.0"


def test_the_device_tree_is_read_where_the_kernel_promises_it(tree: Tree):
    """In /sys/firmware/devicetree/base; the name in /proc may be missing (ABI/testing/sysfs-firmware-ofw)."""
    tree.write("sys/firmware/devicetree/base/model", "Some Board Rev 1.0\0")
    tree.write("sys/firmware/devicetree/base/compatible", "raspberrypi,5-model-b\0brcm,bcm2712\0")
    device = detect(tree.root)
    assert device is not None
    assert device.board == "Some Board Rev 1.0"
    assert device.provenance == profiles.load("raspberry-pi-5").provenance()


# -- points and clocks ----------------------------------------------------------------------------


def test_points_are_never_invented(tree: Tree):
    """A list of clocks says nothing of speed or power, so without a profile there is no point."""
    tree.cores("1000000 2000000")
    device = LinuxDevice(tree.root, clocks=FakeClocks())
    assert (device.points, device.idle_w, device.provenance) == ((), None, "sysfs")


def test_a_recorded_profile_gives_the_points_that_the_board_lists(tree: Tree):
    """2 GHz is not listed any more: a point that cannot be held is none."""
    tree.cores("1000000 1500000")
    device = LinuxDevice(tree.root, profile=profiles.parse(OWN, "own"))
    assert [(point.name, point.cpu_hz, point.busy_w) for point in device.points] == [("slow", 1e9, 3.0)]
    assert (device.idle_w, device.provenance, device.adjustable) == (2.0, "measured", False)


def test_without_a_helper_no_clock_is_set(tree: Tree):
    """The message says what to start; letting go of nothing is nothing."""
    device = LinuxDevice(tree.root, profile=profiles.parse(OWN, "own"))
    with pytest.raises(ClockError, match="start `fedquilt clocks`"):
        device.hold(device.points[0])
    device.release()


def test_the_helper_holds_and_is_told_that_we_live(tree: Tree):
    """Only the board's own points are asked for; every reading is a sign of life, with the reading's own time."""
    clocks = FakeClocks()
    device = LinuxDevice(tree.root, profile=profiles.parse(OWN, "own"), clocks=clocks)
    assert device.adjustable
    assert device.hold(device.points[1]).name == "slow"
    with pytest.raises(ClockError, match="no operating point 'warp'"):
        device.hold(OperatingPoint(name="warp"))
    device.read(7.0)
    device.release()
    assert (clocks.held, clocks.kept_s) == (["slow", "released"], [7.0])


def test_a_helper_that_let_go_does_not_stop_the_sensors(tree: Tree, caplog: pytest.LogCaptureFixture):
    """The reading comes, and the log says why the clocks are the board's own."""
    clocks = FakeClocks()
    clocks.gone = True
    device = LinuxDevice(tree.root, clocks=clocks)
    assert device.read(1.0).available_bytes == 500 * 1024
    assert "let go: too hot" in caplog.text


def test_the_device_tells_whether_it_is_still_held(tree: Tree):
    """From a hold until it is given back, or until a sign of life is answered that the helper has let go."""
    clocks = FakeClocks()
    device = LinuxDevice(tree.root, profile=profiles.parse(OWN, "own"), clocks=clocks)
    assert not device.holds
    device.hold(device.points[0])
    device.read(1.0)
    assert device.holds
    device.release()
    assert not device.holds
    device.hold(device.points[0])
    clocks.gone = True
    device.read(2.0)
    assert not device.holds


def test_a_raspberry_pi_has_its_profile(tree: Tree):
    """Found by what its device tree calls it; the list is the one that Raspberry Pi OS shows."""
    tree.write("proc/device-tree/compatible", "raspberrypi,5-model-b\0brcm,bcm2712\0")
    tree.cores("1500000 1600000 1700000 1800000 1900000 2000000 2100000 2200000 2300000 2400000")
    device = detect(tree.root)
    assert device is not None
    shipped = profiles.load("raspberry-pi-5")
    assert {point.name for point in shipped.points} & {point.name for point in device.points}
    assert device.provenance == shipped.provenance()
