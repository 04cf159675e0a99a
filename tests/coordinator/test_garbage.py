"""Garbage collection of blobs, beside other processes and other runs."""

import pytest
from by_hand import TABLE, Stage, ones

from fedquilt.coordinator import run_control, settings
from fedquilt.coordinator.jobs import retention
from fedquilt.coordinator.jobs.retention import GarbageCollector
from fedquilt.coordinator.rounds.events import JobEnded, RoundCommitted, UpdateAccepted
from fedquilt.coordinator.rounds.rollout import RolloutPlan
from fedquilt.coordinator.storage.store import Store


def test_a_blob_that_is_collected_before_its_rollout_is_queued_is_stored_again(tmp_path):
    with Store(tmp_path) as served, Store(tmp_path) as other:
        collector, put = GarbageCollector(served), other.depot.store_bytes

        def overtaken(*given):
            ref = put(*given)
            if not other._db.in_transaction:
                collector.add_all_blobs()
                assert collector.collect()
                assert not served.depot.has_blob(ref)
            return ref

        other.depot.store_bytes = overtaken
        run_control.queue_rollout(other, RolloutPlan(kind="model", name="digits-1"), b"a model")
        collector.add_all_blobs()
        assert collector.collect()
        (rollout,) = served.rollouts.readable_rollouts()
        assert served.depot.load(rollout.state.plan.blob.sha256) == b"a model"


def test_a_run_whose_update_is_also_another_runs_goes_on_when_that_one_is_deleted(tmp_path):
    """Two runs of one job, to which a device has sent the same update; one is stopped and deleted by hand."""
    stage = Stage(tmp_path)
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    a.answer(ones(3.0))
    stage.play()
    stage.store.set_status(stage.job, "stopping")
    stage.play()
    doomed, stage.job = stage.job, stage.store.add_job(settings.parse_job(TABLE), tmp_path / "bundle")
    stage.restart()
    stage.play()
    a.answer(ones(3.0))
    stage.play()
    with Store(tmp_path / "home") as command:
        swept = retention.remove_runs(command, [doomed])
    assert not swept.blobs_left
    stage.restart()
    stage.play()
    b.answer(ones(5.0))
    stage.play()
    assert [fact.update.device for fact in stage.told(UpdateAccepted)] == ["a", "a", "b"]
    assert [fact.status for fact in stage.told(JobEnded)] == ["stopped", "done"]
    (committed,) = stage.told(RoundCommitted)
    assert stage.store.depot.has_blob(committed.state)


@pytest.mark.parametrize("damaged", [False, True])
def test_nothing_is_deleted_while_a_damaged_log_may_name_it(tmp_path, damaged):
    with Store(tmp_path) as store:
        run = store.add_job(settings.parse_job(TABLE), tmp_path)
        if damaged:
            store._db.execute("update jobs set status = 'odd' where id = ?", (run,))
            store._db.commit()
        left, collector = store.depot.store_bytes(b"left"), GarbageCollector(store)
        collector.add_candidates({left.sha256}, soon=True)
        assert (collector.collect(), store.depot.has_blob(left)) == (not damaged, damaged)
