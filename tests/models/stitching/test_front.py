"""What a network costs, and which candidates no other beats."""

import pytest

from fedquilt import profiles
from fedquilt.core import JobError, WorkEstimate
from fedquilt.costs import cost_model
from fedquilt.models.stitching.search import candidates, ranking
from fedquilt.models.stitching.search.state import SearchParams
from fedquilt.models.stitching.stitched_network import Block, DonorPool


def block(donor: str, index: int, before: tuple[int, ...], after: tuple[int, ...]) -> Block:
    return Block(donor, index, "middle", (("g",),), (), before, after, 1000.0, 400, 400, 1)


BLOCKS = [block("a", 0, (1, 8, 8), (3, 8, 8)), block("a", 1, (3, 8, 8), (4, 4, 4)), block("b", 1, (5, 4, 4), (5, 4, 4))]
STOCK = DonorPool({"channels": 1, "size": 8}, ("x", "y"), {}, {each.id: each for each in BLOCKS})


def test_what_taps_share_costs_once_and_a_junction_costs_where_maps_are_smaller():
    """By hand: three blocks, a junction 3 -> 5 at 4 x 4 positions, a head of 2 labels on 4 + 5 features."""
    found = candidates.inference_cost(STOCK, [("a.0", "a.1"), ("a.0", "b.1")], 2)
    assert found.flops == 3 * 1000 + 2 * 3 * 5 * 16 + 2 * 9 * 2
    assert found.weight_bytes == 3 * 400 + 4 * (15 + 5) + 4 * 2 * 10
    maps = 4 * (64 + 192 + 192 + 64 + 80 + 80)
    assert found.read_bytes == maps + found.weight_bytes
    assert candidates.inference_cost(STOCK, [("a.0",)], 0) == candidates.InferenceCost(1000.0, 4 * 256 + 400, 400)


def test_the_weights_of_a_block_in_two_paths_count_once():
    one, both = (
        candidates.inference_cost(STOCK, paths, 0)
        for paths in ([("a.0", "b.1")], [("a.0", "b.1"), ("a.0", "a.1", "b.1")])
    )
    assert both.flops - one.flops == 2000 + 2 * 4 * 5 * 16
    assert both.weight_bytes - one.weight_bytes == 400 + 4 * (20 + 5)


def test_milliseconds_and_joules_are_those_of_the_boards_profile():
    [point, *_] = profiles.load_board_profile("jetson-tx2").operating_points()
    seconds = cost_model.work_seconds(WorkEstimate(flops=1e9, read_bytes=1e7, task_share=0.0), point)
    assert seconds is not None
    assert candidates.board_cost(1e9, 1e7, "jetson-tx2") == pytest.approx((1e3 * seconds, point.busy_w * seconds))
    with pytest.raises(JobError, match="jetson-tx9"):
        candidates.board_cost(1e9, 1e7, "jetson-tx9")


@pytest.mark.parametrize(
    ("budget", "fits"),
    [
        ({}, True),
        ({"budget_mflop": 2.0, "budget_mb": 0.5}, True),
        ({"budget_mflop": 1.999}, False),
        ({"budget_mflop": 2.0, "budget_mb": 0.499}, False),
        ({"budget_ms": 1e3, "budget_joules": 1e3, "board": "jetson-tx2"}, True),
        ({"budget_ms": 1e-9, "board": "jetson-tx2"}, False),
        ({"budget_joules": 1e-9, "board": "jetson-tx2"}, False),
    ],
    ids=str,
)
def test_a_network_is_within_a_budget_if_no_amount_exceeds_its_limit(budget, fits):
    params, cost = SearchParams(**budget), candidates.InferenceCost(2e6, 3e6, 5e5)
    candidates.require_usable_budgets(params)
    assert candidates.is_within_budget(params, cost) == fits
    first = next(iter(budget), "budget_mflop").removeprefix("budget_")
    assert candidates.ordering_cost(params, cost) == candidates.measure_cost(params, cost)[first]


def test_on_the_front_is_who_nobody_beats():
    gain = [0.8, 0.7, 0.7, 0.8, 0.6, None]
    prices = [(9.0, 5.0), (2.0, 6.0), (3.0, 6.0), (9.0, 5.0), (1.0, 1.0), (0.0, 0.0)]
    assert ranking.pareto_front(gain, prices) == [True, True, False, True, True, False]
