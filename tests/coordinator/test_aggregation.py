"""Updates are read, checked and folded once."""

import dataclasses
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import plain
import pytest
from by_hand import Stage, constant_model
from opened import opened

from fedquilt.arrays import exact_sums, tensors
from fedquilt.arrays.exact_sums import WeightedSums
from fedquilt.coordinator import settings
from fedquilt.coordinator.jobs.job import RunningJob
from fedquilt.coordinator.rounds.events import CohortSelected, JobStarted, RoundClosed, UpdateAccepted, UpdateLost
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.updates import aggregation
from fedquilt.coordinator.updates.aggregation import PartialAggregate
from fedquilt.coordinator.updates.job_blobs import LostUpdateError
from fedquilt.coordinator.updates.validation import ClaimBounds
from fedquilt.core import Aggregation, BlobRef, DeviceUpdate, Method, StoreError, TaskSpec, Update, Usage, WorkEstimate
from fedquilt.formats import job_bundle
from fedquilt.methods import fedavg
from fedquilt.models.local_training import NetworkState


def update(device: str, weight: float = 1.0) -> Update:
    return plain.update(
        job="a",
        device=device,
        weight=weight,
        bundles={"model": BlobRef(sha256="0" * 64, size=1)},
        metrics={"loss": 1.0},
        usage=Usage(wall_s=1.0),
    )


def folded(*devices: str, any_order: bool = False) -> PartialAggregate:
    made = PartialAggregate(any_order)
    for device in devices:
        assert made.can_fold_in_order(device)
        made.include_update(device, aggregation.fold_inputs(update(device)), (*(made.total or ()), device))
    return made


def left(made: PartialAggregate, *devices: str, **others: Update) -> tuple[object, list[str]]:
    """Devices left to fold, and the sum that they are added to."""
    found = made.remaining_devices({name: update(name) for name in devices} | others)
    return made.total, found


def test_the_sum_of_the_first_is_gone_on_with():
    assert left(folded("a", "b"), "c", "a", "b") == (("a", "b"), ["c"])
    assert left(folded("a", "b", "c"), "c", "a", "b") == (("a", "b", "c"), [])
    assert left(folded(), "c", "a", "b") == (None, ["a", "b", "c"])


def test_all_are_folded_anew_when_one_is_missing_or_another_than_it_was_told():
    assert left(folded("a", "b"), "b", "c") == (None, ["b", "c"])
    assert left(folded("a", "c"), "a", "b", "c") == (None, ["a", "b", "c"])
    assert left(folded("a"), a=update("a", weight=2.0)) == (None, ["a"])


def test_what_adds_up_in_any_order_is_folded_as_it_comes_and_anew_only_when_it_does_not_count():
    assert left(folded("c", "a", any_order=True), "a", "b", "c") == (("c", "a"), ["b"])
    assert left(folded("c", "a", any_order=True), "a", "b") == (None, ["a", "b"])
    assert left(folded("c", any_order=True), "a", c=update("c", weight=2.0)) == (None, ["a", "c"])


def test_an_update_is_folded_at_once_if_nobody_before_it_is_awaited_or_the_order_does_not_matter():
    answered = {"b": update("b")}
    assert folded("b").can_fold_now("c", answered, {"c", "d"})
    assert not folded("b").can_fold_now("d", answered, {"c", "d"})
    assert not folded().can_fold_now("c", answered, {"c"})  # b has answered and is not folded
    assert folded("b", any_order=True).can_fold_now("d", answered, {"c", "d"})
    assert folded("b", any_order=True).can_fold_now("a", answered, {"a"})
    assert not folded("b", any_order=True).can_fold_now("b", answered, {"b"})


def apart(*devices: str, of: PartialAggregate | None = None) -> PartialAggregate:
    """Folding with the sum of these devices, a 1 for each, that somebody else has made."""
    made = PartialAggregate(any_order=True) if of is None else of
    total = {"w": exact_sums.add_to_sum(None, np.ones(2, np.float32), len(devices))}
    made.add_pending_sum({device: aggregation.fold_inputs(update(device)) for device in devices}, lambda: total)
    return made


def gathered(made: PartialAggregate, *devices: str, **others: Update) -> tuple[float | None, list[str]]:
    updates = {name: update(name) for name in devices} | others
    made.merge_pending_sums(updates)
    total, found = left(made, *devices, **others)
    return None if total is None else float(total["w"].rounded_value()[0]), found


def test_sums_that_others_have_made_are_merged_if_exactly_these_updates_count():
    assert gathered(apart("a", "b", of=apart("c")), "a", "b", "c", "d") == (3.0, ["d"])
    assert gathered(apart("a", "b", of=apart("c")), "a", "c") == (1.0, ["a"])
    assert gathered(apart("a", "b"), "b", a=update("a", weight=2.0)) == (None, ["a", "b"])
    made = PartialAggregate(any_order=True)
    made.add_pending_sum({"a": aggregation.fold_inputs(update("a"))}, lambda: None)  # who was to make it has not
    assert gathered(made, "a") == (None, ["a"])


def test_what_is_in_a_sum_that_others_have_made_is_not_folded_again_as_it_comes():
    made = apart("a", "b")
    assert made.contains_update(update("a"))
    assert not made.contains_update(update("a", weight=2.0))
    assert not made.can_fold_in_order("b")
    assert not made.can_fold_now("b", {}, ["b"])
    assert made.can_fold_in_order("c")


@pytest.fixture(params=["fedavg", "robust"])
def running(tmp_path: Path, request: pytest.FixtureRequest) -> RunningJob:
    """A round in which three devices are asked; of "robust" updates are folded in the order of devices."""
    cohort = {"start_devices": 3, "deadline_s": 1000.0}
    stage = Stage(tmp_path, method=request.param, cohort=cohort)
    stage.connect("abc")
    return stage.server.active_jobs()[0]


def update_summing(running: RunningJob, device: str, factor: float) -> Update:
    """An update that is on the coordinator's disk."""
    ref = running._store.blob_store.store_bytes(tensors.encode_tensors(constant_model(factor)))
    return Update(running.id, 0, 0, device, 1.0, {"model": ref}, {}, Usage())


def closed(running: RunningJob, *updates: Update) -> dict[str, np.ndarray]:
    """Model after the round in which exactly these count."""
    rounds = msgspec.structs.replace(
        running.job_state,
        phase="closing",
        pending_devices=frozenset(),
        accepted_updates={each.device: each for each in updates},
    )
    return dict(running.method.step(running.state, running.aggregator.take_aggregate(rounds)).model)


def test_an_update_that_was_lost_and_came_anew_counts_as_it_came_last(running, monkeypatch):
    first, last = update_summing(running, "c", 1.0), update_summing(running, "c", 3.0)
    assert running.build_update_reader(first, None, ClaimBounds())(first) == first
    monkeypatch.setattr(aggregation, "UPDATE_CACHE_BYTES", 0)
    assert running.build_update_reader(last, None, ClaimBounds())(last) == last
    assert {name: set(array.ravel().tolist()) for name, array in closed(running, last).items()} == {
        "1.weight": {3.0},
        "1.bias": {3.0},
    }


def test_an_error_in_the_middle_of_a_fold_leaves_nothing_of_the_update_in_the_sum(running, monkeypatch):
    one, other, fold = (
        update_summing(running, "a", 1.0),
        update_summing(running, "b", 7.0),
        running.aggregator._aggregation.fold,
    )

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


NETWORK = {"name": "mlp", "inputs": 2, "hidden": [], "classes": 2}
MODEL = {"1.weight": np.zeros((2, 2), np.float32), "1.bias": np.zeros(2, np.float32)}
TABLE = {"name": "j", "method": "fedavg", "rounds": 3}


class Round:
    """A job whose devices are played by the test: it hands updates in and closes rounds."""

    def __init__(self, folder: Path, table: Mapping[str, Any] = {}, method: Method = fedavg.METHOD) -> None:
        job_bundle.write_bundle(
            folder / "bundle", {"network": NETWORK, "flops": 8}, {"model": tensors.encode_tensors(MODEL)}
        )
        self.store = Store(folder / "home")
        run = self.store.add_job(settings.parse_job({**TABLE, **table}), folder / "bundle")
        self.job = opened(self.store, run, method)

    def ask(self, devices: str) -> None:
        self.job.record_event(CohortSelected(self.job.job_state.round, 0, tuple(devices)), 0.0)

    def update(self, device: str, value: float) -> Update:
        """Of a device whose model has `value` in every entry; its blob is on the coordinator's disk."""
        ref = self.store.blob_store.store_bytes(
            tensors.encode_tensors({name: np.full_like(array, value) for name, array in MODEL.items()})
        )
        return plain.update(job=self.job.id, round=self.job.job_state.round, device=device, bundles={"model": ref})

    def take(self, device: str, value: float) -> None:
        """An update is examined and counts."""
        taken = self.job.build_update_reader(update := self.update(device, value), None, ClaimBounds())(update)
        self.job.record_event(UpdateAccepted(self.job.job_state.round, taken), 0.0)

    def commit(self) -> float:
        """Close the round; the value that the model's entries have come to."""
        self.job.record_event(RoundClosed(self.job.job_state.round), 0.0)
        done = self.job.build_commit(0.0)()
        self.job.record_event(done.event, 0.0)
        self.job.start_next_round(done)
        return float(self.job.state.model["1.bias"][0])


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Round]:
    """A fedavg job that is about to begin its first round."""
    made = Round(tmp_path)
    yield made
    made.store.close()


def in_order(state: NetworkState, so_far: WeightedSums | None, update: DeviceUpdate) -> WeightedSums:
    """FedAvg's fold, which does not say that it adds up in any order of devices."""
    return fedavg.fold(state, so_far, update)


@pytest.fixture
def ordered(tmp_path: Path) -> Iterator[Round]:
    """A job whose updates are folded in order of devices."""
    made = Round(tmp_path, method=replace(fedavg.METHOD, aggregation=Aggregation(in_order)))
    yield made
    made.store.close()


def test_what_was_folded_before_a_commit_failed_counts_once(stage, monkeypatch):
    stage.ask("abc")
    for device, value in zip("abc", (1.0, 2.0, 6.0), strict=True):
        stage.take(device, value)
    stage.job.aggregator._partial_aggregate.reset()  # as after a restart
    plain = stage.store.blob_store.load
    gone = stage.job.job_state.accepted_updates["c"].bundles["model"].sha256
    monkeypatch.setattr(stage.store.blob_store, "load", lambda sha256: None if sha256 == gone else plain(sha256))
    stage.job.record_event(RoundClosed(0), 0.0)
    with pytest.raises(LostUpdateError):
        stage.job.build_commit(0.0)()
    monkeypatch.setattr(stage.store.blob_store, "load", plain)
    stage.job.record_event(UpdateLost(0, "c", "gone"), 0.0)
    stage.take("c", 6.0)
    assert stage.commit() == 3.0


def test_an_update_that_could_not_be_stored_is_not_in_the_sum(tmp_path, monkeypatch):
    made = Round(tmp_path, {"wire": {"codec": "fp16"}})
    made.ask("ab")
    made.take("a", 1.0)
    plain = made.store.blob_store.store_small

    def full(payload):
        raise StoreError("no space left")

    monkeypatch.setattr(made.store.blob_store, "store_small", full)
    with pytest.raises(StoreError):
        made.take("b", 3.0)
    monkeypatch.setattr(made.store.blob_store, "store_small", plain)
    made.take("b", 3.0)
    assert made.commit() == 2.0
    made.store.close()


def test_updates_are_read_once_for_as_long_as_there_is_room(ordered, monkeypatch):
    stage = ordered
    size = stage.update("a", 0.0).bundles["model"].size
    monkeypatch.setattr(aggregation, "UPDATE_CACHE_BYTES", 2 * size + size // 2)
    read = []
    plain = stage.store.blob_store.load
    monkeypatch.setattr(stage.store.blob_store, "load", lambda sha256: (read.append(sha256), plain(sha256))[1])
    for number, devices in enumerate(("dcba", "hgfe")):
        stage.ask(devices)
        for index, device in enumerate(devices):
            stage.take(device, 4.0 * number + index)
        assert len(stage.job.aggregator._cached_updates) == 2
        assert stage.commit() == 4.0 * number + 1.5
        assert len(read) == 7 * (number + 1)  # six updates, and the state that the commit has stored


def test_the_update_that_the_log_names_is_folded_whatever_was_read_last(stage):
    stage.ask("a")
    counted = stage.job.build_update_reader(update := stage.update("a", 1.0), None, ClaimBounds())(update)
    stage.job.build_update_reader(update := stage.update("a", 9.0), None, ClaimBounds())(update)
    stage.job.record_event(UpdateAccepted(0, counted), 0.0)
    assert stage.commit() == 1.0


def test_what_a_round_asks_of_a_device_is_reckoned_anew_in_the_next(stage, monkeypatch):
    def send(state, view):
        return TaskSpec({}, {"model": state.model}, WorkEstimate(flops=1.0 + len(view.rounds)))

    monkeypatch.setattr(stage.job, "method", replace(stage.job.method, send=send, common_task=False))
    asked = []
    for _ in range(2):
        asked.append(stage.job.device_workload("a", None).work.flops)
        stage.ask("a")
        stage.take("a", 1.0)
        stage.commit()
    assert asked == [1.0, 2.0]


@pytest.mark.parametrize(("own", "times"), [(False, 1), (True, 2)])
def test_what_a_device_is_asked_is_worked_out_once_unless_its_tensors_are_its_own(tmp_path, own, times):
    made, sent = Round(tmp_path), []

    def send(state, view):
        sent.append(view.device)
        model = {name: array.copy() for name, array in state.model.items()} if own else state.model
        return TaskSpec({}, {"model": model}, WorkEstimate())

    made.job.method = replace(made.job.method, send=send, common_task=False)
    made.ask("abc")
    for device in "abc":
        made.job.device_workload(device, None)
    held = {id(order.bundles["model"]) for order in made.job._task_specs.values()}
    assert len(held) == 1
    for device in "abc":
        made.job.build_task(device, "numpy", None, 0.0)
    assert [sent.count(device) for device in "bc"] == [times, times]
    made.store.close()


def test_tasks_of_one_moment_differ_in_what_is_the_devices_own_alone(stage):
    stage.ask("ab")
    first, second = (stage.job.build_task(device, "numpy", None, 0.0) for device in "ab")
    later = stage.job.build_task("a", "numpy", None, 10.0)
    assert later is not None
    assert first.seed != second.seed
    assert msgspec.structs.replace(second, seed=first.seed) == first
    assert later == msgspec.structs.replace(first, deadline_s=first.deadline_s - 10.0)


def test_a_blob_that_vanishes_within_a_round_is_stored_again_for_the_tasks_of_a_later_moment(stage):
    stage.ask("ab")
    first = stage.job.build_task("a", "numpy", None, 0.0)
    stage.store.blob_store.remove_blob(first.bundles["model"].sha256)
    assert not stage.store.blob_store.has_blob(first.bundles["model"])
    second = stage.job.build_task("b", "numpy", None, 1.0)
    assert second.bundles == first.bundles
    assert stage.store.blob_store.has_blob(second.bundles["model"])


class Lives:
    """Coordinators that take up one round, each where the one before was killed, on a wall clock that a test sets."""

    def __init__(self, folder: Path) -> None:
        self.wall_s = 1e9
        with mock.patch.object(time, "time", side_effect=lambda: self.wall_s):
            self.made = Round(folder, {"cohort": {"deadline_s": 600}})
            self.made.ask("ab")
            self.made.take("a", 1.0)

    def next(self, passed_s: float, by_wall: bool = True) -> float:
        """Seconds that are left of the deadline once a coordinator is back, when the wall clock is so much later."""
        self.wall_s += passed_s
        with mock.patch.object(time, "time", side_effect=lambda: self.wall_s):
            row = self.made.store.find_job(self.made.job.id)
            job = RunningJob(row, self.made.store, 7.0, fedavg.METHOD, by_wall=by_wall)
            job.use_loaded_state(job.build_state_loader()(), 7.0)
        assert (job.job_state.round_started_s, set(job.job_state.selected_s.values())) == (
            7.0,
            {7.0},
        )  # other times are this process's
        return job.job_state.remaining_s("a", 7.0)


@pytest.mark.parametrize(
    ("passed_s", "left_s"), [(400.0, 200.0), (590.0, 60.0), (601.0, 594.0), (-9e8, 594.0), (9e8, 594.0)]
)
def test_a_round_that_another_process_takes_up_has_what_is_left_of_its_deadline(tmp_path, passed_s, left_s):
    assert Lives(tmp_path).next(passed_s) == pytest.approx(left_s)


def test_on_virtual_time_a_round_that_is_taken_up_has_its_whole_deadline(tmp_path):
    assert Lives(tmp_path).next(400.0, by_wall=False) == 600


@pytest.mark.parametrize("life_s", [5.0, 0.0, -3600.0, 1e6])
def test_a_round_ends_however_soon_its_coordinators_are_killed_and_whatever_their_clocks_show(tmp_path, life_s):
    lives = Lives(tmp_path)
    most = 600 / life_s if 0 < life_s < 600 else 100
    left = [lives.next(life_s) for _ in range(int(most) + 15)]
    assert left == sorted(left, reverse=True)
    assert left[-1] == pytest.approx(0.0, abs=0.01)
    assert left[0] >= 588.0
    assert min(left[: int(0.9 * most)]) >= 59.0


def test_a_clock_that_was_wrong_once_costs_a_hundredth_of_the_deadline(tmp_path):
    lives = Lives(tmp_path)
    assert [lives.next(each) for each in (100.0, -7200.0, 50.0, 7200.0)] == pytest.approx([500.0, 494.0, 444.0, 438.0])


def test_the_time_for_devices_to_be_back_is_halved_at_each_restart(tmp_path):
    lives = Lives(tmp_path)
    assert [lives.next(each) for each in (590.0, 55.0, 25.0, 20.0)] == pytest.approx([60.0, 30.0, 15.0, 7.5])


def test_what_is_not_used_is_not_written_so_that_the_version_before_reads_it():
    started = msgspec.json.encode(JobStarted(BlobRef(sha256="a" * 64, size=1)))
    assert b"begins" not in started
    assert b"links" not in msgspec.json.encode(settings.FleetSettings())
