"""Energy and power of any Linux host: RAPL, hwmon, batteries and the owner's meter, on made files."""

from __future__ import annotations

import pytest
from trees import Tree

from fedquilt.core import Coverage, Power
from fedquilt.edge_agent.devices.linux import LinuxDevice
from fedquilt.edge_agent.power.task_power import EnergyAccount

BATTERY = "sys/class/power_supply/BAT0"
FULL = {"energy_now": 30_000_000, "energy_full": 40_000_000}
CHARGE = {"charge_now": 1_000_000, "charge_full": 4_000_000}


# -- RAPL -----------------------------------------------------------------------------------------


def test_energy_is_counted_from_the_start_across_a_wrap(tree: Tree):
    """900 -> 990 -> (wraps at 1000) 40 microjoules is 90, then 90 + 50."""
    tree.rapl("0", "package-0", 900)
    device = LinuxDevice(tree.root)
    tree.rapl("0", "package-0", 990)
    before = device.read_sensors(10.0)
    tree.rapl("0", "package-0", 40)
    after = device.read_sensors(12.0)
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
    assert device.read_sensors(1.0).energy_j == pytest.approx(31e-6)


def test_one_unreadable_package_or_a_wrap_without_a_range_makes_energy_unknown(tree: Tree):
    for number in "01":
        tree.rapl(number, f"package-{number}", 900)
    zones = tree.root / "sys/class/powercap"
    (zones / "intel-rapl:1/energy_uj").rename(tree.root / "kept")
    assert LinuxDevice(tree.root).read_sensors(1.0).energy_j is None
    (tree.root / "kept").rename(zones / "intel-rapl:1/energy_uj")
    (zones / "intel-rapl:0/max_energy_range_uj").unlink()
    device = LinuxDevice(tree.root)
    tree.write("sys/class/powercap/intel-rapl:0/energy_uj", 40)
    assert device.read_sensors(1.0).energy_j is None


def test_time_that_goes_back_gives_no_power_and_no_crash(tree: Tree):
    tree.rapl("0", "package-0", 0, 10**9)
    device = LinuxDevice(tree.root)
    powers, energies = [], []
    for now_s, count in ((100.0, 1_000_000), (50.0, 2_000_000), (50.0, 2_500_000), (51.0, 3_500_000)):
        tree.rapl("0", "package-0", count, 10**9)
        reading = device.read_sensors(now_s)
        powers.append(reading.power_w)
        energies.append(reading.energy_j)
    assert powers == [None, None, None, 1.0]
    assert energies == [1.0, 2.0, 2.5, 3.5]


# -- hwmon and batteries --------------------------------------------------------------------------


def test_hwmon_rails_are_named_by_chip_and_label(tree: Tree):
    tree.files("sys/class/hwmon/hwmon0", name="amdgpu", power1_label="PPT", power1_input=15_000_000)
    tree.files("sys/class/hwmon/hwmon1", name="amdgpu", power1_label="PPT", power1_average=7_000_000)
    tree.files("sys/class/hwmon/hwmon2", name="ina226", power1_input="not ready")
    reading = LinuxDevice(tree.root).read_sensors(0.0)
    assert reading.rails_w == {"amdgpu PPT": 15.0, "amdgpu PPT (hwmon1)": 7.0}
    assert (reading.power_w, reading.energy_source) == (None, None)


def test_an_averaged_channel_is_read_once(tree: Tree):
    """power1_average and power1_input are one sensor; the average is the steadier one."""
    tree.files("sys/class/hwmon/hwmon0", name="chip", power1_average=2_000_000, power1_input=9_000_000)
    assert LinuxDevice(tree.root).read_sensors(0.0).rails_w == {"chip power1": 2.0}


def test_an_energy_sensor_gives_watts_from_one_reading_to_the_next(tree: Tree):
    """6 J in 2 s is 3 W; a count that goes back gives nothing."""
    chip = "sys/class/hwmon/hwmon0"
    tree.files(chip, name="amd_energy", energy1_label="Esocket0", energy1_input=1_000_000)
    device = LinuxDevice(tree.root)
    assert device.read_sensors(1.0).rails_w == {}
    tree.write(f"{chip}/energy1_input", 7_000_000)
    assert device.read_sensors(3.0).rails_w == {"amd_energy Esocket0": 3.0}
    tree.write(f"{chip}/energy1_input", 100)
    assert device.read_sensors(4.0).rails_w == {}


def test_a_meter_of_the_whole_machine_is_its_power(tree: Tree):
    tree.files("sys/class/hwmon/hwmon0", name="power_meter", power1_average=120_000_000)
    reading = LinuxDevice(tree.root).read_sensors(0.0)
    assert (reading.power_w, reading.energy_source) == (120.0, "hwmon power_meter power1")


@pytest.mark.parametrize(
    ("files", "power_w", "battery", "charging"),
    [
        # 9 W flow out, written with or without a minus; 30 of 40 Wh are left
        ({"status": "Discharging", "power_now": 9_000_000, **FULL}, 9.0, 0.75, False),
        ({"status": "Discharging", "power_now": -9_000_000, **FULL}, 9.0, 0.75, False),
        # 12 V times 0.5 A; charge in ampere-hours gives the same share as energy would
        ({"status": "Discharging", "voltage_now": 12_000_000, "current_now": -500_000, **CHARGE}, 6.0, 0.25, False),
        # on the mains: what flows into a battery is not what the host takes
        ({"status": "Charging", "power_now": 20_000_000, "capacity": 80}, None, 0.8, True),
        ({"status": "Full", "power_now": 20_000_000, "capacity": 80}, None, 0.8, True),
        ({"status": "Not charging", "power_now": 20_000_000, "capacity": 80}, None, 0.8, True),
        ({"status": "Unknown", "power_now": 20_000_000, "capacity": 80}, None, 0.8, None),
    ],
)
def test_a_battery_tells_the_power_while_the_host_lives_on_it(
    tree: Tree, files: dict[str, object], power_w: float | None, battery: float, charging: bool | None
):
    tree.files(BATTERY, type="Battery", **files)
    reading = LinuxDevice(tree.root).read_sensors(0.0)
    assert (reading.power_w, reading.battery, reading.charging) == (power_w, battery, charging)
    assert reading.energy_source == (None if power_w is None else "battery")


def test_a_mouse_is_not_the_hosts_battery(tree: Tree):
    tree.files("sys/class/power_supply/hid-1", type="Battery", scope="Device", capacity=10, status="Discharging")
    tree.files("sys/class/power_supply/AC", type="Mains", online=1)
    reading = LinuxDevice(tree.root).read_sensors(0.0)
    assert (reading.battery, reading.charging) == (None, None)


def test_one_battery_that_does_not_say_makes_their_power_unknown(tree: Tree):
    """Two batteries feed the host and one of them tells 5 W: that is not the host's power. Charge is their mean."""
    tree.files(BATTERY, type="Battery", status="Discharging", power_now=5_000_000, capacity=40)
    tree.files("sys/class/power_supply/BAT1", type="Battery", status="Discharging", capacity=60)
    reading = LinuxDevice(tree.root).read_sensors(0.0)
    assert (reading.power_w, reading.battery) == (None, pytest.approx(0.5))


def test_a_meter_of_the_whole_machine_wins_over_the_processors_counter(tree: Tree):
    """60 W at the supply, 15 J a second counted in the processor: two seconds of a task are 120 J, not 30."""
    tree.files("sys/class/hwmon/hwmon0", name="power_meter", power1_average=60_000_000)
    tree.rapl("0", "package-0", 0, 10**9)
    device, ledger = LinuxDevice(tree.root), EnergyAccount(0.0)
    for second in range(3):
        tree.rapl("0", "package-0", 15_000_000 * second, 10**9)
        ledger = ledger.with_reading(float(second), device.read_sensors(float(second)))
    cost = ledger.cost_until(2.0, None)
    assert cost.energy_j == 120.0
    assert cost.energy_source == "hwmon power_meter power1, 1 Hz, trapezoids"


def test_energy_and_power_of_a_reading_are_one_meters(tree: Tree):
    """On its battery a host takes 9 W; RAPL, which sees the processor alone, is a rail then and counts for nothing."""
    tree.files(BATTERY, type="Battery", status="Discharging", power_now=9_000_000)
    tree.rapl("0", "package-0", 0, 10**9)
    device = LinuxDevice(tree.root)
    device.read_sensors(0.0)
    tree.rapl("0", "package-0", 4_000_000, 10**9)
    reading = device.read_sensors(1.0)
    assert (reading.power_w, reading.energy_j, reading.energy_source) == (9.0, None, "battery")
    assert reading.rails_w == {"rapl": 4.0}


class Plug:
    """A wall plug: it says what a test has set, or raises it."""

    coverage: Coverage = "board"

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
    device = LinuxDevice(tree.root, custom_meter=Plug(Power(70.0, "plug", energy_j=5.0)))
    reading = device.read_sensors(0.0)
    assert (reading.power_w, reading.energy_j, reading.energy_source) == (70.0, 5.0, "plug")
    assert reading.rails_w["power_meter power1"] == 60.0


@pytest.mark.parametrize("said", [ValueError("no such plug"), Power(-1.0, "plug"), Power(float("nan"), "plug")])
def test_a_meter_that_fails_or_says_nonsense_is_passed_over(
    tree: Tree, said: Power | Exception, caplog: pytest.LogCaptureFixture
):
    tree.rapl("0", "package-0", 0, 10**9)
    device = LinuxDevice(tree.root, custom_meter=Plug(said))
    assert [device.read_sensors(at_s).energy_source for at_s in (0.0, 1.0)] == ["rapl", "rapl"]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == isinstance(said, Exception)
    assert all("Plug" in line and "no such plug" in line for line in told)


def test_a_meter_of_a_rail_is_never_taken_for_the_board(tree: Tree):
    """It stands among the rails; the processor's counter covers more."""
    tree.rapl("0", "package-0", 0, 10**9)
    rail = Plug(Power(3.0, "usb port 2"))
    rail.coverage = "rail"
    reading = LinuxDevice(tree.root, custom_meter=rail).read_sensors(0.0)
    assert (reading.power_w, reading.energy_j, reading.energy_source) == (None, 0.0, "rapl")
    assert reading.rails_w == {"usb port 2": 3.0}
