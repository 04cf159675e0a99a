"""Costs and progress of a run."""

from collections.abc import Sequence

import plain
import pytest
from evaluations import of_classes, total
from job_facts import summarise_events

from fedquilt.coordinator.rounds.events import (
    AnyEvent,
    JobEnded,
    JobResumed,
    JobStarted,
    RoundCommitted,
    TaskDeclined,
    UpdateAccepted,
)
from fedquilt.coordinator.views import run_summary
from fedquilt.coordinator.views.event_messages import describe_best_round, format_energy_summary
from fedquilt.coordinator.views.run_summary import energy_per_point_j, progress_points, sum_costs
from fedquilt.core import BlobRef, EvaluationSums, Usage

BLOB = BlobRef(sha256="a" * 64, size=1)


def answered(device: str, round: int, weight: float = 10.0, **usage: object) -> UpdateAccepted:
    update = plain.update(round=round, device=device, weight=weight, usage=Usage(**usage))
    return UpdateAccepted(round, update)


def checked(round: int, accuracy: float) -> RoundCommitted:
    return RoundCommitted(round, BLOB, False, {}, evaluation=total(of_classes(accuracy, 100)))


def test_joules_are_gross_and_net_with_their_error_by_task_round_device_and_example():
    found = summarise_events(
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


@pytest.mark.parametrize(
    ("accuracies", "line"),
    [
        ([], []),
        ([0.5], []),
        ([0.5, 0.8], []),
        ([0.5, 0.8, 0.8], []),
        ([0.5, 0.8, 0.8, 0.6], ["best held-out accuracy 80.0 % after round 1: `export`"]),
    ],
)
def test_the_best_evaluation_is_named_if_the_last_is_worse(accuracies: list[float], line: list[str]) -> None:
    summary = summarise_events([checked(round, accuracy) for round, accuracy in enumerate(accuracies)])
    assert describe_best_round(summary, "export") == line


def test_what_was_not_measured_is_none_and_never_nothing():
    assert summarise_events([answered("a", 0)]).total.energy_j is None
    assert format_energy_summary(summarise_events([answered("a", 0)])) == []
    assert format_energy_summary(summarise_events([])) == []
    half = summarise_events([answered("a", 0), answered("b", 0, energy_j=6.0, idle_j=1.0)])
    assert (half.total.tasks, half.total.metered, half.total.energy_j, half.total.example_j) == (2, 1, 6.0, 0.6)
    assert "6.00 J (5.00 J above idle) for 1 task of 2; the others were not metered: " in format_energy_summary(half)[0]
    partly = sum_costs(
        [answered("a", 0, energy_j=6.0, idle_j=1.0).update, answered("a", 0, energy_j=6.0, energy_error_j=1.0).update]
    )
    assert (partly.energy_j, partly.net_j, partly.energy_error_j) == (12.0, None, None)


def test_joules_for_a_point_of_accuracy_are_counted_from_the_first_check_to_the_best():
    found = summarise_events(
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
    assert energy_per_point_j(progress_points(summarise_events(fell))) is None
    blind = [answered("a", 0), checked(0, 0.5), answered("a", 1, energy_j=1.0), checked(1, 0.9)]
    assert progress_points(summarise_events(blind))[1].energy_j is None
    assert energy_per_point_j(progress_points(summarise_events(blind))) is None


def answered_progress(
    device: str, round: int, took_s: float | None = None, sums: object = None, **usage: object
) -> UpdateAccepted:
    update = plain.update(round=round, device=device, evaluation=sums, usage=Usage(**usage))
    return UpdateAccepted(round, update, took_s)


def committed(
    round: int, took_s: float = 0.0, finished: bool = False, sums: EvaluationSums | None = None
) -> RoundCommitted:
    return RoundCommitted(round, BLOB, finished, {}, (), took_s, evaluation=None if sums is None else total(sums))


def test_personal_accuracy_is_weighted_plain_and_of_the_worst_tenth():
    told = {f"dev-{i:02d}": of_classes(i / 10, 10 if i else 90) for i in range(11)}
    found = run_summary.summarise_evaluation(total(*told.values()), told)
    assert found.mean == pytest.approx(0.5)
    assert found.worst_decile == pytest.approx(0.05)
    assert found.weighted == pytest.approx(10 * 5.5 / 190)
    assert found.devices["dev-10"] == 1.0


def test_a_device_without_held_out_examples_tells_nothing():
    nothing = EvaluationSums(examples=0)
    assert run_summary.summarise_evaluation(nothing, {"a": nothing}) is None
    found = run_summary.summarise_evaluation(
        total(nothing, of_classes(0.5, 4)), {"a": nothing, "b": of_classes(0.5, 4)}
    )
    assert (found.mean, found.worst_decile, found.devices) == (0.5, 0.5, {"b": 0.5})
    assert run_summary.summarise_round(None, [answered_progress("a", 0).update]) is None


FACTS: list[tuple[float, AnyEvent]] = [
    (100.0, JobStarted(BLOB)),
    (103.0, answered_progress("a", 0, 4.0, of_classes(0.25, 4), wall_s=3.0, energy_j=8.0, down_bytes=10, up_bytes=1)),
    (104.0, answered_progress("b", 0, 6.0, of_classes(0.75, 4), wall_s=4.0, energy_j=2.0, down_bytes=10, up_bytes=1)),
    (105.0, committed(0, 7.0, sums=total(of_classes(0.25, 4), of_classes(0.75, 4)))),
    (106.0, JobEnded("stopped")),
    (900.0, JobResumed()),
    (903.0, answered_progress("a", 1, 5.0, wall_s=5.0, energy_j=4.0, down_bytes=5, up_bytes=1)),
    (904.0, committed(1, 5.0)),
    (905.0, answered_progress("a", 2, 1.0, of_classes(0.9, 10), wall_s=1.0, energy_j=1.0, down_bytes=5)),
    (906.0, committed(2, 2.0, sums=of_classes(0.9, 10))),
]


def test_what_stands_beside_an_evaluation_is_what_all_rounds_before_it_took():
    found = run_summary.progress_points(summarise_events(FACTS, 2))
    assert [point.rounds for point in found] == [0, 1, 2]
    assert [point.clock_s for point in found] == [0.0, 7.0, 12.0]
    assert [point.real_s for point in found] == [0.0, 5.0, 5.0 + 1.0 + 4.0]
    assert [point.boards_s for point in found] == [0.0, 4.0, 9.0]
    assert [(point.down_bytes, point.up_bytes) for point in found] == [(0, 0), (20, 2), (25, 3)]
    assert [point.energy_j for point in found] == [0.0, 10.0, 14.0]
    assert [point.personal and point.personal.weighted for point in found] == [0.5, None, 0.9]


def test_a_run_that_goes_on_has_a_last_point_without_an_evaluation():
    found = run_summary.progress_points(summarise_events(FACTS, 10))
    assert [point.rounds for point in found] == [0, 1, 2, 3]
    assert (found[-1].clock_s, found[-1].energy_j, found[-1].personal) == (14.0, 15.0, None)
    assert run_summary.progress_points(summarise_events(FACTS[:2], 10)) == []
    assert run_summary.progress_points(summarise_events([], 10)) == []


def test_a_method_that_ends_by_itself_has_its_closing_evaluation_too():
    facts = [(0.0, committed(0, 1.0, finished=True)), (1.0, answered_progress("a", 1, 1.0, of_classes(0.5, 2)))]
    found = run_summary.progress_points(
        summarise_events([*facts, (2.0, committed(1, 9.0, sums=of_classes(0.5, 2)))], 10)
    )
    assert [(point.rounds, point.clock_s) for point in found] == [(0, 0.0), (1, 1.0)]
    assert found[-1].personal is not None


def test_joules_of_which_one_task_was_not_metered_are_not_known_from_then_on():
    facts = [
        (1.0, answered_progress("a", 0, energy_j=3.0)),
        (1.0, committed(0)),
        (2.0, answered_progress("a", 1)),
        (2.0, committed(1)),
        (3.0, answered_progress("a", 2, energy_j=3.0)),
        (3.0, committed(2)),
    ]
    assert [point.energy_j for point in run_summary.progress_points(summarise_events(facts, 9))] == [
        0.0,
        3.0,
        None,
        None,
    ]


def times(facts: Sequence[tuple[float, AnyEvent]]) -> list[run_summary.TimeBreakdown]:
    return [
        each.time_breakdown for each in summarise_events(facts).committed_rounds() if each.time_breakdown is not None
    ]


def test_the_parts_of_a_round_add_up_to_it():
    first, second, third = times(FACTS)
    assert (first.compute_s, first.transfer_s, first.wait_s) == (3.5, 1.5, 2.0)
    assert first.compute_s + first.transfer_s + first.wait_s == first.lasted_s == 7.0
    assert (second.compute_s, second.transfer_s, second.wait_s) == (5.0, 0.0, 0.0)
    assert third.lasted_s == 2.0


def test_a_round_without_a_timed_answer_has_no_split():
    facts = [(1.0, answered_progress("a", 0)), (1.0, committed(0, 3.0)), (2.0, committed(1, 3.0))]
    assert times(facts) == []


def test_an_answer_that_took_longer_than_its_round_leaves_no_negative_waiting():
    (found,) = times([(1.0, answered_progress("a", 0, 9.0, wall_s=8.0)), (1.0, committed(0, 2.0))])
    assert (found.lasted_s, found.compute_s, found.transfer_s, found.wait_s) == (9.0, 8.0, 1.0, 0.0)


def test_the_closing_evaluation_is_no_round():
    facts = [committed(0), committed(1), committed(2)]
    assert summarise_events(facts, 9).completed_rounds == 3
    assert summarise_events(facts, 2).completed_rounds == 2
    assert summarise_events([committed(0, finished=True), committed(1)], 9).completed_rounds == 1
    assert summarise_events([], 9).completed_rounds == 0
