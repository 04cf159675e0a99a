"""What a search does beyond the paper: residuals of its junctions, which path is next."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from joint_runs import SMALL
from searches import FULL, play, played

from fedquilt.core import Aggregation
from fedquilt.methods.fedstitch import METHOD, SearchState
from fedquilt.models.stitching import stitched_network, vote
from fedquilt.models.stitching.algebra import class_moments, least_squares
from fedquilt.models.stitching.search import candidates, steps
from fedquilt.models.stitching.search.state import ScoredPath, SearchSettings
from fedquilt.testing.toy_networks import build_donors, image_members


@pytest.mark.parametrize("mode", ["default", pytest.param("paper", marks=pytest.mark.nightly)])
def test_the_fit_tells_what_its_junctions_leave_of_a_device_left_out(mode):
    fits = {}

    def fold(state, total, update):
        if state.phase == "fit":
            fits.setdefault(state.turn, {})[update.device] = update
        return METHOD.aggregation.fold(state, total, update)

    run = played(replace(METHOD, aggregation=Aggregation(fold)), mode=mode)
    assert fits
    seen = 0
    for before, after in itertools.pairwise(run):
        if before.phase != "fit":
            continue
        answers = [fits[before.turn][device] for device in sorted(fits[before.turn])]
        for i, name in enumerate(steps.winners_needing_junction(before)):
            channels = before.stock.blocks[before.current.path[-1]].out_shape[0], before.stock.blocks[name].in_shape[0]
            parts = [least_squares.read_sent_moments(answer.bundles[f"moments.{i}"], *channels) for answer in answers]
            path = (*before.current.path, name)
            solved = least_squares.solve_ridge(least_squares.merge_moments(parts), before.params.ridge)[0].astype(
                np.float32
            )
            left = least_squares.leave_one_out_residuals(parts, before.params.ridge)
            mean = np.average(left, weights=[part.yy for part in parts])
            [line] = [line for line in METHOD.explain(after) if line.startswith(f"to {name}: ")]
            assert f"it leaves {100 * mean:.1f} % of the variance, {100 * max(left):.1f} % at worst" in line
            for net in (*after.frontier, *after.finished, after.current):
                if net and net.path == path:  # the frontier is gone once the search has ended
                    assert net.residuals == (*before.current.residuals, pytest.approx(mean))
                    assert np.array_equal(after.junctions[stitched_network.junction_name(path)]["weights"], solved)
                    seen += 1
    assert seen > 3


def test_the_result_names_the_worst_junction_of_each_network():
    last = FULL[-1]
    told = {tuple(map(tuple, each["taps"])): each["residual"] for each in METHOD.result(last).meta["search"]}
    blocks = last.stock.blocks
    native = [
        taps for taps in told if all(stitched_network.is_native_path([blocks[name] for name in path]) for path in taps)
    ]
    assert native
    assert all(told[taps] is None for taps in native)
    stitched_ones = 0
    for finalist in last.finalists:
        known = [each for each in finalist.residuals[:-1] if each is not None]
        stitched_ones += bool(known)
        assert told[(finalist.path[:-1],)] == (max(known) if known else None)
        assert len(finalist.residuals) == len(finalist.path) - 1
    assert stitched_ones
    finalist = replace(last.finalists[0], path=("ash.0", "elm.1", "elm.2"), residuals=(0.1, 0.7))
    [whole] = METHOD.result(replace(FULL[0], finalists=(finalist,))).meta["search"]
    assert whole["residual"] == 0.7  # it keeps its last block
    z, y = np.random.default_rng(0).normal(size=(60, 5)), np.arange(60) % 3
    gathered = replace(FULL[0], finalists=(finalist,), taps=(finalist.path[:-1],))
    [headed] = candidates.solve_candidates(gathered, class_moments.device_moments(z, y, 3).to_sums())
    assert (headed.kind, headed.residual) == ("stitched", 0.1)


def test_of_a_single_device_nothing_can_be_left_out():
    run = play(image_members(1))
    assert all(each is None for finalist in run[-1].finalists for each in finalist.residuals)
    assert any("is not known" in line for state in run for line in METHOD.explain(state))


def voted(*winners: vote.Winner, **changes: Any) -> SearchState:
    """The path ash.0, score 0.9, after a vote on every block, with nothing else on the frontier."""
    bundle, _ = build_donors()
    state = METHOD.init(bundle, SearchSettings(**{**SMALL, "completion": False, **changes}), 3)
    net = ScoredPath(("ash.0",), steps.starting_networks(state.stock)[0].pool, 0.9)
    return replace(state, current=net, frontier=(), winners=winners)


def picked(*nets: tuple[tuple[str, ...], float], **changes: Any) -> tuple[str, ...]:
    """The path that is next of some with their scores."""
    params = replace(FULL[0].params, **{"completion": False, **changes})
    frontier = tuple(ScoredPath(path, (), score) for path, score in nets)
    return steps.pick_network(replace(FULL[0], params=params, frontier=frontier)).path


def test_the_next_path_is_the_one_that_promises_most():
    assert picked((("ash.0",), 0.9), (("elm.0", "elm.1"), 0.6)) == ("elm.0", "elm.1")
    assert picked((("ash.0",), 0.9), (("elm.0", "elm.1"), 0.5)) == ("ash.0",)
    assert picked((("ash.0",), 0.51), (("elm.0",), 0.5)) == ("ash.0",)  # of four blocks and of three
    assert picked((("ash.0",), 0.5), (("elm.0",), 0.51)) == ("elm.0",)


def test_a_path_promises_no_more_for_blocks_that_it_left_out():
    assert picked((("ash.0", "ash.2"), 0.97), (("ash.0", "ash.1"), 1.0)) == ("ash.0", "ash.1")
    assert picked((("ash.0", "elm.1"), 0.97), (("ash.0", "ash.1"), 1.0)) == ("ash.0", "elm.1")  # half a donor, a third


def test_donors_are_left_at_their_middle_first_and_in_turns():
    whole = [("ash.0", "ash.1", "ash.2"), ("ash.0", "ash.1"), ("ash.0",), ("elm.0", "elm.1"), ("elm.0",)]
    left, found = [(path, 1.0) for path in whole], []
    while left:
        found.append(picked(*left, completion=True))
        left.remove((found[-1], 1.0))
    assert found == [("ash.0", "ash.1"), ("elm.0", "elm.1"), ("ash.0",), ("elm.0",), ("ash.0", "ash.1", "ash.2")]
    assert picked(*((path, 1.0) for path in whole[1:]), (whole[0], 1.1), completion=True) == whole[0]


def test_a_search_finds_ten_networks_of_several_donors_or_says_why_not():
    last = FULL[-1]
    paths = {finalist.path[:-1] for finalist in last.finalists}
    assert len(paths) >= 10
    assert sum(len({name.split(".")[0] for name in path}) > 1 for path in paths) >= 5
    assert not any(line.startswith(("only ", "all networks")) for state in FULL for line in METHOD.explain(state))
    told = lambda **changes: [line for state in play(**changes) for line in METHOD.explain(state)]  # noqa: E731
    assert any(
        "only 5 distinct networks are validated: the budget was spent (1 ex" in each for each in told(expansions=1)
    )
    narrow = told(max_upsampling=1.0, depth=4, k=1, completion=False)
    assert any(line.startswith("only ") and " are validated" in line for line in narrow)


def test_a_path_ends_as_its_last_donor_goes_on_with_no_vote_and_no_junction():
    grown = steps.grow_paths(voted(vote.Winner("fir.1", 1.0, 0.5, 1), completion=True), {})
    assert ("ash.0", "fir.1", "fir.2") in [net.path for net in grown.finished]
    ended = next(net for net in grown.finished if net.path == ("ash.0", "fir.1", "fir.2"))
    assert (ended.score, ended.residuals) == (0.45, (None, None))
    started = FULL[0]
    assert {net.path for net in started.finished} == {donor.blocks for donor in started.stock.donors.values()}
    blocks = started.stock.blocks
    for state in FULL:
        if state.phase == "score":
            own = blocks[state.current.path[-1]]
            assert not any(stitched_network.is_continuation(own, blocks[name]) for name in state.pool)
            assert not any(blocks[name].kind == "end" for name in state.pool)


def test_the_depth_follows_the_donors():
    """As many blocks as the longest donor has, so that each of them fits; a number in the job stands."""
    bundle, _ = build_donors()
    free = {name: value for name, value in SMALL.items() if name != "depth"}
    assert METHOD.init(bundle, SearchSettings(**free), 3).params.depth == 4
    assert METHOD.init(bundle, SearchSettings(**free, depth=7), 3).params.depth == 7
    shallow = METHOD.init(bundle, SearchSettings(**free, depth=3), 3)
    assert {net.path[0] for net in shallow.finished} == {"elm.0", "fir.0"}
