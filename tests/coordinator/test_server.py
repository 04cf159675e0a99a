"""A coordinator and its devices, step by step."""

import contextlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from by_hand import MODEL, Hand, Stage, constant_model

from fedquilt import wire
from fedquilt.arrays import tensors
from fedquilt.coordinator.jobs.job import RunningJob
from fedquilt.coordinator.rounds.events import (
    CohortSelected,
    EligibilityRecorded,
    JobEnded,
    RoundCommitted,
    UpdateAccepted,
    UpdateRejected,
)
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views import event_messages, round_outcomes
from fedquilt.core import Profile, TaskSpec, Update, Usage
from fedquilt.models.local_training import NetworkState


def test_updates_are_averaged_and_the_job_ends(stage):
    a, b = stage.connect("ab")
    a.answer(constant_model(1.0), weight=1.0)
    b.answer(constant_model(5.0), weight=3.0)
    stage.play()
    assert [fact.status for fact in stage.told(JobEnded)] == ["done"]
    assert stage.server.finished
    state = stage.told(RoundCommitted)[0].state
    stored = stage.store.blob_store.blob_path(state.sha256)
    assert tensors.unpack_state(stored.read_bytes(), NetworkState).model["1.bias"].tolist() == [4.0, 4.0]
    assert [ack.accepted for ack in a.acks] == [True]
    assert a.tasks[-1] is None  # the retained task is taken back


def test_a_round_that_follows_a_long_computation_has_its_whole_deadline(tmp_path, monkeypatch):
    stage = Stage(tmp_path, rounds=2)
    commit = RunningJob._compute_commit

    def slowly(job, *rest):
        stage.broker.now_s += 100.0
        return commit(job, *rest)

    monkeypatch.setattr(RunningJob, "_compute_commit", slowly)
    (hand,) = stage.connect("a")
    for _ in range(2):
        hand.answer(constant_model())
        stage.play()  # past the commit, which ends it early
        stage.play()
    assert [fact.round for fact in stage.told(RoundCommitted)] == [0, 1]
    assert [fact.status for fact in stage.told(JobEnded)] == ["done"]


def test_a_step_that_commits_a_round_wants_the_next_step_at_once(tmp_path):
    stage = Stage(tmp_path, rounds=2)
    (hand,) = stage.connect("a")
    stage.submit(hand)
    commits = [(now, due) for (*_, before), (now, due, after) in itertools.pairwise(stage.steps) if after > before]
    assert [due - now for now, due in commits] == [0.0]


def test_the_executor_keeps_up_its_connection_while_a_method_computes(stage, monkeypatch):
    told, commit = [], RunningJob._compute_commit

    @contextlib.contextmanager
    def tended():
        told.append("tended")
        yield
        told.append("back")

    def noted(job, *rest):
        told.append("computes")
        return commit(job, *rest)

    monkeypatch.setattr(stage.executor, "keep_alive", tended)
    monkeypatch.setattr(RunningJob, "_compute_commit", noted)
    (hand,) = stage.connect("a")
    stage.submit(hand)
    assert told == ["tended", "computes", "back"]


def test_updates_are_folded_in_the_order_of_devices_not_of_arrival(stage):
    hands = {name: stage.hand(name) for name in "abc"}
    stage.play()
    for name, value in (("a", 1e19), ("c", 1.0), ("b", -1e19)):
        hands[name].answer(constant_model(value))
        stage.play()
    assert [fact.update.device for fact in stage.told(UpdateAccepted)] == ["a", "c", "b"]
    stored = stage.store.blob_store.blob_path(stage.told(RoundCommitted)[0].state.sha256)
    folded = tensors.unpack_state(stored.read_bytes(), NetworkState).model["1.bias"]
    assert folded.tolist() == [np.float32(1 / 3)] * 2


def test_a_device_is_answered_when_the_fact_of_its_update_is_written(stage, monkeypatch):
    written = []
    answer = stage.executor.send_ack

    def answered(device, ack):
        with Store(stage.folder / "home") as store:
            facts = [fact for _, _, fact in store.read_events(stage.job)]
        written.append({fact.update.device for fact in facts if isinstance(fact, UpdateAccepted)})
        answer(device, ack)

    a, b = stage.connect("ab")
    monkeypatch.setattr(stage.executor, "send_ack", answered)
    stage.submit(a, b)
    assert written == [{"a", "b"}] * 2


def test_what_is_held_for_sending_does_not_grow_with_devices(stage, monkeypatch):
    stage.hand("a")
    stage.play()
    job = stage.server.find_job(stage.job)

    def send(state, view):
        width = int(view.device) % 4 + 1
        return TaskSpec({}, {"model": {"w": np.ones(width, np.float32)}, "shared": state.model})

    monkeypatch.setattr(job, "method", replace(job.method, send=send, common_task=False))
    made = [job.build_task(str(number), "numpy", None, 0.0) for number in range(100)]
    assert len({task.bundles["model"].sha256 for task in made}) == 4
    assert {ref.sha256 for task in made for ref in task.bundles.values()} <= job.sent_blobs()
    assert len(job._encoded_bundles) <= 4
    encoded = []
    monkeypatch.setattr(tensors, "encode_tensors", lambda value, metadata: encoded.append(value) or b"")
    job.build_task("1", "numpy", None, 0.0)
    assert not any(value is job.state.model for value in encoded)  # what all get is encoded once


def test_an_unclaimed_task_is_sent_again_ever_more_rarely(stage):
    a = stage.hand("a")
    stage.play(20.0)
    assert len(a.tasks) == 3
    assert len({task and task.params["lr"] for task in a.tasks}) == 1


def test_an_attempt_that_is_over_takes_its_tasks_back(tmp_path):
    stage = Stage(tmp_path, cohort={"deadline_s": 30.0, "attempts": 2, "min_devices": 1})
    a, b = stage.connect("ab")
    a.say("presence", wire.Presence(online=False, boot="1"), retain=True)
    stage.play(32.0)
    assert [(fact.attempt, fact.devices) for fact in stage.told(CohortSelected)] == [(0, ("a", "b")), (1, ("b",))]
    assert a.tasks[-1] is None
    task = b.tasks[-1]
    assert task.attempt == 1


def test_a_stale_task_that_the_broker_kept_is_taken_back_when_it_is_claimed(stage):
    a, _ = stage.connect("ab")
    stage.submit(a)
    heard = len(a.tasks)
    a.say("claim", wire.Claim(job="of-old", round=7, attempt=0, accepted=True))
    stage.play()
    assert a.tasks[heard:] == [None]


def test_an_answer_that_counts_does_not_read_the_other_jobs_facts(stage, monkeypatch):
    held, looked = Store.referenced_blobs, []

    def counted(store):
        looked.append(len(stage.told(RoundCommitted)))
        return held(store)

    hands = [stage.hand(name) for name in "abc"]
    stage.play(1.0)
    monkeypatch.setattr(Store, "referenced_blobs", counted)
    stage.submit(*hands)
    assert len(stage.told(UpdateAccepted)) == 3
    assert looked == [1]


def test_a_job_stops_when_its_bytes_are_used_up_and_says_what_joules_it_cannot_count(tmp_path):
    stage = Stage(tmp_path, rounds=9, stop={"max_bytes": 10, "max_joules": 5.0})
    (a,) = stage.connect("a")
    a.answer(constant_model(), usage=Usage(up_bytes=12))
    stage.play()
    assert [fact.round for fact in stage.told(RoundCommitted)] == [0]
    assert stage.told(RoundCommitted)[0].warnings == (
        "max_joules = 5 has no effect: no device of this job measures its energy. The job ends after its rounds or at "
        "another limit of [stop]",
    )
    assert 2.0 < stage.told(RoundCommitted)[0].took_s < 4.2
    assert [(fact.status, fact.reason) for fact in stage.told(JobEnded)] == [
        ("done", "max_bytes: 12 bytes of 10 are used")
    ]


def test_boards_that_take_fewer_joules_are_preferred_where_the_job_says_so(tmp_path):
    stage = Stage(tmp_path, cohort={"size": 1, "min_devices": 2, "prefer": "energy"})
    for name, watts in (("a", 1000.0), ("b", 1.23456)):
        stage.hand(name).publish_operating_point(flops_per_s=1.0, busy_w=watts)
    stage.play()
    assert stage.told(EligibilityRecorded)[-1].costs == {"a": 1000.0, "b": 1.23}
    assert stage.told(CohortSelected)[0].devices == ("b",)


def test_a_task_carries_its_devices_tier_and_the_log_says_who_could_take_part(tmp_path):
    stage = Stage(tmp_path, rounds=3)
    one, two = stage.hand("one"), stage.hand("two")
    stage.play(2.0)
    assert one.tasks[-1].tier == "under 1GB"
    assert stage.told(CohortSelected)[0].coverage[0].endswith("2 of 2 devices")
    one.answer(MODEL, usage=Usage(examples=30))
    two.answer(MODEL)
    stage.play(2.0)
    assert stage.told(CohortSelected)[1].coverage == ()  # everybody can still, which is no news
    small = Profile(device="two", board="hand", memory_bytes=1 << 30, budget_bytes=10, engines=("numpy",), versions={})
    two.say("profile", small, retain=True)
    stage.restart()
    stage.play(2.0)
    one.answer(MODEL, usage=Usage(examples=30))
    two.answer(MODEL)
    stage.play(2.0)
    last = stage.told(CohortSelected)[2]
    assert last.coverage[0].endswith("1 of 2 devices, 30 of 30 examples (1 have not reported their number)")
    assert last.coverage[0] in event_messages.format_single_event(last)[1]


@pytest.fixture
def coded(tmp_path: Path) -> Stage:
    """A job of one round whose updates go up by int8."""
    return Stage(tmp_path, wire={"codec": "int8"})


def by_int8(hand: Hand, value: float, **changes: Any) -> Update:
    """An answer of which every entry has moved from what was sent by `value`, in 127 steps."""
    task = next(task for task in reversed(hand.tasks) if task)
    assert task.wire.codec == "int8"
    step = np.full(1, value / 127, np.float32)
    sent = {f"{name}#int8": np.full(array.shape, 127, np.int8) for name, array in MODEL.items()}
    sent |= {f"{name}#step": step for name in MODEL}
    return hand.answer(sent, **{"bases": {"model": task.bundles["model"].sha256}, **changes})


def ended_at(stage: Stage) -> list[float]:
    stored = stage.store.blob_store.blob_path(stage.told(RoundCommitted)[0].state.sha256)
    return tensors.unpack_state(stored.read_bytes(), NetworkState).model["1.bias"].tolist()


def test_a_coded_update_is_decoded_when_it_comes_and_kept_as_it_will_be_folded(coded):
    a, b = coded.hand("a"), coded.hand("b")
    coded.play()
    update = by_int8(a, 1.0)
    coded.play()
    (fact,) = coded.told(UpdateAccepted)
    assert fact.update.bases == {}
    kept = coded.store.blob_store.blob_path(fact.update.bundles["model"].sha256)
    assert kept is not None
    np.testing.assert_allclose(tensors.read_tensors(kept)["1.bias"], [1, 1], rtol=1e-6)
    assert coded.store.blob_store.blob_path(update.bundles["model"].sha256) is None
    assert [ack.accepted for ack in a.acks] == [True]
    by_int8(b, 3.0)
    coded.play()
    np.testing.assert_allclose(ended_at(coded), [2, 2], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"bases": {"model": "a" * 64}},
            "bundle 'model' is relative to the blob aaaaaaaaaaaa, which this round has not sent",
        ),
        ({"bases": {}, "value": np.inf}, "'1.bias#step' holds 1 values that are not finite"),
        ({"value": -1.0}, "tensor '1.bias': part step is -0.00787402, which is not a number of at least 0"),
    ],
)
def test_a_coded_update_that_cannot_be_decoded_is_refused_with_its_reason(coded, changes, said):
    a, b = coded.hand("a"), coded.hand("b")
    coded.play()
    bad = by_int8(a, **{"value": 1.0, **changes})
    by_int8(b, 3.0)
    coded.play()
    assert said in coded.told(UpdateRejected)[0].reason
    assert coded.store.blob_store.blob_path(bad.bundles["model"].sha256) is None
    coded.play(40.0)
    assert coded.told(RoundCommitted) == [] or ended_at(coded) == pytest.approx([3, 3])


def test_a_blob_that_the_round_has_not_sent_is_no_base_of_an_update(coded):
    hand = coded.hand("a")
    coded.play()
    other = coded.store.blob_store.store_bytes(tensors.encode_tensors({name: each + 1 for name, each in MODEL.items()}))
    by_int8(hand, 1.0, bases={"model": other.sha256})
    coded.play()
    assert "which this round has not sent" in coded.told(UpdateRejected)[0].reason


def test_a_device_of_an_older_version_is_not_asked_and_the_log_says_why(coded):
    old, new = coded.hand("old", codecs=("raw",)), coded.hand("new")
    coded.play()
    by_int8(new, 2.0)
    coded.play()
    assert old.tasks == []
    np.testing.assert_allclose(ended_at(coded), [2, 2], rtol=1e-6)
    assert "[wire]" in round_outcomes.load_outcomes(coded.store, coded.job).by_round[0]["old"].text


def test_a_device_that_is_asked_again_at_the_deadline_works_on(tmp_path):
    """Its task is replaced and never emptied in between, which would end its work: a slow one would never answer."""
    stage = Stage(tmp_path, cohort={"deadline_s": 30.0, "attempts": 3})
    slow = stage.hand("slow")
    stage.play(62.0)
    assert [fact.attempt for fact in stage.told(CohortSelected)] == [0, 1, 2]
    attempts = [task.attempt if task else None for task in slow.tasks]
    assert list(dict.fromkeys(attempts)) == [0, 1, 2]
    stage.submit(slow)
    assert [fact.status for fact in stage.told(JobEnded)] == ["done"]
    assert slow.tasks[-1] is None
