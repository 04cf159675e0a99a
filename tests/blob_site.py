"""A coordinator's HTTP server of blobs with one blob, and requests to it, made by hand."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

from two_sides import noise

from fedquilt import wire
from fedquilt.blobs.direct_transfers import TransferResult
from fedquilt.blobs.download import BlobWriter
from fedquilt.blobs.store import BlobStore
from fedquilt.coordinator.delivery.blob_server import BlobServer
from fedquilt.core import BlobRef
from fedquilt.host.http_server import ConnectionLimiter

CHUNK = 64 * 1024
PAYLOAD = noise(4 * CHUNK)


class Site:
    def __init__(self, folder: Path, connections: ConnectionLimiter | None = None) -> None:
        self.depot = BlobStore(folder / "c")
        self.ref = self.depot.store_bytes(PAYLOAD)
        self.refused: set[tuple[str, str]] = set()
        self.ended: list[TransferResult] = []
        self.server = BlobServer(
            "127.0.0.1",
            0,
            self.depot,
            lambda device, sha256: (device, sha256) not in self.refused,
            self.ended.append,
            connections=connections,
        )
        self.token = self.server.issue_token("a", self.ref)

    def upload(self, payload: bytes = noise(4 * CHUNK, 7)) -> tuple[BlobWriter, str]:
        digests = "".join(hashlib.sha256(payload[at : at + CHUNK]).hexdigest() for at in range(0, len(payload), CHUNK))
        sha256 = hashlib.sha256(payload).hexdigest()
        manifest = wire.BlobManifest(sha256=sha256, size=len(payload), chunk=CHUNK, digests=digests)
        intake = BlobWriter(self.depot, manifest, self.depot.open_part(manifest), to_end=True)
        return intake, self.server.issue_token("a", intake.ref, intake)

    def ask(self, request: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer; 0 for a connection that ends without one."""
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=30) as sock:
            sock.sendall(request.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
            return answer_of(sock)

    def get(self, token: str | None = None, sha256: str | None = None, more: str = "") -> tuple[int, bytes]:
        token = self.token if token is None else token
        head = f"GET /blobs/{sha256 or self.ref.sha256} HTTP/1.1\nHost: x\nAuthorization: Bearer {token}{more}"
        status, _, body = self.ask(head)
        return status, body

    def put(self, token: str, ref: BlobRef, range_: str, length: int, body: bytes) -> int:
        head = f"PUT /blobs/{ref.sha256} HTTP/1.1\nHost: x\nAuthorization: Bearer {token}\nContent-Length: {length}"
        return self.ask(f"{head}\nContent-Range: bytes {range_}", body)[0]


def answer_of(sock: socket.socket) -> tuple[int, dict[str, str], bytes]:
    payload = b""
    while data := sock.recv(1 << 16):
        payload += data
    head, _, body = payload.partition(b"\r\n\r\n")
    rows = head.decode().split("\r\n")
    headers = dict(row.split(": ", 1) for row in rows[1:])
    return int(rows[0].split()[1]) if rows[0] else 0, headers, body
