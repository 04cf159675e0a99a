"""The coordinator's arithmetic, by hand."""

import numpy as np
import pytest

from fedquilt.core import UpdateError
from fedquilt.models.stitching import vote
from fedquilt.models.stitching.stitched_network import Block
from fedquilt.models.stitching.vote import Ballot

POOL = ("a.1", "a.2", "b.1", "b.2")


def ballot(*scores: float, picks: tuple[int, ...] = (), level: tuple[int, ...] = (), explored: bool = False) -> Ballot:
    score = np.array(scores)
    levels = np.array(level or [0] * len(score))
    chosen = picks or vote.rank_blocks(score, levels, POOL)[:2]
    return Ballot(score, score, levels, np.array(chosen), explored)


def sent(*scores: float, seed: int = 1, epsilon: float = 0.0, k: int = 2) -> dict[str, np.ndarray]:
    score, level = np.array(scores), np.zeros(len(scores), np.int64)
    picks, _ = vote.choose_picks(score, level, POOL, k, epsilon, seed)
    return {"screen": score, "score": score, "level": level, "picks": np.array(picks)}


def test_the_best_come_first_and_equal_scores_by_name():
    assert vote.rank_blocks(np.array([0.5, 0.9, 0.5, 0.1]), np.zeros(4), POOL) == [1, 0, 2, 3]
    assert vote.rank_blocks(np.array([0.5, 0.9, 0.5, 0.1]), np.array([0, 0, 0, 1]), POOL)[0] == 3


def test_a_percentile_is_the_share_that_scores_no_better():
    assert vote.block_percentiles(ballot(0.1, 0.2, 0.2, 0.4)).tolist() == [0.25, 0.75, 0.75, 1.0]
    assert vote.block_percentiles(ballot(0.9, 0.2, 0.3, -0.4, level=(0, 0, 0, 1))).tolist() == [0.75, 0.25, 0.5, 1.0]


def test_a_device_is_ranked_by_its_greedy_picks_on_the_others():
    same = ballot(0.9, 0.8, 0.2, 0.1)
    odd = ballot(0.1, 0.2, 0.8, 0.9)
    ranks = vote.cross_ranks({"d1": same, "d2": same, "d3": same, "d4": odd}, POOL, 2)
    assert ranks["d4"] == pytest.approx((0.5 + 0.25) / 2)
    assert ranks["d1"] == pytest.approx((2 * (1 + 0.75) / 2 + (0.25 + 0.5) / 2) / 3)


def test_fewer_than_three_others_judge_nobody():
    three = {f"d{i}": ballot(0.9, 0.8, 0.2, 0.1) for i in range(3)}
    assert vote.cross_ranks(three, POOL, 2) == {}
    weights = {"d0": 0.5, "d1": 0.3, "d2": 0.2}
    assert vote.update_weights(weights, {}, 0.6, 0.1, 0.1) == pytest.approx(weights)


def test_weights_rise_and_fall_and_sum_to_one():
    weights = vote.update_weights({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, {"a": 0.9, "b": 0.6, "c": 0.5}, 0.6, 0.1, 0.1)
    assert weights == pytest.approx({"a": 1.1 / 3.1, "b": 1.1 / 3.1, "c": 0.9 / 3.1})


def test_weights_stay_within_a_fifth_and_five_times_an_equal_share():
    """After a hundred punishments: 0.2 / N each, and the rest for those rewarded; the sum stays 1."""
    weights = dict.fromkeys("abcdefghij", 0.1)
    for _ in range(100):
        weights = vote.update_weights(weights, {"a": 1.0, **dict.fromkeys("bcdefghij", 0.1)}, 0.6, 0.1, 0.1)
    assert weights["a"] == pytest.approx(0.5)
    assert min(weights.values()) >= 0.02 - 1e-12
    assert sum(weights.values()) == pytest.approx(1.0, abs=1e-9)


def test_the_median_moves_weights_where_all_ranks_are_high():
    weights, ranks = dict.fromkeys("abcd", 0.25), dict(zip("abcd", (0.7, 0.75, 0.85, 0.9), strict=True))
    assert vote.update_weights(weights, ranks, 0.6, 0.1, 0.1) == pytest.approx(weights)
    moved = vote.update_weights(weights, ranks, "median", 0.1, 0.1)
    assert moved == pytest.approx({"a": 0.225, "b": 0.225, "c": 0.275, "d": 0.275})
    alike = dict.fromkeys("abcd", 0.8)
    assert vote.update_weights(weights, alike, "median", 0.1, 0.1) == pytest.approx(weights)


def test_being_asked_is_not_merit():
    """The devices of a vote weigh together what they did; the paper's letter takes it off all the others."""
    weights, ranks = dict.fromkeys("abcdefghij", 0.1), {"a": 0.9, "b": 0.8, "c": 0.9, "d": 0.7}
    for theta in ("median", 0.6, 0.85):
        after = vote.update_weights(weights, ranks, theta, 0.1, 0.1)
        assert sum(after[name] for name in "abcd") == pytest.approx(0.4)
        assert all(after[name] == pytest.approx(0.1) for name in "efghij")
    for _ in range(20):
        weights = vote.update_weights(weights, dict.fromkeys("abcd", 0.9), 0.6, 0.1, 0.1)
    assert weights == pytest.approx(dict.fromkeys("abcdefghij", 0.1))
    letter = vote.update_weights(weights, dict.fromkeys("abcd", 0.9), 0.6, 0.1, 0.1, "all")
    assert letter["a"] > 0.1 > letter["e"]


def test_the_papers_letter_judges_the_random_picks_of_those_that_explored():
    same = ballot(0.9, 0.8, 0.2, 0.1)
    explorer = ballot(0.9, 0.8, 0.2, 0.1, picks=(2, 3), explored=True)
    ranks = vote.cross_ranks({"d1": same, "d2": same, "d3": same, "d4": explorer}, POOL, 2, judged="picks")
    assert ranks["d4"] == pytest.approx((0.5 + 0.25) / 2)
    assert ranks["d1"] == pytest.approx((1 + 0.75) / 2)


def test_spread_picks_and_winners_take_each_donors_best_first():
    score, level = np.array([0.9, 0.8, 0.1, 0.2]), np.zeros(4, np.int64)
    assert vote.greedy_picks(score, level, POOL, 2) == [0, 1]
    assert vote.greedy_picks(score, level, POOL, 2, spread=True) == [0, 3]
    assert vote.greedy_picks(score, level, POOL, 4, spread=True) == [0, 3, 1, 2]
    assert vote.choose_picks(score, level, POOL, 2, 0.0, 1, spread=True) == ([0, 3], False)
    ballots = {f"d{i}": ballot(0.9, 0.8, 0.1, 0.2, picks=(0, 1)) for i in range(3)}
    ballots["d3"] = ballot(0.9, 0.8, 0.1, 0.2, picks=(0, 3))
    winners = vote.tally_votes(ballots, dict.fromkeys(ballots, 0.25), POOL, 2, spread=True)
    assert [winner.block for winner in winners] == ["a.1", "b.2"]


def test_newcomers_get_an_equal_share():
    assert vote.add_devices({"a": 0.5, "b": 0.5}, ["b", "c"]) == pytest.approx(dict.fromkeys("abc", 1 / 3))
    assert vote.add_devices({}, ["a", "b"]) == pytest.approx({"a": 0.5, "b": 0.5})


def test_the_heavier_votes_win():
    ballots = {"x": ballot(0.9, 0.1, 0.1, 0.1, picks=(0,)), "y": ballot(0.1, 0.9, 0.1, 0.1, picks=(1,))}
    ballots["z"] = ballots["y"]
    winners = vote.tally_votes(ballots, {"x": 0.6, "y": 0.2, "z": 0.2}, POOL, 1)
    assert [(winner.block, winner.voters) for winner in winners] == [("a.1", 1)]
    assert [winner.block for winner in vote.tally_votes(ballots, dict.fromkeys("xyz", 1.0), POOL, 1)] == ["a.2"]


def test_a_tie_goes_to_the_mean_score_and_then_to_the_name():
    weights = {"x": 0.5, "y": 0.5}
    uneven = {"x": ballot(0.0, 0.2, 0.0, 0.9, picks=(3,)), "y": ballot(0.0, 0.3, 0.0, 0.1, picks=(1,))}
    assert [winner.block for winner in vote.tally_votes(uneven, weights, POOL, 2)] == ["b.2", "a.2"]
    even = {"x": ballot(0.0, 0.2, 0.0, 0.3, picks=(3,)), "y": ballot(0.0, 0.3, 0.0, 0.2, picks=(1,))}
    assert [winner.block for winner in vote.tally_votes(even, weights, POOL, 2)] == ["a.2", "b.2"]


def test_a_winners_score_is_of_one_level():
    fine = ballot(0.1, 0.2, 0.3, 0.7, level=(0, 0, 0, 1), picks=(3,))
    rough = ballot(0.1, 0.2, 0.3, 0.9, picks=(3,))
    (winner,) = vote.tally_votes({"x": fine, "y": rough}, {"x": 0.5, "y": 0.5}, POOL, 1)
    assert (winner.score, winner.votes) == (0.7, 1.0)


def test_a_ballot_is_what_was_sent():
    assert vote.read_ballot(sent(0.1, 0.4, 0.3, 0.2), POOL, 2, 0.0, 1).picks.tolist() == [1, 2]
    explored = vote.read_ballot(sent(0.1, 0.4, 0.3, 0.2, epsilon=1.0), POOL, 2, 1.0, 1)
    assert explored.explored
    assert len(set(explored.picks.tolist())) == 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"picks": np.array([0, 3])}, "do not follow"),
        ({"score": np.array([0.1, 0.4, np.nan, 0.2])}, "not finite"),
        ({"screen": np.array([0.1, 0.4, np.inf, 0.2])}, "not finite"),
        ({"score": np.array([0.1, 0.4, 3.0, 0.2])}, "not in"),
        ({"score": np.array([0.1, 0.4, 0.3])}, "3 values for 4 blocks"),
        ({"level": np.array([0, 0, 0, 7])}, "other than 0 and 1"),
        ({"picks": None}, "'picks' is missing"),
    ],
)
def test_a_ballot_that_contradicts_itself_is_refused(change, why):
    """A device cannot vote for what its scores do not say."""
    given = {**sent(0.1, 0.4, 0.3, 0.2), **change}
    with pytest.raises(UpdateError, match=why):
        vote.read_ballot({k: v for k, v in given.items() if v is not None}, POOL, 2, 0.0, 1)


def test_the_coin_explores_as_often_as_epsilon_says():
    tossed = [vote.choose_picks(np.zeros(4), np.zeros(4), POOL, 9, 0.3, seed) for seed in range(1000)]
    assert sum(explored for _, explored in tossed) == pytest.approx(300, abs=45)
    assert all(sorted(picks) == [0, 1, 2, 3] for picks, _ in tossed)


def blocks() -> list[Block]:
    shape = (1, 1, 1)
    kinds = [("a", 1, "middle"), ("a", 2, "middle"), ("b", 1, "middle"), ("b", 2, "end")]
    return [Block(donor, i, kind, (("g",),), (), shape, shape, 1, 1, 1, 1) for donor, i, kind in kinds]


def test_blocks_clearly_shallower_than_their_donors_best_are_dropped():
    ballots = {f"d{i}": ballot(0.1 + i / 100, 0.5, 0.9, 0.2) for i in range(3)}
    assert vote.shallow_blocks(ballots, blocks(), margin=2.0) == {"a.1"}


def test_what_devices_disagree_on_is_kept_unless_by_the_papers_letter():
    ballots = {f"d{i}": ballot(0.5, 0.5 + gap, 0.9, 0.2) for i, gap in enumerate((-0.3, 0.0, 0.5))}
    assert vote.shallow_blocks(ballots, blocks(), margin=2.0) == set()
    assert vote.shallow_blocks(ballots, blocks(), margin=0.0) == {"a.1"}
    assert vote.shallow_blocks({"d0": ballots["d2"]}, blocks(), margin=2.0) == set()
