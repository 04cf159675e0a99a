"""What can be set on a board, and what is written to set it: fake trees in the documented layouts stand for boards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from fedquilt.core import ClockError, OperatingPoint
from fedquilt.edge_agent.clocks import controls
from fedquilt.edge_agent.clocks.controls import ClockControl, ControlWrite
from tests.fake_boards import BOARDS, write_fake_board


def apply(writes: Iterable[ControlWrite]) -> None:
    """As a kernel would; a lower limit above the upper one, or the other way round, it refuses."""
    for write in writes:
        write.file.write_text(f"{write.value}\n")
        low, high = controls.read_number(write.control.low), controls.read_number(write.control.high)
        assert low is None or high is None or low <= high, str(write)


def contents(root: Path) -> dict[str, str]:
    return {str(path): path.read_text(errors="replace") for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("board", "jetpack"), [(name, jetpack) for name, layout in BOARDS.items() for jetpack in layout.jetpacks]
)
def test_every_known_board_shows_its_policies_and_its_gpu(board: str, jetpack: int, tmp_path: Path):
    write_fake_board(tmp_path, board, jetpack)
    found = controls.discover_controls(tmp_path)
    layout = BOARDS[board]
    assert [lever.name for lever in found.controls_of_kind("cpu")] == [
        f"policy{cores[0]}" for cores in sorted(layout.policies)
    ]
    (gpu,) = found.controls_of_kind("gpu")
    assert gpu.listed_values == tuple(round(mhz * 1e6) for mhz in layout.gpu_mhz)
    assert [mode.name for mode in found.modes] == [mode.name for mode in layout.modes]
    assert len(found.controls_of_kind("emc")) == 1


@pytest.mark.parametrize(("before", "wanted"), [(1113600, 2035200), (1113600, 345600), (345600, 2035200)])
def test_limits_never_cross_on_the_way(before: int, wanted: int, tmp_path: Path):
    write_fake_board(tmp_path, "jetson-tx2", 4)
    found = controls.discover_controls(tmp_path)
    for khz in (before, wanted, before):
        apply(controls.pin_writes(found, OperatingPoint(name="x", cpu_hz=khz * 1000)))
        for lever in found.controls_of_kind("cpu"):
            assert controls.read_number(lever.low) == controls.read_number(lever.high) == khz


def test_undoing_leaves_every_file_as_it_was(tmp_path: Path):
    write_fake_board(tmp_path, "jetson-tx2", 4)
    before = contents(tmp_path)
    found = controls.discover_controls(tmp_path)
    saved = found.read_state(None)
    apply(controls.pin_writes(found, OperatingPoint(name="x", cpu_hz=1.4208e9, gpu_hz=0.8543e9, emc_hz=204e6)))
    assert contents(tmp_path) != before
    apply(controls.restore_writes(found, saved))
    after = contents(tmp_path)
    assert [path for path in before if after[path] != before[path]] == [
        str(tmp_path / "sys/kernel/debug/bpmp/debug/clk/emc/rate")
    ]


def test_a_governor_that_changed_meanwhile_is_put_back(tmp_path: Path):
    write_fake_board(tmp_path, "jetson-tx2", 4)
    found = controls.discover_controls(tmp_path)
    saved = found.read_state(None)
    governor = found.controls_of_kind("cpu")[0].governor
    assert governor is not None
    governor.write_text("performance\n")
    apply(controls.restore_writes(found, saved))
    assert controls.read_line(governor) == "schedutil"


def test_a_frequency_within_one_percent_is_meant(tmp_path: Path):
    """1421 MHz is 1420.8; 1400 MHz is 1.5 % off and refused with all that there is."""
    write_fake_board(tmp_path, "jetson-tx2", 4)
    found = controls.discover_controls(tmp_path)
    assert controls.pin_writes(found, OperatingPoint(name="x", cpu_hz=1.421e9))[1].value == 1420800
    with pytest.raises(
        ClockError, match=r"policy0 \(cpu\) has no 1400 MHz: choose one of 345\.6, 499\.2, .* 2035\.2 MHz"
    ):
        controls.pin_writes(found, OperatingPoint(name="x", cpu_hz=1.4e9))


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        ("300 100 200\n", (100, 200, 300)),
        ("100 100 -5 0 banana 1e3 200 (kHz)\n", (100, 200)),
        ("", ()),
        ("\0\0", ()),
    ],
)
def test_a_list_of_frequencies_is_read_whatever_it_holds(text: str, listed: tuple[int, ...], tmp_path: Path):
    folder = tmp_path / "sys/devices/system/cpu/cpufreq/policy0"
    folder.mkdir(parents=True)
    (folder / "scaling_available_frequencies").write_text(text)
    (folder / "scaling_max_freq").write_text("300\n")
    (lever,) = controls.discover_controls(tmp_path).controls
    assert lever.listed_values == listed


def test_a_board_that_lists_no_frequencies_is_not_held(tmp_path: Path):
    folder = tmp_path / "sys/devices/system/cpu/cpufreq/policy0"
    folder.mkdir(parents=True)
    (folder / "scaling_max_freq").write_text("3000000\n")
    found = controls.discover_controls(tmp_path)
    with pytest.raises(ClockError, match="lists no frequencies of this clock"):
        controls.pin_writes(found, OperatingPoint(name="x", cpu_hz=3e9))
    with pytest.raises(ClockError, match="sets the gpu clock, which this board cannot set"):
        controls.pin_writes(found, OperatingPoint(name="x", gpu_hz=1e9))
    assert controls.restore_writes(found, found.read_state(None)) == []


def test_a_machine_without_clocks_has_no_levers(tmp_path: Path):
    found = controls.discover_controls(tmp_path)
    assert (found.controls, found.modes) == ((), ())
    assert controls.hottest_zone_c(tmp_path) is None


def test_policies_are_found_by_core_where_there_is_no_policy_folder(tmp_path: Path):
    system = tmp_path / "sys/devices/system/cpu"
    for core in ("cpu0", "cpu10", "cpu2"):
        (system / core / "cpufreq").mkdir(parents=True)
        (system / core / "cpufreq/scaling_max_freq").write_text("100\n")
    (system / "cpu1").mkdir()
    os.symlink("../cpu0/cpufreq", system / "cpu1/cpufreq")
    assert [lever.name for lever in controls.discover_controls(tmp_path).controls] == ["cpu0", "cpu2", "cpu10"]
    (system / "cpu2/cpufreq/scaling_max_freq").write_text("")
    assert [lever.name for lever in controls.discover_controls(tmp_path).controls] == ["cpu0", "cpu10"]


def test_memory_clocks_are_listed_by_debugfs_in_khz(tmp_path: Path):
    write_fake_board(tmp_path, "jetson-orin-nano", 6)
    (lever,) = controls.discover_controls(tmp_path).controls_of_kind("emc")
    assert lever.listed_values == (204_000_000, 2_133_000_000)
    rates = tmp_path / "sys/kernel/debug/bpmp/debug/emc/possible_rates"
    rates.parent.mkdir()
    rates.write_text("204000 665600 2133000 (kHz)\n")
    (lever,) = controls.discover_controls(tmp_path).controls_of_kind("emc")
    assert lever.listed_values == (204_000_000, 665_600_000, 2_133_000_000)


@pytest.mark.parametrize(
    ("value", "took"),
    [("1600000000", True), ("2133000000", True), ("1599500000", True), ("1800000000", False), ("204000000", False)],
)
def test_a_memory_clock_may_round_up_to_one_it_has(value: str, took: bool):
    """Orin's does: 1600 becomes 2133. To something it does not list, or to a lower one, is another matter."""
    rate = Path("rate")
    lever = ClockControl("emc", "emc", (204_000_000, 2_133_000_000), rate=rate, lock=Path("lock"))
    assert ControlWrite(lever, rate, 1_600_000_000).is_applied(value) is took
    assert not ControlWrite(lever, Path("lock"), 1).is_applied("0")


def test_a_cpu_or_gpu_that_takes_another_frequency_has_not_taken_it():
    lever = ClockControl("gpu", "gpu", (100, 200), high=Path("max_freq"))
    assert ControlWrite(lever, Path("max_freq"), 100).is_applied("100")
    for said in ("200", "", None):
        assert not ControlWrite(lever, Path("max_freq"), 100).is_applied(said)


def test_modes_are_known_by_name_however_it_is_written(tmp_path: Path):
    """MODE_15W and 15W, MAXN SUPER and MAXN_SUPER are the same in different releases; comments and rubbish are not."""
    conf = tmp_path / "etc/nvpmodel.conf"
    conf.parent.mkdir()
    conf.write_text(
        "# < POWER_MODEL ID=9 NAME=OLD >\n< PARAM TYPE=FILE NAME=CPU_ONLINE >\nCORE_0 /sys/x\n\n"
        "< POWER_MODEL ID=3 NAME=MODE_15W >\nCPU_ONLINE CORE_0 1\nTPC_POWER_GATING TPC_PG_MASK 248\nEMC MAX_FREQ 5\n"
        "what is this\n< POWER_MODEL ID=0 NAME=MAXN_SUPER >\n< PM_CONFIG DEFAULT=3 >\nEMC MAX_FREQ 7\n"
    )
    found = controls.discover_controls(tmp_path)
    assert [(mode.name, mode.id, mode.emc_hz) for mode in found.modes] == [("MODE_15W", 3, 5), ("MAXN_SUPER", 0, None)]
    assert found.modes[0].gpu_masks == ("TPC_POWER_GATING TPC_PG_MASK 248",)
    assert found.find_mode("15w") is found.modes[0]
    assert found.find_mode("MAXN SUPER") is found.modes[1]
    assert found.find_mode("OLD") is None


def test_a_point_has_to_say_something(tmp_path: Path):
    write_fake_board(tmp_path, "jetson-tx2", 4)
    with pytest.raises(ClockError, match="'MAXX' has no frequency and is not a mode of this board: choose one of MAXN"):
        controls.pin_writes(controls.discover_controls(tmp_path), OperatingPoint(name="MAXX"))
    assert controls.pin_writes(controls.discover_controls(tmp_path), OperatingPoint(name="MAXQ")) == []


def test_nothing_heavy_is_imported():
    check = "import sys, fedquilt.edge_agent.clocks.helper; sys.exit('numpy' in sys.modules or 'psutil' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
