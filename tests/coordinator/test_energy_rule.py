"""`[cohort] deadline = "energy"`: from profiles and earlier rounds to a deadline and epochs, and on into tasks."""

import msgspec
import numpy as np
import pytest
from opened import opened

from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds import deadline, decisions
from fedquilt.coordinator.rounds.deadline import DeviceWorkload, TaskDuration, decide_deadline
from fedquilt.coordinator.rounds.events import (
    CohortSelected,
    JobConstants,
    JobStarted,
    JobState,
    RoundClosed,
    RoundCommitted,
    UpdateAccepted,
    apply_event,
)
from fedquilt.coordinator.settings import CohortSettings
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.updates import tasks
from fedquilt.coordinator.views import event_messages
from fedquilt.core import BlobRef, JobError, OperatingPoint, Profile, TaskSpec, Update, Usage, WorkEstimate
from fedquilt.formats import job_bundle


def cohort(**keys: float) -> CohortSettings:
    return msgspec.convert({"deadline": "energy", **keys}, CohortSettings)


def profile(name: str, *points: tuple[str, float, float | None], idle_w: float | None = 1.0) -> Profile:
    """Points as (name, operations a second, watts)."""
    found = tuple(OperatingPoint(name=point, flops_per_s=speed, busy_w=watts) for point, speed, watts in points)
    return Profile(
        device=name,
        board="toy",
        memory_bytes=1 << 30,
        budget_bytes=1 << 30,
        engines=("numpy",),
        versions={},
        points=found,
        idle_w=idle_w,
    )


DEAR = profile("dear", ("fast", 1.0, 11.0), ("calm", 0.5, 5.0))  # 10 J above idle for a unit, or 8
CHEAP = profile("cheap", ("fast", 4.0, 9.0))  # 2 J for a unit
EPOCH = WorkEstimate(flops_per_example=1.0)


def training(board: Profile, epochs: int = 2) -> DeviceWorkload:
    """Two epochs of 1 operation for each example, whose number may be another."""
    return DeviceWorkload(WorkEstimate(flops_per_example=float(epochs)), board, 0, epochs, EPOCH)


def steady(seconds: float, expected_s: float, examples: int = 10) -> tuple[TaskDuration, ...]:
    """Five rounds that took what the profile predicts for them."""
    return tuple(TaskDuration(n, seconds, 2.0, seconds, expected_s, examples) for n in range(5))


KNOWN = {"dear": steady(20.0, 20.0), "cheap": steady(5.0, 5.0)}
P90 = 1.1755  # of five equal ratios: exp(1.2816 * sqrt(2 * 0.2^2 / 6 * 6 / 5)) = exp(1.2816 * 0.12649)
BOTH = {"dear": training(DEAR), "cheap": training(CHEAP)}


def test_work_moves_to_the_cheaper_board_as_far_as_the_job_allows():
    """40 passes: 1 epoch of 10 s at the fast point or 20 s at the calm one, and 3 epochs of 7.5 s.

    The calm point saves 20 J and makes both boards wait for 10 s * 1.1755 longer, at 2 W: 23.5 J. So fast it is.
    """
    found = decide_deadline(cohort(), KNOWN, BOTH)
    assert found.epochs == {"dear": 1, "cheap": 3}
    assert found.seconds == pytest.approx(10.0 * P90, rel=1e-3)


def test_without_work_to_move_only_the_time_is_chosen():
    """A method that has all boards train alike moves no work: 20 s at the fast point."""
    unmovable = {device: ask._replace(epochs=0) for device, ask in BOTH.items()}
    found = decide_deadline(cohort(), KNOWN, unmovable)
    assert found.epochs == {}
    assert found.seconds == pytest.approx(20.0 * P90, rel=1e-3)


def test_where_idling_costs_nothing_a_round_is_as_long_as_the_calm_point_takes_unless_it_is_bounded(monkeypatch):
    monkeypatch.setattr(deadline, "MOST_WORK", 1.0)
    resting = {
        device: ask._replace(profile=msgspec.structs.replace(ask.profile, idle_w=0.0)) for device, ask in BOTH.items()
    }
    for keys, seconds in (({}, 40.0), ({"deadline_s": 30.0}, 20.0), ({"joules_per_round": 1e6}, 20.0)):
        found = decide_deadline(cohort(**keys), KNOWN, resting)
        assert found.seconds == pytest.approx(seconds * P90, rel=1e-3)


def test_before_anybody_has_answered_it_is_the_predicted_rule():
    predicted = msgspec.structs.replace(cohort(), deadline="predicted")
    mute = {"dear": training(profile("dear", ("fast", 1.0, None)))}
    for known, asked in (({}, BOTH), (KNOWN, mute)):
        assert decide_deadline(cohort(), known, asked) == decide_deadline(predicted, known, asked)


def test_a_board_whose_joules_are_not_known_keeps_its_epochs_and_is_waited_for():
    """It takes 100 s, and up to 117.6 s: so the others may be slow, as their waiting is paid anyway."""
    mute = training(profile("mute", ("fast", 0.2, None)))
    known = {**KNOWN, "mute": steady(100.0, 100.0)}
    found = decide_deadline(cohort(), known, {**BOTH, "mute": mute})
    assert "mute" not in found.epochs
    assert found.seconds == pytest.approx(100.0 * P90, rel=1e-3)


def test_a_new_board_keeps_its_epochs_until_it_has_told_its_examples():
    """A plan made without their number could give the board any amount of work."""
    found = decide_deadline(cohort(), {"dear": KNOWN["dear"]}, BOTH)
    assert "cheap" not in found.epochs
    assert found.seconds is not None


def test_another_number_of_epochs_is_so_many_times_their_work_and_nothing_else():
    order = TaskSpec({"epochs": 2}, {}, WorkEstimate(flops=4.0, flops_per_example=6.0, launches_per_batch=2.0, batch=5))
    ask = tasks.predict_workload(order, ("work",), "numpy", 0.2, uneven=True)
    assert (ask.epochs, ask.with_epochs(2)) == (2, ask)
    assert ask.with_epochs(3).work == tasks.predict_work(tasks.with_epochs(order, 3), ("work",), "numpy")
    both = tasks.predict_workload(order, ("work", "check"), "numpy", 0.2, uneven=True)
    assert both.with_epochs(3).work.flops_per_example - both.work.flops_per_example == 3.0
    for actions, uneven in ((("check",), True), (("work",), False)):
        assert tasks.predict_workload(order, actions, "numpy", 0.2, uneven=uneven).epochs == 0
    assert tasks.with_epochs(order, None) is order
    assert tasks.with_epochs(None, 3) is None


def test_a_round_is_asked_with_its_epochs_and_the_next_one_begins_without():
    blob = BlobRef(sha256="a" * 64, size=1)
    plan = JobConstants(0, 5, cohort(), 0)
    state = msgspec.structs.replace(apply_event(JobState(plan), JobStarted(blob), 0.0), took=KNOWN)
    asked = decisions.decide_event(state, 0.0, BOTH.keys(), BOTH.__getitem__)
    assert isinstance(asked, CohortSelected)
    assert asked.epochs == {"dear": 1, "cheap": 3}
    assert asked.work == {"dear": 1.0, "cheap": 3.0}
    state = apply_event(state, asked, 0.0)
    assert state.epochs == asked.epochs
    for device in BOTH:
        update = Update(job="j", round=0, attempt=0, device=device, weight=1.0, bundles={}, metrics={}, usage=Usage())
        state = apply_event(state, UpdateAccepted(0, update, 5.0, 5.0), 5.0)
    assert [state.took[device][-1].work for device in ("dear", "cheap")] == [1.0, 3.0]
    state = apply_event(apply_event(state, RoundClosed(0), 5.0), RoundCommitted(0, blob, False, {}), 5.0)
    assert state.epochs == {}


@pytest.mark.parametrize(("method", "uneven"), [("fednova", True), ("fedprox", True), ("fedavg", False)])
def test_a_task_has_the_planned_epochs_also_after_a_restart(tmp_path, method, uneven):
    network = {"name": "mlp", "inputs": 2, "hidden": [], "classes": 2}
    model = {"1.weight": np.zeros((2, 2), np.float32), "1.bias": np.zeros(2, np.float32)}
    job_bundle.write_bundle(
        tmp_path / "bundle", {"network": network, "flops": 8}, {"model": tensors.encode_tensors(model)}
    )
    table = {"name": "j", "method": method, "params": {"epochs": 4}, "cohort": {"deadline": "energy"}}
    with Store(tmp_path / "home") as store:
        id = store.add_job(settings.parse_job(table), tmp_path / "bundle")
        job = opened(store, id)
        before = job.device_workload("a", CHEAP)
        assert before.epochs == (4 if uneven else 0)
        job.record_event(CohortSelected(0, 0, ("a", "b"), epochs={"a": 7} if uneven else {}), 0.0)
        for running in (job, opened(store, id)):
            sent = {device: running.build_task(device, "numpy", CHEAP, 0.0) for device in "ab"}
            told = {device: task.params["epochs"] for device, task in sent.items() if task}
            assert told == {"a": 7 if uneven else 4, "b": 4}
            works = {device: task.work.flops_per_example for device, task in sent.items() if task}
            assert works["a"] / works["b"] == (7 / 4 if uneven else 1)
            assert running.device_workload("a", CHEAP).work == sent["a"].work


def test_the_log_tells_the_planned_epochs():
    told = event_messages._describe_event(CohortSelected(3, 0, ("a", "b"), deadline_s=42.0, epochs={"b": 8, "a": 1}))
    assert told == [
        "round 4: cohort a, b; deadline 42 s, chosen for it",
        "round 4: epochs, as planned for energy: a 1, b 8",
    ]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"joules_per_round": 30}, 'only deadline = "energy" heeds it'),
        ({"deadline": "predicted", "joules_per_round": 30}, "joules_per_round: only"),
    ],
)
def test_a_bound_that_nothing_heeds_is_refused(keys, told):
    with pytest.raises(JobError, match=told):
        settings.parse_job({"name": "j", "method": "fedavg", "cohort": keys})


def test_every_rule_is_found_by_its_name():
    assert deadline.POLICIES["energy"] is deadline.decide_by_energy
