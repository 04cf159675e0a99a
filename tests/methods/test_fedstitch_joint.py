"""What follows FedStitch's search: taps are gathered, joined, validated and chosen, over toy donors."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from joint_runs import FULL, narrow, played

from fedquilt.core import Aggregation, DeviceUpdate, DeviceView, Examples
from fedquilt.data import inputs
from fedquilt.methods.fedstitch import METHOD, SearchState
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.algebra import class_moments, joint_head
from fedquilt.models.stitching.algebra.class_moments import ExactMomentSums
from fedquilt.models.stitching.search import candidates, ranking
from fedquilt.models.stitching.search.state import Candidate
from fedquilt.testing.toy_networks import build_donors, image_devices
from fedquilt.tools.simulation import DeviceData

LABELS = 3
BLANK = {"weights": np.zeros((3, 4), np.float32), "bias": np.zeros(3, np.float32)}


def ends(state: SearchState, paths: Any, shares: list[Examples]) -> np.ndarray:
    """Pooled ends of paths for the pooled examples of devices, by the agents' plain forward pass."""
    _, runner = build_donors()
    run = lambda block, maps: runner.run(Path(block.stages[0][0]), maps)  # noqa: E731
    x = inputs.prepare_images(np.concatenate([share.x for share in shares]), state.stock.input)
    network = stitched_network.StitchedNetwork(tuple(paths), state.junctions)
    return np.hstack(
        [
            stitched_network.global_average_pool(maps)
            for maps in stitched_network.run_taps(network, state.stock.blocks, run, x)
        ]
    )


@pytest.mark.parametrize("cohort", [0, 3])
def test_every_head_is_that_of_the_pooled_images_of_all_devices(cohort):
    devices = image_devices(8)
    last = played(devices, cohort=cohort)[-1]
    y = np.concatenate([member.train.y for member in devices])
    heads = [candidate for candidate in last.candidates if candidate.early is None]
    assert {candidate.kind for candidate in heads} == {"joined", "donor", "stitched"}
    for candidate in heads:
        z = ends(last, candidate.paths, [member.train for member in devices])
        central = joint_head.standardise_sums(class_moments.compute_moments(z, y, LABELS).to_sums())
        assert joint_head.best_penalty(central).ridge == candidate.ridge
        assert candidate.criterion == pytest.approx(joint_head.best_penalty(central).criterion, rel=1e-5)
        head = joint_head.fit_discriminant(central, candidate.ridge or 0.0)
        wanted = z @ head.weights.T + head.bias
        found = z @ candidate.head["weights"].T + candidate.head["bias"]
        assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()  # sent and kept as float32


def test_every_device_is_heard_once_in_each_phase_and_no_round_is_wasted():
    answered = {"gather": set(), "validate": set()}

    def fold(state, total, update):
        if state.phase in answered:
            answered[state.phase].add((update.device, state.turn))  # one update may be folded more than once
        return METHOD.aggregation.fold(state, total, update)

    run = played(cohort=3, method=replace(METHOD, aggregation=Aggregation(fold)))
    names = sorted(member.device for member in image_devices(8))
    heard = {phase: sorted(device for device, _ in turns) for phase, turns in answered.items()}
    assert heard == {"gather": names, "validate": names}
    assert [state.phase for state in run].count("gather") == 3
    assert [state.phase for state in run].count("validate") == 3
    assert run[-1].examples == 8 * 15


def test_a_device_that_was_heard_is_not_asked_again():
    """Somebody else is, as it is told that there is nothing for it; what it might still send is not counted twice."""
    run = played(cohort=3)
    state = next(state for state in run if state.phase == "gather" and state.heard)
    heard, new = state.heard[0], next(f"dev-{i}" for i in range(8) if f"dev-{i}" not in state.heard)
    assert METHOD.send(state, DeviceView(heard, None)) is None
    assert METHOD.send(state, DeviceView(new, None)) is not None
    update = DeviceUpdate(heard, 0, 1.0, {"turn": float(state.turn)}, {})
    assert METHOD.aggregation.fold(state, None, update) == ExactMomentSums()


def test_where_the_number_of_devices_is_not_known_a_round_without_anybody_ends_the_phase():
    seen = []

    def step(state, total):
        seen.append((state.phase, len(total.devices) if total else 0))
        return METHOD.step(state, total)

    run = played(cohort=3, expansions=0, method=replace(METHOD, step=step))
    each = [3, 3, 2]
    assert seen == [*[("gather", count) for count in (*each, 0)], *[("validate", count) for count in each]]
    assert len(run[-1].seen) == 8


def test_no_more_rounds_are_taken_than_asked_for():
    """A fleet may be too large to hear all of it."""
    run = played(cohort=2, head_rounds=2)
    assert [state.phase for state in run].count("gather") == 2
    assert [state.phase for state in run].count("validate") == 2
    assert run[-1].examples == 4 * 15


def test_a_job_without_a_search_joins_donors():
    """expansions = 0: gather, validate, done; all taps are the donors' own."""
    run = played(expansions=0)
    last = run[-1]
    assert METHOD.is_done(last)
    assert all(candidates.is_native_path(last.stock, path) for path in last.taps)
    assert len(last.taps) == 7
    assert METHOD.result(last).meta["gains"]["stitched"] is None
    assert any(line == "stitching: no candidates to compare" for line in METHOD.explain(last))


def test_a_class_that_nobody_has_is_named_and_never_wins():
    devices = []
    for member in image_devices(4):
        shares = [Examples(share.x[share.y != 2], share.y[share.y != 2]) for share in (member.train, member.held_out)]
        devices.append(DeviceData(member.device, *shares))
    run = played(devices, expansions=2)
    assert any("never predicted, because no device has examples: c" in state.log for state in run)
    for candidate in run[-1].candidates:
        assert not candidate.head["weights"][2].any()
        z = ends(run[-1], candidate.paths, [member.held_out for member in image_devices(4)])
        scores = 1e6 * z @ candidate.head["weights"].T + candidate.head["bias"]
        assert (scores.argmax(axis=1) != 2).all()
    found = METHOD.result(run[-1])
    assert found.tensors["head.bias"][2] == -np.inf
    assert np.isfinite(found.tensors["head.weights"]).all()


@pytest.mark.parametrize("same", [True, False])
def test_a_single_example_gives_a_head(same):
    member = image_devices(1)[0]
    own = Examples(member.train.x[:1], member.train.y[:1])
    kin = (member.held_out.y == own.y[0]) == same
    last = played(
        [DeviceData(member.device, own, Examples(member.held_out.x[kin], member.held_out.y[kin]))], expansions=0
    )[-1]
    assert METHOD.is_done(last)
    assert {each.criterion for each in last.candidates} == {None}
    assert last.examples == 1  # of several held-out ones: no device counts as more than it has of its own
    assert (last.right == same).all()


def test_each_donor_is_a_candidate_at_its_best_depth_and_at_its_last():
    last = FULL[-1]
    alone = {each.paths[0]: each for each in last.candidates if len(each.paths) == 1}
    for donor in last.stock.donors:
        own = candidates.native_taps(last.stock, donor)
        assert own[-1] in alone
        assert set(own) & alone.keys()
    for finalist in last.finalists:
        assert finalist.path[:-1] in alone
    prices = [candidates.candidate_price(last, each) for each in last.candidates]
    assert prices == sorted(prices)


@pytest.mark.parametrize(
    ("only_small", "only_large", "both", "chosen"),
    [
        (5, 5, 85, 0),  # equally good: the cheapest
        (5, 8, 85, 0),  # 3 are lacking, the standard error is (13 - 9 / 100) ** 0.5 = 3.6
        (0, 3, 90, 1),  # 3 are lacking, the standard error is (3 - 9 / 100) ** 0.5 = 1.7
        (0, 1, 90, 1),  # (1 - 1 / 100) ** 0.5 < 1
        (3, 0, 90, 0),
    ],
)
def test_the_cheapest_candidate_within_one_paired_standard_error_of_the_best_is_chosen(
    only_small, only_large, both, chosen
):
    pair = (
        Candidate("donor", (("ash.0",),), criterion=0.5),
        Candidate("joined", (("ash.0",), ("elm.0",)), criterion=0.4),
    )
    right = np.array([[both + only_small, both], [both, both + only_large]])
    state = replace(FULL[-1], examples=100, right=right, candidates=pair)
    assert ranking.choose_candidate(state) == chosen
    assert ranking.choose_candidate(replace(state, examples=0)) == 1
    assert ranking.choose_candidate(replace(state, candidates=())) is None


def test_an_interval_of_an_accuracy_is_wilsons():
    """By hand for 8 of 10: (0.8 + 0.19208 -/+ 1.96 * (0.016 + 0.009604) ** 0.5) / 1.38416."""
    assert ranking.accuracy_interval(8, 10) == pytest.approx((0.49016, 0.94332), abs=1e-5)
    assert ranking.accuracy_interval(0, 0) == (0.0, 1.0)
    assert ranking.accuracy_interval(10, 10)[1] == 1.0


def test_the_story_tells_what_joining_and_stitching_add():
    own, other = ("ash.0",), ("ash.0", "elm.1")
    state = replace(
        FULL[-1],
        examples=200,
        candidates=(
            Candidate("donor", (own,), BLANK),
            Candidate("stitched", (other,), BLANK),
            Candidate("joined", (own, ("elm.0",)), BLANK),
            Candidate("joined", (own, other), BLANK),
        ),
        right=np.minimum.outer([120, 110, 150, 147], [120, 110, 150, 147]),
    )
    lines = ranking.describe_validation(state)
    assert (
        lines[2]
        == "3: head on ash.0 + elm.0: 75.0 % [68.6, 80.5] on 200 held-out, 0.00205 MFLOP, 0.00032 MB, on the front"
    )
    assert "joining taps adds 15.0 points on 200 held-out examples (standard error 2.5): " in "".join(lines)
    assert any(line.startswith("stitching does not pay: -1.5 points") for line in lines)
    assert lines[-1].endswith("head on ash.0 + (ash.0 > elm.1) compared with head on ash.0 + elm.0")
    assert ranking.accuracy_gains(state) == pytest.approx({"joined": 0.15, "stitched": -0.015})


def test_there_are_always_joined_taps_with_and_without_a_stitched_one():
    state = next(state for state in FULL if state.phase == "validate")
    native = [all(candidates.is_native_path(state.stock, path) for path in each.paths) for each in state.candidates]
    joined = {flag for flag, each in zip(native, state.candidates, strict=True) if each.kind == "joined"}
    assert joined == {True, False}
    sums = class_moments.compute_moments(np.random.default_rng(0).normal(size=(200, 8)), SIGNS, LABELS).to_sums()
    bare = replace(FULL[0], taps=(("ash.0",), ("ash.0", "elm.1")), finalists=())
    wide = replace(bare, stock=replace(bare.stock, blocks={**bare.stock.blocks, "elm.1": narrow(bare, "elm.1", 4)}))
    kinds = [(each.kind, len(each.paths)) for each in candidates.solve_candidates(wide, sums)]
    assert sorted(kinds) == [("donor", 1), ("joined", 2), ("stitched", 1)]


SIGNS = np.arange(200) % LABELS


def test_a_job_that_is_cut_short_hands_out_what_it_can():
    run = played(cohort=3)
    gathering = next(state for state in run if state.phase == "gather" and state.heard)
    found = METHOD.result(gathering)
    assert found.meta["head"]
    assert len(found.meta["taps"]) > 1
    validating = next(state for state in run if state.phase == "validate" and state.heard)
    assert METHOD.result(validating).meta["head"]
    bare = METHOD.result(played(cohort=3, expansions=0)[0])
    assert bare.meta["head"] is None  # nothing is gathered: a donor as it is


def test_each_set_on_the_front_is_the_best_of_all_truncations_that_cost_no_more():
    """By solving every combination of depths."""
    solved = []

    def step(state, total):
        if state.phase == "gather":
            solved.append(state)
        return METHOD.step(state, total)

    last = played(expansions=0, method=replace(METHOD, step=step))[-1]
    state, devices = solved[0], image_devices(8)
    z = ends(state, state.taps, [member.train for member in devices])
    y = np.concatenate([member.train.y for member in devices])
    given = joint_head.standardise_sums(class_moments.compute_moments(z, y, LABELS).to_sums())
    search = candidates._TruncationSearch(state, given)
    depths = [candidates.native_taps(state.stock, donor) for donor in state.stock.donors]
    every = []
    for counts in itertools.product(*(range(len(paths) + 1) for paths in depths)):
        paths = tuple(path for own, count in zip(depths, counts, strict=True) for path in own[:count])
        if len(paths) > 1:
            taps = [state.taps.index(path) for path in paths]
            criterion = joint_head.best_penalty(search.restrict_to(taps)).criterion
            every.append((criterion, candidates.candidate_price(state, Candidate("joined", paths, BLANK)), set(paths)))
    joined = [each for each in last.candidates if each.kind == "joined"]
    assert len(joined) > 3
    for each in joined:
        price = candidates.candidate_price(state, each)
        assert set(each.paths) == min(other for other in every if other[1] <= price)[2]


@pytest.mark.parametrize(("widest", "most"), [(17, 14), (18, 18), (4096, 38)])
def test_no_more_features_are_joined_than_the_widest(widest, most, monkeypatch):
    """Of 38 features in 7 taps."""
    monkeypatch.setattr(candidates, "MAX_JOINED_FEATURES", widest)
    joined = [each for each in played(expansions=0)[-1].candidates if each.kind == "joined"]
    assert max(each.head["weights"].shape[1] for each in joined) == most
