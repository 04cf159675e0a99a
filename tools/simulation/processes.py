"""Workers of a pool as warm processes on this machine: one imports the engine's library and forks the others.

So they share its memory. Orders name files, which each worker reads once, however many devices they are for.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import structs

from fedquilt.core import JobError
from fedquilt.edge_agent import exhausted
from fedquilt.edge_agent.task import budget
from fedquilt.tools.simulation import machines
from fedquilt.tools.simulation.workers import KEPT, SINGLE, Answer, Done, PoolError, Setup, Sum, Work

TRACEBACK: Final = "Traceback (most recent call last)"  # before the last words of a worker that Python has ended
LENGTH: Final = struct.Struct("<Q")
WORKERS_MOST: Final = 256  # each takes two open files of this process


class Processes:
    """`Workers` as processes that end with this one.

    Args:
        engine: "torch", "numpy" or "onnx": what they import before anything is asked of them.
        count: how many.
        modules: top-level modules of plug-ins that the job needs.

    Raises, from every method:
        PoolError: a worker has ended unasked; says its last words.
    """

    def __init__(self, engine: str, count: int, modules: Collection[str] = ()) -> None:
        if not 1 <= count <= WORKERS_MOST:
            raise JobError(f"{count} workers: 1 to {WORKERS_MOST} can be had, and one for each core is enough")
        self._engine, self._count = engine, count
        self._sockets: list[socket.socket] = []
        self._blobs: list[int] = []  # files in memory, one for each worker
        self._process: subprocess.Popen[bytes] | None = None
        self._oom_kills = budget.oom_kills()
        self.machines = {machines.name(): machines.here(modules, SINGLE["OMP_NUM_THREADS"])}

    def start(self, folder: Path) -> None:
        """Start the first, which forks the others."""
        self._said = folder / "said"
        ends: list[socket.socket] = []
        for _ in range(self._count):
            ours, theirs = socket.socketpair()
            self._sockets.append(ours)
            ends.append(theirs)
        self._blobs = [os.memfd_create("fedquilt-blobs") for _ in ends]
        pairs = [(end.fileno(), blobs) for end, blobs in zip(ends, self._blobs, strict=True)]
        command = [sys.executable, "-m", "fedquilt.tools.simulation.pool_worker", str(os.getpid()), self._engine]
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
        for index, each in enumerate(self._sockets):
            self._selector.register(each, selectors.EVENT_READ, index)

    def begin(self, setup: Setup) -> None:
        """Send each what comes before all orders."""
        payload = msgspec.msgpack.encode(setup)
        for each in self._sockets:
            self._send(each, payload)

    def warm(self) -> None:
        """Wait until every worker is ready."""
        for each in self._sockets:
            self._send(each, msgspec.msgpack.encode(Work()))
        for each in self._sockets:
            self._receive(each)

    @property
    def pid(self) -> int:
        """Process id of the first worker, whose children the others are."""
        assert self._process is not None
        return self._process.pid

    @property
    def ready(self) -> range:
        """All of them: what they are sent waits until they have started."""
        return range(self._count)

    def give(self, worker: int, work: Work) -> None:
        """Send orders. A worker reads when we write, so neither side waits for the other to read."""
        self._send(self._sockets[worker], msgspec.msgpack.encode(work))

    def done(self, *, block: bool) -> Iterator[tuple[int, Answer | Sum | None]]:
        """Take the answers of workers that are done, and sums that follow; with `block` wait until there is one."""
        for key, _ in self._selector.select(None if block else 0):
            yield key.data, FROM.decode(self._receive(self._sockets[key.data])).whole(self._blobs[key.data])

    def stop(self, *, now: bool) -> None:
        """Close the sockets: the end of its orders is the end of a worker."""
        self._selector.close()
        for each in self._sockets:
            each.close()
        for blobs in self._blobs:
            os.close(blobs)
        if self._process is not None:
            if now:
                self._process.kill()
            self._process.wait()

    def _send(self, to: socket.socket, payload: bytes) -> None:
        try:
            to.sendall(LENGTH.pack(len(payload)) + payload)
        except OSError:
            raise self._dead() from None

    def _receive(self, of: socket.socket) -> bytearray:
        try:
            answer = receive(of)
        except OSError:
            answer = None
        if answer is None:
            raise self._dead()
        return answer

    def _dead(self) -> PoolError:
        """Why a worker has ended, and the mend. Only the first one's exit status is to be had."""
        said = self._said.read_text(errors="replace").strip()
        words = f"it said: {said.splitlines()[-1][-500:] if said else '(nothing)'}"
        fewer = f"fewer --workers than {self._count}" if self._count > 1 else "a smaller network or batch"
        if exhausted.tells_of_memory(said):
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
        kills = budget.oom_kills()
        if kills is not None and self._oom_kills is not None and kills > self._oom_kills:
            return PoolError(f"the kernel ran out of memory and killed a worker of the pool most likely: give {fewer}")
        return PoolError(
            "a worker of the pool was killed from outside (SIGKILL): start the command again; if it was for want of "
            f"memory, give {fewer}"
        )


class Apart(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An answer without the bytes of its bundles: these lie one behind the other in a file in memory.

    Nobody waits there for the other side to read, as at a socket, which holds less than an answer may have.
    """

    answer: Answer
    blobs: list[list[tuple[str, int]]]  # sha256 and size of each outcome's

    def whole(self, file: int) -> Answer:
        """The answer with its bytes."""
        size = sum(size for blobs in self.blobs for _, size in blobs)
        if not size:
            return self.answer
        at, done = 0, []
        with mmap.mmap(file, size, prot=mmap.PROT_READ) as view:
            for each, blobs in zip(self.answer.done, self.blobs, strict=True):
                found = {}
                for sha256, size in blobs:
                    found[sha256], at = view[at : at + size], at + size
                done.append(Done(structs.replace(each.outcome, blobs=found), each.joint) if found else each)
            return Answer(done, self.answer.summed)


class Behind(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A sum's place in the file in memory. What its worker is sent next would take this place: first it is read."""

    offset: int
    size: int

    def whole(self, file: int) -> Sum:
        """The sum."""
        return Sum(os.pread(file, self.size, self.offset))


FROM: Final = msgspec.msgpack.Decoder(Apart | Behind)


def apart(answer: Answer) -> tuple[Apart, list[bytes]]:
    """An answer, and the bytes that go into the file in this order."""
    blobs = [each.outcome.blobs for each in answer.done]
    bare = [Done(structs.replace(each.outcome, blobs={}), each.joint) for each in answer.done]
    sizes = [[(sha256, len(payload)) for sha256, payload in each.items()] for each in blobs]
    pieces = [payload for each in blobs for payload in each.values()]
    return Apart(Answer(bare, answer.summed), sizes), pieces


def receive(of: socket.socket) -> bytearray | None:
    """One message; None: there are no more."""
    head = _exactly(of, LENGTH.size)
    return None if head is None else _exactly(of, LENGTH.unpack(head)[0])


def _exactly(of: socket.socket, size: int) -> bytearray | None:
    payload = bytearray(size)
    view, have = memoryview(payload), 0
    while have < size:
        count = of.recv_into(view[have:])
        if not count:
            return None
        have += count
    return payload
