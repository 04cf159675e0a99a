"""An agent that is killed at every point of a task, and files that are damaged meanwhile."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from one_agent import MODEL, Site, until_claimed, until_finished, until_offered

from fedquilt.arrays import tensors
from fedquilt.core import StoreError
from fedquilt.edge_agent.task.protocol import WorkResult
from fedquilt.host.disk import REAL, Disk, PathInfo, StrPath


def until_pulled(site: Site) -> None:
    until_offered(site)
    site.fetch_model(site.all("update")[-1])


@pytest.mark.parametrize(
    ("stage", "again"), [(until_claimed, True), (until_finished, True), (until_offered, False), (until_pulled, False)]
)
def test_killed_at_any_point_it_delivers_the_same_update_once(
    site: Site, stage: Callable[[Site], None], again: bool
) -> None:
    stage(site)
    site.start()
    if again:
        assert site.worker.requests[-1].private_state is None
        site.worker.finish(private=1.0)
        site.run()
    assert len(site.worker.requests) == int(again)
    np.testing.assert_array_equal(site.fetch_model(site.all("update")[-1])["w"], MODEL["w"] + 1)
    site.ack()
    assert site.outbox == []
    state = site.agent.storage.find_private_state("j-1", 0)
    assert state.path is not None
    assert tensors.read_tensors(Path(state.path))["c"] == 1.0


def test_killed_after_the_acknowledgement_it_does_not_work_for_the_task_again(site: Site) -> None:
    until_offered(site)
    site.ack()
    site.start()
    assert site.worker.requests == []
    offered = len(site.all("update"))
    site.run(100.0)
    assert len(site.all("update")) == offered


def test_the_next_round_begins_from_the_private_state_that_counted(site: Site) -> None:
    until_offered(site)
    site.ask(1, last_counted_round=0)
    assert len(site.worker.requests) == 1
    site.ack(0, accepted=True)
    second = site.worker.requests[-1]
    assert second.private_state is not None
    assert tensors.read_tensors(Path(second.private_state))["c"] == 1.0
    site.worker.finish(private=2.0)
    site.run()
    site.ack(1, accepted=False)
    site.ask(2, last_counted_round=0)
    third = site.worker.requests[-1].private_state
    assert third is not None
    assert tensors.read_tensors(Path(third))["c"] == 1.0


def test_a_damaged_update_in_the_outbox_is_worked_for_again(site: Site) -> None:
    until_offered(site)
    (blob,) = site.all("update")[-1].bundles.values()
    _flip(site.folder / "d/blobs" / blob.sha256)
    site.start()
    assert len(site.worker.requests) == 1
    site.worker.finish(private=1.0)
    site.run()
    np.testing.assert_array_equal(site.fetch_model(site.all("update")[-1])["w"], MODEL["w"] + 1)


def test_a_damaged_blob_of_a_task_is_fetched_again(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    first = site.ask()
    site.worker.finish()
    site.run()
    site.ack()
    (blob,) = first.bundles.values()
    _flip(site.folder / "d/blobs" / blob.sha256)
    site.start()
    site.ask(1, bundles=first.bundles)
    np.testing.assert_array_equal(
        tensors.read_tensors(Path(site.worker.requests[-1].bundles["model"]))["w"], MODEL["w"]
    )
    assert f"blob {blob.sha256[:12]}" in caplog.text


@pytest.mark.parametrize(("engine", "hashed"), [("numpy", 0), ("onnx", 1)])
def test_a_model_is_hashed_once_when_its_task_is_taken(
    site: Site, engine: str, hashed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests: list[str] = []

    def digest(disk: Disk, path: StrPath) -> str:
        digests.append(Path(path).name)
        return whole(disk, path)

    whole = Disk.hash_file
    monkeypatch.setattr(Disk, "hash_file", digest)
    first = site.ask()
    site.worker.finish()
    site.run()
    site.ack()
    digests.clear()
    site.ask(1, bundles=first.bundles, engine=engine)
    (blob,) = first.bundles.values()
    assert len(site.worker.requests) == 2
    assert digests.count(blob.sha256) == hashed
    assert site.worker.requests[-1].verify_bundles is not bool(hashed)


def test_a_task_that_finds_its_model_damaged_is_refused_and_has_it_fetched_the_next_time(site: Site) -> None:
    first = site.ask()
    site.worker.finish()
    site.run()
    site.ack()
    (blob,) = first.bundles.values()
    path, times = site.folder / "d/blobs" / blob.sha256, (site.folder / "d/blobs" / blob.sha256).stat()
    _flip(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a disk does it
    site.ask(1, bundles=first.bundles)
    with pytest.raises(StoreError, match="is damaged"):
        tensors.read_tensors(Path(site.worker.requests[-1].bundles["model"]), blob.sha256)  # as `task.main` does
    site.worker.events.append(WorkResult(code="disk", reason="it is damaged"))
    site.run()
    site.ask(1, bundles=first.bundles, attempt=1)
    np.testing.assert_array_equal(
        tensors.read_tensors(Path(site.worker.requests[-1].bundles["model"]))["w"], MODEL["w"]
    )


def _flip(path: Path, at: int = -1) -> None:
    """Flip a bit of a file."""
    payload = bytearray(path.read_bytes())
    payload[at] ^= 4
    path.write_bytes(payload)


def test_an_update_whose_blobs_the_disk_lost_is_worked_for_again(site: Site) -> None:
    until_offered(site)
    site.agent.storage.blob_store.remove_blob(site.all("update")[-1].bundles["model"].sha256)
    site.run(10.0)
    assert site.outbox == []
    site.ask()
    assert len(site.worker.requests) == 2


class Silent(Disk):
    """A disk that fails whenever it is asked what a path leads to."""

    def stat(self, path: StrPath) -> PathInfo | None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


def test_an_update_is_offered_later_while_the_disk_does_not_say_whether_it_is_there(site: Site) -> None:
    until_offered(site)
    offers, depot = len(site.all("update")), site.agent.storage.blob_store
    depot.disk = Silent()
    site.run(12.0)
    assert len(site.all("update")) == offers
    assert len(site.outbox) == 1
    depot.disk = REAL
    site.run(60.0)
    assert len(site.all("update")) > offers
    assert len(site.worker.requests) == 1
