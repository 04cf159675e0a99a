"""A whole search over toy donors whose blocks are numpy functions."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedquilt import tensors
from fedquilt.core import (
    BlobRef,
    Bundle,
    Contribution,
    DeviceView,
    Examples,
    JobError,
    Method,
    ModelError,
    UpdateError,
)
from fedquilt.data import images
from fedquilt.methods import fedstitch
from fedquilt.methods.fedstitch import METHOD, Params, State
from fedquilt.models.stitching import (
    block_runner,
    candidates,
    class_moments,
    least_squares,
    scoring,
    search,
    stitched,
    vote,
)
from fedquilt.models.stitching.search_state import Net
from fedquilt.models.stitching.stitched import Block
from fedquilt.testing.toys import SMALL, FakeRunner, build, given, members
from fedquilt.testing.toys import play as run_of
from fedquilt.tools.bench import naive
from fedquilt.tools.simulation import Member


def play(devices: list[Member] | None = None, seed: int = 3, **changes: Any) -> list[State]:
    return played(METHOD, devices, seed=seed, **changes)


def played(
    method: Method,
    devices: list[Member] | None = None,
    *,
    seed: int = 3,
    rounds: int = 1000,
    cohort: int = 0,
    runner: FakeRunner | None = None,
    **changes: Any,
) -> list[State]:
    """The states of a search by a double of the method. It ends by itself, or after so many rounds."""
    bundle, own = build()
    return run_of(
        "fedstitch",
        bundle,
        members() if devices is None else devices,
        {**SMALL, **changes},
        engine=runner or own,
        method=method,
        seed=seed,
        rounds=rounds,
        cohort={"size": cohort},
    )


FULL = play()


def test_a_search_ends_with_a_validated_network() -> None:
    """Within its budget of expansions; the chosen one is the best of those validated."""
    last = FULL[-1]
    assert METHOD.done(last)
    assert last.expansions <= SMALL["expansions"] + 1
    found = METHOD.result(last)
    accuracies = [each["accuracy"] for each in found.meta["search"]]
    assert all(each["examples"] == 60 for each in found.meta["search"])
    assert max(accuracies) > 0.8  # three templates are easy, a third is chance
    chosen = [each["taps"] for each in found.meta["search"] if each["accuracy"] == max(accuracies)]
    assert found.meta["taps"] in chosen
    assert any(line.startswith("chosen: ") for line in METHOD.explain(last))


def test_the_same_seed_gives_the_same_bits() -> None:
    """Two runs pack to equal bytes after every round."""
    again = play()
    assert [tensors.pack(state) for state in again] == [tensors.pack(state) for state in FULL]


def test_the_order_of_devices_does_not_matter() -> None:
    """Answers are folded in the order of device ids, whoever is asked first."""
    assert tensors.pack(play(members()[::-1])[-1]) == tensors.pack(FULL[-1])


def test_a_stored_state_goes_on_to_the_same_end() -> None:
    """Every state survives storage, and the next step from the stored one is the same in every bit."""
    assert {state.phase for state in FULL} == {"score", "fit", "gather", "validate", "done"}
    for state in FULL:
        assert tensors.pack(tensors.unpack(tensors.pack(state), State)) == tensors.pack(state)
    stored = replace(METHOD, step=lambda state, total: METHOD.step(tensors.unpack(tensors.pack(state), State), total))
    assert tensors.pack(played(stored)[-1]) == tensors.pack(FULL[-1])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"score_at": "input"},
        {"score_at": "output", "maps": "gap"},
        {"maps": "position", "estimator": "biased"},
        {"native_continuation": "exclude"},
        {"native_continuation": "penalise", "weighted": False},
        {"order": "random", "space_margin": 0.0},
        {"space_optimizer": False, "max_upsampling": 1.0},
        {"mode": "paper"},
        {"head": "aligned"},
        {"random_features": 3},
        {"depth": 2},
        {"residual": "weigh"},
        {"stop_below": 0.8},
        {"stop_below": 1.0, "native_continuation": "exclude"},
        {"stop_below": 1.0, "native_continuation": "exclude", "expansions": 2, "depth": 4},
    ],
    ids=str,
)
def test_every_path_the_search_emits_obeys_the_rules_and_runs(changes: dict[str, Any]) -> None:
    """Start first, end last, none twice, no deeper than D_max, junctions where blocks are no neighbours."""
    _, runner = build()
    last = play(**changes)[-1]
    blocks = last.stock.blocks
    x = images.prepare(members()[0].train.x[:3], last.stock.input)
    assert last.phase == "done"
    assert last.finalists
    for finalist in last.finalists:
        path = [blocks[name] for name in finalist.path]
        assert [block.kind for block in path] == ["start", *["middle"] * (len(path) - 2), "end"]
        assert len(set(finalist.path)) == len(path) <= last.params.depth
        if last.params.native_continuation == "exclude":
            assert not any(stitched.continues(a, b) for a, b in itertools.pairwise(path))
        between = stitched.junctions(path, last.junctions.__getitem__)
        output = stitched.forward(path, between, lambda block, maps: runner.run(Path(block.stages[0][0]), maps), x)
        assert output.shape == (3, 3)
        assert np.isfinite(output).all()
    used = {name for finalist in last.finalists for name in search.junctions_of(finalist.path)}
    assert last.junctions.keys() <= used


def evaluate(found: Any, devices: list[Member]) -> float:
    """An artefact's accuracy on all held-out examples, from nothing but what it says."""
    bundle, runner = build()
    stock = stitched.stock(bundle.meta)
    for name, entry in found.meta["junctions"].items():
        (before, after) = next(
            ids[-2:] for ids in stitched.prefixes(found.meta["taps"]) if name == stitched.junction_name(ids)
        )
        assert entry["in_shape"] == list(stock.blocks[before].out_shape)
        assert entry["out_shape"] == list(stock.blocks[after].in_shape)
    network = stitched.from_artefact(found.meta, found.tensors)
    x = images.prepare(np.concatenate([member.held.x for member in devices]), found.meta["input"])
    y = np.concatenate([member.held.y for member in devices])
    run = lambda block, maps: runner.run(Path(block.stages[0][0]), maps)  # noqa: E731
    scores = stitched.classify(network, stock.blocks, run, x)
    return float((scores.argmax(axis=1) == y).mean())


@pytest.mark.parametrize(
    "changes", [{}, {"head": "aligned"}, {"random_features": 3}, {"native_continuation": "exclude"}]
)
def test_the_artefact_does_what_was_validated(changes: dict[str, Any]) -> None:
    """Rebuilt from the result alone, the network has the accuracy that the devices counted."""
    found = METHOD.result(play(**changes)[-1])
    counted = max(each["accuracy"] for each in found.meta["search"])
    assert evaluate(found, members()) == pytest.approx(counted, abs=1e-12)


def test_paths_that_were_cut_short_still_yield_a_network() -> None:
    """Stopped before validation, the result is the best-scoring finished network, without a head: a whole donor."""
    donors = [list(donor.blocks) for donor in FULL[0].stock.donors.values()]
    for state in (FULL[0], next(state for state in FULL if len(state.finished) > 3)):
        found = METHOD.result(state)
        assert found.meta["head"] is None
        assert found.meta["taps"] in [[donor] for donor in donors]
        merits = {net.path: (net.score, -len(net.path)) for net in state.finished}
        assert merits[tuple(found.meta["taps"][0])] == max(merits.values())
    with pytest.raises(ModelError, match="no network is finished"):
        METHOD.result(play(native_continuation="exclude")[0])


def test_a_search_whose_budget_runs_out_ends_no_stem() -> None:
    """After one vote on every block: the longest path is ended, and a whole donor is there where paths go on."""
    for changes in (
        {"completion": False},
        {"native_continuation": "exclude"},
        {"order": "random", "completion": False},
    ):
        last = play(expansions=1, **changes)[-1]
        assert last.finalists
        assert all(len(finalist.path) > 2 for finalist in last.finalists), changes
    whole = {donor.blocks for donor in FULL[0].stock.donors.values()}
    assert whole <= {finalist.path for finalist in play(expansions=1)[-1].finalists}


# -- scores ---------------------------------------------------------------------------------------


def score_answers(**changes: Any) -> tuple[State, dict[str, np.ndarray], dict[str, float]]:
    """What one device answers when the path is ash.0 > ash.1."""
    bundle, _ = build()
    state = METHOD.init(bundle, Params(**{**SMALL, "completion": False, "spread": False, **changes}), 3)
    net = Net(("ash.0", "ash.1"), search.beginnings(state.stock)[0].pool, 1.0)
    state = replace(state, current=net, pool=search.offered(net, state.stock, state.params))
    seen: list[Contribution] = []
    spy = replace(
        METHOD,
        init=lambda bundle, params, seed: state,
        fold=lambda state, total, update: seen.append(update) or METHOD.fold(state, total, update),
    )
    played(spy, members(1), rounds=1)
    return state, dict(seen[0].bundles["scores"]), dict(seen[0].metrics)


@pytest.mark.parametrize("score_at", ["input", "output", "hybrid"])
@pytest.mark.parametrize("estimator", ["unbiased", "biased"])
@pytest.mark.parametrize("maps", ["flatten", "gap", "position"])
def test_the_native_next_block_always_scores_one(score_at: str, estimator: str, maps: str) -> None:
    """After ash.0 > ash.1 comes ash.2, exactly 1; every other block scores less."""
    state, scores, _ = score_answers(score_at=score_at, estimator=estimator, maps=maps)
    native = state.pool.index("ash.2")
    assert scores["score"][native] == 1.0
    assert scores["screen"][native] == 1.0
    assert all(score < 1 for j, score in enumerate(scores["score"]) if j != native)


def test_a_penalised_native_block_scores_less_by_the_penalty() -> None:
    """With penalty 0.25 the donor's own next block scores 0.75."""
    state, scores, _ = score_answers(native_continuation="penalise", native_penalty=0.25)
    assert scores["score"][state.pool.index("ash.2")] == 0.75


def test_hybrid_scores_the_best_few_by_their_output_and_ranks_them_first() -> None:
    """Three of the pool reach level 1: the best by input; their output scores are those of mode output."""
    _, hybrid, _ = score_answers(score_at="hybrid", k=3)
    _, coarse, _ = score_answers(score_at="input")
    _, fine, _ = score_answers(score_at="output")
    reached = np.flatnonzero(hybrid["level"])
    assert len(reached) == 3
    assert set(hybrid["picks"].tolist()) == set(reached.tolist())
    assert np.allclose(hybrid["score"][reached], fine["score"][reached], atol=1e-6)
    assert set(np.argsort(-hybrid["screen"])[:3]) == set(reached)
    # input mode scores the same images: with examples to spare both halves are full
    assert np.allclose(coarse["screen"], hybrid["screen"], atol=1e-6)


def test_references_are_computed_once_per_device() -> None:
    """By input, a path that is a donor's own needs no run at all once the references are there."""
    bundle, runner = build()
    changes = {"score_at": "input", "subrounds": 3}
    devices = members(1)
    played(METHOD, devices, runner=runner, rounds=1, seed=0, **changes)
    first = dict(runner.runs)
    assert max(first.values()) == 1
    assert not any(runs for name, runs in first.items() if bundle.meta["blocks"][name[:-5]]["kind"] == "end")
    played(METHOD, devices, runner=runner, rounds=2, seed=0, **changes)
    assert runner.runs == {name: 2 * runs for name, runs in first.items()}  # two rounds cost what one does


def score_twice(folder: Path, **changes: Any) -> tuple[list[dict[str, np.ndarray]], list[dict[str, int]], Any]:
    """Scores and runs of a stitched path's task on one device, now and again, and a way to go on."""
    bundle, runner = build()
    state = METHOD.init(bundle, Params(**{**SMALL, "native_continuation": "exclude", **changes}), 3)
    path = ("ash.0", "elm.1")
    net = Net(path, search.beginnings(state.stock)[0].pool, 1.0)
    state = replace(state, current=net, pool=search.offered(net, state.stock, state.params))
    weights = np.random.default_rng(2).normal(size=(5, 4)).astype(np.float32)
    junction = {"weights": weights, "bias": np.zeros(5, np.float32)}
    state = replace(state, junctions={stitched.junction_name(path): junction})
    order = METHOD.send(state, DeviceView("dev-0", None))
    assert order is not None
    scores, runs, local = [], [], {}

    def again() -> None:
        nonlocal local
        runner.runs = dict.fromkeys(runner.graphs, 0)
        task, site = given(METHOD, order, members(1)[0], runner, seed=3, local=local, cache=folder)
        answer = METHOD.work(task, site)
        local = answer.local
        scores.append(dict(answer.bundles["scores"]))
        runs.append({name: count for name, count in runner.runs.items() if count})

    again()
    again()
    return scores, runs, again


def test_the_naive_procedure_gives_the_same_scores(tmp_path: Path) -> None:
    """What `bench stitch` measures against: everything run again for each candidate, in whole arrays."""
    bundle, runner = build()
    state = METHOD.init(bundle, Params(**SMALL), 3)
    blocks = state.stock.blocks
    path = [blocks["ash.0"], blocks["elm.1"]]
    weights = np.random.default_rng(2).normal(size=(5, 4)).astype(np.float32)
    junction = {"weights": weights, "bias": np.zeros(5, np.float32)}
    scores, _, _ = score_twice(tmp_path, score_at="output", positions=40)
    member = members(1)[0]
    order = METHOD.send(state, DeviceView("dev-0", None))
    assert order is not None
    _, site = given(METHOD, order, member, runner, seed=3, cache=tmp_path)
    rows = scoring.order(scoring.drawn(site))[:32]
    shown = images.prepare(member.train.x[rows], state.stock.input)
    net = Net(("ash.0", "elm.1"), search.beginnings(state.stock)[0].pool, 1.0)
    pool = search.offered(net, state.stock, replace(state.params, native_continuation="exclude"))
    run = lambda block, x: stitched.run_block(block, lambda graph, x: runner.run(Path(graph), x), x)  # noqa: E731
    for name, score in zip(pool, scores[0]["score"], strict=True):
        own = [blocks[f"{blocks[name].donor}.{i}"] for i in range(blocks[name].index + 1)]
        positions = block_runner.positions(16, blocks[name].in_shape, 40)
        found = naive.output_score(path, [None, junction], own, run, shown[:16], shown[16:], positions, 1e-4)
        assert found == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize("score_at", ["input", "output", "hybrid"])
def test_nothing_is_run_twice_that_could_be_kept(score_at: str, tmp_path: Path) -> None:
    """The second time only the candidates run whose output is scored; the scores are the same bits."""
    scores, runs, again = score_twice(tmp_path, score_at=score_at)
    offered = {"ash.2.onnx", "ash.3.onnx", "ash.1.onnx", "elm.2.onnx", "fir.1.onnx", "fir.2.onnx"}
    assert set(runs[0]) >= {"ash.0.onnx", "elm.1.onnx", "fir.0.onnx"}
    assert set(runs[1]) <= offered - ({"elm.2.onnx"} if score_at == "input" else set())
    assert sum(runs[1].values()) == {"input": 0, "output": 5, "hybrid": 3}[score_at]
    assert all(np.array_equal(scores[0][name], scores[1][name]) for name in scores[0])
    for path in tmp_path.rglob("*"):  # what is kept is gone: it is computed again, to the same bits
        if path.is_file():
            path.unlink()
    again()
    assert all(np.array_equal(scores[0][name], scores[2][name]) for name in scores[0])


def test_a_hopeless_candidate_is_dropped_after_a_few_images(tmp_path: Path) -> None:
    """Those far below the K-th best run on 6 images only, and rank below all that were scored on 16."""
    full, _, _ = score_twice(tmp_path / "full", score_at="output")
    scores, runs, _ = score_twice(tmp_path / "early", score_at="output", early=6, early_margin=0.0)
    level, kept = scores[1]["level"], full[1]["score"]
    assert 0 < level.sum() < len(level)
    assert np.array_equal(scores[1]["score"][level == 1], kept[level == 1])
    assert scores[1]["score"][level == 0].max() < np.sort(kept[level == 1])[-2]
    assert set(scores[1]["picks"].tolist()) <= set(np.flatnonzero(level).tolist())
    assert sum(runs[1].values()) == 2 * level.sum() + (level == 0).sum()
    generous, _, _ = score_twice(tmp_path / "never", score_at="output", early=6, early_margin=1.0)
    assert generous[1]["level"].all()
    assert np.array_equal(generous[1]["score"], kept)


def test_a_task_brings_only_the_files_it_needs() -> None:
    """Scored by their input, terminating blocks are never run, hence not sent; references cost the first time only."""
    bundle, _ = build()
    state = METHOD.init(bundle, Params(**{**SMALL, "score_at": "input", "completion": False}), 3)
    order = METHOD.send(state, DeviceView("dev-0", None))
    assert order is not None
    assert order.work.flops_per_example > 0
    assert order.work.peak_bytes > 0
    repeat = METHOD.send(state, DeviceView("dev-0", None, (0,)))
    assert repeat is not None
    assert repeat.work.flops_per_example < order.work.flops_per_example
    sent = {name for name, value in order.bundles.items() if isinstance(value, BlobRef)}
    assert sent == {name for name in bundle.files if bundle.meta["blocks"][name[:-5]]["kind"] != "end"}


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "spoil", "why"),
    [
        ("score", lambda u: {"scores": {**u["scores"], "score": u["scores"]["score"] * np.nan}}, "not finite"),
        ("score", lambda u: {"scores": {**u["scores"], "picks": u["scores"]["picks"][::-1].copy()}}, "do not follow"),
        ("score", lambda u: {}, "no usable"),
        ("fit", lambda u: {"moments.0": {**u["moments.0"], "xy": u["moments.0"]["xy"] * np.inf}}, "not finite"),
        ("fit", lambda u: {n: {**m, "n": 2 * m["n"]} for n, m in u.items()}, "an example, in an update that weighs"),
        ("gather", lambda u: {}, "missing"),
        ("gather", lambda u: {"moments": {**u["moments"], "means": u["moments"]["means"] * 99}}, "semi-definite"),
        ("gather", lambda u: {"moments": {**u["moments"], "factor": u["moments"]["factor"] * np.nan}}, "finite|NaN"),
        ("validate", lambda u: {"counts": {**u["counts"], "right": u["counts"]["right"] + 99}}, "more right answers"),
        ("validate", lambda u: {"counts": {**u["counts"], "examples": u["counts"]["examples"] + 1}}, "that weighs"),
        ("validate", lambda u: {}, "no usable"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_is_refused(phase: str, spoil: Any, why: str) -> None:
    """Not finite, inconsistent, incomplete or impossible: one named error, and nothing is folded."""
    caught = []

    def fold(state: State, total: Any, update: Contribution) -> Any:
        if state.phase == phase and not caught:
            with pytest.raises(UpdateError, match=why) as found:
                METHOD.fold(state, total, replace(update, bundles=spoil(update.bundles)))
            caught.append(found)
        return METHOD.fold(state, total, update)

    played(replace(METHOD, fold=fold))
    assert caught


def test_an_answer_to_another_step_of_the_search_is_refused() -> None:
    """A straggler's scores of an earlier pool cannot be counted for this one."""
    update = Contribution("dev-0", 0, 1.0, {"turn": 5.0}, {})
    with pytest.raises(UpdateError, match=r"answers turn 5\.0 of the search, which is at 0"):
        METHOD.fold(FULL[0], None, update)


def test_a_device_with_too_few_examples_says_so() -> None:
    """Four images to score on, and four others for the junctions."""
    with pytest.raises(JobError, match="needs at least 8"):
        play(members(1, examples=8))


def test_labels_outside_the_jobs_are_refused() -> None:
    """A label that the job does not have would be counted as another's."""
    devices = members(1)
    devices = [replace(devices[0], train=Examples(devices[0].train.x, devices[0].train.y + 1))]
    with pytest.raises(JobError, match="labels from 1 to 3"):
        play(devices)


def test_parameters_that_cannot_be_used_are_refused_at_once() -> None:
    """Aligned heads need an alignment; a bundle needs donors and their files."""
    bundle, _ = build()
    bare = {name: {**donor, "align": None} for name, donor in bundle.meta["donors"].items()}
    with pytest.raises(JobError, match="give a donor `align`"):
        METHOD.init(replace(bundle, meta={**bundle.meta, "donors": bare}), Params(head="aligned"), 0)
    with pytest.raises(ModelError, match="holds no donor blocks"):
        METHOD.init(Bundle({}, {}, lambda name: {}), Params(), 0)
    with pytest.raises(ModelError, match="lacks ash"):
        METHOD.init(replace(bundle, files={}), Params(), 0)


# -- beyond the paper -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["default", "paper"])
def test_the_fit_tells_what_its_junctions_leave_of_a_device_left_out(mode: str) -> None:
    """Solved from all sums in the devices' order, to the bit; the residual is that of leaving one device out."""
    fits: dict[int, dict[str, Contribution]] = {}

    def fold(state: State, total: Any, update: Contribution) -> Any:
        if state.phase == "fit":
            fits.setdefault(state.turn, {})[update.device] = update
        return METHOD.fold(state, total, update)

    run = played(replace(METHOD, fold=fold), mode=mode)
    assert fits
    seen = 0
    for before, after in itertools.pairwise(run):
        if before.phase != "fit":
            continue
        answers = [fits[before.turn][device] for device in sorted(fits[before.turn])]
        for i, name in enumerate(search.projected(before)):
            channels = before.stock.blocks[before.current.path[-1]].out_shape[0], before.stock.blocks[name].in_shape[0]
            parts = [least_squares.from_tensors(answer.bundles[f"moments.{i}"], *channels) for answer in answers]
            path = (*before.current.path, name)
            solved = least_squares.solve(least_squares.merge(parts), before.params.ridge)[0].astype(np.float32)
            left = least_squares.left_out(parts, before.params.ridge)
            mean = np.average(left, weights=[part.yy for part in parts])
            [line] = [line for line in METHOD.explain(after) if line.startswith(f"to {name}: ")]
            assert f"it leaves {100 * mean:.1f} % of the variance, {100 * max(left):.1f} % at worst" in line
            for net in (*after.frontier, *after.finished, after.current):
                if net and net.path == path:  # the frontier is gone once the search has ended
                    assert net.residuals == (*before.current.residuals, pytest.approx(mean))
                    assert np.array_equal(after.junctions[stitched.junction_name(path)]["weights"], solved)
                    seen += 1
    assert seen > 3


def test_the_result_names_the_worst_junction_of_each_network() -> None:
    """A donor's own succession has none; a head replaces the junction before the last block."""
    last = FULL[-1]
    told = {tuple(map(tuple, each["taps"])): each["residual"] for each in METHOD.result(last).meta["search"]}
    blocks = last.stock.blocks
    native = [taps for taps in told if all(stitched.is_native([blocks[name] for name in path]) for path in taps)]
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
    alone = replace(FULL[0].params, join=False)
    gathered = replace(FULL[0], params=alone, finalists=(finalist,), taps=(finalist.path[:-1],))
    [headed] = candidates.solved(gathered, class_moments.merge([], [class_moments.part(z, y, 3)]))
    assert (headed.kind, headed.residual) == ("stitched", 0.1)


def test_of_a_single_device_nothing_can_be_left_out() -> None:
    """The residual is unknown, not zero, and weighs nothing."""
    run = play(members(1), residual="weigh")
    assert all(each is None for finalist in run[-1].finalists for each in finalist.residuals)
    assert any("is not known" in line for state in run for line in METHOD.explain(state))


def voted(*winners: vote.Winner, **changes: Any) -> State:
    """The path ash.0, score 0.9, after a vote on every block, with nothing else on the frontier."""
    bundle, _ = build()
    state = METHOD.init(bundle, Params(**{**SMALL, "completion": False, **changes}), 3)
    net = Net(("ash.0",), search.beginnings(state.stock)[0].pool, 0.9)
    return replace(state, current=net, frontier=(), winners=winners)


def test_a_weighed_residual_is_taken_off_the_paths_score() -> None:
    """0.9 * 0.5 * (1 - 0.2) = 0.36; a residual above 1 leaves 0; only told, it changes nothing."""
    winners = vote.Winner("elm.1", 1.0, 0.5, 1), vote.Winner("fir.1", 1.0, 0.5, 1)
    left = {"elm.1": 0.2, "fir.1": 1.4}

    def scores(**changes: Any) -> dict[str, float]:
        grown = search.grow(voted(*winners, **changes), {}, left)
        return {net.path[-1]: net.score for net in (*grown.frontier, grown.current) if net}

    assert scores(residual="weigh") == pytest.approx({"elm.1": 0.36, "fir.1": 0.0})
    assert scores() == pytest.approx({"elm.1": 0.45, "fir.1": 0.45})


def test_a_path_whose_product_of_scores_is_too_low_is_given_up() -> None:
    """0.9 * 0.5 is below 0.6 and does not join the frontier; 0.9 * 0.8 does; the notes say so."""
    winners = vote.Winner("elm.1", 1.0, 0.5, 1), vote.Winner("fir.1", 1.0, 0.8, 1)
    grown = search.grow(voted(*winners, stop_below=0.6), {})
    assert grown.current is not None
    assert grown.current.path == ("ash.0", "fir.1")
    assert grown.frontier == ()
    assert METHOD.explain(grown) == ("given up ash.0 > elm.1: score 0.450 is below 0.6",)


def test_the_best_of_what_was_given_up_is_kept_rather_than_nothing() -> None:
    """A finished network before a better-scoring partial one; among partial ones the best goes on."""
    partial, end, poor = (
        vote.Winner("elm.1", 1.0, 0.5, 1),
        vote.Winner("fir.2", 1.0, 0.2, 1),
        vote.Winner("fir.1", 1.0, 0.1, 1),
    )
    ended = search.grow(voted(partial, end, stop_below=0.6), {})
    assert [net.path for net in ended.finished] == [("ash.0", "fir.2")]
    assert ended.phase == "gather"
    taken = [line for line in METHOD.explain(ended) if line.startswith("taken back")]
    assert taken == ["taken back, as nothing else is left: ash.0 > fir.2"]
    going = search.grow(voted(poor, partial, stop_below=0.6), {})
    assert going.current is not None
    assert going.current.path == ("ash.0", "elm.1")
    assert [net.path for net in going.given_up] == [("ash.0", "fir.1")]


def test_once_a_network_is_finished_what_was_given_up_is_forgotten() -> None:
    """With its junctions; and a finished network that scores too low does not count beside a good one."""
    low, end, low_end = (
        vote.Winner("elm.1", 1.0, 0.5, 1),
        vote.Winner("fir.2", 1.0, 0.9, 1),
        vote.Winner("elm.2", 1.0, 0.1, 1),
    )
    blank = {"weights": np.zeros((1, 1), np.float32), "bias": np.zeros(1, np.float32)}
    fitted = {stitched.junction_name(("ash.0", name)): blank for name in ("elm.1", "fir.2")}
    before = voted(low, end, low_end, stop_below=0.6)
    going_on = replace(before, frontier=search.beginnings(before.stock)[1:])
    for state in (before, going_on):
        grown = search.grow(state, fitted)
        assert [net.path for net in grown.finished] == [("ash.0", "fir.2")]
        assert grown.given_up == ()
        assert set(grown.junctions) == {stitched.junction_name(("ash.0", "fir.2"))}


def test_with_the_budget_spent_a_finished_network_that_was_given_up_ends_the_search() -> None:
    """However many partial networks are left: they would be given up one by one."""
    before = voted(vote.Winner("fir.2", 1.0, 0.2, 1), stop_below=0.6)
    before = replace(before, frontier=search.beginnings(before.stock)[1:])
    assert search.grow(before, {}).phase == "score"
    spent = search.grow(replace(before, expansions=before.params.expansions), {})
    assert spent.phase == "gather"
    assert [finalist.path for finalist in spent.finalists] == [("ash.0", "fir.2")]


def test_stopping_early_costs_fewer_rounds_and_still_gives_a_network() -> None:
    """Nothing but a donor's own succession reaches 1, and that is excluded: all is given up, one is taken back."""
    hasty = play(stop_below=1.0, native_continuation="exclude", spread=False)
    patient = play(native_continuation="exclude", spread=False)
    assert len(hasty) < len(patient)
    assert METHOD.result(hasty[-1]).meta["taps"]
    lines = [line for state in hasty for line in METHOD.explain(state)]
    assert any(line.startswith("given up ") for line in lines)
    assert any(line.startswith("taken back") for line in lines)


# -- rounds ---------------------------------------------------------------------------------------


def test_a_round_without_answers_changes_nothing_but_closes_an_open_vote() -> None:
    """Nobody answered: the same is asked again; with votes already cast they are counted."""
    assert replace(METHOD.step(FULL[0], None), log=FULL[0].log) == FULL[0]
    several = play(subrounds=3)
    voting = next(state for state in several if state.ballots and state.phase == "score")
    after = METHOD.step(voting, None)
    assert after.expansions == voting.expansions + 1
    assert after.turn == voting.turn + 1


def test_votes_close_early_once_all_devices_are_known_to_have_voted() -> None:
    """Of five sub-rounds the first expansion takes two (the second brings nobody new), later ones take one."""
    phases = [state.phase for state in play(subrounds=5)]
    assert phases[:6] == ["score", "score", "fit", "score", "fit", "score"]


def test_a_device_that_joins_in_the_middle_takes_part() -> None:
    """It has no references and no weight yet: it gets both, and its vote counts."""
    devices = members(5)
    early = play(devices[:4])[4]
    resumed = replace(METHOD, init=lambda bundle, params, seed: early)
    last = played(resumed, devices)[-1]
    assert METHOD.done(last)
    assert "dev-4" in last.weights
    assert sum(last.weights.values()) == pytest.approx(1.0)


def test_without_held_out_examples_the_criterion_decides_and_the_story_says_so() -> None:
    """Nothing to validate on: accuracies are unknown, not zero."""
    devices = [replace(member, held=Examples(member.held.x[:0], member.held.y[:0])) for member in members()]
    last = play(devices)[-1]
    found = METHOD.result(last)
    assert all(each["accuracy"] is None for each in found.meta["search"])
    assert found.meta["gains"] == {"joined": None, "stitched": None}
    best = min(last.candidates, key=lambda each: each.criterion or 0.0)
    assert found.meta["taps"] == [list(path) for path in best.paths]
    assert any("not validated" in line for line in METHOD.explain(last))


def test_paper_mode_is_the_papers_letter() -> None:
    """Biased CKA of outputs, projections without bias or ridge, random order, the donors' own classes."""
    bundle, _ = build()
    params = METHOD.init(bundle, Params(mode="paper"), 0).params
    assert {name: getattr(params, name) for name in fedstitch.PAPER} == fedstitch.PAPER
    junctions = play(mode="paper")[-1].junctions.values()
    assert all(not junction["bias"].any() for junction in junctions)


def test_paper_mode_holds_five_rounds_for_each_vote_and_finishes_22_networks() -> None:
    """Though the first round brings all devices. Every block is voted on, at random paths, from starting blocks."""
    run = play(mode="paper")
    last = run[-1]
    assert sum(state.phase == "score" for state in run) == 5 * last.expansions
    assert 22 <= len(last.finished) <= 24  # up to three come of the last vote
    assert len(last.finalists) == 22
    assert run[0].finished == ()
    assert run[0].frontier == tuple(net for net in search.beginnings(last.stock) if net != run[0].current)
    pools = [(state.current.path[-1], state.pool) for state in run if state.phase == "score"]
    assert any(name.endswith(".1") and own == name[:-1] + "0" for own, pool in pools for name in pool)
    explored = [line for state in run for line in METHOD.explain(state) if line.startswith("picked at random: ")]
    assert explored


def test_exploration_fades_with_the_expansions() -> None:
    """0.3, then 0.27 after one, never below 0.05."""
    assert search.epsilon(FULL[0]) == pytest.approx(0.3)
    assert search.epsilon(replace(FULL[0], expansions=1)) == pytest.approx(0.27)
    assert search.epsilon(replace(FULL[0], expansions=99)) == 0.05


def test_private_state_begins_anew_when_a_device_has_other_examples(tmp_path: Path) -> None:
    """References on images that the device no longer has must not be used."""
    bundle, runner = build()
    state = METHOD.init(bundle, Params(**SMALL), 3)
    order = METHOD.send(state, DeviceView("dev-0", None))
    assert order is not None
    task, site = given(METHOD, order, members(1)[0], runner, seed=3, cache=tmp_path)
    first = METHOD.work(task, site)
    fewer = Examples(site.train.x[:30], site.train.y[:30])
    second = METHOD.work(task, replace(site, train=fewer, local=first.local))
    assert second.local["drawn"][0] == 30
    assert not np.array_equal(second.local["gram.elm.0"], first.local["gram.elm.0"])
    with pytest.raises(ModelError, match="knows no phase"):
        METHOD.work(replace_params(task, phase="dance"), site)


def replace_params(task: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(task, params={**task.params, **changes})


def test_progress_rises_and_can_cancel(tmp_path: Path) -> None:
    """A cancelled task stops at the next block."""
    bundle, runner = build()
    order = METHOD.send(METHOD.init(bundle, Params(**SMALL), 3), DeviceView("dev-0", None))
    assert order is not None
    task, site = given(METHOD, order, members(1)[0], runner, seed=3, cache=tmp_path)
    seen: list[float] = []
    METHOD.work(task, replace(site, progress=seen.append))
    assert seen == sorted(seen)
    assert 0.5 < seen[-1] <= 1.0

    def cancel(fraction: float) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        METHOD.work(task, replace(site, progress=cancel))


def test_blocks_are_typed_all_the_way() -> None:
    """What a task says of its blocks is what the bundle says."""
    bundle, _ = build()
    order = METHOD.send(METHOD.init(bundle, Params(**SMALL), 3), DeviceView("dev-0", None))
    assert order is not None
    ask = msgspec.convert(msgspec.json.decode(msgspec.json.encode(order.params)), scoring.ScoreAsk)
    assert all(isinstance(block, Block) for block in ask.blocks.values())
    assert ask.blocks["ash.1"].in_shape == (4, 8, 8)


def picked(*nets: tuple[tuple[str, ...], float], **changes: Any) -> tuple[str, ...]:
    """The path that is next of some with their scores."""
    params = replace(FULL[0].params, **{"completion": False, **changes})
    frontier = tuple(Net(path, (), score) for path, score in nets)
    return search.pick(replace(FULL[0], params=params, frontier=frontier)).path


def test_the_next_path_is_the_one_that_promises_most() -> None:
    """0.6 half-way through a donor before 0.9 at a beginning; how many blocks a donor is cut into is no matter."""
    assert picked((("ash.0",), 0.9), (("elm.0", "elm.1"), 0.6)) == ("elm.0", "elm.1")
    assert picked((("ash.0",), 0.9), (("elm.0", "elm.1"), 0.5)) == ("ash.0",)
    assert picked((("ash.0",), 0.51), (("elm.0",), 0.5)) == ("ash.0",)  # of four blocks and of three
    assert picked((("ash.0",), 0.5), (("elm.0",), 0.51)) == ("elm.0",)


def test_a_path_promises_no_more_for_blocks_that_it_left_out() -> None:
    """The donor's own next block at score 1 before the one after it at 0.97: neither has run more than the other."""
    assert picked((("ash.0", "ash.2"), 0.97), (("ash.0", "ash.1"), 1.0)) == ("ash.0", "ash.1")
    assert picked((("ash.0", "elm.1"), 0.97), (("ash.0", "ash.1"), 1.0)) == ("ash.0", "elm.1")  # half a donor, a third


def test_donors_are_left_at_their_middle_first_and_in_turns() -> None:
    """Of equal scores; a better score comes before all of them."""
    whole = [("ash.0", "ash.1", "ash.2"), ("ash.0", "ash.1"), ("ash.0",), ("elm.0", "elm.1"), ("elm.0",)]
    left, found = [(path, 1.0) for path in whole], []
    while left:
        found.append(picked(*left, completion=True))
        left.remove((found[-1], 1.0))
    assert found == [("ash.0", "ash.1"), ("elm.0", "elm.1"), ("ash.0",), ("elm.0",), ("ash.0", "ash.1", "ash.2")]
    assert picked(*((path, 1.0) for path in whole[1:]), (whole[0], 1.1), completion=True) == whole[0]


def test_a_search_finds_ten_networks_of_several_donors_or_says_why_not() -> None:
    """In eight votes, most of the networks with blocks of two donors; too few are told with the reason."""
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


def test_a_path_ends_as_its_last_donor_goes_on_with_no_vote_and_no_junction() -> None:
    """ash.0 > elm.1 is finished by elm.2, which is its native end; its maps are offered what another donor has."""
    grown = search.grow(voted(vote.Winner("fir.1", 1.0, 0.5, 1), completion=True), {})
    assert ("ash.0", "fir.1", "fir.2") in [net.path for net in grown.finished]
    ended = next(net for net in grown.finished if net.path == ("ash.0", "fir.1", "fir.2"))
    assert (ended.score, ended.residuals) == (0.45, (None, None))
    started = FULL[0]
    assert {net.path for net in started.finished} == {donor.blocks for donor in started.stock.donors.values()}
    blocks = started.stock.blocks
    for state in FULL:
        if state.phase == "score":
            own = blocks[state.current.path[-1]]
            assert not any(stitched.continues(own, blocks[name]) for name in state.pool)
            assert not any(blocks[name].kind == "end" for name in state.pool)


def test_the_depth_follows_the_donors() -> None:
    """As many blocks as the longest donor has, so that each of them fits; a number in the job stands."""
    bundle, _ = build()
    free = {name: value for name, value in SMALL.items() if name != "depth"}
    assert METHOD.init(bundle, Params(**free), 3).params.depth == 4
    assert METHOD.init(bundle, Params(**free, depth=7), 3).params.depth == 7
    shallow = METHOD.init(bundle, Params(**free, depth=3), 3)
    assert {net.path[0] for net in shallow.finished} == {"elm.0", "fir.0"}


# -- label-aware scores ---------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", ["labels", "residual"])
def test_outputs_can_be_judged_by_the_labels(criterion: str) -> None:
    """A whole search ends in a network; the donor's own next block scores what its own output says of the labels."""
    last = play(criterion=criterion)[-1]
    assert METHOD.done(last)
    assert max(each["accuracy"] for each in METHOD.result(last).meta["search"]) > 0.8
    state, scores, _ = score_answers(criterion=criterion, score_at="output")
    own = scores["score"][state.pool.index("ash.2")]
    assert 0 < own < 1
    _, again, _ = score_answers(criterion=criterion, score_at="hybrid")
    assert again["score"][state.pool.index("ash.2")] == own
    assert (again["screen"] == score_answers(score_at="hybrid")[1]["screen"]).all()
    _, less, _ = score_answers(
        criterion=criterion, score_at="output", native_continuation="penalise", native_penalty=0.25
    )
    assert less["score"][state.pool.index("ash.2")] == pytest.approx(0.75 * own)


def test_labels_judge_no_inputs() -> None:
    """All blocks would score the same: what the path puts out."""
    bundle, _ = build()
    with pytest.raises(JobError, match="criterion = 'labels' judges outputs: let score_at be"):
        METHOD.init(bundle, Params(criterion="labels", score_at="input"), 0)
