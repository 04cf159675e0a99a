"""Rollouts to sixty real agents on virtual time. `test_deployed.py` has processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from one_agent import Board as Sensors
from one_agent import ScriptedWorker
from rolled import MODEL, OTHER, TOPICS, Ground
from toy_kinds import ToyKind

from fedquilt import wire
from fedquilt.coordinator import run_control
from fedquilt.coordinator.rounds.rollout import RolloutPlan
from fedquilt.edge_agent.agent import Agent
from fedquilt.edge_agent.settings import AgentSettings

pytest.importorskip("onnxruntime", reason="boards without it get no models")

COUNT = 60


class Model(ToyKind):
    """A model on a board; one that is bad passes the check, and fails when it is served."""

    def __init__(self, bad: set[str]) -> None:
        super().__init__()
        self.bad_messages, self.stored_chunks = bad, list[str]()

    def activate(self, release: wire.DesiredRelease) -> None:
        super().activate(release)
        self.stored_chunks.append(self.running)

    def unhealthy_reason(self) -> str:
        return "9 of 10 answers failed" if self.running in self.bad_messages else ""


class Fleet:
    def __init__(self, ground: Ground, count: int, bad: set[str]) -> None:
        self.ground = ground
        self.models = {f"b-{number:03d}": Model(bad) for number in range(count)}
        self.agents: dict[str, Agent] = {}
        self.links = {}
        for name in self.models:
            self.start(name)

    def start(self, name: str) -> None:
        will = (TOPICS.device_topic(name, "up", "presence"), wire.encode(wire.Presence(online=False, boot="x")))
        self.links[name] = self.ground.broker.connect(will)
        options = AgentSettings(device=name, fleet="f", home=str(self.ground.folder / "agents" / name))
        kinds = {"model": self.models[name]}
        self.agents[name] = Agent(
            self.links[name], options, Sensors(), ScriptedWorker(), durable=False, kinds=kinds, clock=lambda: None
        )

    def end(self, name: str) -> None:
        self.ground.broker.lose_client(self.links.pop(name))
        del self.agents[name]

    def play(self, seconds: float) -> None:
        broker = self.ground.broker
        until = broker.now_s + seconds
        while broker.now_s < until:
            broker.now_s += 0.5
            broker.deliver_due()
            self.ground.server.step(broker.now_s)
            for agent in self.agents.values():
                agent.step(broker.now_s)

    def running(self, sha256: str) -> list[str]:
        return [name for name, model in self.models.items() if model.running == sha256]

    def ever(self, sha256: str) -> list[str]:
        return [name for name, model in self.models.items() if sha256 in model.stored_chunks]


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    return Ground(tmp_path)


def test_sixty_agents_get_a_model_and_a_bad_one_reaches_the_canary_alone(ground: Ground) -> None:
    """A board that is off meanwhile catches up when it returns; the last model is taken back from all boards."""
    put = ground.store.blob_store.store_bytes
    good, bad, other = (put(each).sha256 for each in (MODEL, b"bad" * 1000, OTHER))
    fleet = Fleet(ground, COUNT, {bad})
    fleet.play(2.0)
    fleet.end("b-007")
    fleet.play(30.0)
    first = ground.deploy(MODEL, name="first", soak_s=5.0, patience_s=30.0)
    fleet.play(90.0)
    assert ground.state(first).status == "done"
    assert len(fleet.running(good)) == COUNT - 1
    second = ground.deploy(b"bad" * 1000, name="bad", soak_s=5.0)
    fleet.play(40.0)
    assert ground.state(second).status == "aborted"
    assert "9 of 10 answers failed" in ground.state(second).reason
    assert len(fleet.ever(bad)) == int(0.05 * (COUNT - 1))
    assert len(fleet.running(good)) == COUNT - 1
    fleet.start("b-007")
    fleet.play(20.0)
    assert len(fleet.running(good)) == COUNT
    third = ground.deploy(OTHER, name="third", soak_s=5.0)
    fleet.play(90.0)
    assert len(fleet.running(other)) == COUNT
    run_control.revert_rollout(ground.store, third)
    fleet.play(20.0)
    assert len(fleet.running(good)) == COUNT
    assert ground.state(third).count_outcomes() == {"returned": COUNT}


def test_agents_end_a_rollout_that_is_aborted_before_they_swap(ground: Ground) -> None:
    """Boards in the middle of their check give the model up, and say so."""
    fleet = Fleet(ground, 4, set())
    for model in fleet.models.values():
        model.verdict = None  # the check goes on
    id = ground.deploy(canary=0.5, phases=(1.0,))
    fleet.play(15.0)
    assert ground.state(id).count_outcomes() == {"checking": 2}
    run_control.revert_rollout(ground.store)
    fleet.play(5.0)
    assert ground.state(id).count_outcomes() == {"returned": 2}
    assert all(model.running == "" for model in fleet.models.values())


def test_a_kind_that_a_board_does_not_know_is_refused_by_it(ground: Ground) -> None:
    """Agents of this test exchange models alone; a rollout of another kind does not disturb that of a model."""
    fleet = Fleet(ground, 3, set())
    model = ground.deploy(soak_s=1.0)
    settings = ground.store.rollouts.add_rollout(RolloutPlan("settings", "budget", settings={"budget": "1GB"}))
    fleet.play(60.0)
    assert ground.state(settings).status == "aborted"
    assert "settings" in ground.state(settings).reason.partition("refused: ")[2]
    assert ground.state(model).status == "done"
