"""Fitting the model: what is known comes back, and what the fit is worth is said."""

import numpy as np
import pytest

from fedquilt.profiles import clock_model, fit

TOP = {"cpu_hz": 2e9, "gpu_hz": 1.3e9, "emc_hz": 1.8e9}
LISTS = {"cpu_hz": [0.4e9, 0.8e9, 1.2e9, 1.6e9, 2e9], "gpu_hz": [0.3e9, 0.8e9, 1.3e9], "emc_hz": [0.6e9, 1.2e9, 1.8e9]}
GRID = clock_model.make_grid(LISTS, 100)
TIME = clock_model.InverseTimeLaw(1e-12, {"cpu_hz": 1e-3, "gpu_hz": 4e-3, "emc_hz": 2e-3})
POWER = clock_model.PowerModel(3.0, {"cpu_hz": 2.0, "gpu_hz": 6.0, "emc_hz": 1.0}, exponent=2.5)


def seen(value, noise: float = 0.0, count: int = 14) -> list[fit.MeasuredPoint]:
    rng = np.random.default_rng(3)
    chosen = [GRID[place] for place in fit.select_points_to_measure(GRID, count, TOP)]
    return [fit.MeasuredPoint(clocks, value(clocks, TOP) * rng.lognormal(0.0, noise)) for clocks in chosen]


def test_a_time_without_noise_comes_back_exactly():
    found, errors = fit.fit_time_law(seen(TIME.compute_seconds), TOP)
    assert found.fixed_s == pytest.approx(TIME.fixed_s)
    assert found.cycles == pytest.approx(dict(TIME.cycles))
    assert errors.worst == pytest.approx(0.0, abs=1e-9)


def test_a_power_without_noise_comes_back_with_its_exponent():
    found, errors = fit.fit_power_model(seen(POWER.compute_watts), TOP)
    assert (found.base_w, found.exponent) == (pytest.approx(3.0), 2.5)
    assert found.axes_w == pytest.approx(dict(POWER.axes_w))
    assert errors.median == pytest.approx(0.0, abs=1e-9)


def test_a_noisy_time_is_recovered_about_as_well_as_the_fit_says():
    found, errors = fit.fit_time_law(seen(TIME.compute_seconds, 0.03), TOP)
    off = [abs(found.compute_seconds(clocks, TOP) / TIME.compute_seconds(clocks, TOP) - 1) for clocks in GRID]
    assert max(off) < 0.06
    assert 0.01 < errors.median < 0.06
    assert errors.worst < 0.12


def test_coefficients_are_never_negative():
    backwards = [fit.MeasuredPoint({"cpu_hz": hz}, hz / 1e9) for hz in (1e9, 1.5e9, 2e9)]
    found, errors = fit.fit_time_law(backwards, TOP)
    assert found.cycles == {}
    assert found.fixed_s > 0
    assert errors.worst > 0.2


def test_what_does_not_vary_is_not_told_apart():
    found, errors = fit.fit_time_law([fit.MeasuredPoint(dict(TOP), 2.0)], TOP)
    assert (found.fixed_s, dict(found.cycles)) == (pytest.approx(2.0), {})
    assert (errors.median, errors.worst, errors.left_out) == (None, None, (None,))


def test_a_point_that_alone_tells_of_a_clock_cannot_be_left_out():
    points = [
        fit.MeasuredPoint({"cpu_hz": 1e9}, 2.0),
        fit.MeasuredPoint({"cpu_hz": 1e9}, 2.2),
        fit.MeasuredPoint({"cpu_hz": 2e9}, 1.0),
    ]
    _, errors = fit.fit_time_law(points, TOP)
    assert errors.left_out[2] is None
    assert errors.left_out[0] is not None


def test_base_power_is_no_less_than_its_floor():
    found, _ = fit.fit_power_model(seen(POWER.compute_watts), TOP, floor_w=5.0)
    assert found.base_w >= 5.0


def test_nothing_seen_is_refused():
    with pytest.raises(ValueError, match="no measurements to fit"):
        fit.fit_time_law([], TOP)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_measurement_that_is_not_above_0_is_named(value):
    points = [fit.MeasuredPoint({"cpu_hz": 1e9}, 2.0), fit.MeasuredPoint({"cpu_hz": 2e9}, value)]
    said = f"measurement 1 is {value:g}, not above 0"
    for act in (
        lambda: fit.fit_time_law(points, TOP),
        lambda: fit.fit_power_model(points, TOP),
        lambda: fit.fit_unit_costs([[1.0], [2.0]], [2.0, value]),
    ):
        with pytest.raises(ValueError, match=said):
            act()


def test_the_design_begins_with_the_fastest_and_the_middle_and_then_takes_corners():
    chosen = [GRID[place] for place in fit.select_points_to_measure(GRID, 6, TOP)]
    assert chosen[0] == GRID[0]
    assert chosen[1] == {"cpu_hz": 1.2e9, "gpu_hz": 0.8e9, "emc_hz": 1.2e9}
    for axis, values in LISTS.items():
        assert {values[0], values[-1]} <= {clocks[axis] for clocks in chosen}
    assert len({tuple(clocks.values()) for clocks in chosen}) == 6
    assert fit.select_points_to_measure(GRID, 6, TOP) == fit.select_points_to_measure(GRID, 6, TOP)


def test_a_design_takes_no_more_than_there_is():
    assert sorted(fit.select_points_to_measure(GRID[:2], 10, TOP)) == [0, 1]
    assert fit.select_points_to_measure([], 3, TOP) == []
