"""A federation whose blobs go by HTTP, with somebody killed in the middle of a transfer."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cutting import Relay
from processes import TABLE, Processes, facts
from waiting import until

from fedquilt import bundle, config, tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.facts import Committed, Ended
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.tools.simulation import agents as fleet

NETWORK = {"name": "mlp", "inputs": 64, "hidden": [6000], "classes": 10}  # 1.8 MB: several chunks
ROUNDS = 4


def job(folder: Path) -> fleet.Plan:
    bundle.write(
        folder / "job.bundle",
        {"network": NETWORK, "flops": 900_000},
        {"model": tensors.encode(numpy_engine.init(NETWORK, seed=0))},
    )
    table = {
        **{key: value for key, value in TABLE.items() if not isinstance(value, dict)},
        "rounds": ROUNDS,
        **{key: value for key, value in TABLE.items() if isinstance(value, dict)},
        "params": {"lr": 0.1, "batch": 32, "epochs": 1},
        "cohort": {"deadline_s": 300.0, "start_devices": 2},
        "data": {**TABLE["data"], "classes": 5},
        "fleet": {"devices": 2, "boards": ["jetson-nano"], "budgets": ["512MB"]},
    }
    (folder / "job.toml").write_text(config.text(table))
    return fleet.Plan(settings.load(folder / "job.toml"), folder / "job.bundle", folder / "virtual")


@pytest.mark.parametrize("killed", ["coordinator", "broker", "agent"])
def test_a_job_whose_blobs_go_by_http_outlives_a_kill_in_the_middle_of_one(
    tmp_path: Path, processes: Processes, mosquitto: Callable[..., Any], killed: str
) -> None:
    broker, log, home = mosquitto(), tmp_path / "log", tmp_path / "runs"
    plan = job(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    commands = {
        "coordinator": (
            *("serve", "--home", str(home), "--broker", broker.url),
            *("--blobs-http", f"127.0.0.1:{port}"),
        )
    }
    happened: list[int] = []

    def most(number: int) -> int | None:
        """The fourth transfer stops in its middle, and somebody is killed."""
        if number == 3:
            happened.append(number)
            return 700_000
        return None

    relay = Relay(port, most=most)
    commands["coordinator"] += ("--blobs-url", f"http://127.0.0.1:{relay.port}")
    for table in plan.agents():
        name = table["device"]
        (tmp_path / f"{name}.toml").write_text(
            config.text({**table, "home": str(tmp_path / name), "broker": {"url": broker.url}})
        )
        commands[name] = ("agent", str(tmp_path / f"{name}.toml"))
    agent = next(name for name in commands if name != "coordinator")
    for name, command in commands.items():
        processes.start(name, log, *command)
    until(lambda: (home / "fedquilt.db").exists(), "a home")
    processes.start("run", log, "run", str(tmp_path / "job.toml"), "--home", str(home))
    until(lambda: happened, "a transfer to break", told=log.read_text)
    if killed == "broker":
        broker.kill()
        broker.restart()
    else:
        who = agent if killed == "agent" else "coordinator"
        processes.kill(who)
        processes.start(who, log, *commands[who])
    until(lambda: isinstance((facts(home) or [None])[-1], Ended), "the end of the job", told=log.read_text)
    found = facts(home)
    assert isinstance(found[-1], Ended)
    assert found[-1].status == "done"
    assert sum(isinstance(fact, Committed) for fact in found) >= ROUNDS
    assert relay.connections >= 8
    assert "token" not in log.read_text().lower()
    relay.close()
