"""Coordinator on virtual time, and devices whose messages a test publishes one by one."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from fedquilt import wire
from fedquilt.arrays import tensors
from fedquilt.blobs.store import BlobStore
from fedquilt.blobs.transfers import Transfers
from fedquilt.coordinator import settings
from fedquilt.coordinator.background_worker import BackgroundWorker
from fedquilt.coordinator.delivery.executor import LinkExecutor
from fedquilt.coordinator.delivery.monitoring_executor import DeviceStatusTracker, MonitoringExecutor
from fedquilt.coordinator.rounds.events import AnyEvent, RoundCommitted
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.settings import CoordinatorLimits
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import CODECS, OperatingPoint, Profile, Task, Update, Usage
from fedquilt.formats import job_bundle
from fedquilt.host.disk import PRIVATE, Disk
from fedquilt.transport.memory_link import MemoryBroker

NETWORK = {"name": "mlp", "inputs": 2, "hidden": [], "classes": 2}
MODEL = {"1.weight": np.zeros((2, 2), np.float32), "1.bias": np.zeros(2, np.float32)}
TABLE = {"name": "j", "method": "fedavg", "rounds": 1, "cohort": {"deadline_s": 30.0, "attempts": 1}}


class Hand:
    """Device whose messages are published by the test."""

    def __init__(self, broker: MemoryBroker, name: str, folder: Path, codecs: tuple[str, ...] = CODECS) -> None:
        self.name, self.topics = name, wire.Topics("f")
        self.link = broker.connect()
        self.depot = BlobStore(folder)
        self.transfers = Transfers(self.link, self.depot, self.topics, "up", lambda device, sha256: True)
        self.link.subscribe(self.topics.device_filters(name))
        self.tasks: list[Task | None] = []
        self.acks: list[wire.Ack] = []
        self.presence, self.answers = (
            wire.Presence(online=True, boot="1"),
            True,
        )  # whether to answer requests for the presence
        self.say("presence", self.presence, retain=True)
        self.profile = Profile(
            device=name,
            board="hand",
            memory_bytes=1 << 30,
            budget_bytes=1 << 29,
            engines=("numpy",),
            versions={},
            codecs=codecs,
        )
        self.say("profile", self.profile, retain=True)

    def publish_operating_point(self, **point: float) -> None:
        """Publish a profile with one operating point."""
        points = (OperatingPoint(name="p", **point),)
        self.say("profile", msgspec.structs.replace(self.profile, points=points), retain=True)

    def say(self, leaf: str, message: Any, retain: bool = False) -> None:
        payload = message if isinstance(message, bytes) else wire.encode(message)
        self.link.publish(self.topics.device_topic(self.name, "up", leaf), payload, retain=retain)

    def answer(self, model: dict[str, np.ndarray], **changes: Any) -> Update:
        task = next(task for task in reversed(self.tasks) if task)
        ref = self.depot.store_bytes(tensors.encode_tensors(model))
        values = {"job": task.job, "round": task.round, "attempt": task.attempt, "device": self.name, "weight": 1.0}
        values["state"] = task.state
        update = Update(**{**values, "bundles": {"model": ref}, "metrics": {}, "usage": Usage(), **changes})
        self.say("update", update)
        return update

    def listen(self, now_s: float) -> None:
        for message in self.link.receive():
            route = wire.parse_topic(message.topic)
            if self.transfers.handle_message(route, message.payload, now_s):
                continue
            if route.subtopic == "task":
                self.tasks.append(wire.decode(message.payload, Task) if message.payload else None)
            elif route.subtopic == "presence" and self.answers:
                self.say("presence", self.presence, retain=True)
            elif route.subtopic == "ack":
                self.acks.append(wire.decode(message.payload, wire.Ack))
        self.transfers.step(now_s)


class Stage:
    """Coordinator with devices on virtual time. The fixtures close the stores of all instances in `made`."""

    made: ClassVar[list[Stage]] = []

    def __init__(
        self,
        folder: Path,
        limits: CoordinatorLimits | None = None,
        worker: BackgroundWorker | None = None,
        model: dict[str, np.ndarray] = MODEL,
        network: dict[str, Any] = NETWORK,
        uses_wall_clock: bool = False,
        **table: Any,
    ) -> None:
        self.folder, self.broker, self.facts, self.worker = folder, MemoryBroker(), [], worker
        self.uses_wall_clock = uses_wall_clock  # whether restarted coordinators use the store's clock
        self.limits, self.all = limits, limits is not None  # `all`: serve all jobs instead of only `job`
        self.steps: list[tuple[float, float, int]] = []  # time, next due time and number of commits of each step
        job_bundle.write_bundle(
            folder / "bundle", {"network": network, "flops": 8}, {"model": tensors.encode_tensors(model)}
        )
        self.disk: Disk = PRIVATE  # used from the next restart on
        self.store = Store(folder / "home")
        self.job = self.store.add_job(settings.parse_job({**TABLE, **table}), folder / "bundle")
        self.hands: list[Hand] = []
        self.made.append(self)
        self.start()

    def start(self) -> None:
        """Start a coordinator process."""
        self.link = self.broker.connect()
        self.executor = LinkExecutor(self.link, "f", self.store.blob_store, self.store.begin_epoch())
        self.server = Server(
            self.executor,
            self.store,
            self.observe,
            only=None if self.all else self.job,
            limits=self.limits or CoordinatorLimits(),
            worker=self.worker,
            uses_wall_clock=self.uses_wall_clock,
        )

    def add(self, name: str, **table: Any) -> str:
        """Queue another job and serve all jobs from now on. Return the id of its run."""
        self.all, self.server._only = True, None
        return self.store.add_job(settings.parse_job({**TABLE, "name": name, **table}), self.folder / "bundle")

    def restart(self) -> None:
        """Kill the coordinator, and start another on the same folder."""
        self.broker.lose_client(self.link)
        self.store.close()
        self.store = Store(self.folder / "home", disk=self.disk)
        self.start()

    def observe(self, job: Any, event: AnyEvent) -> None:
        self.facts.append(event)

    def hand(self, name: str, **changes: Any) -> Hand:
        self.hands.append(Hand(self.broker, name, self.folder / name, **changes))
        return self.hands[-1]

    def connect(self, names: str) -> list[Hand]:
        """Connect a device for each letter, and advance virtual time until they have their tasks."""
        hands = [self.hand(name) for name in names]
        self.play()
        return hands

    def submit(self, *hands: Hand, factor: float = 1.0) -> None:
        """Submit updates with this value in all tensors, and advance virtual time until they are counted."""
        for hand in hands:
            hand.answer(constant_model(factor))
        self.play()

    def play(self, seconds: float = 2.0) -> None:
        """Advance virtual time in steps of 50 ms."""
        end_s = self.broker.now_s + seconds
        while self.broker.now_s < end_s:
            self.broker.now_s += 0.05
            self.broker.deliver_due()
            if not self.server.finished:
                self.steps.append(
                    (self.broker.now_s, self.server.step(self.broker.now_s), len(self.told(RoundCommitted)))
                )
            for hand in self.hands:
                hand.listen(self.broker.now_s)

    def told(self, kind: type) -> list[Any]:
        return [event for event in self.facts if isinstance(event, kind)]


class MonitoredStage(Stage):
    """Coordinator that tracks the status of devices, like `fedquilt serve`."""

    def start(self) -> None:
        self.link = self.broker.connect()
        self.noted = DeviceStatusTracker(self.store.home, lambda: 1_800_000_000.0 + self.broker.now_s)
        self.executor = MonitoringExecutor(self.link, "f", self.store.blob_store, self.store.begin_epoch(), self.noted)
        self.server = Server(self.executor, self.store, self.observe)


class Killed(BaseException):
    """Simulated end of the process."""


class SlowWorker(BackgroundWorker):
    """Worker that runs submitted items when the test calls `run_pending`, and stores a sum with each update.

    Args:
        runs_all: Whether `run_pending` runs all pending items instead of one.
        large_bytes: Parameter of `BackgroundWorker`.
    """

    def __init__(self, runs_all: bool = False, large_bytes: int = 0) -> None:
        super().__init__(large_bytes=large_bytes)
        self.min_unsaved_ratio, self.runs_all = 0.0, runs_all
        self.begun: deque[tuple[Any, Any]] = deque()

    @property
    def is_idle(self) -> bool:
        return not self.begun and super().is_idle

    def submit(self, piece: Any, then: Any) -> None:
        self.begun.append((piece, then))

    def run_pending(self) -> None:
        while self.begun or not self.runs_all:
            super().submit(*self.begun.popleft())
            if not self.runs_all:
                return


def constant_model(factor: float = 1.0) -> dict[str, np.ndarray]:
    return {name: np.full_like(array, factor) for name, array in MODEL.items()}
