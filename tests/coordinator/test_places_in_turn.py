"""Large blobs that boards put in turn into the coordinator's own HTTP server."""

from streamed import Pair
from two_sides import noise

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
        coordinator.request_blob(name, board.depot.store_bytes(noise(MB, number)), in_turn=True)
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


def test_a_board_that_puts_for_too_long_makes_way_for_one_that_waits(tmp_path, monkeypatch):
    pair = Pair(tmp_path, "x", "y", "z")
    refs = {
        name: board.depot.store_bytes(noise(MB, number)) for number, (name, board) in enumerate(pair.boards.items())
    }
    coordinator = pair.coordinator.transfers
    for name, ref in refs.items():
        coordinator.request_blob(name, ref, in_turn=True)
        if name != "z":
            monkeypatch.setattr(pair.boards[name].transfers._streaming, "queue_upload", lambda key, ref, place: None)
    pulls = coordinator._pulls
    pair.play(lambda: sum(pull.held for pull in pulls.values()) == 2)
    coordinator.yield_turn("x", pair.broker.now_s)
    pair.play(lambda: not pulls["x", refs["x"].sha256].held)
    assert coordinator.queue
    coordinator.yield_turn("x", pair.broker.now_s)
    assert not coordinator.queue.is_sending("x")
    pair.play(lambda: bool(pair.coordinator.errors))
    assert pair.coordinator.errors == {("z", refs["z"].sha256): None}
    pair.close()
