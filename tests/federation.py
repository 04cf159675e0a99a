"""Three agents' processes that are kept for many jobs, and a coordinator that can be ended between two rounds.

The agents are the ordinary user's, as on a board. Jobs are small: starting a task's process takes longer than its work.
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
LIMIT_S = 240.0  # of a job; nothing waits so long unless something hangs
TRAINING = {"epochs": 1, "batch": 8, "lr": 0.1}
SEARCH = {"expansions": 4, "k": 2, "depth": 4, "subrounds": 1, "samples": 16, "fit_samples": 24, "finalists": 2}
PICTURES = {"channels": 1, "size": 8, "mean": [0.5], "std": [0.5]}
NETWORKS: dict[str, dict[str, Any]] = {
    "perceptron": {"name": "mlp", "inputs": 64, "hidden": [12, 8], "classes": 10},
    "batch-norm": {"name": "residual", "channels": 1, "classes": 10, "width": 4, "input": PICTURES},  # int64 counters
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
        "input": PICTURES,
    },
}
DONORS = "donors"  # what a method has that trains no network
FLEET = {"devices": DEVICES, "boards": ["jetson-agx-orin"], "budgets": ["1GB", "4GB", "8GB"]}


def stitches(method: str) -> bool:
    """Whether it puts donors' blocks together, and trains no network."""
    return "torch" not in methods.load(method).engines


def networks_of(method: str, wanted: Sequence[str] = tuple(NETWORKS)) -> tuple[str, ...]:
    """On which networks a method is played."""
    return (DONORS,) if stitches(method) else tuple(wanted)


def in_order(names: Sequence[str]) -> list[str]:
    """Methods by their engine: agents start another process for a task of another engine than the last one's."""
    return sorted(names, key=lambda name: (stitches(name), name))


# -- jobs -----------------------------------------------------------------------------------------


def digits(path: Path) -> Path:
    """A few of the demo's digits, for training and for a test."""
    whole, found = np.load(Path(demo.__file__).parent / "digits.npz"), {}
    for split, count in (("train", 100), ("test", 20)):
        found |= {f"{kind}_{split}": whole[f"{kind}_{split}"][:count] for kind in ("x", "y")}
    np.savez(path, **found)
    path.chmod(0o644)
    return path


def bundle_of(network: str, folder: Path) -> Path:
    """What `fedquilt prepare` makes of a network, as if its weights were a file's; the demo's for donors."""
    if network == DONORS:
        return Path(demo.__file__).parent / "bundle"
    if not (folder / "bundle.json").exists():
        table = dict(NETWORKS[network])
        job = {"input": table.pop("input", {}), "model": table}
        made = prepare.prepare_bundle({key: value for key, value in job.items() if value}, folder)
        contents = {name: tensors.encode_tensors(made.load(name)) for name in made.files}
        job_bundle.write_bundle(
            folder, {**made.meta, "pretrained": True}, contents
        )  # some methods hold still what is not
    return folder


def job_of(method: str, network: str, data: Path) -> JobSettings:
    """Two rounds of all devices, an evaluation before each and one after the last."""
    known = {field.name for field in fields(methods.load(method).params)}
    wanted = SEARCH if stitches(method) else TRAINING
    return settings.parse_job(
        {
            "name": f"{method.replace('_', '-')}-{network}",
            "method": method,
            "rounds": ROUNDS,
            "seed": 3,
            "engine": "onnx" if stitches(method) else "torch",
            "params": {key: value for key, value in wanted.items() if key in known},
            "cohort": {"deadline_s": LIMIT_S, "min_devices": DEVICES, "attempts": 1},
            "check": {"every": 0 if methods.load(method).check is None else 1},
            "fleet": FLEET,
            "data": {"path": str(data), "partition": "dirichlet", "alpha": 2.0, "min_size": 8},
        }
    )


# -- agents ---------------------------------------------------------------------------------------


class Agents:
    """Agents' processes, one for each device of `FLEET`.

    Args:
        user: who runs them.
        boards: their settings, without the broker and the home.
    """

    def __init__(self, user: User, broker: str, boards: Sequence[Mapping[str, Any]]) -> None:
        self._user = user
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.log = user.folder / "agents.log"
        for table in boards:
            name = str(table["device"])
            told = {**table, "home": str(user.home / name), "broker": {"url": broker}, "warm_s": 600.0}
            (user.folder / f"{name}.toml").write_text(toml.format_toml(told))
            self.start(name)

    @property
    def names(self) -> list[str]:
        return sorted(self._running)

    def start(self, name: str) -> None:
        """Start an agent that does not outlive this process."""
        command = (
            sys.executable,
            "-c",
            agents.RUN,
            str(os.getpid()),
            "agent",
            str(self._user.folder / f"{name}.toml"),
        )
        self._running[name] = self._user.start(*command, log=self.log)

    def kill(self, name: str) -> None:
        """SIGKILL: it says goodbye to nobody."""
        self._running[name].kill()
        self._running[name].wait()

    def require_alive(self) -> None:
        ended = [name for name, process in self._running.items() if process.poll() is not None]
        assert not ended, f"the agents of {', '.join(ended)} have ended: {self.log.read_text()[-3000:]}"


# -- coordinators ---------------------------------------------------------------------------------


class Killed(BaseException):
    """What ends a coordinator as SIGKILL does: in the middle of what it does, with no goodbye."""


@dataclass
class Federation:
    """A broker, agents, and coordinators that begin and end."""

    broker: str
    agents: Agents
    data: Path
    bundles: Path

    def plan(self, method: str, network: str, home: Path) -> simulation.agents.FleetPlan:
        return simulation.agents.FleetPlan(
            job_of(method, network, self.data), bundle_of(network, self.bundles / network), home
        )

    def coordinate(self, home: Path, run: str, observe: Callable[[AnyEvent], None] = lambda fact: None) -> None:
        """Be the coordinator of a home until a run has ended, or `observe` raises `Killed`."""
        link = MqttLink(Broker.from_url(self.broker), "fedquilt-coordinator-fleet")
        end_s = time.monotonic() + LIMIT_S

        def stop() -> bool:
            self.agents.require_alive()
            assert time.monotonic() < end_s, f"{run} has not ended within {LIMIT_S:g} s: {self.agents.log.read_text()}"
            return False

        def told(job: RunningJob, fact: AnyEvent) -> None:
            observe(fact)

        with Store(home) as store:
            assert store.acquire_lock()
            server = Server(LinkExecutor(link, "fleet", store.blob_store, store.begin_epoch()), store, told, run)
            try:
                links.run_endpoint(server, link, stop)
                server.shut_down()
            except Killed:
                link.close()  # the broker sees it go; nothing has been said

    def resumed(
        self, plan: simulation.agents.FleetPlan, observe: Callable[[AnyEvent], None] = lambda fact: None
    ) -> list[AnyEvent]:
        """The facts of a job whose coordinator ends whenever a round is committed, and another one goes on."""
        with Store(plan.home) as store:
            run = plan.queue_or_resume(store)

        def until_committed(fact: AnyEvent) -> None:
            observe(fact)
            if isinstance(fact, RoundCommitted):
                raise Killed

        found: list[AnyEvent] = []
        while not found or not isinstance(found[-1], JobEnded):
            self.coordinate(plan.home, run, until_committed)
            before, found = found, facts(plan.home, run)
            assert found[: len(before)] == before
            assert isinstance(found[-1], RoundCommitted | JobEnded), found[-1]
        return found


def facts(home: Path, run: str) -> list[AnyEvent]:
    with Store(home) as store:
        return [fact for _, _, fact in store.read_events(run)]


def undisturbed(plan: simulation.agents.FleetPlan, home: Path) -> list[AnyEvent]:
    """The facts of the same job on virtual time, in this process, with nothing that happens to it."""
    calm = simulation.agents.FleetPlan(plan.job, plan.bundle, home, plan.devices, plan.fleet)
    run, _ = simulation.agents.run_fleet_virtually(calm)
    return facts(home, run)


def states(found: Sequence[AnyEvent]) -> list[str]:
    """The content of every state that was committed, in order."""
    return [fact.state.sha256 for fact in found if isinstance(fact, RoundCommitted)]


def rounds_of(method: str) -> int:
    """How many rounds of all devices a job takes: as many as it asks for, unless the method is done after one."""
    return 1 if "rounds" in {field.name for field in fields(methods.load(method).params)} else ROUNDS


def require_whole(found: Sequence[AnyEvent], least: int = ROUNDS) -> None:
    """Check that a run has ended well, with every device in every round, and with so many rounds at least."""
    last = found[-1]
    assert isinstance(last, JobEnded), last
    assert last.status == "done", last
    rounds = [fact for fact in found if isinstance(fact, RoundCommitted)]
    worked = [fact for fact in rounds if not fact.is_evaluation_round]
    assert len(worked) >= least, [type(fact).__name__ for fact in found]
    for each in rounds:
        folded = {fact.update.device for fact in found if isinstance(fact, UpdateAccepted) and fact.round == each.round}
        assert len(folded) == DEVICES, f"round {each.round} has the updates of {sorted(folded)}"
