"""Processes of a coordinator and of agents, and a small job for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds.events import AnyEvent, RoundCommitted, UpdateAccepted
from fedquilt.coordinator.storage.store import Store
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.formats import job_bundle, toml
from fedquilt.tools.simulation import agents as fleet

DIGITS = Path(fleet.__file__).parents[1] / "lab" / "demo" / "digits.npz"
NETWORK = {"name": "mlp", "inputs": 64, "hidden": [64], "classes": 10}
TABLE: dict[str, Any] = {
    "name": "digits",
    "method": "fedprox",
    "engine": "numpy",
    "rounds": 3,
    "params": {"lr": 0.1, "batch": 8, "epochs": 12},
    "cohort": {"deadline_s": 120.0},
    "check": {"every": 1},
    "fleet": {"devices": 3, "boards": ["jetson-nano"], "budgets": ["256MB"]},
    "data": {"path": str(DIGITS), "partition": "classes", "classes": 4},
}


class Processes:
    """Processes that are killed at the end of a context."""

    def __init__(self) -> None:
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, log: Path, *command: str, **variables: str) -> None:
        """Start a command with additional environment variables."""
        self.python(name, log, "-m", "fedquilt.cli", *command, **variables)

    def python(self, name: str, log: Path, *arguments: str, **variables: str) -> None:
        env = {**os.environ, **variables}
        with log.open("ab") as out:
            self.running[name] = subprocess.Popen(
                [sys.executable, *arguments], stdout=out, stderr=subprocess.STDOUT, env=env
            )

    def start_agents(
        self,
        folder: Path,
        tables: Iterable[Mapping[str, Any]],
        broker: str | Callable[[str], Mapping[str, Any]],
        log: str = "agents.log",
        **more: Any,
    ) -> dict[str, tuple[str, ...]]:
        """Start the agents of a simulated fleet's tables, each with its files in `folder`, and return their commands.

        Args:
            broker: URL, or function of a device's name that returns its [broker] table.
            more: Other lines of every agent.toml.
        """
        commands = {}
        for table in tables:
            name, path = str(table["device"]), folder / f"{table['device']}.toml"
            own = {"url": broker} if isinstance(broker, str) else broker(name)
            path.write_text(toml.format_toml({**table, "home": str(folder / name), **more, "broker": own}))
            commands[name] = ("agent", str(path))
            self.start(name, folder / log, *commands[name])
        return commands

    def kill(self, name: str) -> None:
        self.running[name].send_signal(signal.SIGKILL)
        self.running[name].wait()

    def end(self) -> None:
        """Kill all running processes."""
        for name in self.running:
            self.kill(name)


def read_events(home: Path, run: str = "digits") -> list[AnyEvent]:
    """Return the events of a job, or none before it is queued."""
    if not (home / "fedquilt.db").exists():
        return []
    with Store(home) as store:
        return [event for _, _, event in store.read_events(store.find_job(run).id)] if store.readable_jobs() else []


def read_updates(home: Path, round: int) -> int:
    return sum(isinstance(event, UpdateAccepted) and event.round == round for event in read_events(home))


def undisturbed_state_hashes(plan: fleet.FleetPlan) -> list[Any]:
    """Return the state of each round of the job on virtual time, without kills."""
    run, _ = fleet.run_fleet_virtually(plan)
    with Store(plan.home) as store:
        return [event.state for _, _, event in store.read_events(run) if isinstance(event, RoundCommitted)]


def make_job(folder: Path, hidden: int = 64, **cohort: Any) -> fleet.FleetPlan:
    """A job and its bundle; more than 900 `hidden` neurons make a model of several chunks. `cohort`: of the job."""
    network = {**NETWORK, "hidden": [hidden]}
    first = tensors.encode_tensors(numpy_engine.init_tensors(network, seed=0))
    job_bundle.write_bundle(folder / "job.bundle", {"network": network, "flops": 150 * hidden}, {"model": first})
    cohort = {**TABLE["cohort"], "start_devices": 3, **cohort}
    (folder / "job.toml").write_text(toml.format_toml({**TABLE, "cohort": cohort}))
    return fleet.FleetPlan(settings.load_job(folder / "job.toml"), folder / "job.bundle", folder / "virtual")
