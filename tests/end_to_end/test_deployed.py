"""A model on its way to a board: coordinator, broker and agent as processes, the agent as an ordinary user."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from linear_models import DIGITS, network
from ordinary import User
from processes import Processes
from waiting import LIMIT_S, wait_until

from fedquilt import wire
from fedquilt.formats import toml
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.link import MqttLink


class Fleet:
    def __init__(self, folder: Path, broker: Any, processes: Processes, user: User) -> None:
        self.folder, self.user, self.processes = folder, user, processes
        self.models = user.home / "d/models"
        shutil.copy(DIGITS, user.home / "digits.npz")
        data = {"path": str(user.home / "digits.npz"), "partition": "iid", "share": 0, "shares": 4}
        hook = ["sh", "-c", f'readlink "$FEDQUILT_MODELS/current" >> {user.home}/hooked']
        table = {"device": "d", "home": str(user.home / "d"), "budget": "600MB", "telemetry_s": 1.0, "warm_s": 0.0}
        own = {"broker": {"url": broker.url}, "data": data, "models": {"hook": hook}}
        (user.home / "agent.toml").write_text(toml.format_toml({**table, **own}))
        self.runs = folder / "runs"
        processes.start("coordinator", folder / "serve.log", "serve", "--home", str(self.runs), "--broker", broker.url)
        self.link = MqttLink(Broker.from_url(url=broker.url), "observer")
        self.link.wait_until_connected(LIMIT_S)
        self.link.subscribe([wire.Topics("fleet").device_topic("d", "up", "installed")])
        self.told: list[wire.ReleaseStatus] = []
        self.agent = self.start()

    def start(self) -> Any:
        command = (sys.executable, "-m", "fedquilt.cli", "agent", str(self.user.home / "agent.toml"))
        return self.user.start(*command, log=self.folder / "agent.log", OMP_NUM_THREADS="1")

    def listen(self) -> wire.ReleaseStatus | None:
        self.link.wait(0.02)
        self.told += [wire.decode(message.payload, wire.ReleaseStatus) for message in self.link.receive()]
        return self.told[-1] if self.told else None

    def deploy(self, name: str, payload: bytes, *options: str) -> None:
        file = self.folder / f"{name}.onnx"
        file.write_bytes(payload)
        self.command("rollout", "model", str(file), "--soak", "1s", *options)

    def command(self, *words: str) -> None:
        self.processes.start("command", self.folder / "command.log", *words, "--home", str(self.runs))
        assert self.processes.running["command"].wait() == 0, (self.folder / "command.log").read_text()

    def until(self, phase: str, name: str | None = None, serial: int = 0) -> wire.ReleaseStatus:
        def holds() -> wire.ReleaseStatus | None:
            last = self.listen()
            fits = last is not None and last.phase == phase and last.serial >= serial
            return last if fits and name in (None, last.name) else None

        return wait_until(holds, f"{phase} {name}", diagnostics=lambda: f"{self.told[-3:]} {self.log()[-2000:]}")

    def until_again(self, phase: str) -> None:
        begun = len(self.told)
        wait_until(
            lambda: self.listen() and any(one.phase == phase for one in self.told[begun:]), phase, diagnostics=self.log
        )

    def log(self) -> str:
        return (self.folder / "agent.log").read_text()

    def current(self) -> bytes:
        return (self.models / "current/model.onnx").read_bytes()


@pytest.fixture
def fleet(tmp_path: Path, mosquitto: Callable[..., Any], processes: Processes, user: User) -> Iterator[Fleet]:
    made = Fleet(tmp_path, mosquitto(), processes, user)
    wait_until((made.runs / "fedquilt.db").exists, "the coordinator's home")
    yield made
    made.link.close()


def test_a_better_model_is_kept_and_taken_back_and_a_worse_one_refused(fleet: Fleet) -> None:
    """Measured on the board's own held-out digits, within a budget set from afar; a hook runs after each exchange."""
    good, better, bad = network(turned=3), network(), network(turned=10, gain=2)
    fleet.deploy("good", good)
    fleet.until("committed", "good")
    assert fleet.current() == good
    fleet.deploy("better", better, "--min-gain", "10pt")
    told = fleet.until("committed", "better").metrics
    assert told["accuracy"] > told["accuracy_before"] + 0.1
    assert told["latency_s"] > 0
    assert told["peak_bytes"] > 30e6
    assert fleet.current() == better
    fleet.command("rollout", "back", "model")
    fleet.until("returned", "good")
    assert fleet.current() == good
    fleet.deploy("bad", bad, "--min-gain", "-0.5pt")
    refused = fleet.until("refused", "good")
    assert "points, at least -0.5 are required" in refused.reason
    assert fleet.current() == good
    assert len((fleet.user.home / "hooked").read_text().splitlines()) == 3
    fleet.command("rollout", "settings", "budget=20MB", "--soak", "1s")  # agent.toml has more, which would be enough
    fleet.until("committed")
    fleet.deploy("last", better)
    assert "over its budget of 20 MB" in fleet.until("refused").reason


def test_an_agent_that_is_killed_in_each_phase_goes_on_by_itself(fleet: Fleet) -> None:
    """SIGKILL comes as soon as the agent tells of a phase; `current` leads to a whole model after each."""
    first, second = network(), network(gain=2)
    fleet.deploy("first", first)
    fleet.until("committed", "first")
    fleet.deploy("second", second, "--soak", "3s")
    for phase in ("fetching", "checking", "checking", "soaking"):
        fleet.until_again(phase)
        fleet.agent.send_signal(signal.SIGKILL)
        fleet.agent.wait()
        assert fleet.current() in (first, second)
        fleet.agent = fleet.start()
    fleet.until("committed", "second")
    assert fleet.current() == second
    assert os.readlink(fleet.models / "previous") != os.readlink(fleet.models / "current")
