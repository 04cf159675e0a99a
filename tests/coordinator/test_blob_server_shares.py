"""Connections of the coordinator's server of blobs: a board and an address have a share of the places each."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from blob_site import PAYLOAD, Site, answer_of
from two_sides import noise
from waiting import until

from fedquilt.coordinator.delivery.blobs.server import PER_BOARD
from fedquilt.host.http_server import ConnectionLimiter, ConnectionLimits


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.server.close()


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
        for number in range(PER_BOARD):
            stack.enter_context(asking(site, tokens[number % 2], large[number % 2].sha256))
        refused = asking(site, tokens[0], large[0].sha256)
        said = answer_of(refused)[2]
        refused.close()
        assert said == b"you have 8 connections open here: let one end first"
        assert site.get() == (200, PAYLOAD)
    until(lambda: not len(site.server._connections), "the places are free again")
    with asking(site, tokens[0], large[0].sha256) as sock:
        assert sock.recv(12) == b"TTP/1.1 200 "


def test_boards_of_one_address_that_move_blobs_leave_places_for_other_addresses(tmp_path):
    site = Site(tmp_path, ConnectionLimiter(ConnectionLimits(per_address=3)))
    ref = site.depot.store_bytes(noise(16_000_000, 1))
    with ExitStack() as stack:
        stack.callback(site.server.close)
        transfers = [
            stack.enter_context(asking(site, site.server.issue_token(name, ref), ref.sha256)) for name in "xyz"
        ]
        with socket.create_connection(("127.0.0.1", site.server.port), timeout=30) as fourth:
            assert fourth.recv(12) == b"HTTP/1.1 503"
        other = socket.create_connection(("127.0.0.1", site.server.port), 30, source_address=("127.0.0.2", 0))
        with other:
            other.sendall(request(site.token, site.ref.sha256))
            assert answer_of(other)[0] == 200
        assert [each.recv(3) for each in transfers] == [b"TTP"] * 3


def test_a_connection_for_which_the_system_has_no_thread_is_closed_and_the_next_one_served(site, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("no thread")))
        with socket.create_connection(("127.0.0.1", site.server.port), timeout=30) as sock:
            assert sock.recv(1) == b""
    assert len(site.server._connections) == 0
    assert site.get() == (200, PAYLOAD)
