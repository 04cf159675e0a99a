"""Cascades among the candidates of FedStitch: counted exactly, within the budget by their mean cost."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from joint_runs import played
from toy_tasks import deliver_task

from fedquilt.core import DeviceUpdate, DeviceView, Examples, UpdateError
from fedquilt.data import inputs
from fedquilt.methods.fedstitch import METHOD, SearchState
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.device.moments import MARGINS, margin_bins
from fedquilt.models.stitching.search import candidates, cascades
from fedquilt.testing.toy_networks import build_donors, image_devices

JOINED = played(expansions=0)
LAST = JOINED[-1]
CASCADES = [(i, each) for i, each in enumerate(LAST.candidates) if each.early is not None]
HELD = [member.held_out for member in image_devices(8)]
Y = np.concatenate([share.y for share in HELD])


def scores(state: SearchState, number: int, *, early: bool = False) -> np.ndarray:
    """Scores of a candidate, or of the early one in a cascade, on all held-out examples."""
    _, runner = build_donors()
    found = METHOD.candidate(state, number + 1)
    network = stitched_network.from_artefact(found.meta, found.tensors)
    if early:
        network = replace(network, taps=network.early.taps, head=network.early.head, early=None)
    run = lambda block, maps: runner.run(Path(block.stages[0][0]), maps)  # noqa: E731
    x = inputs.prepare_images(np.concatenate([share.x for share in HELD]), state.stock.input)
    return stitched_network.compute_label_scores(network, state.stock.blocks, run, x)


def test_shares_and_right_answers_are_those_of_the_held_out_examples():
    assert len(CASCADES) > 1
    right = [scores(LAST, i).argmax(axis=1) == Y for i in range(len(LAST.candidates))]
    for (i, one), (j, other) in itertools.product(CASCADES, enumerate(LAST.candidates)):
        both = (right[i] & right[j]).sum()
        if other.early is None or other.early.taps == one.early.taps:
            assert LAST.right[i, j] == both
        else:  # estimated
            assert LAST.right[i, j] == pytest.approx(both, abs=0.02 * len(Y))
            assert LAST.right[i, j] <= min(right[i].sum(), right[j].sum())
    for i, each in CASCADES:
        leave = stitched_network.score_margins(scores(LAST, i, early=True)) >= each.early.margin
        assert each.early.share == leave.mean()
        assert 0 < each.early.share < 1


def test_costs_are_means_and_the_worst_case_stands_beside_them():
    told = METHOD.result(LAST).meta["search"]
    prices = [each["flops"] for each in told]
    assert prices == sorted(prices)
    for i, each in CASCADES:
        first = candidates.inference_cost(LAST.stock, each.early.taps, 3)
        head = 2.0 * each.early.head["weights"].size
        worst = candidates.inference_cost(LAST.stock, each.paths, 3).flops + head
        assert told[i]["worst_flops"] == worst
        assert told[i]["flops"] == pytest.approx(each.early.share * first.flops + (1 - each.early.share) * worst)
        assert told[i]["early"] == {"taps": [list(path) for path in each.early.taps], "share": each.early.share}
        assert f"{100 * each.early.share:.0f} % leave early" in METHOD.explain(LAST)[i]
        cheaper = [int(LAST.right[j, j]) for j in range(i) if LAST.candidates[j].early is None]
        assert LAST.right[i, i] > max(cheaper)  # or it would be of no use


def test_budgets_limit_the_mean_cost():
    limit = candidates.candidate_cost(LAST, CASCADES[-1][1]).flops / 1e6
    last = played(expansions=0, budget_mflop=limit)[-1]
    costs = [candidates.candidate_cost(last, each).flops / 1e6 for each in last.candidates]
    worst = [candidates.worst_cost(last, each).flops / 1e6 for each in last.candidates]
    assert max(costs) <= limit < max(worst) <= candidates.LATE_FACTOR * limit
    assert {each.kind for each, most in zip(last.candidates, worst, strict=True) if most > limit} == {"cascade"}
    for donor in last.stock.donors:
        taps = [
            path for path in candidates.native_taps(last.stock, donor) if cost_alone(last, path).flops <= 1e6 * limit
        ]
        assert (taps[-1],) in [each.paths for each in last.candidates]
    weights = max(candidates.worst_cost(last, each).weight_bytes for each in last.candidates) / 1e6
    light = played(expansions=0, budget_mflop=limit, budget_mb=0.9 * weights)[-1]
    assert max(candidates.worst_cost(light, each).weight_bytes for each in light.candidates) <= 0.9e6 * weights
    smallest = played(expansions=0, budget_mb=0.0003, rounds=1)[0]  # nothing is gathered that could be no part of any
    assert max(cost_alone(smallest, path).weight_bytes for path in smallest.taps) <= 300


def test_taps_within_a_budget_come_before_those_of_cascades():
    limit = 0.002
    for features in (40, 24, 12):  # the shallow taps within the budget would be left out first
        run = played(expansions=0, budget_mflop=limit, features=features)
        assert any(each.early is None for each in run[-1].candidates)
        state = next(state for state in run if state.phase == "validate")
        found = [candidates.candidate_price(state, state.candidates[i]) for i in cascades.early_candidates(state)]
        assert found
        assert max(found) <= limit  # no margins are counted that no cascade can use


def cost_alone(state: SearchState, path: tuple[str, ...]) -> candidates.InferenceCost:
    return candidates.inference_cost(state.stock, [path], 3)


def test_an_example_leaves_from_the_threshold_on():
    """By hand: the early candidate is right for 5 of 6 in the bin above the edge, the late one for 7 of 8 below it."""
    state = next(state for state in JOINED if state.phase == "validate")
    early = cascades.early_candidates(state)[0]
    nets, late, edge = len(state.candidates), len(state.candidates) - 1, 4
    by_margin, in_bin = np.zeros((1, len(MARGINS) + 1, nets, nets), np.int64), np.zeros((1, len(MARGINS) + 1), np.int64)
    in_bin[0, edge : edge + 2] = 8, 6
    by_margin[0, edge, late, late], by_margin[0, edge, early, early] = 7, 1
    by_margin[0, edge + 1, late, late], by_margin[0, edge + 1, early, early] = 2, 5
    state = replace(state, by_margin=by_margin, in_bin=in_bin, examples=14)
    cascade = cascades._Cascade(0, early, late, edge)
    assert cascades._right_with_cascade(state, cascade, cascade) == 7 + 5
    exit = cascades._to_candidate(state, cascade).early
    assert (exit.margin, exit.share) == (MARGINS[edge], 6 / 14)
    scores = np.array([[MARGINS[edge], 0.0], [MARGINS[edge] - 1e-9, 0.0]])
    margins = stitched_network.score_margins(scores)
    assert margin_bins(margins).tolist() == [edge + 1, edge]
    late_scores = np.array([[-1.0, -2.0]] * 2)
    assert (stitched_network.choose_early_scores(scores, late_scores, exit.margin)[:, 1] == [0.0, -2.0]).all()


def test_a_job_cut_short_or_without_held_out_examples_has_no_candidate_beyond_its_budget():
    limit = candidates.candidate_cost(LAST, CASCADES[-1][1]).flops / 1e6
    run = played(expansions=0, budget_mflop=limit, cohort=3)
    for state in (run[1], next(each for each in run if each.phase == "validate" and each.heard)):
        told = METHOD.result(state).meta["search"]
        assert max(each["flops"] for each in told) <= 1e6 * limit
    devices = [replace(each, held_out=Examples(each.held_out.x[:0], each.held_out.y[:0])) for each in image_devices(4)]
    bare = played(devices, expansions=0, budget_mflop=limit)[-1]
    assert all(each.early is None for each in bare.candidates)
    assert max(candidates.candidate_cost(bare, each).flops for each in bare.candidates) <= 1e6 * limit


def test_the_devices_evaluate_the_cascade_that_was_chosen():
    i, chosen = CASCADES[-1]
    state = replace(LAST, candidates=(chosen,), right=LAST.right[i : i + 1, i : i + 1])
    runner = build_donors()[1]
    runner.evaluate_scores = lambda batches, prior: sum((scores.argmax(axis=1) == y).sum() for scores, y in batches)
    right = 0
    for member in image_devices(8):
        order = METHOD.send(state, DeviceView(member.device, None))
        right += METHOD.check(*deliver_task(METHOD, order, member, runner, seed=3))
    assert right == LAST.right[i, i]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda a: {**a, "in_bin": a["in_bin"] + 1}, "do not add up"),
        (lambda a: {**a, "in_bin": -a["in_bin"]}, "beyond the 0 to"),
        (lambda a: {**a, "by_margin": a["by_margin"] + 99}, "by margin: more correct predictions than examples"),
        (lambda a: share_no_examples(a), "by margin: correct predictions of pairs of candidates contradict"),
        (lambda a: {**a, "by_margin": 0 * a["by_margin"]}, "do not add up"),
        (lambda a: {"examples": a["examples"], **{n: 0 * each for n, each in a.items() if n != "examples"}}, "add up"),
        (lambda a: {**a, "by_margin": a["by_margin"][:, 1:]}, "shape"),
        (lambda a: {name: each for name, each in a.items() if name != "in_bin"}, "in_bin missing"),
    ],
)
def test_counts_by_margin_that_cannot_be_are_refused(spoil, why):
    state = next(state for state in JOINED if state.phase == "validate")
    assert cascades.early_candidates(state)
    order = METHOD.send(state, DeviceView("dev-0", None))
    answer = METHOD.work(*deliver_task(METHOD, order, image_devices(1)[0], build_donors()[1], seed=3))
    update = DeviceUpdate("dev-0", 0, answer.weight, answer.metrics, answer.bundles)
    METHOD.aggregation.check_update(state, update)
    with pytest.raises(UpdateError, match=why):
        METHOD.aggregation.check_update(state, replace(update, bundles={"counts": spoil(answer.bundles["counts"])}))


def share_no_examples(counts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return counts that fit in total only: in the first bin all pairs of candidates are right, and no candidate is."""
    alone, one_right = np.eye(len(counts["right"]), dtype=np.int64), np.ones_like(counts["right"])
    in_bin, by_margin = np.zeros_like(counts["in_bin"]), np.zeros_like(counts["by_margin"])
    in_bin[:, 0], in_bin[:, 1] = 8, counts["examples"] - 8
    by_margin[:, 0], by_margin[:, 1] = one_right - alone, 6 * one_right + alone
    return {**counts, "right": 7 * one_right, "by_margin": by_margin, "in_bin": in_bin}


def test_margins_are_between_the_two_best_scores():
    given = np.array([[3.0, 1.0, 2.5], [-1e30, 4.0, 1.0], [-np.inf, 4.0, -np.inf]])
    assert stitched_network.score_margins(given).tolist() == [0.5, 3.0, np.inf]
    assert stitched_network.score_margins(given[:, :1]).tolist() == [np.inf] * 3
    late = np.zeros((3, 3))
    assert stitched_network.choose_early_scores(given, late, 3.0)[:, 1].tolist() == [0.0, 4.0, 4.0]
