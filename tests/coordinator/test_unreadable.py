"""What a disk does not give back: the job that needs it waits, is mended or fails by name; the others go on."""

import errno
import os
from pathlib import Path

import pytest
from by_hand import NETWORK, Stage, constant_model

from fedquilt import compression
from fedquilt.arrays import tensors
from fedquilt.coordinator.background_worker import BackgroundWorker
from fedquilt.coordinator.rounds.events import (
    JobEnded,
    RoundCommitted,
    UpdateAccepted,
    UpdateLost,
    UpdateRejected,
    UpdatesAggregated,
)
from fedquilt.coordinator.settings import CoordinatorLimits
from fedquilt.coordinator.storage.suspended_jobs import RETRY_S, TRIES, Suspension, count_failure
from fedquilt.core import Encoding, JobError
from fedquilt.formats import job_bundle
from fedquilt.host.disk import PrivateDisk, StrPath


class Bad(PrivateDisk):
    """A disk of which files with some names cannot be read, `left` times or for good."""

    def __init__(self, *names: str, left: float = float("inf"), code: int = errno.EIO) -> None:
        self.names, self.left, self.code = set(names), left, code
        self.but = Path()  # folder whose files can be read

    def _ask(self, path: StrPath) -> None:
        at = Path(os.fspath(path))
        if at.name in self.names and self.left > 0 and self.but not in (at.parent, at) and self.is_file(path):
            self.left -= 1
            raise OSError(self.code, os.strerror(self.code), str(path))

    def read(self, path: StrPath, offset: int = 0, size: int | None = None) -> bytes:
        self._ask(path)
        return super().read(path, offset, size)

    def hash_file(self, path: StrPath) -> str:
        self._ask(path)
        return super().hash_file(path)


def wait(stage: Stage, times: int = 1) -> None:
    """Let so many further tries of the disk come."""
    stage.play(times * (RETRY_S + 1.0))


def second_round(stage: Stage) -> str:
    """Play the first of two rounds with one device; returns the sha256 of the state that follows."""
    (hand,) = stage.connect("a")
    stage.submit(hand, factor=2.0)
    (committed,) = stage.told(RoundCommitted)
    return str(committed.state.sha256)


def test_a_state_that_can_never_be_read_fails_its_job_by_name_and_no_other(tmp_path, caplog):
    stage = Stage(tmp_path, rounds=2)
    sha256 = second_round(stage)
    other = stage.add("other")
    stage.disk = Bad(sha256)
    stage.restart()
    stage.play()
    stage.submit(stage.hands[0])
    assert stage.store.stored_status(other) == "done"
    assert stage.store.stored_status(stage.job) == "running"
    wait(stage, TRIES - 1)
    assert stage.store.stored_status(stage.job) == "failed"
    assert stage.store.suspensions.current_suspension(stage.job) is None
    (_, _, ended) = list(stage.store.read_events(stage.job))[-1]
    assert isinstance(ended, JobEnded)
    for said in (
        f"the state of {stage.job} ({sha256[:12]}) cannot be read",
        "Input/output error",
        "fedquilt backup restore",
    ):
        assert said in ended.reason
    assert caplog.text.count("is tried again in 30 s") == TRIES - 1
    assert (tmp_path / "home" / "blobs" / sha256).exists()


def test_a_job_that_was_failed_for_its_state_goes_on_where_that_can_be_read_again(tmp_path):
    stage = Stage(tmp_path, rounds=2)
    stage.disk = Bad(second_round(stage))
    stage.restart()
    wait(stage, TRIES)
    assert stage.store.stored_status(stage.job) == "failed"
    stage.disk.left = 0
    stage.store.set_status(stage.job, "queued")
    stage.restart()
    stage.play()
    stage.submit(stage.hands[0])
    assert stage.store.stored_status(stage.job) == "done"


def test_a_held_job_that_is_stopped_is_taken_up_at_once_when_it_is_resumed(tmp_path):
    stage = Stage(tmp_path, limits=CoordinatorLimits(), rounds=2)
    stage.disk = Bad(second_round(stage))
    stage.restart()
    stage.play()
    assert stage.store.suspensions.current_suspension(stage.job) is not None
    stage.store.set_status(stage.job, "stopping")
    stage.play()
    assert (stage.store.stored_status(stage.job), stage.store.suspensions.current_suspension(stage.job)) == (
        "stopped",
        None,
    )
    stage.disk.left = 0
    stage.store.set_status(stage.job, "queued")
    stage.play()
    assert stage.store.stored_status(stage.job) == "running"


def test_a_disk_that_fails_for_a_moment_fails_no_job(tmp_path):
    stage = Stage(tmp_path, rounds=2)
    stage.disk = Bad(second_round(stage), left=2)
    stage.restart()
    stage.play()
    assert not stage.server.finished
    wait(stage, 2)
    stage.submit(stage.hands[0])
    assert stage.store.stored_status(stage.job) == "done"


def test_a_first_state_that_can_never_be_read_is_made_again(tmp_path):
    stage = Stage(tmp_path)
    stage.hand("a")
    stage.play()
    (sha256,) = stage.store.latest_state_hashes()
    stage.disk = bad = Bad(sha256)
    stage.restart()
    wait(stage, TRIES - 1)
    bad.left = 0  # another file lies on other sectors
    stage.play()
    stage.submit(stage.hands[0])
    assert stage.store.stored_status(stage.job) == "done"
    assert (tmp_path / "home" / "blobs" / f"{sha256}.damaged").exists()


def test_an_update_that_can_never_be_read_is_asked_for_again(tmp_path):
    stage = Stage(tmp_path, cohort={"min_devices": 2})
    a, b = stage.connect("ab")
    stage.submit(a)
    (answered,) = stage.told(UpdateAccepted)
    sha256 = answered.update.bundles["model"].sha256
    stage.store.blob_store.verified_path(sha256)  # a file of its own
    stage.disk = bad = Bad(sha256)
    stage.restart()
    stage.play()
    b.answer(constant_model(5.0))
    wait(stage, TRIES)
    (lost,) = stage.told(UpdateLost)
    assert lost.device == "a"
    bad.left = 0
    stage.submit(a)
    assert stage.store.stored_status(stage.job) == "done"


@pytest.mark.parametrize("large", [False, True])
def test_an_update_that_cannot_be_read_when_it_has_come_is_taken_when_it_is_offered_again(tmp_path, caplog, large):
    stage = Stage(tmp_path, worker=BackgroundWorker(large_bytes=0) if large else None)
    hand = stage.hand("a")
    ref = hand.depot.store_bytes(tensors.encode_tensors(constant_model()))
    stage.disk = Bad(ref.sha256, left=1)
    stage.restart()
    stage.play()
    stage.submit(hand)
    assert not stage.told(UpdateAccepted)
    assert "update of a could not be read" in caplog.text
    stage.submit(hand)
    assert not stage.told(UpdateRejected)
    assert (tmp_path / "home" / "blobs" / f"{ref.sha256}.damaged").exists()
    assert stage.store.stored_status(stage.job) == "done"


def test_a_stored_sum_that_a_disk_does_not_give_back_once_is_not_lost(tmp_path):
    states = []
    for name, left in (("calm", 0), ("fails", 1)):
        worker = BackgroundWorker(large_bytes=0)
        worker.min_unsaved_ratio = 0.0
        stage = Stage(tmp_path / name, worker=worker, cohort={"min_devices": 2})
        a, b = stage.connect("ab")
        stage.submit(a)
        (folded,) = stage.told(UpdatesAggregated)
        stage.disk = Bad(folded.sum.sha256, left=left)
        stage.restart()
        wait(stage)
        b.answer(constant_model(5.0))
        wait(stage)
        assert not stage.told(UpdateLost)
        assert stage.store.stored_status(stage.job) == "done"
        states.append(stage.told(RoundCommitted)[-1].state)
    assert states[0] == states[1]


def apart(stage: Stage) -> str:
    """Queue another job, with a bundle of its own."""
    id = stage.add("other")
    files = {"model": tensors.encode_tensors(constant_model(7.0))}
    job_bundle.write_bundle(stage.folder / "apart", {"network": NETWORK, "flops": 8}, files)
    job = stage.store.find_job(id).job
    stage.store.delete_runs([id])
    return stage.store.add_job(job, stage.folder / "apart")


@pytest.mark.parametrize("what", ["bundle.json", "model"])
@pytest.mark.parametrize("large", [False, True])
def test_a_bundle_that_can_never_be_read_fails_its_job_by_name_and_no_other(tmp_path, what, large):
    stage = Stage(tmp_path, worker=BackgroundWorker(large_bytes=0) if large else None)
    name = what if what == "bundle.json" else job_bundle.load_bundle(tmp_path / "bundle").files[what].sha256
    stage.disk = bad = Bad(name)
    bad.but = tmp_path / "apart"
    stage.restart()
    other, a = apart(stage), stage.hand("a")
    stage.play()
    stage.submit(a)
    assert (stage.store.stored_status(other), stage.store.stored_status(stage.job)) == ("done", "queued")
    wait(stage, TRIES - 1)
    assert stage.store.stored_status(stage.job) == "failed"
    (_, _, ended) = list(stage.store.read_events(stage.job))[-1]
    place = f"move the bundle {tmp_path / 'bundle'} to another disk, then `fedquilt resume {stage.job}`"
    for said in (f"the bundle of {stage.job} cannot be read", "Input/output error", place):
        assert said in ended.reason
    bad.left = 0
    stage.store.set_status(stage.job, "queued")
    stage.play()
    stage.submit(a)
    assert stage.store.stored_status(stage.job) == "done"


@pytest.mark.parametrize("left", [1, float("inf")])
@pytest.mark.parametrize("large", [False, True])
def test_what_a_packed_update_has_moved_from_holds_up_its_job_alone(tmp_path, left, large):
    cohort = {"deadline_s": 1000.0}
    stage = Stage(
        tmp_path, worker=BackgroundWorker(large_bytes=0) if large else None, wire={"codec": "fp16"}, cohort=cohort
    )
    other, a = apart(stage), stage.hand("a")
    stage.store.set_status(other, "stopped")
    stage.play()
    (task,) = [task for task in a.tasks if task]
    base = task.bundles["model"].sha256
    stage.store.blob_store.verified_path(base)  # a file of its own
    stage.disk = bad = Bad(base, left=0)
    bad.but = tmp_path / "bundle" / "blobs"
    stage.restart()
    sent = compression.encode_bundle(Encoding(codec="fp16"), constant_model(), {}, {})[0]
    stage.play()
    bad.left = left
    a.answer(sent, bases={"model": base})
    stage.play()
    stage.store.set_status(other, "queued")
    stage.play()
    stage.submit(a)
    assert (stage.store.stored_status(other), stage.store.stored_status(stage.job)) == ("done", "queued")
    for _ in range(1, TRIES if left > 1 else 1):
        wait(stage)
        a.answer(sent, bases={"model": base})
        stage.play()
        assert [fact.update.job for fact in stage.told(UpdateAccepted)] == [other]
    assert (tmp_path / "home" / "blobs" / f"{base}.damaged").exists() == (left > 1)
    bad.left = 0
    wait(stage)
    a.answer(sent, bases={"model": base})
    stage.play()
    assert stage.store.stored_status(stage.job) == "done"
    assert not stage.told(UpdateRejected)


def test_failures_of_different_days_do_not_add_up():
    day_s, known = 86_400.0, None
    for day in range(2 * TRIES):
        known = count_failure(known, "a state", "", day * day_s)
        assert known is not None
    again = 3 * day_s * TRIES
    tried = [known := count_failure(known, "a state", "", again + number * RETRY_S) for number in range(TRIES)]
    assert [each and (each.tries, each.start_time) for each in tried] == [(1, again), (2, again), None]


def test_a_job_that_goes_on_is_not_held_and_its_tries_are_known_to_the_next_coordinator(tmp_path):
    stage = Stage(tmp_path)
    hold = Suspension(1.0, 2.0, "a state", "a state", 2)
    stage.store.suspensions.record_suspension(stage.job, hold)
    assert stage.store.suspensions.current_suspension(stage.job) == hold
    stage.store.mark_running(stage.job)
    assert stage.store.suspensions.current_suspension(stage.job) is None
    assert stage.store.suspensions.latest_suspension(stage.job) == hold


@pytest.mark.parametrize(("lives", "life_s", "status"), [(7, 12.0, "failed"), (7, 1.0, "running")])
def test_tries_of_coordinators_that_are_killed_before_the_next_one_add_up_but_not_faster_than_30_s_each(
    tmp_path, lives, life_s, status
):
    stage = Stage(tmp_path, rounds=2)
    stage.disk = Bad(second_round(stage))
    stage.disk.wall_clock_s = lambda: 1e9 + stage.broker.now_s
    for _ in range(lives):
        stage.restart()
        stage.play(life_s)
    assert stage.store.stored_status(stage.job) == status


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_a_job_for_which_no_descriptor_is_left_waits_until_there_is_one(tmp_path, code):
    stage = Stage(tmp_path, rounds=2)
    sha256 = second_round(stage)
    stage.disk = Bad(sha256, code=code)
    stage.restart()
    wait(stage, 10)
    assert stage.store.stored_status(stage.job) == "running"
    assert os.strerror(code) in str(stage.store.suspensions.current_suspension(stage.job))
    stage.disk.left = 0
    wait(stage)
    stage.submit(stage.hands[0])
    assert stage.store.stored_status(stage.job) == "done"


def test_a_method_that_cannot_be_imported_for_lack_of_descriptors_is_imported_later(tmp_path):
    stage = Stage(tmp_path, rounds=1)
    stage.restart()
    opening = stage.server._job_loader
    load, left = opening._load, [1] * 5

    def lacking(name):
        if left:
            left.pop()
            try:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            except OSError:
                raise JobError("no such method") from None
        return load(name)

    opening._load = lacking
    wait(stage, 4)
    assert len(left) == 0
    assert os.strerror(errno.EMFILE) in str(stage.store.suspensions.current_suspension(stage.job))
    wait(stage)
    assert stage.store.suspensions.current_suspension(stage.job) is None
    assert stage.store.stored_status(stage.job) == "running"
