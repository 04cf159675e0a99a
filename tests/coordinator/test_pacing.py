"""Large updates come in turn."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from by_hand import MODEL, Hand, SlowWorker, Stage
from msgspec.structs import replace
from streamed import Pair
from two_sides import noise

from fedquilt import wire
from fedquilt.arrays.disk_arrays import ScratchFile
from fedquilt.coordinator.background_worker import BackgroundWorker
from fedquilt.coordinator.delivery.monitoring_executor import DeviceStatusTracker, MonitoringExecutor
from fedquilt.coordinator.rounds.events import (
    JobEnded,
    JobStarted,
    RoundClosed,
    RoundCommitted,
    UpdateAccepted,
    UpdateLost,
    UpdatesAggregated,
)
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.settings import CoordinatorLimits
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.updates import aggregation, job_blobs
from fedquilt.coordinator.views import devices, round_outcomes

NORMED = {
    **MODEL,
    "2.running_mean": np.zeros(2, np.float32),
    "2.running_var": np.ones(2, np.float32),
    "2.num_batches_tracked": np.array(0),
}  # of a batch norm: what it has seen, and a number without axes
TIGHT = CoordinatorLimits(waiting_mb=0)  # two updates at a time
COHORT = {"start_devices": 6, "quorum": 0.5, "deadline_s": 20.0}


@pytest.fixture(autouse=True)
def laid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of any size lie on the disk."""
    monkeypatch.setattr(aggregation, "ScratchFile", partial(ScratchFile, min_entries=1))
    for module in (job_blobs, aggregation):
        monkeypatch.setattr(module, "WHOLE_BYTES", 0)


class Paced(Stage):
    """Six boards, whose updates have to be folded by the test."""

    worker: SlowWorker

    def __init__(self, folder: Path, limits: CoordinatorLimits = TIGHT, names: str = "abcdef", **table: Any) -> None:
        super().__init__(folder, limits, SlowWorker(), NORMED, **{"cohort": COHORT, **table})
        self.by_name = {name: self.hand(name) for name in names}
        self.play()
        self.worker.run_pending()  # what they are sent is stored
        self.play()
        assert all(hand.tasks for hand in self.hands)

    def answer(self, names: str) -> None:
        """These boards offer their updates, each a different one."""
        for name in names:
            self.by_name[name].answer(moved(name))
            self.play(0.1)

    def die(self, name: str) -> None:
        """A board hears and says nothing any more."""
        self.hands.remove(self.by_name[name])

    @property
    def here(self) -> set[str]:
        """Boards whose update is on the disk, or in part."""
        found = {path.name.split(".")[0] for path in self.store.blob_store.folder.rglob("*")}
        return {name for name, hand in self.by_name.items() if found & {path.name for path in files(hand)}}

    def work(self, seconds: float = 60.0, most: int = 2) -> None:
        """Let the worker do a piece twice a second, until nothing is left to do; never more is here than may be."""
        until_s = self.broker.now_s + seconds
        while self.broker.now_s < until_s:
            if self.worker.begun:
                self.worker.run_pending()
            self.play(0.5)
            assert len(self.unfolded) <= most

    @property
    def unfolded(self) -> set[str]:
        folded = self.told(UpdatesAggregated)[-1].devices if self.told(UpdatesAggregated) else ()
        return self.here - set(folded)

    @property
    def answered(self) -> list[str]:
        return [fact.update.device for fact in self.told(UpdateAccepted)]

    @property
    def states(self) -> list[str]:
        return [fact.state.sha256 for fact in self.told(RoundCommitted)]


def files(hand: Hand) -> list[Path]:
    return [path for path in hand.depot.folder.iterdir() if len(path.name) == 64]


def moved(name: str) -> dict[str, np.ndarray]:
    """An update of a board: all numbers are others than those of any other board."""
    by = 1.0 + 0.1 * ord(name)
    return {key: (array + by).astype(array.dtype) for key, array in NORMED.items()}


def calm(folder: Path, names: Sequence[str]) -> list[str]:
    """States that the updates of these boards come to, in a coordinator that folds in its loop."""
    stage = Stage(folder, model=NORMED, cohort={**COHORT, "start_devices": len(names)})
    hands = {name: stage.hand(name) for name in names}
    stage.play()
    for name in names:
        hands[name].answer(moved(name))
    stage.play()
    return [fact.state.sha256 for fact in stage.told(RoundCommitted)]


def test_no_more_comes_than_may_be_here_and_who_offers_first_is_first(tmp_path):
    stage = Paced(tmp_path / "paced")
    stage.answer("fbdaec")
    stage.play(5.0)
    assert stage.here == {"f", "b"}
    stage.work(15.0)
    assert stage.answered == list("fbdaec")
    assert stage.states == calm(tmp_path / "calm", "abcdef")


def test_who_waits_is_asked_for_nothing_and_offers_again_without_losing_its_place(tmp_path):
    stage = Paced(tmp_path)
    stage.answer("abc")
    update = stage.by_name["d"].answer(moved("d"))
    for _ in range(3):
        stage.play()
        stage.by_name["c"].answer(moved("c"))
        stage.by_name["d"].say("update", update)
        stage.by_name["d"].say("presence", wire.Presence(online=True, boot="1"), retain=True)
    stage.play()
    assert stage.here == {"a", "b"}
    assert [stage.by_name[name].transfers.traffic_bytes(name, "up") for name in "cd"] == [0, 0]
    stage.work(10.0)
    assert stage.answered == list("abcd")


def test_a_board_that_dies_in_its_turn_and_one_that_waits_hold_up_nobody(tmp_path):
    stage = Paced(tmp_path / "paced")
    stage.by_name["a"].answer(moved("a"))
    stage.die("a")
    stage.answer("bcdef")
    stage.die("d")
    stage.work(16.0)
    assert stage.answered == list("bcef")
    assert not stage.told(RoundClosed)
    stage.work(8.0)
    assert stage.broker.now_s < 30.0
    assert stage.states == calm(tmp_path / "calm", "bcef")


def test_a_board_that_is_held_back_at_the_deadline_is_not_late(tmp_path):
    stage = Paced(tmp_path / "paced")
    stage.answer("abcdef")
    stage.play(24.0)
    assert stage.broker.now_s > 25.0
    assert stage.here == {"a", "b"}
    assert not stage.told(RoundClosed)
    stage.work(20.0)
    assert stage.answered == list("abcdef")
    assert stage.states == calm(tmp_path / "calm", "abcdef")


def test_a_sites_round_ends_in_time_for_the_round_above_whoever_is_held_back(tmp_path):
    stage = Paced(tmp_path)
    (job,) = stage.server.active_jobs()
    assert job.job_state.state is not None
    job.job_state = replace(
        job.job_state, parent_order=JobStarted(job.job_state.state, actions=("work",), deadline_s=20.0)
    )
    stage.answer("abcdef")
    while len(stage.answered) < 3:
        stage.work(0.5)
    stage.play(job.job_state.opened_s + 20.5 - stage.broker.now_s)
    assert not stage.told(RoundClosed)
    stage.play(1.0)
    assert stage.told(RoundClosed)
    stage.work(10.0, most=6)
    assert len(stage.states) == 1
    assert stage.answered == list("abc")


def test_an_offer_after_the_deadline_does_not_keep_a_round_open(tmp_path):
    stage = Paced(tmp_path)
    stage.answer("abcd")
    stage.play(20.0)
    assert not stage.told(RoundClosed)
    stage.answer("e")
    while "d" not in stage.answered:
        assert not stage.told(RoundClosed)
        stage.work(0.5)
    assert stage.told(RoundClosed)
    assert stage.answered == list("abcd")


def test_a_board_that_dies_while_it_is_held_back_does_not_keep_a_round_open(tmp_path):
    stage = Paced(tmp_path)
    stage.answer("abcde")
    stage.die("e")
    stage.play(22.0)
    stage.work(14.0)
    assert stage.answered == list("abcd")
    assert not stage.told(RoundClosed)
    until_s = stage.broker.now_s + 15.0
    stage.work(15.0)
    assert [fact.round for fact in stage.told(RoundClosed)] == [0]
    assert stage.broker.now_s <= until_s + 1.0
    assert stage.steps[-1][1] > stage.steps[-1][0]


def test_a_loop_that_waits_past_the_deadline_does_not_spin(tmp_path):
    stage = Paced(tmp_path)
    stage.answer("abcd")
    stage.play(24.0)
    assert all(due_s > now_s for now_s, due_s, _ in stage.steps[-20:])


@pytest.mark.parametrize("pieces", range(9))
def test_a_coordinator_that_is_killed_while_boards_wait_comes_to_the_same_bits(tmp_path, pieces):
    stage = Paced(tmp_path / "paced")
    stage.answer("fbdaec")
    for _ in range(pieces):
        stage.play(0.5)
        stage.worker.run_pending()
    stage.play(0.3)
    stage.worker = SlowWorker()
    stage.restart()
    stage.play()
    if stage.worker.begun:  # it is stored again
        stage.worker.run_pending()
    stage.play()
    counted = set(stage.answered)
    stage.answer("".join(name for name in "fbdaec" if name not in counted))
    stage.work(15.0)
    assert sorted(stage.answered) == list("abcdef")
    assert not stage.told(UpdateLost)
    assert stage.states == calm(tmp_path / "calm", "abcdef")
    assert {fact.status for fact in stage.told(JobEnded)} == {"done"}


def test_a_method_that_needs_all_updates_until_the_end_is_not_stopped_by_them(tmp_path):
    stage = Paced(tmp_path, method="robust")
    stage.answer("fbdaec")
    stage.work(20.0, most=6)
    assert stage.answered == list("fbdaec")
    assert len(stage.states) == 1


def test_a_round_that_needs_no_more_lets_go_of_those_who_wait(tmp_path):
    stage = Paced(tmp_path, rounds=2, cohort={**COHORT, "size": 2, "over_select": 2.0})
    stage.answer("abcdef")
    stage.work(3.0)
    assert stage.answered == list("ab")
    assert len(stage.states) == 1
    assert not stage.executor._transfers.queue
    assert sum(hand.transfers.traffic_bytes(name, "up") for name, hand in stage.by_name.items() if name in "ef") == 0


def test_boards_that_send_for_too_long_make_way_for_those_who_wait_in_time(tmp_path):
    stage = Paced(tmp_path / "paced")
    slow = {stage.by_name[name]: stage.by_name[name].answer(moved(name)).bundles["model"] for name in "ab"}
    for name in "ab":
        stage.die(name)
    stage.answer("cdef")
    while not stage.answered:
        assert stage.broker.now_s < 25.0
        for hand, ref in slow.items():
            hand.say(f"blob/{ref.sha256}/manifest", wire.BlobManifest(ref.sha256, ref.size, wire.MAX_CHUNK, ref.sha256))
        stage.work(0.5)
    assert stage.broker.now_s > 20.0
    stage.work(40.0)
    assert stage.answered == list("cdef")
    assert [fact.round for fact in stage.told(RoundClosed)] == [0]
    assert stage.states == calm(tmp_path / "calm", "cdef")


class Noted(Paced):
    """What boards do is noted, as `fedquilt serve` does."""

    def start(self) -> None:
        assert self.store.acquire_lock()
        self.link = self.broker.connect()
        noted = DeviceStatusTracker(self.store.home)
        self.executor = MonitoringExecutor(self.link, "f", self.store.blob_store, self.store.begin_epoch(), noted)
        self.server = Server(self.executor, self.store, self.observe, limits=self.limits, worker=self.worker)

    def told_of(self, device: str) -> str:
        return round_outcomes.format_outcomes(round_outcomes.load_outcomes(self.store, self.job), 1, device)[0]


def test_why_and_devices_say_who_waits_for_its_turn_and_for_how_many(tmp_path, monkeypatch):
    stage = Noted(tmp_path)
    stage.answer("abcd")
    stage.by_name["c"].answer(moved("c"))
    stage.play(2.0)
    states = {each.board.device: each.state for each in devices.load_devices(stage.store.home)}
    assert states == {"a": "sending", "b": "sending", "c": "waiting", "d": "waiting", "e": "asked", "f": "asked"}
    assert "waits for its transfer: 2 others are in transfer or being validated" in stage.told_of("c")
    assert stage.told_of("a") == stage.told_of("e") == "round 1: selected"
    with monkeypatch.context() as patch:
        patch.setattr(Store, "is_served", lambda store: False)
        assert stage.told_of("c") == "round 1: selected"
    stage.work(10.0)
    assert stage.told_of("c") == "round 1: update received"


pytest.importorskip("torch")


class Watched(Server):
    """A coordinator that folds beside its loop, and two of whose boards send at a time."""

    most_here = 0  # updates at once that were sent or not folded
    waited = False

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, worker=BackgroundWorker(large_bytes=0), limits=CoordinatorLimits(waiting_mb=0), **more)

    def step(self, now_s: float) -> float:
        due_s = super().step(now_s)
        queue = self._executor._transfers.queue
        Watched.waited = Watched.waited or bool(queue)
        Watched.most_here = max(Watched.most_here, queue._unprocessed_devices + len(queue._uploading))
        return due_s


MB = 1_000_000


def test_a_board_that_waits_for_its_turn_is_named_no_place(tmp_path, monkeypatch):
    pair = Pair(tmp_path, "x", "y", "z")
    named = []
    accepts = pair.places.upload_locations

    def noted(device, intake):
        named.append(device)
        return accepts(device, intake)

    monkeypatch.setattr(pair.places, "upload_locations", noted)
    coordinator = pair.coordinator.transfers
    for number, (name, board) in enumerate(pair.boards.items()):
        coordinator.request_blob(name, board.depot.store_bytes(noise(MB, number)), use_queue=True)
    pair.play(lambda: len(pair.coordinator.errors) == 2)
    assert sorted(named) == ["x", "y"]
    coordinator.queue.set_unprocessed(2, 2 * MB, 0.0)
    coordinator.step(pair.broker.now_s)
    assert coordinator.queue
    coordinator.queue.set_unprocessed(1, MB, 0.0)
    pair.play(lambda: len(pair.coordinator.errors) == 3)
    assert set(pair.coordinator.errors.values()) == {None}
    assert (named[2:], pair.broker.chunks) == (["z"], 0)
    pair.close()
