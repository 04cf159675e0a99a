"""Processes that a command starts for itself."""

from __future__ import annotations

import os
from pathlib import Path

from fedquilt.tools.simulation import agents
from fedquilt.tools.simulation.agents import ChildCommand


def test_ctrl_c_in_the_terminal_of_a_command_reaches_it_alone(tmp_path: Path) -> None:
    with agents.start_processes(
        {"broker": ChildCommand(["broker", "--listen", "127.0.0.1:0"], tmp_path / "log")}
    ) as started:
        assert os.getpgid(started["broker"].pid) != os.getpgid(0)
