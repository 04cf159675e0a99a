"""Light devices for `fedquilt lab bench coordinator`: many in one process, without training.

A device publishes its profile, accepts each task, fetches the task's model, submits the model plus a constant of its
own, and sends the chunks that are requested. All messages go through the codecs of agents. Blobs have one chunk.
"""

from __future__ import annotations

import hashlib
import os
import selectors
import socket
import sys
import time
from typing import Any, Final

from fedquilt import wire
from fedquilt.arrays import tensors
from fedquilt.blobs import chunks
from fedquilt.blobs.transfer.download import Download
from fedquilt.core import BlobRef, FedquiltError, Profile, Task, Update, Usage, WireMessage
from fedquilt.edge_agent.agent import REPUBLISH
from fedquilt.profiles import load_board_profile
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.client import MqttClient, payload_limit

FLEET: Final = "bench"
EXAMPLES: Final = 32
LOOK_S: Final = 1.0  # pause between looks for requests to repeat
AGAIN_S: Final = 30.0  # time after which an update without an answer is offered again
CHUNK: Final = chunks.chunk_size_for(payload_limit(5, None))
PROFILE: Final[dict[str, Any]] = {
    "board": "bench",
    "memory_bytes": 4 << 30,
    "budget_bytes": 1 << 30,
    "engines": ("numpy",),
    "versions": {"numpy": "2"},
    "points": load_board_profile("jetson-orin-nano").operating_points(),  # 40 kB, as boards with a profile announce
}


class DeviceGroup:
    """The light devices of one process."""

    def __init__(self, url: str, first: int, count: int) -> None:
        self.broker, self.topics = Broker.from_url(url), wire.Topics(FLEET)
        self.boards = [LightDevice(self, number) for number in range(first, first + count)]
        self._ready = selectors.DefaultSelector()

    def connect_all(self) -> None:
        """Connect all devices, and wait until the broker confirms their presences and profiles."""
        for board in self.boards:
            self._ready.register(board.connect(), selectors.EVENT_READ, board)
            self._process_messages(0.0)
        while not all(board.is_known for board in self.boards):
            self._process_messages(1.0)

    def run_until_disconnected(self) -> None:
        look_s = 0.0
        while True:
            self._process_messages(LOOK_S)
            if (now_s := time.monotonic()) >= look_s:
                look_s = now_s + LOOK_S
                for board in self.boards:
                    board.repeat_requests(now_s)

    def _process_messages(self, timeout_s: float) -> None:
        for key, _ in self._ready.select(timeout_s):
            key.data.read()


class LightDevice:
    """A device that follows the protocol without training."""

    def __init__(self, group: DeviceGroup, number: int) -> None:
        self.group, self.number, self.device = group, number, f"board-{number:05d}"
        self.is_known = False  # whether the broker has its presence and profile
        self.client: MqttClient
        self._profile_mid, self._publish_s, self._published = -1, 0.0, 0
        self._task: Task | None = None
        self._download: Download | None = None
        self._update: Update | None = None  # not answered yet
        self._model = b""  # of the latest update
        self._offered_s = 0.0

    def connect(self) -> socket.socket:
        """Start to connect and return the socket. `read` completes the connection."""
        broker, will = self.group.broker, wire.encode(wire.Presence(online=False, boot="bench"))
        sock = socket.create_connection((broker.host, broker.port))
        self.client = MqttClient(sock, 5, self.device, self._handle_message, self._handle_publish_ack)
        self.client.on_connect = self._handle_connect
        self.client.send_connect(broker, None, (self.group.topics.device_topic(self.device, "up", "presence"), will))
        self.read()
        return sock

    def read(self) -> None:
        """Process received messages and write the answers."""
        self.client.loop_read()
        while self.client.socket() is not None and self.client.want_write():
            self.client.loop_write()
        if self.client.socket() is None:
            raise ConnectionError(f"the broker has closed the connection of {self.device}")

    def repeat_requests(self, now_s: float) -> None:
        """Repeat requests without an answer."""
        self._request_chunks(now_s)
        if self._update is not None and now_s >= self._offered_s + AGAIN_S:
            self._offer_update(self._update, now_s)
        if now_s >= self._publish_s:
            self._publish_profile(now_s)
        self.client.loop_misc()
        while self.client.want_write():
            self.client.loop_write()

    # -- messages --

    def _handle_connect(self, client: Any, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        self.client.subscribe_filters(self.group.topics.device_filters(self.device))
        self._publish_profile(time.monotonic())

    def _publish_profile(self, now_s: float) -> None:
        self._publish("presence", wire.Presence(online=True, boot="bench"), retain=True)
        self._profile_mid = self._publish("profile", Profile(device=self.device, **PROFILE), retain=True)
        self._publish_s, self._published = now_s + REPUBLISH.delay_s(self._published), self._published + 1

    def _handle_publish_ack(self, mid: int, code: int) -> None:
        self.is_known = self.is_known or mid == self._profile_mid

    def _handle_message(self, topic: str, payload: bytes, retained: bool) -> None:
        route, now_s = wire.parse_topic(topic), time.monotonic()
        match route.leaf:
            case "coord" if wire.decode(payload, wire.CoordState).online:
                self._published = 0
                self._publish_profile(now_s)
            case "presence":
                self._publish("presence", wire.Presence(online=True, boot="bench"), retain=True)
            case "task" if payload:
                self._accept_task(wire.decode(payload, Task), now_s)
            case "ack":
                self._handle_ack(wire.decode(payload, wire.Ack))
            case "get":
                self._send_model(wire.decode(payload, wire.ChunkRequest))
            case "chunk" if self._download is not None and self._download.ref.sha256 == route.sha256:
                if self._download.handle_chunk(route.index, payload, now_s):
                    self._download = None
                    self._submit_update(payload, now_s)

    def _accept_task(self, task: Task, now_s: float) -> None:
        again = self._task is not None and (task.job, task.round) == (self._task.job, self._task.round)
        self._task = task
        self._publish("claim", wire.Claim(job=task.job, round=task.round, attempt=task.attempt, accepted=True))
        if again and self._update is not None:
            self._offer_update(self._update, now_s)
        elif not again or self._download is None:
            self._download = Download(task.bundles["model"], CHUNK, now_s)
            self._request_chunks(now_s)

    def _request_chunks(self, now_s: float) -> None:
        for get in self._download.next_requests(now_s) if self._download is not None else ():
            self._publish("blob/get", get)

    def _submit_update(self, received: bytes, now_s: float) -> None:
        task = self._task
        assert task is not None
        model = {
            name: value + value.dtype.type(1e-6 * (self.number + 1))
            for name, value in tensors.decode_tensors(received).items()
        }
        self._model = tensors.encode_tensors(model)
        ref = BlobRef(sha256=hashlib.sha256(self._model).hexdigest(), size=len(self._model))
        self._update = Update(
            job=task.job,
            round=task.round,
            attempt=task.attempt,
            device=self.device,
            weight=float(EXAMPLES),
            bundles={"model": ref},
            metrics={"loss": 1.0, "steps": 10.0},
            usage=Usage(wall_s=0.1, cpu_s=0.1, examples=EXAMPLES, up_bytes=ref.size),
            layouts={"model": tensors.layout_from_tensors(model)},
            state=task.state,
            epoch=task.epoch,
        )
        self._offer_update(self._update, now_s)

    def _offer_update(self, update: Update, now_s: float) -> None:
        self._offered_s = now_s
        self._publish("update", update)

    def _send_model(self, get: wire.ChunkRequest) -> None:
        if self._update is not None and get.sha256 == self._update.bundles["model"].sha256:
            topic = self.group.topics.chunk_topic(self.device, "up", get.sha256, 0)
            self.client.queue_message(topic, self._model, 0, False)

    def _handle_ack(self, ack: wire.Ack) -> None:
        if self._update is not None and (ack.job, ack.round) == (self._update.job, self._update.round):
            if not ack.accepted:
                print(f"the update of {self.device} is rejected: {ack.reason}", file=sys.stderr, flush=True)
            self._update = None

    def _publish(self, leaf: str, message: WireMessage, retain: bool = False) -> int:
        topic = self.group.topics.device_topic(self.device, "up", leaf)
        return self.client.queue_message(topic, wire.encode(message), 1, retain)


def main(url: str, first: str, count: str) -> int:
    """Run devices until the process is killed or the broker closes a connection. Print "ready" first."""
    group = DeviceGroup(url, int(first), int(count))
    try:
        group.connect_all()
        print("ready", flush=True)
        group.run_until_disconnected()
    except (FedquiltError, OSError) as error:
        print(error, file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    os.nice(1)  # the measured coordinator has priority
    sys.exit(main(*sys.argv[1:]))
