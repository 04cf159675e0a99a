"""Federation whose coordinator and agents can be killed together and started again on the same folders."""

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
    """Exception that ends all processes at any point."""


class Federation:
    """Coordinator and devices in one folder: `coordinator/`, `bundle/`, and a folder for each device."""

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

    def create(self) -> Federation:
        """Write the bundle and the devices' data, and queue the job."""
        initial_model = tensors.encode_tensors(numpy_engine.init_tensors(NETWORK, seed=0))
        job_bundle.write_bundle(self.folder / "bundle", {"network": NETWORK, "flops": 96}, {"model": initial_model})
        data = np.random.default_rng(0)
        for index in range(DEVICES):
            arrays = {"x": data.random((12, 4, 4), np.float32), "y": data.integers(0, 3, 12)}
            np.savez(self.folder / f"data-{index}.npz", **arrays)  # type: ignore[arg-type]
        with Store(self.folder / "coordinator") as store:
            store.add_job(settings.parse_job(self._job), self.folder / "bundle")
        return self

    def run(self, kill: Callable[[AnyEvent], bool] = lambda fact: False, *, limit_s: float = LIMIT_S) -> None:
        """Run until the job has ended, or until `kill` returns true for an event.

        Raises:
            TimeoutError: If the job does not end within `limit_s` of virtual time.
        """
        broker = MemoryBroker(max_payload=4096)

        def observe(job: Any, event: AnyEvent) -> None:
            if kill(event):
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
                device_link, board = broker.connect(), make_board("jetson-nano")
                options = AgentSettings(
                    device=f"dev-{index}",
                    fleet="sim",
                    home=str(self.folder / f"dev-{index}"),
                    data={"path": str(self.folder / f"data-{index}.npz"), "held": 0.25},
                )
                sides.append((device_link, Agent(device_link, options, board, InlineWorker(board))))
            run_on_virtual_time(broker, lambda: sides, lambda: server.finished, limit_s=limit_s)

    @property
    def job(self) -> str:
        """Id of the only run."""
        with Store(self.folder / "coordinator") as store:
            return store.all_jobs()[0].id

    def facts(self) -> list[AnyEvent]:
        """Return the events of the run."""
        with Store(self.folder / "coordinator") as store:
            return [event for _, _, event in store.read_events(self.job)]

    def states(self) -> list[str]:
        """Return the sha256 of the initial state and of each committed state."""
        return [event.state.sha256 for event in self.facts() if isinstance(event, JobStarted | RoundCommitted)]

    def notes(self) -> list[str]:
        """Return the notes of all accepted updates."""
        return [event.update.note for event in self.facts() if isinstance(event, UpdateAccepted) and event.update.note]


def is_commit_of(round: int) -> Callable[[AnyEvent], bool]:
    """Return a predicate for the commit of this round."""
    return lambda event: isinstance(event, RoundCommitted) and event.round == round


def is_nth_update(round: int, count: int) -> Callable[[AnyEvent], bool]:
    """Return a predicate for the `count`th accepted update of this round."""
    events: list[AnyEvent] = []

    def matches(event: AnyEvent) -> bool:
        events.extend([event] if isinstance(event, UpdateAccepted) and event.round == round else [])
        return len(events) == count

    return matches
