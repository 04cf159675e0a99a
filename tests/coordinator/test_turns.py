"""Which jobs are served when, and how they share boards."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from fedquilt.coordinator import settings
from fedquilt.coordinator.fleet.fair_share import (
    PATIENCE_S,
    START_S,
    IdleTime,
    JobUsage,
    devices_to_yield,
    is_schedulable,
    minimum_device_time,
    select_jobs,
)
from fedquilt.coordinator.settings import CoordinatorLimits, SubmitterLimits
from fedquilt.coordinator.storage.store import StoredJob

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
    assert select_jobs(rows("running", "queued", "queued"), waits(a=10 * PATIENCE_S), {}) == ["b", "c", "a"]


def test_a_job_gives_way_once_nobody_has_been_at_it_for_a_while():
    assert select_jobs(rows("running", "queued"), waits(a=PATIENCE_S - 1), {}, ONE) == ["a"]
    assert select_jobs(rows("running", "queued"), waits(a=PATIENCE_S), {}, ONE) == ["b"]
    assert select_jobs(rows("running", "done"), waits(a=10 * PATIENCE_S), {}, ONE) == ["a"]


def test_a_job_whose_round_has_not_begun_gives_way_at_once():
    assert START_S <= 1.0
    assert select_jobs(rows("running", "queued"), {"a": IdleTime(START_S, begun=False)}, {}, ONE) == ["b"]


def test_jobs_that_all_wait_take_turns():
    gave_way = {}
    seen, now = [], "a"
    for turn in range(7):
        seen.append(now)
        (following,) = select_jobs(rows("queued", "queued", "queued"), waits(**{now: PATIENCE_S}), gave_way, ONE)
        gave_way[now] = float(turn)
        now = following
    assert "".join(seen) == "abcabca"


def test_more_places_serve_more_jobs():
    """Who is at work keeps his place, and an idle job has what nobody else wants."""
    waiting = rows("running", "running", "queued", "queued")
    assert select_jobs(waiting, waits(a=0.0, b=PATIENCE_S), {}, CoordinatorLimits(running=2)) == ["a", "c"]
    assert select_jobs(waiting, waits(a=0.0, b=PATIENCE_S), {}, CoordinatorLimits(running=4)) == ["a", "c", "d", "b"]


def test_one_submitter_has_no_more_places_than_the_quota():
    waiting = rows("queued", "queued", "queued", "queued", submitters="aaab")
    assert select_jobs(waiting, {}, {}, CoordinatorLimits(running=3, submitter=SubmitterLimits(running=2))) == [
        "a",
        "b",
        "d",
    ]


def test_runs_of_simulated_fleets_are_left_to_who_brings_their_boards():
    """A coordinator that serves whatever is queued would wait for them for ever."""
    own, simulated = StoredJob("a", JOB, Path(), "running", 0.0), StoredJob("b", JOB, Path(), "running", 0.0, "fleet")
    assert [is_schedulable(row, None) for row in (own, simulated)] == [True, False]
    assert [is_schedulable(row, "b") for row in (own, simulated)] == [False, True]
    assert not is_schedulable(StoredJob("c", JOB, Path(), "running", 0.0, "simulation"), None)


def test_a_job_that_is_ahead_by_more_than_a_round_leaves_the_others_boards_alone():
    ahead = JobUsage(had_s=300.0, round_s=100.0, roll={"x"}, working=True)
    behind = JobUsage(had_s=150.0, round_s=1.0, roll={"y", "z"}, working=True)
    assert devices_to_yield("a", {"a": ahead, "b": behind}) == {"y", "z"}
    assert devices_to_yield("b", {"a": ahead, "b": behind}) == set()
    assert devices_to_yield("a", {"a": ahead, "b": behind._replace(working=False)}) == set()
    assert devices_to_yield("a", {"a": ahead, "b": behind._replace(had_s=200.0)}) == set()


def test_who_was_not_there_starts_level_with_the_one_that_has_had_least():
    jobs = [JobUsage(had_s, 0.0, set(), working) for had_s, working in ((5.0, False), (30.0, True), (20.0, True))]
    assert minimum_device_time(dict(zip("abc", jobs, strict=True))) == 20.0
    assert minimum_device_time({}) == 0.0
