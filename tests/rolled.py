"""Boards that do with releases what a test says, a coordinator that rolls out to them, and virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedquilt import wire
from fedquilt.blobs.store import BlobStore
from fedquilt.blobs.transfers import Transfers
from fedquilt.coordinator.delivery.executor import LinkExecutor
from fedquilt.coordinator.rounds.rollout import AnyRolloutEvent, Rollout, RolloutPlan
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import BlobRef, Profile
from fedquilt.host.disk import PRIVATE, Disk
from fedquilt.transport.memory_link import MemoryBroker

TOPICS = wire.Topics("f")
MODEL, OTHER = b"a model" * 1000, b"another model" * 1000
Judge = Callable[[str, wire.DesiredRelease], str]
"""What a board comes to with a release that it was sent: committed, refused, returned, or a phase that it stays in."""


def good(device: str, release: wire.DesiredRelease) -> str:
    """Every board is content."""
    return "committed"


class Board:
    """A board by hand, which fetches what it is sent and says how it ends; what it runs survives its going."""

    def __init__(
        self,
        broker: MemoryBroker,
        name: str,
        folder: Path,
        judge: Judge,
        labels: tuple[str, ...] = (),
        versions: Mapping[str, str] = {},
        engines: tuple[str, ...] = ("numpy", "onnx"),
    ) -> None:
        self.name, self.broker, self.judge, self.labels, self.versions = name, broker, judge, labels, dict(versions)
        self.engines = engines
        self.depot = BlobStore(folder, durable=False)
        self.serial, self.runs, self.before = 0, "", ""  # of the last release, blobs
        self.stored_chunks: set[str] = set()  # blobs that it has ever run
        self.releases: list[wire.DesiredRelease | None] = []
        self.boots = 0
        self.link: Any = None

    def come(self) -> None:
        """Connect, as an agent that has just begun."""
        self.boots += 1
        will = (
            TOPICS.device_topic(self.name, "up", "presence"),
            wire.encode(wire.Presence(online=False, boot=str(self.boots))),
        )
        self.link = self.broker.connect(will)
        self.transfers = Transfers(self.link, self.depot, TOPICS, "up", lambda device, sha256: True)
        self.wanted: wire.DesiredRelease | None = None
        self.link.subscribe(TOPICS.device_filters(self.name))
        self.say("presence", wire.Presence(online=True, boot=str(self.boots)), retain=True)
        profile = Profile(
            device=self.name,
            board="hand",
            memory_bytes=1 << 30,
            budget_bytes=1 << 29,
            engines=self.engines,
            versions=self.versions,
            labels=self.labels,
        )
        self.say("profile", profile, retain=True)

    def go(self) -> None:
        """Lose the connection to the broker."""
        self.broker.lose_client(self.link)
        self.link = None

    def say(self, leaf: str, message: Any, retain: bool = False) -> None:
        self.link.publish(TOPICS.device_topic(self.name, "up", leaf), wire.encode(message), retain=retain)

    def tell(self, release: wire.DesiredRelease, phase: Any, reason: str = "") -> None:
        self.say(
            "installed",
            wire.ReleaseStatus(
                rollout=release.rollout,
                kind=release.kind,
                serial=release.serial,
                phase=phase,
                current=self.runs,
                reason=reason,
            ),
        )

    def step(self, now_s: float) -> None:
        if self.link is None:
            return
        for message in self.link.receive():
            route = wire.parse_topic(message.topic)
            if self.transfers.handle_message(route, message.payload, now_s):
                continue
            if route.subtopic == "presence":
                self.say("presence", wire.Presence(online=True, boot="1"), retain=True)
            if route.subtopic in ("model", "agent"):
                self.take(wire.decode(message.payload, wire.DesiredRelease) if message.payload else None)
        self.transfers.step(now_s)
        for _, _, error in self.transfers.take_finished():
            assert error is None, error
            self.check()

    def take(self, release: wire.DesiredRelease | None) -> None:
        self.releases.append(release)
        if release is None or release.serial < self.serial:
            return
        if release.is_rollback:
            if release.serial > self.serial and self.runs and self.wanted is None:
                self.runs, self.before = self.before, ""
            self.serial, self.wanted = release.serial, None
            return self.tell(release, "returned", "asked to")
        again, self.serial = release.serial == self.serial, release.serial
        assert release.blob is not None
        if again and self.depot.has_blob(release.blob):
            return self.end(release)
        self.wanted = release
        self.tell(release, "fetching")
        self.transfers.request_blob(self.name, release.blob)

    def check(self) -> None:
        release, self.wanted = self.wanted, None
        if release is not None:
            self.tell(release, "checking")
            self.end(release)

    def end(self, release: wire.DesiredRelease) -> None:
        """Tell how the board ends with a release."""
        assert release.blob is not None
        ends = self.judge(self.name, release)
        if ends in ("committed", "soaking", "returned") and self.runs != release.blob.sha256:
            self.runs, self.before = release.blob.sha256, self.runs
            self.stored_chunks.add(self.runs)
            self.tell(release, "soaking")
        if ends == "returned":
            self.runs, self.before = self.before, ""
        if ends != "soaking":
            self.tell(release, ends, "" if ends == "committed" else "by this test")


class Ground:
    """A home with rollouts, its coordinator, boards, and time that the test moves on."""

    def __init__(self, folder: Path, disk: Disk = PRIVATE, home: Path | None = None) -> None:
        self.folder, self.disk, self.home = folder, disk, home or folder / "home"
        self.broker = MemoryBroker()
        self.boards: list[Board] = []
        self.facts: list[tuple[str, AnyRolloutEvent]] = []
        self.start()

    def start(self) -> None:
        """Start a coordinator process."""
        self.store = Store(self.home, disk=self.disk)
        will = (TOPICS.coord, wire.encode(wire.CoordState(online=False)))
        self.link = self.broker.connect(will)
        self.executor = LinkExecutor(self.link, "f", self.store.blob_store, self.store.begin_epoch())
        self.server = Server(
            self.executor, self.store, observe_rollout=lambda rollout, event: self.facts.append((rollout.id, event))
        )

    def restart(self) -> None:
        """Kill the coordinator, and start another one on the same folder."""
        self.broker.lose_client(self.link)
        self.store.close()
        self.start()

    def fleet(self, count: int, judge: Judge = good, away: int = 0, **options: Any) -> list[Board]:
        """Add boards, of which the last `away` have not come yet."""
        new = [
            Board(self.broker, f"b-{number:03d}", self.folder / "boards" / f"{number}", judge, **options)
            for number in range(len(self.boards), len(self.boards) + count)
        ]
        self.boards += new
        for board in new[: count - away]:
            board.come()
        return new

    def deploy(self, payload: bytes = MODEL, **changes: Any) -> str:
        """Queue a rollout of a model."""
        blob: BlobRef = self.store.blob_store.store_bytes(payload)
        return self.store.rollouts.add_rollout(
            RolloutPlan(**{"kind": "model", "name": "digits", "blob": blob, **changes})
        )

    def play(self, seconds: float = 10.0) -> None:
        """Let virtual time pass in steps of 0.1 s."""
        end_s = self.broker.now_s + seconds
        while self.broker.now_s < end_s:
            self.broker.now_s += 0.1
            self.broker.deliver_due()
            self.server.step(self.broker.now_s)
            for board in self.boards:
                board.step(self.broker.now_s)

    def state(self, id: str = "") -> Rollout:
        """A rollout as the database has it."""
        return self.store.rollouts.find_rollout(id).state

    def having(self, blob: bytes = MODEL) -> list[str]:
        """Boards that run a model."""
        sha256 = self.store.blob_store.store_bytes(blob).sha256
        return [board.name for board in self.boards if board.runs == sha256]

    def ever(self, blob: bytes = MODEL) -> list[str]:
        """Boards that have ever run a model."""
        sha256 = self.store.blob_store.store_bytes(blob).sha256
        return [board.name for board in self.boards if sha256 in board.stored_chunks]
