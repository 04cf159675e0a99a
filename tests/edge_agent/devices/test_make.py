"""Which kind of board an agent speaks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from trees import Tree

from fedquilt import profiles
from fedquilt.core import JobError
from fedquilt.edge_agent import devices
from fedquilt.edge_agent.clocks.client import HelperStatus
from tests.fake_boards import write_fake_board


def test_a_host_that_is_no_linux_is_told_what_to_do(tmp_path: Path):
    with pytest.raises(JobError, match="set `board` to a profile to simulate"):
        devices.create_device("auto", tmp_path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("")
    with pytest.raises(JobError, match="has no memory size"):
        devices.create_device("auto", tmp_path)


def test_auto_is_this_host():
    device = devices.create_device("auto")
    available = device.read_sensors(0.0).available_bytes
    assert available is not None
    assert 0 < available <= device.memory_bytes


def test_only_a_jetson_has_the_rails_of_its_own_chips(tree: Tree, tmp_path_factory: pytest.TempPathFactory):
    assert "VDD_IN" not in devices.create_device("auto", tree.root).read_sensors(0.0).rails_w
    board = tmp_path_factory.mktemp("board")
    write_fake_board(board, "jetson-tx2", jetpack=4)
    assert "VDD_IN" in devices.create_device("auto", board).read_sensors(0.0).rails_w


class Helper:
    """A clock helper that knows of no clocks."""

    def request_status(self) -> HelperStatus:
        return HelperStatus(clocks=())


def test_the_clock_helper_is_asked_for_once_and_may_be_absent(tree: Tree):
    assert not devices.create_device("auto", tree.root, connect=lambda: None).adjustable
    assert devices.create_device("auto", tree.root, connect=Helper).adjustable


def test_a_profile_of_this_board_goes_before_the_shipped_one(tmp_path: Path):
    write_fake_board(tmp_path, "jetson-nano", jetpack=4)
    own = profiles.load_board_profile("x86-host")
    assert devices.create_device("auto", tmp_path, profile=own).idle_w == (own.idle_w.value if own.idle_w else None)
    with pytest.raises(JobError, match="remove `profile`"):
        devices.create_device("jetson-tx2", profile=own)


def test_devices_need_no_numpy():
    check = (
        "import sys; from fedquilt.edge_agent.devices import create_device; create_device('auto');"
        "create_device('x86-host');"
        "sys.exit(bool({'numpy', 'jtop', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
