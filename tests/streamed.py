"""An agent and a coordinator that move blobs by HTTP too: over a MemoryBroker in real time, with real sockets."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from pathlib import Path

from two_sides import Side
from waiting import LIMIT_S

from fedquilt.blobs.direct_transfers import TransferBackend
from fedquilt.coordinator.delivery.blob_server import BlobLocationProvider, BlobLocationSettings
from fedquilt.security.handshake import LinkIdentity
from fedquilt.transport.memory_link import MemoryBroker


class Counted(MemoryBroker):
    chunks = 0
    chunks_most: int | None = None

    def _receive_message(self, topic: str, payload: bytes, retain: bool) -> None:
        if topic.rpartition("/")[2].isdigit():
            if self.chunks == self.chunks_most:
                return
            self.chunks += 1
        super()._receive_message(topic, payload, retain)


class Pair:
    def __init__(
        self,
        folder: Path,
        *devices: str,
        where: BlobLocationSettings = BlobLocationSettings("127.0.0.1:0"),
        own: LinkIdentity | None = None,
        boards: Callable[[str], LinkIdentity | None] = lambda device: None,
    ) -> None:
        self.broker = Counted()
        self.others: list[Callable[[], None]] = []  # called by `close`
        self.coordinator = Side(self.broker, folder / "c")
        self.places = BlobLocationProvider(where, self.coordinator.depot, self.allowed, own)
        self.coordinator.carry(self.places)
        self.boards = {device: Side(self.broker, folder / device, device) for device in devices}
        for device, side in self.boards.items():
            side.carry(TransferBackend(boards(device)))

    def allowed(self, device: str, sha256: str) -> bool:
        return (device, sha256) not in self.coordinator.refused

    def play(self, until: Callable[[], bool]) -> None:
        end_s = time.monotonic() + LIMIT_S
        while not until():
            assert time.monotonic() < end_s, "it takes too long"
            self.broker.now_s = time.monotonic()
            self.broker.deliver_due()
            sides = [self.coordinator, *self.boards.values()]
            for side in sides:
                side.step(time.monotonic())
            next_s = self.broker.next_delivery_s()
            left_s = 0.01 if next_s is None else min(max(next_s - time.monotonic(), 0.0), 0.01)
            select.select([fd for side in sides for fd in side.transfers.fds()], [], [], left_s)

    def close(self) -> None:
        for close in (self.places.close, *self.others):
            close()
