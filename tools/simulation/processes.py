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
    KEPT,
    SINGLE,
    ArrayLocation,
    PoolError,
    PoolSetup,
    WorkBatch,
    WorkerReply,
    WorkerSum,
    WorkOutcome,
)

TRACEBACK: Final = "Traceback (most recent call last)"  # before the last words of a worker that Python has ended
WORKERS_MOST: Final = 256  # each takes two open files of this process


class ProcessWorkers:
    """Workers as processes that end with this process.

    All methods raise PoolError if a worker has ended unexpectedly.
    """

    def __init__(self, engine: str, count: int, modules: Collection[str] = ()) -> None:
        if not 1 <= count <= WORKERS_MOST:
            raise JobError(f"{count} workers: 1 to {WORKERS_MOST} can be had, and one for each core is enough")
        self._engine, self._count = engine, count
        self._pipes: list[Connection] = []
        self._blobs: list[int] = []  # files in memory, one for each worker
        self._process: subprocess.Popen[bytes] | None = None
        self._oom_kills = memory_budget.count_oom_kills()
        self.machines = {
            machines.get_machine_name(): machines.describe_this_machine(modules, SINGLE["OMP_NUM_THREADS"])
        }

    def start(self, folder: Path) -> None:
        self._said = folder / "said"
        both = [Pipe() for _ in range(self._count)]
        self._pipes, ends = [ours for ours, _ in both], [theirs for _, theirs in both]
        self._blobs = [os.memfd_create("fedquilt-blobs") for _ in ends]
        pairs = [(end.fileno(), blobs) for end, blobs in zip(ends, self._blobs, strict=True)]
        command = [sys.executable, "-m", "fedquilt.tools.simulation.processes", str(os.getpid()), self._engine]
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                [*command, *(f"{end}:{blobs}" for end, blobs in pairs)],
                pass_fds=[number for pair in pairs for number in pair],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env={**KEPT, **os.environ, **SINGLE},
            )
        for end in ends:
            end.close()
        self._selector = selectors.DefaultSelector()
        for index, each in enumerate(self._pipes):
            self._selector.register(each, selectors.EVENT_READ, index)

    def send_setup(self, setup: PoolSetup) -> None:
        payload = msgspec.msgpack.encode(setup)
        for each in self._pipes:
            self._send_message(each, payload)

    def wait_until_ready(self) -> None:
        for each in self._pipes:
            self._send_message(each, msgspec.msgpack.encode(WorkBatch()))
        for each in self._pipes:
            self._receive_message(each)

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
            reply = FROM.decode(self._receive_message(self._pipes[key.data]))
            yield key.data, reply.read_from_file(self._blobs[key.data])

    def stop(self, *, now: bool) -> None:
        self._selector.close()
        for each in self._pipes:
            each.close()
        for blobs in self._blobs:
            os.close(blobs)
        if self._process is not None:
            if now:
                self._process.kill()
            self._process.wait()

    def _send_message(self, to: Connection, payload: bytes) -> None:
        try:
            to.send_bytes(payload)
        except OSError:
            raise self._make_worker_error() from None

    def _receive_message(self, of: Connection) -> bytes:
        try:
            return of.recv_bytes()
        except (EOFError, OSError):
            raise self._make_worker_error() from None

    def _make_worker_error(self) -> PoolError:
        # only the exit status of the first process is available, because it is the parent of all workers
        said = self._said.read_text(errors="replace").strip()
        words = f"it said: {said.splitlines()[-1][-500:] if said else '(nothing)'}"
        fewer = f"fewer --workers than {self._count}" if self._count > 1 else "a smaller network or batch"
        if failures.is_out_of_memory_text(said):
            return PoolError(f"a worker of the pool ran out of memory; {words}; give {fewer}")
        if TRACEBACK in said:
            return PoolError(f"a worker of the pool has ended; {words}")
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        status = self._process.poll()
        if status is not None and status not in (0, -signal.SIGKILL):
            how = f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with code {status}"
            return PoolError(f"a worker of the pool {how}; {words}")
        kills = memory_budget.count_oom_kills()
        if kills is not None and self._oom_kills is not None and kills > self._oom_kills:
            return PoolError(f"the kernel ran out of memory and killed a worker of the pool most likely: give {fewer}")
        return PoolError(
            "a worker of the pool was killed from outside (SIGKILL): start the command again; if it was for want of "
            f"memory, give {fewer}"
        )


class DetachedResult(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Reply whose blobs are in a memory file, one after another.

    A pipe would block both sides, because its buffer is smaller than a reply can be.
    """

    answer: WorkerReply
    blobs: list[list[tuple[str, int]]]  # sha256 and size of each outcome's

    @staticmethod
    def from_reply(answer: WorkerReply) -> DetachedResult:
        bare = [WorkOutcome(structs.replace(each.outcome, blobs={}), each.joint) for each in answer.done]
        sizes = [[(sha256, len(piece)) for sha256, piece in each.outcome.blobs.items()] for each in answer.done]
        return DetachedResult(WorkerReply(bare, answer.summed), sizes)

    def read_from_file(self, file: int) -> WorkerReply:
        size = sum(size for blobs in self.blobs for _, size in blobs)
        if not size:
            return self.answer
        at, done = 0, []
        with mmap.mmap(file, size, prot=mmap.PROT_READ) as view:
            for each, blobs in zip(self.answer.done, self.blobs, strict=True):
                found = {}
                for sha256, size in blobs:
                    found[sha256], at = view[at : at + size], at + size
                done.append(WorkOutcome(structs.replace(each.outcome, blobs=found), each.joint) if found else each)
            return WorkerReply(done, self.answer.summed)


class SharedMemorySum(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Location of a sum in a memory file. The sum must be read before the worker receives new work."""

    offset: int
    size: int

    def read_from_file(self, file: int) -> WorkerSum:
        return WorkerSum(os.pread(file, self.size, self.offset))


FROM: Final = msgspec.msgpack.Decoder(DetachedResult | SharedMemorySum)


class OutcomeSums:
    """Partial sums of updates, folded by the workers so that the coordinator merges few sums.

    Only updates with mergeable accumulators (`Aggregation.accumulator`) are summed, because their sums are
    bit-identical in any order and grouping. A sum counts only if the round counts exactly its updates
    (`coordinator.updates.aggregation`). Otherwise the updates are folded one by one.
    """

    def __init__(self) -> None:
        self._state: tuple[str, Any] = ("", None)  # the last one, and its file
        self._waiting: tuple[Method, list[DeviceUpdate]] | None = None  # what the next sum is of

    def prepare_sum(self, file: str, orders: Sequence[WorkRequest], outcomes: Sequence[WorkResult]) -> bool:
        """Validate updates for the next `pack_sum`. Return whether they can be summed."""
        self._waiting = None
        with contextlib.suppress(Exception):  # the coordinator folds the same updates and reports the error
            if not file:
                return False
            method = methods.load(orders[0].task.method)
            if self._state[0] != file:
                self._state = file, tensors.unpack_state(Path(file).read_bytes(), method.state)
            if method.aggregation.accumulator(self._state[1]) is None:
                return False
            done = zip(orders, outcomes, strict=True)
            given = [_read_update(order, outcome) for order, outcome in done if outcome.code == "ok"]
            for each in given:
                method.aggregation.require_valid_update(self._state[1], each)
            self._waiting = (method, given) if given else None
        return self._waiting is not None

    def pack_sum(self) -> bytes:
        """Return the packed sum of the prepared updates, or b"" if they cannot be summed."""
        waiting, self._waiting = self._waiting, None
        with contextlib.suppress(Exception):  # the coordinator folds these updates one by one then
            assert waiting is not None
            method, given = waiting
            return tensors.pack_state(reduce(partial(method.aggregation.fold, self._state[1]), given, None))
        return b""


def _read_update(order: WorkRequest, outcome: WorkResult) -> DeviceUpdate:
    bundles = {name: tensors.decode_tensors(outcome.blobs[ref.sha256]) for name, ref in outcome.bundles.items()}
    return DeviceUpdate(order.device, order.task.round, outcome.weight, outcome.metrics, bundles)


class PoolWorker(WorkExecutor):
    def __init__(self, setup: PoolSetup) -> None:
        super().__init__(self._load_device_examples, make=make_engine)
        self._shares_at, self._file = setup.shares, os.open(setup.examples, os.O_RDONLY)
        self._files, self.sums = SharedTensors(), OutcomeSums()

    def run_batch(self, work: WorkBatch) -> WorkerReply:
        # if the reply promises a sum, `sums.pack_sum` returns it next
        done = [WorkOutcome(*each) for each in run_requests([(self, order) for order in work.orders], work.together)]
        return WorkerReply(done, self.sums.prepare_sum(work.state, work.orders, [each.outcome for each in done]))

    def read_tensors(self, path: str, sha256: str) -> dict[str, np.ndarray]:
        return self._files(path, partial(tensors.read_tensors, sha256=sha256))

    def _load_device_examples(self, device: str) -> tuple[Examples, Examples]:
        # read, not mapped: mapped pages would count as memory of this process
        train, held = (
            Examples(self._read_array(x), self._read_array(y))
            for x, y in (self._shares_at[device].train, self._shares_at[device].held)
        )
        return train, held

    def _read_array(self, place: ArrayLocation) -> np.ndarray:
        found = np.empty(place.shape, place.dtype)
        if not found.nbytes:  # a memory view of nothing cannot be cast
            return found
        view, have = found.reshape(-1).view(np.uint8).data, 0
        while have < found.nbytes:
            have += os.preadv(self._file, [view[have:]], place.offset + have)
        return found


def import_engine(engine: str) -> None:
    module = {"torch": "torch.batch_engine", "numpy": "batch_training"}.get(engine, f"{engine}_engine")
    importlib.import_module(f"fedquilt.edge_agent.engines.{module}")
    gc.freeze()  # imported objects stay, so collections need not visit them


def serve_requests(orders: Connection, blobs: int) -> None:
    """Run work requests from a pipe until the pipe is closed."""
    messages = receive_messages(orders)
    if (first := next(messages, None)) is None:
        return
    worker = PoolWorker(msgspec.msgpack.decode(first, type=PoolSetup))
    decoder, encoder = msgspec.msgpack.Decoder(WorkBatch), msgspec.msgpack.Encoder()
    for order in messages:
        answer, place = worker.run_batch(decoder.decode(order)), 0
        for each in answer.done:
            for piece in each.outcome.blobs.values():
                write_fully(blobs, piece, place)
                place += len(piece)
        orders.send_bytes(encoder.encode(DetachedResult.from_reply(answer)))
        if answer.summed:
            packed = worker.sums.pack_sum()
            write_fully(blobs, packed, place)
            orders.send_bytes(encoder.encode(SharedMemorySum(place, len(packed))))


def receive_messages(orders: Connection) -> Iterator[bytes]:
    with contextlib.suppress(EOFError, OSError):  # an OSError where the coordinator ends within a message
        while True:
            yield orders.recv_bytes()


def run_workers() -> None:
    """Serve requests in one process for each PIPE:BLOBS after the arguments PARENT and ENGINE."""
    exit_with_parent(int(sys.argv[1]))
    import_engine(sys.argv[2])
    pairs = [(int(pipe), int(blobs)) for pipe, _, blobs in (each.partition(":") for each in sys.argv[3:])]
    mine, children = pairs[0], []
    for pair in pairs[1:]:
        if pid := os.fork():
            children.append(pid)
            continue
        exit_with_parent(os.getppid())
        mine, children = pair, []
        break
    for pair in pairs:
        for number in pair if pair != mine else ():
            os.close(number)
    serve_requests(Connection(mine[0]), mine[1])
    for pid in children:
        os.waitpid(pid, 0)
    os._exit(0)  # regular exit of torch takes a second, and all results are sent


if __name__ == "__main__":
    run_workers()
