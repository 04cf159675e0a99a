"""A profile's points on a board that lists clocks of its own; small enough to check by hand."""

from __future__ import annotations

import pytest
from toy_profiles import HEAD
from trees import Tree

from fedquilt import profiles
from fedquilt.edge_agent.clocks import controls
from fedquilt.edge_agent.devices import linux

MODES = """
[[points]]
name = "MAXN"
cpu_hz = { value = 2.0e9, source = "sheet" }
gpu_hz = { value = 1.0e9, source = "sheet" }
busy_w = { value = 10, source = "sheet" }

[[points]]
name = "MAXQ"
cpu_hz = { value = 1.2e9, source = "sheet" }
busy_w = { value = 6, source = "sheet" }

[[points]]
name = "OWN"
"""
GRID = """
[clocks]
cpu_hz = { values = [1.0e9, 2.0e9], source = "sheet" }
gpu_hz = { values = [0.5e9, 1.0e9], source = "sheet" }

[model]
flop_cpu_cycles = { value = 0.5, source = "sheet" }
flop_gpu_cycles = { value = 1, source = "sheet" }
"""


def profile(text: str) -> profiles.BoardProfile:
    return profiles.parse_board_profile(text, "toy")


def names(text: str, own: linux.Lists) -> list[tuple[str, float | None, float | None]]:
    return [(point.name, point.cpu_hz, point.gpu_hz) for point in linux.fit_points(profile(text), own)]


def test_a_mode_is_its_cap_on_the_boards_own_list():
    """1200 MHz allows 1113.6, the highest listed up to it; a cap written as 2000 means 2010 (within 1 %)."""
    own = {"cpu_hz": (0.9e9, 1.1136e9, 1.2672e9, 2.01e9), "gpu_hz": (1.0e9,)}
    assert names(HEAD + MODES, own) == [("MAXN", 2.01e9, 1.0e9), ("MAXQ", 1.1136e9, None), ("OWN", None, None)]


def test_a_mode_that_the_board_cannot_have_is_left_out():
    """Nothing listed up to 2 GHz lies within 10 % of it."""
    own = {"cpu_hz": (1.2e9, 1.7e9, 2.5e9), "gpu_hz": (1.0e9,)}
    assert [name for name, *_ in names(HEAD + MODES, own)] == ["MAXQ", "OWN"]


def test_a_clock_that_the_board_does_not_list_is_left_to_it():
    found = linux.fit_points(profile(HEAD + MODES), {})
    assert [(point.name, point.cpu_hz, point.gpu_hz, point.busy_w) for point in found] == [
        ("MAXN", None, None, 10.0),
        ("MAXQ", None, None, 6.0),
        ("OWN", None, None, None),
    ]


def test_the_grid_is_of_the_boards_own_clocks():
    """The profile has 1 and 2 GHz, this board 1.5 and 2; speed by the model: 0.5 / 1.5e9 + 1 / 0.5e9 s a FLOP."""
    own = {"cpu_hz": (1.5e9, 2.0e9), "gpu_hz": (0.5e9, 1.0e9)}
    found = {point.name: point for point in linux.fit_points(profile(HEAD + GRID + MODES), own)}
    assert set(found) == {"MAXN", "OWN", "cpu2000-gpu500", "cpu1500-gpu1000", "cpu1500-gpu500"}
    assert found["cpu1500-gpu500"].flops_per_s == pytest.approx(1 / (0.5 / 1.5e9 + 1 / 0.5e9), rel=1e-3)


def test_a_clock_of_the_model_that_the_board_does_not_list_is_taken_at_its_highest():
    """The GPU runs as its own governor likes, at most at 1 GHz: the grid is over the processor's clocks alone."""
    found = {point.name: point for point in linux.fit_points(profile(HEAD + GRID + MODES), {"cpu_hz": (1.5e9, 2.0e9)})}
    assert set(found) == {"MAXN", "OWN", "cpu1500"}
    assert found["cpu1500"].gpu_hz is None
    assert found["cpu1500"].flops_per_s == pytest.approx(1 / (0.5 / 1.5e9 + 1 / 1e9), rel=1e-3)


def test_a_mode_and_a_point_of_the_grid_with_the_same_clocks_are_one():
    """The mode keeps its name: MAXQ's cap of 1200 MHz is this board's 1113.6, and MAXN its 2000."""
    own = {"cpu_hz": (1.1136e9, 2.0e9)}
    assert [name for name, *_ in names(HEAD + GRID + MODES, own)] == ["MAXN", "MAXQ", "OWN"]


def test_a_board_with_other_highest_clocks_gets_no_grid():
    own = {"cpu_hz": (1.2e9, 2.0e9), "gpu_hz": (0.5e9, 0.7e9)}
    assert [name for name, *_ in names(HEAD + GRID + MODES, own)] == ["MAXQ", "OWN"]


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("2000000 1000000 2000000", (1.0e9, 2.0e9)),  # unsorted, twice the same
        ("1000000 fast 2000000\n\n", (1.0e9, 2.0e9)),  # a word that is no number
        ("0 -5 1000000", (1.0e9,)),  # nothing runs at 0 or less
        ("", None),
        ("none", None),
    ],
)
def test_lists_that_lie_are_put_right_or_dropped(tree: Tree, listed: str, expected: tuple[float, ...] | None):
    tree.cores(listed)
    assert linux.common_frequencies(controls.discover_controls(tree.root).controls).get("cpu_hz") == expected


def test_clocks_of_two_policies_are_those_that_both_have(tree: Tree):
    """TX2's two kinds of cores: a point names one clock for all of them."""
    tree.cores("1000000 1500000 2000000")
    tree.cores("1000000 2000000", "policy1")
    assert linux.common_frequencies(controls.discover_controls(tree.root).controls) == {"cpu_hz": (1.0e9, 2.0e9)}
    tree.cores("3000000", "policy1")
    assert linux.common_frequencies(controls.discover_controls(tree.root).controls) == {}
