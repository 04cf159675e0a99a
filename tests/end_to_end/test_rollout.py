"""Rollouts to real agents: sixty of them on virtual time, and a few as processes at a broker."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from one_agent import Bench
from one_agent import Board as Sensors
from processes import Processes, make_job
from rolled import MODEL, OTHER, TOPICS, Ground
from toy_kinds import ToyKind
from waiting import LIMIT_S, until

from fedquilt import wire
from fedquilt.coordinator import run_control
from fedquilt.coordinator.rounds.rollout import Rollout, RolloutPlan
from fedquilt.coordinator.storage.store import Store, is_served
from fedquilt.edge_agent.agent import Agent
from fedquilt.edge_agent.settings import AgentSettings

COUNT = 60


class Model(ToyKind):
    """A model on a board; one that is bad passes the check, and fails when it is served."""

    def __init__(self, bad: set[str]) -> None:
        super().__init__()
        self.bad, self.had = bad, list[str]()

    def activate(self, release: wire.DesiredRelease) -> None:
        super().activate(release)
        self.had.append(self.running)

    def unhealthy_reason(self) -> str:
        return "9 of 10 answers failed" if self.running in self.bad else ""


class Fleet:
    """Agents with their homes, which are started and ended."""

    def __init__(self, ground: Ground, count: int, bad: set[str]) -> None:
        self.ground = ground
        self.models = {f"b-{number:03d}": Model(bad) for number in range(count)}
        self.agents: dict[str, Agent] = {}
        self.links = {}
        for name in self.models:
            self.start(name)

    def start(self, name: str) -> None:
        """Start the process of an agent."""
        will = (TOPICS.device_topic(name, "up", "presence"), wire.encode(wire.Presence(online=False, boot="x")))
        self.links[name] = self.ground.broker.connect(will)
        options = AgentSettings(device=name, fleet="f", home=str(self.ground.folder / "agents" / name))
        kinds = {"model": self.models[name]}
        self.agents[name] = Agent(
            self.links[name], options, Sensors(), Bench(), durable=False, kinds=kinds, clock=lambda: None
        )

    def end(self, name: str) -> None:
        """Kill the process of an agent."""
        self.ground.broker.lose_client(self.links.pop(name))
        del self.agents[name]

    def play(self, seconds: float) -> None:
        """Let virtual time pass in steps of half a second."""
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
        return [name for name, model in self.models.items() if sha256 in model.had]


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    """A home, and a broker in memory."""
    return Ground(tmp_path)


def test_sixty_agents_get_a_model_and_a_bad_one_reaches_the_canary_alone(ground: Ground) -> None:
    """A board that is off meanwhile catches up when it returns; the last model is taken back from all boards."""
    put = ground.store.depot.store_bytes
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


# -- processes ------------------------------------------------------------------------------------
def rollout_state(home: Path) -> Rollout:
    """The latest rollout."""
    with Store(home) as store:
        return store.rollouts.find_rollout().state


def installed(home: Path, phase: str) -> list[str]:
    """Boards in a phase of the latest rollout."""
    state = rollout_state(home)
    return [device for device in state.offered if state.device_phase(device) == phase]


def fedquilt(*words: str) -> str:
    """What a command of fedquilt prints."""
    command = [sys.executable, "-m", "fedquilt.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_is_deployed_to_the_boards_that_made_it_and_taken_back(
    tmp_path: Path, mosquitto: Callable[..., Any], processes: Processes
) -> None:
    """Agents and coordinator are processes; the coordinator is killed midway, and one board is off at first."""
    pytest.importorskip("torch", reason="a network is written as ONNX by torch")
    plan, broker, home = make_job(tmp_path), mosquitto(), tmp_path / "runs"
    agents = processes.start_agents(tmp_path, plan.make_agent_tables(), broker.url)
    serve = ("serve", "--home", str(home), "--broker", broker.url)
    processes.start("coordinator", tmp_path / "serve.log", *serve)
    until(lambda: home.is_dir() and is_served(home), "the coordinator has its home")  # else `run` would be one itself
    fedquilt("run", str(tmp_path / "job.toml"), "--home", str(home))
    away = sorted(agents)[0]
    processes.kill(away)

    def said() -> str:
        logs = [(tmp_path / f"{each}.log").read_text()[-2000:] for each in ("serve", "agents")]
        ended = {each: process.poll() for each, process in processes.running.items()}
        return "\n".join([str(ended), fedquilt("rollout", "status", "digits", "--home", str(home)), *logs])

    name = facts_name(home)
    words = ("--soak", "1s", "--phases", "40%", "100", "--patience", "2s")
    told = fedquilt("rollout", "model", name, "--home", str(home), *words)
    assert "`fedquilt rollout status model-" in told
    until(lambda: installed(home, "soaking") or installed(home, "committed"), "a board that has swapped", told=said)
    processes.kill("coordinator")
    processes.start("coordinator", tmp_path / "serve.log", *serve)
    until(lambda: len(installed(home, "committed")) == 2, "both boards that are there have committed it", told=said)
    processes.start(away, tmp_path / "agents.log", *agents[away])
    until(lambda: len(installed(home, "committed")) == 3, "the one that was off has caught up", told=said)
    models = {(tmp_path / each / "models" / "current" / "model.onnx").read_bytes() for each in agents}
    assert len(models) == 1
    assert name in fedquilt("devices", "--home", str(home))
    listed = json.loads(fedquilt("rollout", "status", "--home", str(home), "--format", "json"))
    assert [(each["name"], each["counts"]) for each in listed] == [(name, {"committed": 3})]

    until(lambda: rollout_state(home).status == "done", "the end of the rollout")
    fedquilt("rollout", "back", "model", "--home", str(home))
    until(lambda: len(installed(home, "returned")) == 3, "all boards have returned", told=said)
    assert "rolled back: boards return" in fedquilt("rollout", "status", listed[0]["rollout"], "--home", str(home))


def facts_name(home: Path) -> str:
    """Id of the home's run."""
    with Store(home) as store:
        (row,) = store.readable_jobs()
    return row.id
