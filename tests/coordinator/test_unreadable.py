"""What a disk does not give back: the job that needs it waits, is mended or fails by name; the others go on."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from by_hand import Stage, ones

from fedquilt import tensors
from fedquilt.coordinator import unreadable
from fedquilt.coordinator.facts import Answered, Committed, Ended, Folded, Lost, Rejected
from fedquilt.coordinator.worker import Here
from fedquilt.disk import Place, Private


class Bad(Private):
    """A disk of which files with some names cannot be read, `left` times or for good."""

    def __init__(self, *names: str, left: float = float("inf")) -> None:
        self.names, self.left = set(names), left

    def _ask(self, path: Place) -> None:
        if Path(os.fspath(path)).name in self.names and self.left > 0 and self.is_file(path):
            self.left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    def read(self, path: Place, offset: int = 0, size: int | None = None) -> bytes:
        self._ask(path)
        return super().read(path, offset, size)

    def digest(self, path: Place) -> str:
        self._ask(path)
        return super().digest(path)


def wait(stage: Stage, times: int = 1) -> None:
    """Let so many further tries of the disk come."""
    stage.play(times * (unreadable.AGAIN_S + 1.0))


def second_round(stage: Stage) -> str:
    """Play the first of two rounds with one device; returns the sha256 of the state that follows."""
    hand = stage.hand("a")
    stage.play()
    hand.answer(ones(2.0))
    stage.play()
    (committed,) = stage.told(Committed)
    return str(committed.state.sha256)


def test_a_state_that_can_never_be_read_fails_its_job_by_name_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried three times first; meanwhile, and afterwards, the other job's round goes on."""
    stage = Stage(tmp_path, rounds=2)
    sha256 = second_round(stage)
    other = stage.add("other")
    stage.disk = Bad(sha256)
    stage.restart()
    stage.play()
    stage.hands[0].answer(ones())
    stage.play()
    assert stage.store.status(other) == "done"
    assert stage.store.status(stage.job) == "running"
    wait(stage, unreadable.TRIES - 1)
    assert stage.store.status(stage.job) == "failed"
    (_, _, ended) = list(stage.store.facts(stage.job))[-1]
    assert isinstance(ended, Ended)
    for said in (f"the state of {stage.job} ({sha256[:12]}) cannot be read", "Input/output error", "fedquilt restore"):
        assert said in ended.reason
    assert caplog.text.count("is taken up again in 30 s") == unreadable.TRIES - 1
    assert (tmp_path / "home" / "blobs" / sha256).exists()
    stage.store.close()


def test_a_job_that_was_failed_for_its_state_goes_on_where_that_can_be_read_again(tmp_path: Path) -> None:
    """As its log says, once somebody has moved the home and resumes it."""
    stage = Stage(tmp_path, rounds=2)
    stage.disk = Bad(second_round(stage))
    stage.restart()
    wait(stage, unreadable.TRIES)
    assert stage.store.status(stage.job) == "failed"
    stage.disk.left = 0  # type: ignore[attr-defined]
    stage.store.set_status(stage.job, "queued")
    stage.restart()
    stage.play()
    stage.hands[0].answer(ones())
    stage.play()
    assert stage.store.status(stage.job) == "done"
    stage.store.close()


def test_a_disk_that_fails_for_a_moment_fails_no_job(tmp_path: Path) -> None:
    """Not even where it fails twice; a coordinator of this job alone does not take it for ended meanwhile."""
    stage = Stage(tmp_path, rounds=2)
    stage.disk = Bad(second_round(stage), left=2)
    stage.restart()
    stage.play()
    assert not stage.server.finished
    wait(stage, 2)
    stage.hands[0].answer(ones())
    stage.play()
    assert stage.store.status(stage.job) == "done"
    stage.store.close()


def test_a_first_state_that_can_never_be_read_is_made_again(tmp_path: Path) -> None:
    """It follows from the bundle: it is put aside, and another file has it."""
    stage = Stage(tmp_path)
    stage.hand("a")
    stage.play()
    (sha256,) = stage.store.states()
    stage.disk = bad = Bad(sha256)
    stage.restart()
    wait(stage, unreadable.TRIES - 1)
    bad.left = 0  # another file lies on other sectors
    stage.play()
    stage.hands[0].answer(ones())
    stage.play()
    assert stage.store.status(stage.job) == "done"
    assert (tmp_path / "home" / "blobs" / f"{sha256}.damaged").exists()
    stage.store.close()


def test_an_update_that_can_never_be_read_is_asked_for_again(tmp_path: Path) -> None:
    """As one that is damaged is; no other device works again."""
    stage = Stage(tmp_path, cohort={"min_devices": 2})
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    a.answer(ones(1.0))
    stage.play()
    (answered,) = stage.told(Answered)
    sha256 = answered.update.bundles["model"].sha256
    stage.store.depot.file(sha256)  # a file of its own
    stage.disk = bad = Bad(sha256)
    stage.restart()
    stage.play()
    b.answer(ones(5.0))
    wait(stage, unreadable.TRIES)
    (lost,) = stage.told(Lost)
    assert lost.device == "a"
    bad.left = 0
    a.answer(ones(1.0))
    stage.play()
    assert stage.store.status(stage.job) == "done"
    stage.store.close()


@pytest.mark.parametrize("large", [False, True])
def test_an_update_that_cannot_be_read_when_it_has_come_is_taken_when_it_is_offered_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, large: bool
) -> None:
    """It is put aside and fetched once more; the coordinator and the job go on, and its device is refused nothing."""
    stage = Stage(tmp_path, worker=Here(large_bytes=0) if large else None)
    hand = stage.hand("a")
    ref = hand.depot.put(tensors.encode(ones()))
    stage.disk = Bad(ref.sha256, left=1)
    stage.restart()
    stage.play()
    hand.answer(ones())
    stage.play()
    assert not stage.told(Answered)
    assert "a's update could not be read" in caplog.text
    hand.answer(ones())
    stage.play()
    assert not stage.told(Rejected)
    assert (tmp_path / "home" / "blobs" / f"{ref.sha256}.damaged").exists()
    assert stage.store.status(stage.job) == "done"
    stage.store.close()


def test_a_stored_sum_that_a_disk_does_not_give_back_once_is_not_lost(tmp_path: Path) -> None:
    """Its devices are not asked to work again: what they have sent is in it alone."""
    states = []
    for name, left in (("calm", 0), ("fails", 1)):
        worker = Here(large_bytes=0)
        worker.stored_at = 0.0
        stage = Stage(tmp_path / name, worker=worker, cohort={"min_devices": 2})
        a, b = stage.hand("a"), stage.hand("b")
        stage.play()
        a.answer(ones(1.0))
        stage.play()
        (folded,) = stage.told(Folded)
        stage.disk = Bad(folded.sum.sha256, left=left)
        stage.restart()
        wait(stage)
        b.answer(ones(5.0))
        wait(stage)
        assert not stage.told(Lost)
        assert stage.store.status(stage.job) == "done"
        states.append(stage.told(Committed)[-1].state)
        stage.store.close()
    assert states[0] == states[1]


def test_failures_of_different_days_do_not_add_up() -> None:
    waiting, day_s = unreadable.Waiting(), 86_400.0
    assert not any(waiting.failed("job", "sha", day * day_s) for day in range(2 * unreadable.TRIES))
    again = 3 * day_s * unreadable.TRIES
    assert [waiting.failed("job", "sha", again + number) for number in range(unreadable.TRIES)] == [False, False, True]
