"""Workers of a pool on the nodes of a Ray cluster, one actor per processor.

Ray starts processes, moves bytes and detects lost nodes. It receives bytes in our own encoding and references to such
bytes (docs/decisions.md).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from fedquilt.core import JobError
from fedquilt.edge_agent.task.outputs import PRIVATE
from fedquilt.edge_agent.task.protocol import WorkRequest
from fedquilt.host.disk import REAL, disk_errors
from fedquilt.tools.simulation import adversaries, machines
from fedquilt.tools.simulation.machines import Machine
from fedquilt.tools.simulation.workers.protocol import (
    KEPT,
    SINGLE,
    PoolError,
    PoolSetup,
    WorkBatch,
    WorkerReply,
    WorkOutcome,
)
from fedquilt.tools.simulation.workers.ray import cluster
from fedquilt.tools.simulation.workers.ray.node import RayNode, WorkerSetup

log = logging.getLogger("fedquilt.simulation")

PIECE_BYTES: Final = 16 << 20  # of the examples' file at a time
REFERENCES: Final = 8  # contents that stay in the object store: those of a round, mostly one to three
LOOK_S: Final = 5.0  # between two looks at which nodes there are
PATIENCE_S: Final = 60.0  # for workers that find no free processor, while others are ready
FAILED: Final = 3  # workers of a node that never got ready, after which none is started there
LEAVING_S: Final = 5.0


@dataclass
class RayWorkerHandle:
    actor: Any
    node: str  # id
    state: Literal["hello", "begin", "ready"] = "hello"
    orders: Sequence[WorkRequest] = ()
    held: list[Any] = field(default_factory=list)  # references that its orders need


class RayWorkers:
    """Workers on a Ray cluster."""

    def __init__(
        self, engine: str, address: str, *, count: int | None, mixed: bool, modules: Collection[str] = ()
    ) -> None:
        if count is not None and count < 1:
            raise JobError(f"{count} workers: at least 1 is needed")
        self._engine, self._address, self._count = engine, address, count
        self._mixed, self._modules = mixed, tuple(sorted(modules))
        self._ray: Any = None
        self._connected = self._own = False  # whether this Ray is to be left at the end, and was started for the run
        self._all: dict[int, RayWorkerHandle] = {}
        self._calls: dict[Any, int] = {}  # reference of an answer -> worker
        self._number = 0
        self._folder = f"ray-{secrets.token_hex(8)}"
        self._examples, self._begin = "", b""  # file of the examples, and the message that precedes them
        self._pieces: list[Any] = []  # of the examples, while a worker fetches them
        self._references: dict[str, Any] = {}  # sha256 -> reference
        self._failed: Counter[str] = Counter()  # node -> workers in a row that did not get ready
        self._names: dict[str, str] = {}  # node -> what it is called
        self._words = ""  # last words of a worker that was lost
        self._warmed = False
        self._looked_s = 0.0
        self.machines: dict[str, Machine] = {}

    # -- what a pool calls --

    def start(self, folder: Path) -> None:
        self._ray, self._connected, self._own = cluster.connect_to_ray(self._address, self._count)
        nodes = self._list_nodes()
        there = sum(nodes.values())
        if self._count is not None and self._count > there:
            raise JobError(f"{self._count} workers: the Ray cluster has {there} processors; give --workers {there}")
        self._actor = self._ray.remote(RayNode)
        self._start_workers(self._count or there, nodes)

    def send_setup(self, setup: PoolSetup) -> None:
        # each node receives the examples when its first worker has reported
        self._examples = setup.examples
        self._begin = msgspec.msgpack.encode(replace(setup, examples=REAL.hash_file(setup.examples)))

    def wait_until_ready(self) -> None:
        """Wait until all workers are ready, or some are and PATIENCE_S has passed."""
        began_s = time.monotonic()
        while any(each.state != "ready" for each in self._all.values()) or not self._all:
            for _ in self.receive_replies(block=True):
                raise AssertionError("nobody has orders yet")
            if time.monotonic() > began_s + PATIENCE_S and any(self.ready):
                log.warning("%d of %d workers are ready: the others find no processor", len(self.ready), len(self._all))
                break
        self._warmed = True

    @property
    def ready(self) -> list[int]:
        return [number for number, each in self._all.items() if each.state == "ready"]

    def send_work(self, worker: int, work: WorkBatch) -> None:
        # workers on Ray do not fold: the state of the round is not among the files
        sent, files, orders = [], {}, work.orders
        for order in orders:
            packed, named = pack_request(order)
            sent.append(packed)
            files.update(named)
        shared = {ref.sha256 for order in orders for ref in order.task.bundles.values()}
        offered = [self._get_object_reference(sha256, path, sha256 in shared) for sha256, path in files.items()]
        parcel = WorkBatch(tuple(sent), work.together, contents=tuple(files))
        given = self._all[worker]
        given.orders, given.held = orders, offered
        self._record_call(worker, given.actor.answer.remote(msgspec.msgpack.encode(parcel), offered))

    def receive_replies(self, *, block: bool) -> Iterator[tuple[int, WorkerReply | None]]:
        # lost workers are replaced while their node is alive
        if block and not self._calls:
            self._replace_lost_workers()
        for reference in self._wait_for_calls(LOOK_S if block else 0.0):
            number = self._calls.pop(reference)
            hired = self._all[number]
            orders, hired.orders, hired.held = hired.orders, (), []
            try:
                answer = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                self._remove_worker(number, error)
                if orders:
                    yield number, None
                continue
            if hired.state == "ready":
                yield number, write_outputs(orders, msgspec.msgpack.decode(answer, type=WorkerReply))
            else:
                self._advance_startup(number, hired, answer)
        if block and time.monotonic() > self._looked_s + LOOK_S:
            self._replace_lost_workers()

    def stop(self, *, now: bool) -> None:
        """Stop the workers, and disconnect from Ray if `start` has connected."""
        if self._ray is None or not self._ray.is_initialized():
            return
        with contextlib.suppress(Exception):  # a cluster that is gone has ended them
            if not now:
                left = [each.actor.leave.remote() for each in self._all.values() if each.state != "hello"]
                if left:
                    self._ray.wait(left, num_returns=len(left), timeout=LEAVING_S)
            for each in self._all.values():
                self._ray.kill(each.actor)
        self._all, self._calls, self._references, self._pieces = {}, {}, {}, []
        if self._connected:
            self._ray.shutdown()

    # -- within --

    def _list_nodes(self) -> dict[str, int]:
        found = {}
        for node in self._ray.nodes():
            if node["Alive"] and (count := int(node["Resources"].get("CPU", 0))):
                found[node["NodeID"]] = count
                called = node.get("NodeName") or node["NodeManagerAddress"]
                self._names[node["NodeID"]] = f"{called} (Ray node {node['NodeID'][:8]})"
        return found

    def _start_workers(self, wanted: int, nodes: Mapping[str, int]) -> None:
        # distributed evenly over nodes, without those on which several workers have failed to start
        free = {
            node: count - sum(each.node == node for each in self._all.values())
            for node, count in nodes.items()
            if self._failed[node] < FAILED
        }
        while wanted > 0 and (able := [node for node, count in free.items() if count > 0]):
            for node in able[:wanted]:
                free[node] -= 1
                wanted -= 1
                self._start_worker(node)

    def _start_worker(self, node: str) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        folder = f"{self._folder}-{node[:12]}"
        asked = WorkerSetup(self._engine, self._modules, folder)
        actor = self._actor.options(
            num_cpus=1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            runtime_env=None if self._own else {"env_vars": {**KEPT, **SINGLE}},
        ).remote(msgspec.msgpack.encode(asked))
        self._all[self._number] = RayWorkerHandle(actor, node)
        self._record_call(self._number, actor.hello.remote())
        self._number += 1

    def _record_call(self, worker: int, reference: Any) -> None:
        self._calls[reference] = worker

    def _wait_for_calls(self, timeout_s: float) -> list[Any]:
        if not self._calls:
            return []
        waiting = list(self._calls)
        come, _ = self._ray.wait(waiting, num_returns=1, timeout=timeout_s)
        return self._ray.wait(waiting, num_returns=len(waiting), timeout=0)[0] if come else []

    def _advance_startup(self, number: int, hired: RayWorkerHandle, answer: bytes) -> None:
        if hired.state == "begin":
            hired.state, self._failed[hired.node] = "ready", 0
            if not any(each.state == "begin" for each in self._all.values()):
                self._pieces = []
            return
        if not self._admit_machine(number, hired, answer):
            return
        hired.state = "begin"
        if not self._pieces:
            with open(self._examples, "rb") as file:
                self._pieces = [self._ray.put(piece) for piece in iter(lambda: file.read(PIECE_BYTES), b"")]
        self._record_call(number, hired.actor.begin.remote(self._begin, self._pieces))

    def _admit_machine(self, number: int, hired: RayWorkerHandle, answer: bytes) -> bool:
        named = self._names[hired.node]
        try:
            try:
                machine = msgspec.msgpack.decode(answer, type=Machine)
            except msgspec.ValidationError as error:
                raise JobError(f"{named} has another version of fedquilt ({error}): install the same there") from None
            here = machines.describe_this_machine(self._modules)
            machines.require_same_results({"this machine": here}, named, machine, mixed=True)
            machines.require_same_results(self.machines, named, machine, mixed=self._mixed)
        except JobError as error:
            if not self._warmed:
                raise
            if self._failed[hired.node] < FAILED:
                log.warning("%s is left out: %s", named, error)
            self._failed[hired.node] = FAILED
            self._ray.kill(self._all.pop(number).actor)
            return False
        self.machines.setdefault(named, machine)
        return True

    def _remove_worker(self, number: int, error: BaseException) -> None:
        hired = self._all.pop(number)
        self._words = " ".join(str(error).split())[-500:]
        if hired.state != "ready":
            self._failed[hired.node] += 1
        log.warning("a worker on %s is lost, and its orders go to another: %s", self._names[hired.node], self._words)
        with contextlib.suppress(Exception):
            self._ray.kill(hired.actor)
        self._replace_lost_workers()

    def _replace_lost_workers(self) -> None:
        self._looked_s = time.monotonic()
        try:
            nodes = self._list_nodes()
        except Exception as error:  # the cluster's head is gone
            raise PoolError(f"the Ray cluster is lost ({error}): start the command again, and it goes on") from None
        self._start_workers((self._count or sum(nodes.values())) - len(self._all), nodes)
        if not self._all:
            raise PoolError(
                f"no worker is left on the Ray cluster; the last one's words: {self._words or '(none)'}; start the "
                "command again when it has nodes, and it goes on"
            )

    def _get_object_reference(self, sha256: str, path: str, shared: bool) -> Any:
        # references of files that many devices need are cached
        if sha256 in self._references:
            self._references[sha256] = self._references.pop(sha256)
            return self._references[sha256]
        reference = self._ray.put(Path(path).read_bytes())
        if shared:
            self._references[sha256] = reference
            while len(self._references) > REFERENCES:
                del self._references[next(iter(self._references))]
        return reference


def pack_request(order: WorkRequest) -> tuple[WorkRequest, dict[str, str]]:
    """Return a work request without paths, and the path of each file by sha256."""
    files = {order.task.bundles[name].sha256: path for name, path in order.bundles.items()}
    private = None
    if order.private is not None:
        private = REAL.hash_file(order.private)
        files[private] = order.private
    if (honest := adversaries.honest_file(order)) is not None:
        files[REAL.hash_file(honest)] = honest
        order = adversaries.add_honest_mean(order, REAL.hash_file(honest))
    bundles = {name: order.task.bundles[name].sha256 for name in order.bundles}
    sent = replace(order, bundles=bundles, private=private, cache="", out="", whole_bytes=sys.maxsize)
    return sent, files


def write_outputs(orders: Sequence[WorkRequest], made: WorkerReply) -> WorkerReply:
    """Write the outputs of a remote worker into the folders of the work requests.

    Returns:
        Reply with the small blobs alone, as a worker of this machine returns it.
    """
    found = []
    for order, done in zip(orders, made.done, strict=True):
        outcome, small = done.outcome, {}
        with disk_errors(f"write into {order.out}"):
            for sha256, payload in outcome.blobs.items():
                if len(payload) < order.whole_bytes:
                    small[sha256] = payload
                else:
                    REAL.write(f"{order.out}/{order.prefix}{sha256}", payload)
            if outcome.private is not None:
                REAL.write(f"{order.out}/{order.prefix}{PRIVATE}", made.private[outcome.private.sha256])
        found.append(WorkOutcome(replace(outcome, blobs=small), done.joint))
    return WorkerReply(found)
