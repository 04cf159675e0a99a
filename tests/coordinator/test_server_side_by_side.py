"""Several jobs at once on one fleet: what boards and jobs do side by side, with devices driven by hand."""

import pytest
from by_hand import constant_model
from side_by_side import LONG, begin_two_jobs, read_events

from fedquilt import wire
from fedquilt.coordinator.fleet.registry import OFFLINE_GRACE_S
from fedquilt.coordinator.jobs.job import RunningJob
from fedquilt.coordinator.rounds.events import CohortSelected, JobEnded, RoundCommitted, RoundRetried, UpdateAccepted
from fedquilt.coordinator.settings import CoordinatorLimits


def test_two_jobs_have_each_board_by_turns(two_jobs):
    stage, first, second, a, b = two_jobs
    stage.play()
    assert [job.id for job in stage.server.active_jobs()] == [first, second]
    assert read_events(stage, second, CohortSelected) == []
    stage.submit(a)
    assert [task.job if task else None for task in a.tasks[-2:]] == [None, second]
    assert [fact.devices for fact in read_events(stage, second, CohortSelected)] == [("a",)]
    stage.submit(b)
    assert stage.store.stored_status(first) == "done"
    assert [fact.devices for fact in read_events(stage, second, CohortSelected)] == [("a",), ("b",)]
    stage.submit(a, b)
    assert stage.store.stored_status(second) == "done"
    assert {fact.update.device for fact in read_events(stage, second, UpdateAccepted)} == {"a", "b"}


def test_a_deadline_of_a_board_that_another_job_got_meanwhile_costs_no_attempt(staged):
    stage = staged(CoordinatorLimits(running=1), cohort={"deadline_s": 300.0, "attempts": 1})
    first, a = stage.job, stage.hand("a")
    stage.play()
    a.say("presence", wire.Presence(online=False, boot="1"), retain=True)
    second = stage.add("k", cohort=LONG)
    while [job.id for job in stage.server.active_jobs()] != [second]:
        stage.play(0.5)
    a.say("presence", wire.Presence(online=True, boot="2"), retain=True)
    stage.play(5.0)
    stage.server._limits = CoordinatorLimits(running=2)
    stage.play(5.0)
    assert stage.server.find_job(first) is not None
    stage.play(350.0)
    assert {fact.attempt for fact in read_events(stage, first, RoundRetried)} == {0}
    stage.submit(a)
    stage.submit(a)
    assert [stage.store.stored_status(id) for id in (first, second)] == ["done", "done"]


@pytest.mark.parametrize("bad", ["a", "abcd"])
def test_a_job_whose_method_fails_at_a_task_fails_once_and_leaves_no_task_behind(staged, monkeypatch, bad):
    plain = RunningJob.build_task

    def task(self, device, *rest):
        if device in bad and self.job.name == "j":
            raise ValueError("no task")
        return plain(self, device, *rest)

    monkeypatch.setattr(RunningJob, "build_task", task)
    stage = staged(cohort=LONG)
    hands = stage.connect("abcd")
    second = stage.add("k", cohort=LONG)
    stage.play()
    assert [fact.status for fact in read_events(stage, stage.job, JobEnded)] == ["failed"]
    assert [hand.tasks[-1].job for hand in hands] == [second] * 4
    assert {task.job for hand in hands for task in hand.tasks if task} == {second}


def test_a_job_that_can_never_start_delays_no_other(staged):
    for places in (1, 8):
        stage = staged(CoordinatorLimits(running=places), cohort={**LONG, "min_devices": 100})
        stage.hand("a")
        stage.play(5.0)
        second = stage.add("k", cohort=LONG)
        before_s = stage.broker.now_s
        while not read_events(stage, second, CohortSelected):
            stage.play(0.05)
        assert stage.broker.now_s - before_s <= 0.65  # a poll of the store, and two steps of time


def test_a_board_that_a_method_has_nothing_for_is_another_jobs_at_once(staged, monkeypatch):
    plain = RunningJob.build_task
    nothing = ("j", "a")
    monkeypatch.setattr(
        RunningJob,
        "build_task",
        lambda job, device, *rest: None if (job.job.name, device) == nothing else plain(job, device, *rest),
    )
    stage, first, second, a, b = begin_two_jobs(staged(cohort=LONG))
    stage.play()
    assert [hand.tasks[-1].job for hand in (a, b)] == [second, first]


def test_a_restarted_coordinator_waits_for_the_boards_that_its_round_was_to_have_from_other_jobs(two_jobs):
    stage, first, second, a, b = two_jobs
    stage.submit(a)
    stage.submit(a)
    for hand in (a, b):
        hand.say("presence", b"", retain=True)  # the broker has lost what it knew
        hand.answers = False
    stage.restart()
    stage.play(60.0)
    assert read_events(stage, second, RoundCommitted) == []
    for hand in (a, b):
        hand.say("presence", wire.Presence(online=True, boot="1"), retain=True)
    stage.submit(b)
    stage.submit(b, factor=2.0)
    assert [stage.store.stored_status(id) for id in (first, second)] == ["done", "done"]
    assert {fact.update.device for fact in read_events(stage, second, UpdateAccepted)} == {"a", "b"}


def test_a_board_of_another_job_that_goes_offline_is_not_waited_for(staged):
    stage = staged(cohort=LONG)
    a, b = stage.connect("ab")
    second = stage.add("k", cohort={"deadline_s": 60.0, "attempts": 1})
    stage.submit(a)
    a.answer(constant_model())
    b.say("presence", wire.Presence(online=False, boot="1"), retain=True)
    stage.play(OFFLINE_GRACE_S - 1.0)
    assert read_events(stage, second, RoundCommitted) == []
    stage.play(2.0)
    assert read_events(stage, second, RoundRetried) == []
    assert stage.store.stored_status(second) == "done"
    assert [fact.update.device for fact in read_events(stage, second, UpdateAccepted)] == ["a"]


def test_the_blobs_of_a_task_outlive_another_jobs_round_that_sent_the_same(staged):
    settings = {"rounds": 3, "cohort": {**LONG, "size": 1}}
    stage = staged(**settings)
    hands = [stage.hand(name) for name in "ab"]
    stage.add("k", **settings)
    stage.play()
    stage.submit(*hands, factor=2.0)
    tasks = [hand.tasks[-1] for hand in hands]
    assert [task.round for task in tasks if task] == [1, 1]
    assert tasks[0].bundles == tasks[1].bundles
    stage.submit(hands[0], factor=5.0)
    assert hands[1].tasks[-1] == tasks[1]
    assert all(stage.store.blob_store.has_blob(ref) for ref in tasks[1].bundles.values())


def test_a_later_epoch_is_that_of_all_jobs(two_jobs):
    stage, first, second, a, b = two_jobs
    stage.submit(a)
    claim = wire.Claim(
        job=second, round=0, attempt=0, accepted=False, code="counted", reason="", last_counted_round=0, epoch=7
    )
    a.say("claim", claim)
    stage.play()
    assert stage.store.epoch == 8
    stage.store.acquire_lock()  # as the coordinator's process does
    assert [stage.store.current_status(stage.store.find_job(id)) for id in (first, second)] == ["running", "running"]
    assert (a.tasks[-1].job, a.tasks[-1].epoch) == (second, 8)
    stage.submit(b)
    assert stage.store.stored_status(first) == "done"
