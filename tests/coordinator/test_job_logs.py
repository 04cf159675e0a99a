"""Which blobs runs need is known from what has come since the last look."""

import pytest
from job_facts import BLOB
from stored_runs import Run, blob_of, of, state

from fedquilt.coordinator.rounds.events import (
    JobEnded,
    JobStarted,
    RoundClosed,
    RoundCommitted,
    UpdateAccepted,
    UpdatesAggregated,
)
from fedquilt.coordinator.storage.rows import encode_lossless
from fedquilt.coordinator.storage.store import Store


def test_the_blobs_of_runs_are_known_from_what_has_come_since_the_last_look(run):
    other = Run(run.store)
    other.record(JobStarted(state(77)))
    assert run.store.referenced_blobs() == {state(2).sha256, *blob_of(run.id, "a", 3), state(77).sha256}
    said = []
    run.store._db.set_trace_callback(said.append)
    run.record(UpdateAccepted(3, of(run.id, "b", 3)))
    of_run = {state(2).sha256, *blob_of(run.id, "a", 3), *blob_of(run.id, "b", 3)}
    assert run.store.referenced_blobs() == {*of_run, state(77).sha256}
    assert not [line for line in said if "order by seq" in line]
    with Store(run.store.home) as another:
        another.append_event(run.id, UpdateAccepted(3, of(run.id, "c", 3)))
    assert blob_of(run.id, "c", 3) < run.store.referenced_blobs()
    assert len([line for line in said if "order by seq" in line]) == 1
    run.record(RoundClosed(3), RoundCommitted(3, state(3), False, {}))
    assert run.store.referenced_blobs() == {state(3).sha256, state(77).sha256}


def test_a_stored_sum_is_needed_in_place_of_the_updates_in_it_until_their_round_ends(run, often):
    run.record(UpdateAccepted(3, of(run.id, "b", 3)), UpdatesAggregated(3, ("a",), state(88)))
    for store in (run.store, often()):
        assert store.referenced_blobs() == {state(2).sha256, state(88).sha256, *blob_of(run.id, "b", 3)}
    run.record(RoundClosed(3), RoundCommitted(3, state(3), False, {}))
    for store in (run.store, often()):
        assert store.referenced_blobs() == {state(3).sha256}


def test_what_another_process_has_written_between_two_facts_of_this_one_is_needed_too(run, often):
    """Else the blobs of an update that counts would be taken for leftovers."""
    before = run.store.referenced_blobs()
    often().append_event(run.id, UpdateAccepted(3, of(run.id, "c", 3)))
    run.store.append_event(run.id, UpdateAccepted(3, of(run.id, "b", 3)))
    assert run.store.referenced_blobs() == before | blob_of(run.id, "b", 3) | blob_of(run.id, "c", 3)


def append_and_fail(made: Run) -> None:
    """A fact whose transaction is taken back."""
    with made.store._write_transaction():
        made.store._rows.append_events(
            [(made.id, 1.0, encode_lossless(made.id, UpdateAccepted(3, of(made.id, "b", 3))))]
        )
        raise RuntimeError


def test_a_fact_whose_transaction_fails_is_not_taken_for_written(run):
    before = run.store.referenced_blobs()
    with pytest.raises(RuntimeError):
        append_and_fail(run)
    assert run.store.referenced_blobs() == before
    assert run.store.find_damaged_ids() == []


def test_a_run_that_is_done_has_its_blobs_without_its_facts(often):
    made = Run(often())
    made.record(JobStarted(BLOB))
    made.round(0, "a")
    made.record(JobEnded("done"))
    later, said = often(), list[str]()
    later._db.set_trace_callback(said.append)
    assert (later.referenced_blobs(), later.find_damaged_ids()) == ({state(0).sha256}, [])
    assert not [line for line in said if "order by seq" in line]
    assert made.store._db.execute("select length(body) from snapshots").fetchall() == [(0,)]


def test_a_removed_run_takes_its_snapshot_with_it(run):
    run.store.delete_runs([run.id])
    assert run.store._db.execute("select count(*) from snapshots").fetchone() == (0,)
    assert run.store.referenced_blobs() == set()
