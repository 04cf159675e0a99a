"""The README is short, and its commands print what it shows."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
import readme
from browsers import CHROMIUM

import documents

MOST_LINES = 116
WORDS = range(300, 451)  # outside of blocks


def test_it_is_a_front_door() -> None:
    """What does not fit belongs into docs/."""
    text = (documents.ROOT / readme.PAGE).read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert len(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).split()) in WORDS


def test_its_commands_print_what_it_shows(tmp_path: Path) -> None:
    """All that it names, on this machine, with a broker of ours in place of the reader's."""
    readme.check_output(tmp_path)


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt install chromium")
def test_its_picture_can_be_drawn_again(tmp_path: Path) -> None:
    """In the size of the one that is shown."""
    readme.draw_dashboard(tmp_path, tmp_path / "new.png")
    shown = (documents.ROOT / readme.PICTURE).read_bytes()
    new = (tmp_path / "new.png").read_bytes()
    assert len(new) > 10_000
    assert struct.unpack(">II", new[16:24]) == struct.unpack(">II", shown[16:24]) == readme.SIZE
