"""A snapshot saves reading a log from its first fact; whatever becomes of it, the log says what holds."""

import hashlib
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from job_facts import BLOB
from stored_job import JOB
from stored_runs import DEVICES, Run, blob_of, load_job_state, random_event, replay_events, state

from fedquilt.coordinator.rounds.events import (
    EligibilityRecorded,
    JobEnded,
    JobStarted,
    RoundClosed,
    RoundCommitted,
    UpdatesAggregated,
)
from fedquilt.coordinator.rounds.job_state import JobConstants, JobState, apply_event
from fedquilt.coordinator.storage import snapshots
from fedquilt.coordinator.storage.store import Store


def behind(made: Run) -> int:
    """Facts behind the snapshot with which a run is taken up, by another process."""
    with Store(made.store.home) as store:
        standing, upto = load_job_state(store, made.id, made.plan)
        assert standing == replay_events(store, made.id, made.plan) == made.standing
        return sum(seq > upto for seq, _, _ in store.read_events(made.id))


# -- what it holds --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_a_snapshot_and_the_facts_behind_it_come_to_what_the_whole_log_comes_to(often, seed):
    roll, made = random.Random(seed), Run(often())
    kinds, used = set(), 0
    while len(made.standing.job_state.history) < 3 or made.standing.event_count < 60:
        fact = random_event(roll, made.id, made.standing.job_state)
        made.record(fact)
        kinds.add(type(fact).__name__)
        standing, upto = load_job_state(made.store, made.id, made.plan, 99.0)
        assert standing == replay_events(made.store, made.id, made.plan, 99.0)
        used += upto > 0
    assert used > 20
    assert {"UpdateAccepted", "RoundCommitted", "CohortSelected"} <= kinds


def test_a_snapshot_is_kept_once_enough_facts_have_come_and_at_the_end(tmp_path):
    with Store(tmp_path, every=20) as store:
        made = Run(store)
        made.record(JobStarted(BLOB), EligibilityRecorded(0, DEVICES))
        upto = []
        for number in range(6):
            made.round(number, *DEVICES)
            upto.append(store.snapshots.load_state(made.id, made.plan, 0.0)[1])
        assert upto == [
            0,
            0,
            29,
            29,
            29,
            56,
        ]  # 2 facts, and 9 a round: 20 and one for each of 6 boards from one to the next
        made.record(JobEnded("stopped"))
        assert store.snapshots.load_state(made.id, made.plan, 0.0)[1] == 57


def test_a_restart_counts_on_from_the_snapshot_that_it_takes_up(tmp_path):
    with Store(tmp_path, every=20) as store:
        made = Run(store)
        made.record(JobStarted(BLOB), EligibilityRecorded(0, DEVICES))
        for number in range(3):
            made.round(number, *DEVICES)
    with Store(tmp_path, every=20) as made.store:
        assert load_job_state(made.store, made.id, made.plan) == (made.standing, 29)
        made.round(3, *DEVICES)
        assert made.store.snapshots.load_state(made.id, made.plan, 0.0)[1] == 29


def test_nothing_is_kept_of_facts_that_are_not_written_yet(often):
    made = Run(often())
    with made.store.batch_events():
        made.record(JobStarted(BLOB))
        made.round(0, "a")
        assert made.store.snapshots.load_state(made.id, made.plan, 0.0)[1] == 0
    made.round(1, "a")
    assert made.store.snapshots.load_state(made.id, made.plan, 0.0)[1] == 9


def test_nothing_is_kept_of_a_log_to_which_another_process_has_written(often):
    made, other = Run(often()), often()
    made.record(JobStarted(BLOB))
    other.append_event(made.id, EligibilityRecorded(0, ("z",)))
    made.round(0, "a")
    assert made.store.snapshots.load_state(made.id, made.plan, 0.0)[1] == 0


def test_nothing_is_kept_of_a_log_that_is_damaged(often):
    made = Run(often())
    made.record(JobStarted(BLOB), EligibilityRecorded(0, DEVICES))
    edited(made.store.home, "update facts set body = replace(body, 'EligibilityRecorded', 'surveyed') where seq = 2")
    made.round(0, "a")
    assert made.store.snapshots.load_state(made.id, made.plan, 0.0)[1] == 0


def test_a_run_that_is_stopped_with_a_stored_sum_is_taken_up_with_it(run):
    run.record(UpdatesAggregated(3, ("a",), BLOB), JobEnded("stopped"))
    assert behind(run) == 0
    assert run.standing.job_state.partial_aggregate == UpdatesAggregated(3, ("a",), BLOB)


# -- what does not fit ----------------------------------------------------------------------------


def edited(home: Path, statement: str, *values: object) -> None:
    db = sqlite3.connect(home / "fedquilt.db")
    db.execute(statement, values)
    assert db.total_changes or statement.startswith("drop")
    db.commit()
    db.close()


@pytest.mark.parametrize(
    "change",
    ["body = substr(body, 1, length(body) / 2)", "body = x'00'", "log = x'00'", "sum = 'text'", "version = '9.9 1'"],
)
def test_a_damaged_snapshot_is_not_used_by_name_and_made_anew(run, change, caplog):
    edited(run.store.home, f"update snapshots set {change}")
    assert behind(run) == run.standing.event_count
    assert [record.getMessage() for record in caplog.records] == [
        f"snapshot of {run.id} in {run.store.home} ignored, and the log read from the first event: "
        "its checksum is wrong"
    ]
    run.record(RoundClosed(3), RoundCommitted(3, state(3), False, {}))
    assert behind(run) == 0


def test_a_snapshot_of_another_version_is_not_used(run, monkeypatch):
    monkeypatch.setattr(snapshots, "VERSION", "9.9.9 1")
    assert behind(run) == run.standing.event_count
    monkeypatch.undo()
    assert behind(run) == 2


def test_a_snapshot_beyond_its_log_is_not_used(run, caplog):
    keep = list(run.store.read_events(run.id))[12][0]
    head = run.store._db.execute("select sum from facts where seq = ?", (keep,)).fetchone()[0]
    with run.store.open_transaction():
        run.store._db.execute("delete from facts where seq > ?", (keep,))
        run.store._rows.update_job(run.id, head=head)
    with Store(run.store.home) as store:
        standing, upto = load_job_state(store, run.id, run.plan)
        assert (standing, upto) == (replay_events(store, run.id, run.plan), 0)
        assert (standing.event_count, standing.job_state.round) == (13, 1)
        assert store.referenced_blobs() == {state(0).sha256, *(blob_of(run.id, "a", 1))}
    assert "its last event differs from the log" in caplog.text


def test_a_snapshot_of_other_settings_is_not_used(run, caplog):
    assert run.store.snapshots.load_state(run.id, JobConstants(0, 99, run.plan.cohort, 0), 0.0)[1] == 0
    assert "settings have changed" in caplog.text


def test_what_is_damaged_before_a_snapshot_keeps_nobody_from_going_on_and_is_found_by_who_reads_it(run):
    edited(run.store.home, "update facts set body = replace(body, '0.5', '0.6') where seq = 5")
    with Store(run.store.home) as store:
        assert load_job_state(store, run.id, run.plan)[0] == run.standing
        assert store.find_damaged_ids() == []
        with pytest.raises(Exception, match="event 5 or the event before it does not match its checksum"):
            list(store.read_events(run.id))
    edited(run.store.home, "update facts set body = replace(body, '0.5', '0.6') where seq = 31")
    with Store(run.store.home) as store:
        assert store.find_damaged_ids() == [run.id]
        with pytest.raises(Exception, match="event 31 or the event before it does not match its checksum"):
            load_job_state(store, run.id, run.plan)


def test_a_snapshot_that_cannot_be_written_is_done_without(run, caplog):
    run.store._db.execute("create temp trigger full before insert on snapshots begin select raise(abort, 'full'); end")
    run.record(RoundClosed(3), RoundCommitted(3, state(3), False, {}))
    assert f"no snapshot of {run.id} is stored" in caplog.text
    assert behind(run) == 4


KILLED = """
import os, signal, sys
from pathlib import Path
from fedquilt.coordinator.storage import snapshots
from fedquilt.coordinator.rounds.job_state import JobConstants, JobState, apply_event
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.storage.rows import encode_lossless

store = Store(Path(sys.argv[1]), every=-9)
row = store.readable_jobs()[0]
plan = JobConstants.from_job(row.job)
standing, upto = store.snapshots.load_state(row.id, plan, 7.0)
for _, _, fact in store.read_events(row.id, upto):
    standing.apply_event(fact, apply_event(standing.job_state, fact, 7.0))
store._db.set_trace_callback(lambda said: os.kill(os.getpid(), signal.SIGKILL) if said == "commit" else None)
store.snapshots.save_if_due(row.id, standing)
"""


def test_a_process_that_is_killed_over_a_snapshot_leaves_the_one_before(run):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(run.store.home)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert behind(run) == 2


# -- the rules ------------------------------------------------------------------------------------


def test_the_rules_of_the_facts_are_those_that_snapshots_name():
    roll, now, seen = random.Random(5), JobState(JobConstants.from_job(JOB)), hashlib.sha256()
    sorts = msgspec.json.Encoder(
        enc_hook=lambda value: dict(value) if isinstance(value, Mapping) else list(value), order="deterministic"
    )
    for _ in range(400):
        now = apply_event(now, random_event(roll, "run", now), 1.0)
        seen.update(sorts.encode(now))
    assert (seen.hexdigest()[:16], snapshots.STATE_VERSION) == ("784f148ec5d0e03a", 15)
