"""A federation whose blobs go by HTTP, with somebody killed in the middle of a transfer."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cutting import Relay
from processes import TABLE, Processes, read_events
from waiting import wait_until

from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds.events import JobEnded, RoundCommitted
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.formats import job_bundle, toml
from fedquilt.tools.simulation import agents as fleet

NETWORK = {"name": "mlp", "inputs": 64, "hidden": [6000], "classes": 10}  # 1.8 MB: several chunks
ROUNDS = 4


def job(folder: Path) -> fleet.FleetPlan:
    job_bundle.write_bundle(
        folder / "job.bundle",
        {"network": NETWORK, "flops": 900_000},
        {"model": tensors.encode_tensors(numpy_engine.init_tensors(NETWORK, seed=0))},
    )
    table = {
        **TABLE,
        "rounds": ROUNDS,
        "params": {"lr": 0.1, "batch": 32, "epochs": 1},
        "cohort": {"deadline_s": 300.0, "start_devices": 2},
        "data": {**TABLE["data"], "classes": 5},
        "fleet": {"devices": 2, "boards": ["jetson-nano"], "budgets": ["512MB"]},
    }
    (folder / "job.toml").write_text(toml.format_toml(table))
    return fleet.FleetPlan(settings.load_job(folder / "job.toml"), folder / "job.bundle", folder / "virtual")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    "killed", ["coordinator", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("broker", "agent"))]
)
def test_a_job_whose_blobs_go_by_http_outlives_a_kill_in_the_middle_of_one(
    tmp_path: Path, processes: Processes, mosquitto: Callable[..., Any], killed: str
) -> None:
    broker, log, home = mosquitto(), tmp_path / "log", tmp_path / "runs"
    plan, port = job(tmp_path), free_port()
    commands = {
        "coordinator": (
            *("serve", "--home", str(home), "--broker", broker.url),
            *("--blobs-http", f"127.0.0.1:{port}"),
        )
    }
    happened: list[int] = []

    def most(number: int) -> int | None:
        if number == 3:
            happened.append(number)
            return 700_000
        return None

    relay = Relay(port, most=most)
    commands["coordinator"] += ("--blobs-url", f"http://127.0.0.1:{relay.port}")
    agents = processes.start_agents(tmp_path, plan.make_agent_tables(), broker.url, log.name)
    processes.start("coordinator", log, *commands["coordinator"])
    agent, commands = next(iter(agents)), {**commands, **agents}
    wait_until(lambda: (home / "fedquilt.db").exists(), "a home")
    processes.start("run", log, "run", str(tmp_path / "job.toml"), "--home", str(home))
    wait_until(lambda: happened, "a transfer to break", diagnostics=log.read_text)
    if killed == "broker":
        broker.kill()
        broker.restart()
    else:
        who = agent if killed == "agent" else "coordinator"
        processes.kill(who)
        processes.start(who, log, *commands[who])
    wait_until(
        lambda: isinstance((read_events(home) or [None])[-1], JobEnded), "the end of the job", diagnostics=log.read_text
    )
    found = read_events(home)
    assert isinstance(found[-1], JobEnded)
    assert found[-1].status == "done"
    assert sum(isinstance(fact, RoundCommitted) for fact in found) >= ROUNDS
    assert relay.connections >= 8
    assert "token" not in log.read_text().lower()
    relay.close()
