"""Boards made of files: what tests and benches read in place of real ones."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from fedquilt.core import JobError
from fedquilt.edge_agent import devices
from fedquilt.edge_agent.clocks import controls
from fedquilt.profiles.board_layouts import BOARDS
from fedquilt.testing.boards import write_fake_board
from fedquilt.tools.lab.bench import sensors

EVERY = [(board, jetpack) for board, layout in BOARDS.items() for jetpack in layout.jetpacks]


@pytest.mark.parametrize(("board", "jetpack"), EVERY)
def test_a_planted_board_hangs_together(tmp_path: Path, board: str, jetpack: int):
    """Every file that the catalogue of modes names is there, and all the clocks can be found and are listed."""
    write_fake_board(tmp_path, board, jetpack)
    named = re.findall(r"^[A-Z_0-9]+ (/sys/\S+)$", (tmp_path / "etc/nvpmodel.conf").read_text(), re.MULTILINE)
    assert len(named) > 8
    assert [path for path in named if not (tmp_path / path[1:]).is_file()] == []
    found = controls.discover_controls(tmp_path)
    assert {lever.kind for lever in found.found} == {"cpu", "gpu", "emc"}
    assert all(lever.listed for lever in found.found if lever.kind != "emc")
    assert [mode.name for mode in found.modes] == [mode.name for mode in BOARDS[board].modes]


def test_a_planted_board_may_be_moved(tmp_path: Path):
    """Its links are relative, as those of sysfs are."""
    write_fake_board(tmp_path / "here", "jetson-tx2", 4)
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert devices.create_device("auto", tmp_path / "there").read_sensors(0.0).power_w == pytest.approx(3.8)


@pytest.mark.parametrize(("board", "jetpack"), [("jetson-tx3", 4), ("jetson-tx2", 6)])
def test_a_board_that_never_was_is_refused(tmp_path: Path, board: str, jetpack: int):
    """TX2 stopped at JetPack 4; the message lists what there is."""
    with pytest.raises(JobError, match="jetson-tx2 4, jetson-xavier-nx 4/5"):
        write_fake_board(tmp_path, board, jetpack)


def test_the_bench_of_sensors_reads_this_host_and_jetsons():
    """Its figures are of readings that told something: rails and power from the Jetsons, memory from any host."""
    result = sensors.measure(readings=2)
    assert {"available_bytes"} <= set(result["boards"]["this_host"]["tells"])
    for name in ("jetson_agx_orin", "jetson_tx2"):
        told = result["boards"][name]
        assert {"power_w", "rails_w", "temperature_c"} <= set(told["tells"])
        assert told["paced_s"] > 0
    assert len(result["figures"]) == 6
    assert len(sensors.lines(result)) == 9
