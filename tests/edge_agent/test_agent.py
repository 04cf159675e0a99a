"""The agent against a coordinator driven by hand, over a MemoryBroker; and once as a real daemon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedquilt import profiles, tensors, wire
from fedquilt.blobs.store import Depot
from fedquilt.blobs.transfer import Transfers
from fedquilt.core import (
    BlobRef,
    ClockError,
    Cost,
    JobError,
    OperatingPoint,
    Profile,
    Reading,
    Task,
    Update,
    Work,
    derive_seed,
)
from fedquilt.edge_agent.agent import Agent, run_agent
from fedquilt.edge_agent.devices.simulated import SimulatedDevice
from fedquilt.edge_agent.events import Acked, Failed
from fedquilt.edge_agent.power.governor import Policy
from fedquilt.edge_agent.settings import AgentSettings, GovernorSettings
from fedquilt.edge_agent.task.outputs import PRIVATE, write_tensors
from fedquilt.edge_agent.task.protocol import Event, Loaded, Order, Outcome, Progressed
from fedquilt.edge_agent.task.worker import InlineWorker, Worker
from fedquilt.transport.link import MemoryBroker, MemoryLink

MODEL = {"w": np.arange(4, dtype=np.float32)}
LINEAR = {"1.weight": np.zeros((2, 4), np.float32), "1.bias": np.zeros(2, np.float32)}
SGD = {"network": {"name": "mlp", "inputs": 4, "hidden": [], "classes": 2}, "epochs": 1, "batch": 4, "lr": 0.1}
TOPICS = wire.Topics("f")


class Board:
    """5 W whenever it is asked, as much memory as the test says, and clocks that note what is done to them."""

    board, memory_bytes, idle_w, provenance = "hand-made", 8 << 30, 1.0, "measured"
    # a task of 1 MFLOP takes 40 or 10 s; above idle 40 or 90 J
    points = (
        OperatingPoint(name="slow", flops_per_s=25e3, busy_w=2.0),
        OperatingPoint(name="fast", flops_per_s=100e3, busy_w=10.0),
    )
    available_bytes: int | None = None
    adjustable = holds = True
    stuck = ""  # why it takes no clocks

    def __init__(self) -> None:
        self.clocks: list[str] = []  # the point held, or "-", at each change
        self.reads_s: list[float] = []

    def read(self, now_s: float) -> Reading:
        self.reads_s.append(now_s)
        return Reading(energy_j=5.0 * now_s, energy_source="meter", power_w=5.0, available_bytes=self.available_bytes)

    def hold(self, point: OperatingPoint) -> OperatingPoint:
        if self.stuck:
            raise ClockError(self.stuck)
        self.clocks.append(point.name)
        return point

    def release(self) -> None:
        self.clocks.append("-")

    def cost(self, work: Work, measured: Cost) -> Cost:
        return measured


class Bench:
    """A worker that ends when the test says so, and writes what the test gives it."""

    resident_bytes = 0

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.killed = 0
        self.events: list[Event] = []

    def start(self, order: Order, now_s: float) -> None:
        self.orders.append(order)

    def poll(self, now_s: float) -> list[Event]:
        events, self.events = self.events, []
        return events

    def due_s(self, now_s: float) -> float:
        return now_s + 1.0

    def kill(self) -> None:
        self.killed += 1

    def fds(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        self.kill()

    def finish(self, private: float | None = None, **changes: Any) -> None:
        """The model of the order plus one; private state if the test wants it."""
        order = self.orders[-1]
        out = Path(order.out)
        model = {name: array + 1 for name, array in tensors.read(Path(order.bundles["model"])).items()}
        ref = write_tensors(out / "bundle", model)
        os.replace(out / "bundle", out / ref.sha256)
        left = None if private is None else write_tensors(out / PRIVATE, {"c": np.array([private])})
        values = {"weight": 3.0, "metrics": {"loss": 0.5}, "bundles": {"model": ref}, "wall_s": 2.0, "cpu_s": 1.5}
        values["private"] = left
        self.events.append(Outcome(**{**values, "peak_bytes": 9, "base_bytes": 4, **changes}))


class Site:
    """One device, one coordinator played by the test, and time that the test moves on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.broker = MemoryBroker(max_payload=2048)
        self.link = self.broker.connect()
        self.depot = Depot(folder / "coordinator")
        self.transfers = Transfers(self.link, self.depot, TOPICS, "dn", lambda device, sha256: True)
        self.link.subscribe(TOPICS.for_coordinator())
        self.heard: dict[str, list[Any]] = {}
        self.board = Board()
        self.start()

    def start(self, worker: Worker | None = None, **changes: Any) -> None:
        """A new process on the same folder; one that ran before has died in the middle of whatever it did."""
        if hasattr(self, "own"):
            self.broker.lose(self.own)
        self.bench = Bench()
        self.own: MemoryLink = self.broker.connect()
        options = AgentSettings(**{"device": "d", "fleet": "f", "home": str(self.folder / "d"), **changes})
        self.agent = Agent(self.own, options, self.board, worker or self.bench)
        self.run()

    def run(self, seconds: float = 0.5) -> None:
        """Let both sides do what they have to, in steps of 10 ms."""
        until_s = self.broker.now_s + seconds
        while self.broker.now_s < until_s:
            self.broker.now_s += 0.01
            self.broker.deliver()
            self.agent.step(self.broker.now_s)
            self.listen()

    def listen(self) -> None:
        for message in self.link.receive():
            route = wire.route(message.topic)
            if not self.transfers.handle(route, message.payload, self.broker.now_s) and route.kind and message.payload:
                self.heard.setdefault(route.leaf, []).append(wire.decode(message.payload, route.kind))
        self.transfers.step(self.broker.now_s)
        self.transfers.take_done()

    def say(self, leaf: str, message: Any, retain: bool = False) -> None:
        payload = message if isinstance(message, bytes) else wire.encode(message)
        self.link.publish(TOPICS.device("d", "dn", leaf), payload, retain=retain)
        self.run()

    def ask(self, round: int = 0, **changes: Any) -> Task:
        """Ask for a round's work on MODEL plus the round's number."""
        model = self.depot.put(tensors.encode({name: array + round for name, array in MODEL.items()}))
        values: dict[str, Any] = {"attempt": 0, "method": "fedavg", "engine": "numpy", "actions": ("work",)}
        values |= {"params": {}, "bundles": {"model": model}, "work": Work(flops=1e6), "deadline_s": 60.0}
        task = Task(**{"job": "j-1", "round": round, "seed": derive_seed(round), **values, **changes})
        self.say("task", task, retain=True)
        return task

    def fetch(self, update: Update) -> dict[str, np.ndarray]:
        """Pull an update's model as the coordinator does."""
        ref = update.bundles["model"]
        self.transfers.want("d", ref)
        self.run()
        path = self.depot.path(ref.sha256)
        assert path is not None
        return tensors.read(path)

    def ack(self, round: int = 0, accepted: bool = True) -> None:
        self.say("ack", wire.Ack(job="j-1", round=round, attempt=0, accepted=accepted, reason=""))

    def all(self, leaf: str) -> list[Any]:
        return self.heard.get(leaf, [])

    @property
    def outbox(self) -> list[str]:
        return sorted(os.listdir(self.folder / "d/outbox"))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


# -- a task goes round ----------------------------------------------------------------------------


def test_a_task_goes_round_and_leaves_nothing_behind(site: Site) -> None:
    """Claim, fetch, work, offer, pull, acknowledge; then the outbox and its blob are gone."""
    task = site.ask()
    assert [(claim.accepted, claim.round) for claim in site.all("claim")] == [(True, 0)]
    (order,) = site.bench.orders
    assert order.task == task
    np.testing.assert_array_equal(tensors.read(Path(order.bundles["model"]))["w"], MODEL["w"])
    site.bench.finish()
    site.run()
    update = site.all("update")[-1]
    np.testing.assert_array_equal(site.fetch(update)["w"], MODEL["w"] + 1)
    assert site.outbox == ["j-1@0"]
    site.ack()
    assert site.outbox == []
    assert not site.agent.local.depot.has(update.bundles["model"])
    offered = len(site.all("update"))
    site.run(200.0)
    assert len(site.all("update")) == offered


def test_an_update_says_what_it_took(site: Site) -> None:
    """5 W for the time between begin and end; the bytes of the blobs fetched and offered."""
    task = site.ask()
    site.run(3.0)
    site.bench.finish()
    site.run(0.1)
    (update,) = site.all("update")
    usage = update.usage
    assert (update.weight, update.metrics) == (3.0, {"loss": 0.5})
    assert (usage.wall_s, usage.cpu_s, usage.peak_bytes, usage.base_bytes) == (2.0, 1.5, 9, 4)
    assert usage.energy_j == pytest.approx(5.0 * 3.5, abs=2.5)  # `ask` lets half a second pass
    assert usage.idle_j == pytest.approx(usage.energy_j / 5.0)  # 1 W in the same time
    assert usage.energy_error_j == pytest.approx(0.5, abs=0.06)  # a tenth of a second
    assert usage.energy_source == "meter, counter"
    assert usage.point is None  # nothing was known of the work
    assert usage.down_bytes == task.bundles["model"].size
    assert usage.up_bytes == update.bundles["model"].size


def test_only_blobs_of_the_outbox_are_served(site: Site) -> None:
    """Whoever may publish on dn/ may not read a device's disk."""
    task = site.ask()
    secret = site.agent.local.depot.put(b"private")
    for ref in (secret, task.bundles["model"]):
        site.depot.drop(ref.sha256)
        site.transfers.want("d", ref)
    site.run(5.0)
    assert not site.depot.has(secret)
    assert not site.depot.has(task.bundles["model"])


def test_a_blob_that_is_here_is_not_fetched_again(site: Site) -> None:
    """Two rounds on the same model: the second one costs no download."""
    first = site.ask()
    site.bench.finish()
    site.run()
    site.ack()
    site.ask(1, bundles=first.bundles)
    site.bench.finish()
    site.run()
    assert [update.usage.down_bytes > 0 for update in site.all("update")] == [True, False]


# -- it is killed, at every point -----------------------------------------------------------------


def _claimed(site: Site) -> None:
    site.ask()


def _finished(site: Site) -> None:
    _claimed(site)
    site.bench.finish(private=1.0)


def _offered(site: Site) -> None:
    _finished(site)
    site.run()


def _pulled(site: Site) -> None:
    _offered(site)
    site.fetch(site.all("update")[-1])


@pytest.mark.parametrize(("stage", "again"), [(_claimed, True), (_finished, True), (_offered, False), (_pulled, False)])
def test_killed_at_any_point_it_delivers_the_same_update_once(
    site: Site, stage: Callable[[Site], None], again: bool
) -> None:
    """Before the result is on disk the work is done again, from the old state; after it never."""
    stage(site)
    site.start()
    if again:
        assert site.bench.orders[-1].private is None
        site.bench.finish(private=1.0)
        site.run()
    assert len(site.bench.orders) == int(again)
    np.testing.assert_array_equal(site.fetch(site.all("update")[-1])["w"], MODEL["w"] + 1)
    site.ack()
    assert site.outbox == []
    state = site.agent.local.private("j-1", 0)
    assert state.path is not None
    assert tensors.read(Path(state.path))["c"] == 1.0


def test_killed_after_the_acknowledgement_it_does_not_work_for_the_task_again(site: Site) -> None:
    """The retained task is still on the broker."""
    _offered(site)
    site.ack()
    site.start()
    assert site.bench.orders == []
    offered = len(site.all("update"))
    site.run(100.0)
    assert len(site.all("update")) == offered


def test_the_next_round_begins_from_the_private_state_that_counted(site: Site) -> None:
    """It waits for the answer about the last contribution, and takes its state only if it was accepted."""
    _offered(site)
    site.ask(1, counted=0)
    assert len(site.bench.orders) == 1
    site.ack(0, accepted=True)
    second = site.bench.orders[-1]
    assert second.private is not None
    assert tensors.read(Path(second.private))["c"] == 1.0
    site.bench.finish(private=2.0)
    site.run()
    site.ack(1, accepted=False)
    site.ask(2, counted=0)
    third = site.bench.orders[-1].private
    assert third is not None
    assert tensors.read(Path(third))["c"] == 1.0


def test_a_damaged_update_in_the_outbox_is_worked_for_again(site: Site) -> None:
    """It is found when the agent starts, and when the blob is asked for."""
    _offered(site)
    (blob,) = site.all("update")[-1].bundles.values()
    _flip(site.folder / "d/blobs" / blob.sha256)
    site.start()
    assert len(site.bench.orders) == 1
    site.bench.finish(private=1.0)
    site.run()
    np.testing.assert_array_equal(site.fetch(site.all("update")[-1])["w"], MODEL["w"] + 1)


def test_a_damaged_blob_of_a_task_is_fetched_again(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """The next round is about the same model; the agent has been restarted, and the disk has flipped a bit of it."""
    first = site.ask()
    site.bench.finish()
    site.run()
    site.ack()
    (blob,) = first.bundles.values()
    _flip(site.folder / "d/blobs" / blob.sha256)
    site.start()
    site.ask(1, bundles=first.bundles)
    np.testing.assert_array_equal(tensors.read(Path(site.bench.orders[-1].bundles["model"]))["w"], MODEL["w"])
    assert f"blob {blob.sha256[:12]}" in caplog.text


def _flip(path: Path, at: int = -1) -> None:
    """Flip a bit of a file."""
    payload = bytearray(path.read_bytes())
    payload[at] ^= 4
    path.write_bytes(payload)


# -- what can go wrong ----------------------------------------------------------------------------


def test_work_that_fails_is_refused_with_its_reason(site: Site) -> None:
    """The coordinator can ask somebody else."""
    site.ask()
    site.bench.events.append(Outcome(code="data", reason="no examples of class 3"))
    site.run()
    claim = site.all("claim")[-1]
    assert (claim.accepted, claim.code, claim.reason) == (False, "data", "no examples of class 3")


def test_a_task_whose_process_somebody_killed_is_carried_out_all_the_same(site: Site) -> None:
    """The coordinator hears of it once it is done, and is never told of a refusal."""
    site.ask()
    site.bench.events.append(Outcome(code="failed", reason="killed by somebody", killed=True))
    site.run()
    first, second = site.bench.orders
    assert first.task == second.task
    assert not any(Path(second.out).iterdir())
    site.bench.finish()
    site.run()
    assert len(site.all("update")) == 1
    assert all(claim.accepted for claim in site.all("claim"))


def test_a_board_without_memory_left_refuses(site: Site) -> None:
    """Its sensors are asked when the task comes."""
    site.board.available_bytes = 1 << 20
    site.ask()
    assert site.all("claim")[-1].code == "memory"
    assert site.bench.orders == []


def test_memory_that_the_waiting_task_process_holds_counts_as_free(site: Site) -> None:
    """The next task runs in that same process, or in place of it; the board itself has only a megabyte left."""
    site.board.available_bytes = 1 << 20
    site.bench.resident_bytes = 1 << 30
    site.ask()
    assert site.all("claim")[-1].accepted
    assert len(site.bench.orders) == 1


def test_a_task_larger_than_the_disk_is_refused(site: Site) -> None:
    """Before anything is fetched."""
    site.ask(bundles={"model": BlobRef(sha256="a" * 64, size=1 << 52)})
    claim = site.all("claim")[-1]
    assert (claim.accepted, claim.code) == (False, "disk")
    assert "are free" in claim.reason


def test_a_result_that_cannot_be_kept_is_refused_and_the_agent_goes_on(site: Site) -> None:
    """Here the outbox is no folder any more, as after a repair of the file system."""
    site.ask()
    (site.folder / "d/outbox").rmdir()
    (site.folder / "d/outbox").touch()
    site.bench.finish()
    site.run()
    claim = site.all("claim")[-1]
    assert (claim.accepted, claim.code) == (False, "disk")
    assert "cannot keep the result of j-1, round 0" in claim.reason
    (site.folder / "d/outbox").unlink()
    (site.folder / "d/outbox").mkdir()
    site.ask(1)
    site.bench.finish()
    site.run()
    assert site.outbox == ["j-1@1"]


def test_an_answer_that_cannot_be_noted_is_waited_for_again(site: Site) -> None:
    """The update stays in the outbox and is offered again; nothing is forgotten that was not written."""
    _offered(site)
    blocked = site.folder / "d/counted.json.part"
    blocked.mkdir()
    site.ack()
    assert site.outbox == ["j-1@0"]
    blocked.rmdir()
    before = len(site.all("update"))
    site.run(10.0)
    assert len(site.all("update")) > before
    site.ack()
    assert site.outbox == []


def test_an_update_whose_blobs_the_disk_lost_is_worked_for_again(site: Site) -> None:
    """Offering it would never end."""
    _offered(site)
    site.agent.local.depot.drop(site.all("update")[-1].bundles["model"].sha256)
    site.run(10.0)
    assert site.outbox == []
    site.ask()
    assert len(site.bench.orders) == 2


def test_an_answer_too_large_to_be_sent_is_refused(site: Site) -> None:
    """More metrics than a message may have; the coordinator could not even say so."""
    site.ask()
    site.bench.finish(metrics={f"m{n}": 0.0 for n in range(1001)})
    site.run()
    claim = site.all("claim")[-1]
    assert (claim.accepted, claim.code) == (False, "failed")
    assert "cannot be sent" in claim.reason
    assert site.outbox == []


@pytest.mark.parametrize("leaf", ["task", "ack", "blob/get", f"blob/{'a' * 64}/manifest", "nonsense", "blob/x/1"])
def test_bad_bytes_are_counted_and_dropped(site: Site, leaf: str) -> None:
    """And the next good message is taken."""
    for payload in (b"\x80\x04K\x01.", b'{"v":1,"crc":"00000000","job":1}', b"{" * 70_000):
        site.say(leaf, payload)
    assert site.agent.garbage.dropped == 3
    site.ask()
    assert len(site.bench.orders) == 1


def test_a_cleared_task_is_killed(site: Site) -> None:
    """The round was closed without it."""
    site.ask()
    site.say("task", b"", retain=True)
    assert site.bench.killed == 1
    site.run(60.0)
    assert site.all("update") == []


# -- what it tells --------------------------------------------------------------------------------


def test_a_new_agent_introduces_itself(site: Site) -> None:
    """Online, under a new boot id, with its budget and engines; both again now and then."""
    (profile,) = site.all("profile")
    assert isinstance(profile, Profile)
    assert (profile.board, profile.budget_bytes, profile.idle_w) == ("hand-made", 4 << 30, 1.0)
    assert "numpy" in profile.engines
    assert {"fedquilt", "numpy", "python"} <= profile.versions.keys()
    first = site.all("presence")[-1]
    assert first.online
    site.run(30.0)
    again = site.all("presence")[-1]
    assert (again.boot, again.seq > first.seq) == (first.boot, True)
    site.start()
    assert site.all("presence")[-1].boot != first.boot


def test_a_goodbye_is_an_absence_that_keeps_the_outbox(site: Site) -> None:
    """Ordered to stop, it ends its process and says so."""
    _offered(site)
    killed = site.bench.killed
    site.agent.goodbye()
    site.broker.now_s += 1.0
    site.broker.deliver()
    site.listen()
    assert not site.all("presence")[-1].online
    assert site.bench.killed == killed + 1
    assert site.outbox == ["j-1@0"]


def test_a_coordinator_that_comes_up_is_offered_the_outbox_at_once(site: Site) -> None:
    """Not only when the next offer is due."""
    _offered(site)
    site.run(100.0)
    before = len(site.all("update"))
    site.link.publish(TOPICS.coord, wire.encode(wire.CoordState(online=True, epoch=2)), retain=True)
    site.run(0.1)
    assert len(site.all("update")) == before + 1


def test_progress_is_told_now_and_then(site: Site) -> None:
    """Ten steps a second come out as one in two seconds."""
    site.ask()
    for step in range(55):
        site.bench.events.append(Progressed(step / 55))
        site.run(0.1)
    told = [progress.fraction for progress in site.all("progress")]
    assert len(told) == 3
    assert told == sorted(told)


def test_telemetry_is_told_in_its_own_time(site: Site) -> None:
    """Every 30 s in 100 s, and only what can be measured."""
    site.run(100.0)
    told = site.all("telemetry")
    assert len(told) == 4
    assert (told[0].power_w, told[0].temperature_c) == (5.0, None)


# -- for real -------------------------------------------------------------------------------------


# -- clocks ---------------------------------------------------------------------------------------


def working(site: Site, **changes: Any) -> None:
    """A task whose data is there, due in a minute unless the test says otherwise."""
    site.ask(**changes)
    site.bench.events.append(Loaded(10))
    site.run(1.1)


def test_a_task_is_worked_on_at_the_point_its_deadline_asks_for(site: Site) -> None:
    """40 s fit into 60 s, and are cheaper; its usage names the point, and then the board is let go."""
    working(site)
    assert site.board.clocks == ["slow"]
    site.bench.finish()
    site.run()
    assert site.board.clocks == ["slow", "-"]
    assert site.all("update")[-1].usage.point == "slow"


def test_time_spent_on_fetching_counts_against_the_deadline(site: Site) -> None:
    """45 s remain when the task comes, which 40 s and a tenth of it fit into, but not 3 s later."""
    site.ask(deadline_s=45.0)
    site.run(3.0)
    site.bench.events.append(Loaded(10))
    site.run(1.1)
    assert site.board.clocks == ["fast"]


def test_a_repeated_message_does_not_lengthen_the_deadline(site: Site) -> None:
    """What a broker kept tells of the time when it was sent; a new attempt tells a new time."""
    task = site.ask()
    due_s = site.agent.duty.state.open.due_s if site.agent.duty.state.open else 0.0
    site.say("task", task, retain=True)
    assert site.agent.duty.state.open is not None
    assert site.agent.duty.state.open.due_s == due_s
    site.ask(attempt=1, deadline_s=100.0)
    assert site.agent.duty.state.open.due_s > due_s + 40.0


def test_work_by_the_example_waits_for_the_number_of_examples(site: Site) -> None:
    """Ten of 100 kFLOP are a task of 40 s; before that is known nothing is held."""
    site.ask(work=Work(flops_per_example=1e5))
    site.run(2.0)
    assert site.board.clocks == []
    site.bench.events.append(Loaded(10))
    site.run(1.1)
    assert site.board.clocks == ["slow"]


def test_a_task_that_turns_out_late_is_stepped_up_once(site: Site) -> None:
    """A tenth in 10 s would be 100 s; at four times the pace the rest takes 22 s."""
    working(site)
    for _ in range(3):
        site.run(3.0)
        site.bench.events.append(Progressed(0.1))
        site.run(1.1)
    assert site.board.clocks == ["slow", "fast"]
    site.bench.finish()
    site.run()
    usage = site.all("update")[-1].usage
    assert usage.point == "slow, then fast"
    assert usage.energy_j == pytest.approx(5.0 * site.broker.now_s, abs=15.0)


def test_clocks_are_not_changed_at_once(site: Site) -> None:
    """However late the first second looks."""
    working(site)
    site.bench.events.append(Progressed(0.021))
    site.run(1.1)
    assert site.board.clocks == ["slow"]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_boards_pace_is_remembered_for_the_next_task(site: Site, restarted: bool) -> None:
    """It took twice the 40 s predicted; so the next one, due in 60 s, runs fast, by a new agent too."""
    working(site, deadline_s=1000.0)
    site.run(79.0)
    site.bench.finish()
    site.run()
    site.ack()
    (known,) = site.agent.duty.state.learned.values()
    assert known.time is not None
    assert known.time.ratio == pytest.approx(2.0, rel=0.05)
    if restarted:
        site.start()
    working(site, round=1)
    assert site.board.clocks == ["slow", "-", "fast"]


ENDS: dict[str, Callable[[Site], object]] = {
    "done": lambda site: site.bench.finish(),
    "failed": lambda site: site.bench.events.append(Outcome(code="memory", reason="too much")),
    "withdrawn": lambda site: site.say("task", b"", retain=True),
    "overtaken": lambda site: site.ask(round=1),
    "goodbye": lambda site: site.agent.goodbye(),
    "counted meanwhile": lambda site: site.agent.duty.feed(Acked(("j-1", 0), True), site.broker.now_s),
    "disk": lambda site: site.agent.duty.feed(Failed("disk", "full"), site.broker.now_s),
}


@pytest.mark.parametrize("end", ENDS)
def test_however_a_task_ends_the_board_gets_its_clocks_back(site: Site, end: str) -> None:
    """Once, and nothing is held any more."""
    working(site)
    ENDS[end](site)
    site.run()
    assert site.board.clocks == ["slow", "-"]


def test_a_result_that_cannot_be_kept_lets_the_clocks_go(site: Site) -> None:
    """The outbox is no folder any more."""
    working(site)
    outbox = site.folder / "d/outbox"
    outbox.rmdir()
    outbox.write_text("")
    site.bench.finish()
    site.run()
    assert site.all("claim")[-1].code == "disk"
    assert site.board.clocks == ["slow", "-"]


def test_clocks_that_cannot_be_set_are_left_to_the_board(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Said once; the task is done all the same, and the next one tries again."""
    site.board.stuck = "86 C: too hot to be held"
    for round in (0, 1):
        working(site, round=round)
        site.bench.finish()
        site.run()
        site.ack(round)
    assert [update.usage.point for update in site.all("update")] == [None, None]
    assert [record.message for record in caplog.records] == ["the clocks are left to the board: " + site.board.stuck]
    site.board.stuck = ""
    working(site, round=2)
    assert site.board.clocks == ["slow"]


def test_a_step_up_that_fails_lets_go_of_what_was_held(site: Site) -> None:
    """The board's own governor goes on."""
    working(site)
    site.board.stuck = "the clocks did not take"
    site.run(10.0)
    site.bench.events.append(Progressed(0.1))
    site.run(1.1)
    assert site.board.clocks == ["slow", "-"]


@pytest.mark.parametrize("before_s", [1.0, 0.0])
def test_a_point_that_was_not_held_to_the_end_is_not_told_as_if_it_were(site: Site, before_s: float) -> None:
    """In the middle or in the last moment the helper let go by itself: what follows ran at the board's own clocks."""
    working(site)
    site.board.holds = False
    site.run(before_s)
    site.bench.finish()
    site.run()
    update = site.all("update")[-1]
    assert update.usage.point == "slow, then let go"
    assert update.usage.energy_j > 0
    assert site.board.clocks == ["slow"]  # there is nothing to give back
    site.board.holds = True
    site.ack(0)
    working(site, round=1)
    site.bench.finish()
    site.run()
    assert site.all("update")[-1].usage.point == "slow"


@pytest.mark.parametrize(("changes", "adjustable"), [({"policy": "board"}, True), ({}, False)])
def test_a_board_that_may_not_or_cannot_be_held_is_only_measured(
    site: Site, changes: dict[str, Any], adjustable: bool
) -> None:
    """Joules are counted all the same."""
    site.board.adjustable = adjustable
    site.start(governor=GovernorSettings(**changes))
    working(site)
    site.bench.finish()
    site.run()
    assert site.board.clocks == []
    assert site.all("update")[-1].usage.energy_j > 0


def test_sensors_are_read_ten_times_a_second_while_a_task_runs_and_else_not(site: Site) -> None:
    """Telemetry every 30 s apart."""
    site.run(5.0)
    before = len(site.board.reads_s)
    working(site)
    during = len(site.board.reads_s) - before
    assert 14 <= during <= 20  # 1.6 s, and once when the task came
    site.bench.finish()
    site.run()
    after = len(site.board.reads_s)
    site.run(5.0)
    assert len(site.board.reads_s) == after


SIMULATED = """
board = "toy"
title = "two points of round numbers"
memory_bytes = { value = 8e9, source = "made" }
idle_w = { value = 1.0, source = "made" }
sources.made = { provenance = "assumed", text = "made up for this test" }
[[points]]
name = "fast"
flops_per_s = { value = 200e9, source = "made" }
busy_w = { value = 10.0, source = "made" }
[[points]]
name = "slow"
flops_per_s = { value = 100e9, source = "made" }
busy_w = { value = 3.0, source = "made" }
"""


@pytest.mark.parametrize(
    ("policy", "taken"), [("max", ("fast", 25.0, 250.0, 25.0)), ("energy", ("slow", 50.0, 150.0, 50.0))]
)
def test_a_simulated_board_takes_the_time_and_joules_of_its_point(
    site: Site, policy: Policy, taken: tuple[str, float, float, float]
) -> None:
    """5 TFLOP due in a minute take 25 s at 10 W, or 50 s at 3 W and so the fewer joules."""
    np.savez(site.folder / "own.npz", x=np.zeros((10, 4), np.float32), y=np.arange(10) % 2)
    board = SimulatedDevice(profiles.parse(SIMULATED, "here"))
    site.board = board  # type: ignore[assignment]
    data = {"path": str(site.folder / "own.npz")}
    site.start(InlineWorker(board), data=data, governor=GovernorSettings(policy))
    site.ask(params=SGD, bundles={"model": site.depot.put(tensors.encode(LINEAR))}, work=Work(flops=5e12))
    site.run(taken[1])
    usage = site.all("update")[-1].usage
    assert (usage.point, usage.wall_s, usage.energy_j, usage.idle_j) == taken
    assert usage.energy_source == "profile toy (assumed)"


def test_a_method_is_carried_out_on_the_devices_own_data(site: Site) -> None:
    """FedAvg by the numpy engine: 8 of 10 examples, a model that has moved."""
    draw = np.random.default_rng(0)
    np.savez(site.folder / "own.npz", x=draw.random((10, 4), np.float32), y=np.arange(10) % 2)
    board = Board()
    site.start(InlineWorker(board), data={"path": str(site.folder / "own.npz"), "held": 0.2})
    site.ask(params=SGD, bundles={"model": site.depot.put(tensors.encode(LINEAR))})
    site.run(11.0)
    update = site.all("update")[-1]
    assert update.weight == 8.0
    assert np.abs(site.fetch(update)["1.weight"]).sum() > 0


def test_a_budget_that_no_engine_fits_is_told_at_the_start(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Before the first task is declined for it; an engine that fits is enough to be silent."""
    site.start(budget="5MB")
    (said,) = [record.message for record in caplog.records if "budget" in record.message]
    assert said.startswith("d: the budget of 5 MB is less than any engine here holds by itself (numpy ")
    caplog.clear()
    site.start(budget="5GB")
    assert caplog.records == []


@pytest.mark.parametrize(("text", "said"), [(None, "mine.toml cannot be read"), ("board = 3", "board")])
def test_a_recorded_profile_that_cannot_be_used_is_named(tmp_path: Path, text: str | None, said: str) -> None:
    """Before anything is connected to."""
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(JobError, match=said):
        run_agent(AgentSettings(device="d", home=str(tmp_path), profile=str(path)))


def test_a_daemon_introduces_itself_and_on_sigterm_says_goodbye(
    tmp_path: Path, embedded_broker: Any, stage: Any
) -> None:
    """A real process on a real broker; it ends with code 0 and its presence stays as offline."""
    settings = tmp_path / "agent.toml"
    settings.write_text(
        f'device = "d"\nhome = "home"\nboard = "jetson-nano"\n[broker]\nurl = "{embedded_broker.url}"\n'
    )
    stage.join(embedded_broker.url, "watch", "fq/1/fleet/dev/d/up/#")
    daemon = subprocess.Popen([sys.executable, "-m", "fedquilt.cli", "agent", str(settings)])
    try:
        stage.until(lambda: any(message.topic.endswith("up/profile") for message in stage.heard["watch"]))
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(timeout=20) == 0
    finally:
        daemon.kill()
        daemon.wait()

    def offline() -> bool:
        told = [m.payload for m in stage.heard["watch"] if m.topic.endswith("up/presence")]
        return bool(told) and not wire.decode(told[-1], wire.Presence).online

    stage.until(offline)
