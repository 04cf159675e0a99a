"""Light boards for `fedquilt bench coordinator`: many in one process, each with a connection to the broker of its own.

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

from fedquilt import tensors, wire
from fedquilt.blobs import chunks
from fedquilt.blobs.download import Pull
from fedquilt.core import BlobRef, FedquiltError, Profile, Task, Update, Usage, Wired
from fedquilt.edge_agent.agent import RETELL_MOST_S, RETELL_S
from fedquilt.profiles import load as load_board
from fedquilt.transport.broker import Broker
from fedquilt.transport.mqtt_client import Client, payload_limit

FLEET: Final = "bench"
EXAMPLES: Final = 32
LOOK_S: Final = 1.0  # pause between looks for requests to repeat
AGAIN_S: Final = 30.0  # time after which an update without an answer is offered again
CHUNK: Final = chunks.chunk_for(payload_limit(5, None, None))
PROFILE: Final[dict[str, Any]] = {
    "board": "bench",
    "memory_bytes": 4 << 30,
    "budget_bytes": 1 << 30,
    "engines": ("numpy",),
    "versions": {"numpy": "2"},
    "points": load_board("jetson-orin-nano").operating_points(),  # 40 kB, as boards with a profile announce
}


class Moved:
    """A model moved by a number: the bytes of an update, made where they are asked for.

    Args:
        sent: the model's blob.
        by: is added to each float32.
    """

    def __init__(self, sent: bytes, by: float) -> None:
        self._sent, self._by = sent, np.float32(by)
        head = 8 + int.from_bytes(sent[:8], "little")
        table: dict[str, Any] = json.loads(sent[8:head])
        places = [each["data_offsets"] for name, each in table.items() if each.get("dtype") == "F32"]
        self._from = head + min((place[0] for place in places), default=0)  # they lie side by side
        self._to = head + max((place[1] for place in places), default=0)

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`."""
        end = offset + size
        first = self._from + max(offset - self._from, 0) // 4 * 4
        last = self._from - (self._from - min(end, self._to)) // 4 * 4
        if first >= last:
            return self._sent[offset:end]
        moved = (np.frombuffer(self._sent, "<f4", (last - first) // 4, first) + self._by).tobytes()
        return self._sent[offset:first] + moved[max(offset - first, 0) : min(end, last) - first] + self._sent[last:end]


def step(number: int) -> float:
    """How far a board of this number moves every number of a model."""
    return 1e-6 * (number + 1)


def weight(method: str) -> float:
    """Weight of an update with this method."""
    return 1.0 if method == "scaffold" else float(EXAMPLES)


class Blob(NamedTuple):
    """A bundle of a board's update."""

    ref: BlobRef
    read: Callable[[int, int], bytes]  # so many bytes from an offset
    layout: dict[str, str]  # types and shapes of its tensors


class Sent(NamedTuple):
    """A board's update."""

    bundles: dict[str, Blob]
    weight: float
    metrics: dict[str, float]


def sent(bundles: Mapping[str, bytes], weight: float, metrics: dict[str, float]) -> Sent:
    """An update of these blobs, which are in memory."""
    made = {}
    for name, payload in bundles.items():
        ref = BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))
        made[name] = Blob(ref, functools.partial(_cut, payload), tensors.layout(tensors.decode(payload)))
    return Sent(made, weight, metrics)


def _cut(payload: bytes, offset: int, size: int) -> bytes:
    return payload[offset : offset + size]


def metrics(round: int) -> dict[str, float]:
    """Metrics of an update of this round: what any of the methods asks for."""
    return {"loss": 1.0, "steps": 10.0, "new": float(round == 0)}


class Crowd:
    """The boards of one process.

    Args:
        url: of the broker.
        first: number of the first board.
        count: number of boards.
    """

    def __init__(self, url: str, first: int, count: int) -> None:
        self.broker, self.topics, self.clock = Broker.parse(url), wire.Topics(FLEET), time.monotonic
        self.blobs: dict[str, bytes] = {}  # sha256 -> content that the boards have fetched, once for all of them
        self.boards = [Board(self, number) for number in range(first, first + count)]
        self.parts: dict[str, bytearray] = {}  # sha256 -> what has come of a blob that a board fetches for all
        self._layouts: dict[str, dict[str, str]] = {}  # sha256 -> types and shapes of its tensors
        self.refused = 0  # updates that the coordinator did not take
        self._ready = selectors.DefaultSelector()

    profile: Mapping[str, Any] = PROFILE

    def connect(self) -> None:
        """Connect all boards, and wait until the broker has each one's presence and profile."""
        for board in self.boards:
            self._ready.register(board.connect(), selectors.EVENT_READ, board)
            self.turn(0.0)
        while not all(board.told for board in self.boards):
            self.turn(1.0)

    def run(self) -> None:
        """Go on until the process is killed."""
        look_s = 0.0
        while True:
            self.turn(LOOK_S)
            if (now_s := time.monotonic()) >= look_s:
                look_s = now_s + LOOK_S
                for board in self.boards:
                    board.look(now_s)

    def layout(self, sha256: str) -> dict[str, str]:
        """Types and shapes of a blob's tensors."""
        if sha256 not in self._layouts:
            self._layouts = {sha256: tensors.layout(tensors.decode(self.blobs[sha256]))}
        return self._layouts[sha256]

    def answer(self, task: Task, number: int) -> Sent:
        """Update of a board: the model that was sent, moved by the board's number and made chunk by chunk."""
        model = task.bundles["model"]
        moved, sha256 = Moved(self.blobs[model.sha256], step(number)), hashlib.sha256()
        for offset in range(0, model.size, CHUNK):
            sha256.update(moved.read(offset, min(CHUNK, model.size - offset)))
        blob = Blob(BlobRef(sha256=sha256.hexdigest(), size=model.size), moved.read, self.layout(model.sha256))
        return Sent({"model": blob}, weight(task.method), metrics(task.round))

    def came(self, sha256: str, payload: bytes, now_s: float) -> None:
        """Keep a blob with the latest, for all boards."""
        self.blobs = {**dict(list(self.blobs.items())[-8:]), sha256: payload}
        for board in self.boards if self.parts.pop(sha256, None) is not None else ():
            board.go_on(now_s)

    def turn(self, timeout_s: float) -> None:
        """Read messages that have arrived, and answer them."""
        for key, _ in self._ready.select(timeout_s):
            key.data.read()


def device_name(number: int) -> str:
    """Return the device name of a board, by its number."""
    return f"board-{number:05d}"


class Board:
    """One board, as the coordinator sees it."""

    def __init__(self, crowd: Crowd, number: int) -> None:
        self.crowd, self.number, self.device = crowd, number, device_name(number)
        self.told = False  # whether the broker has its presence and profile
        self._told, self._tell_s, self._patience_s = -1, 0.0, RETELL_S
        self.client: Client
        self._task: Task | None = None
        self._pulls: dict[str, Pull] = {}  # by sha256
        self._update: Update | None = None  # not answered yet
        self._has: set[str] = set()  # blobs that it has fetched
        self._waits: set[str] = set()  # blobs that another board of the process fetches
        self._sends: dict[str, Blob] = {}  # by sha256: of the latest update
        self._offered_s = 0.0

    def connect(self) -> socket.socket:
        """Begin to connect; `read` completes it. Returns the socket."""
        crowd = self.crowd
        gone = wire.encode(wire.Presence(online=False, boot="bench"))
        sock = socket.create_connection((crowd.broker.host, crowd.broker.port))
        self.client = Client(sock, 5, self.device, self._handle_message, self._settled)
        self.client.on_connect = self._greet
        self.client.introduce(crowd.broker, None, (crowd.topics.device(self.device, "up", "presence"), gone))
        self.read()
        return sock

    def read(self) -> None:
        """Read what has arrived, and write the answers.

        Raises:
            ConnectionError: the broker has hung up.
        """
        self.client.loop_read()
        while self.client.socket() is not None and self.client.want_write():
            self.client.loop_write()
        if self.client.socket() is None:
            raise ConnectionError(f"the broker has hung up on {self.device}")

    def look(self, now_s: float) -> None:
        """Repeat requests whose answers have not come."""
        for pull in list(self._pulls.values()):
            self._ask(pull, now_s)
        if self._update is not None and now_s >= self._offered_s + AGAIN_S:
            self._offer(self._update, now_s)
        if now_s >= self._tell_s:
            self._tell(now_s)
        self.client.loop_misc()
        while self.client.want_write():
            self.client.loop_write()

    # -- messages --

    def _greet(self, client: Any, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        self.client.ask(self.crowd.topics.for_device(self.device))
        self._tell(self.crowd.clock())

    def _tell(self, now_s: float) -> None:
        """Publish presence and profile, repeatedly with growing pauses, as agents do."""
        self._publish("presence", wire.Presence(online=True, boot="bench"), retain=True)
        self._told = self._publish("profile", Profile(device=self.device, **self.crowd.profile), retain=True)
        self._tell_s, self._patience_s = now_s + self._patience_s, min(2 * self._patience_s, RETELL_MOST_S)

    def _settled(self, mid: int, code: int) -> None:
        self.told = self.told or mid == self._told

    def _handle_message(self, topic: str, payload: bytes, retained: bool) -> None:
        """Answer a message as a device does: presence, task, acknowledgement, or part of a transfer."""
        route, now_s = wire.route(topic), self.crowd.clock()
        match route.leaf:
            case "coord" if wire.decode(payload, wire.CoordState).online:
                self._patience_s = RETELL_S
                self._tell(now_s)
            case "presence":
                self._publish("presence", wire.Presence(online=True, boot="bench"), retain=True)
            case "task" if payload:
                self._begin(wire.decode(payload, Task), now_s)
            case "ack":
                self._acknowledged(wire.decode(payload, wire.Ack))
            case "get":
                self._give(wire.decode(payload, wire.Get))
            case "manifest" if route.sha256 in self._pulls:
                self._pulls[route.sha256].take_manifest(wire.decode(payload, wire.Manifest), now_s)
                self._ask(self._pulls[route.sha256], now_s)
            case "chunk" if route.sha256 in self._pulls:
                self._take(self._pulls[route.sha256], route.index, payload, now_s)

    def _begin(self, task: Task, now_s: float) -> None:
        again = self._task is not None and (task.job, task.round) == (self._task.job, self._task.round)
        self._task = task
        self._publish("claim", wire.Claim(job=task.job, round=task.round, attempt=task.attempt, accepted=True))
        if again and self._update is not None:
            return self._offer(self._update, now_s)
        if again and (self._pulls or self._waits):
            return None
        whole = [ref for ref in task.bundles.values() if ref.size > CHUNK]
        self._waits = {
            ref.sha256 for ref in whole if {ref.sha256} & (self.crowd.parts.keys() | self.crowd.blobs.keys())
        }
        self.crowd.parts |= {ref.sha256: bytearray(ref.size) for ref in whole if ref.sha256 not in self._waits}
        here = self._waits | (self._has & self.crowd.blobs.keys())
        mine = [ref for ref in task.bundles.values() if ref.sha256 not in here]
        self._pulls = {ref.sha256: Pull(ref, CHUNK, now_s) for ref in mine}
        for pull in list(self._pulls.values()):
            self._ask(pull, now_s)
        return self._work(now_s)

    def _ask(self, pull: Pull, now_s: float) -> None:
        for get in pull.requests(now_s):
            self._publish("blob/get", get)

    def _take(self, pull: Pull, index: int, payload: bytes, now_s: float) -> None:
        """Take a chunk; the tiny model is one."""
        if not pull.take_chunk(index, payload, now_s):
            return
        sha256 = pull.ref.sha256
        part = self.crowd.parts.get(sha256)
        if part is not None and pull.manifest is not None:
            offset, size = chunks.extent(pull.manifest, index)
            part[offset : offset + size] = payload
        if pull.done:
            del self._pulls[sha256]
            self._has.add(sha256)
            self.crowd.came(sha256, payload if part is None else bytes(part), now_s)
            self._work(now_s)
        elif part is not None:
            self._ask(pull, now_s)

    def go_on(self, now_s: float) -> None:
        """Begin to work if all blobs are here that others have fetched."""
        if self._waits and self._waits <= self.crowd.blobs.keys():
            self._waits = set()
            self._work(now_s)

    def _work(self, now_s: float) -> None:
        """Make an update as soon as everything is here."""
        task = self._task
        if task is None or self._pulls or not self._waits <= self.crowd.blobs.keys():
            return
        made = self.crowd.answer(task, self.number)
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
        self._offer(self._update, now_s)

    def _offer(self, update: Update, now_s: float) -> None:
        self._offered_s = now_s
        self._publish("update", update)

    def _give(self, get: wire.Get) -> None:
        """Send the manifest of a blob of the update, or the chunks that are asked for."""
        blob = self._sends.get(get.sha256)
        if self._update is None or blob is None:
            return
        for index in get.indices:
            topic = self.crowd.topics.chunk(self.device, "up", get.sha256, index)
            offset = index * get.chunk
            self.client.send(topic, blob.read(offset, min(get.chunk, blob.ref.size - offset)), 0, False)
        if not get.indices:
            topic = self.crowd.topics.blob(self.device, "up", get.sha256, "manifest")
            self.client.send(topic, wire.encode(chunks.cut(blob.ref, CHUNK, blob.read)), 1, False)

    def _acknowledged(self, ack: wire.Ack) -> None:
        if self._update is not None and (ack.job, ack.round) == (self._update.job, self._update.round):
            self.crowd.refused += not ack.accepted
            if not ack.accepted:
                print(f"{self.device}'s update is refused: {ack.reason}", file=sys.stderr, flush=True)
            self._update = None

    def _publish(self, leaf: str, message: Wired, retain: bool = False) -> int:
        topic = self.crowd.topics.device(self.device, "up", leaf)
        return self.client.send(topic, wire.encode(message), 1, retain)


def main(url: str, first: str, count: str) -> int:
    """Run boards until they are killed, or the broker hangs up; a line says when all are connected."""
    crowd = Crowd(url, int(first), int(count))
    try:
        crowd.connect()
        print("ready", flush=True)
        crowd.run()
    except (FedquiltError, OSError) as error:
        print(error, file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    os.nice(1)  # the measured coordinator has priority
    sys.exit(main(*sys.argv[1:]))
