"""The HTTP server of blobs."""

import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from blob_site import CHUNK, PAYLOAD, Site, answer_of
from certified import Certified
from cutting import Relay
from streamed import Pair
from two_sides import noise
from waiting import wait_until

from fedquilt.blobs import http_client
from fedquilt.blobs.download import BlobWriter, WriterClosedError
from fedquilt.blobs.store import BlobStore
from fedquilt.coordinator.delivery import blob_server
from fedquilt.coordinator.delivery.blob_server import MAX_DEVICE_CONNECTIONS, BlobLocationSettings, BlobServer
from fedquilt.core import BlobLocation, JobError
from fedquilt.security.handshake import LinkIdentity


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.server.close()


# -- fetching --
@pytest.mark.parametrize(
    ("asked", "status", "body"),
    [
        ("", 200, PAYLOAD),
        ("\nRange: bytes=0-", 206, PAYLOAD),
        ("\nRange: bytes=10-19", 206, PAYLOAD[10:20]),
        (f"\nRange: bytes={len(PAYLOAD) - 1}-99999999", 206, PAYLOAD[-1:]),
        (f"\nRange: bytes={len(PAYLOAD)}-", 416, None),
        ("\nRange: bytes=20-10", 416, None),
        ("\nRange: bytes=-5", 416, None),
        ("\nRange: bytes=0-1,5-6", 416, None),
        ("\nRange: lines=1-2", 416, None),
    ],
)
def test_a_range_of_bytes_is_what_was_asked_for_or_refused(site, asked, status, body):
    found = site.get(more=asked)
    assert found[0] == status
    assert body is None or found[1] == body


def test_a_token_opens_its_blob_for_its_device_and_its_way_alone(site):
    other = site.depot.store_bytes(b"another's")
    _, upload = site.upload()
    site.server.issue_token("b", other)
    assert site.get(token="")[0] == 403
    assert site.get(token="x" * 32)[0] == 403
    assert site.get(sha256=other.sha256)[0] == 403
    assert site.get(token=upload)[0] == 403
    assert site.put(site.token, site.ref, f"0-{len(PAYLOAD) - 1}/{len(PAYLOAD)}", len(PAYLOAD), PAYLOAD) == 403
    assert site.get()[0] == 200


def test_a_blob_whose_task_was_withdrawn_is_not_given_any_more(site):
    site.refused.add(("a", site.ref.sha256))
    assert site.get()[0] == 403
    site.refused.clear()
    site.server.revoke_token("a", site.ref.sha256, put=False)
    assert site.get()[0] == 403


def test_a_blob_goes_over_the_wire_a_few_times_for_one_token(site):
    found = [site.get()[0] for _ in range(6)]
    assert found == [200] * blob_server.MAX_TRANSFERS_PER_GRANT + [429] * 2


def test_an_empty_blob_is_given_as_often_as_any(site):
    empty = site.depot.store_bytes(b"")
    token = site.server.issue_token("a", empty)
    found = [site.get(token, empty.sha256) for _ in range(6)]
    assert [status for status, _ in found] == [200] * blob_server.MAX_TRANSFERS_PER_GRANT + [429] * 2
    assert found[0][1] == b""
    site.server.issue_token("a", empty)
    assert site.get(token, empty.sha256) == (200, b"")


@pytest.mark.parametrize(
    "request_",
    [
        "GET / HTTP/1.1\nHost: x",
        "GET /blobs/../../etc/passwd HTTP/1.1\nHost: x",
        "POST /blobs/{sha256} HTTP/1.1\nHost: x",
        "nonsense",
        "GET /blobs/{sha256} HTTP/1.1\nHost: x\nHost: y",
        "GET /blobs/{sha256} HTTP/1.1\nno header",
        "GET /blobs/{sha256} HTTP/1.1\nHost: x\nX: {long}",
    ],
)
def test_a_request_that_is_none_is_refused(site, request_):
    filled = request_.format(sha256=site.ref.sha256, long="x" * 10_000)
    assert site.ask(filled)[0] in (400, 403, 404, 431)
    assert site.get()[0] == 200


# -- putting --


def test_an_upload_is_taken_and_gone_on_with_from_where_it_stands(site):
    payload = noise(4 * CHUNK, 7)
    intake, token = site.upload(payload)
    ref, size = intake.ref, len(payload)
    with socket.create_connection(("127.0.0.1", site.server.port), timeout=30) as sock:
        head = f"PUT /blobs/{ref.sha256} HTTP/1.1\r\nAuthorization: Bearer {token}\r\nContent-Length: {size}\r\n"
        sock.sendall(f"{head}Content-Range: bytes 0-{size - 1}/{size}\r\n\r\n".encode() + payload[:100_000])
    wait_until(lambda: intake.written_bytes == 100_000, "what has come is written")
    status, headers, _ = site.ask(f"HEAD /blobs/{ref.sha256} HTTP/1.1\nAuthorization: Bearer {token}")
    assert (status, headers["Upload-Offset"]) == (204, "100000")
    assert site.put(token, ref, f"100000-{size - 1}/{size}", size - 100_000, payload[100_000:]) == 204
    assert site.depot.load(ref.sha256) == payload
    assert [(each.key, each.error) for each in site.ended] == [(("a", ref.sha256), None)]


def put_by_relay(site: Site, intake: BlobWriter, token: str, relay: Relay, folder: Path, payload: bytes) -> list[int]:
    """Put a blob as a board does; returns the bytes of the pieces that have gone."""
    board, moved = BlobStore(folder / "board"), list[int]()
    ref = board.store_bytes(payload)
    source = BlobLocation(url=f"http://127.0.0.1:{relay.port}/blobs/{ref.sha256}", token=token)
    file = board.open_blob_file(ref.sha256)
    try:
        assert http_client.HttpClient().upload_blob((source,), file, ref, moved.append) == 0
    finally:
        os.close(file)
        relay.close()
    assert site.depot.load(ref.sha256) == payload
    assert [(each.key, each.error) for each in site.ended] == [(("a", ref.sha256), None)]
    return moved


def test_an_upload_whose_reply_is_lost_has_ended_well(site, tmp_path):
    payload, lost = noise(4 * CHUNK, 7), [1]
    intake, token = site.upload(payload)
    relay = Relay(site.server.port, change=lambda offset, data: b"" if lost and lost.pop() else data)
    assert sum(put_by_relay(site, intake, token, relay, tmp_path, payload)) == len(payload)
    assert lost == []


def test_an_upload_that_was_left_after_its_last_byte_is_ended_by_who_asks_where_it_stands(site, tmp_path):
    payload = noise(4 * CHUNK, 7)
    intake, token = site.upload(payload)
    intake.write(memoryview(payload), intake.replace_writer())
    put_by_relay(site, intake, token, Relay(site.server.port), tmp_path, payload)


@pytest.mark.parametrize(
    ("range_", "length"),
    [
        ("0-{last}/{size}", 5),
        ("0-{last}/{size}", 10**12),
        ("0-{size}/{more}", None),
        ("1-{last}/{size}", None),
        ("5-2/{size}", 3),
        ("*/{size}", 3),
    ],
)
def test_an_upload_of_other_bytes_than_are_due_is_refused_before_any_is_written(site, range_, length):
    intake, token = site.upload()
    size = intake.ref.size
    named = range_.format(size=size, last=size - 1, more=size + 1)
    assert site.put(token, intake.ref, named, size if length is None else length, b"x" * 1000) in (409, 411)
    assert intake.written_bytes == 0
    assert site.depot.disk.data_ranges(site.depot._part_path(intake.ref.sha256)) == []


def test_an_upload_of_other_content_is_refused_and_what_is_right_of_it_stays(site):
    payload = noise(4 * CHUNK, 7)
    intake, token = site.upload(payload)
    wrong = payload[: 2 * CHUNK] + bytes([payload[2 * CHUNK] ^ 1]) + payload[2 * CHUNK + 1 :]
    assert site.put(token, intake.ref, f"0-{len(wrong) - 1}/{len(wrong)}", len(wrong), wrong) == 409
    (ended,) = site.ended
    assert "1 of 4 chunks" in str(ended.error)
    assert list(intake.stored_chunks) == [1, 1, 0, 1]
    assert not site.depot.has_blob(intake.ref)
    assert site.ask(f"HEAD /blobs/{intake.ref.sha256} HTTP/1.1\nAuthorization: Bearer {token}")[0] == 409


def test_an_upload_that_goes_another_way_meanwhile_is_not_written(site):
    intake, token = site.upload()
    intake.close()
    size = intake.ref.size
    assert site.put(token, intake.ref, f"0-{size - 1}/{size}", size, noise(4 * CHUNK, 7)) == 409
    assert site.ended == []


# -- certificates --


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Certified:
    return Certified(tmp_path_factory.mktemp("fleet"))


def identity(site: Certified, name: str, kind: str = "device") -> LinkIdentity:
    return LinkIdentity(site.broker(name, kind))


def test_an_upload_stands_where_its_board_was_told_that_it_stands(site):
    intake, token = site.upload()
    turn = intake.replace_writer()
    head = f"HEAD /blobs/{intake.ref.sha256} HTTP/1.1\nHost: x\nAuthorization: Bearer {token}"
    assert site.ask(head)[1]["Upload-Offset"] == "0"
    with pytest.raises(WriterClosedError):
        intake.write(memoryview(b"late"), turn)


def test_with_certificates_blobs_go_by_https(tmp_path, fleet):
    own = identity(fleet, "coordinator", "coordinator")
    pair = Pair(tmp_path, "a", own=own, boards=lambda device: identity(fleet, device))
    board = pair.boards["a"]
    down, up = pair.coordinator.depot.store_bytes(noise(2_000_000, 1)), board.depot.store_bytes(noise(2_000_000, 2))
    board.transfers.request_blob("a", down)
    pair.coordinator.transfers.request_blob("a", up)
    pair.play(lambda: bool(board.errors and pair.coordinator.errors))
    assert pair.places.server_address.startswith("https://")
    assert pair.broker.chunks == 0
    assert board.depot.load(down.sha256) == noise(2_000_000, 1)
    assert pair.coordinator.depot.load(up.sha256) == noise(2_000_000, 2)
    pair.close()


@pytest.mark.parametrize("who", ["another board", "an observer", "a stranger", "no certificate"])
def test_a_token_is_of_no_use_to_who_has_not_the_board_s_certificate(tmp_path, fleet, who):
    if who == "a stranger":
        (tmp_path / "other").mkdir()
    theirs = {
        "another board": lambda: identity(fleet, "b"),
        "an observer": lambda: identity(fleet, "watcher", "observer"),
        "a stranger": lambda: identity(Certified(tmp_path / "other"), "a"),
        "no certificate": lambda: None,
    }[who]()
    pair = Pair(tmp_path, "a", own=identity(fleet, "coordinator", "coordinator"), boards=lambda device: theirs)
    board, ref = pair.boards["a"], pair.coordinator.depot.store_bytes(noise(600_000))
    board.transfers.request_blob("a", ref)
    pair.play(lambda: bool(board.errors))
    assert board.errors == {("a", ref.sha256): None}
    assert pair.broker.chunks == 3  # the broker's rules are others
    pair.close()


def test_a_board_that_poses_as_the_coordinator_is_told_no_token(tmp_path, fleet):
    pair = Pair(tmp_path, "a", own=identity(fleet, "coordinator", "coordinator"), boards=lambda d: identity(fleet, d))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files = fleet.files("broker", "server")
    context.load_cert_chain(files["cert"], files["key"])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pair.places._base = f"https://127.0.0.1:{listener.getsockname()[1]}"
        board, ref = pair.boards["a"], pair.coordinator.depot.store_bytes(noise(600_000))
        board.transfers.request_blob("a", ref)
        pair.play(lambda: bool(board.transfers._direct_transfers._downloads))
        heard = b"never asked"
        with context.wrap_socket(listener.accept()[0], server_side=True) as sealed:
            try:
                heard = sealed.recv(1000)
            except ConnectionResetError:  # it has left without reading what TLS had for it
                heard = b""
        pair.play(lambda: bool(board.errors))
    assert heard == b""
    assert pair.broker.chunks == 3
    pair.close()


# -- addresses --
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"listen": "8443"}, "HOST:PORT"),
        ({"listen": "0.0.0.0:8443"}, "--blobs-url"),
        ({"listen": "[::]:8443"}, "--blobs-url"),
        ({"url": "https://c.site"}, "--blobs-http"),
        ({"listen": "0.0.0.0:1", "url": "c.site:8443"}, "http[s]://HOST"),
        ({"listen": "0.0.0.0:1", "url": "https://c.site/x"}, "http[s]://HOST"),
        ({"listen": "0.0.0.0:1", "url": "https://c..site"}, "http[s]://HOST"),
        ({"listen": "0.0.0.0:1", "url": "https://name@c.site"}, "http[s]://HOST"),
    ],
)
def test_an_address_that_boards_could_not_use_is_refused(given, said):
    with pytest.raises(JobError) as refused:
        BlobLocationSettings(**given)
    assert said in str(refused.value)


def test_an_address_with_tls_needs_a_certificate_and_one_without_none(tmp_path, fleet):
    depot = BlobStore(tmp_path)
    for url, own in (("https://c.site", None), ("http://c.site", identity(fleet, "coordinator", "coordinator"))):
        with pytest.raises(JobError, match="certificate"):
            blob_server.BlobLocationProvider(
                BlobLocationSettings("127.0.0.1:0", url), depot, lambda device, sha256: True, own
            )


def test_a_port_that_is_taken_is_named(site):
    with pytest.raises(JobError, match="choose another"):
        BlobServer("127.0.0.1", site.server.port, site.depot, lambda device, sha256: True, site.ended.append)


def test_nothing_secret_is_logged(site, caplog):
    caplog.set_level(0)
    site.get()
    site.get(token="wrong-token")
    assert site.token not in caplog.text
    assert "wrong-token" not in caplog.text


def request(token: str, sha256: str) -> bytes:
    return f"GET /blobs/{sha256} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode()


def asking(site: Site, token: str, sha256: str) -> socket.socket:
    """A connection that asks for a blob and reads nothing of it but the first byte."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(30)
    sock.connect(("127.0.0.1", site.server.port))
    sock.sendall(request(token, sha256))
    assert sock.recv(1) == b"H"
    return sock


def test_a_board_that_holds_all_its_connections_leaves_the_others_theirs(site):
    large = [site.depot.store_bytes(noise(16_000_000, number)) for number in (1, 2)]
    tokens = [site.server.issue_token("greedy", ref) for ref in large]
    with ExitStack() as stack:
        for number in range(MAX_DEVICE_CONNECTIONS):
            stack.enter_context(asking(site, tokens[number % 2], large[number % 2].sha256))
        refused = asking(site, tokens[0], large[0].sha256)
        said = answer_of(refused)[2]
        refused.close()
        assert said == b"too many connections: this device has 8 open, close one first"
        assert site.get() == (200, PAYLOAD)
    wait_until(lambda: not len(site.server._connections), "the places are free again")
    with asking(site, tokens[0], large[0].sha256) as sock:
        assert sock.recv(12) == b"TTP/1.1 200 "


def test_a_connection_for_which_the_system_has_no_thread_is_closed_and_the_next_one_served(site, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("no thread")))
        with socket.create_connection(("127.0.0.1", site.server.port), timeout=30) as sock:
            assert sock.recv(1) == b""
    assert len(site.server._connections) == 0
    assert site.get() == (200, PAYLOAD)
