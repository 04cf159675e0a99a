"""A whole search over toy donors whose blocks are numpy functions: its rounds, its votes, what it refuses."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from joint_runs import SMALL
from searches import FULL, play, played
from toy_tasks import deliver_task

from fedquilt.core import Aggregation, Bundle, DeviceUpdate, DeviceView, Examples, JobError, ModelError, UpdateError
from fedquilt.data import inputs
from fedquilt.methods.fedstitch import METHOD
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.search import steps
from fedquilt.models.stitching.search.state import PAPER, SearchParams, SearchSettings
from fedquilt.testing.toy_networks import build_donors, image_devices
from fedquilt.tools.simulation import DeviceData


def test_a_search_ends_with_a_validated_network():
    last = FULL[-1]
    assert METHOD.is_done(last)
    assert last.expansions <= SMALL["expansions"] + 1
    found = METHOD.result(last)
    accuracies = [each["accuracy"] for each in found.meta["search"]]
    assert all(each["examples"] == 60 for each in found.meta["search"])
    assert max(accuracies) > 0.8  # three templates are easy, a third is chance
    assert [each["taps"] for each in found.meta["search"] if each["chosen"]] == [found.meta["taps"]]
    assert any(line.startswith("chosen: ") for line in METHOD.explain(last))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"score_at": "input"},
        {"head": "aligned"},
        {"max_upsampling": 1.0},
        {"depth": 2},
        pytest.param({"score_at": "output", "estimator": "biased", "order": "random"}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_every_path_the_search_emits_obeys_the_rules_and_runs(changes):
    _, runner = build_donors()
    last = play(**changes)[-1]
    blocks = last.stock.blocks
    x = inputs.prepare_images(image_devices()[0].train.x[:3], last.stock.input)
    assert last.phase == "done"
    assert last.finalists
    for finalist in last.finalists:
        path = [blocks[name] for name in finalist.path]
        assert [block.kind for block in path] == ["start", *["middle"] * (len(path) - 2), "end"]
        assert len(set(finalist.path)) == len(path) <= last.params.depth
        between = stitched_network.load_junctions(path, last.junctions.__getitem__)
        output = stitched_network.run_path(
            path, between, lambda block, maps: runner.run(Path(block.stages[0][0]), maps), x
        )
        assert output.shape == (3, 3)
        assert np.isfinite(output).all()
    used = {name for finalist in last.finalists for name in steps.path_junction_names(finalist.path)}
    assert last.junctions.keys() <= used


def evaluate(found: Any, devices: list[DeviceData]) -> float:
    """An artefact's accuracy on all held-out examples, from nothing but what it says."""
    bundle, runner = build_donors()
    stock = stitched_network.load_donor_pool(bundle.meta)
    for name, entry in found.meta["junctions"].items():
        (before, after) = next(
            ids[-2:]
            for ids in stitched_network.path_prefixes(found.meta["taps"])
            if name == stitched_network.junction_name(ids)
        )
        assert entry["in_shape"] == list(stock.blocks[before].out_shape)
        assert entry["out_shape"] == list(stock.blocks[after].in_shape)
    network = stitched_network.from_artefact(found.meta, found.tensors)
    x = inputs.prepare_images(np.concatenate([member.held_out.x for member in devices]), found.meta["input"])
    y = np.concatenate([member.held_out.y for member in devices])
    run = lambda block, maps: runner.run(Path(block.stages[0][0]), maps)  # noqa: E731
    scores = stitched_network.compute_label_scores(network, stock.blocks, run, x)
    return float((scores.argmax(axis=1) == y).mean())


@pytest.mark.parametrize("changes", [{}, {"head": "aligned"}, {"completion": False}])
def test_the_artefact_does_what_was_validated(changes):
    last = play(**changes)[-1]
    told = METHOD.result(last).meta["search"]
    for number in range(1, len(told) + 1):
        found = METHOD.candidate(last, number)
        assert evaluate(found, image_devices()) == pytest.approx(told[number - 1]["accuracy"], abs=1e-12)
    for number in (0, len(told) + 1):
        with pytest.raises(JobError, match=f"candidate {number} does not exist: the run has candidates 1 to"):
            METHOD.candidate(last, number)


def test_paths_that_were_cut_short_still_yield_a_network():
    donors = [list(donor.blocks) for donor in FULL[0].stock.donors.values()]
    for state in (FULL[0], next(state for state in FULL if len(state.finished) > 3)):
        found = METHOD.result(state)
        assert found.meta["head"] is None
        assert found.meta["taps"] in [[donor] for donor in donors]
        merits = {net.path: (net.score, -len(net.path)) for net in state.finished}
        assert merits[tuple(found.meta["taps"][0])] == max(merits.values())
    with pytest.raises(ModelError, match="no network is finished"):
        METHOD.result(play(completion=False)[0])


def test_a_search_whose_budget_runs_out_ends_no_stem():
    for order in ("best", "random"):
        last = play(expansions=1, completion=False, order=order)[-1]
        assert last.finalists
        assert all(len(finalist.path) > 2 for finalist in last.finalists), order
    whole = {donor.blocks for donor in FULL[0].stock.donors.values()}
    assert whole <= {finalist.path for finalist in play(expansions=1)[-1].finalists}


# -- what is refused ------------------------------------------------------------------------------
def spoilt(bundle: str, **changes: Any) -> Any:
    """What was sent, with changes of tensors of one bundle."""
    return lambda sent: {
        **sent,
        bundle: {**sent[bundle], **{n: change(sent[bundle][n]) for n, change in changes.items()}},
    }


@cache
def first_answers() -> dict[str, tuple[Any, Any, DeviceUpdate]]:
    """The state, the sums so far and the update of the first answer in each phase of one search."""
    found: dict[str, tuple[Any, Any, DeviceUpdate]] = {}

    def fold(state, total, update):
        found.setdefault(state.phase, (state, total, update))
        return METHOD.aggregation.fold(state, total, update)

    played(replace(METHOD, aggregation=Aggregation(fold)))
    return found


def nothing(sent: Any) -> Any:
    return {}


@pytest.mark.parametrize(
    ("phase", "spoil", "why"),
    [
        ("score", spoilt("scores", score=lambda a: a * np.nan), "not finite"),
        ("score", spoilt("scores", picks=lambda a: a[::-1].copy()), "do not follow"),
        ("score", nothing, "is missing"),
        ("fit", spoilt("moments.0", xy=lambda a: a * np.inf), "not finite"),
        ("fit", spoilt("moments.0", n=lambda a: 2 * a), "examples, but the update's weight is"),
        ("gather", nothing, "missing"),
        ("gather", spoilt("moments", means=lambda a: a * 99), "semi-definite"),
        ("gather", spoilt("moments", factor=lambda a: a * np.nan), "finite|NaN"),
        ("validate", spoilt("counts", right=lambda a: a + 99), "more correct predictions"),
        ("validate", spoilt("counts", right=np.tril), "contradict"),
        ("validate", spoilt("counts", right=lambda a: np.diag(a.diagonal())), "contradict"),
        ("validate", spoilt("counts", right=lambda a: a + 1 - np.eye(len(a), dtype=int)), "contradict|more correct"),
        ("validate", spoilt("counts", examples=lambda a: a + 1), "add up to all examples"),
        ("validate", nothing, "missing"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_is_refused(phase, spoil, why):
    state, total, update = first_answers()[phase]
    with pytest.raises(UpdateError, match=why):
        METHOD.aggregation.fold(state, total, replace(update, bundles=spoil(update.bundles)))


def test_an_answer_to_another_step_of_the_search_is_refused():
    """A straggler's scores of an earlier pool cannot be counted for this one."""
    update = DeviceUpdate("dev-0", 0, 1.0, {"turn": 5.0}, {})
    with pytest.raises(UpdateError, match=r"is from step 5\.0 of the search, but step 0 is running"):
        METHOD.aggregation.fold(FULL[0], None, update)


def test_a_device_with_too_few_examples_says_so():
    with pytest.raises(JobError, match="needs at least 8"):
        play(image_devices(1, examples=8))


def test_labels_outside_the_jobs_are_refused():
    """A label that the job does not have would be counted as another's."""
    devices = image_devices(1)
    devices = [replace(devices[0], train=Examples(devices[0].train.x, devices[0].train.y + 1))]
    with pytest.raises(JobError, match="labels from 1 to 3"):
        play(devices)


def test_parameters_that_cannot_be_used_are_refused_at_once():
    bundle, _ = build_donors()
    bare = {name: {**donor, "align": None} for name, donor in bundle.meta["donors"].items()}
    with pytest.raises(JobError, match="set `align` of a donor"):
        METHOD.init(replace(bundle, meta={**bundle.meta, "donors": bare}), SearchSettings(head="aligned"), 0)
    with pytest.raises(ModelError, match="has no donor blocks"):
        METHOD.init(Bundle({}, {}, lambda name: {}), SearchSettings(), 0)
    with pytest.raises(ModelError, match="has no ash"):
        METHOD.init(replace(bundle, files={}), SearchSettings(), 0)


# -- rounds ---------------------------------------------------------------------------------------
def test_a_round_without_answers_changes_nothing_but_closes_an_open_vote():
    assert replace(METHOD.step(FULL[0], None), log=FULL[0].log) == FULL[0]
    several = play(subrounds=3)
    voting = next(state for state in several if state.ballots and state.phase == "score")
    after = METHOD.step(voting, None)
    assert after.expansions == voting.expansions + 1
    assert after.turn == voting.turn + 1


def test_votes_close_early_once_all_devices_are_known_to_have_voted():
    phases = [state.phase for state in play(subrounds=5)]
    assert phases[:6] == ["score", "score", "fit", "score", "fit", "score"]


def test_a_device_that_joins_in_the_middle_takes_part():
    devices = image_devices(5)
    early = play(devices[:4])[4]
    resumed = replace(METHOD, init=lambda bundle, params, seed: early)
    last = played(resumed, devices)[-1]
    assert METHOD.is_done(last)
    assert "dev-4" in last.weights
    assert sum(last.weights.values()) == pytest.approx(1.0)


def test_without_held_out_examples_the_criterion_decides_and_the_story_says_so():
    devices = [
        replace(member, held_out=Examples(member.held_out.x[:0], member.held_out.y[:0])) for member in image_devices()
    ]
    last = play(devices)[-1]
    found = METHOD.result(last)
    assert all(each["accuracy"] is None for each in found.meta["search"])
    assert found.meta["gains"] == {"joined": None, "stitched": None}
    best = min(last.candidates, key=lambda each: each.criterion or 0.0)
    assert found.meta["taps"] == [list(path) for path in best.paths]
    assert any("not validated" in line for line in METHOD.explain(last))


def test_paper_mode_is_the_papers_letter():
    params = METHOD.init(build_donors()[0], SearchParams(mode="paper"), 0).params
    assert {name: getattr(params, name) for name in PAPER} == PAPER


@pytest.mark.nightly
def test_paper_mode_holds_five_rounds_for_each_vote_and_finishes_22_networks():
    """Though the first round brings all devices. Every block is voted on, at random paths, from starting blocks."""
    run = play(mode="paper")
    last = run[-1]
    assert all(not junction["bias"].any() for junction in last.junctions.values())
    assert sum(state.phase == "score" for state in run) == 5 * last.expansions
    assert 22 <= len(last.finished) <= 24  # up to three come of the last vote
    assert len(last.finalists) == 22
    assert run[0].finished == ()
    assert run[0].frontier == tuple(net for net in steps.starting_networks(last.stock) if net != run[0].current)
    pools = [(state.current.path[-1], state.pool) for state in run if state.phase == "score"]
    assert any(name.endswith(".1") and own == name[:-1] + "0" for own, pool in pools for name in pool)
    explored = [line for state in run for line in METHOD.explain(state) if line.startswith("picked at random: ")]
    assert explored


def first_task(folder: Path) -> Any:
    bundle, runner = build_donors()
    order = METHOD.send(METHOD.init(bundle, SearchSettings(**SMALL), 3), DeviceView("dev-0", None))
    return deliver_task(METHOD, order, image_devices(1)[0], runner, seed=3, cache=folder)


def test_private_state_begins_anew_when_a_device_has_other_examples(tmp_path):
    """References on images that the device no longer has must not be used."""
    task, site = first_task(tmp_path)
    first = METHOD.work(task, site)
    fewer = Examples(site.train.x[:30], site.train.y[:30])
    second = METHOD.work(task, replace(site, train=fewer, private_state=first.private_state))
    assert second.private_state["drawn"][0] == 30
    assert not np.array_equal(second.private_state["gram.elm.0"], first.private_state["gram.elm.0"])
    with pytest.raises(ModelError, match="is unknown to this agent"):
        METHOD.work(msgspec.structs.replace(task, params={**task.params, "phase": "dance"}), site)


def test_progress_rises_and_can_cancel(tmp_path):
    task, site = first_task(tmp_path)
    seen = []
    METHOD.work(task, replace(site, progress=seen.append))
    assert seen == sorted(seen)
    assert 0.5 < seen[-1] <= 1.0

    def cancel(fraction):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        METHOD.work(task, replace(site, progress=cancel))
