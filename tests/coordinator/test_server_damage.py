"""Damaged files, numbers out of range and full disks under a coordinator with devices driven by hand."""

import contextlib
import errno
import os
import resource
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from by_hand import TABLE, Stage, constant_model

from fedquilt import wire
from fedquilt.arrays import tensors
from fedquilt.blobs.store import BlobStore
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds.events import JobEnded, RoundCommitted, UpdateAccepted, UpdateLost, UpdateRejected
from fedquilt.coordinator.updates import job_blobs
from fedquilt.coordinator.views import event_messages
from fedquilt.core import BlobRef, EvaluationSums, JobError, StoreError
from fedquilt.formats import job_bundle
from fedquilt.host.disk import Disk, StrPath
from fedquilt.methods import fedavg


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    payload = bytearray(path.read_bytes())
    payload[len(payload) // 2] ^= 4
    path.write_bytes(payload)


def test_the_first_state_of_a_job_is_made_again_if_it_is_damaged(stage, caplog):
    (hand,) = stage.connect("a")
    (sha256,) = stage.store.latest_state_hashes()
    flip(stage.store.blob_store.folder / sha256)
    stage.restart()
    stage.play()
    assert f"({sha256[:12]}) was missing or damaged: created again from the bundle" in caplog.text
    stage.submit(hand)
    assert [fact.status for fact in stage.told(JobEnded)] == ["done"]


def test_a_run_goes_on_with_the_bundle_that_it_began_with_alone(stage):
    hand, index = stage.hand("a"), stage.store.readable_jobs()[0].bundle / "bundle.json"
    stage.play()
    before = index.read_bytes()
    job_bundle.write_bundle(index.parent, {**job_bundle.load_bundle(index.parent).meta, "flops": 16}, {})
    stage.restart()
    stage.play()
    (ended,) = stage.told(JobEnded)
    assert ended.status == "failed"
    assert ended.reason.startswith(
        f"{index.parent} was prepared with other content after the start of the run: prepare"
    )
    index.write_bytes(before)
    stage.store.set_status(stage.job, "queued")
    stage.restart()
    stage.play()
    stage.submit(hand)
    assert stage.store.stored_status(stage.job) == "done"


class ReadOnly(Disk):
    """A disk on which nothing new gets a name."""

    def replace(self, source: StrPath, target: StrPath) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(target))


def test_a_disk_that_takes_nothing_for_a_while_fails_no_job_for_its_bundle(stage):
    folder = stage.store.readable_jobs()[0].bundle
    files = job_bundle.load_bundle(folder).files
    depot = BlobStore(stage.folder / "other", disk=ReadOnly())
    with pytest.raises(StoreError, match="mounted read-only"):
        job_blobs.restore_bundle_files("j", depot, folder, files)
    ref = next(iter(files.values()))
    flip(folder / "blobs" / ref.sha256)
    with pytest.raises(JobError, match=f"{ref.sha256} is damaged: run `fedquilt prepare` again"):
        job_blobs.restore_bundle_files("j", BlobStore(stage.folder / "other"), folder, files)


def test_a_blob_that_is_damaged_while_it_is_served_is_made_again(stage):
    (hand,) = stage.connect("a")
    task = hand.tasks[-1]
    blob = task.bundles["model"]
    stage.store.blob_store.discard_damaged(blob.sha256)
    stage.play(6.0)
    assert stage.store.blob_store.has_blob(blob)


def test_a_counted_update_that_is_damaged_is_asked_for_again_and_the_result_is_the_same(tmp_path):
    found = []
    for name, damaged in (("calm", False), ("hit", True)):
        stage = Stage(tmp_path / name)
        a, b = stage.connect("ab")
        stage.submit(a)
        (answered,) = stage.told(UpdateAccepted)
        stage.restart()
        if damaged:
            flip(stage.store.blob_store.folder / answered.update.bundles["model"].sha256)
        stage.play()
        stage.submit(b, factor=5.0)
        if damaged:
            (lost,) = stage.told(UpdateLost)
            assert (lost.device, "or damaged" in lost.reason) == ("a", True)
            task = a.tasks[-1]
            assert (task.round, task.epoch) == (0, 3)  # two starts, and another number for the device's sake
            stage.submit(a)
        assert [fact.status for fact in stage.told(JobEnded)] == ["done"]
        found.append(stage.told(RoundCommitted)[-1].state)
    assert found[0] == found[1]


def test_a_job_whose_log_is_damaged_hides_no_other_and_keeps_its_blobs(tmp_path, caplog):
    stage = Stage(tmp_path)
    (hand,) = stage.connect("a")
    kept = stage.store.latest_state_hashes()
    stage.store._db.execute("update facts set at = at + 1 where seq = 1")
    later = stage.store.add_job(settings.parse_job(TABLE), tmp_path / "bundle")
    stage.job = later
    stage.restart()
    stage.server._only = None
    stage.play()
    stage.submit(hand)
    assert [(row.id == later, row.status) for row in stage.store.readable_jobs()] == [(False, "failed"), (True, "done")]
    assert "is damaged: event 1" in caplog.text
    assert "unreferenced blobs are kept" in caplog.text
    assert all(stage.store.blob_store.find_ref(sha256) for sha256 in kept)


@pytest.mark.parametrize("value", [1.7e308, -1.7e308, 3.0])
def test_a_metric_that_is_huge_bricks_nothing(stage, value):
    hands = [stage.hand("a"), stage.hand("b")]
    stage.play()
    for hand in hands:
        hand.answer(constant_model(), weight=10.0, metrics={"loss": value})
    stage.play()
    assert stage.told(RoundCommitted)[0].metrics == {"loss": pytest.approx(value)}
    assert event_messages.summarise_run(stage.store.find_job(stage.job), stage.store)["problem"] is None
    assert stage.store.stored_status(stage.job) == "done"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            {"evaluation": EvaluationSums(examples=0)},
            "no evaluation: no device has held-out examples ([data] held), or there is no model yet",
        ),
        (
            {"weight": 0.0, "metrics": {"loss": 1.0, "steps": 0.0}},
            "no average of loss, steps: all updates have weight 0",
        ),
    ],
)
def test_what_no_device_has_an_example_of_is_said_in_words(staged, answer, said):
    stage = staged(check={"every": 1})
    hands = [stage.hand("a"), stage.hand("b")]
    stage.play()
    for hand in hands:
        hand.answer(constant_model(), **answer)
    stage.play()
    assert stage.told(RoundCommitted)[0].warnings[-1] == said


def test_a_fact_that_cannot_be_kept_ends_its_job_and_not_the_coordinator(stage, monkeypatch):
    (a,) = stage.connect("a")
    monkeypatch.setattr(
        stage.server.find_job(stage.job), "method", replace(fedavg.METHOD, explain=lambda state: ["a file \udcff"])
    )
    stage.submit(a)
    assert stage.store.stored_status(stage.job) == "failed"
    assert "cannot be encoded" in stage.told(JobEnded)[0].reason


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """The kernel refuses to make any file longer, as a full disk does."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_an_update_that_finds_the_disk_full_is_taken_once_there_is_room(stage):
    a, b = stage.connect("ab")
    stage.submit(a)
    b.depot.store_bytes(tensors.encode_tensors(constant_model(3.0)))
    with full_disk():
        update = b.answer(constant_model(3.0))
        stage.play()
    assert [fact.update.device for fact in stage.told(UpdateAccepted)] == ["a"]
    assert b.acks == []
    b.say("update", update)
    stage.play()
    assert stage.told(JobEnded)[0].status == "done"


def test_a_log_that_cannot_be_written_ends_the_coordinator_with_a_sentence_and_a_restart_continues(stage):
    (a,) = stage.connect("a")
    claim = {"job": stage.job, "round": 0, "attempt": 0, "accepted": False, "code": "data", "reason": "none"}
    a.say("claim", wire.Claim(**claim))
    with full_disk(), pytest.raises(StoreError, match="check free space"):
        stage.play()
    assert a.acks == []
    stage.restart()
    stage.play()
    stage.submit(a)
    assert stage.told(JobEnded)[0].status == "done"


def test_a_device_that_changes_its_mind_about_an_update_fills_no_disk(stage):
    (a,) = stage.connect("a")
    for factor in range(5):
        a.answer(constant_model(), bundles={"model": BlobRef(sha256=f"{factor:064x}", size=1000)})
    a.answer({"1.bias": np.zeros(2, np.float32)})
    stage.play()
    assert "tensor names differ" in stage.told(UpdateRejected)[0].reason
    kept = {path.name for path in (stage.folder / "home" / "blobs").iterdir() if len(path.name) == 64}
    task = next(task for task in a.tasks if task)
    pinned = {ref.sha256 for ref in task.bundles.values()} | stage.store.latest_state_hashes()
    assert kept == pinned
