"""Light devices for `fedquilt bench coordinator`: many in one process, without training.

A board publishes its profile, accepts each task, fetches the task's blobs, offers an update and sends the chunks that
are asked for: every message goes through the codecs that agents use, and nothing is trained. Blobs are in memory; those
of several chunks are fetched once for all boards of a process, and their updates made chunk by chunk.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from fedquilt import wire
from fedquilt.arrays import tensors
from fedquilt.blobs import chunks
from fedquilt.blobs.transfer.download import Download
from fedquilt.core import BlobRef, FedquiltError, Profile, Task, Update, Usage, WireMessage
from fedquilt.edge_agent.agent import REPUBLISH
from fedquilt.profiles import load_board_profile as load_board
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.client import MqttClient, payload_limit

FLEET: Final = "bench"
EXAMPLES: Final = 32
LOOK_S: Final = 1.0  # pause between looks for requests to repeat
AGAIN_S: Final = 30.0  # time after which an update without an answer is offered again
CHUNK: Final = chunks.chunk_size_for(payload_limit(5, None, None))
PROFILE: Final[dict[str, Any]] = {
    "board": "bench",
    "memory_bytes": 4 << 30,
    "budget_bytes": 1 << 30,
    "engines": ("numpy",),
    "versions": {"numpy": "2"},
    "points": load_board("jetson-orin-nano").operating_points(),  # 40 kB, as boards with a profile announce
}


class ShiftedModel:
    """Bytes of a model with a constant added to each float32, computed on demand.

    Args:
        sent: Blob of the model.
        by: Constant to add.
    """

    def __init__(self, sent: bytes, by: float) -> None:
        self._sent, self._by = sent, np.float32(by)
        head = 8 + int.from_bytes(sent[:8], "little")
        table: dict[str, Any] = json.loads(sent[8:head])
        places = [each["data_offsets"] for name, each in table.items() if each.get("dtype") == "F32"]
        self._from = head + min((place[0] for place in places), default=0)  # they lie side by side
        self._to = head + max((place[1] for place in places), default=0)

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`."""
        end = offset + size
        first = self._from + max(offset - self._from, 0) // 4 * 4
        last = self._from - (self._from - min(end, self._to)) // 4 * 4
        if first >= last:
            return self._sent[offset:end]
        moved = (np.frombuffer(self._sent, "<f4", (last - first) // 4, first) + self._by).tobytes()
        return self._sent[offset:first] + moved[max(offset - first, 0) : min(end, last) - first] + self._sent[last:end]


def model_shift(number: int) -> float:
    return 1e-6 * (number + 1)


def update_weight(method: str) -> float:
    return 1.0 if method == "scaffold" else float(EXAMPLES)


class BundleBlob(NamedTuple):
    """A bundle of an update, with its content."""

    ref: BlobRef
    read: Callable[[int, int], bytes]  # so many bytes from an offset
    layout: dict[str, str]  # types and shapes of its tensors


class SentUpdate(NamedTuple):
    """Bundles, weight and metrics of an update."""

    bundles: dict[str, BundleBlob]
    weight: float
    metrics: dict[str, float]


def update_from_blobs(bundles: Mapping[str, bytes], weight: float, metrics: dict[str, float]) -> SentUpdate:
    made = {}
    for name, payload in bundles.items():
        ref = BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))
        made[name] = BundleBlob(
            ref, functools.partial(_slice, payload), tensors.layout_from_tensors(tensors.decode_tensors(payload))
        )
    return SentUpdate(made, weight, metrics)


def _slice(payload: bytes, offset: int, size: int) -> bytes:
    return payload[offset : offset + size]


def update_metrics(round: int) -> dict[str, float]:
    return {"loss": 1.0, "steps": 10.0, "new": float(round == 0)}


class DeviceGroup:
    """The light devices of one process.

    Args:
        url: URL of the broker.
        first: Number of the first device.
        count: Number of devices.
    """

    def __init__(self, url: str, first: int, count: int) -> None:
        self.broker, self.topics, self.clock = Broker.from_url(url), wire.Topics(FLEET), time.monotonic
        self.blobs: dict[str, bytes] = {}  # sha256 -> content that the boards have fetched, once for all of them
        self.boards = [LightDevice(self, number) for number in range(first, first + count)]
        self.parts: dict[str, bytearray] = {}  # sha256 -> received part of a blob that one device fetches for all
        self._layouts: dict[str, dict[str, str]] = {}  # sha256 -> types and shapes of its tensors
        self.refused = 0  # updates that the coordinator did not take
        self._ready = selectors.DefaultSelector()

    profile: Mapping[str, Any] = PROFILE

    def connect_all(self) -> None:
        """Connect all devices, and wait until the broker confirms their presences and profiles."""
        for board in self.boards:
            self._ready.register(board.connect(), selectors.EVENT_READ, board)
            self.process_messages(0.0)
        while not all(board.told for board in self.boards):
            self.process_messages(1.0)

    def run(self) -> None:
        look_s = 0.0
        while True:
            self.process_messages(LOOK_S)
            if (now_s := time.monotonic()) >= look_s:
                look_s = now_s + LOOK_S
                for board in self.boards:
                    board.repeat_requests(now_s)

    def tensor_layout(self, sha256: str) -> dict[str, str]:
        if sha256 not in self._layouts:
            self._layouts = {sha256: tensors.layout_from_tensors(tensors.decode_tensors(self.blobs[sha256]))}
        return self._layouts[sha256]

    def create_update(self, task: Task, number: int) -> SentUpdate:
        """Create a device's update: the received model plus the device's constant."""
        model = task.bundles["model"]
        moved, sha256 = ShiftedModel(self.blobs[model.sha256], model_shift(number)), hashlib.sha256()
        for offset in range(0, model.size, CHUNK):
            sha256.update(moved.read(offset, min(CHUNK, model.size - offset)))
        blob = BundleBlob(
            BlobRef(sha256=sha256.hexdigest(), size=model.size), moved.read, self.tensor_layout(model.sha256)
        )
        return SentUpdate({"model": blob}, update_weight(task.method), update_metrics(task.round))

    def add_blob(self, sha256: str, payload: bytes, now_s: float) -> None:
        """Store a downloaded blob for all devices. Older blobs are dropped."""
        self.blobs = {**dict(list(self.blobs.items())[-8:]), sha256: payload}
        for board in self.boards if self.parts.pop(sha256, None) is not None else ():
            board.resume_task(now_s)

    def process_messages(self, timeout_s: float) -> None:
        for key, _ in self._ready.select(timeout_s):
            key.data.read()


def device_name(number: int) -> str:
    return f"board-{number:05d}"


class LightDevice:
    """A device that follows the protocol without training."""

    def __init__(self, crowd: DeviceGroup, number: int) -> None:
        self.crowd, self.number, self.device = crowd, number, device_name(number)
        self.told = False  # whether the broker has its presence and profile
        self._told, self._tell_s, self._published = -1, 0.0, 0
        self.client: MqttClient
        self._task: Task | None = None
        self._pulls: dict[str, Download] = {}  # by sha256
        self._update: Update | None = None  # not answered yet
        self._has: set[str] = set()  # blobs that it has fetched
        self._waits: set[str] = set()  # blobs that another board of the process fetches
        self._sends: dict[str, BundleBlob] = {}  # by sha256: of the latest update
        self._offered_s = 0.0

    def connect(self) -> socket.socket:
        """Start to connect and return the socket. `read` completes the connection."""
        crowd = self.crowd
        gone = wire.encode(wire.Presence(online=False, boot="bench"))
        sock = socket.create_connection((crowd.broker.host, crowd.broker.port))
        self.client = MqttClient(sock, 5, self.device, self._handle_message, self._handle_publish_ack)
        self.client.on_connect = self._handle_connect
        self.client.send_connect(crowd.broker, None, (crowd.topics.device_topic(self.device, "up", "presence"), gone))
        self.read()
        return sock

    def read(self) -> None:
        """Process received messages and write the answers.

        Raises:
            ConnectionError: If the broker closed the connection.
        """
        self.client.loop_read()
        while self.client.socket() is not None and self.client.want_write():
            self.client.loop_write()
        if self.client.socket() is None:
            raise ConnectionError(f"the broker has hung up on {self.device}")

    def repeat_requests(self, now_s: float) -> None:
        """Repeat requests without an answer."""
        for pull in list(self._pulls.values()):
            self._send_requests(pull, now_s)
        if self._update is not None and now_s >= self._offered_s + AGAIN_S:
            self._offer_update(self._update, now_s)
        if now_s >= self._tell_s:
            self._publish_presence(now_s)
        self.client.loop_misc()
        while self.client.want_write():
            self.client.loop_write()

    # -- messages --

    def _handle_connect(self, client: Any, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        self.client.subscribe_filters(self.crowd.topics.device_filters(self.device))
        self._publish_presence(self.crowd.clock())

    def _publish_presence(self, now_s: float) -> None:
        self._publish("presence", wire.Presence(online=True, boot="bench"), retain=True)
        self._told = self._publish("profile", Profile(device=self.device, **self.crowd.profile), retain=True)
        self._tell_s, self._published = now_s + REPUBLISH.delay_s(self._published), self._published + 1

    def _handle_publish_ack(self, mid: int, code: int) -> None:
        self.told = self.told or mid == self._told

    def _handle_message(self, topic: str, payload: bytes, retained: bool) -> None:
        """Answer a message as a device does: presence, task, acknowledgement, or part of a transfer."""
        route, now_s = wire.parse_topic(topic), self.crowd.clock()
        match route.leaf:
            case "coord" if wire.decode(payload, wire.CoordState).online:
                self._published = 0
                self._publish_presence(now_s)
            case "presence":
                self._publish("presence", wire.Presence(online=True, boot="bench"), retain=True)
            case "task" if payload:
                self._start_task(wire.decode(payload, Task), now_s)
            case "ack":
                self._handle_ack(wire.decode(payload, wire.Ack))
            case "get":
                self._send_blob(wire.decode(payload, wire.ChunkRequest))
            case "manifest" if route.sha256 in self._pulls:
                self._pulls[route.sha256].handle_manifest(wire.decode(payload, wire.BlobManifest), now_s)
                self._send_requests(self._pulls[route.sha256], now_s)
            case "chunk" if route.sha256 in self._pulls:
                self._handle_chunk(self._pulls[route.sha256], route.index, payload, now_s)

    def _start_task(self, task: Task, now_s: float) -> None:
        again = self._task is not None and (task.job, task.round) == (self._task.job, self._task.round)
        self._task = task
        self._publish("claim", wire.Claim(job=task.job, round=task.round, attempt=task.attempt, accepted=True))
        if again and self._update is not None:
            return self._offer_update(self._update, now_s)
        if again and (self._pulls or self._waits):
            return None
        whole = [ref for ref in task.bundles.values() if ref.size > CHUNK]
        self._waits = {
            ref.sha256 for ref in whole if {ref.sha256} & (self.crowd.parts.keys() | self.crowd.blobs.keys())
        }
        self.crowd.parts |= {ref.sha256: bytearray(ref.size) for ref in whole if ref.sha256 not in self._waits}
        here = self._waits | (self._has & self.crowd.blobs.keys())
        mine = [ref for ref in task.bundles.values() if ref.sha256 not in here]
        self._pulls = {ref.sha256: Download(ref, CHUNK, now_s) for ref in mine}
        for pull in list(self._pulls.values()):
            self._send_requests(pull, now_s)
        return self._submit_update(now_s)

    def _send_requests(self, pull: Download, now_s: float) -> None:
        for get in pull.next_requests(now_s):
            self._publish("blob/get", get)

    def _handle_chunk(self, pull: Download, index: int, payload: bytes, now_s: float) -> None:
        if not pull.handle_chunk(index, payload, now_s):
            return
        sha256 = pull.ref.sha256
        part = self.crowd.parts.get(sha256)
        if part is not None and pull.manifest is not None:
            offset, size = chunks.chunk_extent(pull.manifest, index)
            part[offset : offset + size] = payload
        if pull.is_complete:
            del self._pulls[sha256]
            self._has.add(sha256)
            self.crowd.add_blob(sha256, payload if part is None else bytes(part), now_s)
            self._submit_update(now_s)
        elif part is not None:
            self._send_requests(pull, now_s)

    def resume_task(self, now_s: float) -> None:
        """Resume the task if all blobs that other devices download have arrived."""
        if self._waits and self._waits <= self.crowd.blobs.keys():
            self._waits = set()
            self._submit_update(now_s)

    def _submit_update(self, now_s: float) -> None:
        task = self._task
        if task is None or self._pulls or not self._waits <= self.crowd.blobs.keys():
            return
        made = self.crowd.create_update(task, self.number)
        self._sends = {blob.ref.sha256: blob for blob in made.bundles.values()}
        up_bytes = sum(blob.ref.size for blob in self._sends.values())
        self._update = Update(
            job=task.job,
            round=task.round,
            attempt=task.attempt,
            device=self.device,
            weight=made.weight,
            bundles={name: blob.ref for name, blob in made.bundles.items()},
            metrics=made.metrics,
            usage=Usage(wall_s=0.1, cpu_s=0.1, examples=max(EXAMPLES, int(made.weight)), up_bytes=up_bytes),
            layouts={name: blob.layout for name, blob in made.bundles.items()},
            state=task.state,
            epoch=task.epoch,
        )
        self._offer_update(self._update, now_s)

    def _offer_update(self, update: Update, now_s: float) -> None:
        self._offered_s = now_s
        self._publish("update", update)

    def _send_blob(self, get: wire.ChunkRequest) -> None:
        blob = self._sends.get(get.sha256)
        if self._update is None or blob is None:
            return
        for index in get.indices:
            topic = self.crowd.topics.chunk_topic(self.device, "up", get.sha256, index)
            offset = index * get.chunk
            self.client.queue_message(topic, blob.read(offset, min(get.chunk, blob.ref.size - offset)), 0, False)
        if not get.indices:
            topic = self.crowd.topics.blob_topic(self.device, "up", get.sha256, "manifest")
            self.client.queue_message(topic, wire.encode(chunks.build_manifest(blob.ref, CHUNK, blob.read)), 1, False)

    def _handle_ack(self, ack: wire.Ack) -> None:
        if self._update is not None and (ack.job, ack.round) == (self._update.job, self._update.round):
            self.crowd.refused += not ack.accepted
            if not ack.accepted:
                print(f"{self.device}'s update is refused: {ack.reason}", file=sys.stderr, flush=True)
            self._update = None

    def _publish(self, leaf: str, message: WireMessage, retain: bool = False) -> int:
        topic = self.crowd.topics.device_topic(self.device, "up", leaf)
        return self.client.queue_message(topic, wire.encode(message), 1, retain)


def main(url: str, first: str, count: str) -> int:
    """Run devices until the process is killed or the broker closes a connection. Print "ready" first."""
    crowd = DeviceGroup(url, int(first), int(count))
    try:
        crowd.connect_all()
        print("ready", flush=True)
        crowd.run()
    except (FedquiltError, OSError) as error:
        print(error, file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    os.nice(1)  # the measured coordinator has priority
    sys.exit(main(*sys.argv[1:]))
