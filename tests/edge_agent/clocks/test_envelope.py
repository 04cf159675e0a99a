"""The owner's bounds: power mode, limits by hand, watts, degrees. Case by case, and over random ones."""

from __future__ import annotations

from pathlib import Path

import envelope_cases
import pytest
from envelope_cases import World
from msgspec.structs import replace

from fedquilt import profiles
from fedquilt.core import ClockError, OperatingPoint
from fedquilt.edge_agent.clocks import controls, owner_limits
from fedquilt.edge_agent.clocks.clock_pin import ClockPin
from fedquilt.edge_agent.devices import linux
from tests.fake_boards import write_fake_board

FAST = OperatingPoint(name="fast", cpu_hz=1984e6, gpu_hz=918e6, busy_w=25.0)
SLOW = OperatingPoint(name="slow", cpu_hz=1190.4e6, gpu_hz=612e6, busy_w=9.0)
SMALL = OperatingPoint(name="small", cpu_hz=345.6e6, gpu_hz=306e6, busy_w=5.0)


@pytest.fixture
def nx(tmp_path: Path) -> World:
    """An Orin NX of 16 GB in MAXN, with a clock helper."""
    world = World(tmp_path, "jetson-orin-nx", 6)
    world.owner = 0
    world.clamp = ClockPin(world.root, world.state, write_file=world.put, nvpmodel=world.nvpmodel)
    return world


def change(world: World, name: str) -> None:
    """Change the power mode, as the owner does."""
    world.owner = next(number for number, mode in enumerate(world.layout.modes) if mode.name == name)
    world.set(world.owner)


def test_no_clock_is_held_above_the_present_mode(nx: World):
    """In 10W an Orin NX was driven at 1984 and 918 MHz, which draw 25 W; the refusal names cap and mend."""
    change(nx, "10W")
    with pytest.raises(ClockError, match=r"policy0 to 1984 MHz, power mode 10W permits 1190\.4 MHz: .*nvpmodel"):
        nx.clamp.pin(FAST)
    assert nx.clamp.pin(SLOW).gpu_hz == 612e6
    nx.check()


def test_cores_that_the_mode_took_offline_stay_offline(nx: World):
    """10W leaves four of eight: no file of the others is written, and a mode that has them is refused."""
    change(nx, "10W")
    nx.clamp.pin(SLOW)
    nx.clamp.restore()
    with pytest.raises(ClockError, match="mode 25W has more cores or higher clocks than the board's power mode 10W"):
        nx.clamp.pin(OperatingPoint(name="25W", gpu_hz=306e6))
    nx.check()


def test_a_mode_that_the_owner_changes_during_a_hold_is_followed(nx: World):
    """Down: the hold ends within one look, and what is restored are the limits of 10W. Up: those of MAXN again."""
    nx.clamp.pin(FAST)
    change(nx, "10W")
    assert "the power mode was changed from MAXN to 10W" in str(nx.clamp.unpin_if_required())
    assert nx.clamp.point is None
    nx.check()
    nx.clamp.pin(SLOW)
    change(nx, "MAXN")
    assert "from 10W to MAXN" in str(nx.clamp.unpin_if_required())
    assert (nx.gpu / "max_freq").read_text().strip() == "918000000"
    assert nx.clamp.pin(FAST).gpu_hz == 918e6


def test_a_mode_changed_while_the_helper_was_dead_is_followed_by_the_next(nx: World):
    """Killed while it held in MAXN; the owner sets 10W; the next helper must not restore MAXN's limits."""
    nx.clamp.pin(FAST)
    change(nx, "10W")
    again = ClockPin(nx.root, nx.state, write_file=nx.put, nvpmodel=nx.nvpmodel)
    assert again.restore_after_crash() == []
    nx.check()
    assert controls.read_mode_name(nx.root) == "10W"


def test_a_lower_mode_may_be_held_and_the_owners_comes_back(nx: World):
    """From 25W to 10W: fewer cores and lower caps are within the owner's mode, except for the GPU's cap of 408 MHz."""
    change(nx, "25W")
    with pytest.raises(ClockError, match="has more cores or higher clocks"):
        nx.clamp.pin(OperatingPoint(name="10W"))
    change(nx, "MAXN")
    nx.clamp.pin(OperatingPoint(name="10W"))
    assert (controls.read_mode_name(nx.root), nx.clamp.owner_mode()) == ("10W", "MAXN")
    assert nx.clamp.restore() == []
    assert controls.read_mode_name(nx.root) == "MAXN"


def test_a_limit_that_the_owner_wrote_by_hand_holds_too(nx: World):
    """510 MHz in the GPU's max_freq, in MAXN."""
    nx.write(nx.gpu / "max_freq", 510_000_000)
    with pytest.raises(ClockError, match="permits 510 MHz"):
        nx.clamp.pin(SLOW)
    nx.clamp.pin(SMALL)
    assert nx.clamp.restore() == []
    assert (nx.gpu / "max_freq").read_text().strip() == "510000000"


def test_no_point_above_max_w_is_held_nor_one_that_does_not_say(nx: World):
    clamp = ClockPin(nx.root, nx.state, max_w=10.0, write_file=nx.put, nvpmodel=nx.nvpmodel)
    with pytest.raises(ClockError, match="'fast' has 25 W, over the limit of 10 W"):
        clamp.pin(FAST)
    with pytest.raises(ClockError, match="'typed' has unknown power"):
        clamp.pin(OperatingPoint(name="typed", gpu_hz=306e6))
    assert clamp.pin(SLOW).name == "slow"


def test_a_client_that_is_wrong_about_watts_does_not_get_beyond_max_w(nx: World):
    profile = profiles.load_board_profile("jetson-orin-nx")
    known = linux.fit_points(profile, linux.common_frequencies(controls.discover_controls(nx.root).controls))
    most = sorted(point.busy_w for point in known if point.busy_w)[len(known) // 2]
    clamp = ClockPin(
        nx.root,
        nx.state,
        max_w=most,
        power_of_point=linux.create_power_lookup(profile, nx.root),
        write_file=nx.put,
        nvpmodel=nx.nvpmodel,
    )
    grid = [point for point in known if point.name.startswith("cpu") and point.busy_w]
    hungry, frugal = (choose(grid, key=lambda point: point.busy_w or 0.0) for choose in (max, min))
    for wrong in (replace(hungry, busy_w=1.0), replace(hungry, name=frugal.name, busy_w=1.0)):
        with pytest.raises(ClockError, match="over the limit of"):
            clamp.pin(wrong)
        assert clamp.point is None
    assert clamp.pin(replace(frugal, busy_w=None)).name == frugal.name


def test_nothing_is_held_when_all_thermal_zones_fall_silent(nx: World):
    nx.clamp.pin(SLOW)
    for zone in (nx.root / "sys/class/thermal").iterdir():
        (zone / "temp").write_text("Resource temporarily unavailable\n")
    assert nx.clamp.unpin_if_required() == "clocks unpinned: no thermal zone can be read, the limit is 85 C"
    with pytest.raises(ClockError, match="no thermal zone can be read"):
        nx.clamp.pin(SLOW)


def test_offered_points_shrink_and_grow_with_the_mode(nx: World):
    """While the agent runs: none above 10W's caps, then all of MAXN's again; and no reading between is needed."""
    device = nx.device
    change(nx, "MAXN")
    device.read_sensors(1.0)
    wide = device.points
    change(nx, "10W")
    device.read_sensors(2.0)
    narrow = device.points
    assert 0 < len(narrow) < len(wide)
    assert max(point.cpu_hz or 0 for point in narrow) <= 1190.4e6 * 1.01
    assert max(point.gpu_hz or 0 for point in narrow) == 612e6
    assert {point.name for point in narrow} & {"MAXN", "25W", "15W"} == set()
    change(nx, "MAXN")
    device.read_sensors(3.0)
    assert device.points == wide


def test_a_refused_point_makes_the_agent_look_again(nx: World):
    device = nx.device
    change(nx, "MAXN")
    device.read_sensors(1.0)
    fast = max(device.points, key=lambda point: point.busy_w or 0)
    change(nx, "10W")
    with pytest.raises(ClockError, match="power mode 10W"):
        device.pin_clocks(fast)
    assert fast not in device.points


def test_caps_are_read_from_the_file_that_the_catalogue_names(tmp_path: Path):
    """TX2's two clusters have caps of their own; the memory's 0 and the CPU's -1 mean none."""
    write_fake_board(tmp_path, "jetson-tx2", 4)
    conf = tmp_path / "etc/nvpmodel/nvpmodel.conf"
    text = conf.read_text().replace("CPU_1 MAX_FREQ 1400000", "CPU_1 MAX_FREQ 960000")
    conf.write_text(text)
    found = controls.discover_controls(tmp_path)
    most = owner_limits.control_limits(found, found.find_mode("MAXP_CORE_ALL"))
    assert most == {"policy0": 1267200, "policy1": 960000, "17000000.gp10b": 1122000000, "emc": 1600000000}
    assert owner_limits.control_limits(found, found.find_mode("MAXN")) == {}


def test_random_boards_modes_deadlines_and_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing is written, left or held beyond the owner's bounds; `make nightly` plays 100,000."""
    monkeypatch.setattr(controls, "discover_controls", envelope_cases.once(controls.discover_controls))
    worlds = envelope_cases.every(tmp_path)
    held = sum(envelope_cases.play(worlds[case % len(worlds)], case) for case in range(150))
    assert held > 75
