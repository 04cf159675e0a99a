"""A federation whose sides can be killed together, so that a test may do something to their homes, and begin again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.delivery.executor import LinkExecutor
from fedquilt.coordinator.rounds.events import AnyEvent, JobStarted, RoundCommitted, UpdateAccepted
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.storage.store import Store
from fedquilt.edge_agent.agent import Agent
from fedquilt.edge_agent.devices import create_device as make_board
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.edge_agent.task.worker import InlineWorker
from fedquilt.formats import job_bundle
from fedquilt.transport.link import Endpoint
from fedquilt.transport.memory_link import MemoryBroker, MemoryLink, run_on_virtual_time

NETWORK = {"name": "mlp", "inputs": 16, "hidden": [], "classes": 3}
DEVICES = 3
LIMIT_S = 20_000.0  # virtual


class Killed(Exception):
    """Everything ends, in the middle of what it did."""


class Federation:
    """A coordinator and its devices in one folder: `coordinator/`, `bundle/`, and a folder for each device."""

    def __init__(
        self, folder: Path, method: str = "scaffold", rounds: int = 6, codec: str = "raw", **tables: dict[str, Any]
    ) -> None:
        self.folder = folder
        self._job = {
            "name": "sim",
            "method": method,
            "rounds": rounds,
            "engine": "numpy",
            "params": {"lr": 0.1, "batch": 4},
            "cohort": {"size": DEVICES, "min_devices": DEVICES, "deadline_s": 600.0},
            "check": {"every": 2},
            "wire": {"codec": codec},
            **tables,
        }

    def make(self) -> Federation:
        """Write the bundle and the devices' data, and queue the job."""
        first = tensors.encode_tensors(numpy_engine.init_tensors(NETWORK, seed=0))
        job_bundle.write_bundle(self.folder / "bundle", {"network": NETWORK, "flops": 96}, {"model": first})
        data = np.random.default_rng(0)
        for index in range(DEVICES):
            arrays = {"x": data.random((12, 4, 4), np.float32), "y": data.integers(0, 3, 12)}
            np.savez(self.folder / f"data-{index}.npz", **arrays)  # type: ignore[arg-type]
        with Store(self.folder / "coordinator") as store:
            store.add_job(settings.parse_job(self._job), self.folder / "bundle")
        return self

    def run(self, kill: Callable[[AnyEvent], bool] = lambda fact: False, *, limit_s: float = LIMIT_S) -> None:
        """Go on until the job has ended, or a fact is written at which everything is killed.

        Raises:
            TimeoutError: the job does not end.
        """
        broker = MemoryBroker(max_payload=4096)

        def observe(job: Any, fact: AnyEvent) -> None:
            if kill(fact):
                raise Killed

        with contextlib.suppress(Killed), Store(self.folder / "coordinator") as store:
            assert store.acquire_lock()
            link = broker.connect()
            row = store.find_job(self.job)
            server = Server(
                LinkExecutor(link, "sim", store.blob_store, store.begin_epoch()), store, observe, only=row.id
            )
            sides: list[tuple[MemoryLink, Endpoint]] = [(link, server)]
            for index in range(DEVICES):
                own, board = broker.connect(), make_board("jetson-nano")
                options = AgentSettings(
                    device=f"dev-{index}",
                    fleet="sim",
                    home=str(self.folder / f"dev-{index}"),
                    data={"path": str(self.folder / f"data-{index}.npz"), "held": 0.25},
                )
                sides.append((own, Agent(own, options, board, InlineWorker(board))))
            run_on_virtual_time(broker, lambda: sides, lambda: server.finished, limit_s=limit_s)

    @property
    def job(self) -> str:
        """Id of the only run here."""
        with Store(self.folder / "coordinator") as store:
            return store.all_jobs()[0].id

    def facts(self) -> list[AnyEvent]:
        """The run's facts so far."""
        with Store(self.folder / "coordinator") as store:
            return [fact for _, _, fact in store.read_events(self.job)]

    def states(self) -> list[str]:
        """Hash (sha256) of every state so far."""
        return [fact.state.sha256 for fact in self.facts() if isinstance(fact, JobStarted | RoundCommitted)]

    def notes(self) -> list[str]:
        """What devices have said of their updates."""
        return [fact.update.note for fact in self.facts() if isinstance(fact, UpdateAccepted) and fact.update.note]


def committed(round: int) -> Callable[[AnyEvent], bool]:
    """Whether a fact is the end of this round."""
    return lambda fact: isinstance(fact, RoundCommitted) and fact.round == round


def answered(round: int, count: int) -> Callable[[AnyEvent], bool]:
    """Whether a fact is the `count`th answer of this round."""
    found: list[AnyEvent] = []

    def told(fact: AnyEvent) -> bool:
        found.extend([fact] if isinstance(fact, UpdateAccepted) and fact.round == round else [])
        return len(found) == count

    return told
