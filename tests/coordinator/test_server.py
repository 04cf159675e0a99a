"""Rounds of the coordinator with devices driven by hand, over a MemoryBroker: counting, order, tasks."""

import contextlib
import itertools
from dataclasses import replace

import numpy as np
from by_hand import Stage, ones

from fedquilt import wire
from fedquilt.arrays import tensors
from fedquilt.coordinator.jobs.job import RunningJob
from fedquilt.coordinator.rounds.events import CohortSelected, JobEnded, RoundCommitted, TaskDeclined, UpdateAccepted
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views import round_outcomes
from fedquilt.core import Profile, TaskSpec
from fedquilt.models.local_training import NetworkState


def test_updates_are_averaged_and_the_job_ends(stage):
    """Two devices, weights 1 and 3: (1 + 3 * 5) / 4 = 4."""
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    a.answer(ones(1.0), weight=1.0)
    b.answer(ones(5.0), weight=3.0)
    stage.play()
    assert [fact.status for fact in stage.told(JobEnded)] == ["done"]
    assert stage.server.finished
    state = stage.told(RoundCommitted)[0].state
    stored = stage.store.depot.blob_path(state.sha256)
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
    hand = stage.hand("a")
    stage.play()
    for _ in range(2):
        hand.answer(ones())
        stage.play()  # past the commit, which ends it early
        stage.play()
    assert [fact.round for fact in stage.told(RoundCommitted)] == [0, 1]
    assert [fact.status for fact in stage.told(JobEnded)] == ["done"]


def test_a_step_that_commits_a_round_wants_the_next_step_at_once(tmp_path):
    stage = Stage(tmp_path, rounds=2)
    hand = stage.hand("a")
    stage.play()
    hand.answer(ones())
    stage.play()
    commits = [(now, due) for (*_, before), (now, due, after) in itertools.pairwise(stage.dues) if after > before]
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
    hand = stage.hand("a")
    stage.play()
    hand.answer(ones())
    stage.play()
    assert told == ["tended", "computes", "back"]


def test_updates_are_folded_in_the_order_of_devices_not_of_arrival(stage):
    """1e19 - 1e19 + 1 is 1, but 1e19 + 1 - 1e19 is 0 in float64: the mean of a, b, c is a third, as c came before b."""
    hands = {name: stage.hand(name) for name in "abc"}
    stage.play()
    for name, value in (("a", 1e19), ("c", 1.0), ("b", -1e19)):
        hands[name].answer(ones(value))
        stage.play()
    assert [fact.update.device for fact in stage.told(UpdateAccepted)] == ["a", "c", "b"]
    stored = stage.store.depot.blob_path(stage.told(RoundCommitted)[0].state.sha256)
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

    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    monkeypatch.setattr(stage.executor, "send_ack", answered)
    a.answer(ones())
    b.answer(ones())
    stage.play()
    assert written == [{"a", "b"}] * 2


def test_an_update_said_twice_is_counted_once_and_acknowledged_twice(stage):
    """The agent may have missed the first acknowledgement."""
    a, _ = stage.hand("a"), stage.hand("b")
    stage.play()
    update = a.answer(ones())
    stage.play()
    a.say("update", update)
    stage.play()
    assert len(stage.told(UpdateAccepted)) == 1
    assert [ack.accepted for ack in a.acks] == [True, True]


def test_a_board_that_declines_for_memory_is_not_asked_in_the_rounds_after(tmp_path):
    """Also after a restart; the log says why, and with a larger budget it is asked again."""
    stage = Stage(tmp_path, rounds=4)
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    a.say("claim", wire.Claim(job=stage.job, round=0, attempt=0, accepted=False, code="memory", reason="too big"))
    b.answer(ones())
    stage.play()
    stage.restart()
    stage.play()
    b.answer(ones())
    stage.play()
    assert [fact.devices for fact in stage.told(CohortSelected)] == [("a", "b"), ("b",), ("b",)]
    assert round_outcomes.load_outcomes(stage.store, stage.job).found[1]["a"].code == "memory"
    profile = Profile(
        device="a", board="hand", memory_bytes=1 << 30, budget_bytes=1 << 30, engines=("numpy",), versions={}
    )
    a.say("profile", profile, retain=True)
    stage.play()
    assert [fact.devices for fact in stage.told(CohortSelected)[3:]] == [("a",)]


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
    assert len(job._encoded) <= 4
    encoded = []
    monkeypatch.setattr(tensors, "encode_tensors", lambda value, metadata: encoded.append(value) or b"")
    job.build_task("1", "numpy", None, 0.0)
    assert not any(value is job.state.model for value in encoded)  # what all get is encoded once


def test_an_unclaimed_task_is_sent_again_ever_more_rarely(stage):
    a = stage.hand("a")
    stage.play(20.0)
    assert len(a.tasks) == 3
    assert len({task and task.params["lr"] for task in a.tasks}) == 1


def test_a_job_that_nobody_can_do_fails_at_its_deadline(stage):
    stage.hand("a")
    stage.play(40.0)
    assert "silent: a" in stage.told(JobEnded)[0].reason
    assert stage.store.stored_status(stage.job) == "failed"


def test_an_attempt_that_is_over_takes_its_tasks_back(tmp_path):
    stage = Stage(tmp_path, cohort={"deadline_s": 30.0, "attempts": 2, "min_devices": 1})
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    a.say("presence", wire.Presence(online=False, boot="1"), retain=True)
    stage.play(32.0)
    assert [(fact.attempt, fact.devices) for fact in stage.told(CohortSelected)] == [(0, ("a", "b")), (1, ("b",))]
    assert a.tasks[-1] is None
    task = b.tasks[-1]
    assert task.attempt == 1


def test_a_device_that_is_asked_again_at_the_deadline_works_on(tmp_path):
    """Its task is replaced and never emptied in between, which would end its work: a slow one would never answer."""
    stage = Stage(tmp_path, cohort={"deadline_s": 30.0, "attempts": 3})
    slow = stage.hand("slow")
    stage.play(62.0)
    assert [fact.attempt for fact in stage.told(CohortSelected)] == [0, 1, 2]
    attempts = [task.attempt if task else None for task in slow.tasks]
    assert list(dict.fromkeys(attempts)) == [0, 1, 2]
    slow.answer(ones())
    stage.play()
    assert [fact.status for fact in stage.told(JobEnded)] == ["done"]
    assert slow.tasks[-1] is None


def test_an_attempt_that_nobody_was_asked_in_leaves_no_task_when_its_job_ends(tmp_path):
    stage = Stage(tmp_path, cohort={"deadline_s": 30.0, "attempts": 2})
    gone = stage.hand("gone")
    stage.play()
    gone.say("presence", wire.Presence(online=False, boot="1"), retain=True)
    stage.play(35.0)
    stage.store.set_status(stage.job, "stopping")
    stage.play()
    assert gone.tasks[-1] is None


def test_a_stale_task_that_the_broker_kept_is_taken_back_when_it_is_claimed(stage):
    a, _ = stage.hand("a"), stage.hand("b")
    stage.play()
    a.answer(ones())
    stage.play()
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
    for hand in hands:
        hand.answer(ones())
    stage.play()
    assert len(stage.told(UpdateAccepted)) == 3
    assert looked == [1]


def test_a_task_that_somebody_emptied_at_the_broker_is_sent_again_at_once(stage):
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    a.say("claim", wire.Claim(job=a.tasks[-1].job, round=0, attempt=0, accepted=False, code="cleared"))
    sent = len(a.tasks)
    stage.play(0.5)
    assert [task is not None for task in a.tasks[sent:]] == [True]
    assert stage.told(TaskDeclined) == []
    for hand in (a, b):
        hand.answer(ones())
    stage.play()
    assert [fact.status for fact in stage.told(JobEnded)] == ["done"]
