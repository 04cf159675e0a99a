"""Sites on virtual time: a coordinator, sites below it, and boards that train, all in this process."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import virtual_site
from virtual_site import VirtualSite

from fedquilt import wire
from fedquilt.arrays import tensors
from fedquilt.blobs.shared_store import SharedBlobStore
from fedquilt.coordinator import settings as jobs
from fedquilt.coordinator.background_worker import BackgroundWorker
from fedquilt.coordinator.delivery.executor import LinkExecutor
from fedquilt.coordinator.rounds.events import AnyEvent, RoundCommitted, TaskDeclined, UpdateAccepted
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.settings import CoordinatorLimits
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import SiteRight
from fedquilt.data import examples
from fedquilt.edge_agent import settings
from fedquilt.edge_agent.agent import Agent
from fedquilt.edge_agent.devices import create_device
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.edge_agent.task.protocol import WorkRequest
from fedquilt.edge_agent.task.worker import InlineWorker, VirtualWorker
from fedquilt.formats import job_bundle
from fedquilt.tools.lab import demo
from fedquilt.tools.simulation.agents import FleetPlan
from fedquilt.transport.link import Endpoint
from fedquilt.transport.memory_link import MemoryBroker, MemoryLink, run_on_virtual_time

Seat = tuple[MemoryLink, Endpoint]


class StalledWorker(InlineWorker):
    def start(self, order: WorkRequest, now_s: float) -> None:
        VirtualWorker.start(self, order, now_s)


@dataclass
class Federation:
    plan: FleetPlan
    stack: contextlib.ExitStack
    broker: MemoryBroker = field(default_factory=lambda: MemoryBroker())
    seats: list[Seat] = field(default_factory=list)
    sites: dict[str, VirtualSite] = field(default_factory=dict)
    facts: list[AnyEvent] = field(default_factory=list)
    states: list[bytes] = field(default_factory=list)
    answered: dict[int, list[str]] = field(default_factory=dict)  # round -> devices whose updates counted
    id: str = "job-1"
    below: dict[str, list[AnyEvent]] = field(default_factory=dict)  # site -> facts of its own coordinator
    limits: CoordinatorLimits = field(default_factory=CoordinatorLimits)
    stalled: Collection[str] = ()  # devices that never end a task

    def __post_init__(self) -> None:
        self.home = self.plan.home / "root"
        self._open()
        self.run = self.store.add_job(self.plan.job, self.plan.bundle, "fleet", id=self.id)
        self._serve()
        self._stores: dict[str, Store] = {}
        self._together = examples.SharedLoader()
        self._shared = SharedBlobStore(self.plan.get_agent_folder(self.run, ".shared"))
        self.tables = self.plan.make_agent_tables(self.run)

    def _open(self) -> None:
        self.store = self.stack.enter_context(Store(self.home, durable=False))
        assert self.store.acquire_lock()

    def _serve(self) -> None:
        link = self.broker.connect()
        executor = LinkExecutor(link, self.plan.fleet, self.store.blob_store, self.store.begin_epoch())
        worker = BackgroundWorker(virtual_site.LARGE_BYTES)
        self.server = Server(
            executor, self.store, self._observe, only=self.run, limits=self.limits, worker=worker, uses_wall_clock=True
        )
        self.seats.insert(0, (link, self.server))

    def copy(self) -> Path:
        return Path(shutil.copytree(self.home, self.plan.home / "copy"))

    def put_back(self, copy: Path) -> None:
        link, _ = self.seats.pop(0)
        self.broker.lose_client(link)
        self.store.close()
        shutil.rmtree(self.home)
        copy.rename(self.home)
        self._open()
        self._serve()

    def _observe(self, job: Any, event: AnyEvent) -> None:
        self.facts.append(event)
        if isinstance(event, UpdateAccepted):
            self.answered.setdefault(event.round, []).append(event.update.device)
        if isinstance(event, RoundCommitted):
            payload = self.store.blob_store.load(event.state.sha256)
            assert payload is not None
            self.states.append(payload)

    def boards(self, tables: Sequence[dict[str, Any]], fleet: str) -> None:
        for table in tables:
            options = settings.parse_settings({**table, "fleet": fleet})
            board = create_device(options.board)
            kind = StalledWorker if options.device in self.stalled else InlineWorker
            worker = kind(board, self._together.load_share)
            gone = wire.encode(wire.Presence(online=False, boot="board", seq=0))
            link = self.broker.connect((wire.Topics(fleet).device_topic(options.device, "up", "presence"), gone))
            agent = Agent(link, options, board, worker, "board", durable=False, shared=self._shared, clock=lambda: None)
            self.seats.append((link, agent))

    def site(self, name: str, tables: Sequence[dict[str, Any]]) -> None:
        store = self._stores[name] = self.stack.enter_context(Store(self.plan.home / name, durable=False))
        assert store.acquire_lock()
        self.below[name] = []
        self.limits.sites[name] = SiteRight(tuple(table["device"] for table in tables), len(tables))
        self._start(name)
        self.boards(tables, name)

    def _start(self, name: str) -> None:
        made = VirtualSite(
            self.broker, self._stores[name], self.plan.fleet, name, lambda job, event: self.below[name].append(event)
        )
        self.seats += made.list_endpoints()
        self.sites[name] = made

    def kill(self, name: str) -> None:
        links = [link for link, _ in self.sites[name].list_endpoints()]
        for link in links:
            self.broker.lose_client(link)
        self.seats = [(link, seat) for link, seat in self.seats if link not in links]
        self.sites[name].agent._lock.release()
        self._start(name)

    def cut(self, name: str) -> None:
        self.sites[name].up.disconnect()

    def join(self, name: str) -> None:
        up = self.sites[name].up
        (place,) = [at for at, (link, _) in enumerate(self.seats) if link is up.inner]
        self.seats[place] = (up.reconnect(), self.seats[place][1])

    def leaves(self, device: str) -> None:
        (link,) = [link for link, seat in self.seats if isinstance(seat, Agent) and seat.device == device]
        self.seats = [(other, seat) for other, seat in self.seats if other is not link]
        self.broker.lose_client(link)

    def play(self, until: Callable[[], bool] = lambda: False) -> str:
        run_on_virtual_time(self.broker, lambda: self.seats, lambda: self.server.finished or until())
        return self.store.stored_status(self.run)


@contextlib.contextmanager
def federation(
    plan: FleetPlan,
    split: Sequence[int] = (),
    id: str = "job-1",
    limits: CoordinatorLimits | None = None,
    stalled: Collection[str] = (),
) -> Iterator[Federation]:
    with contextlib.ExitStack() as stack:
        made = Federation(plan, stack, id=id, limits=limits or CoordinatorLimits(), stalled=stalled)
        begin = 0
        for number, count in enumerate(split):
            made.site(f"site-{number}", made.tables[begin : begin + count])
            begin += count
        made.boards(made.tables[begin:], plan.fleet)
        yield made


# -- the demo's digits ----------------------------------------------------------------------------

NETWORK = {"name": "mlp", "inputs": 64, "hidden": [8], "classes": 10}
METHODS = {
    "fedavg": {},
    "fedprox": {"mu": 0.1},
    "fedopt": {"server": "adam"},
    "fednova": {"epochs": 2, "momentum": 0.9},
    "scaffold": {},
    "fedbn": {},
}


def plan(
    folder: Path, method: str = "fedavg", devices: int = 6, rounds: int = 3, flops: float = 1000, **table: Any
) -> FleetPlan:
    first = tensors.encode_tensors(numpy_engine.init_tensors(NETWORK, seed=0))
    job_bundle.write_bundle(folder / "bundle", {"network": NETWORK, "flops": flops}, {"model": first})
    job = jobs.parse_job(
        {
            "name": "sited",
            "method": method,
            "rounds": rounds,
            "engine": "numpy",
            "params": {"lr": 0.2, "batch": 16, "schedule": {"name": "cosine", "least": 0.1}, **METHODS.get(method, {})},
            "data": {"path": str(Path(demo.__file__).parent / "digits.npz"), "partition": "dirichlet", "alpha": 1.0},
            "fleet": {"devices": devices, "boards": ["jetson-nano", "jetson-tx2"], "budgets": ["512MB"]},
            **table,
        }
    )
    return FleetPlan(job, folder / "bundle", folder / "home")


def list_states(folder: Path, method: str, split: tuple[int, ...], waits: int, **table: Any) -> list[bytes]:
    table = {"cohort": {"start_devices": waits}, **table}
    with federation(plan(folder, method, **table), split) as made:
        assert made.play() == "done", made.facts[-1]
        assert not [event for event in made.facts if isinstance(event, TaskDeclined)]
        return made.states
