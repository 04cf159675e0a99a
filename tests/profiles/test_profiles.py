"""Board profiles: every number in every file says where it comes from."""

from __future__ import annotations

import pytest

from fedquilt import profiles
from fedquilt.core import JobError

BOARDS = ["jetson-agx-orin", "jetson-nano", "jetson-orin-nano", "jetson-tx2", "jetson-xavier-nx"]
BOARDS += ["raspberry-pi-5", "x86-host"]

SMALL = """
board = "small"
title = "for this test"
memory_bytes = { value = 1000, source = "sheet" }

[sources.sheet]
provenance = "datasheet"
text = "Read in a data sheet that does not exist."

[sources.guess]
provenance = "assumed"
text = "Assumed for the sake of this test."

[[points]]
name = "slow"
cpu_hz = { value = 2, source = "sheet" }
busy_w = { value = 3, source = "guess" }
"""

CORES = {"jetson-nano": 128, "jetson-tx2": 256, "jetson-xavier-nx": 384, "jetson-orin-nano": 1024}
CORES["jetson-agx-orin"] = 2048
BUS_BYTES = {"jetson-nano": 8, "jetson-tx2": 16, "jetson-xavier-nx": 16, "jetson-orin-nano": 16, "jetson-agx-orin": 32}


def test_the_boards_the_brief_names_are_there():
    """One file each, found by its name."""
    assert profiles.names() == BOARDS


@pytest.mark.parametrize("name", BOARDS)
def test_every_file_loads_and_is_named_after_its_board(name):
    """The strict schema holds, and no source is without a number that uses it."""
    board = profiles.load(name)
    assert board.board == name
    assert {figure.source for figure in board.figures()} == set(board.sources)


@pytest.mark.parametrize("name", BOARDS)
def test_what_nobody_measured_is_called_assumed(name):
    """Speed and busy power of no board were measured by us, and no file claims so."""
    board = profiles.load(name)
    for point in board.points:
        assert board.provenance(point.flops_per_s, point.bytes_per_s) == "assumed"
        assert board.provenance(point.busy_w) == "assumed"


@pytest.mark.parametrize("name", sorted(CORES))
def test_assumed_speeds_follow_from_the_rule_they_state(name):
    """30 % of cores * 2 * gpu_hz, 60 % of 2 * emc_hz * bus width, each to the digits given."""
    for point in profiles.load(name).points:
        assert point.flops_per_s.value == pytest.approx(0.3 * CORES[name] * 2 * point.gpu_hz.value, rel=2e-3)
        if point.emc_hz is not None:
            assert point.bytes_per_s.value == pytest.approx(0.6 * 2 * point.emc_hz.value * BUS_BYTES[name], rel=5e-3)


@pytest.mark.parametrize("name", BOARDS)
def test_a_faster_point_of_a_board_never_draws_less(name):
    """Otherwise a governor would always pick it, on numbers nobody measured."""
    points = sorted(profiles.load(name).points, key=lambda point: point.flops_per_s.value)
    drawn = [point.busy_w.value for point in points]
    assert drawn == sorted(drawn)


def test_numbers_travel_without_their_sources():
    """An operating point of the wire holds what is known and None for the rest."""
    (point,) = profiles.parse(SMALL, "small").points
    sent = point.operating_point()
    assert (sent.name, sent.cpu_hz, sent.busy_w, sent.gpu_hz, sent.flops_per_s) == ("slow", 2, 3, None, None)


def test_provenance_is_that_of_the_least_sure_number():
    """Datasheet with datasheet is datasheet; with an assumption it is assumed."""
    board = profiles.parse(SMALL, "small")
    (point,) = board.points
    assert board.provenance(board.memory_bytes, point.cpu_hz) == "datasheet"
    assert board.provenance(point.cpu_hz, None, point.busy_w) == board.provenance() == "assumed"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('busy_w = { value = 3, source = "guess" }', "busy_w = 3", "points"),
        ('source = "guess" }', 'source = "hearsay" }', "hearsay"),
        ("value = 1000", "value = 0", "memory_bytes"),
        ('provenance = "assumed"', 'provenance = "rumour"', "rumour"),
        ("busy_w", "busy_watts", "busy_watts"),
        ("[[points]]", "[[points]", "is not TOML"),
    ],
)
def test_a_number_without_its_source_is_refused(old, new, message):
    """As is anything else the schema does not know; the message names file and place."""
    with pytest.raises(JobError, match=rf"small\.toml.*{message}"):
        profiles.parse(SMALL.replace(old, new), "small.toml")


def test_an_unknown_board_lists_those_there_are():
    """The mend is in the message."""
    with pytest.raises(JobError, match=r"'jetson-tx9' is unknown; there are: jetson-agx-orin, .*auto"):
        profiles.load("jetson-tx9")
