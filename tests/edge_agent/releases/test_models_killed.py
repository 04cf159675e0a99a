"""Models on a disk that loses what was not synced: whenever the process dies, `current` leads to a whole model.

The whole agent, from the release on its topic to the commit or the return, dies at each call of its disk in turn.
"""

from __future__ import annotations

import errno
import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from one_agent import Board, ScriptedWorker
from toy_kinds import release

from fedquilt import wire
from fedquilt.blobs.store import BlobStore
from fedquilt.blobs.transfers import Transfers
from fedquilt.edge_agent.agent import Agent
from fedquilt.edge_agent.releases.models import CURRENT, MODEL, ModelReleases
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.edge_agent.task.protocol import ProcessRequest, WorkResult
from fedquilt.transport.memory_link import MemoryBroker
from tests.faults.disk import SimDisk, SimulatedCrash, SimulatedFileSystem

TOPICS = wire.Topics("f")
HOME = "/home"
FIRST, SECOND = b"first model" * 50, b"second model" * 50


class Checks(ScriptedWorker):
    """A check's process that finds nothing wrong, at once."""

    def start(self, order: ProcessRequest, now_s: float) -> None:
        self.events = [WorkResult(metrics={"accuracy": 0.9})]


class Deployed:
    """A board whose disk is simulated, and a coordinator that has two models."""

    def __init__(self, folder: Path) -> None:
        self.platter = SimulatedFileSystem(HOME, folder / "board")
        self.broker = MemoryBroker()
        self.link = self.broker.connect()
        self.depot = BlobStore(folder / "coordinator")
        self.transfers = Transfers(self.link, self.depot, TOPICS, "dn", lambda device, sha256: True)
        self.link.subscribe(TOPICS.coordinator_filters())
        self.told: list[wire.ReleaseStatus] = []
        self.refs = [self.depot.store_bytes(payload) for payload in (FIRST, SECOND)]
        self.calls = 0

    def begin(self, gate: Callable[[str, object], OSError | None] = lambda what, where: None) -> None:
        """A process of the agent; `gate` decides about each call of its disk."""

        def counted(what: str, where: object) -> OSError | None:
            self.calls += 1
            return gate(what, where)

        self.disk = SimDisk(self.platter, counted)
        settings = AgentSettings(device="d", fleet="f", home=HOME, telemetry_s=1e9)
        self.own = self.broker.connect()
        clock = lambda: self.broker.now_s  # noqa: E731
        self.models = ModelReleases(
            settings, Board(), Checks(), disk=self.disk, check_graph=lambda path: None, clock=clock
        )
        self.agent = Agent(
            self.own,
            settings,
            Board(),
            ScriptedWorker(),
            disk=self.disk,
            clock=lambda: None,
            kinds={"model": self.models},
        )

    def run(self, seconds: float) -> None:
        until_s = self.broker.now_s + seconds
        while self.broker.now_s < until_s:
            self.broker.now_s += 0.05
            self.broker.deliver_due()
            self.agent.step(self.broker.now_s)
            for message in self.link.receive():
                route = wire.parse_topic(message.topic)
                handled = self.transfers.handle_message(route, message.payload, self.broker.now_s)
                if not handled and route.subtopic == "installed":
                    self.told.append(wire.decode(message.payload, wire.ReleaseStatus))
            self.transfers.step(self.broker.now_s)

    def deploy(self, serial: int, **changes: object) -> None:
        ref = self.refs[serial - 1] if serial <= 2 else None
        wanted = release(serial, ref, soak_s=1.0, **changes)
        self.link.publish(TOPICS.device_topic("d", "dn", "model"), wire.encode(wanted), retain=True)

    def current(self) -> bytes | None:
        """The model that `current` leads to; None: there is no such link."""
        disk = SimDisk(self.platter)
        name = disk.read_link(f"{HOME}/models/{CURRENT}")
        if name is None:
            return None
        found = disk.read(f"{HOME}/models/{CURRENT}/{MODEL}")
        assert hashlib.sha256(found).hexdigest().startswith(name)
        return found

    def dies(self, roll: random.Random | None) -> None:
        """The process is gone; the power too, with `roll`."""
        self.disk.release_locks()
        self.platter.end_processes()
        self.broker.lose_client(self.own)
        if roll is not None:
            self.platter.fail_power(roll)


def at_call(number: int) -> Callable[[str, object], OSError | None]:
    """A gate at which the process dies with its call of this number, from 0."""
    left = iter(range(number))

    def gate(what: str, where: object) -> None:
        if next(left, None) is None:
            raise SimulatedCrash

    return gate


def board(folder: Path) -> Deployed:
    """A board on which the first model was committed."""
    made = Deployed(folder)
    made.begin()
    made.deploy(1)
    made.run(4.0)
    assert made.told[-1].phase == "committed"
    assert made.current() == FIRST
    made.dies(None)
    return made


def ended(made: Deployed, back: bool) -> None:
    """Everything until the second model is committed, or, with `back`, is taken back while it soaks."""
    made.deploy(2)
    made.run(1.2)
    if back:
        made.deploy(3, rollout="r2", is_rollback=True)
    made.run(6.0)


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("back", [False, True])
def test_killed_at_every_call_of_its_disk_it_ends_as_if_it_had_not(tmp_path: Path, back: bool, power: bool) -> None:
    number, died = 0, True
    while died:
        made, died = board(tmp_path / str(number)), False
        try:
            made.begin(at_call(number))
            ended(made, back)
        except SimulatedCrash:
            died = True
        assert made.current() in (FIRST, SECOND)
        made.dies(random.Random(number) if power else None)
        assert made.current() in (FIRST, SECOND)
        made.begin()
        ended(made, back)
        assert made.current() == (FIRST if back else SECOND)
        assert made.told[-1].phase == ("returned" if back else "committed")
        left = {entry.name for entry in SimDisk(made.platter).entries(f"{HOME}/models") if entry.is_dir}
        assert left - {"current", "previous"} == {ref.sha256[:16] for ref in made.refs[: 1 if back else 2]}
        number += 1
    assert number > 60


def test_with_a_full_disk_at_every_call_what_runs_is_whole_and_the_end_is_told(tmp_path: Path) -> None:
    number, refused = 0, 0
    while True:
        made = board(tmp_path / str(number))
        left = iter(range(number))
        full: list[str] = []

        def gate(what: str, where: object, left=left, full=full) -> OSError | None:
            if what not in ("write", "name", "sync") or next(left, None) is not None:
                return None
            full.append(what)
            return OSError(errno.ENOSPC, "No space left on device")

        made.begin()
        made.disk._rate_limiter = gate
        ended(made, back=False)
        assert made.current() in (FIRST, SECOND)
        told = made.told[-1]
        if made.current() == FIRST:
            assert told.phase == "refused"
        else:
            assert told.phase == "committed" or "rollback pending" in told.reason
        if told.phase != "committed":
            assert "No space left on device" in told.reason
            refused += 1
        made.dies(None)
        made.begin()
        made.run(6.0)
        assert made.current() in (FIRST, SECOND)
        if not full:
            break
        number += 1
    assert refused > 10
