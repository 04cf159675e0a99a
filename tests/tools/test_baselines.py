"""Baselines and local runs over toy donors whose blocks are numpy functions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedquilt import tensors
from fedquilt.coordinator.cohort import sample
from fedquilt.core import Answer, BlobRef, Contribution, DeviceView, Examples, Order
from fedquilt.methods.fedstitch import METHOD, Params, State
from fedquilt.models import stitch
from fedquilt.tools import local_run
from fedquilt.tools.baselines import Bench, along, mirrored
from fedquilt.tools.local_run import Spent
from toys import DONORS, SMALL, build, members

PARAMS = Params(**SMALL)


def bench() -> Bench:
    """Three donors; tested on what the devices hold out."""
    bundle, runner = build()
    train, held = (pooled([getattr(each, part) for each in members()]) for part in ("train", "held"))
    return Bench(bundle, Path, runner, train, held)


def pooled(shares: list[Examples]) -> Examples:
    return Examples(np.concatenate([each.x for each in shares]), np.concatenate([each.y for each in shares]))


# -- local runs -----------------------------------------------------------------------------------


def test_the_cohort_is_the_coordinators() -> None:
    """Two of five devices in each round, drawn from the seed and the round, folded in the order of their names."""
    bundle, runner = build()
    asked: list[tuple[int, str]] = []

    def fold(state: State, total: Any, update: Contribution) -> Any:
        asked.append((update.round, update.device))
        return METHOD.fold(state, total, update)

    spy = replace(METHOD, fold=fold)
    list(local_run.states(spy, bundle, Path, runner, members(5), PARAMS, seed=3, rounds=6, per_round=2))
    fleet = [f"dev-{i}" for i in range(5)]
    assert asked == [(number, device) for number in range(6) for device in sample(3, number, fleet, 2)]
    assert len(set(asked)) == 12


def test_bytes_are_those_of_what_is_sent_and_content_is_sent_once() -> None:
    """One device, two rounds: a file of 10 bytes named twice, a tensor that changes and one that does not."""
    bundle, runner = build()
    blob = BlobRef(sha256="a" * 64, size=10)
    same, one, other = ({"w": np.full(4, value, np.float32)} for value in (0, 1, 2))
    ask = {"phase": "none"}
    answer = {"y": np.zeros(3)}

    def send(turn: int, device: DeviceView) -> Order:
        return Order(ask, {"file": blob, "same": same, "changing": (one, other)[turn]})

    toy = replace(
        METHOD,
        init=lambda bundle, params, seed: 0,
        send=send,
        work=lambda task, site: Answer({"answer": answer}, 1.0),
        fold=lambda turn, total, update: update,
        step=lambda turn, total: turn + 1,
        done=lambda turn: turn == 2,
    )
    spent = Spent()
    last = local_run.search_alone(toy, bundle, Path, runner, members(1), None, spent=spent)
    size = {name: len(tensors.encode(value)) for name, value in (("same", same), ("one", one), ("other", other))}
    assert last == 2
    assert (spent.tasks, spent.rounds) == (2, 2)
    assert spent.down_bytes == 2 * len(msgspec.json.encode(ask)) + 10 + sum(size.values())
    assert spent.up_bytes == 2 * len(tensors.encode(answer))


def test_a_device_that_keeps_nothing_takes_longer_to_the_same_end() -> None:
    """Its references are gone before every task: more runs of blocks, every bit the same."""
    ends, runs = [], []
    for keep in (None, lambda local: {name: array for name, array in local.items() if name == "drawn"}):
        bundle, runner = build()
        ends.append(local_run.search_alone(METHOD, bundle, Path, runner, members(), PARAMS, seed=3, keep=keep))
        runs.append(sum(runner.runs.values()))
    assert tensors.pack(ends[0]) == tensors.pack(ends[1])
    assert runs[1] > 1.5 * runs[0]


# -- donors ---------------------------------------------------------------------------------------


def test_a_donor_stitched_to_itself_is_about_as_good_as_with_a_new_head() -> None:
    """Its junctions are fitted on maps that equal their targets; both heads are of all devices' images."""
    made = bench()
    stitched = made.stitched_to_themselves(members(), PARAMS, 3)
    heads = made.heads(PARAMS.head_ridge)
    assert [each.name for each in stitched] == [each.name for each in heads] == list(DONORS)
    assert all(each.accuracy > 0.6 for each in heads)
    for one, other in zip(stitched, heads, strict=True):
        assert one.accuracy == pytest.approx(other.accuracy, abs=0.05)


def test_a_donor_stitched_to_itself_has_a_junction_at_every_boundary() -> None:
    """ash.0 > twin's ash.1 > ash.2: two junctions of the channels' width, neither of them the identity."""
    bundle, runner = build()
    both, path = mirrored(bundle, "ash")
    assert path == ["ash.0", "ash's twin.1", "ash.2", "ash's twin.3"]
    last = local_run.search_alone(along(path), both, Path, runner, members(), PARAMS)
    found = METHOD.result(last)
    assert found.meta["path"] == path[:3]
    assert [junction["kind"] for junction in found.meta["junctions"]] == ["projection", "projection"]
    weights = [found.tensors[junction["weights"]] for junction in found.meta["junctions"]]
    assert [each.shape for each in weights] == [(4, 4), (6, 6)]
    for each in weights:
        assert np.allclose(each, np.eye(len(each)), atol=0.05)
        assert not np.array_equal(each, np.eye(len(each)))


def test_a_path_that_is_given_is_taken_with_junctions_where_blocks_are_strangers() -> None:
    """ash.0 > ash.1 > fir.1 > fir.2, although a search would be offered more: one junction, one head, no score."""
    bundle, runner = build()
    params = replace(PARAMS, depth=5)
    phases = [
        state.phase
        for state in local_run.states(
            along(["ash.0", "ash.1", "fir.1", "fir.2"]), bundle, Path, runner, members(), params
        )
    ]
    assert phases == ["fit", "head", "validate", "done"]


def test_a_head_solved_as_a_stitched_networks_is_that_of_all_where_all_are_asked() -> None:
    """The devices' sums give what the pooled images give; with one device a round it is another head."""
    made = bench()
    pooled = [each.accuracy for each in made.heads(PARAMS.head_ridge)]
    assert [each.accuracy for each in made.heads_alike(members(), PARAMS, 3)] == pooled
    few = made.heads_alike(members(), PARAMS, 3, per_round=1)
    assert [each.accuracy for each in few] != pooled


def test_donors_are_tested_as_they_are() -> None:
    """Those without aligned classes are left out; accuracy is that of the aligned arg-max."""
    made = bench()
    found = made.unmodified()
    assert [each.name for each in found] == ["ash", "elm"]
    stock = stitch.stock(made.bundle.meta)
    x = (made.test.x[:, None].astype(np.float32) / 255 - 0.5) / 0.5
    for each in found:
        logits = x
        for name in stock.donors[each.name].blocks:
            logits = made.engine.run(Path(f"{name}.onnx"), logits)
        assert each.accuracy == pytest.approx(float((logits.argmax(axis=1) == made.test.y).mean()))
