"""Warm worker processes that carry out many devices' orders: imports once, weights shared, the same bits for 1 or N.

One process imports the engine's library and forks the others, so that they share its memory. An order names its
bundles by file; each worker reads a content once, however many devices get it. What orders make lies in files.

Which orders are carried out together (`hands.carry_out`) follows from their order alone, never from the number of
workers, as training in one graph decides the last bits of a result. Whether they can be is learnt as it goes: the
first order of a run goes alone, and each call's first answer speaks for the next.

Orders may be announced before they are asked for, one by one as a round's devices begin them (`coming`, `begun`): a
worker that is free begins them at once. What has come of announced orders counts only if exactly these are then asked
for; otherwise it is thrown away, and they are carried out as if nothing had been announced.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec
import numpy as np

from fedquilt import core
from fedquilt.core import FedquiltError
from fedquilt.edge_agent.task import budget
from fedquilt.edge_agent.task.protocol import Order, Outcome
from fedquilt.tools.simulation import Member
from fedquilt.tools.simulation.scratch import Scratch

TOGETHER: Final = 32  # orders at most that go to a worker at once; more are hardly faster, and keep others waiting
TRACEBACK: Final = "Traceback (most recent call last)"  # before the last words of a worker that Python has ended
LENGTH: Final = struct.Struct("<Q")
# one thread a worker, so that sums have one order; no thread of a numerical library is alive when the first one forks
SINGLE: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# Keep freed arrays of some MB in the heap: returned to the kernel, their pages are cleared again at every step.
KEPT: Final = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MALLOC_TRIM_THRESHOLD_": str(32 << 20)}


class Place(msgspec.Struct, frozen=True, array_like=True):
    """An array in the file of examples."""

    offset: int
    shape: tuple[int, ...]
    dtype: str


class Share(msgspec.Struct, frozen=True, array_like=True):
    """One device's examples: x and y to train on, x and y held out."""

    train: tuple[Place, Place]
    held: tuple[Place, Place]


class Setup(msgspec.Struct, frozen=True):
    """First message to a worker."""

    examples: str  # the file
    shares: dict[str, Share]


class Work(msgspec.Struct, frozen=True):
    """To a worker: carry these out."""

    orders: tuple[Order, ...] = ()
    together: bool = False


class Done(msgspec.Struct, frozen=True, array_like=True):
    """Outcome of an order, and whether it was or could have been trained with others."""

    outcome: Outcome
    joint: bool


@dataclass
class Package:
    """Orders that go to one worker together."""

    orders: Sequence[Order]
    given: bool = False  # whether a worker has it, or has had it
    answer: bytes | bytearray | None = None

    def holds(self, orders: Sequence[Order]) -> bool:
        """Whether it is of exactly these orders, not of equal ones: their files are theirs alone."""
        return len(orders) == len(self.orders) and all(map(operator.is_, orders, self.orders))


class PoolError(FedquiltError):
    """A worker that has died, or could not start."""


class Pool:
    """Workers for one fleet, alive within `with`.

    Args:
        engine: "torch", "numpy" or "onnx": what the workers import before anything is asked of them.
        members: asked for once, one by one: their examples are written to a file.
        together: train orders in one graph that the engine can.

    Raises:
        PoolError: a worker ends unasked; says its last words.
    """

    def __init__(self, engine: str, members: Iterable[Member], *, workers: int = 1, together: bool = False) -> None:
        if workers < 1:
            raise core.JobError(f"{workers} workers: at least 1 is needed")
        self._engine, self._members, self._together = engine, members, together
        self._count = workers
        self._sockets: list[socket.socket] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._joint = False
        self._given: dict[int, Package] = {}  # worker -> what it works on
        self._sizes: deque[int] = deque()  # of the packages that are announced and not complete
        self._begun: list[Order] = []  # orders of the first of them
        self._ahead: list[Package] = []  # announced, and not asked for yet
        self._oom_kills = budget.oom_kills()
        self.folder = Path()
        self.held: dict[str, int] = {}  # device -> how many held-out examples it has

    def __enter__(self) -> Pool:
        self._scratch = Scratch()
        self.folder = self._scratch.path
        ends: list[socket.socket] = []
        for _ in range(self._count):
            ours, theirs = socket.socketpair()
            self._sockets.append(ours)
            ends.append(theirs)
        numbers = [end.fileno() for end in ends]
        command = [sys.executable, "-m", "fedquilt.tools.simulation.pool_worker", str(os.getpid()), self._engine]
        with (self.folder / "said").open("wb") as said:
            self._process = subprocess.Popen(
                [*command, *map(str, numbers)],
                pass_fds=numbers,
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
        setup = msgspec.msgpack.encode(Setup(str(self.folder / "examples"), self._lay_out()))
        for each in self._sockets:
            self._send(each, setup)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._selector.close()
        for each in self._sockets:
            each.close()  # the end of its orders is the end of a worker
        if self._process is not None:
            if kind is not None:
                self._process.kill()
            self._process.wait()
        self._scratch.cleanup()

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

    def coming(self, count: int) -> None:
        """Expect so many orders, in the order of `begun`; earlier announcements that nobody asked for are forgotten."""
        self._sizes, self._begun = deque(self._split(count)), []
        self._ahead.clear()

    def begun(self, order: Order) -> None:
        """Announce an order. A worker that is free begins the package that it completes."""
        if not self._sizes:
            return
        self._begun.append(order)
        if len(self._begun) < self._sizes[0]:
            return
        self._sizes.popleft()
        self._ahead.append(Package(self._begun))
        self._begun = []
        with contextlib.suppress(PoolError):  # a worker has died: `carry_out` will find out, and says why
            self._collect(block=False)
            self._hand_out(self._ahead)

    def carry_out(self, orders: Sequence[Order]) -> Iterator[tuple[Order, Outcome]]:
        """Outcomes of the orders, in their order, each as soon as it is there."""
        if not orders:
            return
        packages, following = [], iter(orders)
        for size in self._split(len(orders)):
            group = tuple(itertools.islice(following, size))
            ahead = next((each for each in self._ahead if each.holds(group)), None)
            packages.append(ahead or Package(group))
        self._ahead = [each for each in self._ahead if each not in packages]
        first, following = True, iter(orders)
        for answers in self._spread(packages):
            for done in msgspec.msgpack.decode(answers, type=list[Done]):
                if first:
                    self._joint, first = done.joint, False
                yield next(following), done.outcome

    # -- within -----------------------------------------------------------------------------------

    def _split(self, count: int) -> list[int]:
        """How many of so many orders go together: about as many each time, TOGETHER at most."""
        if not self._joint:  # whether more go together is not known, or was not so when asked last
            return [1] * count
        return [len(part) for part in np.array_split(np.arange(count), math.ceil(count / TOGETHER))]

    def _spread(self, packages: Sequence[Package]) -> Iterator[bytes | bytearray]:
        """Hand the packages out to whichever worker is free; yields their answers in the packages' order."""
        for wanted in packages:
            self._hand_out(packages)
            while wanted.answer is None:
                self._collect(block=True)
                self._hand_out(packages)
            answer, wanted.answer = wanted.answer, None
            yield answer
            self._collect(block=False)  # whoever is done meanwhile shall not wait

    def _hand_out(self, packages: Sequence[Package]) -> None:
        """Give packages to the workers that are free.

        A worker has one package at a time: it reads when we write, so neither side waits for the other to read.
        """
        left = (each for each in packages if not each.given)
        for index, worker in enumerate(self._sockets):
            if index not in self._given:
                if (package := next(left, None)) is None:
                    return
                package.given = True
                self._send(worker, msgspec.msgpack.encode(Work(tuple(package.orders), self._together)))
                self._given[index] = package

    def _collect(self, *, block: bool) -> None:
        """Take the answers of workers that are done; with `block` wait until one is."""
        for key, _ in self._selector.select(None if block else 0):
            answer = self._receive(self._sockets[key.data])
            self._given.pop(key.data).answer = answer

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
        said = (self.folder / "said").read_text(errors="replace").strip()
        words = f"it said: {said.splitlines()[-1][-500:] if said else '(nothing)'}"
        fewer = f"fewer --workers than {self._count}" if self._count > 1 else "a smaller network or batch"
        if budget.tells_of_memory(said):
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

    def _lay_out(self) -> dict[str, Share]:
        """Write everybody's examples into one file; where they are."""
        shares: dict[str, Share] = {}
        with (self.folder / "examples").open("wb") as file:

            def put(array: np.ndarray) -> Place:
                if array.dtype.kind not in "uifb":
                    raise core.DataError(f"examples of type {array.dtype}: expected numbers")
                place = Place(file.tell(), array.shape, array.dtype.str)
                file.write(np.ascontiguousarray(array).data)
                return place

            for member in self._members:
                train, held = member.train, member.held
                self.held[member.device] = len(held)
                shares[member.device] = Share((put(train.x), put(train.y)), (put(held.x), put(held.y)))
        return shares


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
