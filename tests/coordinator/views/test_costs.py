"""What a job took, split up; all numbers are by hand."""

import pytest
from evaluations import of_classes, total
from job_facts import summarised

from fedquilt.coordinator.rounds.events import RoundCommitted, TaskDeclined, UpdateAccepted, UpdateRejected
from fedquilt.coordinator.views.event_messages import format_energy_summary
from fedquilt.coordinator.views.run_summary import energy_per_point_j, progress_points, sum_costs
from fedquilt.core import BlobRef, Update, Usage

BLOB = BlobRef(sha256="a" * 64, size=1)


def answered(device: str, round: int, weight: float = 10.0, **usage: object) -> UpdateAccepted:
    update = Update(
        job="j", round=round, attempt=0, device=device, weight=weight, bundles={}, metrics={}, usage=Usage(**usage)
    )
    return UpdateAccepted(round, update)


def checked(round: int, accuracy: float) -> RoundCommitted:
    return RoundCommitted(round, BLOB, False, {}, evaluation=total(of_classes(accuracy, 100)))


def test_joules_are_gross_and_net_with_their_error_by_task_round_device_and_example():
    """a: 8 + 4 J of which 3 idle, b: 12 J of which 5 idle; errors add up."""
    found = summarised(
        [
            answered("a", 0, energy_j=8.0, idle_j=2.0, energy_error_j=0.5, energy_source="rapl", wall_s=1.0),
            answered("b", 0, 20.0, energy_j=12.0, idle_j=5.0, energy_error_j=1.0, energy_source="rapl"),
            TaskDeclined(0, "c", "memory", "too big"),
            answered("a", 1, energy_j=4.0, idle_j=1.0, energy_error_j=0.5, energy_source="rapl", wall_s=2.0),
        ]
    )
    assert (found.total.energy_j, found.total.net_j, found.total.energy_error_j) == (24.0, 16.0, 2.0)
    assert (found.total.task_j, found.total.example_j) == (8.0, 0.6)
    assert {n: ledger.energy_j for n, ledger in found.round_costs().items()} == {0: 20.0, 1: 4.0}
    assert {name: ledger.net_j for name, ledger in found.device_costs().items()} == {"a": 9.0, "b": 7.0, "c": None}
    assert (found.device_costs()["a"].tasks, found.device_costs()["a"].wall_s, found.device_costs()["c"].declined) == (
        2,
        3.0,
        1,
    )
    assert energy_per_point_j(progress_points(found)) is None
    assert format_energy_summary(found)[0] == (
        "energy: 24.00 J (16.00 J above idle, ± 2.00 J) for 3 tasks: "
        "8.00 J per task, 12.00 J per round, 0.6 J per example"
    )


def test_what_was_not_measured_is_none_and_never_nothing():
    assert summarised([answered("a", 0)]).total.energy_j is None
    assert format_energy_summary(summarised([answered("a", 0)])) == []
    assert format_energy_summary(summarised([])) == []
    half = summarised([answered("a", 0), answered("b", 0, energy_j=6.0, idle_j=1.0)])
    assert (half.total.tasks, half.total.metered, half.total.energy_j, half.total.example_j) == (2, 1, 6.0, 0.6)
    assert "6.00 J (5.00 J above idle) for 1 task of 2; the others were not metered: " in format_energy_summary(half)[0]
    partly = sum_costs(
        [answered("a", 0, energy_j=6.0, idle_j=1.0).update, answered("a", 0, energy_j=6.0, energy_error_j=1.0).update]
    )
    assert (partly.energy_j, partly.net_j, partly.energy_error_j) == (12.0, None, None)


def test_joules_for_a_point_of_accuracy_are_counted_from_the_first_check_to_the_best():
    found = summarised(
        [
            *(answered("a", 0, energy_j=30.0), checked(0, 0.5)),
            *(answered("a", 1, energy_j=10.0), checked(1, 0.6)),
            *(answered("a", 2, energy_j=5.0), checked(2, 0.55)),
        ]
    )
    assert [(point.rounds, point.energy_j) for point in progress_points(found)[:3]] == [(0, 0.0), (1, 30.0), (2, 40.0)]
    assert energy_per_point_j(progress_points(found)) == pytest.approx(3.0)
    assert "3.00 J per point of accuracy" in format_energy_summary(found)[0]


def test_without_a_gain_or_with_an_unmetered_task_a_point_has_no_price():
    fell = [answered("a", 0, energy_j=30.0), checked(0, 0.5), answered("a", 1, energy_j=1.0), checked(1, 0.4)]
    assert energy_per_point_j(progress_points(summarised(fell))) is None
    blind = [answered("a", 0), checked(0, 0.5), answered("a", 1, energy_j=1.0), checked(1, 0.9)]
    assert progress_points(summarised(blind))[1].energy_j is None
    assert energy_per_point_j(progress_points(summarised(blind))) is None


def test_the_peak_is_the_highest_with_the_base_of_the_same_task():
    found = summarised(
        [
            answered("a", 0, peak_bytes=300, base_bytes=100, down_bytes=7),
            answered("a", 1, peak_bytes=200, base_bytes=150, up_bytes=3),
            UpdateRejected(2, "a", "NaN"),
        ]
    ).device_costs()["a"]
    assert (found.peak_bytes, found.base_bytes, found.down_bytes, found.up_bytes, found.declined) == (300, 100, 7, 3, 1)
