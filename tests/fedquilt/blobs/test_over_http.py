"""Fetching by HTTP from a server that goes away in mid-transfer."""

import hashlib
import re
import socket
import threading
from pathlib import Path

import pytest
from two_sides import noise

from fedquilt import wire
from fedquilt.blobs import http_client
from fedquilt.blobs.download import BlobLocationError, BlobWriter
from fedquilt.blobs.store import BlobStore
from fedquilt.core import BlobLocation

CHUNK = 64 * 1024
PAYLOAD = noise(4 * CHUNK)


class Server:
    def __init__(self) -> None:
        self.starts: list[int] = []
        self.port = 0
        self.thread = threading.Thread()

    def listen(self, most: int) -> None:
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        self.thread = threading.Thread(target=self._serve, args=(listener, most))
        self.thread.start()

    def _serve(self, listener: socket.socket, most: int) -> None:
        with listener, listener.accept()[0] as sock:
            listener.close()
            said = b""
            while b"\r\n\r\n" not in said:
                said += sock.recv(4096)
            found = re.search(rb"bytes=(\d+)-", said)
            start = int(found[1])
            self.starts.append(start)
            range_ = f"bytes {start}-{len(PAYLOAD) - 1}/{len(PAYLOAD)}"
            head = f"HTTP/1.1 206 x\r\nContent-Length: {len(PAYLOAD) - start}\r\nContent-Range: {range_}\r\n\r\n"
            sock.sendall(head.encode() + PAYLOAD[start : start + most])


def fetched(tmp_path: Path, server: Server, reach: http_client.HttpClient, *before: BlobLocation) -> BlobStore:
    digests = "".join(hashlib.sha256(PAYLOAD[at : at + CHUNK]).hexdigest() for at in range(0, len(PAYLOAD), CHUNK))
    sha256 = hashlib.sha256(PAYLOAD).hexdigest()
    manifest = wire.BlobManifest(sha256=sha256, size=len(PAYLOAD), chunk=CHUNK, digests=digests)
    depot = BlobStore(tmp_path)
    intake = BlobWriter(depot, manifest, depot.open_part(manifest))
    reach.fetch_blob((*before, source(server, sha256)), intake)
    assert depot.has_blob(intake.ref)
    return depot


def source(server: Server, sha256: str) -> BlobLocation:
    return BlobLocation(url=f"http://127.0.0.1:{server.port}/blobs/{sha256}", token="t")


def test_a_server_that_is_away_for_a_moment_is_gone_on_with_and_does_not_rest(tmp_path):
    server, pauses = Server(), []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 2:
            server.listen(len(PAYLOAD))

    server.listen(2 * CHUNK)
    fetched(tmp_path, server, http_client.HttpClient(sleep=pause))
    server.thread.join()
    assert server.starts == [0, 2 * CHUNK]
    assert [0.05 <= pauses[0] <= 0.1, 0.1 <= pauses[1] <= 0.2] == [True, True]


def test_a_server_that_stays_away_is_given_up_after_three_pauses(tmp_path):
    server, pauses = Server(), []
    reach = http_client.HttpClient(sleep=pauses.append)
    server.listen(2 * CHUNK)
    with pytest.raises(BlobLocationError, match="cannot be used") as refused:
        fetched(tmp_path, server, reach)
    assert refused.value.can_retry
    assert len(pauses) == 3
    assert sum(pauses) <= 0.7
    server.thread.join()


def test_a_server_that_was_never_reached_is_not_waited_for(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        server = Server()
        server.port = free.getsockname()[1]
    pauses = []
    with pytest.raises(BlobLocationError, match="cannot be used"):
        fetched(tmp_path, server, http_client.HttpClient(sleep=pauses.append))
    assert pauses == []


@pytest.mark.parametrize("origin", ["http://a..b", "http://[::1", "http://a:x", "http://a:65536"])
def test_a_place_without_an_address_is_passed_over(tmp_path, origin):
    server = Server()
    server.listen(len(PAYLOAD))
    fetched(tmp_path, server, http_client.HttpClient(), BlobLocation(url=f"{origin}/secret", token="t"))
    server.thread.join()
    assert server.starts == [0]
    with pytest.raises(BlobLocationError, match="is not a host and port") as refused:
        http_client.HttpClient().send_request("HEAD", BlobLocation(url=f"{origin}/secret", token="t"))
    assert "secret" not in str(refused.value)
