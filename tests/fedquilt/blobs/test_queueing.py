"""Turns of devices whose blobs take room: first come, first served, within a number of bytes."""

import math

import pytest
from two_sides import Side, noise, play, ref_of

from fedquilt.blobs.upload import UploadQueue
from fedquilt.transport.memory_link import MemoryBroker

SIZE = 300_000


def queue(most_bytes: float = 0.0, *devices: str, size: int = 10) -> UploadQueue:
    made = UploadQueue()
    made.set_unprocessed(0, 0, most_bytes)
    for device in devices:
        made.add_blob(device, f"{device}'s", size)
    return made


class Paced(Side):
    def step(self, now_s: float) -> float:
        super().step(now_s)
        self.transfers.queue.set_unprocessed(0, 0, 0.0)
        return self.transfers.step(now_s)


def test_as_many_send_as_their_bytes_allow_and_two_at_least():
    assert queue(35.0, *"abcd").start_turns(0.0) == ["a", "b", "c"]
    assert queue(0.0, *"abcd").start_turns(0.0) == ["a", "b"]


@pytest.mark.parametrize(("here", "begun"), [(0, "ab"), (1, "a"), (2, "")])
def test_what_is_here_and_waits_takes_the_place_of_what_is_sent(here, begun):
    made = queue(0.0, *"abc")
    made.set_unprocessed(here, 10 * here, 0.0)
    assert made.start_turns(0.0) == list(begun)


def test_a_turn_lasts_until_all_has_come_and_that_is_counted_elsewhere():
    made = queue(0.0, *"abc")
    made.add_blob("a", "another of a's", 10)
    assert made.start_turns(0.0) == ["a", "b"]
    made.remove_blob("a", "a's")
    made.set_unprocessed(0, 0, 0.0)
    assert made.start_turns(1.0) == []
    made.remove_blob("a", "another of a's")
    assert made.start_turns(2.0) == []
    made.set_unprocessed(1, 20, 0.0)
    assert made.start_turns(3.0) == []
    made.set_unprocessed(0, 0, 0.0)
    assert made.start_turns(4.0) == ["c"]


def test_a_device_that_has_its_turn_sends_a_further_blob_in_it():
    made = queue(25.0, *"ab")
    assert made.start_turns(0.0) == ["a", "b"]
    assert made.add_blob("a", "another of a's", 10)
    assert not made.add_blob("c", "c's", 1)
    assert made.start_turns(0.0) == []


def test_a_device_that_begins_another_blob_in_its_turn_takes_no_more_room_than_that():
    made = queue(20.0, "a")
    assert made.start_turns(0.0) == ["a"]
    for name in "xyz":
        made.remove_blob("a", next(iter(made.pending_blobs("a"))))
        assert made.add_blob("a", name, 10)
        made.set_unprocessed(0, 0, 30.0)
    for device in "bc":
        made.add_blob(device, f"{device}'s", 10)
    assert made.start_turns(0.0) == ["b", "c"]


def test_who_stalls_waits_behind_all_others_and_has_waited_once():
    made = queue(0.0, *"abcd")
    made.start_turns(10.0)
    made.move_to_end("a", 12.0)
    assert made.start_turns(12.0) == ["c"]
    assert made.waiting_s("c") == 2.0
    made.remove_blob("b", "b's")
    made.remove_blob("c", "c's")
    made.set_unprocessed(0, 0, 0.0)
    assert made.start_turns(20.0) == ["d", "a"]
    assert (made.waiting_s("a"), made.waiting_s("d")) == (0.0, 10.0)


def test_how_long_a_device_is_held_back_is_known_until_what_it_sent_is_looked_at():
    made = queue(0.0, *"abc")
    made.start_turns(5.0)
    assert (made.waiting_s("a"), made.waiting_s("c"), made.waiting_s("nobody")) == (0.0, math.inf, 0.0)
    made.remove_blob("a", "a's")
    made.set_unprocessed(0, 0, 0.0)
    made.start_turns(8.0)
    made.remove_blob("c", "c's")
    assert made.waiting_s("c") == 3.0
    made.set_unprocessed(0, 0, 0.0)
    assert made.waiting_s("c") == 0.0


def test_what_has_changed_for_a_device_is_news_once():
    made = queue(0.0, *"abcd")
    made.start_turns(0.0)
    made.remove_blob("d", "d's")
    assert made.take_changes() == {"c": True}
    assert made.take_changes() == {}
    made.move_to_end("a", 1.0)
    made.start_turns(1.0)
    assert made.take_changes() == {"a": True, "c": False}


def test_those_who_are_gone_do_not_keep_others_waiting_for_their_turn(tmp_path):
    broker = MemoryBroker()
    coordinator, agent = Paced(broker, tmp_path / "here"), Side(broker, tmp_path / "a", "alive")
    for number in range(8):
        coordinator.transfers.request_blob(f"dead{number // 2}", ref_of(bytes([number])), use_queue=True)
    ref = agent.depot.store_bytes(noise(2_000_000))
    coordinator.transfers.request_blob("alive", ref, use_queue=True)
    play(broker, coordinator, agent, until=lambda: bool(coordinator.errors))
    assert coordinator.errors == {("alive", ref.sha256): None}
    assert broker.now_s < 10.0
    play(broker, coordinator, agent, until=lambda: len(coordinator.errors) == 9)
    assert coordinator.errors["dead3", ref_of(bytes([7])).sha256] == "nothing arrived for 300 s"


def test_a_device_that_is_not_wanted_any_more_leaves_the_queue(tmp_path):
    broker = MemoryBroker()
    coordinator = Paced(broker, tmp_path / "here")
    refs = [ref_of(bytes([number])) for number in range(4)]
    for number, ref in enumerate(refs):
        coordinator.transfers.request_blob(f"d{number}", ref, use_queue=True)
    coordinator.step(0.0)
    assert list(coordinator.transfers._active_downloads) == [("d0", refs[0].sha256), ("d1", refs[1].sha256)]
    coordinator.transfers.cancel("d2", refs[2].sha256)
    coordinator.transfers.cancel("d0", refs[0].sha256)
    coordinator.step(0.1)
    assert list(coordinator.transfers._active_downloads) == [("d1", refs[1].sha256), ("d3", refs[3].sha256)]
    assert not coordinator.transfers._keys_in_queue
