"""How long a round may take follows from how long earlier ones took; all numbers are by hand."""

from __future__ import annotations

import msgspec
import pytest

from fedquilt.coordinator import deadline
from fedquilt.coordinator.deadline import Ask, Took, allowed_s, amount, noted
from fedquilt.coordinator.settings import Cohort
from fedquilt.core import Work


def cohort(policy: str = "predicted", **changes: float) -> Cohort:
    return msgspec.convert({"deadline": policy, "slack": 0.5, **changes}, Cohort)


def asks(amounts: dict[str, float]) -> dict[str, Ask]:
    """So much work of devices that have no profile."""
    return {device: Ask(Work(flops=flops)) for device, flops in amounts.items()}


ONE = {"a": (Took(0, 20.0, 2.0), Took(1, 40.0, 2.0), Took(2, 30.0, 2.0))}  # 10, 20 and 15 s for a unit


def test_a_devices_pace_is_its_slowest_of_late() -> None:
    """20 s for a unit, 3 units, half as much again: 90 s."""
    assert allowed_s(cohort(), ONE, asks({"a": 3.0})) == pytest.approx(90.0)


def test_what_is_long_past_is_forgotten() -> None:
    """A first round that brought all the blocks counts for five rounds."""
    known: deadline.Known = {}
    for round, seconds in enumerate([500.0, 20.0, 20.0, 20.0, 20.0]):
        known = noted(known, "a", Took(round, seconds, 1.0))
    assert allowed_s(cohort(), known, asks({"a": 1.0})) == 600.0
    known = noted(known, "a", Took(5, 20.0, 1.0))
    assert allowed_s(cohort(), known, asks({"a": 1.0})) == pytest.approx(30.0)


def test_a_device_never_seen_is_as_slow_as_the_slowest() -> None:
    """b takes 50 s for a unit; so does c, for all that is known."""
    known = {**ONE, "b": (Took(0, 50.0, 1.0),)}
    assert allowed_s(cohort(), known, asks({"a": 1.0, "c": 1.0})) == pytest.approx(75.0)
    assert allowed_s(cohort(), known, asks({"a": 1.0})) == pytest.approx(30.0)


def test_one_device_in_ten_may_be_late_unless_the_quorum_needs_it() -> None:
    """Nine take 20 s, one 200 s: 30 s suffice for a quorum of 0.8, and all are waited for where all are needed."""
    known = {f"d{i}": (Took(0, 200.0 if i == 9 else 20.0, 1.0),) for i in range(10)}
    asked = asks(dict.fromkeys(known, 1.0))
    assert allowed_s(cohort(quorum=0.8), known, asked) == pytest.approx(30.0)
    assert allowed_s(cohort(quorum=1.0), known, asked) == pytest.approx(300.0)
    assert allowed_s(cohort(quorum=1.0, over_select=0.25), known, asked) == pytest.approx(30.0)


def test_with_nothing_known_there_is_no_prediction() -> None:
    """Nor ever with a fixed deadline."""
    for policy in ("fixed", "predicted", "paper"):
        assert allowed_s(cohort(policy), {}, asks({"a": 1.0})) is None
    assert allowed_s(cohort("fixed"), ONE, asks({"a": 1.0})) is None


def test_no_prediction_is_shorter_than_the_floor_or_longer_than_the_cohorts_deadline() -> None:
    """10 s at least, unless the job wants less."""
    assert allowed_s(cohort(), ONE, asks({"a": 1e-6})) == 10.0
    assert allowed_s(cohort(), ONE, asks({"a": 1e9})) == 600.0
    assert allowed_s(cohort(deadline_s=4.0), ONE, asks({"a": 1e-6})) == 4.0


def test_the_papers_deadline_is_the_slowest_of_the_last_round_scaled_by_the_work() -> None:
    """Round 2 took a 30 s and b 50 s for 2 units; 3 units are to be done: 75 s. What b did before does not count."""
    known = {**ONE, "b": (Took(1, 500.0, 2.0), Took(2, 50.0, 2.0)), "c": (Took(0, 900.0, 2.0),)}
    assert allowed_s(cohort("paper"), known, asks({"a": 3.0, "b": 1.0})) == pytest.approx(75.0)


def test_the_papers_deadline_never_falls_once_devices_just_meet_it() -> None:
    """Whoever slows down to 60 s is given 60 s for ever; this is why it is not the default."""
    known: deadline.Known = {"a": (Took(0, 60.0, 1.0),)}
    for round in range(1, 4):
        given = allowed_s(cohort("paper"), known, asks({"a": 1.0}))
        assert given == 60.0
        known = noted(known, "a", Took(round, given, 1.0))


def test_work_is_one_number_also_where_only_the_device_knows_its_examples() -> None:
    """5 operations, and 3 for each example: as for one."""
    assert amount(Work(flops=5.0, flops_per_example=3.0)) == 8.0
    assert amount(Work()) == 0.0


def test_every_policy_that_a_job_may_name_exists() -> None:
    """And no other."""
    with pytest.raises(msgspec.ValidationError):
        cohort("guessed")
    for policy in deadline.POLICIES:
        assert cohort(policy).deadline == policy
