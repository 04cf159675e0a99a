"""Three agent processes that are reused for many jobs, and a coordinator that can be killed between rounds.

The agents run as an unprivileged user, as on a board. Jobs are small, because the start of a task process takes longer
than its work.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from ordinary import User

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.delivery.executor import LinkExecutor
from fedquilt.coordinator.jobs.job import RunningJob
from fedquilt.coordinator.rounds.events import AnyEvent, JobEnded, RoundCommitted, UpdateAccepted
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.settings import JobSettings
from fedquilt.coordinator.storage.store import Store
from fedquilt.formats import job_bundle, toml
from fedquilt.tools import simulation
from fedquilt.tools.artefacts import prepare
from fedquilt.tools.lab import demo
from fedquilt.tools.simulation import agents
from fedquilt.transport import link as links
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.link import MqttLink

ROUNDS, DEVICES = 2, 3
LIMIT_S = 240.0  # of a job, reached only if a process hangs
TRAINING = {"epochs": 1, "batch": 8, "lr": 0.1}
SEARCH = {"expansions": 4, "k": 2, "depth": 4, "subrounds": 1, "samples": 16, "fit_samples": 24, "finalists": 2}
IMAGE_INPUT = {"channels": 1, "size": 8, "mean": [0.5], "std": [0.5]}
NETWORKS: dict[str, dict[str, Any]] = {
    "perceptron": {"name": "mlp", "inputs": 64, "hidden": [12, 8], "classes": 10},
    "batch-norm": {
        "name": "residual",
        "channels": 1,
        "classes": 10,
        "width": 4,
        "input": IMAGE_INPUT,
    },  # int64 counters
    "no-axes": {"name": "rezero", "inputs": 64, "classes": 10, "width": 8, "blocks": 2},  # parameters of shape ()
    "recurrent": {"name": "gru", "channels": 8, "steps": 8, "classes": 10, "width": 6},  # rows of pixels as steps
    "transformer": {
        "name": "vit",
        "channels": 1,
        "size": 8,
        "classes": 10,
        "width": 12,
        "depth": 1,
        "heads": 2,
        "input": IMAGE_INPUT,
    },
}
DONORS = "donors"  # in place of a network, for methods that train none
FLEET = {"devices": DEVICES, "boards": ["jetson-agx-orin"], "budgets": ["1GB", "4GB", "8GB"]}


def is_stitching(method: str) -> bool:
    """Return whether the method stitches donor blocks and trains no network."""
    return "torch" not in methods.load(method).engines


def list_networks(method: str, names: Sequence[str] = tuple(NETWORKS)) -> tuple[str, ...]:
    """Return the networks with which a method is tested."""
    return (DONORS,) if is_stitching(method) else tuple(names)


def sort_by_engine(names: Sequence[str]) -> list[str]:
    """Sort methods by engine, because an agent starts a new task process when the engine changes."""
    return sorted(names, key=lambda name: (is_stitching(name), name))


# -- jobs -----------------------------------------------------------------------------------------


def write_digits(path: Path) -> Path:
    """Write some of the demo's digits for training and test, and return the path."""
    digits, subset = np.load(Path(demo.__file__).parent / "digits.npz"), {}
    for split, count in (("train", 100), ("test", 20)):
        subset |= {f"{kind}_{split}": digits[f"{kind}_{split}"][:count] for kind in ("x", "y")}
    np.savez(path, **subset)
    path.chmod(0o644)
    return path


def prepare_bundle(network: str, folder: Path) -> Path:
    """Return the bundle folder of a network with weights marked as pretrained, or the demo's bundle for DONORS."""
    if network == DONORS:
        return Path(demo.__file__).parent / "bundle"
    if not (folder / "bundle.json").exists():
        table = dict(NETWORKS[network])
        job = {"input": table.pop("input", {}), "model": table}
        bundle = prepare.prepare_bundle({key: value for key, value in job.items() if value}, folder)
        contents = {name: tensors.encode_tensors(bundle.load(name)) for name in bundle.files}
        job_bundle.write_bundle(
            folder, {**bundle.meta, "pretrained": True}, contents
        )  # some methods freeze only pretrained weights
    return folder


def make_job(method: str, network: str, data: Path) -> JobSettings:
    """Return a job of ROUNDS rounds with all devices, and with evaluations if the method has any."""
    accepted_params = {field.name for field in fields(methods.load(method).params)}
    params = SEARCH if is_stitching(method) else TRAINING
    return settings.parse_job(
        {
            "name": f"{method.replace('_', '-')}-{network}",
            "method": method,
            "rounds": ROUNDS,
            "seed": 3,
            "engine": "onnx" if is_stitching(method) else "torch",
            "params": {key: value for key, value in params.items() if key in accepted_params},
            "cohort": {"deadline_s": LIMIT_S, "min_devices": DEVICES, "attempts": 1},
            "check": {"every": 0 if methods.load(method).check is None else 1},
            "fleet": FLEET,
            "data": {"path": str(data), "partition": "dirichlet", "alpha": 2.0, "min_size": 8},
        }
    )


# -- agents ---------------------------------------------------------------------------------------


class Agents:
    """Agent processes, one for each device of `FLEET`.

    Args:
        user: User that runs the processes.
        broker: URL of the broker.
        boards: Settings of the agents, without broker and home.
    """

    def __init__(self, user: User, broker: str, boards: Sequence[Mapping[str, Any]]) -> None:
        self._user = user
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.log = user.folder / "agents.log"
        for table in boards:
            name = str(table["device"])
            settings_table = {**table, "home": str(user.home / name), "broker": {"url": broker}, "warm_s": 600.0}
            (user.folder / f"{name}.toml").write_text(toml.format_toml(settings_table))
            self.start(name)

    @property
    def names(self) -> list[str]:
        return sorted(self._running)

    def start(self, name: str) -> None:
        """Start an agent that does not outlive this process."""
        command = (
            sys.executable,
            "-c",
            agents.AGENT_PROGRAM,
            str(os.getpid()),
            "agent",
            str(self._user.folder / f"{name}.toml"),
        )
        self._running[name] = self._user.start(*command, log=self.log)

    def kill(self, name: str) -> None:
        """Kill an agent with SIGKILL, and wait for its end."""
        self._running[name].kill()
        self._running[name].wait()

    def require_alive(self) -> None:
        ended_names = [name for name, process in self._running.items() if process.poll() is not None]
        assert not ended_names, f"the agents of {', '.join(ended_names)} have ended: {self.log.read_text()[-3000:]}"


# -- coordinators ---------------------------------------------------------------------------------


class Killed(BaseException):
    """Exception that ends a coordinator at any point, like SIGKILL."""


@dataclass
class Federation:
    """Broker, agents, and coordinators that are started and killed."""

    broker: str
    agents: Agents
    data: Path
    bundles: Path

    def plan(self, method: str, network: str, home: Path) -> simulation.agents.FleetPlan:
        return simulation.agents.FleetPlan(
            make_job(method, network, self.data), prepare_bundle(network, self.bundles / network), home
        )

    def coordinate(self, home: Path, run: str, observe: Callable[[AnyEvent], None] = lambda fact: None) -> None:
        """Run a coordinator until the run has ended or `observe` raises `Killed`."""
        link = MqttLink(Broker.from_url(self.broker), "fedquilt-coordinator-fleet")
        end_s = time.monotonic() + LIMIT_S

        def stop() -> bool:
            self.agents.require_alive()
            assert time.monotonic() < end_s, f"{run} has not ended within {LIMIT_S:g} s: {self.agents.log.read_text()}"
            return False

        def forward_event(job: RunningJob, event: AnyEvent) -> None:
            observe(event)

        with Store(home) as store:
            assert store.acquire_lock()
            server = Server(
                LinkExecutor(link, "fleet", store.blob_store, store.begin_epoch()), store, forward_event, run
            )
            try:
                links.run_endpoint(server, link, stop)
                server.shut_down()
            except Killed:
                link.close()  # without a last message

    def run_with_restarts(
        self, plan: simulation.agents.FleetPlan, observe: Callable[[AnyEvent], None] = lambda fact: None
    ) -> list[AnyEvent]:
        """Run a job, with a new coordinator after each committed round, and return the events."""
        with Store(plan.home) as store:
            run = plan.queue_or_resume(store)

        def until_committed(event: AnyEvent) -> None:
            observe(event)
            if isinstance(event, RoundCommitted):
                raise Killed

        events: list[AnyEvent] = []
        while not events or not isinstance(events[-1], JobEnded):
            self.coordinate(plan.home, run, until_committed)
            old_events, events = events, read_events(plan.home, run)
            assert events[: len(old_events)] == old_events
            assert isinstance(events[-1], RoundCommitted | JobEnded), events[-1]
        return events


def read_events(home: Path, run: str) -> list[AnyEvent]:
    with Store(home) as store:
        return [event for _, _, event in store.read_events(run)]


def run_virtually(plan: simulation.agents.FleetPlan, home: Path) -> list[AnyEvent]:
    """Return the events of the same job on virtual time in this process, without interruptions."""
    virtual_plan = simulation.agents.FleetPlan(plan.job, plan.bundle, home, plan.devices, plan.fleet)
    run, _ = simulation.agents.run_fleet_virtually(virtual_plan)
    return read_events(home, run)


def committed_hashes(events: Sequence[AnyEvent]) -> list[str]:
    """Return the sha256 of each committed state in order."""
    return [event.state.sha256 for event in events if isinstance(event, RoundCommitted)]


def count_rounds(method: str) -> int:
    """Return the number of rounds with all devices: ROUNDS, or 1 for methods with a parameter `rounds`."""
    return 1 if "rounds" in {field.name for field in fields(methods.load(method).params)} else ROUNDS


def require_complete_run(events: Sequence[AnyEvent], min_rounds: int = ROUNDS) -> None:
    """Check that a run is done, has at least `min_rounds` rounds, and has updates of all devices in each round."""
    last_event = events[-1]
    assert isinstance(last_event, JobEnded), last_event
    assert last_event.status == "done", last_event
    rounds = [event for event in events if isinstance(event, RoundCommitted)]
    work_rounds = [event for event in rounds if not event.is_evaluation_round]
    assert len(work_rounds) >= min_rounds, [type(event).__name__ for event in events]
    for committed in rounds:
        folded_devices = {
            event.update.device
            for event in events
            if isinstance(event, UpdateAccepted) and event.round == committed.round
        }
        assert len(folded_devices) == DEVICES, f"round {committed.round} has the updates of {sorted(folded_devices)}"
