"""The sum of a running round, asked by hand: what is in it is what counts, whatever went wrong before."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from by_hand import Stage, ones
from msgspec.structs import replace

from fedquilt.arrays import tensors
from fedquilt.coordinator.jobs.job import RunningJob
from fedquilt.coordinator.updates import aggregation
from fedquilt.coordinator.updates.validation import ClaimBounds
from fedquilt.core import Update, Usage


@pytest.fixture(params=["fedavg", "robust"])
def running(tmp_path: Path, request: pytest.FixtureRequest) -> RunningJob:
    """A round in which three devices are asked; of "robust" updates are folded in the order of devices."""
    cohort = {"start_devices": 3, "deadline_s": 1000.0}
    stage = Stage(tmp_path, method=request.param, cohort=cohort)
    for name in "abc":
        stage.hand(name)
    stage.play()
    return stage.server.active_jobs()[0]


def update(running: RunningJob, device: str, factor: float) -> Update:
    """An update that is on the coordinator's disk."""
    ref = running._store.depot.store_bytes(tensors.encode_tensors(ones(factor)))
    return Update(running.id, 0, 0, device, 1.0, {"model": ref}, {}, Usage())


def closed(running: RunningJob, *updates: Update) -> dict[str, np.ndarray]:
    """Model after the round in which exactly these count."""
    rounds = replace(
        running.rounds, phase="closing", asked=frozenset(), answered={each.device: each for each in updates}
    )
    return dict(running.method.step(running.state, running.aggregator.take_aggregate(rounds)).model)


def test_an_update_that_was_lost_and_came_anew_counts_as_it_came_last(running, monkeypatch):
    first, last = update(running, "c", 1.0), update(running, "c", 3.0)
    assert running.build_update_reader(first, None, ClaimBounds())(first) == first
    monkeypatch.setattr(aggregation, "READ_BYTES", 0)
    assert running.build_update_reader(last, None, ClaimBounds())(last) == last
    assert {name: set(array.ravel().tolist()) for name, array in closed(running, last).items()} == {
        "1.weight": {3.0},
        "1.bias": {3.0},
    }


def test_an_error_in_the_middle_of_a_fold_leaves_nothing_of_the_update_in_the_sum(running, monkeypatch):
    """Folds add in place: a method's error may come when half of the tensors are added."""
    one, other, fold = update(running, "a", 1.0), update(running, "b", 7.0), running.aggregator._aggregation.fold

    def fails(state, so_far, given):
        found = fold(state, so_far, given)
        if given.device == "b":
            raise RuntimeError("halfway")
        return found

    assert running.build_update_reader(one, None, ClaimBounds())(one) == one
    failing = dataclasses.replace(running.aggregator._aggregation, fold=fails, check_update=None)
    monkeypatch.setattr(running.aggregator, "_aggregation", failing)
    with pytest.raises(RuntimeError, match="halfway"):
        running.build_update_reader(other, None, ClaimBounds())(other)
    assert set(closed(running, one)["1.bias"].tolist()) == {1.0}
