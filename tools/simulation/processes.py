"""Workers of a pool as processes on this machine.

The first process imports the engine's library and forks the others, so all share its memory.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import mmap
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import partial, reduce
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import structs

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.core import DeviceUpdate, Examples, JobError, Method
from fedquilt.edge_agent.engines import failures
from fedquilt.edge_agent.task import memory_budget
from fedquilt.edge_agent.task.process import exit_with_parent
from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult
from fedquilt.host.disk import write_fully
from fedquilt.tools.simulation import machines
from fedquilt.tools.simulation.local_backend import SharedTensors, WorkExecutor, make_engine, run_requests
from fedquilt.tools.simulation.pool import (
    MALLOC_ENV,
    SINGLE_THREAD_ENV,
    ArrayLocation,
    PoolError,
    PoolSetup,
    WorkBatch,
    WorkerReply,
    WorkerSum,
    WorkOutcome,
)

TRACEBACK: Final = "Traceback (most recent call last)"  # marks a worker that an exception has ended
MAX_WORKERS: Final = 256  # each worker needs two open files of this process


class ProcessWorkers:
    """Workers as processes that end with this process.

    All methods raise PoolError if a worker has ended unexpectedly.
    """

    def __init__(self, engine: str, count: int, modules: Collection[str] = ()) -> None:
        if not 1 <= count <= MAX_WORKERS:
            raise JobError(f"{count} workers: use 1 to {MAX_WORKERS}, and at most one for each core")
        self._engine, self._count = engine, count
        self._pipes: list[Connection] = []
        self._blob_files: list[int] = []  # memory files, one for each worker
        self._process: subprocess.Popen[bytes] | None = None
        self._oom_kills = memory_budget.count_oom_kills()
        self.machines = {
            machines.get_machine_name(): machines.describe_this_machine(modules, SINGLE_THREAD_ENV["OMP_NUM_THREADS"])
        }

    def start(self, folder: Path) -> None:
        self._log_path = folder / "workers.log"
        pipe_pairs = [Pipe() for _ in range(self._count)]
        self._pipes, worker_ends = [own_end for own_end, _ in pipe_pairs], [worker_end for _, worker_end in pipe_pairs]
        self._blob_files = [os.memfd_create("fedquilt-blobs") for _ in worker_ends]
        pairs = [(end.fileno(), blobs) for end, blobs in zip(worker_ends, self._blob_files, strict=True)]
        command = [sys.executable, "-m", "fedquilt.tools.simulation.processes", str(os.getpid()), self._engine]
        with self._log_path.open("wb") as log_file:
            self._process = subprocess.Popen(
                [*command, *(f"{end}:{blobs}" for end, blobs in pairs)],
                pass_fds=[number for pair in pairs for number in pair],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env={**MALLOC_ENV, **os.environ, **SINGLE_THREAD_ENV},
            )
        for end in worker_ends:
            end.close()
        self._selector = selectors.DefaultSelector()
        for index, pipe in enumerate(self._pipes):
            self._selector.register(pipe, selectors.EVENT_READ, index)

    def send_setup(self, setup: PoolSetup) -> None:
        payload = msgspec.msgpack.encode(setup)
        for pipe in self._pipes:
            self._send_message(pipe, payload)

    def wait_until_ready(self) -> None:
        for pipe in self._pipes:
            self._send_message(pipe, msgspec.msgpack.encode(WorkBatch()))
        for pipe in self._pipes:
            self._receive_message(pipe)

    @property
    def pid(self) -> int:
        """Process id of the first worker, the parent of all other workers."""
        assert self._process is not None
        return self._process.pid

    @property
    def ready(self) -> range:
        # a pipe buffers the requests of a worker that is still starting
        return range(self._count)

    def send_work(self, worker: int, work: WorkBatch) -> None:
        self._send_message(self._pipes[worker], msgspec.msgpack.encode(work))

    def receive_replies(self, *, block: bool) -> Iterator[tuple[int, WorkerReply | WorkerSum | None]]:
        for key, _ in self._selector.select(None if block else 0):
            reply = REPLY_DECODER.decode(self._receive_message(self._pipes[key.data]))
            yield key.data, reply.read_from_file(self._blob_files[key.data])

    def stop(self, *, immediately: bool) -> None:
        self._selector.close()
        for pipe in self._pipes:
            pipe.close()
        for blob_file in self._blob_files:
            os.close(blob_file)
        if self._process is not None:
            if immediately:
                self._process.kill()
            self._process.wait()

    def _send_message(self, connection: Connection, payload: bytes) -> None:
        try:
            connection.send_bytes(payload)
        except OSError:
            raise self._make_worker_error() from None

    def _receive_message(self, connection: Connection) -> bytes:
        try:
            return connection.recv_bytes()
        except (EOFError, OSError):
            raise self._make_worker_error() from None

    def _make_worker_error(self) -> PoolError:
        # only the exit status of the first process is available, because it is the parent of all workers
        log_text = self._log_path.read_text(errors="replace").strip()
        last_line = log_text.splitlines()[-1][-500:] if log_text else "(no output)"
        fix = f"use fewer --workers than {self._count}" if self._count > 1 else "use a smaller network or batch"
        if failures.is_out_of_memory_text(log_text):
            return PoolError(f"a worker of the pool ran out of memory (last line: {last_line}): {fix}")
        if TRACEBACK in log_text:
            return PoolError(f"a worker of the pool ended: {last_line}")
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        status = self._process.poll()
        if status is not None and status not in (0, -signal.SIGKILL):
            end_description = f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with code {status}"
            return PoolError(f"a worker of the pool {end_description}: {last_line}")
        kills = memory_budget.count_oom_kills()
        if kills is not None and self._oom_kills is not None and kills > self._oom_kills:
            return PoolError(f"a worker of the pool was killed, most likely because memory ran out: {fix}")
        return PoolError(f"a worker of the pool was killed (SIGKILL): start again, or if memory ran out {fix}")


class DetachedResult(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Reply whose blobs are in a memory file, one after another.

    A pipe would block both sides, because its buffer is smaller than a reply can be.
    """

    reply: WorkerReply
    blob_sizes: list[list[tuple[str, int]]]  # sha256 and size of the blobs of each outcome

    @staticmethod
    def from_reply(reply: WorkerReply) -> DetachedResult:
        outcomes_without_blobs = [
            WorkOutcome(structs.replace(outcome.result, blobs={}), outcome.batchable) for outcome in reply.outcomes
        ]
        sizes = [
            [(sha256, len(payload)) for sha256, payload in outcome.result.blobs.items()] for outcome in reply.outcomes
        ]
        return DetachedResult(WorkerReply(outcomes_without_blobs, reply.has_sum), sizes)

    def read_from_file(self, file: int) -> WorkerReply:
        size = sum(size for sizes in self.blob_sizes for _, size in sizes)
        if not size:
            return self.reply
        offset = 0
        outcomes = []
        with mmap.mmap(file, size, prot=mmap.PROT_READ) as view:
            for outcome, sizes in zip(self.reply.outcomes, self.blob_sizes, strict=True):
                blobs_by_hash = {}
                for sha256, size in sizes:
                    blobs_by_hash[sha256] = view[offset : offset + size]
                    offset += size
                if blobs_by_hash:
                    outcome = structs.replace(outcome, result=structs.replace(outcome.result, blobs=blobs_by_hash))
                outcomes.append(outcome)
            return WorkerReply(outcomes, self.reply.has_sum)


class SharedMemorySum(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Location of a sum in a memory file. The sum must be read before the worker receives new work."""

    offset: int
    size: int

    def read_from_file(self, file: int) -> WorkerSum:
        return WorkerSum(os.pread(file, self.size, self.offset))


REPLY_DECODER: Final = msgspec.msgpack.Decoder(DetachedResult | SharedMemorySum)


class OutcomeSums:
    """Partial sums of updates, folded by the workers so that the coordinator merges few sums.

    Only updates with mergeable accumulators (`Aggregation.accumulator`) are summed, because their sums are
    bit-identical in any order and grouping. A sum is used only if the round accepts exactly these updates
    (`coordinator.updates.aggregation`). Otherwise the updates are folded one by one.
    """

    def __init__(self) -> None:
        self._cached_state: tuple[str, Any] = ("", None)  # path and content of the last state file
        self._pending_sum: tuple[Method, list[DeviceUpdate]] | None = None  # for the next `pack_sum`

    def prepare_sum(self, state_path: str, requests: Sequence[WorkRequest], results: Sequence[WorkResult]) -> bool:
        """Validate updates for the next `pack_sum`. Return whether they can be summed."""
        self._pending_sum = None
        with contextlib.suppress(Exception):  # the coordinator folds the same updates and reports the error
            if not state_path:
                return False
            method = methods.load(requests[0].task.method)
            if self._cached_state[0] != state_path:
                self._cached_state = state_path, tensors.unpack_state(Path(state_path).read_bytes(), method.state)
            if method.aggregation.accumulator(self._cached_state[1]) is None:
                return False
            results_of_requests = zip(requests, results, strict=True)
            updates = [_read_update(request, result) for request, result in results_of_requests if result.code == "ok"]
            for update in updates:
                method.aggregation.require_valid_update(self._cached_state[1], update)
            self._pending_sum = (method, updates) if updates else None
        return self._pending_sum is not None

    def pack_sum(self) -> bytes:
        """Return the packed sum of the prepared updates, or b"" if they cannot be summed."""
        pending_sum, self._pending_sum = self._pending_sum, None
        with contextlib.suppress(Exception):  # the coordinator then folds these updates one by one
            assert pending_sum is not None
            method, updates = pending_sum
            return tensors.pack_state(reduce(partial(method.aggregation.fold, self._cached_state[1]), updates, None))
        return b""


def _read_update(request: WorkRequest, result: WorkResult) -> DeviceUpdate:
    bundles = {name: tensors.decode_tensors(result.blobs[ref.sha256]) for name, ref in result.bundles.items()}
    return DeviceUpdate(request.device, request.task.round, result.weight, result.metrics, bundles)


class PoolWorker(WorkExecutor):
    def __init__(self, setup: PoolSetup) -> None:
        super().__init__(self._load_device_examples, create_engine=make_engine)
        self._shards, self._examples_file = setup.shards, os.open(setup.examples, os.O_RDONLY)
        self._tensor_cache, self.sums = SharedTensors(), OutcomeSums()

    def run_batch(self, work: WorkBatch) -> WorkerReply:
        # if the reply promises a sum, `sums.pack_sum` returns it next
        outcomes = [
            WorkOutcome(*outcome)
            for outcome in run_requests([(self, request) for request in work.requests], work.batched)
        ]
        return WorkerReply(
            outcomes, self.sums.prepare_sum(work.state_path, work.requests, [outcome.result for outcome in outcomes])
        )

    def read_tensors(self, path: str, sha256: str) -> dict[str, np.ndarray]:
        return self._tensor_cache(path, partial(tensors.read_tensors, sha256=sha256))

    def _load_device_examples(self, device: str) -> tuple[Examples, Examples]:
        # read, not mapped: mapped pages would count as memory of this process
        train, held_out = (
            Examples(self._read_array(x), self._read_array(y))
            for x, y in (self._shards[device].train, self._shards[device].held_out)
        )
        return train, held_out

    def _read_array(self, location: ArrayLocation) -> np.ndarray:
        array = np.empty(location.shape, location.dtype)
        if not array.nbytes:  # a memory view of nothing cannot be cast
            return array
        view, read_bytes = array.reshape(-1).view(np.uint8).data, 0
        while read_bytes < array.nbytes:
            read_bytes += os.preadv(self._examples_file, [view[read_bytes:]], location.offset + read_bytes)
        return array


def import_engine(engine: str) -> None:
    """Import the modules of an engine, so that forked workers share their memory."""
    module = {"torch": "torch.batch_engine", "numpy": "batch_training"}.get(engine, f"{engine}_engine")
    importlib.import_module(f"fedquilt.edge_agent.engines.{module}")
    gc.freeze()  # garbage collections need not visit imported objects


def serve_requests(connection: Connection, blob_file: int) -> None:
    """Run work requests from a pipe until the pipe is closed."""
    messages = receive_messages(connection)
    if (setup_message := next(messages, None)) is None:
        return
    worker = PoolWorker(msgspec.msgpack.decode(setup_message, type=PoolSetup))
    decoder, encoder = msgspec.msgpack.Decoder(WorkBatch), msgspec.msgpack.Encoder()
    for message in messages:
        reply = worker.run_batch(decoder.decode(message))
        offset = 0
        for outcome in reply.outcomes:
            for payload in outcome.result.blobs.values():
                write_fully(blob_file, payload, offset)
                offset += len(payload)
        connection.send_bytes(encoder.encode(DetachedResult.from_reply(reply)))
        if reply.has_sum:
            packed = worker.sums.pack_sum()
            write_fully(blob_file, packed, offset)
            connection.send_bytes(encoder.encode(SharedMemorySum(offset, len(packed))))


def receive_messages(connection: Connection) -> Iterator[bytes]:
    with contextlib.suppress(EOFError, OSError):  # OSError if the coordinator ends within a message
        while True:
            yield connection.recv_bytes()


def run_workers() -> None:
    """Serve requests in a process for each argument PIPE:BLOBS. The first arguments are PARENT and ENGINE."""
    exit_with_parent(int(sys.argv[1]))
    import_engine(sys.argv[2])
    pairs = [(int(pipe), int(blobs)) for pipe, _, blobs in (argument.partition(":") for argument in sys.argv[3:])]
    own_pair = pairs[0]
    children = []
    for pair in pairs[1:]:
        if pid := os.fork():
            children.append(pid)
            continue
        exit_with_parent(os.getppid())
        own_pair, children = pair, []
        break
    for pair in pairs:
        for number in pair if pair != own_pair else ():
            os.close(number)
    serve_requests(Connection(own_pair[0]), own_pair[1])
    for pid in children:
        os.waitpid(pid, 0)
    os._exit(0)  # regular exit of torch takes a second, and all results are sent


if __name__ == "__main__":
    run_workers()
