"""An agent and a coordinator that move blobs, over a MemoryBroker on virtual time."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from fedquilt import wire
from fedquilt.blobs import chunks
from fedquilt.blobs.direct_transfers import TransferBackend
from fedquilt.blobs.store import BlobStore
from fedquilt.blobs.transfers import Transfers
from fedquilt.core import BlobRef, WireError
from fedquilt.transport.memory_link import MemoryBroker, run_on_virtual_time

KIB = 1024
TOPICS = wire.Topics("lab")


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def ref_of(payload: bytes) -> BlobRef:
    return BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))


def cut(payload: bytes, chunk: int) -> wire.BlobManifest:
    builder = chunks.ManifestBuilder(ref_of(payload), chunk, lambda offset, size: payload[offset : offset + size])
    return builder.hash_chunks()


class Side:
    """One process that moves blobs: an agent (a device's name) or the coordinator (no name)."""

    def __init__(self, broker: MemoryBroker, folder: Path, device: str = "") -> None:
        self.finished = False
        self.link = broker.connect()
        self.depot = BlobStore(folder)
        self.refused: set[tuple[str, str]] = set()
        self.undecodable = 0
        self.errors: dict[tuple[str, str], str | None] = {}
        self._way: wire.Direction = "up" if device else "dn"
        self.carry(None)
        self.link.subscribe(TOPICS.device_filters(device) if device else TOPICS.coordinator_filters())

    def carry(self, carriers: TransferBackend | None) -> None:
        """Begin anew, with carriers beside the link."""
        self.transfers = Transfers(
            self.link,
            self.depot,
            TOPICS,
            self._way,
            lambda device, sha256: (device, sha256) not in self.refused,
            backend=carriers,
        )

    def fds(self) -> Sequence[int]:
        return ()

    def step(self, now_s: float) -> float:
        for message in self.link.receive():
            try:
                assert self.transfers.handle_message(wire.parse_topic(message.topic), message.payload, now_s)
            except WireError:
                self.undecodable += 1
        due_s = self.transfers.step(now_s)
        for device, sha256, error in self.transfers.take_finished():
            assert (device, sha256) not in self.errors
            self.errors[device, sha256] = error
        return due_s


def play(broker: MemoryBroker, *sides: Side, until: Callable[[], bool], limit_s: float = 1e6) -> None:
    run_on_virtual_time(broker, lambda: [(side.link, side) for side in sides], until, limit_s)
