"""A broker that forges, changes, replays, holds back, drops and reads: it can delay a signed fleet, and nothing else.

Boards speak to one Mosquitto, the coordinator to another; between them stands somebody with every right at both.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from certified import Certified
from processes import Processes, make_job, read_events, read_updates, undisturbed_state_hashes
from signed_payloads import payload_without_check
from waiting import LIMIT_S, wait_until

from fedquilt import wire
from fedquilt.coordinator.rounds.events import JobEnded, RoundCommitted, UpdateAccepted
from fedquilt.core import Task, Update, WireError
from fedquilt.transport.link import Message
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.link import MqttLink

TOPICS = wire.Topics("fleet")
ATTACKS = (
    "a forged task",
    "a changed task",
    "a changed update",
    "an update without a signature",
    "an update of an earlier round",
    "an update of an earlier start of the coordinator",
    "one board's update as another's",
    "one board's task to another",
    "a changed manifest",
    "a changed chunk",
    "an announcement of another coordinator",
)


def session_of(payload: bytes) -> bytes:
    return payload.split(b'"in":"')[1][:16]


class Mallory(threading.Thread):
    """Carries everything from one broker to the other, and does to it what `ATTACKS` says, whenever it can."""

    def __init__(self, boards: Broker, coordinator: Broker) -> None:
        super().__init__(daemon=True)
        self.done: dict[str, int] = defaultdict(int)
        self.dropped = 0
        self._ending = threading.Event()
        self._boards, self._coordinator = MqttLink(boards, "mallory"), MqttLink(coordinator, "mallory")
        self._boards.subscribe([f"{TOPICS.root}/dev/+/up/#"])
        self._coordinator.subscribe([f"{TOPICS.root}/dev/+/dn/#", TOPICS.coord])
        self._kept: dict[tuple[str, str], list[bytes]] = defaultdict(list)  # (device, leaf) -> payloads, in order
        self._once: set[object] = set()
        self._chunks = 0

    def run(self) -> None:
        while not self._ending.is_set():
            for source, target in ((self._boards, self._coordinator), (self._coordinator, self._boards)):
                source.wait(0.005)
                for message in source.receive():
                    for sent in self._carried(message):
                        target.publish(sent.topic, sent.payload, retain=self._keeps(sent.topic))

    def end(self) -> None:
        self._ending.set()
        self.join()
        self._boards.close()
        self._coordinator.close()

    @staticmethod
    def _keeps(topic: str) -> bool:
        return topic == TOPICS.coord or topic.rsplit("/", 1)[-1] in ("presence", "profile", "task")

    def _first(self, attack: str, key: object = None) -> bool:
        if (attack, key) in self._once:
            return False
        self._once.add((attack, key))
        self.done[attack] += 1
        return True

    def _carried(self, message: Message) -> Iterator[Message]:
        route, payload = wire.parse_topic(message.topic), message.payload
        if route.subtopic == "coord":
            yield message
            if self._first("an announcement of another coordinator", payload):
                yield message._replace(payload=wire.encode(wire.CoordState(online=True, epoch=4711)))
            return
        if route.subtopic == "chunk":
            if self._first("a changed chunk", route.sha256):
                yield message._replace(payload=bytes(len(payload)))
            self._chunks += 1
            if self._chunks % 5 != 0:
                yield message
            else:
                self.dropped += 1  # the side that wants it asks again
            return
        kept = self._kept[route.device, route.subtopic]
        others = [key for key in self._kept if key[0] != route.device and key[1] == route.subtopic and self._kept[key]]
        kept.append(payload)
        if route.subtopic == "task" and payload:
            yield from self._task(route, message, others)
        elif route.subtopic == "update":
            yield message._replace(payload=message.payload.replace(b'"weight":', b'"weight":1'))
            self.done["a changed update"] += 1
            yield message
            yield from self._update(route, message, kept, others)
            return
        elif route.subtopic == "manifest" and self._first("a changed manifest", (route.direction, route.sha256)):
            yield message._replace(payload=payload.replace(b'"digests":"', b'"digests":"00'))
        yield message

    def _task(self, route: wire.Route, message: Message, others: list[tuple[str, str]]) -> Iterator[Message]:
        try:
            task = wire.decode(payload_without_check(message.payload), Task)
        except WireError:
            return  # it takes a task back
        if self._first("a forged task", (task.round, route.device)):
            forged = Task(**{name: getattr(task, name) for name in task.__struct_fields__} | {"seed": 4711})
            yield message._replace(payload=wire.encode(forged))
        if self._first("a changed task", (task.round, route.device)):
            yield message._replace(payload=message.payload.replace(b'"lr":0.1', b'"lr":9.9'))
        for key in others:
            if self._first("one board's task to another", (task.round, route.device, key)):
                yield message._replace(payload=self._kept[key][-1])

    def _update(
        self, route: wire.Route, message: Message, kept: list[bytes], others: list[tuple[str, str]]
    ) -> Iterator[Message]:
        update = wire.decode(payload_without_check(message.payload), Update)
        if self._first("an update without a signature", (update.round, route.device)):
            unsigned = Update(**{name: getattr(update, name) for name in update.__struct_fields__} | {"weight": 0.5})
            yield message._replace(payload=wire.encode(unsigned))
        for older in kept[:-1]:
            said, session = wire.decode(payload_without_check(older), Update), session_of(older)
            rounds = (route.device, update.round, said.round, session)
            if said.round < update.round and self._first("an update of an earlier round", rounds):
                yield message._replace(payload=older)
            if session != session_of(message.payload) and self._first(
                "an update of an earlier start of the coordinator", route.device
            ):
                yield message._replace(payload=older)
        for key in others:
            if self._first("one board's update as another's", (update.round, route.device, key)):
                yield message._replace(payload=self._kept[key][-1])


def open_broker(site: Certified, folder: Path, mosquitto: Callable[..., Any]) -> str:
    """Start a broker with a fleet's own configuration, whose rules give a user "mallory" every right."""
    lines = site.configure_broker(folder)
    with (folder / "acl").open("a") as file:
        file.write("\nuser mallory\ntopic readwrite #\n")
    return str(mosquitto(*lines).url.replace("mqtt://", "mqtts://"))


def test_a_hostile_broker_delays_and_changes_no_bit_of_the_result(
    tmp_path: Path, mosquitto: Callable[..., Any], processes: Processes
) -> None:
    """Every attack is made, every one is refused and named in the log of the side that it meets."""
    plan, site = make_job(tmp_path, hidden=1000), Certified(tmp_path)  # a blob of one chunk has no manifest to change
    for_boards, for_coordinator = (open_broker(site, tmp_path / name, mosquitto) for name in ("boards", "coordinator"))
    mallory = Mallory(site.broker("mallory", url=for_boards), site.broker("mallory", url=for_coordinator))
    mallory.start()
    try:
        tables = plan.make_agent_tables()
        processes.start_agents(tmp_path, tables, lambda device: {"url": for_boards, **site.files(device)})
        own = [part for key, value in site.files("coordinator", "coordinator").items() for part in (f"--{key}", value)]
        home = tmp_path / "runs"
        run = ("run", str(tmp_path / "job.toml"), "--home", str(home), "--broker", for_coordinator, *own)
        processes.start("coordinator", tmp_path / "run.log", *run)
        wait_until(lambda: read_updates(home, 1) >= 1, "an answer in round 1")
        processes.kill("coordinator")
        processes.start("coordinator", tmp_path / "run.log", *run)
        wait_until(lambda: any(isinstance(fact, JobEnded) for fact in read_events(home)), "the end of the job")
        log = (tmp_path / "run.log").read_text()
        assert processes.running["coordinator"].wait(timeout=LIMIT_S) == 0, log
    finally:
        mallory.end()
    assert sorted(mallory.done) == sorted(ATTACKS)
    assert mallory.dropped

    found = read_events(home)
    counted = [(fact.round, fact.update.device) for fact in found if isinstance(fact, UpdateAccepted)]
    assert len(counted) == len(set(counted)) == 4 * 3
    assert [fact.state for fact in found if isinstance(fact, RoundCommitted)] == undisturbed_state_hashes(plan)

    log, boards = (tmp_path / "run.log").read_text(), (tmp_path / "agents.log").read_text()
    for text, leaf, said in (
        (boards, "dn/task", "unsigned: "),
        (boards, "dn/task", "forged: "),
        (boards, "dn/task", "stale: "),
        (boards, "manifest", "forged: "),
        (log, "up/update", "unsigned: "),
        (log, "up/update", "replayed: "),
        (log, "up/update", "stale: "),
        (log, "up/update", "forged: "),
        (log, "manifest", "forged: "),
    ):
        lines = [line for line in text.splitlines() if "dropped a message on" in line and leaf in line]
        assert any(said in line for line in lines), (leaf, said, lines, text[-3000:])
