"""Schedules as values: drawn from seeds, written as text, read again, and shrunk."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.faults import search
from tests.faults.federation import ScheduleEnvironment
from tests.faults.schedule import (
    KINDS,
    LATER,
    ConnectionLoss,
    FaultSchedule,
    JobStop,
    ProcessCrash,
    draw_schedule,
    parse_schedule,
)

METHODS = ("fedavg", "ditto")


def test_a_seed_always_gives_the_same_schedule_and_its_text_gives_it_too() -> None:
    """Of 500 seeds; every kind of fault is among them."""
    kinds = set()
    for seed in range(500):
        plan = draw_schedule(seed, METHODS, LATER)
        assert plan == draw_schedule(seed, METHODS, LATER) == parse_schedule(plan.to_text())
        kinds |= {str(fault.__struct_config__.tag) for fault in plan.faults}
    assert kinds == KINDS.keys()


@pytest.mark.parametrize("text", ["devices=many", "colour=red", "crash:dev-1", "crash:dev-1,x,1,2.0", "flood:dev-1"])
def test_a_text_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no schedule"):
        parse_schedule(text)


def test_a_failure_is_shrunk_to_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a crash of dev-1, whatever else happens: the other faults go, and the settings become plain."""
    needed = ProcessCrash("dev-1", 40, True, 8.0)
    long = FaultSchedule(
        seed=3,
        method="ditto",
        rounds=4,
        check=2,
        jobs=2,
        faults=(JobStop(1.0, 20.0), needed, ConnectionLoss("dev-0", 1.0, 30.0, True)),
    )

    def attempt(environment: ScheduleEnvironment, plan: FaultSchedule) -> search.FailedSchedule | Counter[str]:
        crashed = any(isinstance(fault, ProcessCrash) and fault.call == 40 for fault in plan.faults)
        return search.FailedSchedule(plan, "it fails") if crashed else Counter()

    monkeypatch.setattr(search, "run_plan", attempt)
    short = search.shrink_failure(None, search.FailedSchedule(long, "it fails"))  # type: ignore[arg-type]
    assert [type(fault) for fault in short.plan.faults] == [ProcessCrash]
    assert (short.plan.method, short.plan.rounds, short.plan.jobs, short.plan.check) == ("fedavg", 1, 1, 0)
    assert short.to_lines()[-1].startswith("python -m tests.faults --schedule 'seed=3 ")
