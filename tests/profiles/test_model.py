"""The law from clocks to speed and power, by hand; and the grid, whose thinning is part of what a profile says."""

import pytest

from fedquilt.profiles import clock_model

TOP = {"cpu_hz": 4.0, "gpu_hz": 10.0, "emc_hz": 8.0}


def test_time_falls_with_each_clock():
    law = clock_model.InverseTimeLaw(0.5, {"cpu_hz": 2.0, "gpu_hz": 5.0, "emc_hz": 8.0})
    assert law.compute_seconds({"cpu_hz": 4.0, "gpu_hz": 5.0, "emc_hz": 2.0}, TOP) == pytest.approx(6.0)
    assert clock_model.InverseTimeLaw().compute_seconds({}, TOP) is None


def test_a_clock_that_is_not_said_is_the_highest():
    law = clock_model.InverseTimeLaw(0.0, {"gpu_hz": 5.0})
    assert law.compute_seconds({}, TOP) == law.compute_seconds({"gpu_hz": None}, TOP) == 0.5


def test_power_bends_with_a_core_s_clock_and_not_with_the_memory_s():
    law = clock_model.PowerModel(1.0, {"cpu_hz": 4.0, "emc_hz": 8.0}, exponent=3.0)
    assert law.compute_watts({"cpu_hz": 2.0, "emc_hz": 2.0}, TOP) == pytest.approx(3.5)
    assert clock_model.PowerModel().compute_watts({}, TOP) is None


def test_a_grid_is_every_combination_fastest_first():
    points = clock_model.make_grid({"cpu_hz": [1e6, 2e6], "emc_hz": [3e6, 5e6]}, 10)
    assert [clock_model.format_point_name(point) for point in points] == [
        "cpu2-emc5",
        "cpu2-emc3",
        "cpu1-emc5",
        "cpu1-emc3",
    ]


def test_a_grid_is_thinned_from_its_longest_list_and_keeps_the_ends():
    points = clock_model.make_grid({"cpu_hz": [1, 2, 3, 4, 5], "gpu_hz": [10, 20, 30]}, 9)
    assert sorted({point["cpu_hz"] for point in points}) == [1, 3, 5]
    assert sorted({point["gpu_hz"] for point in points}) == [10, 20, 30]


@pytest.mark.parametrize("room", range(1, 40))
def test_a_grid_never_has_more_points_than_there_is_room(room):
    points = clock_model.make_grid({"cpu_hz": range(1, 13), "gpu_hz": range(1, 15), "emc_hz": range(1, 12)}, room)
    assert 1 <= len(points) <= room
    assert points[0] == {"cpu_hz": 12, "gpu_hz": 14, "emc_hz": 11}
    assert len({tuple(point.values()) for point in points}) == len(points)


def test_a_grid_of_nothing_is_empty():
    assert (
        clock_model.make_grid({}, 100)
        == clock_model.make_grid({"cpu_hz": []}, 100)
        == clock_model.make_grid({"cpu_hz": [1.0]}, 0)
        == []
    )
