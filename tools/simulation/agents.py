"""Simulated fleets of real agents: N processes on a broker, or one process on virtual time.

Only the board is simulated (time and energy follow its profile) and, on virtual time, the link.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from fedquilt import methods, plugins
from fedquilt.blobs.shared_store import SharedBlobStore
from fedquilt.coordinator.delivery.executor import LinkExecutor
from fedquilt.coordinator.jobs.job import RunningJob
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.settings import (
    JobSettings,
    create_initial_state,
    require_matching_bundle,
    require_no_simulated_faults,
)
from fedquilt.coordinator.storage.store import Origin, Store
from fedquilt.coordinator.views.run_summary import summarise_events
from fedquilt.coordinator.views.terminal import VIRTUAL_FORMAT, Console, run_coordinator
from fedquilt.core import Bundle, Device, Examples, JobError
from fedquilt.data import compatibility, examples
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent import engines, settings
from fedquilt.edge_agent.agent import Agent
from fedquilt.edge_agent.devices import create_device as make_board
from fedquilt.edge_agent.task.worker import InlineWorker
from fedquilt.formats import toml, training_choices
from fedquilt.formats.job_bundle import load_bundle
from fedquilt.models.networks import registry
from fedquilt.tools.broker import EmbeddedBroker
from fedquilt.tools.simulation import DeviceData
from fedquilt.transport.exclusive_link import make_coordinator_client_id, make_coordinator_link
from fedquilt.transport.link import Endpoint
from fedquilt.transport.memory_link import MemoryBroker, MemoryLink, run_on_virtual_time
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.link import MqttLink

MAX_IDLE_S: Final = 3600.0  # virtual time without activity after which a run fails
STOP_TIMEOUT_S: Final = 10.0  # after SIGTERM
AGENT_PROGRAM: Final = (
    "import sys; from fedquilt.edge_agent.task.process import exit_with_parent; exit_with_parent(int(sys.argv[1])); "
    "from fedquilt.cli import main; sys.exit(main(sys.argv[2:]))"
)


@dataclass(frozen=True)
class FleetPlan:
    job: JobSettings
    bundle: Path
    home: Path
    devices: int | None = None  # default: the job's fleet.devices
    fleet: str = "fleet"

    @property
    def size(self) -> int:
        return self.devices or self.job.fleet.devices

    def get_agent_folder(self, run: str, device: str) -> Path:
        """Return the home folder of a device's agent in a run.

        Each run has its own folders, so that stored state of another run cannot affect measurements. With an empty
        `run`, for agents of a coordinator elsewhere, runs share the folder.
        """
        return (self.home / "agents" / run / device).resolve()

    def make_agent_tables(self, run: str = "") -> list[dict[str, Any]]:
        """Return the agent.toml tables of all devices. Boards and budgets are assigned in rotation."""
        if not self.job.data:
            raise JobError("the job has no [data] table: add one with the data of the simulated devices")
        fleet, allowed_plugins = self.job.fleet, self._list_allowed_plugins()
        agents = []
        for index in range(self.size):
            board = fleet.boards[index % len(fleet.boards)]
            device = f"{board}-{index:02d}"
            agents.append(
                {
                    "device": device,
                    "fleet": self.fleet,
                    "home": str(self.get_agent_folder(run, device)),
                    "board": board,
                    "budget": fleet.budgets[index % len(fleet.budgets)],
                    "labels": list(fleet.device_labels(index)),
                    "governor": {"policy": fleet.policy},
                    "data": {"seed": self.job.seed, **self.job.data, "share": index, "shares": self.size},
                    **({"plugins": allowed_plugins} if allowed_plugins else {}),
                }
            )
        return agents

    def _list_allowed_plugins(self) -> list[str]:
        allowed = plugins.allowlist_entries("method", self.job.method, methods.builtin_names())
        for table in (self.job.model, *(donor.get("network", {}) for donor in self.job.donors)):
            for name in registry.list_plugin_networks(table):
                allowed += plugins.allowlist_entries("network", name, registry.BUILTIN_NETWORKS)
        if self.job.engine is not None:
            allowed += plugins.allowlist_entries("engine", self.job.engine, tuple(engines.NEEDS))
        choices = training_choices.select_choices(methods.load(self.job.method).params, self.job.params)
        for kind, name in training_choices.list_plugins(choices):
            allowed += plugins.allowlist_entries(kind, name, training_choices.BUILT_IN_CHOICES[kind])
        return sorted(set(allowed))

    def load_devices(self) -> tuple[list[DeviceData], Examples]:
        tables = self.make_agent_tables()
        shares = examples.load_all_shares(msgspec.convert(tables[0]["data"], DataSpec))
        devices = [DeviceData(table["device"], *share) for table, share in zip(tables, shares, strict=True)]
        return devices, examples.load_split(msgspec.convert({**self.job.data, "split": "test"}, DataSpec))

    def validate_and_load_bundle(self, create_board: Callable[[str], Device] = make_board) -> Bundle:
        """Return the bundle. Raise a FedquiltError if fleet, bundle and data do not fit the job."""
        self.validate_fleet(create_board)
        bundle = load_bundle(self.bundle)
        require_matching_bundle(self.job, bundle)
        agents = self.make_agent_tables()
        spec = DataSpec.parse(agents[0]["data"])
        examples.require_nonempty_shares(compatibility.open_compatible_data(bundle.meta, spec), spec)
        return bundle

    def validate_fleet(self, create_board: Callable[[str], Device] = make_board) -> None:
        """Raise JobError or ModelError if a key of [fleet] is wrong. Needs no bundle."""
        self.job.fleet.require_enough_devices(self.job.cohort, self.size)
        with toml.prefix_errors("[fleet]"):
            for budget in dict.fromkeys(self.job.fleet.budgets):
                settings.parse_size(budget)
            for board in dict.fromkeys(self.job.fleet.boards):
                create_board(board)

    def queue_or_resume(
        self, store: Store, create_board: Callable[[str], Device] = make_board, origin: Origin = "fleet"
    ) -> str:
        """Queue the job, or resume its unfinished run, and return the id of the run.

        The first round waits for all selected devices of the fleet.
        """
        bundle = self.validate_and_load_bundle(create_board)
        start_devices = self.job.fleet.count_selected_devices(self.job.cohort, self.size)
        cohort = msgspec.structs.replace(self.job.cohort, start_devices=start_devices)
        job, bundle_folder = msgspec.structs.replace(self.job, cohort=cohort), self.bundle.resolve()
        run = store.find_unfinished(job, bundle_folder, origin)
        if run is None:
            create_initial_state(job, bundle)
            return store.add_job(job, bundle_folder, origin)
        store.set_status(run, "running")
        return run

    def describe_start(self, store: Store, run: str) -> str:
        """Return whether a run begins or continues, as a line."""
        row = store.find_job(run)
        state = summarise_events(row.job, store.read_events(run)).state
        if state.phase != "new":
            return f"continues {run} at round {state.completed_rounds + 1}"
        others = [
            other.id
            for other in store.readable_jobs()
            if (other.bundle, other.origin) == (row.bundle, row.origin) and other.status not in ("done", "failed")
        ]
        others.remove(run)
        file = self.bundle.with_suffix(".toml").name
        return f"{run}: {f'{file} or its data changed: a new run, ' if others else ''}creating {self.size} devices"


def run_fleet_on_broker(plan: FleetPlan, broker: Mapping[str, Any] | None, *, verbose: bool = False) -> tuple[str, str]:
    """Run agents as processes and a coordinator here. Return the run id and its final status."""
    require_no_simulated_faults(plan.job)
    if plan.job.fleet.links:
        raise JobError("[fleet] links need a simulated broker: remove them, or use --link memory")
    if broker is not None and broker.get("cert"):
        raise JobError(
            "simulated devices cannot share the certificate of one device: remove --cert and --key and use a broker "
            "without certificates, or start `fedquilt agent` for each device"
        )
    with contextlib.ExitStack() as stack:
        if broker is None:
            broker = {"url": stack.enter_context(EmbeddedBroker()).url}
        store = stack.enter_context(Store(plan.home))
        if not store.acquire_lock():
            raise JobError(f"another coordinator serves {plan.home.resolve()} already: use another --home")
        run = plan.queue_or_resume(store)
        console = Console(verbose=verbose, start_hint=f"the boards' logs: {plan.get_agent_folder(run, '*')}/agent.log")
        console.report(plan.describe_start(store, run))
        agents = stack.enter_context(start_agents(plan.make_agent_tables(run), broker))
        mqtt_link = MqttLink(Broker.from_url(**broker), make_coordinator_client_id(plan.fleet))
        mqtt_link.wait_until_connected(timeout_s=10.0)
        link = make_coordinator_link(mqtt_link, plan.fleet, plan.home)
        link.require_exclusive_use()
        run_coordinator(
            store, link, plan.fleet, console, only=run, watch=_make_agent_watcher(plan, run, agents, console.report)
        )
        status = store.stored_status(run)
    if status == "done":
        _delete_run_files(plan, run)
    return run, status


def run_fleet_virtually(
    plan: FleetPlan, *, verbose: bool = False, create_board: Callable[[str], Device] = make_board
) -> tuple[str, str]:
    """Run all agents and the coordinator on virtual time. Return the run id and the final status.

    Nothing is flushed to disk: files survive a killed process, but possibly not a power failure.
    """
    require_no_simulated_faults(plan.job)
    broker = MemoryBroker()
    with Store(plan.home, durable=False) as store:
        if not store.acquire_lock():
            raise JobError(f"another coordinator serves {plan.home.resolve()} already: use another --home")
        run = plan.queue_or_resume(store, create_board, "virtual")
        console = Console(verbose=verbose, clock=lambda: broker.now_s, stamp=VIRTUAL_FORMAT.format)
        console.report(plan.describe_start(store, run))
        link = broker.connect()
        server = Server(
            LinkExecutor(link, plan.fleet, store.blob_store, store.begin_epoch()), store, console.observe, only=run
        )
        sides: list[tuple[MemoryLink, Endpoint]] = [(link, server)]
        shared_loader = examples.SharedLoader()
        agents: list[Agent] = []
        busy_s = 0.0
        count_task = _make_task_counter(console, run, lambda: server.find_job(run))
        shared_blobs = SharedBlobStore(plan.get_agent_folder(run, ".shared"))
        with plugins.search_current_folder():  # simulated devices may use the plug-ins there
            for index, table in enumerate(plan.make_agent_tables(run)):
                options = settings.parse_settings(table)
                board = create_board(options.board)
                link_of_device = broker.connect(pace=plan.job.fleet.device_link(index))
                worker = InlineWorker(board, shared_loader.load_share, count_task)
                agents.append(
                    Agent(
                        link_of_device, options, board, worker, durable=False, shared=shared_blobs, clock=lambda: None
                    )
                )
                sides.append((link_of_device, agents[-1]))
                console.show_status(lambda: f"{len(agents)} of {plan.size} devices created")
        shared_blobs.remove_unclaimed()

        def watch() -> None:
            nonlocal busy_s
            console.refresh()
            job = server.find_job(run)
            if job is None or job.job_state.pending_devices or job.job_state.phase not in ("new", "selecting", "open"):
                busy_s = broker.now_s
            elif broker.now_s > busy_s + MAX_IDLE_S:  # no device joins later on virtual time
                raise JobError(
                    f"{run} lacks devices in round {job.job_state.round + 1}, and no other device will join: "
                    "see `fedquilt why`, and correct [cohort] (min_devices, min_battery, max_temperature_c) or [fleet]"
                )

        with _suppress_agent_logs(verbose), contextlib.closing(console):
            run_on_virtual_time(broker, lambda: sides, lambda: server.finished, on_step=watch)
        status = store.stored_status(run)
    if status == "done":
        _delete_run_files(plan, run)
    return run, status


def _make_task_counter(console: Console, run: str, find_job: Callable[[], RunningJob | None]) -> Callable[[], None]:
    """Return a function that reports progress. Tasks are computed before virtual time reaches their updates."""
    computed = collections.Counter[int]()  # by round

    def count_task() -> None:
        job = find_job()
        if job is None:
            return
        state = job.job_state
        computed[state.round] += 1
        count, rounds = computed[state.round], state.constants.rounds
        cohort = max(len(state.pending_devices) + len(state.accepted_updates), count)
        line = f"{run}: round {min(state.round + 1, rounds)} of {rounds}, {count} of {cohort} tasks are computed"
        console.report_progress(line, min(state.completed_rounds * cohort + count, rounds * cohort), rounds * cohort)

    return count_task


@contextlib.contextmanager
def _suppress_agent_logs(verbose: bool) -> Iterator[None]:
    log = logging.getLogger("fedquilt.agent")
    old_level = log.level
    if not verbose:
        log.setLevel(max(log.getEffectiveLevel(), logging.ERROR))
    try:
        yield
    finally:
        log.setLevel(old_level)


def _delete_run_files(plan: FleetPlan, run: str) -> None:
    for table in plan.make_agent_tables(run):
        for name in ("blobs", "task", "outbox", "scratch"):
            if (folder := Path(table["home"]) / name).is_dir():
                shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(plan.get_agent_folder(run, ".shared"), ignore_errors=True)


@contextlib.contextmanager
def start_agents(
    agents: Sequence[Mapping[str, Any]], broker: Mapping[str, Any]
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Write each agent.toml, and run the agents until the context ends.

    Each agent is a process in its own session, ends with the calling thread and ignores Ctrl-C in the terminal.
    """
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for table in agents:
            home = Path(table["home"])
            home.mkdir(parents=True, exist_ok=True)
            (home / "agent.toml").write_text(toml.format_toml({**table, "broker": dict(broker)}))
            with (home / "agent.log").open("ab") as log:
                started[table["device"]] = subprocess.Popen(
                    [sys.executable, "-c", AGENT_PROGRAM, str(os.getpid()), "agent", str(home / "agent.toml")],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        yield started
    finally:
        for process in started.values():
            process.terminate()
        for process in started.values():
            try:
                process.wait(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _make_agent_watcher(
    plan: FleetPlan, run: str, agents: Mapping[str, subprocess.Popen[bytes]], report: Callable[[str], None]
) -> Callable[[], None]:
    ended_devices: set[str] = set()  # whose end is reported

    def read_last_line(device: str) -> str:
        log = plan.get_agent_folder(run, device) / "agent.log"
        return f"{(log.read_text(errors='replace').strip().splitlines() or ['(nothing)'])[-1]} ({log})"

    def watch() -> None:
        for device, process in sorted(agents.items()):
            if device not in ended_devices and (code := process.poll()) is not None:
                ended_devices.add(device)
                end_description = (
                    f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                )
                remaining = len(agents) - len(ended_devices)
                last_line = read_last_line(device)
                report(f"the agent of {device} {end_description}; last line: {last_line}; {remaining} agents are left")
        if len(ended_devices) == len(agents):
            first_device = sorted(agents)[0]
            raise JobError(f"every agent has ended (last line of {first_device}: {read_last_line(first_device)})")

    return watch
