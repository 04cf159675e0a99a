"""The executor of a link: fetches, tasks and repetitions."""

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from wired import MESSAGES

from fedquilt import wire
from fedquilt.blobs import chunks, upload
from fedquilt.blobs.store import BlobStore
from fedquilt.blobs.transfers import Transfers
from fedquilt.coordinator.delivery.executor import ExecutorInput, LinkExecutor, TaskDispatcher
from fedquilt.coordinator.jobs.job import RunningJob
from fedquilt.coordinator.rounds.job_state import JobConstants, JobState
from fedquilt.coordinator.rounds.responses import UpdateReceived
from fedquilt.coordinator.settings import CohortSettings
from fedquilt.core import BlobRef, Task
from fedquilt.transport.link import LinkWrapper
from fedquilt.transport.memory_link import MemoryBroker

FIRST, SECOND = bytes(range(256)) * 40, bytes(reversed(range(256))) * 40  # of several chunks each
PACKET_BYTES = 2048


class Returning(LinkWrapper):
    """A link whose session can be lost and comes back, as a real one does."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker.connect())
        self._broker, self._sessions = broker, 1

    @property
    def session(self) -> int:
        return self._sessions

    def lose(self) -> None:
        self._broker.lose_client(self._link)

    def comes_back(self) -> None:
        self._link, self._sessions = self._broker.connect(), self._sessions + 1


class Site:
    """An executor and one device that gives whatever it is told to give; time is the test's."""

    def __init__(self, folder: Path) -> None:
        self.broker = MemoryBroker(max_payload=PACKET_BYTES)
        self.link, topics = Returning(self.broker), wire.Topics("f")
        self.depot, self.theirs = BlobStore(folder / "here"), BlobStore(folder / "there")
        self.executor = LinkExecutor(self.link, "f", self.depot, 1)
        self.given: set[str] = set()  # what the device may send
        self._own = self.broker.connect()
        self._own.subscribe(topics.device_filters("a"))
        self._uploading = Transfers(self._own, self.theirs, topics, "up", lambda device, sha256: sha256 in self.given)
        self.asked: list[str] = []  # what it was asked for, in order
        self.heard: list[ExecutorInput] = []

    def has(self, payload: bytes) -> BlobRef:
        """A blob that the device has and gives."""
        ref = self.theirs.store_bytes(payload)
        self.given.add(ref.sha256)
        return ref

    def step(self) -> None:
        """A twentieth of a second."""
        self.broker.now_s += 0.05
        self.broker.deliver_due()
        self.heard += self.executor.receive_inputs(self.broker.now_s)
        self.executor.send_pending(self.broker.now_s)
        for message in self._own.receive():
            route = wire.parse_topic(message.topic)
            if route.subtopic == "get":
                self.asked.append(wire.decode(message.payload, wire.ChunkRequest).sha256)
            self._uploading.handle_message(route, message.payload, self.broker.now_s)
        self._uploading.step(self.broker.now_s)

    def play(self, seconds: float = 3.0) -> list[ExecutorInput]:
        """What the coordinator has heard in this time."""
        self.heard.clear()
        until_s = self.broker.now_s + seconds
        while self.broker.now_s < until_s:
            self.step()
        return list(self.heard)

    def until_begun(self, ref: BlobRef) -> None:
        """Go on until part of a blob is here, and not all of it."""
        for _ in range(200):
            self.step()
            if self.executor._transfers.traffic_bytes("a", "up"):
                break
        assert self.executor._transfers.traffic_bytes("a", "up") < ref.size


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """The coordinator has said hello."""
    made = Site(tmp_path)
    assert made.play(0.2) == [None]
    return made


def test_an_update_has_arrived_when_its_last_blob_has(site):
    both = [site.has(FIRST), site.has(SECOND)]
    site.executor.fetch_blobs("a", both)
    assert site.play() == [UpdateReceived("a")]
    assert all(site.depot.has_blob(ref) for ref in both)
    assert site.play() == []


def test_an_update_whose_blobs_are_all_here_has_arrived_without_asking(site):
    ref = site.depot.store_bytes(FIRST)
    site.executor.fetch_blobs("a", [ref, ref])
    assert site.play() == [UpdateReceived("a")]
    assert not site.asked


def test_an_update_without_bundles_fetches_nothing_and_lets_go_of_the_one_before(site):
    ref = site.has(FIRST)
    site.executor.fetch_blobs("a", [ref])
    site.until_begun(ref)
    site.executor.fetch_blobs("a", [])
    assert site.play() == []
    assert not site.depot.has_blob(ref)


def test_one_blob_of_two_that_fails_ends_the_fetch_with_its_error_and_the_next_offer_brings_both(site):
    good, bad = site.has(FIRST), site.has(SECOND)
    site.given.remove(bad.sha256)
    site.executor.fetch_blobs("a", [good, bad])
    (told,) = site.play()
    assert isinstance(told, UpdateReceived)
    assert told.error is not None
    assert "cannot send the blob" in told.error
    assert site.play() == []
    site.given.add(bad.sha256)
    site.executor.fetch_blobs("a", [good, bad])
    assert site.play() == [UpdateReceived("a")]


def test_an_update_of_which_nothing_can_be_had_fails_once(site):
    both = [site.has(FIRST), site.has(SECOND)]
    site.given.clear()
    site.executor.fetch_blobs("a", both)
    (told,) = site.play()
    assert isinstance(told, UpdateReceived)
    assert told.error is not None


def test_what_had_come_for_an_update_that_is_wanted_no_more_is_not_taken_for_the_next(site):
    here, other = site.depot.store_bytes(FIRST), site.has(SECOND)
    site.executor.fetch_blobs("a", [here])
    site.executor.fetch_blobs("a", [other])
    assert site.play() == [UpdateReceived("a")]
    assert site.depot.has_blob(other)


def test_another_update_of_the_device_takes_the_place_of_the_one_that_is_fetched(site):
    first, second, shared = site.has(FIRST), site.has(SECOND), site.has(b"both have it")
    site.given.remove(first.sha256)
    site.executor.fetch_blobs("a", [first, shared])
    site.step()
    site.executor.fetch_blobs("a", [shared, second])
    assert site.play() == [UpdateReceived("a")]


def test_a_session_that_is_lost_while_fetching_is_told_and_the_fetch_goes_on(site):
    ref = site.has(FIRST)
    site.executor.fetch_blobs("a", [ref])
    site.until_begun(ref)
    site.link.lose()
    assert site.play(2.0) == []
    site.link.comes_back()
    assert site.play() == [None, UpdateReceived("a")]
    assert site.depot.has_blob(ref)
    again_bytes = site.executor._transfers.traffic_bytes("a", "up") - ref.size
    assert again_bytes < ref.size / 2


def test_a_task_that_is_taken_back_while_its_update_is_fetched_is_not_heard_of_again(site):
    ref = site.has(FIRST)
    site.executor.fetch_blobs("a", [ref])
    site.until_begun(ref)
    site.executor.cancel_task("a")
    site.executor.fetch_blobs("b", [site.depot.store_bytes(SECOND)])
    assert site.play() == [UpdateReceived("b")]


def test_a_hundred_requests_do_not_have_a_blob_hashed_a_hundred_times(site, monkeypatch):
    cut = []
    ref = site.depot.store_bytes(bytes(range(256)) * 200)

    class Counted(chunks.ManifestBuilder):
        def __init__(self, ref, chunk, read):
            super().__init__(ref, chunk, read)
            cut.append(chunk)

    monkeypatch.setattr(upload, "ManifestBuilder", Counted)
    monkeypatch.setattr(site.executor._transfers._sender, "_is_allowed", lambda device, sha256: True)
    site.link._link.max_payload = 1 << 18
    for device in ("a", "b"):
        for size in range(1024, 40_000, 390):
            get = wire.ChunkRequest(sha256=ref.sha256, chunk=size)
            site._own.publish(wire.Topics("f").device_topic(device, "up", "blob/get"), wire.encode(get))
    site.play(1.0)
    assert 3 <= len(cut) <= 8
    assert len(set(cut)) == len(cut)


@pytest.mark.parametrize(("hashed_s", "read"), [(0.0, True), (2.0, False)])
def test_what_is_hashed_for_a_device_to_no_use_is_taken_off_what_is_read_of_it(site, monkeypatch, hashed_s, read):
    topics = wire.Topics("f")
    monkeypatch.setattr(site.executor._transfers, "take_charges", lambda: {"a": hashed_s})
    site._own.publish(
        topics.device_topic("a", "up", "blob/get"), wire.encode(wire.ChunkRequest(sha256="0" * 64, chunk=1024))
    )
    site.play(0.2)
    said = wire.Progress(job="j", round=0, attempt=0, fraction=0.5)
    site._own.publish(topics.device_topic("a", "up", "progress"), wire.encode(said))
    assert (("a", said) in site.play(0.2)) == read


@pytest.mark.parametrize("end", ["done", "failed", "stopped"])
def test_a_broker_keeps_nothing_of_a_run_that_has_ended(site, end):
    watcher, topic = site.broker.connect(), wire.Topics("f").round_topic("digits-1")
    watcher.subscribe([topic])
    plan = SimpleNamespace(method="fedavg", rounds=3)
    seen = []
    for phase in ("open", end):
        rounds = JobState(JobConstants(0, 3, CohortSettings(), 0), phase=phase)
        site.executor.publish_state(cast("RunningJob", SimpleNamespace(id="digits-1", job=plan, job_state=rounds)))
        site.broker.now_s += 1.0
        site.broker.deliver_due()
        late = site.broker.connect()
        late.subscribe([topic])
        site.broker.now_s += 1.0
        site.broker.deliver_due()
        seen += [[one.payload for one in link.receive()] for link in (watcher, late)]
    assert [wire.decode(one, wire.RoundState).phase for one in seen[0] + seen[1] + seen[2][:1]] == ["open", "open", end]
    assert (seen[2][1:], seen[3]) == ([b""], [])


TASK = next(each for each in MESSAGES if isinstance(each, Task))


def test_the_next_repetition_is_that_of_the_earliest_open_task():
    issues, draw = TaskDispatcher(MemoryBroker().connect(), wire.Topics("f")), random.Random(0)
    for step in range(2000):
        now_s, device = float(step), f"d{draw.randrange(12)}"
        match draw.randrange(4):
            case 0:
                issues.send_task(device, TASK, b"x", now_s)
            case 1:
                issues.cancel_task(device)
            case 2:
                issues.slow_resends(device)
            case _:
                due = [name for name, issue in issues._open_tasks.items() if now_s >= issue.due_s]
                assert sorted(issues.take_due_devices(now_s)) == sorted(due)
        assert issues.next_repetition_s() == min(
            (issue.due_s for issue in issues._open_tasks.values()), default=math.inf
        )
    assert len(issues._due_times) < 200
