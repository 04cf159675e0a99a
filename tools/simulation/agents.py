"""Simulated fleets: the agents' own code N times, as processes on a broker or in one process on virtual time.

Only the board is simulated (time and energy follow its profile) and, on virtual time, the link.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from fedquilt import config, methods, plugins
from fedquilt.blobs.shared_store import Shared
from fedquilt.bundle import load
from fedquilt.coordinator.executors import OverLink
from fedquilt.coordinator.preflight import first_state, require_made_for
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.settings import Job, require_honest
from fedquilt.coordinator.store import Store
from fedquilt.coordinator.views.terminal import Console, run_coordinator
from fedquilt.core import Bundle, Device, Examples, JobError
from fedquilt.data import examples, fitting
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent import engines, settings
from fedquilt.edge_agent.agent import Agent
from fedquilt.edge_agent.devices import make as make_board
from fedquilt.edge_agent.task.worker import InlineWorker
from fedquilt.models.networks import registry
from fedquilt.tools.broker import EmbeddedBroker
from fedquilt.tools.simulation import Member, children
from fedquilt.transport.broker import Broker
from fedquilt.transport.link import Endpoint, MemoryBroker, MemoryLink, simulate
from fedquilt.transport.mqtt import MqttLink

WAITS_S: Final = 3600.0  # of virtual time for which nobody is at a run


@dataclass(frozen=True)
class Plan:
    """A job and the boards it runs on."""

    job: Job
    bundle: Path
    home: Path
    devices: int | None = None  # default: the job's fleet.devices
    fleet: str = "fleet"

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.devices or self.job.fleet.devices

    def folder(self, run: str, device: str) -> Path:
        """An agent's home: its own in each run, as what a board has kept of another would change what is measured.

        Without a run, which agents for a coordinator elsewhere know nothing of, it is kept from run to run.
        """
        return (self.home / "agents" / run / device).resolve()

    def agents(self, run: str = "") -> list[dict[str, Any]]:
        """Every agent's settings, as the tables of its agent.toml; boards and budgets are taken in turn.

        Raises:
            JobError: the job has no [data].
        """
        if not self.job.data:
            raise JobError("a simulated fleet needs the job's [data] table: what is shared out among its devices")
        spec, allowed = self.job.fleet, self._plugins()
        agents = []
        for index in range(self.size):
            board = spec.boards[index % len(spec.boards)]
            device = f"{board}-{index:02d}"
            agents.append(
                {
                    "device": device,
                    "fleet": self.fleet,
                    "home": str(self.folder(run, device)),
                    "board": board,
                    "budget": spec.budgets[index % len(spec.budgets)],
                    "labels": list(spec.labels_of(index)),
                    "governor": {"policy": spec.policy},
                    "data": {"seed": self.job.seed, **self.job.data, "share": index, "shares": self.size},
                    **({"plugins": allowed} if allowed else {}),
                }
            )
        return agents

    def _plugins(self) -> list[str]:
        """Packages that the job needs: simulated boards allow them, as this machine is theirs."""
        found = plugins.allowing("method", self.job.method, methods.names())
        for table in (self.job.model, *(donor.get("network", {}) for donor in self.job.donors)):
            for name in registry.outside(table):
                found += plugins.allowing("network", name, registry.OURS)
        if self.job.engine is not None:
            found += plugins.allowing("engine", self.job.engine, tuple(engines.NEEDS))
        return sorted(set(found))

    def members(self) -> tuple[list[Member], Examples]:
        """What each device has, and the test set that no device has.

        Raises:
            DataError: it cannot be read.
        """
        tables = self.agents()
        shares = examples.load_shares(msgspec.convert(tables[0]["data"], DataSpec))
        found = [Member(table["device"], *share) for table, share in zip(tables, shares, strict=True)]
        return found, examples.load_all(msgspec.convert({**self.job.data, "split": "test"}, DataSpec))

    def require(self, make: Callable[[str], Device] = make_board) -> Bundle:
        """Check everything about a simulated fleet that can be known before it runs; returns the job's bundle.

        Raises:
            JobError, ModelError: the bundle, or a key of [data] or [fleet] is wrong.
            DataError: there is no data, or none that can be read, or a device would have none, or the network cannot
                take them.
        """
        made = load(self.bundle)
        require_made_for(self.job, made)
        agents = self.agents()
        spec = DataSpec.parse(agents[0]["data"])
        examples.require_shares(
            fitting.require_fit(made.meta, spec), spec
        )  # else every board would find out for itself
        self.job.fleet.require(self.job.cohort, self.size)
        with config.naming("[fleet]"):
            for budget in dict.fromkeys(self.job.fleet.budgets):
                settings.size_bytes(budget)
            for board in dict.fromkeys(agent["board"] for agent in agents):
                make(board)
        return made

    def submit(self, store: Store, make: Callable[[str], Device] = make_board) -> str:
        """Queue the job, or take up its unfinished run; the first round waits for the whole fleet. The run's id.

        Raises:
            JobError, ModelError, DataError: as `require`, or the method cannot train the bundle's network.
        """
        made = self.require(make)
        there = self.job.fleet.selected(self.job.cohort, self.size)
        cohort = msgspec.structs.replace(self.job.cohort, start_devices=there)
        job, folder = msgspec.structs.replace(self.job, cohort=cohort), self.bundle.resolve()
        run = store.unfinished(job, folder, "fleet")
        if run is None:
            first_state(job, made)
            return store.add(job, folder, "fleet")
        store.set_status(run, "running")
        return run


def really(
    plan: Plan,
    broker: Mapping[str, Any] | None,
    *,
    agents_only: bool = False,
    wordy: bool = False,
    console: Console | None = None,
) -> tuple[str, str]:
    """Run agents as processes, with a coordinator here unless it runs elsewhere. Returns (run, its final status).

    Args:
        plan: of the fleet.
        broker: the [broker] table of an agent.toml; None starts an embedded one.
        agents_only: the coordinator runs elsewhere.
        wordy: print every fact.
        console: prints the run; None: a line for each round.

    Raises:
        JobError: every agent has ended; quotes the last words of one. Or there is a certificate for all of them, or the
            job has adversaries or simulated links.
    """
    require_honest(plan.job)
    if plan.job.fleet.links:
        raise JobError(
            "[fleet] links: a broker's clients have the links that they have; --link memory simulates others"
        )
    if broker is not None and broker.get("cert"):
        raise JobError(
            "simulated boards cannot share one certificate, which is one board's: leave --cert and --key out, with a "
            "broker that does not ask for them, or start `fedquilt agent` for each"
        )
    with contextlib.ExitStack() as stack:
        if broker is None:
            broker = {"url": stack.enter_context(EmbeddedBroker()).url}
        if agents_only:
            for agent in stack.enter_context(processes(plan.agents(), broker)).values():
                agent.wait()
            return "", "done"
        store = stack.enter_context(Store(plan.home))
        if not store.lock():
            raise JobError(f"another coordinator serves {plan.home.resolve()} already: give another --home")
        run = plan.submit(store)
        agents = stack.enter_context(processes(plan.agents(run), broker))
        link = MqttLink(Broker.parse(**broker), f"fedquilt-coordinator-{plan.fleet}")
        link.connect(timeout_s=10.0)
        console = console or Console(wordy=wordy, mend=f"the boards' logs: {plan.folder(run, '*')}/agent.log")
        run_coordinator(store, link, plan.fleet, console, only=run, watch=_Watch(plan, run, agents, console.say))
        ended = store.status(run)
    if ended == "done":
        _delete_run_files(plan, run)
    return run, ended


def virtually(
    plan: Plan,
    *,
    wordy: bool = False,
    make: Callable[[str], Device] = make_board,
    real_clock: Callable[[], float] = time.monotonic,
) -> tuple[str, str]:
    """Everything in this process on virtual time. Returns (run, how it ended).

    `make` makes a board by its name. How far the fleet is, is told every few seconds of `real_clock`. Nothing waits
    for the disk: what a killed process leaves is whole, what a power failure leaves need not be.

    Raises:
        JobError: the run waits for boards that will not come, or the job has adversaries.
    """
    require_honest(plan.job)
    broker = MemoryBroker(plan.job.seed)
    with Store(plan.home, durable=False) as store:
        if not store.lock():
            raise JobError(f"another coordinator serves {plan.home.resolve()} already: give another --home")
        run = plan.submit(store, make)
        console = Console(wordy=wordy, clock=lambda: broker.now_s, real_clock=real_clock)
        console.say(f"{run}: making {plan.size} boards")
        link = broker.connect()
        server = Server(OverLink(link, plan.fleet, store.depot, store.next_epoch()), store, console.observe, only=run)
        sides: list[tuple[MemoryLink, Endpoint]] = [(link, server)]
        together = examples.Together()
        agents: list[Agent] = []
        waiting = _Waiting(run)
        shared = Shared(plan.folder(run, ".shared"))
        with plugins.own_folder():  # the code there is these boards', too
            for index, table in enumerate(plan.agents(run)):
                options = settings.parse(table)
                board = make(options.board)
                own = broker.connect(pace=plan.job.fleet.link_of(index))
                worker = InlineWorker(board, together.load)
                agents.append(Agent(own, options, board, worker, durable=False, shared=shared, clock=lambda: None))
                sides.append((own, agents[-1]))
                console.status(lambda: f"{run}: {len(agents)} of {plan.size} boards are made")

        def watch() -> None:
            console.status(lambda: _how_far(run, server, agents))
            waiting.look(server, broker.now_s)

        with _quiet(wordy):
            simulate(broker, lambda: sides, lambda: server.finished, watch=watch)
        ended = store.status(run)
    if ended == "done":
        _delete_run_files(plan, run)
    return run, ended


@contextlib.contextmanager
def _quiet(wordy: bool) -> Iterator[None]:
    """Leave to the coordinator what boards say of their tasks: each also writes it into its log, a thousand of them."""
    log = logging.getLogger("fedquilt.agent")
    before = log.level
    if not wordy:
        log.setLevel(max(log.getEffectiveLevel(), logging.ERROR))
    try:
        yield
    finally:
        log.setLevel(before)


class _Waiting:
    """Ends a fleet on virtual time that waits for boards which will never come.

    Raises:
        JobError: nobody has been at the run for WAITS_S.
    """

    def __init__(self, run: str) -> None:
        self._run, self._busy_s = run, 0.0

    def look(self, server: Server, now_s: float) -> None:
        job = server.job(self._run)
        if job is None or job.rounds.asked or job.rounds.phase not in ("new", "selecting", "open"):
            self._busy_s = now_s
        elif now_s > self._busy_s + WAITS_S:
            raise JobError(
                f"{self._run} has waited for boards since its round {job.rounds.round}, and no others will come: "
                "see `fedquilt why`, and mend [cohort] (min_devices, min_battery, max_temperature_c) or [fleet]"
            )


def _how_far(run: str, server: Server, agents: Sequence[Agent]) -> str:
    """Where the running round stands, as its facts and its boards tell."""
    job = server.job(run)
    if job is None:
        return f"{run}: {len(agents)} boards are there"
    state = job.rounds
    asked = len(state.asked) + len(state.answered)
    at_work = sum(agent.duty.state.open is not None and agent.duty.state.open.working for agent in agents)
    return f"{run}: round {state.round}: {len(state.answered)} of {asked} answered, {at_work} at work"


def _delete_run_files(plan: Plan, run: str) -> None:
    """Delete the blobs and work folders of a run that is over. Logs and private state stay."""
    for table in plan.agents(run):
        for name in ("blobs", "task", "outbox", "scratch"):
            if (folder := Path(table["home"]) / name).is_dir():
                shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(plan.folder(run, ".shared"), ignore_errors=True)


# -- processes ------------------------------------------------------------------------------------


def processes(
    agents: Sequence[Mapping[str, Any]], broker: Mapping[str, Any]
) -> contextlib.AbstractContextManager[dict[str, subprocess.Popen[bytes]]]:
    """The fleet's agents by device, each with its agent.toml and its log; they are told to stop at the end."""
    wanted = {}
    for table in agents:
        home = Path(table["home"])
        home.mkdir(parents=True, exist_ok=True)
        (home / "agent.toml").write_text(config.text({**table, "broker": dict(broker)}))
        wanted[table["device"]] = children.Command(["agent", str(home / "agent.toml")], home / "agent.log")
    return children.running(wanted)


class _Watch:
    """Watches the agents' processes of a running fleet and reports those that end."""

    def __init__(
        self, plan: Plan, run: str, agents: Mapping[str, subprocess.Popen[bytes]], say: Callable[[str], None]
    ) -> None:
        self._plan, self._run, self._agents, self._say = plan, run, agents, say
        self._ended: set[str] = set()  # devices whose end has been told

    def __call__(self) -> None:
        """Tell each agent that has ended since the last call, and why.

        Raises:
            JobError: none is left, with the last words of one.
        """
        for device, process in sorted(self._agents.items()):
            if device not in self._ended and (code := process.poll()) is not None:
                self._ended.add(device)
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                words, log = self._last(device)
                left = len(self._agents) - len(self._ended)
                self._say(f"the agent of {device} {how}; it said: {words} ({log}); {left} agents go on")
        if len(self._ended) == len(self._agents):
            device = sorted(self._agents)[0]
            words, log = self._last(device)
            raise JobError(f"every agent has ended; {device} said: {words} ({log})")

    def _last(self, device: str) -> tuple[str, Path]:
        """The last line in an agent's log, and the log."""
        log = self._plan.folder(self._run, device) / "agent.log"
        return children.last_words(log), log
