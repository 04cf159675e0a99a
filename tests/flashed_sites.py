"""An operator's folder of settings, and what a bundle makes of them."""

from __future__ import annotations

import shlex
from pathlib import Path

from fedquilt.tools.boards.flash import bundle
from fedquilt.tools.boards.flash.bundle import BoardFiles, CoordinatorFiles, read_board_files

URL = '[broker]\nurl = "mqtts://broker.site:8883"\n'


def told(site: Path, text: str, *given: object) -> BoardFiles:
    (site / "agent.toml").write_text('device = "orin-1"\nhome = "agent-home"\n' + text)
    return read_board_files(site / "agent.toml", *given)


def serving(site: Path, text: str = "") -> CoordinatorFiles:
    files = 'ca = "ca.crt"\ncert = "orin-1.crt"\nkey = "orin-1.key"\n'
    (site / "coordinator.toml").write_text(f'fleet = "site"\n{URL}{files}{text}')
    return bundle.read_coordinator_files(site / "coordinator.toml")


# -- a coordinator's machine ----------------------------------------------------------------------


def exec_line(text: bytes) -> list[str]:
    (line,) = [line for line in text.decode().splitlines() if line.startswith("ExecStart=")]
    words = shlex.split(line)
    return words[words.index("fedquilt.cli") + 1 :]
