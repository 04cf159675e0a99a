"""Workers of a pool on the nodes of a Ray cluster, one actor per processor.

Ray starts processes, moves bytes and detects lost nodes. It receives bytes in our own encoding and references to such
bytes (docs/decisions.md).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from fedquilt import extras
from fedquilt.core import JobError, StoreError
from fedquilt.edge_agent.task.protocol import PRIVATE_FILE, WorkRequest
from fedquilt.host.disk import REAL, disk_errors
from fedquilt.tools.simulation import adversaries, machines, processes
from fedquilt.tools.simulation.machines import Machine
from fedquilt.tools.simulation.pool import (
    KEPT,
    SCHEME,
    SINGLE,
    PoolError,
    PoolSetup,
    SharedFolder,
    WorkBatch,
    WorkerReply,
    WorkOutcome,
)

log = logging.getLogger("fedquilt.simulation")

STORE_BYTES: Final = 256 << 20  # of the object store of a Ray that is started here; what is more goes to its disk
KNOCK_S: Final = 10.0
ATTEMPTS: Final = 3  # at a client server
QUIET: Final = {"RAY_USAGE_STATS_ENABLED": "0"}  # nothing is reported to Ray's makers
# A Ray that listens on 127.0.0.1 alone, and whose workers have the priority of the command and not 15 steps less.
ALONE: Final = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_worker_niceness": "0"}

VERSIONS: Final = re.compile(r"Ray: (\S+) Python: (\S+)")  # of the cluster and of this process, in Ray's complaint
TOKEN: Final = {"RAY_AUTH_MODE": "token"}
MOST_BYTES: Final = 1 << 30  # of a node's files beside the examples; those used longest ago go first
Fetch = Callable[[Any], bytes]  # bytes of a reference into the object store
PIECE_BYTES: Final = 16 << 20  # of the examples' file at a time
REFERENCES: Final = 8  # contents that stay in the object store: those of a round, mostly one to three
LOOK_S: Final = 5.0  # between two looks at which nodes there are
PATIENCE_S: Final = 60.0  # for workers that find no free processor, while others are ready
FAILED: Final = 3  # workers of a node that never got ready, after which none is started there
LEAVING_S: Final = 5.0


class RayConnection(NamedTuple):
    ray: Any  # the module
    ours: bool  # whether it is to be closed at the end: the program was not connected before
    own: bool  # whether this Ray was started for the run, with the workers' environment


def find_ray_address(environ: Mapping[str, str]) -> str | None:
    """Return the address of the Ray cluster that this machine is a node of, or None.

    The address is RAY_ADDRESS, or the one that `ray start` has stored. Ray itself would also accept a cluster that
    another program has started for its own use.
    """
    if address := environ.get("RAY_ADDRESS"):
        return address
    noted = Path(environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")  # noqa: S108
    try:
        return noted.read_text().strip() or None
    except OSError:
        return None


def connect_to_ray(engine: str, processors: int | None) -> RayConnection:
    """Import Ray, and connect to a cluster unless this process is connected already."""
    there = engine if engine != "ray" else find_ray_address(os.environ)
    how: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if not there:
        how |= {
            "num_cpus": processors or len(os.sched_getaffinity(0)),
            "include_dashboard": False,
            "object_store_memory": STORE_BYTES,
            "_node_ip_address": "127.0.0.1",
        }
    locked = engine.startswith(SCHEME) and "RAY_AUTH_MODE" not in os.environ and _has_token(os.environ)
    kept = {**QUIET, **({} if there else {**SINGLE, **KEPT, **ALONE}), **(TOKEN if locked else {})}
    with _set_environment(kept):
        ray = extras.load_optional("ray")
        if ray.is_initialized():
            return RayConnection(ray, ours=False, own=False)
        try:
            host, colon, port = (there or "").removeprefix(SCHEME).rpartition(":")
            if colon and port.isdigit():  # Ray itself waits for minutes for a cluster that is gone
                socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()
            if locked:
                ray._raylet.Config.initialize("")  # the environment again, where Ray was imported before
            _init_ray(ray, there, how)
        except (OSError, RuntimeError, ValueError, ImportError, ray.exceptions.RayError) as error:
            raise PoolError(_format_connection_error(ray, there, " ".join(str(error).split()))) from None
    return RayConnection(ray, ours=True, own=not there)


def _has_token(environ: Mapping[str, str]) -> bool:
    # a head node enables tokens if it finds one, but a client needs TOKEN to send it
    path = environ.get("RAY_AUTH_TOKEN_PATH")
    return (
        bool(environ.get("RAY_AUTH_TOKEN")) or (Path(path) if path else Path.home() / ".ray" / "auth_token").is_file()
    )


def _format_connection_error(ray: Any, there: str | None, said: str) -> str:
    if not there:
        return f"Ray could not be started ({said[:300]}): `fedquilt simulate --engine pool` needs none"
    told = VERSIONS.findall(said)
    if len(told) == 2:
        (theirs, their_python), (ours, our_python) = told
        return (
            f"the cluster at {there} runs Ray {theirs} on Python {their_python}, and this command Ray {ours} on Python "
            f"{our_python}: they have to be the same. Install the cluster's here (pip install 'ray[client]=={theirs}', "
            "on its Python), or this command's on all of its nodes"
        )
    return (
        f"no Ray could be reached at {there} ({said[:300]}): it has to run the same versions of Ray and Python (here "
        f"Ray {ray.__version__}), with the same token (~/.ray/auth_token); {SCHEME}HOST:PORT names a cluster's client "
        "server, port 10001 unless told otherwise; `ray stop` forgets a Ray of this machine that is gone"
    )


def _init_ray(ray: Any, there: str | None, how: Mapping[str, Any]) -> None:
    # the first process of a client server sometimes ends during its start, so the connection is tried again
    for left in reversed(range(ATTEMPTS)):
        try:
            with _restore_sigterm_handler():
                ray.init(address=there or "local", **how)
            return
        except ConnectionAbortedError as error:
            if not left:
                raise
            log.warning("the client server at %s had no process for this command, and is asked again: %s", there, error)


@contextlib.contextmanager
def _set_environment(wanted: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _restore_sigterm_handler() -> Iterator[None]:
    # ray.init replaces the handler
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # in another thread than the main one, where Ray handles none either
            signal.signal(signal.SIGTERM, before)


class WorkerSetup(msgspec.Struct, frozen=True):
    engine: str
    modules: tuple[str, ...]  # of plug-ins, whose content it reports
    folder: str  # name of the folder that the workers of its node share


def unpack_request(order: WorkRequest, find: Callable[[str], str], cache: str, out: str) -> WorkRequest:
    """Return the work request with paths of this machine. `find` returns the path of a sha256."""
    if (honest := adversaries.honest_file(order)) is not None:
        order = adversaries.add_honest_mean(order, find(honest))
    return replace(
        order,
        bundles={name: find(sha256) for name, sha256 in order.bundles.items()},
        private_state=None if order.private_state is None else find(order.private_state),
        cache_folder=f"{cache}/{order.device}",
        output_folder=out,
    )


class NodeFiles:
    """Content-addressed files that the workers of a node share.

    Files in use are also linked into the worker's own folder.
    """

    def __init__(self, folder: Path, own: Path, fetch: Fetch, most_bytes: int = MOST_BYTES) -> None:
        self._shared, self._own, self._fetch, self._most = folder / "files", own, fetch, most_bytes
        for each in (self._shared, own):
            each.mkdir(exist_ok=True)

    def ensure_file(self, sha256: str, reference: Any) -> str:
        """Return the path of a file with this sha256, fetched from the object store if missing."""
        path = self._own / sha256
        if not path.exists():
            try:
                os.link(self._shared / sha256, path)
                os.utime(path)
            except FileNotFoundError:
                self.store_file(sha256, self._fetch(reference))
        return str(path)

    def store_file(self, sha256: str, payload: bytes) -> None:
        if hashlib.sha256(payload).hexdigest() != sha256:
            raise StoreError(f"content {sha256[:12]} came damaged from the object store")
        part = self._own / "part"
        part.write_bytes(payload)
        os.replace(part, self._own / sha256)
        with contextlib.suppress(FileExistsError):
            os.link(self._own / sha256, self._shared / sha256)

    def evict_files(self, used: Sequence[str]) -> None:
        """Unlink this worker's files that are not in `used`, and the oldest shared files above the limit."""
        for each in os.scandir(self._own):
            if each.name not in used:
                os.unlink(each.path)
        found = []
        for each in os.scandir(self._shared):
            with contextlib.suppress(FileNotFoundError):  # another worker gave it up
                found.append((each.stat().st_mtime, each.stat().st_size, each.path))
        held = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if held <= self._most:
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            held -= size


class RayNode:
    """Worker of a pool as an actor on a node of a Ray cluster. All methods take and return msgpack bytes."""

    def __init__(self, asked: bytes) -> None:
        import ray

        self._asked = msgspec.msgpack.decode(asked, type=WorkerSetup)
        self._fetch: Fetch = ray.get
        self._worker: processes.PoolWorker | None = None

    def hello(self) -> bytes:
        """Import the engine, and return the encoded `machines.Machine` of this node."""
        told = machines.describe_this_machine(self._asked.modules)
        processes.import_engine(self._asked.engine)
        self._common = SharedFolder(self._asked.folder)
        self._own = self._common.path / f"worker-{os.getpid()}"
        self._out = self._common.path / f"made-{os.getpid()}"
        self._files = NodeFiles(self._common.path, self._own, self._fetch)
        return msgspec.msgpack.encode(told)

    def begin(self, begin: bytes, pieces: Sequence[Any]) -> bytes:
        # only the first worker of a node fetches the examples
        setup = msgspec.msgpack.decode(begin, type=PoolSetup)
        path = self._common.path / "examples"
        with (self._common.path / "examples.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                self._fetch_examples(path, setup.examples, pieces)
        self._worker = processes.PoolWorker(replace(setup, examples=str(path)))
        return b""

    def answer(self, parcel: bytes, offered: Sequence[Any]) -> bytes:
        """Run work requests and return an encoded `WorkerReply`."""
        told = msgspec.msgpack.decode(parcel, type=WorkBatch)
        references = dict(zip(told.contents, offered, strict=True))
        caches = f"{self._common.path}/caches"

        def find(sha256: str) -> str:
            return self._files.ensure_file(sha256, references[sha256])

        orders = tuple(unpack_request(each, find, caches, str(self._out)) for each in told.orders)
        assert self._worker is not None
        reply = self._worker.run_batch(WorkBatch(orders, told.together))
        for each in reply.done:
            if each.outcome.code == "disk":
                raise StoreError(each.outcome.reason)
        private = {}
        for order, each in zip(orders, reply.done, strict=True):
            if (left := each.outcome.private) is not None:
                payload = Path(f"{order.output_folder}/{order.file_prefix}{PRIVATE_FILE}").read_bytes()
                private[left.sha256] = payload
                self._files.store_file(left.sha256, payload)
        self._files.evict_files(told.contents)
        shutil.rmtree(self._out, ignore_errors=True)
        return msgspec.msgpack.encode(replace(reply, private=private))

    def leave(self) -> bytes:
        """Delete the files of this worker, and those of the node with its last worker. Return empty bytes."""
        for each in (self._own, self._out):
            shutil.rmtree(each, ignore_errors=True)
        self._common.release()
        return b""

    def _fetch_examples(self, path: Path, sha256: str, pieces: Sequence[Any]) -> None:
        digest, part = hashlib.sha256(), path.with_suffix(".part")
        with part.open("wb") as file:
            for each in pieces:
                payload = self._fetch(each)
                digest.update(payload)
                file.write(payload)
        if digest.hexdigest() != sha256:
            raise StoreError("the examples came damaged from the object store")
        os.replace(part, path)


@dataclass
class RayWorkerHandle:
    actor: Any
    node: str  # id
    state: Literal["hello", "begin", "ready"] = "hello"
    orders: Sequence[WorkRequest] = ()
    held: list[Any] = field(default_factory=list)  # references that its orders need


class RayWorkers:
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

    def start(self, folder: Path) -> None:
        self._ray, self._connected, self._own = connect_to_ray(self._address, self._count)
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
        self._calls[given.actor.answer.remote(msgspec.msgpack.encode(parcel), offered)] = worker

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
        self._calls[actor.hello.remote()] = self._number
        self._number += 1

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
        self._calls[hired.actor.begin.remote(self._begin, self._pieces)] = number

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
    if order.private_state is not None:
        private = REAL.hash_file(order.private_state)
        files[private] = order.private_state
    if (honest := adversaries.honest_file(order)) is not None:
        files[REAL.hash_file(honest)] = honest
        order = adversaries.add_honest_mean(order, REAL.hash_file(honest))
    bundles = {name: order.task.bundles[name].sha256 for name in order.bundles}
    sent = replace(
        order, bundles=bundles, private_state=private, cache_folder="", output_folder="", max_inline_bytes=sys.maxsize
    )
    return sent, files


def write_outputs(orders: Sequence[WorkRequest], made: WorkerReply) -> WorkerReply:
    """Write a remote worker's outputs into the folders of the work requests, and return the reply with small blobs."""
    found = []
    for order, done in zip(orders, made.done, strict=True):
        outcome, small = done.outcome, {}
        with disk_errors(f"write into {order.output_folder}"):
            for sha256, payload in outcome.blobs.items():
                if len(payload) < order.max_inline_bytes:
                    small[sha256] = payload
                else:
                    REAL.write(f"{order.output_folder}/{order.file_prefix}{sha256}", payload)
            if outcome.private is not None:
                REAL.write(
                    f"{order.output_folder}/{order.file_prefix}{PRIVATE_FILE}", made.private[outcome.private.sha256]
                )
        found.append(WorkOutcome(replace(outcome, blobs=small), done.joint))
    return WorkerReply(found)
