"""A profile that is written is the one that is read."""

import msgspec
import pytest

from fedquilt import profiles
from fedquilt.core import JobError
from fedquilt.profiles import NumberSource
from fedquilt.tools.boards import record


@pytest.mark.parametrize("name", profiles.board_names())
def test_every_profile_survives_being_written(name):
    board = profiles.load_board_profile(name)
    assert profiles.parse_board_profile(record.format_board(board), "written") == board


@pytest.mark.parametrize(
    "text",
    [
        'it says "so" and \\ so, twenty',
        "two\nlines and a\ttab, twenty",
        "Gr\u00f6\u00dfe \U0001f600 \x7f \x01, more than twenty of them",
    ],
)
def test_any_text_survives(text):
    board = profiles.load_board_profile("x86-host")
    sources = {**board.sources, "a key": NumberSource("table", text)}
    board = msgspec.structs.replace(board, title=text[:50], sources=sources)
    assert profiles.parse_board_profile(record.format_board(board), "written") == board


def test_no_digit_is_lost():
    board = profiles.load_board_profile("jetson-tx2")
    odd = profiles.SourcedValue(0.1 + 0.2, "speed")
    model = msgspec.structs.replace(
        board.model, flop_s=profiles.SourcedValue(1.23456789012345e-13, "speed"), byte_s=odd
    )
    board = msgspec.structs.replace(board, model=model)
    assert profiles.parse_board_profile(record.format_board(board), "written") == board


def test_a_recorded_profile_that_is_damaged_is_refused(tmp_path):
    text = record.format_board(profiles.load_board_profile("jetson-nano"))
    at = text.index("value = ") + len("value = ")
    damaged = text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :]
    (tmp_path / "own.toml").write_text(damaged)
    with pytest.raises(JobError, match=r"own.toml has changed since .* record the board again, or remove the last"):
        profiles.find_board_profile(str(tmp_path / "own.toml"))
    (tmp_path / "own.toml").write_text("".join(damaged.splitlines(keepends=True)[:-1]))
    assert profiles.find_board_profile(str(tmp_path / "own.toml")).board == "jetson-nano"
