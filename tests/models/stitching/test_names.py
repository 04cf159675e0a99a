"""Names of networks: short, and different for different networks."""

import pytest

from fedquilt.models.stitching import stitched_network

ACROSS = (*(f"a.{i}" for i in range(4)), "b.2", "b.3", "c.9")


@pytest.mark.parametrize(
    ("taps", "headed", "name"),
    [
        ([["a.0"]], True, "head on a.0"),
        ([["a.0", "a.1", "a.2"], ["b.0", "b.1"]], True, "head on a.2 + b.1"),
        ([ACROSS, ["b.0"]], True, "head on (a.0-3 > b.2 > b.3 > c.9) + b.0"),
        (
            [["a.0"], ["a.0", "a.1"], ["a.0", "a.1", "a.2"], ["a.0", "b.3"], ["b.0"]],
            True,
            "head on a.0-2 + (a.0 > b.3) + b.0",
        ),
        ([["a.0", "a.2"]], True, "head on (a.0 > a.2)"),
        ([["a.0", "a.2", "a.3", "a.4"]], True, "head on (a.0 > a.2-4)"),
        ([["a.0", "a.1", "a.2"]], False, "a.0-2"),
        ([["a.0", "b.1"]], False, "a.0 > b.1"),
        ([["net.v2.9", "net.v2.10", "net.v2.11"]], False, "net.v2.9-11"),
    ],
)
def test_a_network_is_named_by_its_taps(taps, headed, name):
    assert stitched_network.network_name(taps, headed) == name


def test_a_path_of_two_neighbours_is_written_out():
    assert stitched_network.path_name(("a.0", "a.1", "b.2", "b.3")) == "a.0 > a.1 > b.2 > b.3"
