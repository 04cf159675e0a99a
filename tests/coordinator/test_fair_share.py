"""How jobs share the coordinator and the boards."""

import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from by_hand import constant_model
from side_by_side import LONG, Worker, read_events, work

from fedquilt.coordinator import settings
from fedquilt.coordinator.fleet.fair_share import (
    IDLE_LIMIT_BEFORE_START_S,
    IDLE_LIMIT_S,
    IdleTime,
    JobUsage,
    devices_to_yield,
    is_schedulable,
    minimum_device_time,
    select_jobs,
)
from fedquilt.coordinator.jobs import retention
from fedquilt.coordinator.rounds.events import CohortSelected, EligibilityRecorded, RoundCommitted, UpdateAccepted
from fedquilt.coordinator.settings import CoordinatorLimits, RetentionSettings, SubmitterLimits
from fedquilt.coordinator.storage.store import StoredJob
from fedquilt.coordinator.views import event_messages, round_outcomes

JOB = settings.parse_job({"name": "j", "method": "fedavg"})
ONE = CoordinatorLimits(running=1)


def rows(*statuses: str, submitters: str = "uuuuuu") -> list[StoredJob]:
    """Jobs named a, b, c, ... in the order in which they were queued."""
    each = zip("abcdef", statuses, submitters, strict=False)
    return [StoredJob(name, JOB, Path(), status, 0.0, submitter=who) for name, status, who in each]


def waits(**idle_s: float) -> Mapping[str, IdleTime]:
    """Served jobs whose rounds have begun."""
    return {job: IdleTime(seconds) for job, seconds in idle_s.items()}


@pytest.mark.parametrize(
    ("statuses", "wanted"),
    [
        (("queued", "queued"), ["a"]),
        (("queued", "running"), ["b"]),  # interrupted before it was done
        (("done", "stopped", "queued"), ["c"]),
        (("done", "failed"), []),
    ],
)
def test_the_first_that_waits_is_served_and_before_it_one_that_was_interrupted(statuses, wanted):
    assert select_jobs(rows(*statuses), {}, {}, ONE) == wanted


def test_all_are_served_while_there_are_places():
    assert select_jobs(rows("running", "queued", "queued"), waits(a=10 * IDLE_LIMIT_S), {}) == ["b", "c", "a"]


def test_a_job_gives_way_once_nobody_has_been_at_it_for_a_while():
    assert select_jobs(rows("running", "queued"), waits(a=IDLE_LIMIT_S - 1), {}, ONE) == ["a"]
    assert select_jobs(rows("running", "queued"), waits(a=IDLE_LIMIT_S), {}, ONE) == ["b"]
    assert select_jobs(rows("running", "done"), waits(a=10 * IDLE_LIMIT_S), {}, ONE) == ["a"]


def test_a_job_whose_round_has_not_begun_gives_way_at_once():
    assert IDLE_LIMIT_BEFORE_START_S <= 1.0
    assert select_jobs(
        rows("running", "queued"), {"a": IdleTime(IDLE_LIMIT_BEFORE_START_S, has_started=False)}, {}, ONE
    ) == ["b"]


def test_jobs_that_all_wait_take_turns():
    gave_way = {}
    seen, now = [], "a"
    for turn in range(7):
        seen.append(now)
        (following,) = select_jobs(rows("queued", "queued", "queued"), waits(**{now: IDLE_LIMIT_S}), gave_way, ONE)
        gave_way[now] = float(turn)
        now = following
    assert "".join(seen) == "abcabca"


def test_one_submitter_has_no_more_places_than_the_quota():
    waiting = rows("queued", "queued", "queued", "queued", submitters="aaab")
    assert select_jobs(waiting, {}, {}, CoordinatorLimits(running=3, submitter=SubmitterLimits(running=2))) == [
        "a",
        "b",
        "d",
    ]


def test_runs_of_simulated_fleets_are_left_to_who_brings_their_boards():
    own, simulated = StoredJob("a", JOB, Path(), "running", 0.0), StoredJob("b", JOB, Path(), "running", 0.0, "fleet")
    assert [is_schedulable(row, None) for row in (own, simulated)] == [True, False]
    assert [is_schedulable(row, "b") for row in (own, simulated)] == [False, True]
    assert not is_schedulable(StoredJob("c", JOB, Path(), "running", 0.0, "simulation"), None)


def test_a_job_that_is_ahead_by_more_than_a_round_leaves_the_others_boards_alone():
    ahead = JobUsage(device_time_s=300.0, round_time_s=100.0, cohort={"x"}, is_working=True)
    behind = JobUsage(device_time_s=150.0, round_time_s=1.0, cohort={"y", "z"}, is_working=True)
    assert devices_to_yield("a", {"a": ahead, "b": behind}) == {"y", "z"}
    assert devices_to_yield("b", {"a": ahead, "b": behind}) == set()
    assert devices_to_yield("a", {"a": ahead, "b": behind._replace(is_working=False)}) == set()
    assert devices_to_yield("a", {"a": ahead, "b": behind._replace(device_time_s=200.0)}) == set()


def test_who_was_not_there_starts_level_with_the_one_that_has_had_least():
    jobs = [JobUsage(had_s, 0.0, set(), working) for had_s, working in ((5.0, False), (30.0, True), (20.0, True))]
    assert minimum_device_time(dict(zip("abc", jobs, strict=True))) == 20.0
    assert minimum_device_time({}) == 0.0


def test_two_jobs_share_the_boards_time_by_their_priority(staged):
    stage = staged(rounds=10_000, cohort=LONG, priority=3.0)
    second = stage.add("k", rounds=10_000, cohort=LONG)
    work(stage, [Worker(stage.hand(name), {"j": 1.0, "k": 5.0}) for name in "abcd"], 150.0)
    had = [sum(fact.took_s for fact in read_events(stage, id, UpdateAccepted)) for id in (stage.job, second)]
    assert sum(had) > 0.9 * 4 * 150.0  # the boards are not left idle
    assert had[0] / sum(had) == pytest.approx(0.75, rel=0.1)


def test_a_cohort_of_some_boards_is_drawn_from_the_free_ones_and_the_log_says_why(staged):
    stage = staged(cohort={**LONG, "size": 1})
    stage.connect("abc")
    (had,) = stage.told(CohortSelected)[0].devices
    second = stage.add("k", cohort={**LONG, "size": 2})
    stage.play()
    (asked,) = read_events(stage, second, CohortSelected)
    assert set(asked.devices) == set("abc") - {had}
    (noted,) = read_events(stage, second, EligibilityRecorded)
    assert noted.ineligible == {"busy": (had,)}
    assert round_outcomes.load_outcomes(stage.store, second).by_round[0][had].code == "busy"


def test_a_job_that_waits_for_boards_of_others_writes_nothing_meanwhile(staged):
    stage = staged(rounds=1000, cohort=LONG)
    workers = [Worker(stage.hand(name), {}) for name in "ab"]
    waits = stage.add("k", cohort={**LONG, "min_devices": 3})
    work(stage, workers, 50.0)
    assert len(read_events(stage, stage.job, RoundCommitted)) > 10
    assert len(list(stage.store.read_events(waits))) <= 3


def test_a_submitters_jobs_have_no_more_boards_than_its_share(staged):
    stage = staged(CoordinatorLimits(submitter=SubmitterLimits(share=0.5)), cohort=LONG)
    hands = stage.connect("abcd")
    at_work = [hand for hand in hands if hand.tasks and hand.tasks[-1]]
    assert len(at_work) == 2
    codes = {name: part.code for name, part in round_outcomes.load_outcomes(stage.store, stage.job).by_round[0].items()}
    assert codes == {hand.name: "asked" if hand in at_work else "share" for hand in hands}
    stage.submit(at_work[0])
    assert len([hand for hand in hands if hand.tasks and hand.tasks[-1]]) == 2
    workers = [Worker(hand, {}) for hand in hands]
    work(stage, workers, 10.0)
    assert stage.store.stored_status(stage.job) == "done"
    assert len(stage.told(UpdateAccepted)) == 4


def test_why_says_that_a_job_waits_for_its_submitters_share(staged):
    stage = staged(CoordinatorLimits(submitter=SubmitterLimits(share=0.5)), cohort={**LONG, "size": 2})
    hands = stage.connect("abcd")
    second = stage.add("k", cohort={**LONG, "size": 1})
    stage.play(30.0)
    codes = [part.code for part in round_outcomes.load_outcomes(stage.store, stage.job).by_round[0].values()]
    assert sorted(codes) == ["asked", "asked", "drawn", "drawn"]
    assert "share" in {part.code for part in round_outcomes.load_outcomes(stage.store, second).by_round[0].values()}
    assert len(read_events(stage, second, EligibilityRecorded)) == 1
    work(stage, [Worker(hand, {}) for hand in hands], 10.0)
    assert [stage.store.stored_status(id) for id in (stage.job, second)] == ["done", "done"]
    assert "share" not in {part.code for part in round_outcomes.load_outcomes(stage.store, second).by_round[0].values()}


def test_ls_says_what_a_job_waits_for_and_what_each_alone_takes_on_the_disk(two_jobs):
    stage, first, second, a, b = two_jobs
    third = stage.add("l", cohort={**LONG, "min_devices": 3})
    stage.play()
    own = retention.exclusive_bytes(stage.store)
    assert {event_messages.summarise_run(row, stage.store, own)["waits"] for row in stage.store.readable_jobs()} == {
        None
    }  # nobody serves them
    stage.store.acquire_lock()  # as the coordinator's process does
    rows = {row.id: event_messages.summarise_run(row, stage.store, own) for row in stage.store.readable_jobs()}
    assert rows[first]["waits"] is None
    said = "devices that run torch or numpy: 2 online, 2 of them working for other jobs, at least "
    assert [rows[id]["waits"] for id in (second, third)] == [f"{said}1 needed", f"{said}3 needed"]
    assert event_messages.format_runs(list(rows.values()))[4:] == [
        f"{id} waits for {rows[id]['waits']}" for id in (second, third)
    ]
    (state,) = stage.store.latest_state_hashes()
    ref = stage.store.blob_store.find_ref(state)
    assert ref is not None
    assert all(own[id] > 0 for id in (first, second, third))
    stage.submit(a)
    grown = retention.exclusive_bytes(stage.store)[first] - own[first]
    assert grown > next(iter(stage.told(UpdateAccepted)[0].update.bundles.values())).size  # and the fact
    assert b.tasks[-1] is not None


def test_ended_runs_are_deleted_as_the_settings_say_while_others_run(staged):
    ended = []
    stage = staged(CoordinatorLimits(retention=RetentionSettings(keep=1)), cohort=LONG)
    a, second = stage.hand("a"), stage.job
    for name in ("k", "l", "m"):
        stage.play()
        a.answer(constant_model(float(ord(name))))
        stage.play()
        assert stage.store.stored_status(second) == "done"
        ended.append(second)
        second = stage.add(name, cohort=LONG)
    stage.play()
    assert [row.id for row in stage.store.readable_jobs()] == [*ended, second]  # deleted at its leisure
    stage.server._next_retention_s = 0.0
    stage.play()
    assert [row.id for row in stage.store.readable_jobs()] == [ended[-1], second]
    stage.submit(a)
    assert stage.store.stored_status(second) == "done"


def test_a_run_that_took_long_is_not_deleted_as_soon_as_it_has_ended(staged, monkeypatch):
    stage = staged(CoordinatorLimits(retention=RetentionSettings(older_than="1h")), cohort=LONG)
    now, a = time.time(), stage.hand("a")
    for later_s, left in ((7200.0, [stage.job]), (10_000.0, [stage.job]), (11_000.0, [])):
        monkeypatch.setattr(time, "time", lambda later_s=later_s: now + later_s)
        stage.play()
        if later_s == 7200.0:
            stage.submit(a)
            assert stage.store.stored_status(stage.job) == "done"
        stage.server._next_retention_s = 0.0
        stage.play()
        assert [row.id for row in stage.store.readable_jobs()] == left
