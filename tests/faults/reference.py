"""Reference run without faults: expected states of all cohorts, from the method's functions.

Nothing of the coordinator or the agent takes part: no log, no store, no messages. Each device's work is remembered by
its inputs, so that thousands of schedules cost the work of a few.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from fedquilt import compression
from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import JobSettings, create_initial_state
from fedquilt.coordinator.updates.tasks import make_task
from fedquilt.core import (
    Action,
    BlobRef,
    Bundle,
    DeviceUpdate,
    DeviceView,
    Encoding,
    Profile,
    Task,
    Tensors,
    seed_deriver,
)
from fedquilt.costs import peak_memory
from fedquilt.edge_agent import engines, messages, state_machine
from fedquilt.edge_agent.devices import create_device as make_board
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.edge_agent.task import main
from fedquilt.edge_agent.task.protocol import PRIVATE_FILE, WorkRequest, WorkResult
from fedquilt.formats import job_bundle
from fedquilt.testing import toy_networks
from fedquilt.testing.toy_networks import Scenario, make_scenario
from fedquilt.tools.simulation.local_backend import SingleEngineExecutor
from tests.faults.schedule import BitRot, FaultSchedule, HomeRestore

BUDGET: Final = "2GB"
BUDGET_BYTES: Final = 2_000_000_000
BOARD: Final = "x86-host"  # the smallest profile there is


class ReferenceResult(NamedTuple):
    outcome: WorkResult
    files: Mapping[str, bytes]

    @property
    def private(self) -> bytes | None:
        return self.files.get(PRIVATE_FILE)


class PrivateStateModel(NamedTuple):
    private: bytes | None = None  # None without usable private state
    sha256: str = ""  # of the stored file
    lost: str = ""  # why the state of an earlier round is missing
    forgotten: str = ""  # why that cannot be told


class Contribution(NamedTuple):
    device: str
    round: int  # whose state the update was computed from


Cohorts: TypeAlias = tuple[tuple[Contribution, ...], ...]  # of each round, sorted


class ReferenceState(NamedTuple):
    state: Any
    sha256: str
    private: Mapping[str, bytes]  # device -> its private state
    history: Mapping[str, tuple[int, ...]]  # device -> rounds it contributed to


class ReferenceClient:
    """Method with toy data, and all results that were computed with the method.

    Args:
        name: The name of the method.
        place: A real folder for its files.
    """

    def __init__(self, name: str, place: Path) -> None:
        self.scene = _make_scene(name)
        self.method = self.scene.method
        self.folder = toy_networks.write_bundle(place / f"bundle-{name}", self.scene.bundle)
        self.bundle: Bundle = job_bundle.load_bundle(self.folder)
        self.engine = "numpy" if "numpy" in self.method.engines else self.method.engines[0]
        self.done: dict[
            tuple[str, bytes, str, PrivateStateModel], ReferenceResult
        ] = {}  # by device, task, damaged blobs and private state
        self.nodes: dict[tuple[Any, ...], ReferenceState] = {}  # by the parameters of a job and its cohorts
        self.blobs: dict[str, bytes] = {}
        self._bench = SingleEngineExecutor(self._examples_of, lambda name: self.method, self.scene.engine)
        self._place = place / f"work-{name}"
        self._place.mkdir()
        self._files: dict[str, str] = {}  # sha256 -> path of a real file

    def _examples_of(self, device: str) -> Any:
        member = self.scene.devices[int(device.rpartition("-")[2])]
        return member.train, member.held_out

    def run_task(
        self, task: Task, device: str, known: PrivateStateModel, load: Callable[[str], bytes]
    ) -> ReferenceResult:
        plain = msgspec.structs.replace(task, job="", attempt=0, deadline_s=0.0)
        given = {name: load(ref.sha256) for name, ref in task.bundles.items()}
        odd = "".join(_sha256(given[name]) for name, ref in task.bundles.items() if _sha256(given[name]) != ref.sha256)
        key = (device, msgspec.json.encode(plain), odd, known)
        if key not in self.done:
            self.done[key] = self._compute_result(plain, device, known, given)
        return self.done[key]

    def _compute_result(
        self, task: Task, device: str, known: PrivateStateModel, given: Mapping[str, bytes]
    ) -> ReferenceResult:
        with tempfile.TemporaryDirectory(dir=self._place) as folder:
            out = Path(folder) / "out"
            out.mkdir()
            own = None if known.private is None else Path(folder) / "private"
            if own is not None and known.private is not None:
                own.write_bytes(known.private)
            order = WorkRequest(
                task=task,
                device=device,
                budget_bytes=BUDGET_BYTES,
                data={"share": device},
                bundles={name: self._real_file(payload) for name, payload in given.items()},
                private_state=None if own is None else str(own),
                private_sha256=known.sha256,
                lost_reason=known.lost,
                unknown_reason=known.forgotten,
                verify_bundles=True,
                cache_folder=f"{folder}/cache",
                output_folder=str(out),
            )
            outcome = main.run_task(order, self._bench)
            files = {path.name: path.read_bytes() for path in out.iterdir()}
        return ReferenceResult(
            msgspec.structs.replace(outcome, wall_s=1.0, cpu_s=1.0, peak_bytes=None, base_bytes=None), files
        )

    def _real_file(self, payload: bytes) -> str:
        sha256 = _sha256(payload)
        if sha256 not in self._files:
            (self._place / sha256).write_bytes(payload)
            self._files[sha256] = str(self._place / sha256)
        return self._files[sha256]


class ReferenceRun:
    """Reference run of one job without faults.

    Args:
        plan: The schedule, of which the settings and the possible loss of private state matter.
        shop: The reference client of the job's method.
        number: The number of the job, from 0.
    """

    def __init__(self, plan: FaultSchedule, shop: ReferenceClient, number: int = 0) -> None:
        self.shop, self.method, self.folder, self.bundle = shop, shop.method, shop.folder, shop.bundle
        self.engine = shop.engine
        self._same = (plan.codec, plan.rounds, plan.check, plan.concurrency > 0, plan.job_name(number))
        self.job: JobSettings = settings.parse_job(
            {
                "name": plan.job_name(number),
                "method": plan.method,
                "rounds": plan.rounds,
                "engine": self.engine,
                "seed": 3,
                "params": dict(shop.scene.params_table),
                "cohort": {
                    "size": plan.size,
                    "min_devices": 0 if plan.size else plan.devices,
                    "start_devices": plan.size or plan.devices,
                    "quorum": plan.quorum,
                    "over_select": plan.over_select,
                    **({"mode": "buffered", "concurrency": plan.concurrency} if plan.concurrency else {}),
                    "deadline_s": plan.deadline_s,
                    "attempts": 100
                    if any(isinstance(fault, BitRot | HomeRestore) for fault in plan.faults)
                    else 10_000,
                },
                "check": {"every": plan.check if self.method.check and not self.method.evaluation_round else 0},
                "wire": msgspec.to_builtins(compression.exclude_buffers(Encoding(codec=plan.codec), self.bundle.meta)),
            }
        )

    def device_profile(self, device: str) -> Profile:
        return _device_profile(device, self.engine)

    def state_after(self, cohorts: Cohorts) -> ReferenceState:
        key = (self._same, cohorts)
        found = self.shop.nodes.get(key)
        if found is None:
            found = self._run_round(cohorts[:-1], cohorts[-1]) if cohorts else self._initial_node()
            self.shop.nodes[key] = found
        return found

    def round_actions(self, round: int) -> tuple[Action, ...]:
        every = self.job.check.every
        if round >= self.job.rounds:
            return ("check",)
        return ("check", "work") if every and round % every == 0 else ("work",)

    def _initial_node(self) -> ReferenceState:
        return self._make_node(create_initial_state(self.job, self.bundle, self.method), {}, {})

    def _make_node(
        self, state: Any, private: Mapping[str, bytes], history: Mapping[str, tuple[int, ...]]
    ) -> ReferenceState:
        payload = tensors.pack_state(state)
        return ReferenceState(tensors.unpack_state(payload, self.method.state), _sha256(payload), private, history)

    def _run_round(self, earlier_cohorts: Cohorts, cohort: Iterable[Contribution]) -> ReferenceState:
        node, present_round, total = self.state_after(earlier_cohorts), len(earlier_cohorts), None
        private, history = dict(node.private), dict(node.history)
        actions = self.round_actions(present_round)
        for device, round in sorted(cohort):
            profile, base = self.device_profile(device), self.state_after(earlier_cohorts[:round])
            seed = seed_deriver(self.job.seed, self.job.name, round)
            order = self.method.send(base.state, DeviceView(device, profile, node.history.get(device, ())))
            assert order is not None, f"{device} took part in round {round}, and the method has nothing for it"
            task = make_task(
                order,
                store_bundle=self._store_blob,
                job="",
                round=round,
                attempt=0,
                method=self.job.method,
                engine=self.engine,
                actions=actions,
                seed=seed(device),
                deadline_s=0.0,
                tier=peak_memory.tier_from_profile(profile),
                wire=self.job.wire,
            )
            kept = node.private.get(device)
            known = PrivateStateModel() if kept is None else PrivateStateModel(kept, _sha256(kept))
            done = self.shop.run_task(task, device, known, self._load_blob)
            assert done.outcome.code == "ok", done.outcome.reason
            if done.private is not None:
                private[device] = done.private
            history[device] = (*history.get(device, ()), round)
            if "work" in actions:
                update = self._decode_update(device, task, done)
                if round < present_round:
                    weight = (1 + present_round - round) ** -0.5
                    assert self.method.aggregation.change is not None
                    update = self.method.aggregation.change.scale(node.state, base.state, update, weight)
                total = self.method.aggregation.fold(node.state, total, update)
        state = self.method.step(node.state, total) if "work" in actions else node.state
        return self._make_node(state, private, history)

    def _decode_update(self, device: str, task: Task, done: ReferenceResult) -> DeviceUpdate:
        sent = {name: tensors.decode_tensors(done.files[ref.sha256]) for name, ref in done.outcome.bundles.items()}

        def base(name: str) -> Tensors | None:
            known = task.bundles.get(name) if task.wire.codec != "raw" else None
            return None if known is None else tensors.decode_tensors(self._load_blob(known.sha256))

        plain = compression.decode_update(task.wire, sent, base)
        return DeviceUpdate(device, task.round, done.outcome.weight, done.outcome.metrics, plain)

    def _store_blob(self, value: Tensors | BlobRef) -> BlobRef:
        if isinstance(value, BlobRef):
            return value
        payload = tensors.encode_tensors(value)
        ref = BlobRef(sha256=_sha256(payload), size=len(payload))
        self.shop.blobs[ref.sha256] = payload
        return ref

    def _load_blob(self, sha256: str) -> bytes:
        return self.shop.blobs.get(sha256) or (self.folder / "blobs" / sha256).read_bytes()


def _make_scene(name: str) -> Scenario:
    # One epoch of two batches. The models of FedAvg and Ditto consist of several chunks.
    found = make_scenario(name)
    params_table = {key: 1 if key == "epochs" else value for key, value in found.params_table.items()}
    found = replace(found, params_table=params_table)
    if name not in ("fedavg", "ditto"):
        return found
    network = {"name": "mlp", "inputs": 6, "hidden": [40], "classes": 3}
    return replace(found, bundle=toy_networks.toy_bundle(network, numpy_engine.init_tensors(network, 0)))


def _sha256(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()


@cache
def _device_profile(device: str, engine: str) -> Profile:
    means = state_machine.Capabilities(
        BUDGET_BYTES, (engine, *(e for e in engines.available_engines() if e != engine)), ()
    )
    return messages.profile_message(device, make_board(BOARD), means)
