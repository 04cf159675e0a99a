"""Workers of a pool as processes on this machine.

The first process imports the engine's library and forks the others, so all share its memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Final

import msgspec
from msgspec import structs

from fedquilt.core import JobError
from fedquilt.edge_agent.engines import out_of_memory
from fedquilt.edge_agent.task import memory_budget
from fedquilt.tools.simulation import machines
from fedquilt.tools.simulation.workers.protocol import (
    KEPT,
    SINGLE,
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
        command = [sys.executable, "-m", "fedquilt.tools.simulation.workers.worker", str(os.getpid()), self._engine]
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
        if out_of_memory.is_out_of_memory_text(said):
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


def detach_blobs(answer: WorkerReply) -> tuple[DetachedResult, list[bytes]]:
    """Return a reply without its blobs, and the blobs in the order of the memory file."""
    blobs = [each.outcome.blobs for each in answer.done]
    bare = [WorkOutcome(structs.replace(each.outcome, blobs={}), each.joint) for each in answer.done]
    sizes = [[(sha256, len(payload)) for sha256, payload in each.items()] for each in blobs]
    pieces = [payload for each in blobs for payload in each.values()]
    return DetachedResult(WorkerReply(bare, answer.summed), sizes), pieces
