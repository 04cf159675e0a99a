"""The energy ledger: integrals small enough to do by hand, and sensors that misbehave."""

from __future__ import annotations

import math

import pytest

from fedquilt.core import Cost, Reading
from fedquilt.edge_agent.power.task_power import EnergyAccount, total_cost

RAIL = "ina3221 VDD_IN"


def powers(*samples: tuple[float, float | None]) -> EnergyAccount:
    ledger = EnergyAccount(0.0)
    for at_s, watts in samples:
        ledger = ledger.with_reading(at_s, Reading(power_w=watts, energy_source=RAIL))
    return ledger


def counters(*samples: tuple[float, float]) -> EnergyAccount:
    ledger = EnergyAccount(0.0)
    for at_s, joules in samples:
        ledger = ledger.with_reading(at_s, Reading(energy_j=joules, energy_source="rapl"))
    return ledger


def test_powers_are_integrated_by_trapezoids() -> None:
    """2 W to 4 W in half a second are 1.5 J, 4 W to 4 W another 2 J; the left and right rectangles differ by 1 J."""
    cost = powers((0.0, 2.0), (0.5, 4.0), (1.0, 4.0)).cost_until(1.0, idle_w=1.0, point="MAXN")
    assert cost == Cost(
        duration_s=1.0,
        energy_j=1.5 + 2.0,
        idle_j=1.0,
        energy_error_j=0.5,
        energy_source=f"{RAIL}, 2 Hz, trapezoids",
        point="MAXN",
    )


@pytest.mark.parametrize(
    ("account", "until_s", "energy_j", "error_j", "source"),
    [
        (powers(*((i / 10, 5.0) for i in range(11))), 1.0, 5.0, 0.0, f"{RAIL}, 10 Hz, trapezoids"),
        # t squared to 2 s, whose integral is 8/3: within the bound, as of any power that only rises
        (powers(*((t / 2, t * t / 4) for t in range(5))), 2.0, 2.75, 1.0, f"{RAIL}, 2 Hz, trapezoids"),
        # 0.2 s at 3 W and 0.3 s at 5 W were not watched, and count in full into the bound
        (powers((0.2, 3.0), (1.0, 5.0)), 1.3, 0.6 + 3.2 + 1.5, 2.1 + 0.8, None),
        # so does a gap of 3 s between two readings of 4 W
        (powers((0.0, 4.0), (3.0, 4.0)), 3.0, 12.0, 12.0, None),
        # None and not-a-number say nothing: the trapezoid is from 0 to 0.3 s
        (powers((0.0, 2.0), (0.1, None), (0.2, math.nan), (0.3, 4.0)), 0.3, 0.9, 0.3, None),
        # a reading of the past, or a second one of the same moment, adds nothing
        (powers((0.0, 2.0), (1.0, 2.0), (0.5, 100.0), (1.0, 100.0), (2.0, 2.0)), 2.0, 4.0, None, None),
        # a task shorter than the time between two readings: one power is its own bound
        (powers((0.0, 3.0)), 0.05, 0.15, 0.15, f"{RAIL}, one reading, trapezoids"),
        # the most that came at once, 4 J, is how far behind a counter may be
        (counters((0.0, 100.0), (1.0, 103.0), (2.0, 107.0)), 2.0, 7.0, 4.0, "rapl, counter"),
        # 5 J, then nonsense, then 8 J: what came from the last good reading on is not lost
        (counters((0.0, 5.0), (1.0, 0.0), (2.0, 8.0)), 2.0, 3.0, None, None),
        # 2 J in the last second, so 1 J in the half second after it
        (counters((0.0, 0.0), (1.0, 2.0)), 1.5, 3.0, 2.0 + 1.0, None),
    ],
)
def test_joules_and_their_bound_are_those_done_by_hand(
    account: EnergyAccount, until_s: float, energy_j: float, error_j: float | None, source: str | None
) -> None:
    cost = account.cost_until(until_s, None)
    assert cost.energy_j == pytest.approx(energy_j)
    assert cost.energy_error_j == pytest.approx(cost.energy_error_j if error_j is None else error_j)
    assert cost.energy_source == (source or cost.energy_source)
    assert cost.idle_j is None


def test_no_time_passes_before_a_task_begins() -> None:
    assert powers((5.0, 2.0)).cost_until(-1.0, idle_w=1.0).duration_s == 0.0


def test_a_counter_is_preferred_to_a_power_and_one_meter_to_a_mixture() -> None:
    """60 W of the board, then the processor's 15 W, then 60 W again: 120 J in two seconds."""
    both, two = EnergyAccount(0.0), EnergyAccount(0.0)
    for at_s, joules in ((0.0, 0.0), (1.0, 9.0)):
        both = both.with_reading(at_s, Reading(energy_j=joules, power_w=1.0, energy_source="rapl"))
    for at_s, watts, source in ((0.0, 60.0, "plug"), (1.0, 15.0, "rapl"), (2.0, 60.0, "plug")):
        two = two.with_reading(at_s, Reading(power_w=watts, energy_source=source))
    assert both.cost_until(1.0, None).energy_j == 9.0
    cost = two.cost_until(2.0, None)
    assert (cost.energy_j, cost.energy_source) == (120.0, "plug, 0.5 Hz, trapezoids")


@pytest.mark.parametrize("ledger", [powers(), powers((0.0, None)), counters((0.0, 7.0))], ids=["", "none", "one"])
def test_without_a_meter_joules_are_unknown_and_not_zero(ledger: EnergyAccount) -> None:
    cost = ledger.cost_until(10.0, idle_w=2.0)
    assert (cost.energy_j, cost.energy_error_j, cost.energy_source) == (None, None, None)
    assert cost.idle_j == 20.0


def test_a_new_stretch_begins_with_the_last_reading() -> None:
    first = powers((0.0, 2.0), (1.0, 4.0))
    second = first.next_segment(1.0).with_reading(2.0, Reading(power_w=4.0))
    assert first.cost_until(1.0, None).energy_j == 3.0
    assert second.cost_until(2.0, None).energy_j == 4.0
    assert first.next_segment(1.5).cost_until(2.0, None).energy_j is None


def test_stretches_are_added_up() -> None:
    one = Cost(duration_s=2.0, energy_j=8.0, idle_j=2.0, energy_error_j=1.0, energy_source="rapl", point="MAXQ")
    two = Cost(duration_s=1.0, energy_j=9.0, idle_j=1.0, energy_error_j=0.5, energy_source="rapl", point="MAXN")
    assert total_cost([one, two]) == Cost(
        duration_s=3.0,
        energy_j=17.0,
        idle_j=3.0,
        energy_error_j=1.5,
        energy_source="rapl",
        point="MAXQ, then MAXN",
    )
    assert total_cost([one, Cost(duration_s=1.0)]).energy_j is None
    assert total_cost([one, one]).point == "MAXQ"
    assert total_cost([one, Cost(duration_s=1.0)]).point == "MAXQ, then unpinned"
    assert total_cost([Cost(duration_s=1.0)]).point is None


def test_a_meter_that_dies_on_the_way_makes_the_joules_unknown() -> None:
    """Ten seconds of 5 W, then nothing for twenty: nobody knows; a silence of a second is bridged."""
    alive = [(i / 2, 5.0 + i % 2) for i in range(21)]
    dead = powers(*alive).cost_until(30.0, idle_w=1.0, point="MAXN")
    assert (dead.energy_j, dead.energy_error_j, dead.energy_source) == (None, None, None)
    assert (dead.duration_s, dead.idle_j, dead.point) == (30.0, 30.0, "MAXN")
    assert powers(*alive).cost_until(11.0, None).energy_j is not None
    assert powers(*alive, (30.0, 5.0)).cost_until(30.5, None).energy_j is None  # nor does it help that it comes back
    assert powers((6.0, 5.0), (6.5, 5.5)).cost_until(7.0, None).energy_j is None  # nor that it had not begun


def test_a_meter_that_freezes_on_the_way_makes_the_joules_unknown() -> None:
    moving = [(i / 2, 5.0 + i % 2) for i in range(21)]
    frozen = [(10.0 + i / 2, 6.0) for i in range(1, 41)]
    assert powers(*moving, *frozen[:10]).cost_until(15.0, None).energy_j is not None
    assert powers(*moving, *frozen).cost_until(30.0, None).energy_j is None
    counted = counters(*((at_s, 5 * at_s) for at_s, _ in moving), *((at_s, 50.0) for at_s, _ in frozen))
    assert counted.cost_until(30.0, None).energy_j is None


def test_a_coarse_meter_is_not_taken_for_a_frozen_one() -> None:
    readings = [(float(i), 4.7 + 0.1 * (i // 3 % 2)) for i in range(31)]
    still = [(30.0 + i, 4.7) for i in range(1, 31)]
    assert powers(*readings, *still).cost_until(60.0, None).energy_j is not None
    assert powers(*((float(i), 4.7) for i in range(31))).cost_until(30.0, None).energy_j == pytest.approx(141.0)


def test_what_no_board_can_draw_is_passed_over() -> None:
    """Of 5 W boards: 900 W for a moment, and a counter that leaps by 4 kJ and does not come back."""
    ledger = EnergyAccount(0.0, max_w=40.0)
    for at_s, watts in ((0.0, 5.0), (0.5, 900.0), (1.0, -3.0), (1.5, 5.0)):
        ledger = ledger.with_reading(at_s, Reading(power_w=watts, energy_source=RAIL))
    assert ledger.cost_until(1.5, None).energy_j == pytest.approx(7.5)
    leap = EnergyAccount(0.0, max_w=40.0)
    for index in range(20):
        leap = leap.with_reading(float(index), Reading(energy_j=5.0 * index + (4000.0 if index > 5 else 0.0)))
    assert leap.cost_until(19.0, None).energy_j is None


def test_a_new_stretch_remembers_how_a_meter_moves() -> None:
    ledger = powers(*((i / 2, 5.0 + i % 2) for i in range(21)))
    for index in range(1, 21):
        ledger = ledger.with_reading(10.0 + index / 2, Reading(power_w=6.0, energy_source=RAIL))
    second = ledger.next_segment(20.0)
    for index in range(1, 11):
        second = second.with_reading(20.0 + index / 2, Reading(power_w=6.0, energy_source=RAIL))
    assert second.cost_until(25.0, None).energy_j is None
