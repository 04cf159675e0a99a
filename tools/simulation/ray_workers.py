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
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from fedquilt import extras
from fedquilt.core import JobError, StoreError
from fedquilt.edge_agent.task.protocol import PRIVATE_FILE, WorkRequest
from fedquilt.host.disk import REAL, disk_errors
from fedquilt.tools.simulation import adversaries, machines, processes
from fedquilt.tools.simulation.machines import Machine
from fedquilt.tools.simulation.pool import (
    MALLOC_ENV,
    RAY_SCHEME,
    SINGLE_THREAD_ENV,
    PoolError,
    PoolSetup,
    SharedFolder,
    WorkBatch,
    WorkerReply,
    WorkOutcome,
)

log = logging.getLogger("fedquilt.simulation")

OBJECT_STORE_BYTES: Final = 256 << 20  # object store memory of a Ray started here, which stores larger contents on disk
CONNECT_TIMEOUT_S: Final = 10.0  # seconds to connect to a client server
CONNECT_ATTEMPTS: Final = 3
NO_USAGE_STATS_ENV: Final = {"RAY_USAGE_STATS_ENABLED": "0"}  # Ray reports nothing to its developers
# Ray listens on 127.0.0.1 only, and its workers have the priority of this process instead of niceness 15.
LOCAL_RAY_ENV: Final = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_worker_niceness": "0"}

VERSION_MISMATCH: Final = re.compile(r"Ray: (\S+) Python: (\S+)")  # of the cluster, then of this process
TOKEN_AUTH_ENV: Final = {"RAY_AUTH_MODE": "token"}
MAX_SHARED_BYTES: Final = 1 << 30  # files of a node without the examples; the least recently used are removed first
Fetch = Callable[[Any], bytes]  # returns the content of an object reference
CHUNK_BYTES: Final = 16 << 20  # of the examples' file
MAX_REFERENCES: Final = 8  # kept in the object store; a round needs one to three
NODE_POLL_S: Final = 5.0  # interval of queries for the nodes
START_TIMEOUT_S: Final = 60.0  # seconds to wait for workers without a free processor, if others are ready
MAX_FAILED_STARTS: Final = 3  # consecutive failures after which no worker is started on the node
STOP_TIMEOUT_S: Final = 5.0


def find_ray_address(environ: Mapping[str, str]) -> str | None:
    """Return the address of the Ray cluster that this machine is a node of, or None.

    The address is RAY_ADDRESS, or the one that `ray start` has stored. Ray itself would also accept a cluster that
    another program has started for its own use.
    """
    if address := environ.get("RAY_ADDRESS"):
        return address
    address_file = Path(environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")  # noqa: S108
    try:
        return address_file.read_text().strip() or None
    except OSError:
        return None


def connect_to_ray(engine: str, processors: int | None) -> tuple[Any, bool, bool]:
    """Import Ray, and connect to a cluster unless this process is connected already.

    Returns:
        The module, whether the connection was opened here, and whether this Ray was started for the run.
    """
    address = engine if engine != "ray" else find_ray_address(os.environ)
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if not address:
        options |= {
            "num_cpus": processors or len(os.sched_getaffinity(0)),
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_node_ip_address": "127.0.0.1",
        }
    needs_token = engine.startswith(RAY_SCHEME) and "RAY_AUTH_MODE" not in os.environ and _has_token(os.environ)
    environment = {
        **NO_USAGE_STATS_ENV,
        **({} if address else {**SINGLE_THREAD_ENV, **MALLOC_ENV, **LOCAL_RAY_ENV}),
        **(TOKEN_AUTH_ENV if needs_token else {}),
    }
    with _set_environment(environment):
        ray = extras.load_optional("ray")
        if ray.is_initialized():
            return ray, False, False
        try:
            host, colon, port = (address or "").removeprefix(RAY_SCHEME).rpartition(":")
            if colon and port.isdigit():  # fails fast, because Ray waits minutes for an unreachable cluster
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
            if needs_token:
                ray._raylet.Config.initialize("")  # reads the environment again if Ray was imported earlier
            _init_ray(ray, address, options)
        except (OSError, RuntimeError, ValueError, ImportError, ray.exceptions.RayError) as error:
            raise PoolError(_format_connection_error(ray, address, " ".join(str(error).split()))) from None
    return ray, True, not address


def _has_token(environ: Mapping[str, str]) -> bool:
    # a head node enables tokens if it finds one, but a client needs TOKEN to send it
    path = Path(environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return bool(environ.get("RAY_AUTH_TOKEN")) or path.is_file()


def _format_connection_error(ray: Any, address: str | None, error_text: str) -> str:
    if not address:
        return f"Ray does not start ({error_text[:300]}): use `fedquilt simulate --engine pool`, which needs no Ray"
    versions = VERSION_MISMATCH.findall(error_text)
    if len(versions) == 2:
        (cluster_version, cluster_python), (local_version, local_python) = versions
        return (
            f"the cluster at {address} runs Ray {cluster_version} on Python {cluster_python}, but this command Ray "
            f"{local_version} on Python {local_python}: install 'ray[client]=={cluster_version}' on Python "
            f"{cluster_python} here, or this command's versions on all nodes"
        )
    return (
        f"no Ray cluster answers at {address} ({error_text[:300]}): start one there with the same Python, Ray "
        f"{ray.__version__} and the same token (~/.ray/auth_token), or name its client server, {RAY_SCHEME}HOST:10001. "
        "`ray stop` clears the address of an ended cluster"
    )


def _init_ray(ray: Any, address: str | None, options: Mapping[str, Any]) -> None:
    # the first process of a client server sometimes ends during its start, so the connection is tried again
    for remaining in reversed(range(CONNECT_ATTEMPTS)):
        try:
            with _restore_sigterm_handler():
                ray.init(address=address or "local", **options)
            return
        except ConnectionAbortedError as error:
            if not remaining:
                raise
            log.warning("client server at %s refused the connection (%s), trying again", address, error)


@contextlib.contextmanager
def _set_environment(variables: Mapping[str, str]) -> Iterator[None]:
    old_values = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables.keys() - old_values.keys():
            del os.environ[name]
        os.environ.update(old_values)


@contextlib.contextmanager
def _restore_sigterm_handler() -> Iterator[None]:
    # ray.init replaces the handler
    old_handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # not in the main thread, where Ray replaces no handler
            signal.signal(signal.SIGTERM, old_handler)


class WorkerSetup(msgspec.Struct, frozen=True):
    engine: str
    modules: tuple[str, ...]  # of plug-ins, for the digests in `Machine.code`
    folder: str  # name of the folder that the workers of a node share


def unpack_request(request: WorkRequest, path_of_hash: Callable[[str], str], cache: str, out: str) -> WorkRequest:
    """Return the work request with paths of this machine. `path_of_hash` returns the path of a sha256."""
    if (honest_hash := adversaries.get_honest_mean_path(request)) is not None:
        request = adversaries.add_honest_mean(request, path_of_hash(honest_hash))
    return replace(
        request,
        bundles={name: path_of_hash(sha256) for name, sha256 in request.bundles.items()},
        private_state=None if request.private_state is None else path_of_hash(request.private_state),
        cache_folder=f"{cache}/{request.device}",
        output_folder=out,
    )


class NodeFiles:
    """Content-addressed files that the workers of a node share.

    Files in use are also linked into the worker's own folder.
    """

    def __init__(self, folder: Path, own_folder: Path, fetch: Fetch, max_bytes: int = MAX_SHARED_BYTES) -> None:
        self._shared_folder, self._own_folder = folder / "files", own_folder
        self._fetch, self._max_bytes = fetch, max_bytes
        for path in (self._shared_folder, own_folder):
            path.mkdir(exist_ok=True)

    def ensure_file(self, sha256: str, reference: Any) -> str:
        """Return the path of a file with this sha256, fetched from the object store if missing."""
        path = self._own_folder / sha256
        if not path.exists():
            try:
                os.link(self._shared_folder / sha256, path)
                os.utime(path)
            except FileNotFoundError:
                self.store_file(sha256, self._fetch(reference))
        return str(path)

    def store_file(self, sha256: str, payload: bytes) -> None:
        if hashlib.sha256(payload).hexdigest() != sha256:
            raise StoreError(f"content {sha256[:12]} is damaged in the object store: start the command again")
        partial_path = self._own_folder / "part"
        partial_path.write_bytes(payload)
        os.replace(partial_path, self._own_folder / sha256)
        with contextlib.suppress(FileExistsError):
            os.link(self._own_folder / sha256, self._shared_folder / sha256)

    def evict_files(self, used_hashes: Sequence[str]) -> None:
        """Remove the worker's files that are not in `used_hashes`, and the oldest shared ones above the limit."""
        for each in os.scandir(self._own_folder):
            if each.name not in used_hashes:
                os.unlink(each.path)
        shared_files = []
        for each in os.scandir(self._shared_folder):
            with contextlib.suppress(FileNotFoundError):  # another worker removed the file
                shared_files.append((each.stat().st_mtime, each.stat().st_size, each.path))
        total_bytes = sum(size for _, size, _ in shared_files)
        for _, size, path in sorted(shared_files):
            if total_bytes <= self._max_bytes:
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total_bytes -= size


class RayNode:
    """Worker of a pool as an actor on a node of a Ray cluster. All methods take and return msgpack bytes."""

    def __init__(self, setup: bytes) -> None:
        import ray

        self._setup = msgspec.msgpack.decode(setup, type=WorkerSetup)
        self._fetch: Fetch = ray.get
        self._worker: processes.PoolWorker | None = None

    def describe_machine(self) -> bytes:
        """Import the engine, and return the encoded `machines.Machine` of this node."""
        machine = machines.describe_this_machine(self._setup.modules)
        processes.import_engine(self._setup.engine)
        self._shared_folder = SharedFolder(self._setup.folder)
        self._own_folder = self._shared_folder.path / f"worker-{os.getpid()}"
        self._output_folder = self._shared_folder.path / f"made-{os.getpid()}"
        self._files = NodeFiles(self._shared_folder.path, self._own_folder, self._fetch)
        return msgspec.msgpack.encode(machine)

    def load_examples(self, setup_message: bytes, chunks: Sequence[Any]) -> bytes:
        # only the first worker of a node fetches the examples
        setup = msgspec.msgpack.decode(setup_message, type=PoolSetup)
        path = self._shared_folder.path / "examples"
        with (self._shared_folder.path / "examples.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                self._fetch_examples(path, setup.examples, chunks)
        self._worker = processes.PoolWorker(replace(setup, examples=str(path)))
        return b""

    def run_batch(self, batch_message: bytes, object_references: Sequence[Any]) -> bytes:
        """Run work requests and return an encoded `WorkerReply`."""
        batch = msgspec.msgpack.decode(batch_message, type=WorkBatch)
        reference_of_hash = dict(zip(batch.file_hashes, object_references, strict=True))
        cache_folder = f"{self._shared_folder.path}/caches"

        def find(sha256: str) -> str:
            return self._files.ensure_file(sha256, reference_of_hash[sha256])

        requests = tuple(
            unpack_request(request, find, cache_folder, str(self._output_folder)) for request in batch.requests
        )
        assert self._worker is not None
        reply = self._worker.run_batch(WorkBatch(requests, batch.batched))
        for outcome in reply.outcomes:
            if outcome.result.code == "disk":
                raise StoreError(outcome.result.reason)
        private_states = {}
        for request, outcome in zip(requests, reply.outcomes, strict=True):
            if (private_ref := outcome.result.private) is not None:
                payload = Path(f"{request.output_folder}/{request.file_prefix}{PRIVATE_FILE}").read_bytes()
                private_states[private_ref.sha256] = payload
                self._files.store_file(private_ref.sha256, payload)
        self._files.evict_files(batch.file_hashes)
        shutil.rmtree(self._output_folder, ignore_errors=True)
        return msgspec.msgpack.encode(replace(reply, private_states=private_states))

    def release_files(self) -> bytes:
        """Delete this worker's files, and the node's if no other worker uses them. The reply is empty."""
        for each in (self._own_folder, self._output_folder):
            shutil.rmtree(each, ignore_errors=True)
        self._shared_folder.release()
        return b""

    def _fetch_examples(self, path: Path, sha256: str, chunks: Sequence[Any]) -> None:
        digest, part = hashlib.sha256(), path.with_suffix(".part")
        with part.open("wb") as file:
            for chunk in chunks:
                payload = self._fetch(chunk)
                digest.update(payload)
                file.write(payload)
        if digest.hexdigest() != sha256:
            raise StoreError("the examples are damaged in the object store: start the command again")
        os.replace(part, path)


@dataclass
class RayWorkerHandle:
    actor: Any
    node_id: str
    state: Literal["starting", "loading", "ready"] = "starting"
    requests: Sequence[WorkRequest] = ()
    references: list[Any] = field(default_factory=list)  # keeps the objects of the requests alive


class RayWorkers:
    def __init__(
        self, engine: str, address: str, *, count: int | None, mixed: bool, modules: Collection[str] = ()
    ) -> None:
        if count is not None and count < 1:
            raise JobError(f"{count} workers: use at least 1")
        self._engine, self._address, self._count = engine, address, count
        self._mixed, self._modules = mixed, tuple(sorted(modules))
        self._ray: Any = None
        self._connected = self._is_local = False
        self._workers: dict[int, RayWorkerHandle] = {}
        self._worker_of_call: dict[Any, int] = {}  # by the reference of the reply
        self._next_number = 0
        self._folder = f"ray-{secrets.token_hex(8)}"
        self._examples, self._setup_message = "", b""  # path of the examples, and the encoded `PoolSetup`
        self._example_chunks: list[Any] = []  # references, empty when no worker fetches the examples
        self._references: dict[str, Any] = {}  # by sha256, the most recently used last
        self._failed_starts: Counter[str] = Counter()  # consecutive, by node id
        self._node_names: dict[str, str] = {}  # by node id
        self._last_error = ""  # error text of the last lost worker
        self._has_started = False
        self._last_poll_s = 0.0
        self.machines: dict[str, Machine] = {}

    def start(self, folder: Path) -> None:
        self._ray, self._connected, self._is_local = connect_to_ray(self._address, self._count)
        nodes = self._list_nodes()
        processors = sum(nodes.values())
        if self._count is not None and self._count > processors:
            raise JobError(
                f"{self._count} workers: the Ray cluster has {processors} processors: use --workers {processors}"
            )
        self._actor = self._ray.remote(RayNode)
        self._start_workers(self._count or processors, nodes)

    def send_setup(self, setup: PoolSetup) -> None:
        # each node receives the examples when its first worker has reported
        self._examples = setup.examples
        self._setup_message = msgspec.msgpack.encode(replace(setup, examples=REAL.hash_file(setup.examples)))

    def wait_until_ready(self) -> None:
        """Wait until all workers are ready, or after START_TIMEOUT_S until at least one is."""
        started_s = time.monotonic()
        while any(each.state != "ready" for each in self._workers.values()) or not self._workers:
            for _ in self.receive_replies(block=True):
                raise AssertionError("no worker has requests yet")
            if time.monotonic() > started_s + START_TIMEOUT_S and any(self.ready):
                log.warning(
                    "%d of %d workers are ready: the cluster has no free processor for the others",
                    len(self.ready),
                    len(self._workers),
                )
                break
        self._has_started = True

    @property
    def ready(self) -> list[int]:
        return [number for number, each in self._workers.items() if each.state == "ready"]

    def send_work(self, worker: int, work: WorkBatch) -> None:
        # workers on Ray do not fold updates, because they have no state of the round
        pairs = [pack_request(request) for request in work.requests]
        files = {sha256: path for _, paths in pairs for sha256, path in paths.items()}
        shared = {ref.sha256 for request in work.requests for ref in request.task.bundles.values()}
        references = [self._get_object_reference(sha256, path, sha256 in shared) for sha256, path in files.items()]
        batch = WorkBatch(tuple(request for request, _ in pairs), work.batched, file_hashes=tuple(files))
        handle = self._workers[worker]
        handle.requests, handle.references = work.requests, references
        self._worker_of_call[handle.actor.run_batch.remote(msgspec.msgpack.encode(batch), references)] = worker

    def receive_replies(self, *, block: bool) -> Iterator[tuple[int, WorkerReply | None]]:
        # lost workers are replaced while their node is alive
        if block and not self._worker_of_call:
            self._replace_lost_workers()
        for reference in self._wait_for_calls(NODE_POLL_S if block else 0.0):
            worker = self._worker_of_call.pop(reference)
            handle = self._workers[worker]
            requests, handle.requests, handle.references = handle.requests, (), []
            try:
                reply = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                self._remove_worker(worker, error)
                if requests:
                    yield worker, None
                continue
            if handle.state == "ready":
                yield worker, write_outputs(requests, msgspec.msgpack.decode(reply, type=WorkerReply))
            else:
                self._advance_startup(worker, handle, reply)
        if block and time.monotonic() > self._last_poll_s + NODE_POLL_S:
            self._replace_lost_workers()

    def stop(self, *, immediately: bool) -> None:
        if self._ray is None or not self._ray.is_initialized():
            return
        with contextlib.suppress(Exception):  # an unreachable cluster has ended the workers
            if not immediately:
                calls = [w.actor.release_files.remote() for w in self._workers.values() if w.state != "starting"]
                if calls:
                    self._ray.wait(calls, num_returns=len(calls), timeout=STOP_TIMEOUT_S)
            for each in self._workers.values():
                self._ray.kill(each.actor)
        self._workers, self._worker_of_call, self._references, self._example_chunks = {}, {}, {}, []
        if self._connected:
            self._ray.shutdown()

    def _list_nodes(self) -> dict[str, int]:
        processors_of_node = {}
        for node in self._ray.nodes():
            if node["Alive"] and (processors := int(node["Resources"].get("CPU", 0))):
                processors_of_node[node["NodeID"]] = processors
                node_name = node.get("NodeName") or node["NodeManagerAddress"]
                self._node_names[node["NodeID"]] = f"{node_name} (Ray node {node['NodeID'][:8]})"
        return processors_of_node

    def _start_workers(self, missing_workers: int, nodes: Mapping[str, int]) -> None:
        # distributed evenly over nodes, without those on which several workers have failed to start
        free_processors = {
            node: processors - sum(each.node_id == node for each in self._workers.values())
            for node, processors in nodes.items()
            if self._failed_starts[node] < MAX_FAILED_STARTS
        }
        while missing_workers > 0 and (
            nodes_with_room := [node for node, processors in free_processors.items() if processors > 0]
        ):
            for node in nodes_with_room[:missing_workers]:
                free_processors[node] -= 1
                missing_workers -= 1
                self._start_worker(node)

    def _start_worker(self, node_id: str) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        folder = f"{self._folder}-{node_id[:12]}"
        setup = WorkerSetup(self._engine, self._modules, folder)
        actor = self._actor.options(
            num_cpus=1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            runtime_env=None if self._is_local else {"env_vars": {**MALLOC_ENV, **SINGLE_THREAD_ENV}},
        ).remote(msgspec.msgpack.encode(setup))
        self._workers[self._next_number] = RayWorkerHandle(actor, node_id)
        self._worker_of_call[actor.describe_machine.remote()] = self._next_number
        self._next_number += 1

    def _wait_for_calls(self, timeout_s: float) -> list[Any]:
        if not self._worker_of_call:
            return []
        calls = list(self._worker_of_call)
        ready_calls, _ = self._ray.wait(calls, num_returns=1, timeout=timeout_s)
        return self._ray.wait(calls, num_returns=len(calls), timeout=0)[0] if ready_calls else []

    def _advance_startup(self, worker: int, handle: RayWorkerHandle, reply: bytes) -> None:
        if handle.state == "loading":
            handle.state, self._failed_starts[handle.node_id] = "ready", 0
            if not any(each.state == "loading" for each in self._workers.values()):
                self._example_chunks = []
            return
        if not self._admit_machine(worker, handle, reply):
            return
        handle.state = "loading"
        if not self._example_chunks:
            with open(self._examples, "rb") as file:
                self._example_chunks = [self._ray.put(chunk) for chunk in iter(lambda: file.read(CHUNK_BYTES), b"")]
        self._worker_of_call[handle.actor.load_examples.remote(self._setup_message, self._example_chunks)] = worker

    def _admit_machine(self, worker: int, handle: RayWorkerHandle, reply: bytes) -> bool:
        node_name = self._node_names[handle.node_id]
        try:
            try:
                machine = msgspec.msgpack.decode(reply, type=Machine)
            except msgspec.ValidationError as error:
                raise JobError(
                    f"{node_name} has another version of fedquilt ({error}): install this machine's version there"
                ) from None
            local_machine = machines.describe_this_machine(self._modules)
            machines.require_same_results({"this machine": local_machine}, node_name, machine, mixed=True)
            machines.require_same_results(self.machines, node_name, machine, mixed=self._mixed)
        except JobError as error:
            if not self._has_started:
                raise
            if self._failed_starts[handle.node_id] < MAX_FAILED_STARTS:
                log.warning("%s is left out: %s", node_name, error)
            self._failed_starts[handle.node_id] = MAX_FAILED_STARTS
            self._ray.kill(self._workers.pop(worker).actor)
            return False
        self.machines.setdefault(node_name, machine)
        return True

    def _remove_worker(self, worker: int, error: BaseException) -> None:
        handle = self._workers.pop(worker)
        node_name = self._node_names[handle.node_id]
        self._last_error = " ".join(str(error).split())[-500:]
        if handle.state != "ready":
            self._failed_starts[handle.node_id] += 1
        log.warning("lost a worker on %s, its requests go to another worker: %s", node_name, self._last_error)
        with contextlib.suppress(Exception):
            self._ray.kill(handle.actor)
        self._replace_lost_workers()

    def _replace_lost_workers(self) -> None:
        self._last_poll_s = time.monotonic()
        try:
            nodes = self._list_nodes()
        except Exception as error:  # the cluster's head node is unreachable
            raise PoolError(f"the Ray cluster is lost ({error}): start the command again to resume") from None
        self._start_workers((self._count or sum(nodes.values())) - len(self._workers), nodes)
        if not self._workers:
            raise PoolError(
                f"no worker is left on the Ray cluster (last error: {self._last_error or 'none'}): start the command "
                "again when the cluster has nodes, to resume"
            )

    def _get_object_reference(self, sha256: str, path: str, is_shared: bool) -> Any:
        # references of files that many devices need are cached
        if sha256 in self._references:
            self._references[sha256] = self._references.pop(sha256)
            return self._references[sha256]
        reference = self._ray.put(Path(path).read_bytes())
        if is_shared:
            self._references[sha256] = reference
            while len(self._references) > MAX_REFERENCES:
                del self._references[next(iter(self._references))]
        return reference


def pack_request(request: WorkRequest) -> tuple[WorkRequest, dict[str, str]]:
    """Return a work request without paths, and the path of each file by sha256."""
    files = {request.task.bundles[name].sha256: path for name, path in request.bundles.items()}
    private_hash = None
    if request.private_state is not None:
        private_hash = REAL.hash_file(request.private_state)
        files[private_hash] = request.private_state
    if (honest_path := adversaries.get_honest_mean_path(request)) is not None:
        files[REAL.hash_file(honest_path)] = honest_path
        request = adversaries.add_honest_mean(request, REAL.hash_file(honest_path))
    bundles = {name: request.task.bundles[name].sha256 for name in request.bundles}
    request = replace(request, bundles=bundles, private_state=private_hash, max_inline_bytes=sys.maxsize)
    return replace(request, cache_folder="", output_folder=""), files


def write_outputs(requests: Sequence[WorkRequest], reply: WorkerReply) -> WorkerReply:
    """Write a remote worker's large outputs into the requests' folders, and return the rest as a reply."""
    outcomes = []
    for request, worker_outcome in zip(requests, reply.outcomes, strict=True):
        result, small_blobs = worker_outcome.result, {}
        prefix = f"{request.output_folder}/{request.file_prefix}"
        with disk_errors(f"write into {request.output_folder}"):
            for sha256, payload in result.blobs.items():
                if len(payload) < request.max_inline_bytes:
                    small_blobs[sha256] = payload
                else:
                    REAL.write(f"{prefix}{sha256}", payload)
            if result.private is not None:
                REAL.write(f"{prefix}{PRIVATE_FILE}", reply.private_states[result.private.sha256])
        outcomes.append(WorkOutcome(replace(result, blobs=small_blobs), worker_outcome.batchable))
    return WorkerReply(outcomes)
