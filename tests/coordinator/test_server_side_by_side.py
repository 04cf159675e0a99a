"""Several jobs at once on one fleet, with devices driven by hand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from by_hand import Hand, Stage, ones

from fedquilt import wire
from fedquilt.cli import main
from fedquilt.coordinator import housekeeping
from fedquilt.coordinator.facts import Answered, Asked, Committed, Ended, Reopened, Surveyed
from fedquilt.coordinator.job import Running
from fedquilt.coordinator.limits import Limits, Retention, Submitter
from fedquilt.coordinator.views import log, why
from fedquilt.core import Task

LONG = {"deadline_s": 10_000.0, "attempts": 1}


def facts(stage: Stage, id: str, kind: type) -> list[Any]:
    return [fact for _, _, fact in stage.store.facts(id) if isinstance(fact, kind)]


class Worker:
    """A hand that carries out whatever it is sent: each task takes its job's time."""

    def __init__(self, hand: Hand, seconds: dict[str, float]) -> None:
        self.hand, self._seconds = hand, seconds
        self._seen, self._due_s = 0, float("inf")

    def step(self, now_s: float) -> None:
        while self._seen < len(self.hand.tasks):
            task = self.hand.tasks[self._seen]
            self._seen += 1
            if task is None:
                self._due_s = float("inf")
            elif self._due_s == float("inf"):
                self._due_s = now_s + self._seconds.get(_name(task), 1.0)
        if now_s >= self._due_s:
            self._due_s = float("inf")
            task = next(task for task in reversed(self.hand.tasks) if task)
            self.hand.answer(ones(1.0 + task.round + len(task.job) + ord(self.hand.name[-1])))


def _name(task: Task) -> str:
    return task.job.partition("-")[0]


def work(stage: Stage, workers: list[Worker], seconds: float) -> None:
    until = stage.broker.now_s + seconds
    while stage.broker.now_s < until:
        stage.play(0.05)
        for worker in workers:
            worker.step(stage.broker.now_s)


def test_two_jobs_have_each_board_by_turns(tmp_path: Path) -> None:
    """A round of all boards asks the free ones at once and each of the others as soon as it is free."""
    stage = Stage(tmp_path, Limits(), cohort=LONG)
    first, a, b = stage.job, stage.hand("a"), stage.hand("b")
    stage.play()
    second = stage.add("k", cohort=LONG)
    stage.play()
    assert [job.id for job in stage.server.jobs()] == [first, second]
    assert facts(stage, second, Asked) == []
    a.answer(ones())
    stage.play()
    assert [task.job if task else None for task in a.tasks[-2:]] == [None, second]
    assert [fact.devices for fact in facts(stage, second, Asked)] == [("a",)]
    b.answer(ones())
    stage.play()
    assert stage.store.status(first) == "done"
    assert [fact.devices for fact in facts(stage, second, Asked)] == [("a",), ("b",)]
    a.answer(ones())
    b.answer(ones())
    stage.play()
    assert stage.store.status(second) == "done"
    assert {fact.update.device for fact in facts(stage, second, Answered)} == {"a", "b"}
    stage.store.close()


def test_a_deadline_that_passes_while_boards_are_at_another_job_costs_no_attempt(tmp_path: Path) -> None:
    """The job has one attempt, and its board is given to it after three deadlines."""
    stage = Stage(tmp_path, Limits(), cohort=LONG)
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    a.answer(ones())
    second = stage.add("k", cohort={"deadline_s": 10.0, "attempts": 1})
    stage.play()
    a.answer(ones())
    stage.play(35.0)
    assert {fact.attempt for fact in facts(stage, second, Reopened)} == {0}
    b.answer(ones())
    stage.play()
    b.answer(ones())
    stage.play()
    assert stage.store.status(second) == "done"
    stage.store.close()


def test_a_deadline_of_a_board_that_another_job_got_meanwhile_costs_no_attempt(tmp_path: Path) -> None:
    """The job gave its place away while its board was gone, and comes back when the board is at the other's task."""
    stage = Stage(tmp_path, Limits(running=1), cohort={"deadline_s": 300.0, "attempts": 1})
    first, a = stage.job, stage.hand("a")
    stage.play()
    a.say("presence", wire.Presence(online=False, boot="1"), retain=True)
    second = stage.add("k", cohort=LONG)
    while [job.id for job in stage.server.jobs()] != [second]:
        stage.play(0.5)
    a.say("presence", wire.Presence(online=True, boot="2"), retain=True)
    stage.play(5.0)
    stage.server._limits = Limits(running=2)
    stage.play(5.0)
    assert stage.server.job(first) is not None
    stage.play(350.0)
    assert {fact.attempt for fact in facts(stage, first, Reopened)} == {0}
    a.answer(ones())
    stage.play()
    a.answer(ones())
    stage.play()
    assert [stage.store.status(id) for id in (first, second)] == ["done", "done"]
    stage.store.close()


@pytest.mark.parametrize("bad", ["a", "abcd"])
def test_a_job_whose_method_fails_at_a_task_fails_once_and_leaves_no_task_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    """Its other boards are sent nothing for a job that has ended, and are another job's at once."""
    plain = Running.task

    def task(self: Running, device: str, *rest: Any) -> Task | None:
        if device in bad and self.job.name == "j":
            raise ValueError("no task")
        return plain(self, device, *rest)

    monkeypatch.setattr(Running, "task", task)
    stage = Stage(tmp_path, Limits(), cohort=LONG)
    hands = [stage.hand(name) for name in "abcd"]
    stage.play()
    second = stage.add("k", cohort=LONG)
    stage.play()
    assert [fact.status for fact in facts(stage, stage.job, Ended)] == ["failed"]
    assert [hand.tasks[-1].job for hand in hands] == [second] * 4  # type: ignore[union-attr]
    assert {task.job for hand in hands for task in hand.tasks if task} == {second}
    stage.store.close()


def test_a_job_that_can_never_start_delays_no_other(tmp_path: Path) -> None:
    """Not even where there is one place: the second has its first board within a second and two polls."""
    for places in (1, 8):
        stage = Stage(tmp_path / str(places), Limits(running=places), cohort={**LONG, "min_devices": 100})
        stage.hand("a")
        stage.play(5.0)
        second = stage.add("k", cohort=LONG)
        before_s = stage.broker.now_s
        while not facts(stage, second, Asked):
            stage.play(0.05)
        assert stage.broker.now_s - before_s <= 1.15  # a poll of the store, and two steps of time
        stage.store.close()


def test_a_job_that_cannot_start_in_time_fails_with_the_reason(tmp_path: Path) -> None:
    """Also if it gives its place to others meanwhile."""
    stage = Stage(tmp_path, Limits(running=1), cohort={**LONG, "min_devices": 3, "start_timeout_s": 20.0})
    stage.hand("a")
    other = stage.add("k", cohort={**LONG, "min_devices": 4})
    stage.play(18.0)
    assert stage.told(Ended) == []
    stage.play(6.0)
    (ended,) = stage.told(Ended)
    assert ended.status == "failed"
    assert "within 20 s ([cohort] start_timeout_s): 1 device could be asked, 3 needed" in ended.reason
    assert stage.store.status(other) in ("queued", "running")
    stage.store.close()


def test_a_board_that_a_method_has_nothing_for_is_another_jobs_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the round that it was asked in goes on."""
    plain = Running.task
    nothing = ("j", "a")
    monkeypatch.setattr(
        Running,
        "task",
        lambda job, device, *rest: None if (job.job.name, device) == nothing else plain(job, device, *rest),
    )
    stage = Stage(tmp_path, Limits(), cohort=LONG)
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    second = stage.add("k", cohort=LONG)
    stage.play()
    assert [hand.tasks[-1].job for hand in (a, b)] == [second, stage.job]  # type: ignore[union-attr]
    stage.store.close()


def test_the_task_of_a_board_that_stayed_silent_is_withdrawn_with_its_job(tmp_path: Path) -> None:
    """Though no attempt of the round asks it any more."""
    stage = Stage(tmp_path, Limits(), cohort={"deadline_s": 10.0, "attempts": 3})
    a = stage.hand("a")
    stage.play()
    a.say("presence", wire.Presence(online=False, boot="1"), retain=True)
    stage.play(35.0)
    assert facts(stage, stage.job, Reopened)
    assert stage.server.jobs()[0].rounds.silent == ("a",)
    assert a.tasks[-1] is not None
    stage.store.set_status(stage.job, "stopping")
    stage.play()
    assert a.tasks[-1] is None
    stage.store.close()


def test_one_job_is_stopped_while_the_other_runs(tmp_path: Path) -> None:
    """Its boards are the other's at once; resumed, it asks those of its cohort as they are free."""
    stage = Stage(tmp_path, Limits(), cohort=LONG)
    first, a, b = stage.job, stage.hand("a"), stage.hand("b")
    stage.play()
    second = stage.add("k", cohort=LONG)
    stage.play()
    stage.store.set_status(first, "stopping")
    stage.play()
    assert stage.store.status(first) == "stopped"
    assert [hand.tasks[-1].job for hand in (a, b)] == [second, second]  # type: ignore[union-attr]
    stage.store.set_status(first, "running")
    stage.play()
    assert [hand.tasks[-1].job for hand in (a, b)] == [second, second]  # type: ignore[union-attr]
    a.answer(ones())
    stage.play()
    assert [hand.tasks[-1].job for hand in (a, b)] == [first, second]  # type: ignore[union-attr]
    b.answer(ones())
    stage.play()
    a.answer(ones())
    b.answer(ones())
    stage.play()
    assert [stage.store.status(id) for id in (first, second)] == ["done", "done"]
    stage.store.close()


def test_a_coordinator_that_dies_with_two_jobs_goes_on_with_both(tmp_path: Path) -> None:
    """Each board is still the one's that has asked it, and nothing is worked for twice."""
    stage = Stage(tmp_path, Limits(), cohort=LONG)
    first, a, b = stage.job, stage.hand("a"), stage.hand("b")
    stage.play()
    second = stage.add("k", cohort=LONG)
    a.answer(ones())
    stage.play()
    stage.restart()
    stage.play()
    assert [hand.tasks[-1].job for hand in (a, b)] == [second, first]  # type: ignore[union-attr]
    assert len(facts(stage, second, Asked)) == len(facts(stage, first, Asked)) == 1
    a.answer(ones())
    b.answer(ones())
    stage.play()
    b.answer(ones())
    stage.play()
    assert [stage.store.status(id) for id in (first, second)] == ["done", "done"]
    stage.store.close()


def test_a_restarted_coordinator_waits_for_the_boards_that_its_round_was_to_have_from_other_jobs(
    tmp_path: Path,
) -> None:
    """It hears of none at first; the round of all boards goes on with those that the log knows to be due."""
    stage = Stage(tmp_path, Limits(), cohort=LONG)
    first, a, b = stage.job, stage.hand("a"), stage.hand("b")
    stage.play()
    second = stage.add("k", cohort=LONG)
    a.answer(ones())
    stage.play()
    a.answer(ones())
    stage.play()
    for hand in (a, b):
        hand.say("presence", wire.Presence(online=False, boot="1"), retain=True)
    stage.restart()
    stage.play(25.0)  # longer than a grace
    assert facts(stage, second, Committed) == []
    for hand in (a, b):
        hand.say("presence", wire.Presence(online=True, boot="1"), retain=True)
    b.answer(ones())
    stage.play()
    b.answer(ones(2.0))
    stage.play()
    assert [stage.store.status(id) for id in (first, second)] == ["done", "done"]
    assert {fact.update.device for fact in facts(stage, second, Answered)} == {"a", "b"}
    stage.store.close()


def test_a_board_of_another_job_that_is_gone_for_good_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    """It was never asked for this round, so that it costs no attempt: the one attempt suffices for the others."""
    stage = Stage(tmp_path, Limits(), cohort=LONG)
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    second = stage.add("k", cohort={"deadline_s": 60.0, "attempts": 1})
    a.answer(ones())
    stage.play()
    a.answer(ones())
    b.say("presence", wire.Presence(online=False, boot="1"), retain=True)
    stage.play(50.0)
    assert facts(stage, second, Committed) == []
    stage.play(15.0)
    assert [fact.attempt for fact in facts(stage, second, Reopened)] == [0]
    assert stage.store.status(second) == "done"
    assert [fact.update.device for fact in facts(stage, second, Answered)] == ["a"]
    stage.store.close()


def test_an_old_message_about_one_job_takes_nothing_from_another(tmp_path: Path) -> None:
    """A claim or an update of a job that has closed its round, from a board that another has."""
    stage = Stage(tmp_path, Limits(), cohort=LONG)
    first, a, b = stage.job, stage.hand("a"), stage.hand("b")
    stage.play()
    second = stage.add("k", cohort=LONG)
    a.answer(ones())
    stage.play()
    task = a.tasks[-1]
    assert task is not None
    assert task.job == second
    a.say("claim", wire.Claim(job=first, round=0, attempt=0, accepted=True))
    a.say("claim", wire.Claim(job="of-old", round=0, attempt=0, accepted=True))
    a.answer(ones(), job="of-old")
    stage.play()
    assert a.tasks[-1] == task
    b.answer(ones())
    stage.play()
    assert stage.store.status(first) == "done"
    stage.store.close()


def test_blobs_that_two_jobs_have_in_common_outlive_the_first(tmp_path: Path) -> None:
    """Both begin with the same bundle, and send the same bytes."""
    stage = Stage(tmp_path, Limits(), cohort=LONG)
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    second = stage.add("k", cohort=LONG)
    a.answer(ones())
    b.answer(ones())
    stage.play()
    for hand in (a, b):
        task = hand.tasks[-1]
        assert task is not None
        assert task.job == second
        assert all(stage.store.depot.has(ref) for ref in task.bundles.values())
    stage.store.close()


def test_the_blobs_of_a_task_outlive_another_jobs_round_that_sent_the_same(tmp_path: Path) -> None:
    """Two jobs have come to the same state; one commits the next round while the other's board is at work on it."""
    settings: dict[str, Any] = {"rounds": 3, "cohort": {**LONG, "size": 1}}
    stage = Stage(tmp_path, Limits(), **settings)
    hands = [stage.hand(name) for name in "ab"]
    stage.add("k", **settings)
    stage.play()
    for hand in hands:
        hand.answer(ones(2.0))
    stage.play()
    tasks = [hand.tasks[-1] for hand in hands]
    assert [task.round for task in tasks if task] == [1, 1]
    assert tasks[0].bundles == tasks[1].bundles  # type: ignore[union-attr]
    hands[0].answer(ones(5.0))
    stage.play()
    assert hands[1].tasks[-1] == tasks[1]
    assert all(stage.store.depot.has(ref) for ref in tasks[1].bundles.values())  # type: ignore[union-attr]
    stage.store.close()


@pytest.mark.parametrize(("priority", "share"), [(1.0, 0.5), (3.0, 0.75)])
def test_two_jobs_share_the_boards_time_fairly(tmp_path: Path, priority: float, share: float) -> None:
    """Within 10 %, also where the tasks of one take five times as long, and by their priorities."""
    stage = Stage(tmp_path, Limits(), rounds=10_000, cohort=LONG, priority=priority)
    second = stage.add("k", rounds=10_000, cohort=LONG)
    work(stage, [Worker(stage.hand(name), {"j": 1.0, "k": 5.0}) for name in "abcd"], 400.0)
    had = [sum(fact.took_s for fact in facts(stage, id, Answered)) for id in (stage.job, second)]
    assert sum(had) > 0.9 * 4 * 400.0  # the boards are not left idle
    assert had[0] / sum(had) == pytest.approx(share, rel=0.1)
    stage.store.close()


@pytest.mark.parametrize("waits", [False, True])
def test_a_job_that_comes_later_starts_level_with_the_others(tmp_path: Path, waits: bool) -> None:
    """It has its part of the boards' time from its beginning, not all of it until it has had as much."""
    stage = Stage(tmp_path, Limits(), rounds=10_000, cohort=LONG)
    settings: dict[str, Any] = {"rounds": 10_000, "priority": 3.0, "cohort": {**LONG, "min_devices": 3}}
    second = stage.add("k", **settings) if waits else ""
    workers = [Worker(stage.hand(name), {}) for name in "ab"]
    work(stage, workers, 60.0)
    workers.append(Worker(stage.hand("c"), {}))
    second, before = second or stage.add("k", **settings), len(facts(stage, stage.job, Answered))
    work(stage, workers, 40.0)
    answers = len(facts(stage, stage.job, Answered)) - before, len(facts(stage, second, Answered))
    assert answers[0] / sum(answers) == pytest.approx(0.25, abs=0.1)
    stage.store.close()


def test_a_cohort_of_some_boards_is_drawn_from_the_free_ones_and_the_log_says_why(tmp_path: Path) -> None:
    """A board that is at another job's task is noted as busy when the others are asked, and not before."""
    stage = Stage(tmp_path, Limits(), cohort={**LONG, "size": 1})
    for name in "abc":
        stage.hand(name)
    stage.play()
    (had,) = stage.told(Asked)[0].devices
    second = stage.add("k", cohort={**LONG, "size": 2})
    stage.play()
    (asked,) = facts(stage, second, Asked)
    assert set(asked.devices) == set("abc") - {had}
    (noted,) = facts(stage, second, Surveyed)
    assert noted.passed == {"busy": (had,)}
    assert why.of(stage.store, second)[0][had].code == "busy"
    stage.store.close()


def test_a_job_that_waits_for_boards_of_others_writes_nothing_meanwhile(tmp_path: Path) -> None:
    """However often they come and go."""
    stage = Stage(tmp_path, Limits(), rounds=1000, cohort=LONG)
    workers = [Worker(stage.hand(name), {}) for name in "ab"]
    waits = stage.add("k", cohort={**LONG, "min_devices": 3})
    work(stage, workers, 50.0)
    assert len(facts(stage, stage.job, Committed)) > 10
    assert len(list(stage.store.facts(waits))) <= 3
    stage.store.close()


def test_a_submitters_jobs_have_no_more_boards_than_its_share(tmp_path: Path) -> None:
    """Half of four; and the round is whole all the same."""
    stage = Stage(tmp_path, Limits(submitter=Submitter(share=0.5)), cohort=LONG)
    hands = [stage.hand(name) for name in "abcd"]
    stage.play()
    at_work = [hand for hand in hands if hand.tasks and hand.tasks[-1]]
    assert len(at_work) == 2
    codes = {name: part.code for name, part in why.of(stage.store, stage.job)[0].items()}
    assert codes == {hand.name: "asked" if hand in at_work else "share" for hand in hands}
    at_work[0].answer(ones())
    stage.play()
    assert len([hand for hand in hands if hand.tasks and hand.tasks[-1]]) == 2
    workers = [Worker(hand, {}) for hand in hands]
    work(stage, workers, 10.0)
    assert stage.store.status(stage.job) == "done"
    assert len(stage.told(Answered)) == 4
    stage.store.close()


def test_why_says_that_a_job_waits_for_its_submitters_share(tmp_path: Path) -> None:
    """Once, though its wait is long; a cohort that the share does not limit has devices that were not drawn."""
    stage = Stage(tmp_path, Limits(submitter=Submitter(share=0.5)), cohort={**LONG, "size": 2})
    hands = [stage.hand(name) for name in "abcd"]
    stage.play()
    second = stage.add("k", cohort={**LONG, "size": 1})
    stage.play(30.0)
    codes = [part.code for part in why.of(stage.store, stage.job)[0].values()]
    assert sorted(codes) == ["asked", "asked", "drawn", "drawn"]
    assert "share" in {part.code for part in why.of(stage.store, second)[0].values()}
    assert len(facts(stage, second, Surveyed)) == 1
    work(stage, [Worker(hand, {}) for hand in hands], 10.0)
    assert [stage.store.status(id) for id in (stage.job, second)] == ["done", "done"]
    assert "share" not in {part.code for part in why.of(stage.store, second)[0].values()}
    stage.store.close()


def test_ls_says_what_a_job_waits_for_and_what_each_alone_takes_on_the_disk(tmp_path: Path) -> None:
    """Boards at another job's task are counted as such; blobs that two runs need are nobody's alone."""
    stage = Stage(tmp_path, Limits(), cohort=LONG)
    first, a, b = stage.job, stage.hand("a"), stage.hand("b")
    stage.play()
    second = stage.add("k", cohort=LONG)
    third = stage.add("l", cohort={**LONG, "min_devices": 3})
    stage.play()
    own = housekeeping.own(stage.store)
    assert {log.summary(row, stage.store, own)["waits"] for row in stage.store.jobs()} == {None}  # nobody serves them
    stage.store.lock()  # as the coordinator's process does
    rows = {row.id: log.summary(row, stage.store, own) for row in stage.store.jobs()}
    assert rows[first]["waits"] is None
    said = "devices that run torch or numpy: 2 online, 2 of them at other jobs' tasks, at least "
    assert [rows[id]["waits"] for id in (second, third)] == [f"{said}1 needed", f"{said}3 needed"]
    assert log.lines(list(rows.values()))[3:] == [f"{id} waits for {rows[id]['waits']}" for id in (second, third)]
    (state,) = stage.store.states()
    ref = stage.store.depot.ref(state)
    assert ref is not None
    assert all(own[id] > 0 for id in (first, second, third))
    a.answer(ones())
    stage.play()
    grown = housekeeping.own(stage.store)[first] - own[first]
    assert grown > next(iter(stage.told(Answered)[0].update.bundles.values())).size  # and the fact
    assert b.tasks[-1] is not None
    stage.store.close()


def test_ended_runs_are_deleted_as_the_settings_say_while_others_run(tmp_path: Path) -> None:
    """The latest is kept, and what a running job needs stays."""
    ended = []
    stage = Stage(tmp_path, Limits(retention=Retention(keep=1)), cohort=LONG)
    a, second = stage.hand("a"), stage.job
    for name in ("k", "l", "m"):
        stage.play()
        a.answer(ones(float(ord(name))))
        stage.play()
        assert stage.store.status(second) == "done"
        ended.append(second)
        second = stage.add(name, cohort=LONG)
    stage.play()
    assert [row.id for row in stage.store.jobs()] == [*ended, second]  # deleted at its leisure
    stage.server._tidy_s = 0.0
    stage.play()
    assert [row.id for row in stage.store.jobs()] == [ended[-1], second]
    a.answer(ones())
    stage.play()
    assert stage.store.status(second) == "done"
    stage.store.close()


def test_a_run_that_took_long_is_not_deleted_as_soon_as_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its age counts from its end."""
    stage = Stage(tmp_path, Limits(retention=Retention(older_than="1h")), cohort=LONG)
    now, a = time.time(), stage.hand("a")
    for later_s, left in ((7200.0, [stage.job]), (10_000.0, [stage.job]), (11_000.0, [])):
        monkeypatch.setattr(time, "time", lambda later_s=later_s: now + later_s)
        stage.play()
        if later_s == 7200.0:
            a.answer(ones())
            stage.play()
            assert stage.store.status(stage.job) == "done"
        stage.server._tidy_s = 0.0
        stage.play()
        assert [row.id for row in stage.store.jobs()] == left
    stage.store.close()


def test_a_later_epoch_is_that_of_all_jobs(tmp_path: Path) -> None:
    """A board knows a later start of the coordinator: both jobs go on as of the new one."""
    stage = Stage(tmp_path, Limits(), cohort=LONG)
    first, a, b = stage.job, stage.hand("a"), stage.hand("b")
    stage.play()
    second = stage.add("k", cohort=LONG)
    a.answer(ones())
    stage.play()
    claim = wire.Claim(job=second, round=0, attempt=0, accepted=False, code="counted", reason="", counted=0, epoch=7)
    a.say("claim", claim)
    stage.play()
    assert stage.store.epoch == 8
    stage.store.lock()  # as the coordinator's process does
    assert [stage.store.standing(stage.store.job(id)) for id in (first, second)] == ["running", "running"]
    assert a.tasks[-1] is not None
    assert (a.tasks[-1].job, a.tasks[-1].epoch) == (second, 8)
    b.answer(ones())
    stage.play()
    assert stage.store.status(first) == "done"
    stage.store.close()


def test_why_ends_with_what_the_job_waits_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also before its first round, of which the log says nothing yet."""
    stage = Stage(tmp_path, Limits(), cohort={**LONG, "min_devices": 3})
    stage.hand("a")
    stage.play()
    assert main(["why", stage.job, "--home", str(stage.store.home)]) == 0
    assert "waits for" not in capsys.readouterr().out  # nobody serves it
    stage.store.lock()  # as the coordinator's process does
    assert main(["why", stage.job, "--home", str(stage.store.home)]) == 0
    said = f"{stage.job} waits for devices that run torch or numpy: 1 online, at least 3 needed"
    assert capsys.readouterr().out.splitlines()[-1] == said
    stage.store.close()
