"""What a search does beyond the paper: which path is next, and how paths end."""

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
from fedquilt.models.stitching.algebra import least_squares
from fedquilt.models.stitching.search import steps
from fedquilt.models.stitching.search.state import ScoredPath, SearchSettings
from fedquilt.testing.toy_networks import build_donors


@pytest.mark.parametrize("mode", ["default", pytest.param("paper", marks=pytest.mark.nightly)])
def test_junctions_are_solved_from_the_sums_of_all_devices(mode):
    fits = {}

    def fold(state, total, update):
        if state.phase == "fit":
            fits.setdefault(state.turn, {})[update.device] = update
        return METHOD.aggregation.fold(state, total, update)

    run = played(replace(METHOD, aggregation=Aggregation(fold)), mode=mode)
    seen = 0
    for before, after in ((one, other) for one, other in itertools.pairwise(run) if one.phase == "fit"):
        answers = [fits[before.turn][device] for device in sorted(fits[before.turn])]
        for i, name in enumerate(steps.winners_needing_junction(before)):
            channels = before.stock.blocks[before.current.path[-1]].out_shape[0], before.stock.blocks[name].in_shape[0]
            parts = [least_squares.read_sent_moments(answer.bundles[f"moments.{i}"], *channels) for answer in answers]
            solved = least_squares.solve_ridge(least_squares.merge_moments(parts), before.params.ridge)[0]
            junction = after.junctions.get(stitched_network.junction_name((*before.current.path, name)))
            if junction is not None:  # no finalist needs it
                assert np.array_equal(junction["weights"], solved.astype(np.float32))
                seen += 1
    assert seen > 3


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
    assert ended.score == 0.45
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
