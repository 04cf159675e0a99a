"""Jetsons. The trees are written from documented layouts (`tests.fake_boards`), not recorded on boards."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedquilt import profiles
from fedquilt.core import Coverage, OperatingPoint, Power
from fedquilt.edge_agent.clocks.client import HelperStatus
from fedquilt.edge_agent.clocks.controls import read_mode_name
from fedquilt.edge_agent.devices import jetson_meters, linux
from fedquilt.edge_agent.devices.jetson_meters import Ina3221
from fedquilt.edge_agent.devices.linux import LinuxDevice, detect
from tests.fake_boards import BOARDS, write_fake_board

EVERY = [(board, jetpack) for board, layout in BOARDS.items() for jetpack in layout.jetpacks]
ORIN = "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon1"
WATTS = {  # by hand: volts times amperes of the input rail, or of the rails that are no part of another
    "jetson-nano": 5 * 0.58,
    "jetson-tx2": 19 * 0.2,
    "jetson-xavier-nx": 5 * 1.2,
    "jetson-agx-xavier": 19 * (0.12 + 0.06 + 0.13 + 0.04 + 0.09),
    **dict.fromkeys(("jetson-orin-nano", "jetson-orin-nano-super", "jetson-orin-nano-4gb"), 5 * 1.2),
    **dict.fromkeys(("jetson-orin-nx", "jetson-orin-nx-super", "jetson-orin-nx-8gb"), 5 * 1.2),
    **dict.fromkeys(("jetson-agx-orin", "jetson-agx-orin-32gb", "jetson-agx-orin-industrial"), 19 * 0.18 + 5 * 0.7),
    "jetson-agx-thor": 23.0,  # not the 13.02 W of its three rails
}
NANO = "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0"


class FakeClocks:
    """A clock helper that does as it is told, and tells no clocks unless a test gives it some."""

    told = HelperStatus(clocks=())

    def pin(self, point: OperatingPoint) -> OperatingPoint:
        return point

    def unpin(self) -> None:
        pass

    def send_keepalive(self, now_s: float) -> None:
        pass

    def request_status(self) -> HelperStatus:
        return self.told


def planted(root: Path, board: str, jetpack: int, **changes: Any) -> LinuxDevice:
    """The board, with files changed after their names (path -> text, or None: gone)."""
    write_fake_board(root, board, jetpack)
    for path, text in changes.pop("files", {}).items():
        if text is None:
            (root / path).unlink()
        else:
            (root / path).write_text(text)
    return detect(root, **changes)


@pytest.mark.parametrize(("board", "jetpack"), EVERY)
def test_every_board_tells_its_power_temperature_and_memory(tmp_path: Path, board: str, jetpack: int):
    layout = BOARDS[board]
    device = planted(tmp_path, board, jetpack)
    reading = device.read_sensors(0.0)
    rails = {label: mv * ma / 1e6 for chip in layout.rails.values() for label, mv, ma in chip if label != "NC"}
    rails |= {} if layout.input_w is None else {"VIN": layout.input_w}
    total = WATTS[board]
    assert reading.rails_w == pytest.approx(rails, abs=0.001)  # whole milliwatts on JetPack 4
    assert reading.power_w == pytest.approx(total, abs=0.005)
    assert reading.temperature_c is not None
    assert 40 <= reading.temperature_c < 50
    assert device.memory_bytes == layout.memory_kib * 1024
    assert reading.available_bytes == layout.memory_kib // 2 * 1024
    assert reading.memory_pressure == (0.0 if jetpack >= 5 else None)
    assert (reading.energy_j, reading.battery) == (None, None)


@pytest.mark.parametrize(("board", "jetpack"), EVERY)
def test_every_board_finds_its_profile_and_mode(tmp_path: Path, board: str, jetpack: int):
    device = planted(tmp_path, board, jetpack)
    layout = BOARDS[board]
    assert device.mode == layout.modes[layout.default].name
    found = linux.find_profile(tmp_path)
    if board in profiles.board_names():
        assert found is not None
        assert found.board == board
        assert device.provenance == found.provenance()
        modes = [point.name for point in device.points]
        assert len(modes) == 1
        assert modes[0] in str(device.mode)
    assert not device.adjustable


@pytest.mark.parametrize(("board", "jetpack"), [pair for pair in EVERY if pair[0] in profiles.board_names()])
def test_with_a_helper_a_board_has_points_of_clocks_it_lists(tmp_path: Path, board: str, jetpack: int):
    device = planted(tmp_path, board, jetpack, clocks=FakeClocks())
    layout = BOARDS[board]
    assert device.adjustable
    assert len(device.points) > 1
    assert {point.cpu_hz for point in device.points} <= {None, *(round(khz) * 1000.0 for khz in layout.cpu_khz)}
    assert {point.gpu_hz for point in device.points} <= {None, *(round(mhz * 1e6) for mhz in layout.gpu_mhz)}
    assert len({point.name for point in device.points}) == len(device.points)


# -- rails ----------------------------------------------------------------------------------------


def test_agx_orins_memory_is_counted_once(tmp_path: Path):
    """VDDQ_VDD2_1V8AO's 0.5 W are part of VIN_SYS_5V0 by NVIDIA's table: 3.04 + 0.38 + 3.5 W, not 7.42 W."""
    reading = planted(tmp_path, "jetson-agx-orin", 6).read_sensors(0.0)
    assert reading.power_w == pytest.approx(6.92)
    assert reading.energy_source == "ina3221 sum of VDD_GPU_SOC, VDD_CPU_CV, VIN_SYS_5V0"
    assert reading.rails_w["VDDQ_VDD2_1V8AO"] == pytest.approx(0.5)


THOR = {
    **{f"sys/class/hwmon/hwmon1/{name}": text for name, text in (("name", "ina3221"), ("in1_label", "VDD_GPU"))},
    "sys/class/hwmon/hwmon1/in1_input": "20000",
    "sys/class/hwmon/hwmon1/curr1_input": "400",
    "sys/class/hwmon/hwmon1/in2_label": "VDD_CPU_SOC_MSS",
    "sys/class/hwmon/hwmon1/in2_input": "20000",
    "sys/class/hwmon/hwmon1/curr2_input": "250",
    "sys/class/hwmon/hwmon2/name": "ina238",
    "sys/class/hwmon/hwmon2/power1_input": "23000000",
}


def test_the_input_that_an_ina238_measures_is_the_total(tmp_path: Path):
    """On Thor: the INA3221's rails, 13 W, are parts of the 23 W at the board's input; silent, there is no total."""
    for name, text in THOR.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    power = Ina3221(tmp_path).read(0.0)
    assert (power.total_w, power.source) == (pytest.approx(23.0), "ina238 VIN")
    assert power.rails_w == pytest.approx({"VDD_GPU": 8.0, "VDD_CPU_SOC_MSS": 5.0, "VIN": 23.0})
    (tmp_path / "sys/class/hwmon/hwmon2/power1_input").write_text("Resource temporarily unavailable\n")
    power = Ina3221(tmp_path).read(0.0)
    assert (power.total_w, power.source) == (None, None)


NO_LABELS: dict[str, str | None] = {f"{ORIN}/in{channel}_label": None for channel in (1, 2, 3)}
UNKNOWN = {"proc/device-tree/compatible": "nvidia,p9999-0000\0nvidia,tegra999\0"}
OTHERS: dict[str, str | None] = {
    f"{ORIN}/in2_label": "NC",
    f"{ORIN}/in3_enable": "0",
    f"{ORIN}/curr4_input": "900",
    f"{ORIN}/curr7_input": "900",
}
SECOND = "sys/bus/i2c/drivers/ina3221/1-0041/hwmon/hwmon2/in2_label"
GPU, CPU, SUMMED = "POM_5V_GPU", "POM_5V_CPU", {"VDD_GPU_SOC", "VIN_SYS_5V0", "VDDQ_VDD2_1V8AO"}


@pytest.mark.parametrize(
    ("board", "jetpack", "files", "power_w", "names", "rails"),
    [
        # a silent rail of a sum makes it unknown: the others would pass for the whole
        ("jetson-agx-orin", 5, {f"{ORIN}/curr2_input": "try again"}, None, SUMMED, {}),
        # where the input itself is measured, its parts are beside the point, and they do not stand in for it
        ("jetson-orin-nano", 5, {f"{ORIN}/curr3_input": "?"}, 6.0, None, {}),
        ("jetson-nano", 4, {f"{NANO}/in_power0_input": None}, None, {GPU, CPU}, {}),
        # a part a little below zero has an offset and reads zero; one further below is left out
        ("jetson-orin-nx", 5, {f"{ORIN}/curr2_input": "-8"}, 6.0, None, {"VDD_CPU_GPU_CV": 0.0}),
        ("jetson-nano", 4, {f"{NANO}/in_power1_input": "-40"}, 2.9, None, {GPU: 0.0}),
        ("jetson-nano", 4, {f"{NANO}/in_power1_input": "-4000"}, 2.9, {"POM_5V_IN", CPU}, {}),
        # of an unknown board nobody knows which rail is part of which
        ("jetson-orin-nx", 6, UNKNOWN | {path: f"RAIL_{path}" for path in NO_LABELS}, None, set(NO_LABELS), {}),
        # in4 to in6 are for shunts, in7 for their sum; in<k>_enable is 0 when off; what has no label is no rail
        ("jetson-orin-nano", 6, OTHERS, 6.0, {"VDD_IN"}, {"VDD_IN": 6.0}),
        ("jetson-orin-nano", 6, NO_LABELS, None, set(), {}),
        # a label on two monitors is two rails: one would hide the other and the sum would miss it
        ("jetson-agx-orin", 5, {SECOND: "VDD_CPU_CV"}, 6.92, None, {"VDD_CPU_CV (2)": 0.5}),
    ],
)  # fmt: skip
def test_rails_that_are_silent_odd_or_none_make_no_wrong_total(
    tmp_path: Path,
    board: str,
    jetpack: int,
    files: dict[str, str | None],
    power_w: float | None,
    names: set[str] | None,
    rails: dict[str, float],
):
    reading = planted(tmp_path, board, jetpack, files=files).read_sensors(0.0)
    assert reading.power_w == (None if power_w is None else pytest.approx(power_w))
    assert (reading.energy_source is None) == (power_w is None)
    assert names is None or {name.removeprefix("RAIL_") for name in reading.rails_w} == names
    assert {name: reading.rails_w[name] for name in rails} == pytest.approx(rails)


@pytest.mark.parametrize(
    ("board", "file", "value", "fault"),
    [
        ("jetson-orin-nx", f"{ORIN}/curr1_input", "-40", r"rail VDD_IN reads -0\.20 W, below 0"),
        ("jetson-orin-nx", f"{ORIN}/curr1_input", "0", r"the total of 0\.00 W is implausible"),
        ("jetson-orin-nx", f"{ORIN}/curr1_input", "32760000", r"the total of 163800\.00 W is implausible"),
        (
            "jetson-orin-nx",
            f"{ORIN}/curr1_input",
            "100",
            r"reads 0\.50 W, less than its parts with 3\.50 W",
        ),
        ("jetson-orin-nx", f"{ORIN}/curr1_input", "?", r"rail VDD_IN cannot be read"),
        (
            "jetson-orin-nx",
            f"{ORIN}/in1_label",
            "NC",
            r"rail VDD_IN is missing, and VDD_CPU_GPU_CV, VDD_SOC are only parts",
        ),
        ("jetson-agx-orin", f"{ORIN}/in3_label", "NC", r"rail VIN_SYS_5V0 is missing"),
        ("jetson-agx-orin", f"{ORIN}/curr1_input", "-100", r"rail VDD_GPU_SOC reads -1\.90 W, below 0"),
    ],
)
def test_a_total_that_cannot_be_right_is_unknown_and_the_reason_is_told(
    tmp_path: Path, board: str, file: str, value: str, fault: str
):
    """Negative, zero, beyond any supply, less than its parts, silent, missing: not 0, and no part for the whole."""
    device = planted(tmp_path, board, 5, files={file: value})
    assert device.read_sensors(0.0).power_w is None
    meter = Ina3221(tmp_path)
    meter.read(0.0)
    assert re.search(fault, str(meter.fault))


def test_what_a_usb_c_supply_has_agreed_to_is_no_power(tmp_path: Path):
    """UCSI tells the volts and amperes of the contract, 20 V times 3 A here, not what the board draws."""
    write_fake_board(tmp_path, "jetson-orin-nx", 6)
    supply = tmp_path / "sys/class/power_supply/ucsi-source-psy-1-0008"
    supply.mkdir(parents=True)
    for name, text in (("type", "USB"), ("voltage_now", "20000000"), ("current_now", "3000000"), ("online", "1")):
        (supply / name).write_text(f"{text}\n")
    device = detect(tmp_path)
    assert device.read_sensors(0.0).power_w == pytest.approx(6.0)


def test_rails_are_found_by_class_where_the_bus_is_not_shown(tmp_path: Path):
    write_fake_board(tmp_path, "jetson-orin-nx", 6)
    bus = tmp_path / "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon1"
    link = tmp_path / "sys/class/hwmon/hwmon1"
    link.unlink()
    bus.rename(link)
    (tmp_path / "sys/class/hwmon/hwmon9").mkdir()
    for name, text in (("name", "pwmfan"), ("in1_label", "VDD_IN"), ("in1_input", "1"), ("curr1_input", "1")):
        (tmp_path / "sys/class/hwmon/hwmon9" / name).write_text(text)
    device = detect(tmp_path)
    assert device.read_sensors(0.0).power_w == pytest.approx(6.0)


def test_an_alias_of_a_monitor_is_not_counted_twice(tmp_path: Path):
    """Some kernels show iio:device0 as iio_device too."""
    write_fake_board(tmp_path, "jetson-agx-xavier", 4)
    chip = tmp_path / "sys/bus/i2c/drivers/ina3221x/1-0040"
    (chip / "iio_device").symlink_to("iio:device0")
    device = detect(tmp_path)
    assert device.read_sensors(0.0).power_w == pytest.approx(8.36)


# -- temperatures ---------------------------------------------------------------------------------


def test_the_stuck_zone_and_those_that_are_off_are_not_the_hottest(tmp_path: Path):
    """PMIC-Die says 100 C for ever, an Orin's sensor of a part without power -256 C; one answers nothing at all."""
    reading = planted(tmp_path / "tx2", "jetson-tx2", 4).read_sensors(0.0)
    assert reading.temperature_c == 42.5
    off = {f"sys/class/thermal/thermal_zone{zone}/temp": "-256000" for zone in range(5)}
    off["sys/class/thermal/thermal_zone5/temp"] = "try again"
    reading = planted(tmp_path / "orin", "jetson-orin-nx", 5, files=off).read_sensors(0.0)
    assert reading.temperature_c == 43.0


# -- profile, points, mode ------------------------------------------------------------------------


def test_a_board_unlike_any_profile_works_without_one(tmp_path: Path):
    """A Nano with 2 GB also calls itself the 4 GB one: its own name comes first and has no profile."""
    compatible = "nvidia,p3541-0000\0nvidia,p3450-0000\0nvidia,tegra210\0"
    device = planted(tmp_path, "jetson-nano", 4, files={"proc/device-tree/compatible": compatible})
    assert (device.points, device.provenance) == ((), "sysfs")
    assert device.read_sensors(0.0).power_w == pytest.approx(2.9)


def test_a_jetson_without_a_device_tree_is_known_by_its_release_file(tmp_path: Path):
    device = planted(tmp_path, "jetson-tx2", 4, files={"proc/device-tree/compatible": None})
    assert device.read_sensors(0.0).power_w == pytest.approx(3.8)
    (tmp_path / "etc/nv_tegra_release").unlink()
    assert not detect(tmp_path).read_sensors(0.0).rails_w


def test_the_mode_is_known_by_name_whatever_its_number(tmp_path: Path):
    """Another release numbers MAXQ 7; before nvpmodel ran for the first time, the catalogue's default holds."""
    write_fake_board(tmp_path, "jetson-tx2", 4)
    catalogue = tmp_path / "etc/nvpmodel/nvpmodel.conf"
    catalogue.write_text(catalogue.read_text().replace("ID=1 NAME=MAXQ", "ID=7 NAME=MAXQ"))
    status = tmp_path / "var/lib/nvpmodel/status"
    status.write_text("pmode:0007 fmode:quiet\n")
    assert read_mode_name(tmp_path) == "MAXQ"
    status.write_text("pmode:0001\n")
    assert read_mode_name(tmp_path) is None
    status.unlink()
    assert read_mode_name(tmp_path) == "MAXN"
    catalogue.unlink()
    assert read_mode_name(tmp_path) is None


def test_in_a_mode_that_the_profile_does_not_have_all_its_points_are_told(tmp_path: Path):
    device = planted(tmp_path / "one", "jetson-tx2", 4, files={"var/lib/nvpmodel/status": "pmode:0044"})
    assert device.mode is None
    assert len(device.points) > 1
    catalogue = {"etc/nvpmodel/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=OWN_MODE >"}
    device = planted(tmp_path / "two", "jetson-tx2", 4, files=catalogue)
    assert device.mode == "OWN_MODE"
    assert len(device.points) > 1


# -- jetson-stats ---------------------------------------------------------------------------------


class FakeMeter:
    coverage: Coverage = "board"

    def read(self, now_s: float) -> Power:
        return Power(9.0, "another", {"VDD_IN": 9.0})


def test_another_meter_is_asked_only_where_the_boards_own_files_tell_no_rails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def other() -> FakeMeter:
        asked.append(1)
        return FakeMeter()

    monkeypatch.setattr(jetson_meters, "connect_jtop", other)
    monkeypatch.setattr(linux, "ROOT", tmp_path / "one")
    assert planted(tmp_path / "one", "jetson-nano", 4).read_sensors(0.0).power_w == pytest.approx(2.9)
    bare = planted(tmp_path / "two", "jetson-nano", 4, files={f"{NANO}/rail_name_{k}": None for k in range(3)})
    assert bare.read_sensors(0.0).power_w is None
    assert not asked
    monkeypatch.setattr(linux, "ROOT", tmp_path / "two")
    again = detect(tmp_path / "two")
    assert again is not None
    assert (again.read_sensors(0.0).power_w, again.read_sensors(0.0).energy_source) == (9.0, "another")
    monkeypatch.setattr(jetson_meters, "connect_jtop", lambda: None)
    assert detect(tmp_path / "two") is not None


TOLD = {
    "rail": {"VDD_SOC": {"power": 1500, "avg": 9}, "VDD_CPU_GPU_CV": {"power": 2000, "avg": 9}},
    "tot": {"power": 6000, "avg": 9, "name": "VDD_IN"},
}


class FakeClient:
    """As jtop's client behaves: a thread that hears from the service."""

    def __init__(self, power: Any = TOLD, *, alive: bool = True) -> None:
        self.power, self.alive = power, alive
        self.started = self.closed = False

    def start(self) -> None:
        self.started = True

    def ok(self, spin: bool = False) -> bool:
        assert spin  # otherwise it waits for the next message
        return self.alive

    def close(self) -> None:
        self.closed = True


def meter(client: FakeClient) -> jetson_meters.JtopMeter:
    found = jetson_meters.connect_jtop(lambda name: SimpleNamespace(jtop=lambda: client))
    assert found is not None
    assert client.started
    return found


def test_rails_and_total_are_watts_by_label():
    client = FakeClient()
    found = meter(client)
    rails = {"VDD_IN": 6.0, "VDD_SOC": 1.5, "VDD_CPU_GPU_CV": 2.0}
    assert found.read(0.0) == Power(6.0, "jtop VDD_IN", rails)
    found.close()
    assert client.closed


def test_a_total_without_a_rail_of_its_own_is_called_a_sum():
    power = {"rail": {"A": {"power": 1000}, "B": {"power": 500}}, "tot": {"power": 1500}}
    assert meter(FakeClient(power)).read(0.0) == Power(1.5, "jtop sum of A, B", {"A": 1.0, "B": 0.5})


@pytest.mark.parametrize(
    "client",
    [
        FakeClient(alive=False),
        FakeClient({"rail": {}, "tot": {"power": 0}}),
        FakeClient({}),
        FakeClient({"rail": {"A": {"power": "much"}}, "tot": {"power": 0}}),
        FakeClient(None),
    ],
)
def test_a_service_that_is_gone_or_tells_nothing_gives_no_power(client: FakeClient):
    """None, never 0, and no crash on figures of another shape."""
    assert meter(client).read(0.0) == Power()


def test_not_installed_is_no_meter():
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(name)

    assert jetson_meters.connect_jtop(absent) is None


def test_a_service_that_does_not_run_is_no_meter_and_is_logged(caplog: pytest.LogCaptureFixture):
    class Refuses(FakeClient):
        def start(self) -> None:
            raise Exception("The jtop.service is not active")

    assert jetson_meters.connect_jtop(lambda name: SimpleNamespace(jtop=Refuses)) is None
    assert "jtop.service is not active" in caplog.text
