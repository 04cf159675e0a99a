"""Baselines over toy donors whose blocks are numpy functions, and what such runs take."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedquilt.arrays import tensors
from fedquilt.core import Aggregation, Bundle, ClientContext, ClientResult, DeviceView, Examples, Method, Task, TaskSpec
from fedquilt.methods.fedstitch import METHOD, SearchParams
from fedquilt.models import stitching
from fedquilt.models.stitching.search import steps
from fedquilt.models.stitching.search.state import ScoredPath, SearchState, resolve_settings
from fedquilt.models.stitching.vote import Winner
from fedquilt.testing.toy_networks import SMALL, build_donors, image_members, run_method, write_bundle
from fedquilt.tools.experiments.baselines import BaselineSetup
from fedquilt.tools.simulation.simulated_job import SimulatedRound, Simulation
from fedquilt.tools.simulation.workers.backend import WorkBackend


def bench(place: Path) -> BaselineSetup:
    """Three donors, written into a folder; tested on what the devices hold out."""
    bundle, runner = build_donors()
    write_bundle(place, bundle)
    train, held = (pooled([getattr(each, part) for each in image_members()]) for part in ("train", "held"))
    return BaselineSetup(bundle, Path, runner, train, held)


def path_method(path: Sequence[str]) -> Method:
    """FedStitch without a search: it solves the junctions of one path, then its head."""

    def force_path(state: SearchState) -> SearchState:
        while state.phase == "score":
            assert state.current is not None
            winner = Winner(path[len(state.current.path)], 1.0, 1.0, 1)
            state = replace(state, winners=(winner,))
            if steps.winners_needing_junction(state):
                return replace(state, phase="fit")
            state = steps.grow_paths(state, {})
        return state

    def init(bundle: Bundle, params: SearchParams, seed: int) -> SearchState:
        start = ScoredPath(tuple(path[:1]), tuple(path[1:]), 1.0)
        alone = replace(resolve_settings(params), completion=False)  # else the donors would be finished beside it
        return force_path(replace(METHOD.init(bundle, alone, seed), frontier=(), current=start))

    return replace(METHOD, init=init, step=lambda state, total: force_path(METHOD.step(state, total)))


def forgetful(method: Method) -> Method:
    """The method with a device's state and cache cleared before each task, but for the drawn images."""

    def work(task: Task, site: ClientContext) -> ClientResult:
        with tempfile.TemporaryDirectory() as cache:
            local = {name: array for name, array in site.local.items() if name == "drawn"}
            return method.work(task, replace(site, local=local, cache_at=Path(cache)))

    return replace(method, work=work)


def pooled(shares: list[Examples]) -> Examples:
    return Examples(np.concatenate([each.x for each in shares]), np.concatenate([each.y for each in shares]))


# -- what runs take -------------------------------------------------------------------------------


def test_bytes_are_those_of_what_is_sent_and_content_is_sent_once() -> None:
    """One device, two rounds: a file named in both, a tensor that changes and one that does not."""
    bundle, runner = build_donors()
    blob = bundle.files["ash.0.onnx"]
    same, one, other = ({"w": np.full(4, value, np.float32)} for value in (0, 1, 2))
    answer = {"y": np.zeros(3)}
    rounds: list[SimulatedRound] = []

    def send(turn: int, device: DeviceView) -> TaskSpec:
        return TaskSpec({}, {"ash.0.onnx": blob, "same": same, "changing": (one, other)[turn]})

    def observe(simulation: Simulation, hands: WorkBackend) -> None:
        rounds[:] = simulation.rounds

    toy = replace(
        METHOD,
        state=int,
        init=lambda bundle, params, seed: 0,
        send=send,
        work=lambda task, site: ClientResult({"answer": answer}, 1.0),
        aggregation=Aggregation(lambda turn, total, update: update),
        step=lambda turn, total: turn + 1,
        done=lambda turn: turn == 2,
        explain=lambda turn: (),
    )
    last = run_method("fedstitch", bundle, image_members(1), engine=runner, method=toy, observe=observe)[-1]
    size = {
        name: len(tensors.encode_tensors(value)) for name, value in (("same", same), ("one", one), ("other", other))
    }
    assert last == 2
    assert [each.down_bytes for each in rounds] == [blob.size + size["same"] + size["one"], size["other"]]
    assert [each.up_bytes for each in rounds] == [len(tensors.encode_tensors(answer))] * 2


def test_a_device_that_keeps_nothing_takes_longer_to_the_same_end() -> None:
    """Its references are gone before every task: more runs of blocks in the search, every bit the same.

    After the search every device runs all donors on all of its images, whatever it has kept.
    """
    ends, searching, after = [], [], []
    for method in (METHOD, forgetful(METHOD)):
        bundle, runner = build_donors()
        runs = {}

        def observe(simulation: Simulation, hands: WorkBackend, runs: Any = runs, runner: Any = runner) -> None:
            runs[simulation.state.phase] = sum(runner.runs.values())

        told = {"engine": runner, "method": method, "observe": observe}
        ends.append(run_method("fedstitch", bundle, image_members(), SMALL, **told, seed=3, rounds=1000)[-1])
        searching.append(runs["gather"])
        after.append(runs["done"] - runs["gather"])
    assert tensors.pack_state(ends[0]) == tensors.pack_state(ends[1])
    assert searching[1] > 1.5 * searching[0]
    assert after[1] == after[0]


# -- donors ---------------------------------------------------------------------------------------


def test_a_path_that_is_given_is_taken_with_junctions_where_blocks_are_strangers() -> None:
    """ash.0 > ash.1 > fir.1 > fir.2, although a search would be offered more: one junction, one head, no score."""
    bundle, runner = build_donors()
    led, params = path_method(["ash.0", "ash.1", "fir.1", "fir.2"]), {**SMALL, "depth": 5}
    run = run_method("fedstitch", bundle, image_members(), params, engine=runner, method=led, rounds=1000)
    assert [state.phase for state in run] == ["fit", "gather", "validate", "done"]


def test_a_donors_new_head_is_that_of_a_job_in_which_devices_are_asked_one_by_one(tmp_path: Path) -> None:
    """The devices' sums give what the pooled images give, however few are asked in a round."""
    made = bench(tmp_path)
    for each in made.evaluate_new_heads():
        led, one = path_method(made.stock.donors[each.name].blocks), {"size": 1}
        run = run_method(
            "fedstitch", made.bundle, image_members(), SMALL, engine=made.engine, method=led, cohort=one, rounds=99
        )
        alone = (made.stock.donors[each.name].blocks[:-1],)
        number = next(i for i, candidate in enumerate(run[-1].candidates, 1) if candidate.paths == alone)
        assert made.compute_accuracy(METHOD.candidate(run[-1], number)) == each.accuracy


def test_donors_are_tested_as_they_are(tmp_path: Path) -> None:
    """Those without aligned classes are left out; accuracy is that of the aligned arg-max."""
    made = bench(tmp_path)
    found = made.evaluate_unmodified()
    assert [each.name for each in found] == ["ash", "elm"]
    stock = stitching.stitched_network.load_donor_pool(made.bundle.meta)
    x = (made.test.x[:, None].astype(np.float32) / 255 - 0.5) / 0.5
    for each in found:
        logits = x
        for name in stock.donors[each.name].blocks:
            logits = made.engine.run(Path(f"{name}.onnx"), logits)
        assert each.accuracy == pytest.approx(float((logits.argmax(axis=1) == made.test.y).mean()))
