"""Boards made of files, which tests read in place of real ones."""

import re
import shutil

import pytest

from fedquilt.core import JobError
from fedquilt.edge_agent import devices
from fedquilt.edge_agent.clocks import controls
from tests.fake_boards import BOARDS, write_fake_board

EVERY = [(board, jetpack) for board, layout in BOARDS.items() for jetpack in layout.jetpacks]


@pytest.mark.parametrize(("board", "jetpack"), EVERY)
def test_a_planted_board_hangs_together(tmp_path, board, jetpack):
    write_fake_board(tmp_path, board, jetpack)
    named = re.findall(r"^[A-Z_0-9]+ (/sys/\S+)$", (tmp_path / "etc/nvpmodel.conf").read_text(), re.MULTILINE)
    assert len(named) > 8
    assert [path for path in named if not (tmp_path / path[1:]).is_file()] == []
    found = controls.discover_controls(tmp_path)
    assert {lever.kind for lever in found.controls} == {"cpu", "gpu", "emc"}
    assert all(lever.listed_values for lever in found.controls if lever.kind != "emc")
    assert [mode.name for mode in found.modes] == [mode.name for mode in BOARDS[board].modes]


def test_a_planted_board_may_be_moved(tmp_path):
    write_fake_board(tmp_path / "here", "jetson-tx2", 4)
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert devices.create_device("auto", tmp_path / "there").read_sensors(0.0).power_w == pytest.approx(3.8)


@pytest.mark.parametrize(("board", "jetpack"), [("jetson-tx3", 4), ("jetson-tx2", 6)])
def test_a_board_that_never_was_is_refused(tmp_path, board, jetpack):
    with pytest.raises(JobError, match="jetson-tx2 4, jetson-xavier-nx 4/5"):
        write_fake_board(tmp_path, board, jetpack)
