"""Blobs by the coordinator's own HTTP server: both ways, and over the broker for the rest."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from cutting import Canned, Relay
from streamed import Pair
from two_sides import TOPICS, Side, noise

from fedquilt import wire
from fedquilt.blobs import chunks, direct_transfers, http_client
from fedquilt.blobs.direct_transfers import TransferBackend, TransferResult
from fedquilt.blobs.download import BlobWriter, Download, WriterClosedError
from fedquilt.blobs.store import BlobStore
from fedquilt.core import BlobLocation, BlobRef, UploadProgress
from fedquilt.transport.memory_link import MemoryBroker

MB = 1_000_000
CHUNK = 256 * 1024


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, "a", "b")
    yield made
    made.close()


def move(pair: Pair, way: str, size: int) -> None:
    """Fetch a blob of so many bytes ("dn"), or put it ("up"), and find it whole on the other side."""
    board = pair.boards["a"]
    source, target = (pair.coordinator, board) if way == "dn" else (board, pair.coordinator)
    ref = source.depot.store_bytes(noise(size))
    target.transfers.request_blob("a", ref)
    pair.play(lambda: bool(target.errors))
    assert target.errors == {("a", ref.sha256): None}
    assert target.depot.load(ref.sha256) == noise(size)


@pytest.mark.parametrize("way", ["dn", "up"])
def test_a_blob_goes_by_http_and_no_chunk_goes_over_the_broker(pair, way):
    move(pair, way, 3 * MB)
    assert pair.broker.chunks == 0
    taker = pair.boards["a"] if way == "dn" else pair.coordinator
    assert taker.transfers.traffic_bytes("a", way) == 3 * MB


def test_for_a_small_blob_no_place_is_named(pair):
    ref, board = pair.coordinator.depot.store_bytes(noise(1000)), pair.boards["a"]
    board.transfers.request_blob("a", ref)
    pair.play(lambda: bool(board.errors))
    assert pair.broker.chunks == 1


# -- connections that break --


def relayed(pair: Pair, monkeypatch: pytest.MonkeyPatch, **given: Any) -> Relay:
    """A relay, by which boards reach the server from now on."""
    relay = Relay(urlsplit(pair.places.server_address).port or 0, **given)
    monkeypatch.setattr(pair.places, "_base", f"http://127.0.0.1:{relay.port}")
    pair.others.append(relay.close)
    return relay


def cut_once(relay: Relay, most: int) -> None:
    """The first connection is cut after so many bytes, and nobody gets through any more."""

    def cut(number: int) -> int:
        relay.closed = True
        return most

    relay.most = cut


@pytest.mark.parametrize("way", ["dn", "up"])
@pytest.mark.parametrize(
    "chunk", [pytest.param(n, marks=() if n in (0, 5, 11) else pytest.mark.nightly) for n in range(12)]
)
def test_a_blob_that_is_cut_in_any_chunk_goes_on_over_the_broker(pair, monkeypatch, chunk, way):
    relay = relayed(pair, monkeypatch)
    cut_once(relay, chunk * CHUNK + CHUNK // 2)
    move(pair, way, 12 * CHUNK)
    assert relay.connections == 1
    most = 12 - chunk if way == "dn" else 12  # what lay unread at the server is lost with the connection
    assert 12 - chunk <= pair.broker.chunks <= most


def test_an_upload_of_which_more_has_come_than_was_told_is_gone_on_with(pair, monkeypatch):
    relayed(pair, monkeypatch, most=lambda number: 10**9 if number else 2 * CHUNK)
    told, early = http_client.HttpClient._request_upload_offset, [0]
    monkeypatch.setattr(
        http_client.HttpClient, "_request_upload_offset", lambda *of: early.pop() if early else told(*of)
    )
    board = pair.boards["a"]
    ref = board.depot.store_bytes(noise(12 * CHUNK))
    pair.coordinator.transfers.request_blob("a", ref)
    pair.play(lambda: bool(pair.coordinator.errors))
    assert pair.coordinator.errors == {("a", ref.sha256): None}
    assert pair.broker.chunks == 0


def test_a_connection_that_breaks_before_a_byte_is_tried_again(pair, monkeypatch):
    relayed(pair, monkeypatch, most=lambda number: 10 if number == 0 else None)
    ref, board = pair.coordinator.depot.store_bytes(noise(4 * CHUNK)), pair.boards["a"]
    board.transfers.request_blob("a", ref)
    pair.play(lambda: bool(board.errors))
    assert board.errors == {("a", ref.sha256): None}
    assert pair.broker.chunks == 0


def test_bytes_that_are_changed_on_their_way_are_asked_for_again_alone(pair, monkeypatch):
    def change(offset, data):
        return data[:-1] + bytes([data[-1] ^ 1]) if offset <= 5 * CHUNK < offset + len(data) else data

    relayed(pair, monkeypatch, change=change)
    ref, board = pair.coordinator.depot.store_bytes(noise(12 * CHUNK)), pair.boards["a"]
    board.transfers.request_blob("a", ref)
    pair.play(lambda: bool(board.errors))
    assert board.depot.load(ref.sha256) == noise(12 * CHUNK)
    assert pair.broker.chunks == 1


def test_a_blob_that_comes_over_the_broker_goes_on_by_http_once_a_place_is_named(pair, monkeypatch):
    monkeypatch.setattr(pair.places, "download_locations", lambda device, ref: ())
    pair.broker.chunks_most = 5
    ref, board = pair.coordinator.depot.store_bytes(noise(12 * CHUNK)), pair.boards["a"]
    board.transfers.request_blob("a", ref)
    pair.play(lambda: board.transfers.traffic_bytes("a", "dn") == 5 * CHUNK)
    monkeypatch.undo()
    pair.coordinator.transfers._direct_transfers.offer_locations("a", ref)
    pair.play(lambda: bool(board.errors))
    assert board.depot.load(ref.sha256) == noise(12 * CHUNK)
    assert board.transfers.traffic_bytes("a", "dn") == 12 * CHUNK


def test_a_host_that_is_not_reached_rests(pair, monkeypatch):
    relay = relayed(pair, monkeypatch)
    relay.close()
    board = pair.boards["a"]
    first, second = (pair.coordinator.depot.store_bytes(noise(2 * CHUNK, seed)) for seed in (1, 2))
    board.transfers.request_blob("a", first)
    pair.play(lambda: bool(board.errors))
    fetched = []
    monkeypatch.setattr(TransferBackend, "start_download", lambda *given: fetched.append(given))
    board.transfers.request_blob("a", second)
    pair.play(lambda: len(board.errors) == 2)
    assert board.errors == {("a", first.sha256): None, ("a", second.sha256): None}
    assert fetched == []


def test_a_cancelled_download_writes_nothing_more(pair, monkeypatch):
    relay = relayed(pair, monkeypatch, most=lambda number: None)
    board, ref = pair.boards["a"], pair.coordinator.depot.store_bytes(noise(12 * CHUNK))
    board.transfers.request_blob("a", ref)
    pair.play(lambda: bool(board.transfers._direct_transfers._downloads))
    board.transfers.cancel("a", ref.sha256)
    board.depot.remove_blob(ref.sha256)
    board.transfers.request_blob("a", ref)
    pair.play(lambda: bool(board.errors))
    assert board.errors == {("a", ref.sha256): None}
    assert board.depot.load(ref.sha256) == noise(12 * CHUNK)
    assert relay.connections >= 1


# -- answers that are not what was asked for --
@pytest.mark.parametrize(
    "head",
    [
        "206 Partial Content\r\nContent-Length: {size}\r\nContent-Range: bytes 1-{size}/{size}",
        "206 Partial Content\r\nContent-Length: 99999999\r\nContent-Range: bytes 0-{last}/{size}",
        "206 Partial Content\r\nContent-Range: bytes 0-{last}/{size}",
        "200 OK\r\nTransfer-Encoding: chunked",
        "206 Partial Content\r\nContent-Length: {size}\r\nContent-Range: bytes 0-{last}/99999999",
        "403 Forbidden\r\nContent-Length: {size}",
        "302 Found\r\nLocation: http://127.0.0.1/\r\nContent-Length: {size}",
        "nonsense",
        "\x1b[2Jnonsense",
        "403 \x1b[2JForbidden\r\nContent-Length: {size}",
    ],
)
def test_an_answer_that_is_not_the_range_is_not_written(pair, monkeypatch, head, caplog):
    size = 4 * CHUNK
    lines = head.format(size=size, last=size - 1)
    server = Canned(f"HTTP/1.1 {lines}\r\n\r\n".encode() + b"evil" * CHUNK)
    monkeypatch.setattr(
        pair.places,
        "download_locations",
        lambda device, ref: (BlobLocation(url=f"http://127.0.0.1:{server.port}/x?secret=1"),),
    )
    written = []
    monkeypatch.setattr(BlobWriter, "write", lambda self, piece, turn: written.append(len(piece)))
    board, ref = pair.boards["a"], pair.coordinator.depot.store_bytes(noise(size))
    board.transfers.request_blob("a", ref)
    pair.play(lambda: bool(board.errors))
    assert board.errors == {("a", ref.sha256): None}
    assert len(server.asked) == 1
    assert written == []
    assert pair.broker.chunks == 4
    assert f"http://127.0.0.1:{server.port}" in caplog.text
    assert "secret" not in caplog.text
    assert "\x1b" not in caplog.text  # what a server writes is not for a terminal
    server.close()


def test_a_board_that_lies_about_its_chunks_does_not_get_another_blob_stored(pair, monkeypatch):
    board = pair.boards["a"]
    ref, other = board.depot.store_bytes(noise(2 * CHUNK, 1)), noise(2 * CHUNK, 2)
    (board.depot.folder / ref.sha256).write_bytes(other)
    digests = "".join(hashlib.sha256(other[at : at + CHUNK]).hexdigest() for at in (0, CHUNK))
    manifest = wire.BlobManifest(sha256=ref.sha256, size=ref.size, chunk=CHUNK, digests=digests)
    monkeypatch.setattr(board.transfers._sender, "_find_or_build_manifest", lambda *given: manifest)
    pair.coordinator.transfers.request_blob("a", ref)
    pair.play(lambda: bool(pair.coordinator.errors))
    assert "another sha256" in str(pair.coordinator.errors["a", ref.sha256])
    assert pair.coordinator.depot.find_ref(ref.sha256) is None


def test_a_board_that_says_nothing_of_what_it_was_to_put_is_asked_for_chunks(pair, monkeypatch):
    monkeypatch.setattr(direct_transfers, "UPLOAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(TransferBackend, "start_upload", lambda *given: None)
    board = pair.boards["a"]
    ref = board.depot.store_bytes(noise(4 * CHUNK))
    pair.coordinator.transfers.request_blob("a", ref)
    pair.play(lambda: bool(pair.coordinator.errors))
    assert pair.coordinator.errors == {("a", ref.sha256): None}
    assert pair.broker.chunks == 4


class Both(TransferBackend):
    """A coordinator with a store, from which nothing comes in this test, and a server of its own."""

    def upload_locations(self, device: str, intake: BlobWriter) -> tuple[BlobLocation, ...]:
        self.own = intake
        return (BlobLocation(url="http://store/"), BlobLocation(url="http://own/", token="t"))

    def uploaded_locations(self, device: str, ref: BlobRef, source: int) -> tuple[BlobLocation, ...]:
        return (BlobLocation(url="http://store/"),)

    def start_download(self, key: tuple[str, str], intake: BlobWriter, sources: Sequence[BlobLocation]) -> None:
        self.fetched = intake


def test_an_update_that_lies_in_the_store_is_not_put_into_the_own_server_meanwhile(tmp_path):
    depot, ways, payload = BlobStore(tmp_path), Both(), noise(4 * CHUNK)
    ref = BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))
    pull = Download(ref, CHUNK, 0.0)
    assert pull.handle_manifest(
        chunks.ManifestBuilder(ref, CHUNK, lambda at, size: payload[at : at + size]).hash_chunks(), 0.0
    )
    assert pull.manifest is not None
    depot.open_part(pull.manifest)
    moved = direct_transfers.DirectTransfers(ways, depot, lambda device, leaf, message: None)
    moved.start_download(("a", ref.sha256), pull, 0.0)
    turn = ways.own.replace_writer()
    ways.own.write(memoryview(payload[:1000]), turn)
    moved.handle_upload_progress(
        ("a", ref.sha256), UploadProgress(sha256=ref.sha256, uploaded_bytes=ref.size, complete=True), 1.0
    )
    moved.start_download(("a", ref.sha256), pull, 1.0)
    assert ways.fetched.next_range() == (0, ref.size)
    with pytest.raises(WriterClosedError, match="has replaced"):
        ways.own.write(memoryview(payload[1000:]), turn)


class Late(TransferBackend):
    """A coordinator with a store, into which a blob comes after a board has asked for it."""

    def __init__(self) -> None:
        super().__init__()
        self.came: list[tuple[str, str]] = []

    def download_locations(self, device: str, ref: BlobRef) -> tuple[BlobLocation, ...]:
        return (BlobLocation(url="http://store/"),)

    def take_ready_blobs(self) -> list[tuple[str, str]]:
        came, self.came = self.came, []
        return came


def test_a_blob_that_has_come_into_the_store_is_offered_at_once_also_if_nothing_else_is_moved(tmp_path):
    broker, ways = MemoryBroker(), Late()
    coordinator = Side(broker, tmp_path)
    coordinator.carry(ways)
    board = broker.connect()
    board.subscribe(TOPICS.device_filters("a"))
    ref = coordinator.depot.store_bytes(noise(2 * CHUNK))
    ways.came.append(("a", ref.sha256))
    coordinator.link.connected = False
    coordinator.transfers.step(0.0)
    assert ways.came
    coordinator.link.connected = True
    coordinator.transfers.step(0.0)
    broker.now_s = 1.0
    broker.deliver_due()
    assert [message.topic for message in board.receive()] == [TOPICS.blob_topic("a", "dn", ref.sha256, "place")]


def test_what_a_board_has_put_into_the_own_server_is_not_looked_for_in_the_store(pair):
    pair.places._backend = Store()
    payload = noise(2 * CHUNK)
    ref = BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))
    manifest = chunks.ManifestBuilder(ref, CHUNK, lambda at, size: payload[at : at + size]).hash_chunks()
    sources = pair.places.upload_locations("a", BlobWriter(pair.coordinator.depot, manifest, bytes(2)))
    assert [bool(source.token) for source in sources] == [False, True]
    assert pair.places.uploaded_locations("a", ref, 0) == sources[:1]
    assert pair.places.uploaded_locations("a", ref, 1) == ()
    assert len(pair.places._server._grants) == 1
    pair.places.close_locations(("a", ref.sha256))
    assert not pair.places._server._grants  # nobody puts anything any more, and nothing is kept of the upload


class Store:
    """An object store that nothing is asked of."""

    def upload_locations(self, device: str, ref: BlobRef) -> tuple[BlobLocation, ...]:
        return (BlobLocation(url="http://store/"),)

    def delete_upload(self, key: tuple[str, str]) -> None:
        pass

    uploaded_locations = upload_locations


def test_transfers_that_find_no_thread_free_wait_their_turn(monkeypatch):
    ways, begun = TransferBackend(max_transfers=2), list[Callable[[], None]]()

    class Thread:
        def __init__(self, target, **named):
            self.start = lambda: begun.append(target)

    monkeypatch.setattr(direct_transfers.threading, "Thread", Thread)
    ends = [TransferResult(("a", str(number)), None, None) for number in range(5)]
    for end in ends:
        ways.start_job(partial(lambda end: end, end), end._replace(error="failed"))
    found = []
    for number in range(5):
        assert len(begun) == min(2 + number, 5)
        assert ways.has_free_thread == (number == 4)
        begun[number]()
        found += ways.take_results()
    assert found == ends


def test_a_board_that_puts_for_too_long_makes_way_for_one_that_waits(tmp_path, monkeypatch):
    pair = Pair(tmp_path, "x", "y", "z")
    refs = {
        name: board.depot.store_bytes(noise(MB, number)) for number, (name, board) in enumerate(pair.boards.items())
    }
    coordinator = pair.coordinator.transfers
    for name, ref in refs.items():
        coordinator.request_blob(name, ref, use_queue=True)
        if name != "z":
            monkeypatch.setattr(
                pair.boards[name].transfers._direct_transfers, "queue_upload", lambda key, ref, place: None
            )
    pulls = coordinator._downloads
    pair.play(lambda: sum(pull.is_paused for pull in pulls.values()) == 2)
    coordinator.yield_turn("x", pair.broker.now_s)
    pair.play(lambda: not pulls["x", refs["x"].sha256].is_paused)
    assert coordinator.queue
    coordinator.yield_turn("x", pair.broker.now_s)
    assert not coordinator.queue.is_sending("x")
    pair.play(lambda: bool(pair.coordinator.errors))
    assert pair.coordinator.errors == {("z", refs["z"].sha256): None}
    pair.close()
