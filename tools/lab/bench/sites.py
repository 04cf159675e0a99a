"""Benchmark of a coordinator above sites of many devices, on virtual time.

Devices are light (`protocol_devices`) and do not train. Sites are the coordinators and agents of `fedquilt serve
--site`, on a broker in memory. The coordinator above them is in a process of its own (`sites_root`), whose peak of
resident memory is measured. Its states are compared with those of the method's functions for all devices in the order
of their names, without a coordinator.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import psutil

from fedquilt import methods as known
from fedquilt import wire
from fedquilt.arrays import tensors
from fedquilt.coordinator import limits, settings
from fedquilt.coordinator.rounds.events import AnyEvent, RoundCommitted, UpdateAccepted
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.updates.job_validation import create_initial_state
from fedquilt.core import DeviceUpdate, DeviceView, LinkError, Method, Profile, Task
from fedquilt.edge_agent.engines.numpy import engine
from fedquilt.formats import job_bundle, toml
from fedquilt.tools.lab.bench import protocol_devices, sites_root, stitch_boards
from fedquilt.tools.lab.bench.coordinator import NETWORK
from fedquilt.tools.lab.bench.protocol_devices import AGAIN_S, DeviceGroup, SentUpdate, ShiftedModel
from fedquilt.tools.operations.site.virtual_site import VirtualSite
from fedquilt.tools.report.thresholds import compare_at_most, format_figures
from fedquilt.transport.link import Endpoint
from fedquilt.transport.memory_link import MemoryBroker, MemoryLink, run_on_virtual_time

METHODS: Final = ("fedavg", "fedprox", "fedopt", "fednova", "scaffold", "fedbn", "fedstitch", "robust")
STITCH: Final = "fedstitch"  # as many rounds as its search takes
SITES, AGENTS, ROUNDS = 20, 1000, 2
OFFLINE_S: Final = 3600.0
OFFLINE_ROUNDS: Final = 9
WORK_S: Final = 600.0  # that boards take for a task while a site is offline; else they answer at once
SEARCH_MOST: Final = 100  # rounds of a search, which ends by itself
DEADLINE_S: Final = 1500.0  # of a round; the site that is offline is waited for so long
MOST_MB: Final = 200.0
ENGINES: Final = {"numpy": "2", "onnx": "1"}
PROFILE: Final = {**protocol_devices.PROFILE, "points": (), "engines": tuple(ENGINES), "versions": ENGINES}


def measure(
    sites: int = SITES,
    agents: int = AGENTS,
    rounds: int = ROUNDS,
    methods: Sequence[str] = METHODS,
    features: int = stitch_boards.SMALL,
) -> dict[str, Any]:
    """Run a job of each method, and one in which a site is offline for an hour.

    Args:
        sites: Number of sites.
        agents: Number of devices of each site.
        rounds: Number of rounds of each job.
        methods: Methods to run: methods that train a model, or "fedstitch".
        features: Number of features of all FedStitch donors. With another number than that of the small graph, donors
            are joined and not stitched.

    Raises:
        LinkError: If the process of the coordinator above has ended.
    """
    runs = {name: _run_job(name, sites, agents, rounds, features=features) for name in methods}
    offline = _run_job("fedavg", sites, agents, OFFLINE_ROUNDS, work_s=WORK_S)
    odd = sum(each["states"] - each["equal"] for each in (*runs.values(), offline))
    figures = {
        **{
            f"resident_above_with_{name}": compare_at_most(each["resident_mb"], MOST_MB, "MB")
            for name, each in runs.items()
        },
        "states_with_other_bits": compare_at_most(odd, 0, "states"),
        "answers_lost_beside_the_offline_site's": compare_at_most(offline["missing"], 0, "answers"),
    }
    return {"bench": "sites", "sites": sites, "agents": agents, "runs": runs, "offline": offline, "figures": figures}


def lines(result: dict[str, Any]) -> list[str]:
    """Lines of text that show the result."""
    told = [
        f"{name}: {each['equal']} of {each['states']} states have the bits of all {each['boards']} boards in one "
        f"place; the coordinator above took {each['above_s']} s of processor time and {each['resident_mb']} MB, "
        f"everything else {each['below_s']} s, {each['below_ms']} ms an answer of a board"
        for name, each in result["runs"].items()
    ]
    offline = result["offline"]
    told.append(
        f"with a site of {offline['boards'] // result['sites']} boards offline for an hour: answers a round "
        f"{', '.join(map(str, offline['answers']))} of {result['sites']} sites; {offline['equal']} of "
        f"{offline['states']} states have the bits of the boards that were there"
    )
    return [*told, *format_figures(result)]


# -- the coordinator above ------------------------------------------------------------------------


class ParentProcess:
    """The coordinator above, in its process. An `Endpoint`."""

    def __init__(self, link: MemoryLink, home: Path, run: str) -> None:
        command = [sys.executable, "-m", "fedquilt.tools.lab.bench.sites_root", str(home), run]
        self._link, self.finished, self.committed = link, False, 0
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.used = psutil.Process(self._process.pid)
        self.resident_mb = self.used_s = 0.0

    def step(self, now_s: float) -> float:
        to, back = self._process.stdin, self._process.stdout
        assert to is not None
        assert back is not None
        came = [(each.topic, each.payload, each.retained) for each in self._link.receive()]
        sites_root.send(to, sites_root.StepRequest(now_s, came))
        done = sites_root.receive(back, sites_root.StepResult)
        if done is None:
            raise LinkError("the coordinator above the sites has ended: see above")
        for name, given in done.calls:
            if name == "publish":
                self._link.publish(given[0], given[1], retain=given[2])
            else:
                getattr(self._link, name)(*given)
        if done.committed > self.committed or done.finished:
            self.resident_mb = max(self.resident_mb, _peak_mb(self._process.pid))
            self.used_s = sum(self.used.cpu_times()[:2])
        self.committed, self.finished = done.committed, done.finished
        return float(done.due_s)

    def fds(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _peak_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise LinkError(f"the kernel does not tell the memory of process {pid}")


# -- boards ---------------------------------------------------------------------------------------


class _LightClient:
    """What a light board needs of an MQTT client, on a link in memory."""

    def __init__(self, link: MemoryLink) -> None:
        self.link = link

    def ask(self, filters: Sequence[str]) -> None:
        self.link.subscribe(filters)

    def send(self, topic: str, payload: bytes, qos: int, retain: bool) -> int:
        self.link.publish(topic, payload, retain=retain)
        return 0


class _SiteDevices(DeviceGroup):
    profile = PROFILE

    def __init__(self, broker: MemoryBroker, fleet: str, first: int, count: int, work_s: float) -> None:
        self.work_s = work_s
        self.topics, self.clock = wire.Topics(fleet), lambda: broker.now_s
        self.blobs, self.parts, self._layouts, self.refused = {}, {}, {}, 0
        self.seats = [_VirtualLightDevice(self, number, broker.connect()) for number in range(first, first + count)]
        self.boards = list(self.seats)

    def create_update(self, task: Task, number: int) -> SentUpdate:
        return (
            stitch_boards.answer(task.params, number) if task.method == STITCH else super().create_update(task, number)
        )


class _VirtualLightDevice(protocol_devices.LightDevice):
    """A light board on virtual time. An `Endpoint`."""

    finished = False

    def __init__(self, crowd: _SiteDevices, number: int, link: MemoryLink) -> None:
        super().__init__(crowd, number)
        self._work_s = crowd.work_s
        self._later: tuple[Task, float] | None = None  # a task, and when it is carried out
        self.client = _LightClient(link)  # type: ignore[assignment]
        self.link = link
        self._greeted = False

    def step(self, now_s: float) -> float:
        if not self._greeted:
            self._greeted = True
            self._handle_connect(None, None, None, None, None)
        for topic, payload, retained in self.link.receive():
            self._handle_message(topic, payload, retained)
        if self._later is not None:
            task, due_s = self._later
            if now_s < due_s:
                return due_s
            self._later = None
            super()._start_task(task, now_s)
        if self._update is None:
            return math.inf
        if now_s >= self._offered_s + AGAIN_S:
            self._offer_update(self._update, now_s)
        return self._offered_s + AGAIN_S

    def _start_task(self, task: Task, now_s: float) -> None:
        known = self._later[0] if self._later is not None else self._task
        again = known is not None and (task.job, task.round) == (known.job, known.round)
        if not self._work_s or (again and self._later is None):
            return super()._start_task(task, now_s)
        self._publish("claim", wire.Claim(job=task.job, round=task.round, attempt=task.attempt, accepted=True))
        self._later = task, self._later[1] if again and self._later else now_s + self._work_s
        return None

    def fds(self) -> Sequence[int]:
        return ()


# -- a run ----------------------------------------------------------------------------------------


def _run_job(
    method: str, sites: int, agents: int, rounds: int, work_s: float = 0.0, features: int = stitch_boards.SMALL
) -> dict[str, Any]:
    """Run a job and return its figures. With `work_s` the first site is offline for an hour after two rounds."""
    broker, begun_s = MemoryBroker(), time.process_time()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        home = Path(folder)
        run = _queue_job(home, method, sites, agents, rounds, features)
        link = broker.connect()
        above = ParentProcess(link, home / "above", run)
        stack.callback(above.close)
        seats: list[tuple[MemoryLink, Endpoint]] = [(link, above)]
        made, numbers = [], dict[str, int]()
        for number in range(sites):
            name = _site_name(number)
            store = stack.enter_context(Store(home / name, durable=False))
            store.acquire_lock()
            made.append(VirtualSite(broker, store, sites_root.FLEET, name))
            seats += made[-1].list_endpoints()
            crowd = _SiteDevices(broker, name, number * agents, agents, work_s)
            numbers |= {board.device: board.number for board in crowd.boards}
            seats += [(board.link, board) for board in crowd.seats]
        if work_s:
            run_on_virtual_time(broker, lambda: seats, lambda: above.committed >= 2)
            up, lost_s = made[0].up, broker.now_s
            place = next(at for at, (link, _) in enumerate(seats) if link is up.inner)
            up.disconnect()
            run_on_virtual_time(broker, lambda: seats, lambda: broker.now_s >= lost_s + OFFLINE_S)
            seats[place] = (up.reconnect(), seats[place][1])
        run_on_virtual_time(broker, lambda: seats, lambda: above.finished)
        below_s = time.process_time() - begun_s
        above.close()
        with Store(home / "above") as store:
            facts = [fact for _, _, fact in store.read_events(run)]
            equal, states, answers = _compare_states(store, method, facts, numbers)
    return {
        "boards": sites * agents,
        "states": states,
        "equal": equal,
        "answers": answers,
        "missing": _missing(answers, sites),
        "above_s": round(above.used_s, 2),
        "resident_mb": round(above.resident_mb, 1),
        "below_s": round(below_s, 1),
        "below_ms": round(1000 * below_s / max(sum(answers) * agents, 1), 2),
    }


def _missing(answers: Sequence[int], sites: int) -> int:
    return sum(max(sites - 1 - count, 0) for count in answers) + (sites - answers[-1])


def _site_name(number: int) -> str:
    return f"site-{number:02d}"


def _site_right(first: int, count: int) -> dict[str, Any]:
    """Return the right of a site to `count` boards from number `first`, as limits.toml states it."""
    names = [protocol_devices.device_name(number) for number in range(first, first + count)]
    return {"boards": names, "most": count}


def _queue_job(home: Path, method: str, sites: int, agents: int, rounds: int, features: int) -> str:
    """Queue a job at the upper coordinator, with a right for each site, and return the run's id."""
    cohort = {"deadline_s": DEADLINE_S, "start_devices": sites, "quorum": (sites - 1) / sites}
    table = {"name": "bench", "method": method, "engine": "numpy", "rounds": rounds, "cohort": cohort}
    if method == STITCH:
        stitch_boards.write(home / "bundle", features)
        table |= {"engine": "onnx", "rounds": SEARCH_MOST, "params": stitch_boards.params(features)}
    else:
        model = tensors.encode_tensors(engine.init_tensors(NETWORK, seed=0))
        job_bundle.write_bundle(home / "bundle", {"network": NETWORK, "flops": 1000}, {"model": model})
    rights = {_site_name(number): _site_right(number * agents, agents) for number in range(sites)}
    with Store(home / "above", durable=False) as store:
        (store.home / limits.FILE).write_text(toml.format_toml({"sites": rights}))
        return store.add_job(settings.parse_job(table), home / "bundle")


def _compare_states(
    store: Store, method: str, facts: Sequence[AnyEvent], numbers: Mapping[str, int]
) -> tuple[int, int, list[int]]:
    plain, equal, answers = known.load(method), 0, []
    row = store.readable_jobs()[0]
    state: Any = create_initial_state(row.job, job_bundle.load_bundle(row.bundle), plain)
    states = [fact.state for fact in facts if isinstance(fact, RoundCommitted)]
    for round, ref in enumerate(states):
        there = [fact.update.boards for fact in facts if isinstance(fact, UpdateAccepted) and fact.round == round]
        answers.append(len(there))
        total = None
        for given in _yield_flat_updates(
            plain, method, state, round, [(board, numbers[board]) for board in sorted({*itertools.chain(*there)})]
        ):
            total = plain.aggregation.fold(state, total, given)
        packed = tensors.pack_state(plain.step(state, total))
        equal += hashlib.sha256(packed).hexdigest() == ref.sha256
        state = tensors.unpack_state(packed, plain.state)
    return equal, len(states), answers


def _yield_flat_updates(
    plain: Method, method: str, state: Any, round: int, boards: Sequence[tuple[str, int]]
) -> Iterator[DeviceUpdate]:
    payload = b""
    for device, number in boards:
        order = plain.send(state, DeviceView(device, Profile(device=device, **PROFILE)))
        assert order is not None
        if method == STITCH:
            made = stitch_boards.answer(order.params, number)
            read = {name: blob.read(0, blob.ref.size) for name, blob in made.bundles.items()}
            weight, told = made.weight, made.metrics
        else:
            payload = payload or tensors.encode_tensors(order.bundles["model"])  # type: ignore[arg-type]
            read = {"model": ShiftedModel(payload, protocol_devices.model_shift(number)).read(0, len(payload))}
            weight, told = protocol_devices.update_weight(method), protocol_devices.update_metrics(round)
        yield DeviceUpdate(
            device, round, weight, told, {name: tensors.decode_tensors(each) for name, each in read.items()}
        )
