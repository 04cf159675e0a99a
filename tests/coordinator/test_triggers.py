"""Jobs that boards' drift starts: when one fires, what comes of it, and what a person sees and does."""

import time
from pathlib import Path
from typing import Any

import pytest
from by_hand import TABLE, Hand, Stage

from fedquilt import wire
from fedquilt.coordinator import run_control, settings
from fedquilt.coordinator.delivery.monitoring_executor import DeviceStatusTracker
from fedquilt.coordinator.rounds.events import NoteRecorded
from fedquilt.coordinator.run_control import RunnerReport, trigger_reason
from fedquilt.coordinator.settings import CoordinatorLimits, JobSettings
from fedquilt.coordinator.storage.store import ARMED, UNAPPROVED, StoredJob
from fedquilt.coordinator.views import event_messages, wait_reasons
from fedquilt.coordinator.views.run_summary import summarise_events
from fedquilt.core import JobError

HOUR = 3600.0


def job(**trigger: Any) -> JobSettings:
    return settings.parse_job({**TABLE, "trigger": {"pause": "12h", **trigger}})


def boards(*drifts: float | None, accuracy: float | None = None) -> list[RunnerReport]:
    return [RunnerReport(f"b{number}", drift, accuracy) for number, drift in enumerate(drifts)]


# -- the decision ---------------------------------------------------------------------------------


def test_it_fires_once_enough_boards_have_drifted():
    calm = [0.0] * 6
    assert trigger_reason(job(), boards(*calm, 0.5, 0.1), 0.0) == ""
    assert trigger_reason(job(), boards(*calm, 0.5, 0.31), 0.0) == (
        "[trigger]: 2 of 8 reporting devices have drift above 0.3: b6 (drift 0.50), b7 (drift 0.31)"
    )
    assert trigger_reason(job(), boards(*calm, 0.5, 0.3), 0.0) == ""  # above, not at
    assert trigger_reason(job(drift_above=0.6), boards(*calm, 0.5, 0.5), 0.0) == ""
    assert trigger_reason(job(boards="12.5%"), boards(*calm, 0.5, 0.0), 0.0)
    assert trigger_reason(job(boards="100%"), boards(0.5, 0.5, 0.0), 0.0) == ""
    assert trigger_reason(job(), boards(*[0.9] * 100), 0.0).endswith("b12 (drift 0.90) and 95 more")


def test_one_board_that_tells_is_enough_if_it_is_the_only_one_and_none_is_never():
    assert trigger_reason(job(boards="1%"), boards(0.5), 0.0)
    assert trigger_reason(job(boards="1%"), [], 0.0) == ""


def test_accuracy_counts_where_the_job_says_so():
    told = boards(0.0, None, accuracy=0.7)
    assert trigger_reason(job(), told, 0.0) == ""
    assert "drift above 0.3 or accuracy below 0.8: b0 (drift 0.00, accuracy 0.70)" in trigger_reason(
        job(accuracy_below=0.8), told, 0.0
    )


def test_it_pauses_between_two_starts():
    told = boards(0.9)
    assert trigger_reason(job(), told, 11.9 * HOUR, last_start=0.0) == ""
    assert trigger_reason(job(), told, 12.1 * HOUR, last_start=0.0)
    assert trigger_reason(job(), told, 0.0, last_start=1.8e9)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"boards": "0%"}, r"\[trigger\] boards = .0%.: set a share above 0 % and up to 100 %"),
        ({"boards": "150%"}, r"above 0 % and up to 100 %"),
        ({"boards": "25"}, r"boards"),
        ({"pause": "12"}, r"\[trigger\] pause = '12' is not a time: write a number with ms, s, min, m, h, d or w"),
        ({"drift_above": 1.0}, r"drift_above"),
        ({"drift": 0.3}, r"drift"),
    ],
)
def test_a_trigger_that_is_none_is_refused(table, said):
    with pytest.raises(JobError, match=said):
        job(**table)


# -- a coordinator --------------------------------------------------------------------------------


@pytest.fixture
def stage(tmp_path: Path) -> Any:
    """A coordinator whose first job is armed."""
    return Stage(tmp_path, CoordinatorLimits(), trigger={"pause": "12h", "boards": "50%"})


def tells(stage: Stage, hand: Hand, drift: float | None) -> None:
    stage.play(0.5)  # nobody keeps telemetry for a coordinator that does not listen yet
    hand.say("telemetry", wire.Telemetry(served=10, drift=drift))


def others(stage: Stage) -> list[StoredJob]:
    return [row for row in stage.store.readable_jobs() if row.id != stage.job]


def reasons(stage: Stage, run: str) -> list[str]:
    return [fact.text for _, _, fact in stage.store.read_events(run) if isinstance(fact, NoteRecorded)]


def test_a_job_is_started_by_drift_and_carried_out(stage):
    a, b = stage.hand("a"), stage.hand("b")
    assert stage.store.stored_status(stage.job) == ARMED
    tells(stage, a, 0.0)
    tells(stage, b, None)
    stage.play()
    assert others(stage) == []
    assert a.tasks == []
    tells(stage, a, 0.7)
    stage.play()
    (started,) = others(stage)
    assert (started.status, started.job.trigger, started.submitter) == (
        "running",
        None,
        stage.store.find_job(stage.job).submitter,
    )
    stage.submit(a, b)
    assert stage.store.stored_status(started.id) == "done"
    why = "[trigger]: 1 of 1 reporting devices have drift above 0.3: a (drift 0.70)"
    assert reasons(stage, started.id) == [why]
    assert reasons(stage, stage.job) == [f"started {started.id}: {why}"]
    assert summarise_events(started.job, stage.store.read_events(started.id)).state.phase == "done"
    stage.play(10.0)
    assert others(stage) == [stage.store.find_job(started.id)]  # it pauses, though the drift is there
    stage.restart()
    for hand in (a, b):
        tells(stage, hand, 0.9)
    stage.play(10.0)
    assert len(others(stage)) == 1  # also a coordinator that is new knows when it started one last


def test_boards_that_are_not_selected_or_not_there_do_not_count(tmp_path):
    stage = Stage(
        tmp_path, CoordinatorLimits(), trigger={}, cohort={"deadline_s": 30.0, "attempts": 1, "select": ["site=lab"]}
    )
    tells(stage, stage.hand("a"), 0.9)
    stage.play()
    assert others(stage) == []


def test_an_owner_approves_what_a_trigger_has_started(tmp_path):
    stage = Stage(tmp_path, CoordinatorLimits(), trigger={"approve": True, "pause": "0m"})
    a = stage.hand("a")
    tells(stage, a, 0.9)
    stage.play(5.0)
    (started,) = others(stage)
    assert started.status == UNAPPROVED
    assert a.tasks == []
    row = event_messages.summarise_run(started, stage.store)
    assert (row["status"], row["waits"]) == (
        "waiting for approval",
        f"its owner: `fedquilt resume {started.id} --home {stage.store.home}`",
    )
    assert any("waits for its owner" in line for line in event_messages.format_runs([row], 200))
    assert "starts" in run_control.approve_run(stage.store, started.id)
    stage.play()
    assert a.tasks[-1] is not None
    assert [(row.id, row.status) for row in others(stage)] == [(started.id, "running")]
    assert reasons(stage, started.id)[-1].startswith("approved by ")
    with pytest.raises(JobError, match="is running: only runs with status waiting for approval can be approved"):
        run_control.approve_run(stage.store, started.id)


def test_an_armed_job_is_stopped_and_armed_again(stage):
    assert "stopped" in run_control.stop_run(stage.store, stage.job)
    stage.play()
    assert stage.store.stored_status(stage.job) == "stopped"
    tells(stage, stage.hand("a"), 0.9)
    stage.play()
    assert others(stage) == []
    run_control.resume_run(stage.store, stage.job)
    stage.play()
    assert stage.store.stored_status(stage.job) == ARMED
    assert len(others(stage)) == 1


def test_a_damaged_log_of_an_armed_job_starts_nothing_and_stops_nobody(stage, caplog):
    a = stage.hand("a")
    tells(stage, a, 0.9)
    stage.play()
    (started,) = others(stage)
    stage.submit(a)
    stage.store._db.execute("update facts set body = replace(body, 'drift', 'drifT') where job = ?", (stage.job,))
    stage.play(5.0)
    assert len(others(stage)) == 1
    assert stage.store.stored_status(started.id) == "done"
    assert caplog.text.count("the trigger is ignored") == 1  # triggers are checked every second


def test_ls_says_what_an_armed_job_waits_for(stage):
    noted, now = DeviceStatusTracker(stage.store.home), time.time()
    for name, drift in (("a", 0.9), ("b", 0.1), ("c", 0.1)):
        noted.record_message((name, wire.Presence(online=True, boot="1")), 0.0)
        noted.record_message((name, wire.Telemetry(drift=drift)), 0.0)
    noted.close()
    row = stage.store.find_job(stage.job)
    told = wait_reasons.describe_wait(row, stage.store)
    assert told == "drift above 0.3: 1 of 3 reporting devices, at least 2 needed"
    assert run_control.describe_trigger_wait(row.job, [], now, now - HOUR) == "the end of its pause, in 11 h"
