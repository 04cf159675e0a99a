"""What is on a device's disk after a crash at every point; each new Local is a new start on the same folder."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from fedquilt import wire
from fedquilt.arrays import tensors
from fedquilt.blobs.shared_store import SharedBlobStore
from fedquilt.core import BlobRef, JobError, OperatingPoint, StoreError, Update, Usage, WorkEstimate
from fedquilt.edge_agent.agent_state import (
    SPARE_BYTES,
    UPDATE_FILE,
    AgentState,
    CountedRound,
    JobRecord,
    JobRecordFile,
    PrivateState,
)
from fedquilt.edge_agent.power.learned_model import LearnedModel, TaskSegment, learn_segment
from fedquilt.edge_agent.task.protocol import PRIVATE_FILE, write_tensors

KEY = ("j-1", 3)


def worked(local: AgentState, private: float | None = None, round: int = 3, job: str = "j-1") -> Update:
    """What the task's process leaves in its output folder, and its manifest."""
    out = local.empty_output()
    ref = write_tensors(out / "bundle", {"w": np.full(4, round, np.float32)})
    os.replace(out / "bundle", out / ref.sha256)
    if private is not None:
        write_tensors(out / PRIVATE_FILE, {"c": np.array([private])})
    return Update(
        job=job, round=round, attempt=0, device="d", weight=1.0, bundles={"model": ref}, metrics={}, usage=Usage()
    )


def commit(local: AgentState, update: Update, blobs: Mapping[str, bytes] = {}) -> bool:
    """Keep what the task's process has left, with the hash that it says of its private state."""
    left = local.home / "task/out" / PRIVATE_FILE
    payload = left.read_bytes() if left.exists() else None
    ref = None if payload is None else BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))
    return local.commit_update(update, blobs, private=ref)


def state_of(local: AgentState, job: str = "j-1", counted: int | None = 3) -> float | None:
    found = local.find_private_state(job, counted)
    return None if found.path is None else float(tensors.read_tensors(Path(found.path))["c"][0])


def test_a_committed_result_is_found_by_the_next_start(tmp_path: Path) -> None:
    local = AgentState(tmp_path)
    update = worked(local, private=1.0)
    assert commit(local, update)
    again = AgentState(tmp_path)
    assert again.load_outbox() == ({KEY: (update, True)}, {})
    assert again.blob_store.has_blob(update.bundles["model"])
    assert not (tmp_path / "scratch").exists()


def test_an_update_in_a_shared_store_survives_the_process_with_its_private_state(tmp_path: Path) -> None:
    killed = AgentState(tmp_path / "d", durable=False, shared=SharedBlobStore(tmp_path / "shared"))
    killed.empty_output().mkdir(parents=True)
    update = worked(killed, private=1.0)
    sha256 = update.bundles["model"].sha256
    assert commit(killed, update, {sha256: (killed.home / "task/out" / sha256).read_bytes()})
    shared = SharedBlobStore(tmp_path / "shared")
    again = AgentState(tmp_path / "d", durable=False, shared=shared)
    assert again.load_outbox() == ({KEY: (update, True)}, {})
    shared.remove_unclaimed()
    assert again.blob_store.has_blob(update.bundles["model"])


def test_a_crash_before_the_commit_leaves_nothing_but_the_old_private_state(tmp_path: Path) -> None:
    local = AgentState(tmp_path)
    commit(local, worked(local, private=1.0, round=2))
    local.record_ack(("j-1", 2), True, {"j-1": CountedRound(2)})
    update = worked(local, private=2.0)
    for name in update.bundles.values():  # the blobs were stored already, the folder was not renamed
        local.blob_store.store_file(tmp_path / "task/out" / name.sha256, name)
    again = AgentState(tmp_path)
    assert again.load_outbox() == ({}, {"j-1": CountedRound(2)})
    assert state_of(again, counted=2) == 1.0


def test_private_state_counts_only_when_the_contribution_does(tmp_path: Path) -> None:
    local = AgentState(tmp_path)
    commit(local, worked(local, private=1.0))
    assert state_of(local) is None
    local.record_ack(KEY, False, {})
    assert AgentState(tmp_path).load_outbox() == ({}, {})
    assert state_of(local) is None
    commit(local, worked(local, private=1.0))
    local.record_ack(KEY, True, {"j-1": CountedRound(3)})
    assert AgentState(tmp_path).load_outbox() == ({}, {"j-1": CountedRound(3)})
    assert state_of(local) == 1.0


def test_a_crash_after_the_private_state_has_moved_delivers_the_update_again(tmp_path: Path) -> None:
    local = AgentState(tmp_path)
    update = worked(local, private=1.0)
    commit(local, update)
    (left,) = (tmp_path / "outbox/j-1@3").glob("*.private")
    os.replace(left, tmp_path / f"private/j-1@3.{left.stem}")
    again = AgentState(tmp_path)
    assert again.load_outbox() == ({KEY: (update, True)}, {})
    again.record_ack(KEY, True, {"j-1": CountedRound(3)})
    assert state_of(again) == 1.0


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("call", ["write", "unlink"])
def test_private_state_of_an_answer_that_is_half_noted_outlives_another_jobs_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, restarted: bool
) -> None:
    local = AgentState(tmp_path)
    for job in ("j-1", "k-1"):
        commit(local, worked(local, private=1.0, job=job))
    with monkeypatch.context() as failing:
        failing.setattr(f"fedquilt.host.disk.Disk.{call}", refuse)
        with pytest.raises(StoreError):
            local.record_ack(KEY, True, {"j-1": CountedRound(3)})
    waiting, counted = ({KEY: None}, {})
    if restarted:
        local = AgentState(tmp_path)
        waiting, counted = local.load_outbox()
    local.record_ack(("k-1", 3), True, {**counted, "k-1": CountedRound(3)})
    if KEY in waiting:
        local.record_ack(KEY, True, {"k-1": CountedRound(3), "j-1": CountedRound(3)})
    assert state_of(local) == state_of(local, "k-1") == 1.0


def refuse(*args: object, **named: object) -> None:
    """A disk's call that fails."""
    raise OSError(30, "Read-only file system")


def test_a_crash_after_the_count_was_noted_does_not_deliver_again(tmp_path: Path) -> None:
    local = AgentState(tmp_path)
    commit(local, worked(local))
    counted = JobRecordFile(jobs={"j-1": JobRecord(round=3, epoch=0)})
    (tmp_path / "counted.json").write_bytes(wire.encode(counted))
    again = AgentState(tmp_path)
    assert again.load_outbox() == ({}, {"j-1": CountedRound(3)})
    assert list((tmp_path / "outbox").iterdir()) == []


def test_a_crash_while_an_entry_is_removed_leaves_no_update(tmp_path: Path) -> None:
    local = AgentState(tmp_path)
    commit(local, worked(local, private=1.0))
    (tmp_path / "outbox/j-1@3" / UPDATE_FILE).unlink()
    assert AgentState(tmp_path).load_outbox() == ({}, {})
    assert list((tmp_path / "outbox").iterdir()) == []


@pytest.mark.parametrize("place", [0, 30, 200])
def test_a_damaged_entry_is_worked_for_again(tmp_path: Path, place: int) -> None:
    local = AgentState(tmp_path)
    commit(local, worked(local))
    path = tmp_path / "outbox/j-1@3" / UPDATE_FILE
    payload = bytearray(path.read_bytes())
    payload[place] ^= 1
    path.write_bytes(payload)
    assert AgentState(tmp_path).load_outbox() == ({}, {})


def test_an_entry_whose_blobs_are_gone_is_worked_for_again(tmp_path: Path) -> None:
    local = AgentState(tmp_path)
    update = worked(local)
    commit(local, update)
    local.blob_store.remove_blob(update.bundles["model"].sha256)
    assert AgentState(tmp_path).load_outbox() == ({}, {})


def test_a_damaged_count_is_named_and_made_of_the_names_of_private_states(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local = AgentState(tmp_path)
    commit(local, worked(local, private=1.0))
    local.record_ack(KEY, True, {"j-1": CountedRound(3, 7)})
    file = tmp_path / "counted.json"
    for bit in range(0, 8 * file.stat().st_size, 7):  # in each byte another one
        whole = file.read_bytes()
        file.write_bytes(whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :])
        again = AgentState(tmp_path)
        assert again.load_outbox() == ({}, {"j-1": CountedRound(3)})
        assert state_of(again) == 1.0
        file.write_bytes(whole)
    assert f"{file} is damaged" in caplog.text


def test_the_private_state_is_that_of_the_round_that_the_coordinator_counted_last(tmp_path: Path) -> None:
    local, counted = AgentState(tmp_path), {}
    for round in (1, 2, 4):
        commit(local, worked(local, private=float(round), round=round))
        counted["j-1"] = CountedRound(round)
        local.record_ack(("j-1", round), True, counted)
    for now in (local, AgentState(tmp_path)):
        now.load_outbox()
        assert [state_of(now, counted=last) for last in (4, 3, 2)] == [4.0, 2.0, 2.0]
        for last in (None, 0, 1, 5):
            found = now.find_private_state("j-1", last)
            assert found.path is None
            assert "only that of round 5" in found.lost_reason
    assert "counted round 3 of j-2 is unknown" in local.find_private_state("j-2", 2).unknown_reason
    assert local.find_private_state("j-2", None) == PrivateState()


def test_private_states_of_a_coordinator_that_was_replaced_by_an_older_copy_go(tmp_path: Path) -> None:
    local = AgentState(tmp_path)
    local.load_outbox()
    for round, epoch, private in ((1, 1, 1.0), (2, 1, 2.0), (2, 2, 2.5)):
        commit(local, worked(local, private=private, round=round))
        local.record_ack(("j-1", round), True, {"j-1": CountedRound(round, epoch)})
    assert [state_of(local, counted=last) for last in (1, 2)] == [1.0, 2.5]
    commit(local, worked(local, private=1.5, round=1))
    local.record_ack(("j-1", 1), True, {"j-1": CountedRound(1, 3)})
    assert len(os.listdir(tmp_path / "private")) == 1
    assert state_of(local, counted=1) == 1.5


def test_private_state_counts_after_a_round_that_left_none(tmp_path: Path) -> None:
    local = AgentState(tmp_path)
    local.load_outbox()
    commit(local, worked(local, private=1.0))
    local.record_ack(KEY, True, {"j-1": CountedRound(3)})
    commit(local, worked(local, round=4))
    local.record_ack(("j-1", 4), True, {"j-1": CountedRound(4)})
    assert state_of(local, counted=4) == 1.0


def test_private_states_of_forgotten_jobs_go(tmp_path: Path) -> None:
    local = AgentState(tmp_path)
    for job in ("old-1", "new-1"):
        commit(local, worked(local, private=1.0, job=job))
        local.record_ack((job, 3), True, {job: CountedRound(3)})
    assert state_of(local, "old-1") is None
    assert state_of(local, "new-1") == 1.0


def test_a_commit_replaces_what_an_earlier_one_of_the_same_round_left(tmp_path: Path) -> None:
    local = AgentState(tmp_path)
    commit(local, worked(local, private=1.0))
    update = worked(local)
    assert not commit(local, update)
    assert AgentState(tmp_path).load_outbox() == ({KEY: (update, False)}, {})


def test_an_update_too_large_to_send_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    """2000 long bundle names do not fit one message."""
    local = AgentState(tmp_path)
    update = worked(local)
    ref = update.bundles["model"]
    huge = {**{f"{n:0200}": ref for n in range(2000)}}
    with pytest.raises(wire.WireError):
        commit(
            local,
            Update(job="j-1", round=3, attempt=0, device="d", weight=1.0, bundles=huge, metrics={}, usage=Usage()),
        )
    assert AgentState(tmp_path).load_outbox() == ({}, {})


def test_the_longest_unused_blobs_make_room_and_needed_ones_never_do(tmp_path: Path) -> None:
    """Four blobs of 100 bytes, room for 300 and 100 more to come: the two oldest that may go, go."""
    local = AgentState(tmp_path)
    refs = [local.blob_store.store_bytes(bytes([n]) * 100) for n in range(4)]
    for age, ref in enumerate(refs):
        os.utime(tmp_path / "blobs" / ref.sha256, (1000 + age, 1000 + age))
    local.touch_blobs([refs[1]])
    local.make_room(100, 300, needed_hashes={refs[0].sha256})
    assert [local.blob_store.has_blob(ref) for ref in refs] == [True, True, False, False]


@pytest.mark.parametrize(("idle", "left"), [(True, [False, True, False, True]), (False, [True, True, True, False])])
def test_caches_of_tasks_and_checks_make_room_as_blobs_do(tmp_path: Path, idle: bool, left: list[bool]) -> None:
    """Three caches and a blob of 1 MB each, 3.6 MB are the most and 1 MB is to come: the two longest unused go.

    While a task runs, its caches stay, whatever their age.
    """
    local = AgentState(tmp_path)
    outside = tmp_path.with_name("outside")
    outside.write_bytes(bytes(10**7))
    blob = tmp_path / "blobs" / local.blob_store.store_bytes(bytes(10**6)).sha256
    places = [tmp_path / "task/libraries/nv", tmp_path / "task/cache/j@b", tmp_path / "check/tmp/leftover", blob]
    for age, place in zip((1000, 3000, 2000, 4000), places, strict=True):
        if place != blob:
            (place / "inner").mkdir(parents=True)
            (place / "inner/file").write_bytes(bytes(10**6))
            (place / "link").symlink_to(outside)
        for each in (*place.rglob("*"), place):
            os.utime(each, (age, age), follow_symlinks=False)
    local.make_room(10**6, 3_600_000, needed_hashes=(), is_idle=idle)
    assert [place.exists() for place in places] == left
    assert outside.stat().st_size == 10**7


@pytest.mark.parametrize("idle", [True, False])
def test_folders_too_deep_to_be_measured_go_once_nothing_runs_and_cost_no_blob(
    request: pytest.FixtureRequest, tmp_path: Path, idle: bool
) -> None:
    local = AgentState(tmp_path)
    ref = local.blob_store.store_bytes(bytes(1000))
    request.addfinalizer(lambda: subprocess.run(["rm", "-rf", tmp_path / "task"], check=True))  # pytest cannot
    (tmp_path / "task/libraries/deep").mkdir(parents=True)
    inner = os.open(tmp_path / "task/libraries/deep", os.O_RDONLY)
    for _ in range(2100):  # beyond what a path can name
        os.mkdir("d", dir_fd=inner)
        outer, inner = inner, os.open("d", os.O_RDONLY, dir_fd=inner)
        os.close(outer)
    os.close(inner)
    local.make_room(1000, 10**6, needed_hashes=(), is_idle=idle)
    assert (tmp_path / "task/libraries/deep").exists() is not idle
    assert local.blob_store.has_blob(ref)


def test_blobs_make_room_on_a_disk_that_is_smaller_than_their_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as 150 bytes are free, 250 are to come, and the limit would allow a million: the oldest goes."""
    local = AgentState(tmp_path)
    refs = [local.blob_store.store_bytes(bytes([n]) * 100) for n in range(4)]
    for age, ref in enumerate(refs):
        os.utime(tmp_path / "blobs" / ref.sha256, (1000 + age, 1000 + age))
    disk = SPARE_BYTES + 550  # of which each blob takes 100

    def statvfs(path: Path) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=disk - 100 * sum(local.blob_store.has_blob(ref) for ref in refs), f_frsize=1)

    monkeypatch.setattr(os, "statvfs", statvfs)
    local.make_room(150, 10**6, needed_hashes=())
    assert [local.blob_store.has_blob(ref) for ref in refs] == [True, True, True, True]
    local.make_room(250, 10**6, needed_hashes={refs[0].sha256})
    assert [local.blob_store.has_blob(ref) for ref in refs] == [True, False, True, True]
    local.require_room(250)


def test_a_full_disk_is_an_error_that_says_so(tmp_path: Path) -> None:
    local = AgentState(tmp_path)
    local.require_room(1)
    with pytest.raises(StoreError, match=r"are free, .* are required; free some space"):
        local.require_room(1 << 60)


def test_a_folder_that_cannot_be_written_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot make the folder /proc/nowhere"):
        AgentState(Path("/proc/nowhere"))


def test_two_agents_may_not_share_a_home(tmp_path: Path) -> None:
    first = AgentState(tmp_path).lock_home()
    with pytest.raises(JobError, match="is in use by another agent"):
        AgentState(tmp_path).lock_home()
    first.release()
    AgentState(tmp_path).lock_home().release()


def test_tensors_are_written_under_a_name_that_is_their_digest(tmp_path: Path) -> None:
    one = write_tensors(tmp_path / "a", {"x": np.ones(2), "y": np.zeros(1)})
    two = write_tensors(tmp_path / "b", {"y": np.zeros(1), "x": np.ones(2)})
    assert one == two == BlobRef(sha256=one.sha256, size=(tmp_path / "a").stat().st_size)


def test_a_jobs_cache_lasts_until_another_job_or_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (AgentState(tmp_path).cache_folder("a") / "kept").write_bytes(b"x")
    assert (AgentState(tmp_path).cache_folder("a") / "kept").exists()
    assert not list(AgentState(tmp_path).cache_folder("b").iterdir())
    assert [path.name.partition("@")[0] for path in tmp_path.glob("task/cache/*")] == ["b"]
    (AgentState(tmp_path).cache_folder("b") / "kept").write_bytes(b"x")
    monkeypatch.setattr("fedquilt.edge_agent.agent_state._boot_id", lambda: "another")
    assert not list(AgentState(tmp_path).cache_folder("b").iterdir())
    assert [path.name for path in tmp_path.glob("task/cache/*")] == ["b@another"]


POINT = OperatingPoint(name="MAXN", gpu_hz=1.3e9, flops_per_s=10.0, busy_w=9.0)
KNOWN = {"torch fedavg": learn_segment(LearnedModel(), TaskSegment(POINT, WorkEstimate(flops=100.0), 12.0, 8.0))}


def test_what_a_board_has_learned_is_there_after_a_restart(tmp_path: Path) -> None:
    assert AgentState(tmp_path).load_learned_costs() == {}
    AgentState(tmp_path).store_learned_costs(KNOWN)
    assert AgentState(tmp_path).load_learned_costs() == KNOWN


@pytest.mark.parametrize("damage", [b"", b"\x00" * 40, b"{}", None])
def test_damaged_lessons_are_learned_anew(
    tmp_path: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    AgentState(tmp_path).store_learned_costs(KNOWN)
    file = tmp_path / "learned.json"
    file.write_bytes(file.read_bytes().replace(b"0.", b"1.", 1) if damage is None else damage)
    assert AgentState(tmp_path).load_learned_costs() == {}
    assert "learned.json is damaged" in caplog.text


def test_lessons_of_a_law_of_other_sizes_are_left_out(tmp_path: Path) -> None:
    known = KNOWN["torch fedavg"]
    assert known.time is not None
    small = msgspec.structs.replace(known, time=msgspec.structs.replace(known.time, targets=(1.0,)))
    AgentState(tmp_path).store_learned_costs({**KNOWN, "onnx fedstitch": small})
    assert AgentState(tmp_path).load_learned_costs() == KNOWN


def test_devices_that_are_not_durable_keep_no_lessons(tmp_path: Path) -> None:
    AgentState(tmp_path / "d", durable=False).store_learned_costs(KNOWN)
    assert not (tmp_path / "d/learned.json").exists()
