"""Agent on virtual time, with coordinator, board and task process controlled by the test."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt import wire
from fedquilt.arrays import tensors
from fedquilt.blobs.store import BlobStore
from fedquilt.blobs.transfers import Transfers
from fedquilt.core import ClockError, Cost, OperatingPoint, Reading, Task, Update, WorkEstimate, derive_seed
from fedquilt.edge_agent.agent import Agent
from fedquilt.edge_agent.releases.release_kind import ReleaseKind
from fedquilt.edge_agent.runner_status import RunnerStatusReader
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.edge_agent.task.protocol import PRIVATE_FILE, Event, WorkRequest, WorkResult, write_tensors
from fedquilt.edge_agent.task.worker import TaskWorker
from fedquilt.transport.memory_link import MemoryBroker, MemoryLink

MODEL = {"w": np.arange(4, dtype=np.float32)}
TOPICS = wire.Topics("f")


class Board:
    """Board that draws 5 W, has the memory that the test sets, and records changes of its clocks."""

    board, memory_bytes, idle_w, provenance = "hand-made", 8 << 30, 1.0, "measured"
    # a task of 1 MFLOP takes 40 or 10 s; above idle 40 or 90 J
    points = (
        OperatingPoint(name="slow", flops_per_s=25e3, busy_w=2.0),
        OperatingPoint(name="fast", flops_per_s=100e3, busy_w=10.0),
    )
    available_bytes: int | None = None
    adjustable = clocks_unchanged = True
    clock_error = ""  # error of `pin_clocks`, or "" for success

    def __init__(self) -> None:
        self.clocks: list[str] = []  # pinned point, or "-" for unpinned, at each change
        self.sensor_reads_s: list[float] = []

    def read_sensors(self, now_s: float) -> Reading:
        self.sensor_reads_s.append(now_s)
        return Reading(energy_j=5.0 * now_s, energy_source="meter", power_w=5.0, available_bytes=self.available_bytes)

    def pin_clocks(self, point: OperatingPoint) -> OperatingPoint:
        if self.clock_error:
            raise ClockError(self.clock_error)
        self.clocks.append(point.name)
        return point

    def unpin_clocks(self) -> None:
        self.clocks.append("-")

    def task_cost(self, work: WorkEstimate, measured: Cost) -> Cost:
        return measured


class ScriptedWorker:
    """Worker whose tasks end when the test calls `finish`."""

    resident_bytes = 0

    def __init__(self) -> None:
        self.requests: list[WorkRequest] = []
        self.killed_externally = 0
        self.events: list[Event] = []

    def start(self, request: WorkRequest, now_s: float) -> None:
        self.requests.append(request)

    def poll_events(self, now_s: float) -> list[Event]:
        events, self.events = self.events, []
        return events

    def next_poll_s(self, now_s: float) -> float:
        return now_s + 1.0

    def kill(self) -> None:
        self.killed_externally += 1
        self.events = []

    def fds(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        self.kill()

    def finish(self, private: float | None = None, **changes: Any) -> None:
        """End the task with the received model plus one, and with a private state unless `private` is None."""
        request = self.requests[-1]
        output_folder = Path(request.output_folder)
        model = {name: array + 1 for name, array in tensors.read_tensors(Path(request.bundles["model"])).items()}
        ref = write_tensors(output_folder / "bundle", model)
        os.replace(output_folder / "bundle", output_folder / ref.sha256)
        private_ref = (
            None if private is None else write_tensors(output_folder / PRIVATE_FILE, {"c": np.array([private])})
        )
        values = {"weight": 3.0, "metrics": {"loss": 0.5}, "bundles": {"model": ref}, "wall_s": 2.0, "cpu_s": 1.5}
        values["private"] = private_ref
        self.events.append(WorkResult(**{**values, "peak_bytes": 9, "base_bytes": 4, **changes}))


class Site:
    """Agent of one device on virtual time, and the coordinator's side of the link, controlled by the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.broker = MemoryBroker(max_payload=2048)
        self.link = self.broker.connect()
        self.depot = BlobStore(folder / "coordinator")
        self.transfers = Transfers(self.link, self.depot, TOPICS, "dn", lambda device, sha256: True)
        self.link.subscribe(TOPICS.coordinator_filters())
        self.heard: dict[str, list[Any]] = {}
        self.board = Board()
        self.kinds: dict[str, ReleaseKind] = {}
        self.clock: Callable[[], float | None] = lambda: None
        self.runner: RunnerStatusReader | None = None
        self.start()

    def start(self, worker: TaskWorker | None = None, **changes: Any) -> None:
        """Kill the agent if it runs, and start another on the same folder."""
        if hasattr(self, "own"):
            self.broker.lose_client(self.own)
        self.worker = ScriptedWorker()
        self.own: MemoryLink = self.broker.connect()
        options = AgentSettings(**{"device": "d", "fleet": "f", "home": str(self.folder / "d"), **changes})
        self.agent = Agent(
            self.own,
            options,
            self.board,
            worker or self.worker,
            kinds=self.kinds,
            runner=self.runner,
            clock=lambda: self.clock(),
        )
        self.run()

    def run(self, seconds: float = 0.5) -> None:
        """Run both sides in steps of 10 ms of virtual time."""
        until_s = self.broker.now_s + seconds
        while self.broker.now_s < until_s:
            self.broker.now_s += 0.01
            self.broker.deliver_due()
            self.agent.step(self.broker.now_s)
            self.listen()

    def listen(self) -> None:
        for message in self.link.receive():
            route = wire.parse_topic(message.topic)
            if (
                not self.transfers.handle_message(route, message.payload, self.broker.now_s)
                and route.message_type
                and message.payload
            ):
                self.heard.setdefault(route.subtopic, []).append(wire.decode(message.payload, route.message_type))
        self.transfers.step(self.broker.now_s)
        self.transfers.take_finished()

    def say(self, leaf: str, message: Any, retain: bool = False) -> None:
        payload = message if isinstance(message, bytes) else wire.encode(message)
        self.link.publish(TOPICS.device_topic("d", "dn", leaf), payload, retain=retain)
        self.run()

    def ask(self, round: int = 0, **changes: Any) -> Task:
        """Send a task with MODEL plus the round number as the model."""
        model = self.depot.store_bytes(tensors.encode_tensors({name: array + round for name, array in MODEL.items()}))
        values: dict[str, Any] = {"attempt": 0, "method": "fedavg", "engine": "numpy", "actions": ("work",)}
        values |= {"params": {}, "bundles": {"model": model}, "work": WorkEstimate(flops=1e6), "deadline_s": 60.0}
        task = Task(**{"job": "j-1", "round": round, "seed": derive_seed(round), **values, **changes})
        self.say("task", task, retain=True)
        return task

    def fetch_model(self, update: Update) -> dict[str, np.ndarray]:
        """Fetch the model of an update, and return its tensors."""
        ref = update.bundles["model"]
        self.transfers.request_blob("d", ref)
        self.run()
        path = self.depot.blob_path(ref.sha256)
        assert path is not None
        return tensors.read_tensors(path)

    def ack(self, round: int = 0, accepted: bool = True) -> None:
        self.say("ack", wire.Ack(job="j-1", round=round, attempt=0, accepted=accepted, reason=""))

    def all(self, leaf: str) -> list[Any]:
        return self.heard.get(leaf, [])

    @property
    def outbox(self) -> list[str]:
        return sorted(os.listdir(self.folder / "d/outbox"))


def until_claimed(site: Site) -> None:
    site.ask()


def until_finished(site: Site) -> None:
    until_claimed(site)
    site.worker.finish(private=1.0)


def until_offered(site: Site) -> None:
    until_finished(site)
    site.run()
