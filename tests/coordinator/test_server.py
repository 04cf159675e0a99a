"""The coordinator against a device driven by hand, over a MemoryBroker."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import resource
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedquilt import bundle, methods, tensors, wire
from fedquilt.blobs.store import Depot
from fedquilt.blobs.transfer import Transfers
from fedquilt.cli import main
from fedquilt.coordinator import admission, conduct, settings, turns
from fedquilt.coordinator.executors import OverLink
from fedquilt.coordinator.facts import (
    Answered,
    AnyFact,
    Asked,
    Committed,
    Declined,
    Ended,
    Extended,
    Lost,
    Rejected,
    Surveyed,
)
from fedquilt.coordinator.job import Running
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.store import Store
from fedquilt.coordinator.views import log, why
from fedquilt.core import CODECS, BlobRef, DeviceView, OperatingPoint, Order, Profile, StoreError, Task, Update, Usage
from fedquilt.methods import fedavg
from fedquilt.transport.link import MemoryBroker

NETWORK = {"name": "mlp", "inputs": 2, "hidden": [], "classes": 2}
MODEL = {"1.weight": np.zeros((2, 2), np.float32), "1.bias": np.zeros(2, np.float32)}
TABLE = {"name": "j", "method": "fedavg", "rounds": 1, "cohort": {"deadline_s": 30.0, "attempts": 1}}


class Hand:
    """A device whose every message is said by the test."""

    def __init__(self, broker: MemoryBroker, name: str, folder: Path, codecs: tuple[str, ...] = CODECS) -> None:
        self.name, self.topics = name, wire.Topics("f")
        self.link = broker.connect()
        self.depot = Depot(folder)
        self.transfers = Transfers(self.link, self.depot, self.topics, "up", lambda device, sha256: True)
        self.link.subscribe(self.topics.for_device(name))
        self.tasks: list[Task | None] = []
        self.acks: list[wire.Ack] = []
        self.say("presence", wire.Presence(online=True, boot="1"), retain=True)
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

    def measured(self, **point: float) -> None:
        """Say what the board does at its one operating point."""
        points = (OperatingPoint(name="p", **point),)
        self.say("profile", msgspec.structs.replace(self.profile, points=points), retain=True)

    def say(self, leaf: str, message: Any, retain: bool = False) -> None:
        payload = message if isinstance(message, bytes) else wire.encode(message)
        self.link.publish(self.topics.device(self.name, "up", leaf), payload, retain=retain)

    def answer(self, model: dict[str, np.ndarray], **changes: Any) -> Update:
        task = next(task for task in reversed(self.tasks) if task)
        ref = self.depot.put(tensors.encode(model))
        values = {"job": task.job, "round": task.round, "attempt": task.attempt, "device": self.name, "weight": 1.0}
        update = Update(**{**values, "bundles": {"model": ref}, "metrics": {}, "usage": Usage(), **changes})
        self.say("update", update)
        return update

    def listen(self, now_s: float) -> None:
        for message in self.link.receive():
            route = wire.route(message.topic)
            if self.transfers.handle(route, message.payload, now_s):
                continue
            if route.leaf == "task":
                self.tasks.append(wire.decode(message.payload, Task) if message.payload else None)
            elif route.leaf == "ack":
                self.acks.append(wire.decode(message.payload, wire.Ack))
        self.transfers.step(now_s)


class Stage:
    """A coordinator, hands, and time that the test moves on."""

    def __init__(self, folder: Path, **table: Any) -> None:
        self.folder, self.broker, self.facts = folder, MemoryBroker(), []
        self.dues: list[tuple[float, float, int]] = []  # of each step: its time, when the next is due, rounds committed
        bundle.write(folder / "bundle", {"network": NETWORK, "flops": 8}, {"model": tensors.encode(MODEL)})
        self.store = Store(folder / "home")
        self.job = self.store.add(settings.parse({**TABLE, **table}), folder / "bundle")
        self.hands: list[Hand] = []
        self.start()

    def start(self) -> None:
        """A coordinator process begins."""
        self.link = self.broker.connect()
        self.executor = OverLink(self.link, "f", self.store.depot, self.store.next_epoch())
        self.server = Server(self.executor, self.store, self.observe, only=self.job)

    def restart(self) -> None:
        """It dies, and another begins on the same folder."""
        self.broker.lose(self.link)
        self.store.close()
        self.store = Store(self.folder / "home")
        self.start()

    def observe(self, job: Any, fact: AnyFact) -> None:
        self.facts.append(fact)

    def hand(self, name: str, **changes: Any) -> Hand:
        self.hands.append(Hand(self.broker, name, self.folder / name, **changes))
        return self.hands[-1]

    def play(self, seconds: float = 2.0) -> None:
        """Let virtual time pass in steps of 50 ms."""
        until = self.broker.now_s + seconds
        while self.broker.now_s < until:
            self.broker.now_s += 0.05
            self.broker.deliver()
            if not self.server.finished:
                self.dues.append((self.broker.now_s, self.server.step(self.broker.now_s), len(self.told(Committed))))
            for hand in self.hands:
                hand.listen(self.broker.now_s)

    def told(self, kind: type) -> list[Any]:
        return [fact for fact in self.facts if isinstance(fact, kind)]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A job of one round."""
    made = Stage(tmp_path)
    yield made
    made.store.close()


def ones(factor: float = 1.0) -> dict[str, np.ndarray]:
    return {name: np.full_like(array, factor) for name, array in MODEL.items()}


def test_updates_are_averaged_and_the_job_ends(stage: Stage) -> None:
    """Two devices, weights 1 and 3: (1 + 3 * 5) / 4 = 4."""
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    a.answer(ones(1.0), weight=1.0)
    b.answer(ones(5.0), weight=3.0)
    stage.play()
    assert [fact.status for fact in stage.told(Ended)] == ["done"]
    assert stage.server.finished
    state = stage.told(Committed)[0].state
    stored = stage.store.depot.path(state.sha256)
    assert stored is not None
    assert tensors.unpack(stored.read_bytes(), fedavg.State).model["1.bias"].tolist() == [4.0, 4.0]
    assert [ack.accepted for ack in a.acks] == [True]
    assert a.tasks[-1] is None  # the retained task is taken back


def test_a_round_that_follows_a_long_computation_has_its_whole_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The method computes for 100 s; the next round's 30 s begin after that, not before."""
    stage = Stage(tmp_path, rounds=2)
    commit = Running.commit

    def slowly(job: Running, now_s: float) -> Committed:
        stage.broker.now_s += 100.0
        return commit(job, now_s)

    monkeypatch.setattr(Running, "commit", slowly)
    hand = stage.hand("a")
    stage.play()
    for _ in range(2):
        hand.answer(ones())
        stage.play()  # past the commit, which ends it early
        stage.play()
    assert [fact.round for fact in stage.told(Committed)] == [0, 1]
    assert [fact.status for fact in stage.told(Ended)] == ["done"]
    stage.store.close()


def test_a_step_that_commits_a_round_wants_the_next_step_at_once(tmp_path: Path) -> None:
    """The next round begins in a step of its own, by the time that it is after the commit."""
    stage = Stage(tmp_path, rounds=2)
    hand = stage.hand("a")
    stage.play()
    hand.answer(ones())
    stage.play()
    commits = [(now, due) for (*_, before), (now, due, after) in itertools.pairwise(stage.dues) if after > before]
    assert [due - now for now, due in commits] == [0.0]
    stage.store.close()


def test_the_executor_keeps_up_its_connection_while_a_method_computes(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And has its link back when something is to be sent."""
    told, commit = [], Running.commit

    @contextlib.contextmanager
    def tended() -> Iterator[None]:
        told.append("tended")
        yield
        told.append("back")

    def noted(job: Running, now_s: float) -> Committed:
        told.append("computes")
        return commit(job, now_s)

    monkeypatch.setattr(stage.executor, "tended", tended)
    monkeypatch.setattr(Running, "commit", noted)
    hand = stage.hand("a")
    stage.play()
    hand.answer(ones())
    stage.play()
    assert told == ["tended", "computes", "back"]


def test_updates_are_folded_in_the_order_of_devices_not_of_arrival(stage: Stage) -> None:
    """1e19 - 1e19 + 1 is 1, but 1e19 + 1 - 1e19 is 0 in float64: the mean of a, b, c is a third, as c came before b."""
    hands = {name: stage.hand(name) for name in "abc"}
    stage.play()
    for name, value in (("a", 1e19), ("c", 1.0), ("b", -1e19)):
        hands[name].answer(ones(value))
        stage.play()
    assert [fact.update.device for fact in stage.told(Answered)] == ["a", "c", "b"]
    stored = stage.store.depot.path(stage.told(Committed)[0].state.sha256)
    assert stored is not None
    folded = tensors.unpack(stored.read_bytes(), fedavg.State).model["1.bias"]
    assert folded.tolist() == [np.float32(1 / 3)] * 2


def test_a_device_is_answered_when_the_fact_of_its_update_is_written(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Facts of one step are written at once, and each answer comes after that: a kill in between loses neither."""
    written: list[set[str]] = []
    answer = stage.executor.answer

    def answered(device: str, ack: wire.Ack) -> None:
        with Store(stage.folder / "home") as store:
            facts = [fact for _, _, fact in store.facts(stage.job)]
        written.append({fact.update.device for fact in facts if isinstance(fact, Answered)})
        answer(device, ack)

    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    monkeypatch.setattr(stage.executor, "answer", answered)
    a.answer(ones())
    b.answer(ones())
    stage.play()
    assert written == [{"a", "b"}] * 2


def test_an_update_said_twice_is_counted_once_and_acknowledged_twice(stage: Stage) -> None:
    """The agent may have missed the first acknowledgement."""
    a, _ = stage.hand("a"), stage.hand("b")
    stage.play()
    update = a.answer(ones())
    stage.play()
    a.say("update", update)
    stage.play()
    assert len(stage.told(Answered)) == 1
    assert [ack.accepted for ack in a.acks] == [True, True]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({**ones(), "1.bias": np.array([np.nan, 1], np.float32)}, "'1.bias' holds 1 values that are not finite"),
        ({**ones(), "1.bias": np.zeros(3, np.float32)}, "'1.bias' has shape (3,), expected (2,)"),
        ({"1.bias": np.zeros(2, np.float32)}, "tensor names differ: 1.weight"),
        ({**ones(), "1.bias": np.full(2, 1e300)}, "a: tensor '1.bias' is float64, expected float32"),
        ({**ones(), "1.bias": np.full(2, 7, np.int64)}, "a: tensor '1.bias' is int64, expected float32"),
        ({**ones(), "1.bias": np.full(2, 3e38, np.float32)}, "a: tensor '1.bias' holds numbers from 3e+38 to 3e+38"),
    ],
)
def test_a_bad_update_is_refused_with_its_reason_and_costs_nothing(
    stage: Stage, model: dict[str, np.ndarray], said: str
) -> None:
    """NaN, a wrong shape, a missing tensor, another type, too large; the other device's work is kept."""
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    b.answer(ones(2.0))
    a.answer(model)
    stage.play()
    assert said in stage.told(Rejected)[0].reason
    assert not a.acks[0].accepted
    assert [fact.update.device for fact in stage.told(Committed) and stage.told(Answered)] == ["b"]


@pytest.mark.parametrize(
    ("weight", "examples", "said"),
    [
        (1e24, None, "a wants to count as 1e+24 examples, and no device may count as more than 10000000"),
        (40.0, 30, "a wants to count as 40 examples and says that it has 30"),
    ],
)
def test_a_device_counts_as_no_more_examples_than_it_has(
    stage: Stage, weight: float, examples: int | None, said: str
) -> None:
    """A weight of 1e24 would make the model the device's own; the round is committed without it."""
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    a.answer(ones(5.0), weight=weight, usage=Usage(examples=examples))
    b.answer(ones(2.0), weight=30.0, usage=Usage(examples=30))
    stage.play()
    assert said in stage.told(Rejected)[0].reason
    stored = stage.store.depot.path(stage.told(Committed)[0].state.sha256)
    assert stored is not None
    assert tensors.unpack(stored.read_bytes(), fedavg.State).model["1.bias"].tolist() == [2.0, 2.0]


def test_a_state_that_is_not_finite_is_not_committed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a method makes of finite updates: the job fails, and says which tensor came out so and of whom."""
    a = stage.hand("a")
    stage.play()
    assert stage.server.active is not None
    broken = {**ones(), "1.bias": np.array([np.inf, 1], np.float32)}
    method = dataclasses.replace(
        stage.server.active.method, step=lambda state, total: dataclasses.replace(state, model=broken)
    )
    monkeypatch.setattr(stage.server.active, "method", method)
    a.answer(ones(1.0))
    stage.play()
    assert not stage.told(Committed)
    (ended,) = stage.told(Ended)
    assert ended.status == "failed"
    assert "model['1.bias'] came out as numbers that are not finite, from updates of a" in ended.reason


def test_an_update_that_is_no_tensors_at_all_is_refused(stage: Stage) -> None:
    """Bytes that are not safetensors."""
    a = stage.hand("a")
    stage.play()
    a.answer(ones(), bundles={"model": a.depot.put(b"\x80\x04pickle!")})
    stage.play()
    assert "not a safetensors blob" in stage.told(Rejected)[0].reason


def test_an_update_larger_than_the_job_allows_is_refused_before_it_is_fetched(stage: Stage) -> None:
    """A device cannot fill the coordinator's disk."""
    a = stage.hand("a")
    stage.play()
    a.answer(ones(), bundles={"model": BlobRef(sha256="a" * 64, size=1 << 40)})
    stage.play()
    assert stage.told(Rejected)[0].reason.startswith("a: bundle 'model' has 1099511627776 bytes")
    assert not list(stage.store.depot.folder.glob("a" * 64 + "*"))


def test_a_job_may_allow_less_than_its_model_takes(tmp_path: Path) -> None:
    """`max_update_mb` holds beside what follows from the model."""
    model = {"1.weight": np.zeros((600, 600), np.float32)}
    stage = Stage(tmp_path, max_update_mb=1)
    stage.server.step(0.0)
    a = stage.hand("a")
    stage.play()
    a.answer(model)
    stage.play()
    assert stage.told(Rejected)[0].reason == "a: larger than max_update_mb = 1"
    stage.store.close()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"1.bias": np.zeros(3, np.float32)}, "a: tensor '1.bias' has shape (3,), expected (2,)"),
        ({"1.bias": np.zeros(2)}, "a: tensor '1.bias' is float64, expected float32"),
        ({"2.bias": np.zeros(2, np.float32)}, "a: tensor names differ: 2.bias"),
    ],
)
def test_an_update_is_refused_for_its_manifest_before_a_byte_of_it_is_fetched(
    stage: Stage, changed: dict[str, np.ndarray], said: str
) -> None:
    """Its message tells names, types and shapes; nothing is asked of the board and nothing is on the disk."""
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    model = {**ones(), **changed}
    held = {path.name for path in stage.store.depot.folder.iterdir()}
    a.answer(model, layouts={"model": tensors.layout(model)})
    b.answer(ones(2.0), layouts={"model": tensors.layout(ones())})
    stage.play(0.2)
    assert [fact.reason for fact in stage.told(Rejected)] == [said]
    assert stage.executor._transfers.traffic_bytes("a", "up") == 0
    stage.play()
    ref = a.depot.put(tensors.encode(model))
    assert ref.sha256 not in {path.name for path in stage.store.depot.folder.iterdir()} - held
    assert [fact.update.device for fact in stage.told(Answered)] == ["b"]
    assert not stage.told(Answered)[0].update.layouts  # the log does not keep it


@pytest.mark.parametrize("ends", ["withheld", "failed", "closed"])
def test_of_all_that_a_device_begins_to_send_one_update_at_most_is_on_the_disk(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Twenty updates, of each the first bundle whole and half of the second; none at all once the round is closed."""
    monkeypatch.delitem(fedavg.fold.__dict__, "expected")  # else none of them would be fetched
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    before = {path.name for path in stage.store.depot.folder.iterdir()}
    size = 2_000_000
    for number in range(20):
        whole = a.depot.put(np.full(1000, number, np.uint8).tobytes())
        half = a.depot.put(np.full(size, number, np.uint8).tobytes())
        a.answer(ones(), bundles={"one": whole, "two": half})
        for _ in range(6):
            stage.play(0.05)
        a.depot.drop(half.sha256)
        if ends == "failed":
            stage.play(4.0)
    parts = list(stage.store.depot.folder.glob("*.part"))
    new = {path.name for path in stage.store.depot.folder.iterdir()} - before
    assert len(parts) <= 1
    assert len(new) <= 2
    if ends == "closed":
        b.answer(ones())
        stage.play(40.0)  # its deadline
        assert not list(stage.store.depot.folder.glob("*.part"))
        assert stage.server.finished


@pytest.mark.parametrize("topic", ["progress", "nonsense"])
def test_a_board_that_floods_is_set_aside_by_name_and_the_round_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, topic: str
) -> None:
    """With messages that are read, or under topics that are none; it is asked again after a while."""
    stage = Stage(tmp_path, rounds=2, cohort={"deadline_s": 5000.0, "quorum": 0.5})
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    for _ in range(20_000):
        a.say(topic, wire.Progress(job="j", round=0, attempt=0, fraction=0.5))
    stage.play(0.2)
    assert [fact.reason for fact in stage.told(Rejected)] == [admission.FLOODED]
    assert f"a {admission.FLOODED}" in caplog.text
    b.answer(ones(2.0))
    stage.play(2.0)
    assert [fact.update.device for fact in stage.told(Answered)] == ["b"]
    assert stage.told(Committed)
    assert stage.told(Asked)[-1].devices == ("b",)
    assert "flooding" in stage.told(Surveyed)[-1].passed
    stage.play(conduct.ASIDE_S)
    a.say("presence", wire.Presence(online=True, boot="2"), retain=True)
    stage.play(2.0)
    assert "a" in stage.told(Surveyed)[-1].eligible
    stage.store.close()


@pytest.mark.parametrize(
    ("usage", "said"),
    [
        ({"energy_j": 1e24, "wall_s": 1e9}, "1e+24 J"),
        ({"energy_j": 1.0, "idle_j": 1e9}, "1e+09 J"),
        ({"down_bytes": 1 << 50}, "down_bytes of 1125899906842624"),
        ({"up_bytes": 1 << 50}, "up_bytes of 1125899906842624"),
    ],
)
def test_a_claim_of_joules_or_bytes_that_cannot_be_ends_no_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, usage: dict[str, Any], said: str
) -> None:
    """What the board has worked out counts, what it claims to have taken does not; the log names it."""
    stage = Stage(tmp_path, rounds=2, stop={"max_joules": 1e6, "max_bytes": 10_000_000})
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    a.answer(ones(1.0), usage=Usage(**usage))
    b.answer(ones(3.0), usage=Usage(energy_j=100.0, wall_s=1.0))
    stage.play()
    assert [fact.update.device for fact in stage.told(Answered)] == ["a", "b"]
    assert len(stage.told(Asked)) == 2  # the second round has begun
    assert not stage.told(Ended)
    assert "a claims what cannot be" in caplog.text
    assert said in caplog.text
    assert "b claims" not in caplog.text
    stage.store.close()


def test_a_device_counts_as_no_more_examples_than_it_can_have_worked_through(tmp_path: Path) -> None:
    """24 FLOPs an example, 1e6 a second as its profile says, two deadlines of 30 s and a minute: 5e6, and ten times."""
    stage = Stage(tmp_path, cohort={"deadline_s": 30.0, "attempts": 1, "max_examples": 10**9})
    a, b = stage.hand("a"), stage.hand("b")
    a.measured(flops_per_s=1e6)
    stage.play()
    a.answer(ones(5.0), weight=5.1e7, usage=Usage(examples=51_000_000))
    b.answer(ones(2.0), weight=30.0, usage=Usage(examples=30))
    stage.play()
    assert "a wants to count as 5.1e+07 examples, and at 1e+06 FLOP/s" in stage.told(Rejected)[0].reason
    stage.store.close()


def test_a_device_cannot_speak_for_another(stage: Stage) -> None:
    """The topic, which the broker's access list guards, says who it is."""
    a, _ = stage.hand("a"), stage.hand("b")
    stage.play()
    a.answer(ones(), device="b")
    stage.play()
    assert not stage.told(Answered)
    assert not a.acks[0].accepted


def test_garbage_from_the_network_is_counted_and_dropped(stage: Stage) -> None:
    """And the round goes on."""
    a = stage.hand("a")
    stage.play()
    for leaf in ("presence", "profile", "claim", "update", "blob/get", "nonsense"):
        a.say(leaf, b"\x00garbage")
    stage.play()
    assert stage.executor.garbage.dropped == 6
    a.answer(ones())
    stage.play()
    assert stage.server.finished


def test_garbage_floods_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Three messages of a device are told, then a number."""
    stage = Stage(tmp_path, cohort={"deadline_s": 2000.0})
    a = stage.hand("a")
    stage.play()
    for _ in range(500):
        a.say("claim", b"\x00garbage")
    stage.play(650.0)
    told = [record.message for record in caplog.records if "dropped" in record.message]
    assert len(told) == 4
    assert told[-1].startswith("dropped 497 more messages under fq/1/f/dev/a/up; the last: ")
    stage.store.close()


def test_a_refusal_is_noted_with_its_reason_and_another_device_is_asked(tmp_path: Path) -> None:
    """One contribution wanted, two devices online."""
    stage = Stage(tmp_path, cohort={"size": 1, "min_devices": 2})
    hands = {hand.name: hand for hand in (stage.hand("a"), stage.hand("b"))}
    stage.play()
    first = next(hand for hand in hands.values() if hand.tasks)
    task = first.tasks[0]
    assert task is not None
    claim = {"job": task.job, "round": 0, "attempt": 0, "accepted": False, "code": "memory", "reason": "too big"}
    first.say("claim", wire.Claim(**claim))
    stage.play()
    other = hands[({"a", "b"} - {first.name}).pop()]
    assert [(fact.device, fact.reason) for fact in stage.told(Declined)] == [(first.name, "too big")]
    assert other.tasks
    stage.store.close()


def test_a_board_that_declines_for_memory_is_not_asked_in_the_rounds_after(tmp_path: Path) -> None:
    """Also after a restart; the log says why, and with a larger budget it is asked again."""
    stage = Stage(tmp_path, rounds=4)
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    a.say("claim", wire.Claim(job=stage.job, round=0, attempt=0, accepted=False, code="memory", reason="too big"))
    b.answer(ones())
    stage.play()
    stage.restart()
    stage.play()
    b.answer(ones())
    stage.play()
    assert [fact.devices for fact in stage.told(Asked)] == [("a", "b"), ("b",), ("b",)]
    assert why.of(stage.store, stage.job)[1]["a"].code == "memory"
    profile = Profile(
        device="a", board="hand", memory_bytes=1 << 30, budget_bytes=1 << 30, engines=("numpy",), versions={}
    )
    a.say("profile", profile, retain=True)
    stage.play()
    assert [fact.devices for fact in stage.told(Asked)[3:]] == [("a",)]
    stage.store.close()


def test_a_coordinator_that_dies_mid_round_continues_the_round(stage: Stage) -> None:
    """What was accepted before is not asked again; the second device's update closes the round."""
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    a.answer(ones(1.0))
    stage.play()
    stage.restart()
    stage.play()
    assert a.tasks[-1] is None
    b.answer(ones(3.0))
    stage.play()
    assert [fact.update.device for fact in stage.told(Answered)] == ["a", "b"]
    assert stage.told(Ended)[0].status == "done"


def test_a_restart_whose_boards_wills_are_published_commits_with_all_of_them(stage: Stage) -> None:
    """Five are at their tasks, four look offline to the new coordinator: the fifth's update is not the round."""
    hands = [stage.hand(name) for name in "abcde"]
    stage.play()
    for hand in hands[1:]:
        hand.say("presence", wire.Presence(online=False, boot="1"), retain=True)
    stage.restart()
    stage.play()
    hands[0].answer(ones(1.0))
    stage.play(25.0)  # longer than a grace
    assert stage.told(Committed) == []
    for hand in hands[1:]:
        hand.say("presence", wire.Presence(online=True, boot="1"), retain=True)
        hand.answer(ones(6.0))
    stage.play()
    assert sorted(fact.update.device for fact in stage.told(Answered)) == list("abcde")
    assert stage.told(Ended)[0].status == "done"


def test_a_board_that_looks_offline_after_a_restart_has_its_grace_before_it_is_replaced(tmp_path: Path) -> None:
    """As with a coordinator that has been there all along; of two, one is wanted."""
    stage = Stage(tmp_path, cohort={"size": 1, "start_devices": 2, "deadline_s": 600.0})
    hands = {name: stage.hand(name) for name in "ab"}
    stage.play()
    (first,) = stage.told(Asked)[0].devices
    hands[first].say("presence", wire.Presence(online=False, boot="1"), retain=True)
    stage.restart()
    stage.play(15.0)
    assert len(stage.told(Asked)) == 1
    stage.play(10.0)
    assert [fact.devices for fact in stage.told(Asked)[1:]] == [tuple({"a", "b"} - {first})]
    stage.store.close()


def test_a_predicted_deadline_outlives_the_coordinator(tmp_path: Path) -> None:
    """a took 20 s; the next round gives it 30 s of 600, before and after a restart, and tells so."""
    stage = Stage(tmp_path, rounds=2, cohort={"deadline_s": 600.0, "deadline": "predicted"})
    a = stage.hand("a")
    stage.play(20.0)
    a.answer(ones())
    stage.play()
    first, second = stage.told(Asked)
    assert (first.deadline_s, second.deadline_s) == (None, pytest.approx(1.5 * stage.told(Answered)[0].took_s))
    assert second.deadline_s == pytest.approx(30.0, abs=2.0)
    assert "deadline 30 s, predicted" in log.sentences(second)[0]
    task = a.tasks[-1]
    assert task is not None
    assert task.deadline_s == pytest.approx(second.deadline_s, abs=0.1)
    before = stage.server.active.rounds
    stage.restart()
    stage.play()
    after = stage.server.active.rounds
    assert (after.deadline_s, after.took, after.work) == (before.deadline_s, before.took, before.work)
    stage.play(60.0)
    assert len(stage.told(Extended)) == 1
    stage.restart()
    stage.play()
    assert stage.server.active.rounds.extended
    a.answer(ones())
    stage.play()
    assert [fact.status for fact in stage.told(Ended)] == ["done"]
    stage.store.close()


def test_a_stopped_job_takes_its_tasks_back_and_resumes_where_it_was(stage: Stage) -> None:
    """`fedquilt stop`, then `fedquilt resume`."""
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    a.answer(ones())
    stage.play()
    stage.store.set_status(stage.job, "stopping")
    stage.play()
    assert stage.store.status(stage.job) == "stopped"
    assert b.tasks[-1] is None
    stage.store.set_status(stage.job, "running")
    stage.restart()
    stage.play()
    b.answer(ones())
    stage.play()
    assert stage.store.status(stage.job) == "done"
    assert len(stage.told(Answered)) == 2


def test_work_that_comes_while_its_job_is_stopped_is_kept_for_when_it_goes_on(stage: Stage) -> None:
    """It is neither taken nor refused: the device keeps it in its outbox."""
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    a.answer(ones())
    stage.play()
    stage.store.set_status(stage.job, "stopping")
    stage.play()
    update = b.answer(ones())
    stage.server.finished = False
    stage.play()
    assert b.acks == []
    stage.store.set_status(stage.job, "running")
    stage.restart()
    stage.play()
    b.say("update", update)
    stage.play()
    assert stage.store.status(stage.job) == "done"


def test_work_for_a_job_that_nobody_here_knows_is_refused(stage: Stage) -> None:
    """So that a device does not offer it for ever."""
    a = stage.hand("a")
    stage.play()
    a.answer(ones(), job="of-old")
    stage.play()
    assert [(ack.accepted, ack.reason) for ack in a.acks] == [(False, "no job of-old is under way here")]


def test_a_job_whose_bundle_is_gone_fails_with_the_mend(stage: Stage) -> None:
    """And the coordinator goes on."""
    (stage.folder / "bundle" / "bundle.json").unlink()
    stage.play()
    assert stage.store.status(stage.job) == "failed"
    (ended,) = [fact for _, _, fact in stage.store.facts(stage.job)]
    assert "fedquilt prepare" in ended.reason


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    payload = bytearray(path.read_bytes())
    payload[len(payload) // 2] ^= 4
    path.write_bytes(payload)


def test_the_first_state_of_a_job_is_made_again_if_it_is_damaged(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """It follows from the bundle."""
    hand = stage.hand("a")
    stage.play()
    (sha256,) = stage.store.states()
    flip(stage.store.depot.folder / sha256)
    stage.restart()
    stage.play()
    assert f"({sha256[:12]}) was gone or damaged: it is made again" in caplog.text
    hand.answer(ones())
    stage.play()
    assert [fact.status for fact in stage.told(Ended)] == ["done"]


def test_a_blob_that_is_damaged_while_it_is_served_is_made_again(stage: Stage) -> None:
    """The device says that it could not fetch it, by asking again; its task is sent again with a blob that is whole."""
    hand = stage.hand("a")
    stage.play()
    task = hand.tasks[-1]
    assert task is not None
    blob = task.bundles["model"]
    stage.store.depot.damaged(blob.sha256)
    stage.play(6.0)
    assert stage.store.depot.has(blob)


def test_a_counted_update_that_is_damaged_is_asked_for_again_and_the_result_is_the_same(tmp_path: Path) -> None:
    """The coordinator restarts with one of two answers, which it has to read again; the device works again."""
    found = []
    for name, damaged in (("calm", False), ("hit", True)):
        stage = Stage(tmp_path / name)
        a, b = stage.hand("a"), stage.hand("b")
        stage.play()
        a.answer(ones(1.0))
        stage.play()
        (answered,) = stage.told(Answered)
        stage.restart()
        if damaged:
            flip(stage.store.depot.folder / answered.update.bundles["model"].sha256)
        stage.play()
        b.answer(ones(5.0))
        stage.play()
        if damaged:
            (lost,) = stage.told(Lost)
            assert (lost.device, "or damaged" in lost.reason) == ("a", True)
            task = a.tasks[-1]
            assert task is not None
            assert (task.round, task.epoch) == (0, 3)  # two starts, and another number for the device's sake
            a.answer(ones(1.0))
            stage.play()
        assert [fact.status for fact in stage.told(Ended)] == ["done"]
        found.append(stage.told(Committed)[-1].state)
        stage.store.close()
    assert found[0] == found[1]


def test_a_device_that_knows_a_later_start_gets_its_task_from_a_still_later_one(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """This home is an older copy: its coordinator says so, once, and goes on."""
    hand = stage.hand("a")
    stage.play()
    claim = {"job": stage.job, "round": 0, "attempt": 0, "counted": 5, "epoch": 9}
    for _ in range(2):
        hand.say("claim", wire.Claim(**claim, accepted=False, code="counted"))
        stage.play()
    task = hand.tasks[-1]
    assert task is not None
    assert task.epoch == 10
    assert stage.store.epoch == 10
    assert caplog.text.count("a has counted round 5") == 1
    assert "this home is an older copy" in caplog.text


def test_a_job_whose_log_is_damaged_hides_no_other_and_keeps_its_blobs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails, by name, with nothing added to its log; the next one is done."""
    stage = Stage(tmp_path)
    hand = stage.hand("a")
    stage.play()
    kept = stage.store.states()
    stage.store._db.execute("update facts set at = at + 1 where seq = 1")
    later = stage.store.add(settings.parse(TABLE), tmp_path / "bundle")
    stage.job = later
    stage.restart()
    stage.server._only = None
    stage.play()
    hand.answer(ones())
    stage.play()
    assert [(row.id == later, row.status) for row in stage.store.jobs()] == [(False, "failed"), (True, "done")]
    assert "is damaged: fact 1" in caplog.text
    assert "blobs that seem to be of no use are kept" in caplog.text
    assert all(stage.store.depot.ref(sha256) for sha256 in kept)
    stage.store.close()


def test_a_job_whose_state_is_lost_or_whose_method_breaks_fails_alone(tmp_path: Path) -> None:
    """A coordinator that serves other jobs goes on."""
    stage = Stage(tmp_path, rounds=2)
    hand = stage.hand("a")
    stage.play()
    hand.answer(ones())
    stage.play()
    (sha256,) = stage.store.states()
    stage.store.depot.drop(sha256)
    stage.restart()
    stage.play()
    assert stage.store.status(stage.job) == "failed"
    *_, (_, _, ended) = stage.store.facts(stage.job)
    assert "is gone from" in ended.reason
    broken = stage.store.add(settings.parse(TABLE), stage.folder / "broken")
    bundle.write(stage.folder / "broken", {}, {"model": tensors.encode(MODEL)})  # without its network
    stage.server.finished, stage.server._only = False, broken
    stage.play()
    assert stage.store.status(broken) == "failed"


def test_a_job_whose_boards_never_come_lets_the_next_one_be_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And goes on where it was when its turn comes again: with the answer that it had."""
    stage = Stage(tmp_path, cohort={"deadline_s": 600.0})
    first, a, b = stage.job, stage.hand("a"), stage.hand("b")
    stage.play()
    a.answer(ones())
    stage.play()
    b.say("presence", wire.Presence(online=False, boot="1"), retain=True)
    second = stage.store.add(settings.parse({**TABLE, "name": "k"}), stage.folder / "bundle")
    stage.server._only = None
    stage.play(20.0 + turns.PATIENCE_S)
    assert [stage.store.status(job) for job in (first, second)] == ["queued", "running"]
    assert f"{second} is next" in caplog.text
    a.answer(ones())
    stage.play()
    assert [stage.store.status(job) for job in (first, second)] == ["running", "done"]
    b.say("presence", wire.Presence(online=True, boot="2"), retain=True)
    stage.play()
    b.answer(ones())
    stage.play()
    assert stage.store.status(first) == "done"
    assert [fact.update.device for _, _, fact in stage.store.facts(first) if isinstance(fact, Answered)] == ["a", "b"]
    stage.store.close()


def test_jobs_whose_boards_never_come_have_their_turns_in_order(tmp_path: Path) -> None:
    """Of three, the one that gave way last is the last to come again: none is passed over."""
    stage = Stage(tmp_path)
    jobs = [stage.job]
    for name in "kl":
        jobs.append(stage.store.add(settings.parse({**TABLE, "name": name}), stage.folder / "bundle"))
    stage.server._only = None
    served = []
    for _ in range(4):
        stage.play(5.0)
        served.append(stage.server.active.id)
        stage.play(turns.PATIENCE_S)
    assert served == [*jobs, jobs[0]]
    stage.store.close()


def test_a_fleets_run_that_was_killed_does_not_keep_others_from_being_served(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """Its simulated boards are gone with it; that it is left alone is said once."""
    job = settings.parse({**TABLE, "name": "simulated"})
    left = stage.store.add(job, stage.folder / "bundle", "fleet")
    stage.store.set_status(left, "running")
    stage.server._only = None
    stage.hand("a")
    stage.play(5.0)
    assert stage.server.active.id == stage.job
    assert [record.message for record in caplog.records if left in record.message] == [
        f"{left} is a simulated fleet's, whose boards are not here: it is left to `fedquilt fleet`"
    ]
    assert stage.store.status(left) == "running"


def test_a_job_that_was_stopped_before_it_began_can_be_resumed(stage: Stage) -> None:
    """Its log holds nothing but the stop."""
    stage.store.append(stage.job, Ended("stopped", "by request"))
    stage.store.set_status(stage.job, "running")
    a = stage.hand("a")
    stage.play()
    a.answer(ones())
    stage.play()
    assert stage.store.status(stage.job) == "done"


@pytest.mark.parametrize("value", [1.7e308, -1.7e308, 3.0])
def test_a_metric_that_is_huge_bricks_nothing(stage: Stage, value: float) -> None:
    """Its weighted sum is beyond any number, its mean is not."""
    hands = [stage.hand("a"), stage.hand("b")]
    stage.play()
    for hand in hands:
        hand.answer(ones(), weight=10.0, metrics={"loss": value})
    stage.play()
    assert stage.told(Committed)[0].metrics == {"loss": pytest.approx(value)}
    assert log.summary(stage.store.job(stage.job), stage.store)["problem"] is None
    assert stage.store.status(stage.job) == "done"


def test_a_sum_of_examples_that_is_no_number_is_left_out_with_a_note(stage: Stage) -> None:
    """Nothing is written that could not be read back; and an evaluation on fewer than no examples is refused."""
    a, b, c = (stage.hand(name) for name in "abc")
    stage.play()
    a.answer(ones(), metrics={"check.examples": 1.7e308})
    b.answer(ones(), metrics={"check.examples": 1.7e308})
    c.answer(ones(), metrics={"check.examples": -1.0})
    stage.play()
    assert "'check.examples' is negative" in stage.told(Rejected)[0].reason
    (fact,) = stage.told(Committed)
    assert fact.metrics == {}
    assert fact.notes[-1] == (
        "no value of the number of held-out examples: what the devices report adds up beyond any number"
    )


@pytest.mark.parametrize(
    ("weight", "metrics", "said"),
    [
        (
            1.0,
            {"check.accuracy": 0.0, "check.loss": 0.0, "check.examples": 0.0},
            "no evaluation: none of the devices holds out an example ([data] held)",
        ),
        (0.0, {"loss": 1.0, "steps": 0.0}, "no mean of loss, steps: every update counts as 0 examples"),
    ],
)
def test_what_no_device_has_an_example_of_is_said_in_words(
    stage: Stage, weight: float, metrics: dict[str, float], said: str
) -> None:
    """Not as a list of the metrics' names."""
    hands = [stage.hand("a"), stage.hand("b")]
    stage.play()
    for hand in hands:
        hand.answer(ones(), weight=weight, metrics=metrics)
    stage.play()
    assert stage.told(Committed)[0].notes[-1] == said


def test_a_profile_of_extremes_bricks_nothing(tmp_path: Path) -> None:
    """Joules for a FLOP, and seconds for a task, that are beyond any number are not known."""
    stage = Stage(tmp_path, rounds=2, cohort={"prefer": "energy", "deadline": "predicted"})
    a = stage.hand("a")
    a.measured(flops_per_s=1e-320, busy_w=1e24)
    stage.play()
    for _ in range(2):
        a.answer(ones(), usage=Usage(wall_s=1.0, point="p"))
        stage.play()
    assert stage.store.status(stage.job) == "done"
    assert [fact.expected_s for fact in stage.told(Answered)] == [None, None]
    stage.store.close()


def test_a_fact_that_cannot_be_kept_ends_its_job_and_not_the_coordinator(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method whose notes are not Unicode; the sentence that says so is."""
    a = stage.hand("a")
    stage.play()
    monkeypatch.setattr(stage.server.active, "method", replace(fedavg.METHOD, explain=lambda state: ["a file \udcff"]))
    a.answer(ones())
    stage.play()
    assert stage.store.status(stage.job) == "failed"
    assert "cannot be kept" in stage.told(Ended)[0].reason


def test_what_is_held_for_sending_does_not_grow_with_devices(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that cuts each device its own part, as HeteroFL does: of a hundred parts the last few are held."""
    stage.hand("a")
    stage.play()
    job = stage.server.active

    def send(state: fedavg.State, view: DeviceView) -> Order:
        width = int(view.device) % 4 + 1
        return Order({}, {"model": {"w": np.ones(width, np.float32)}, "shared": state.model})

    monkeypatch.setattr(job, "method", replace(job.method, send=send))
    made = [job.task(str(number), "numpy", None, 0.0) for number in range(100)]
    assert len({task.bundles["model"].sha256 for task in made}) == 4
    assert {ref.sha256 for task in made for ref in task.bundles.values()} <= job.sent()
    assert len(job._encoded) <= 4
    encoded = []
    monkeypatch.setattr(tensors, "encode", lambda value: encoded.append(value) or b"")
    job.task("1", "numpy", None, 0.0)
    assert not any(value is job.state.model for value in encoded)  # what all get is encoded once


def test_an_unclaimed_task_is_sent_again_ever_more_rarely(stage: Stage) -> None:
    """After 5 s, then 10 s later: two repeats in 20 s."""
    a = stage.hand("a")
    stage.play(20.0)
    assert len(a.tasks) == 3
    assert len({task and task.params["lr"] for task in a.tasks}) == 1


def test_a_job_that_nobody_can_do_fails_at_its_deadline(stage: Stage) -> None:
    """With who was silent."""
    stage.hand("a")
    stage.play(40.0)
    assert "silent: a" in stage.told(Ended)[0].reason
    assert stage.store.status(stage.job) == "failed"


def test_an_attempt_that_is_over_takes_its_tasks_back(tmp_path: Path) -> None:
    """Of two devices that were silent, one is gone by then and is not asked again: nothing waits for it any more."""
    stage = Stage(tmp_path, cohort={"deadline_s": 30.0, "attempts": 2, "min_devices": 1})
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    a.say("presence", wire.Presence(online=False, boot="1"), retain=True)
    stage.play(32.0)
    assert [(fact.attempt, fact.devices) for fact in stage.told(Asked)] == [(0, ("a", "b")), (1, ("b",))]
    assert a.tasks[-1] is None
    task = b.tasks[-1]
    assert task is not None
    assert task.attempt == 1
    stage.store.close()


def test_a_device_that_is_asked_again_at_the_deadline_works_on(tmp_path: Path) -> None:
    """Its task is replaced and never emptied in between, which would end its work: one that is slow would never answer."""
    stage = Stage(tmp_path, cohort={"deadline_s": 30.0, "attempts": 3})
    slow = stage.hand("slow")
    stage.play(62.0)
    assert [fact.attempt for fact in stage.told(Asked)] == [0, 1, 2]
    attempts = [task.attempt if task else None for task in slow.tasks]
    assert list(dict.fromkeys(attempts)) == [0, 1, 2]
    slow.answer(ones())
    stage.play()
    assert [fact.status for fact in stage.told(Ended)] == ["done"]
    assert slow.tasks[-1] is None
    stage.store.close()


def test_an_attempt_that_nobody_was_asked_in_leaves_no_task_when_its_job_ends(tmp_path: Path) -> None:
    stage = Stage(tmp_path, cohort={"deadline_s": 30.0, "attempts": 2})
    gone = stage.hand("gone")
    stage.play()
    gone.say("presence", wire.Presence(online=False, boot="1"), retain=True)
    stage.play(35.0)
    stage.store.set_status(stage.job, "stopping")
    stage.play()
    assert gone.tasks[-1] is None
    stage.store.close()


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """The kernel refuses to make any file longer, as a full disk does."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_an_update_that_finds_the_disk_full_is_taken_once_there_is_room(stage: Stage) -> None:
    """The device keeps it and offers it again; what was accepted before is not lost."""
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    a.answer(ones())
    stage.play()
    b.depot.put(tensors.encode(ones(3.0)))
    with full_disk():
        update = b.answer(ones(3.0))
        stage.play()
    assert [fact.update.device for fact in stage.told(Answered)] == ["a"]
    assert b.acks == []
    b.say("update", update)
    stage.play()
    assert stage.told(Ended)[0].status == "done"


def test_a_log_that_cannot_be_written_ends_the_coordinator_with_a_sentence_and_a_restart_continues(
    stage: Stage,
) -> None:
    """Nothing is acted on that is not on disk."""
    a = stage.hand("a")
    stage.play()
    claim = {"job": stage.job, "round": 0, "attempt": 0, "accepted": False, "code": "data", "reason": "none"}
    a.say("claim", wire.Claim(**claim))
    with full_disk(), pytest.raises(StoreError, match="is the disk full"):
        stage.play()
    assert a.acks == []
    stage.restart()
    stage.play()
    a.answer(ones())
    stage.play()
    assert stage.told(Ended)[0].status == "done"


def test_a_device_that_changes_its_mind_about_an_update_fills_no_disk(stage: Stage) -> None:
    """What it no longer offers is no longer fetched, and what is refused is dropped."""
    a = stage.hand("a")
    stage.play()
    for factor in range(5):
        a.answer(ones(), bundles={"model": BlobRef(sha256=f"{factor:064x}", size=1000)})
    a.answer({"1.bias": np.zeros(2, np.float32)})
    stage.play()
    assert "tensor names differ" in stage.told(Rejected)[0].reason
    kept = {path.name for path in (stage.folder / "home" / "blobs").iterdir() if len(path.name) == 64}
    task = next(task for task in a.tasks if task)
    pinned = {ref.sha256 for ref in task.bundles.values()} | stage.store.states()
    assert kept == pinned


def test_a_stale_task_that_the_broker_kept_is_taken_back_when_it_is_claimed(stage: Stage) -> None:
    """Before the device works for nothing."""
    a, _ = stage.hand("a"), stage.hand("b")
    stage.play()
    a.answer(ones())
    stage.play()
    heard = len(a.tasks)
    a.say("claim", wire.Claim(job="of-old", round=7, attempt=0, accepted=True))
    stage.play()
    assert a.tasks[heard:] == [None]


def test_an_answer_that_counts_does_not_read_the_other_jobs_facts(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it can be left over; other jobs' blobs are looked up once, when the round's are dropped."""
    held, looked = Store.held, []

    def counted(store: Store, but: str = "") -> set[str]:
        looked.append(len(stage.told(Committed)))
        return held(store, but)

    hands = [stage.hand(name) for name in "abc"]
    stage.play(1.0)
    monkeypatch.setattr(Store, "held", counted)
    for hand in hands:
        hand.answer(ones())
    stage.play()
    assert len(stage.told(Answered)) == 3
    assert looked == [1]


def test_blobs_of_past_rounds_are_let_go(tmp_path: Path) -> None:
    """After two rounds only the bundle's and the last state are left."""
    stage = Stage(tmp_path, rounds=2)
    a = stage.hand("a")
    for factor in (1.0, 2.0):
        stage.play()
        a.answer(ones(factor))
        stage.play()
    assert stage.server.finished
    kept = {path.name for path in (tmp_path / "home" / "blobs").iterdir() if len(path.name) == 64}
    assert kept == {stage.told(Committed)[-1].state.sha256, *(p.name for p in (tmp_path / "bundle/blobs").iterdir())}
    stage.store.close()


def test_a_board_that_is_low_or_hot_is_passed_over_until_it_is_not(tmp_path: Path) -> None:
    """The log says why, and the round begins as soon as somebody can be asked."""
    stage = Stage(tmp_path, cohort={"min_battery": 0.2, "max_temperature_c": 70.0})
    stage.play(0.1)  # nobody keeps what sensors said before the coordinator came
    a, b = stage.hand("a"), stage.hand("b")
    a.say("telemetry", wire.Telemetry(battery=0.1, charging=False))
    b.say("telemetry", wire.Telemetry(temperature_c=85.0))
    stage.play()
    assert not stage.told(Asked)
    found = why.of(stage.store, stage.job)
    assert {device: part.code for device, part in found[0].items()} == {"a": "battery", "b": "hot"}
    active = stage.server.active
    assert active is not None
    assert log.waiting(active.rounds, active.engines, ["a", "b"]) == (
        "devices that run torch or numpy: 2 online, 1 not eligible (battery), 1 not eligible (hot), at least 1 needed"
    )
    b.say("telemetry", wire.Telemetry(temperature_c=60.0))
    stage.play()
    assert [fact.devices for fact in stage.told(Asked)] == [("b",)]
    b.say("telemetry", wire.Telemetry(temperature_c=90.0))  # from the work: it is not taken from it
    stage.play()
    b.answer(ones())
    stage.play()
    assert stage.store.status(stage.job) == "done"
    found = why.of(stage.store, stage.job)
    assert {device: part.code for device, part in found[0].items()} == {"a": "battery", "b": "answered"}
    stage.store.close()


def test_who_there_was_to_choose_from_outlives_the_coordinator(tmp_path: Path) -> None:
    """The choice after a restart rests on the same log, and who is not drawn can be told his place."""
    stage = Stage(tmp_path, rounds=2, cohort={"size": 1, "min_devices": 3})
    hands = {name: stage.hand(name) for name in "abc"}
    stage.play()
    (asked,) = stage.told(Asked)
    before = stage.server.active.rounds
    assert before.eligible == {"a", "b", "c"}
    stage.restart()
    stage.play()
    after = stage.server.active.rounds
    assert (after.eligible, after.since, after.passed) == (before.eligible, before.since, before.passed)
    hands[asked.devices[0]].answer(ones())
    stage.play()
    told = why.of(stage.store, stage.job)[0]
    assert sorted(part.text for part in told.values()) == [
        "not drawn: place 2 of 3, 1 selected",
        "not drawn: place 3 of 3, 1 selected",
        "update received",
    ]
    stage.store.close()


def test_a_job_stops_when_its_bytes_are_used_up_and_says_what_joules_it_cannot_count(tmp_path: Path) -> None:
    """After the first of nine rounds; what it has can be exported as ever."""
    stage = Stage(tmp_path, rounds=9, stop={"max_bytes": 10, "max_joules": 5.0})
    a = stage.hand("a")
    stage.play()
    a.answer(ones(), usage=Usage(up_bytes=12))
    stage.play()
    assert [fact.round for fact in stage.told(Committed)] == [0]
    assert stage.told(Committed)[0].notes == (
        "max_joules = 5 ends nothing here: no board that has answered has a meter for its joules; the job runs to its "
        "rounds, or to another limit of [stop]",
    )
    assert 2.0 < stage.told(Committed)[0].took_s < 4.2
    assert [(fact.status, fact.reason) for fact in stage.told(Ended)] == [
        ("done", "max_bytes: 12 bytes of 10 are used up")
    ]
    stage.store.close()


def test_a_limit_of_joules_that_no_board_counts_is_told_once_more_at_the_end(tmp_path: Path) -> None:
    """The job runs to its rounds, and its last sentence says that the limit was none."""
    stage = Stage(tmp_path, rounds=1, stop={"max_joules": 5.0})
    a = stage.hand("a")
    stage.play()
    a.answer(ones(), usage=Usage())
    stage.play()
    (ended,) = stage.told(Ended)
    assert ended.status == "done"
    assert "max_joules = 5 ends nothing here" in ended.reason
    stage.store.close()


def test_boards_that_take_fewer_joules_are_preferred_where_the_job_says_so(tmp_path: Path) -> None:
    """What the choice rests on is in the log, to three digits."""
    stage = Stage(tmp_path, cohort={"size": 1, "min_devices": 2, "prefer": "energy"})
    for name, watts in (("a", 1000.0), ("b", 1.23456)):
        hand = stage.hand(name)
        point = OperatingPoint(name="p", flops_per_s=1.0, busy_w=watts)
        profile = Profile(
            device=name,
            board="hand",
            memory_bytes=1 << 30,
            budget_bytes=1 << 29,
            engines=("numpy",),
            versions={},
            points=(point,),
        )
        hand.say("profile", profile, retain=True)
    stage.play()
    assert stage.told(Surveyed)[-1].costs == {"a": 1000.0, "b": 1.23}
    assert stage.told(Asked)[0].devices == ("b",)
    stage.store.close()


# -- memory ---------------------------------------------------------------------------------------


def test_a_task_carries_its_devices_tier_and_the_log_says_who_could_take_part(tmp_path: Path) -> None:
    """Two devices with half a gigabyte for a task; one then has 10 bytes and cannot, and of examples one has told."""
    stage = Stage(tmp_path, rounds=3)
    one, two = stage.hand("one"), stage.hand("two")
    stage.play(2.0)
    assert one.tasks[-1] is not None
    assert one.tasks[-1].tier == "under 1GB"
    assert stage.told(Asked)[0].coverage[0].endswith("2 of 2 devices")
    one.answer(MODEL, usage=Usage(examples=30))
    two.answer(MODEL)
    stage.play(2.0)
    assert stage.told(Asked)[1].coverage == ()  # everybody can still, which is no news
    small = Profile(device="two", board="hand", memory_bytes=1 << 30, budget_bytes=10, engines=("numpy",), versions={})
    two.say("profile", small, retain=True)
    stage.restart()
    stage.play(2.0)
    one.answer(MODEL, usage=Usage(examples=30))
    two.answer(MODEL)
    stage.play(2.0)
    last = stage.told(Asked)[2]
    assert last.coverage[0].endswith("1 of 2 devices, 30 of 30 examples (1 have not said how many)")
    assert last.coverage[0] in log.sentences(last)[1]
    stage.store.close()


def test_a_run_leaves_alone_what_an_interrupted_one_still_needs(tmp_path: Path) -> None:
    """Both begin with the same state, byte for byte, and one had an update already when it was stopped."""
    stage = Stage(tmp_path)
    a, _ = stage.hand("a"), stage.hand("b")
    stage.play()
    a.answer(ones(3.0))
    stage.play()
    stage.store.set_status(stage.job, "stopping")
    stage.play()
    first, needed = stage.job, stage.store.held()
    assert len(needed) == 2

    stage.job = stage.store.add(settings.parse(TABLE), tmp_path / "bundle")
    stage.restart()
    stage.play()
    for hand in stage.hands:
        hand.answer(ones())
    stage.play()
    assert [fact.status for fact in stage.told(Ended)] == ["stopped", "done"]
    assert all(stage.store.depot.path(sha256) for sha256 in needed)

    stage.job = first
    stage.store.set_status(first, "running")
    stage.restart()
    stage.play()
    stage.hands[1].answer(ones(5.0))
    stage.play()
    assert stage.store.status(first) == "done"
    stage.store.close()


def test_a_task_that_somebody_emptied_at_the_broker_is_sent_again_at_once(stage: Stage) -> None:
    """The agent says that it gave the task up; nobody is declined, and a withdrawn device is only told so again."""
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    a.say("claim", wire.Claim(job=a.tasks[-1].job, round=0, attempt=0, accepted=False, code="cleared"))
    sent = len(a.tasks)
    stage.play(0.5)
    assert [task is not None for task in a.tasks[sent:]] == [True]
    assert stage.told(Declined) == []
    for hand in (a, b):
        hand.answer(ones())
    stage.play()
    assert [fact.status for fact in stage.told(Ended)] == ["done"]


# -- codecs ---------------------------------------------------------------------------------------


@pytest.fixture
def coded(tmp_path: Path) -> Iterator[Stage]:
    """A job of one round whose updates go up by int8."""
    made = Stage(tmp_path, wire={"codec": "int8"})
    yield made
    made.store.close()


def by_int8(hand: Hand, value: float, **changes: Any) -> Update:
    """An answer of which every entry has moved from what was sent by `value`, in 127 steps."""
    task = next(task for task in reversed(hand.tasks) if task)
    assert task.wire.codec == "int8"
    step = np.full(1, value / 127, np.float32)
    sent = {f"{name}#int8": np.full(array.shape, 127, np.int8) for name, array in MODEL.items()}
    sent |= {f"{name}#step": step for name in MODEL}
    return hand.answer(sent, **{"bases": {"model": task.bundles["model"].sha256}, **changes})


def ended_at(stage: Stage) -> list[float]:
    stored = stage.store.depot.path(stage.told(Committed)[0].state.sha256)
    assert stored is not None
    return tensors.unpack(stored.read_bytes(), fedavg.State).model["1.bias"].tolist()


def test_a_coded_update_is_decoded_when_it_comes_and_kept_as_it_will_be_folded(coded: Stage) -> None:
    """Its own blob goes, the log names the plain one, and the device's acknowledgement is the usual one."""
    a, b = coded.hand("a"), coded.hand("b")
    coded.play()
    update = by_int8(a, 1.0)
    coded.play()
    (fact,) = coded.told(Answered)
    assert fact.update.bases == {}
    kept = coded.store.depot.path(fact.update.bundles["model"].sha256)
    assert kept is not None
    np.testing.assert_allclose(tensors.read(kept)["1.bias"], [1, 1], rtol=1e-6)
    assert coded.store.depot.path(update.bundles["model"].sha256) is None
    assert [ack.accepted for ack in a.acks] == [True]
    by_int8(b, 3.0)
    coded.play()
    np.testing.assert_allclose(ended_at(coded), [2, 2], rtol=1e-6)


def test_coded_updates_on_both_sides_of_a_restart_count_as_if_there_were_none(coded: Stage) -> None:
    """What the first was decoded from is not asked for again; what the second has moved from is made anew."""
    a, b = coded.hand("a"), coded.hand("b")
    coded.play()
    by_int8(a, 1.0)
    coded.play()
    coded.restart()
    coded.play()
    by_int8(b, 3.0)
    coded.play()
    np.testing.assert_allclose(ended_at(coded), [2, 2], rtol=1e-6)
    assert coded.told(Rejected) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bases": {"model": "a" * 64}}, "bundle 'model' has moved from aaaaaaaaaaaa, which this round has not sent"),
        ({"bases": {}, "value": np.inf}, "'1.bias#step' holds 1 values that are not finite"),
        ({"value": -1.0}, "tensor '1.bias', part step: -0.00787402, wanted a number of at least 0"),
    ],
)
def test_a_coded_update_that_cannot_be_decoded_is_refused_with_its_reason(
    coded: Stage, changes: dict[str, Any], said: str
) -> None:
    """Moved from what nobody sent, or by steps that are none; its blob goes, the other device's work counts."""
    a, b = coded.hand("a"), coded.hand("b")
    coded.play()
    bad = by_int8(a, **{"value": 1.0, **changes})
    by_int8(b, 3.0)
    coded.play()
    assert said in coded.told(Rejected)[0].reason
    assert coded.store.depot.path(bad.bundles["model"].sha256) is None
    coded.play(40.0)
    assert coded.told(Committed) == [] or ended_at(coded) == pytest.approx([3, 3])


def test_a_device_of_an_older_version_is_not_asked_and_the_log_says_why(coded: Stage) -> None:
    """It knows no int8; the others make the round."""
    old, new = coded.hand("old", codecs=("raw",)), coded.hand("new")
    coded.play()
    by_int8(new, 2.0)
    coded.play()
    assert old.tasks == []
    np.testing.assert_allclose(ended_at(coded), [2, 2], rtol=1e-6)
    assert "[wire]" in why.of(coded.store, coded.job)[0]["old"].text


@pytest.mark.parametrize("served", [True, False])
def test_a_job_that_was_done_when_its_coordinator_was_killed_stays_done(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    """Killed between the last fact and the status; then somebody stops what looks like a running job."""
    a = stage.hand("a")
    stage.play()
    a.answer(ones())

    def killed(id: str, status: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stage.store, "set_status", killed)
        with pytest.raises(KeyboardInterrupt):
            stage.play()
    if served:
        stage.store.set_status(stage.job, "stopping")
        stage.restart()
        stage.play()
    else:
        assert main(["stop", stage.job, "--home", str(stage.store.home)]) == 0
    row = stage.store.job(stage.job)
    assert row.status == "done"
    assert Running(row, stage.store, 0.0, methods.load("fedavg")).rounds.phase == "done"


def test_after_a_restart_a_task_waits_for_what_its_device_says_it_is(stage: Stage) -> None:
    """A task sent before would name the method's first engine, which the device may not have: it would decline."""
    a = stage.hand("a")
    stage.play()
    stage.restart()
    stage.play()
    assert {task.engine for task in a.tasks if task is not None} == {"numpy"}
    assert sum(task is not None for task in a.tasks) > 1
