"""When a job has taken enough."""

from fedquilt import methods
from fedquilt.coordinator.rounds.events import (
    ResourceUsage,
    describe_early_end,
    describe_reached_limit,
    describe_unmetered_tasks,
)
from fedquilt.coordinator.settings import JobLimits
from fedquilt.core import Update, Usage


def update(usage: Usage, below: Usage | None = None) -> Update:
    """An answer that took so much."""
    told = {"bundles": {}, "metrics": {}, "usage": usage, "below": below}
    return Update(job="j", round=0, attempt=0, device="a", weight=1.0, **told)


def test_what_is_spent_is_the_sum_of_what_answers_took():
    spent = (
        ResourceUsage()
        .add_update(update(Usage(energy_j=3.0, down_bytes=5, up_bytes=2)))
        .add_update(update(Usage(up_bytes=1)))
    )
    assert spent == ResourceUsage(joules=3.0, metered=1, unmetered=1, bytes=8)


def test_bytes_of_a_sites_boards_are_spent_beside_its_own():
    site = update(Usage(energy_j=3.0, down_bytes=5, up_bytes=2), Usage(energy_j=3.0, down_bytes=100, up_bytes=50))
    assert ResourceUsage().add_update(site) == ResourceUsage(joules=3.0, metered=1, bytes=157)


def test_each_limit_ends_a_job_when_it_is_reached_and_says_so():
    spent = ResourceUsage(joules=30.0, bytes=700, wall_s=60.0)
    assert describe_reached_limit(JobLimits(), spent) is None
    assert describe_reached_limit(JobLimits(max_joules=30.1, max_bytes=701, max_wall_s=60.1), spent) is None
    assert describe_reached_limit(JobLimits(max_joules=30.0), spent) == "max_joules: 30 J of 30 J are used up"
    assert describe_reached_limit(JobLimits(max_bytes=700), spent) == "max_bytes: 700 bytes of 700 are used up"
    assert describe_reached_limit(JobLimits(max_wall_s=59.0), spent) == "max_wall_s: 60 s of 59 s are used up"


def test_joules_that_nobody_measured_end_nothing_but_are_spoken_of():
    spent = ResourceUsage(joules=0.0, unmetered=2)
    assert describe_reached_limit(JobLimits(max_joules=1.0), spent) is None
    assert describe_unmetered_tasks(JobLimits(max_joules=1.0), spent) == (
        "max_joules = 1 ends nothing here: no board that has answered has a meter for its joules; "
        "the job runs to its rounds, or to another limit of [stop]"
    )
    some = ResourceUsage(joules=0.5, metered=1, unmetered=2)
    assert describe_unmetered_tasks(JobLimits(max_joules=1.0), some) == (
        "max_joules counts 0.5 J of 1 J, without 2 tasks on boards that have no meter"
    )
    assert describe_unmetered_tasks(JobLimits(), spent) is None
    assert describe_unmetered_tasks(JobLimits(max_joules=1.0), ResourceUsage(joules=0.5)) is None
    assert "without 1 task on" in str(
        describe_reached_limit(JobLimits(max_joules=1.0), ResourceUsage(joules=1.5, unmetered=1))
    )


def test_a_method_that_ends_by_itself_and_has_not_is_told_in_the_last_round():
    stitching = methods.load("fedstitch")
    told = describe_early_end(stitching, "fedstitch", 3, 2)
    assert told.startswith("the job's 3 rounds are over before fedstitch has ended")
    assert describe_early_end(stitching, "fedstitch", 3, 1) is None
    assert describe_early_end(methods.load("fedavg"), "fedavg", 3, 2) is None
