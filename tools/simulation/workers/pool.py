"""Pool of workers, with results that do not depend on the number of workers.

Training in one graph affects the last bits of a result. Therefore the grouping of work requests
(`local_backend.run_requests`) follows from their order alone, never from the number of workers. The first request of a
run is run alone, and the first reply of each call decides whether the next call groups requests.

Work requests can be announced as the devices of a round start them (`expect_requests`, `prefetch`), and idle workers
start them at once. Results count only if exactly these requests are run later.

A work request has the same result wherever and however often it is run, so requests of a lost worker go to another.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol

import numpy as np

from fedquilt import core
from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult
from fedquilt.tools.simulation import DeviceData
from fedquilt.tools.simulation.scratch_folders import ScratchFolder
from fedquilt.tools.simulation.workers.protocol import (
    ArrayLocation,
    DeviceExamples,
    PoolError,
    PoolSetup,
    WorkBatch,
    WorkerGroup,
    WorkerReply,
    WorkerSum,
)

TOGETHER: Final = 32  # orders at most that go to a worker at once; more are hardly faster, and keep others waiting
LOST: Final = 3  # workers lost with the same orders, after which these are taken for the cause


@dataclass
class WorkAssignment:
    orders: Sequence[WorkRequest]
    given: bool = False  # whether a worker has it, or has had it
    answer: WorkerReply | None = None
    sum: bytes | None = None  # of the updates in it, once its worker has made it
    lost: int = 0  # how many workers have been lost that had it

    def consists_of(self, orders: Sequence[WorkRequest]) -> bool:
        # compares identity, because equal requests can have different files
        return len(orders) == len(self.orders) and all(map(operator.is_, orders, self.orders))


class SumReceiver(Protocol):
    def find_state_file(self, orders: Sequence[WorkRequest]) -> str:
        """Return the file of the method state to fold updates with, or "" to disable folding."""
        ...

    def receive_sum(
        self, orders: Sequence[WorkRequest], outcomes: Sequence[WorkResult], packed: Callable[[], bytes]
    ) -> None:
        """Receive a function that returns the packed sum of updates. The results follow one by one."""
        ...


class WorkerPool:
    """Workers for one fleet, started and stopped by `with`."""

    def __init__(self, workers: WorkerGroup, members: Iterable[DeviceData], *, together: bool = False) -> None:
        self._workers, self._members, self._together = workers, members, together
        self._joint = False
        self._given: dict[int, WorkAssignment] = {}  # worker -> what it works on
        self._sizes: deque[int] = deque()  # of the packages that are announced and not complete
        self._begun: list[WorkRequest] = []  # orders of the first of them
        self._ahead: list[WorkAssignment] = []  # announced, and not asked for yet
        self._sums: SumReceiver | None = None
        self.folder = Path()
        self.held: dict[str, int] = {}  # device -> how many held-out examples it has

    def __enter__(self) -> WorkerPool:
        self._scratch = ScratchFolder()
        self.folder = self._scratch.path
        try:
            self._workers.start(self.folder)
            self._workers.send_setup(PoolSetup(str(self.folder / "examples"), self._write_examples()))
        except BaseException:
            self._stop_workers(now=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_workers(now=kind is not None)

    def _stop_workers(self, *, now: bool) -> None:
        self._workers.stop(now=now)
        self._scratch.cleanup()

    def wait_until_ready(self) -> None:
        self._workers.wait_until_ready()

    def expect_requests(self, count: int) -> None:
        """Expect `count` announced work requests, and discard earlier ones that were not run."""
        self._sizes, self._begun = deque(self._choose_package_sizes(count)), []
        self._ahead.clear()

    def prefetch(self, order: WorkRequest) -> None:
        """Announce a work request. An idle worker starts the package that the request completes."""
        if not self._sizes:
            return
        self._begun.append(order)
        if len(self._begun) < self._sizes[0]:
            return
        self._sizes.popleft()
        self._ahead.append(WorkAssignment(self._begun))
        self._begun = []
        with contextlib.suppress(PoolError):  # a worker has died: `run_requests` will find out, and says why
            self._collect_replies(block=False)
            self._assign_packages(self._ahead)

    def set_sum_receiver(self, sums: SumReceiver) -> None:
        """Let the workers fold updates, and deliver the partial sums to `sums`."""
        self._sums = sums

    def run_requests(self, orders: Sequence[WorkRequest]) -> Iterator[tuple[WorkRequest, WorkResult]]:
        """Yield each work request with its result, in order and as early as possible."""
        if not orders:
            return
        packages, following = [], iter(orders)
        for size in self._choose_package_sizes(len(orders)):
            group = tuple(itertools.islice(following, size))
            ahead = next((each for each in self._ahead if each.consists_of(group)), None)
            packages.append(ahead or WorkAssignment(group))
        self._ahead = [each for each in self._ahead if each not in packages]
        first, following = True, iter(orders)
        for package, answer in zip(packages, self._run_packages(packages), strict=True):
            if answer.summed and self._sums is not None:
                self._sums.receive_sum(
                    package.orders, [done.outcome for done in answer.done], partial(self._wait_for_sum, package)
                )
            for done in answer.done:
                if first:
                    self._joint, first = done.joint, False
                yield next(following), done.outcome

    # -- within -----------------------------------------------------------------------------------

    def _choose_package_sizes(self, count: int) -> list[int]:
        # equal sizes of at most TOGETHER, and 1 while batching is not known to work
        if not self._joint:  # whether more go together is not known, or was not so when asked last
            return [1] * count
        return [len(part) for part in np.array_split(np.arange(count), math.ceil(count / TOGETHER))]

    def _run_packages(self, packages: Sequence[WorkAssignment]) -> Iterator[WorkerReply]:
        # yields the replies in the order of the packages
        for wanted in packages:
            self._assign_packages(packages)
            while wanted.answer is None:
                self._collect_replies(block=True)
                self._assign_packages(packages)
            answer, wanted.answer = wanted.answer, None
            yield answer
            self._collect_replies(block=False)  # a worker that has ended gets its next package first

    def _assign_packages(self, packages: Sequence[WorkAssignment]) -> None:
        left = (each for each in packages if not each.given)
        for worker in self._workers.ready:
            if worker not in self._given:
                if (package := next(left, None)) is None:
                    return
                package.given = True
                state = self._sums.find_state_file(package.orders) if self._sums is not None else ""
                self._workers.send_work(worker, WorkBatch(tuple(package.orders), self._together, state))
                self._given[worker] = package

    def _collect_replies(self, *, block: bool) -> None:
        for worker, answer in self._workers.receive_replies(block=block):
            package = self._given[worker]
            if answer is None or isinstance(answer, WorkerSum) or not answer.summed:
                del self._given[worker]
            if isinstance(answer, WorkerSum):
                package.sum = answer.packed
                continue
            package.answer = answer
            if answer is None:
                package.given, package.lost = False, package.lost + 1
                if package.lost >= LOST:
                    names = ", ".join(order.device for order in package.orders)
                    raise PoolError(
                        f"{LOST} workers were lost, one after the other, with the work of {names}: most likely it "
                        "needs more memory than a node has; give fewer --workers, or a smaller network or batch"
                    )

    def _wait_for_sum(self, package: WorkAssignment) -> bytes:
        # an empty sum makes the coordinator fold the updates one by one
        with contextlib.suppress(PoolError):  # a worker has died: the next orders find out, and say why
            while package.sum is None:
                self._collect_replies(block=True)
        return package.sum or b""

    def _write_examples(self) -> dict[str, DeviceExamples]:
        shares: dict[str, DeviceExamples] = {}
        with (self.folder / "examples").open("wb") as file:

            def write_array(array: np.ndarray) -> ArrayLocation:
                if array.dtype.kind not in "uifb":
                    raise core.DataError(f"examples of type {array.dtype}: expected numbers")
                place = ArrayLocation(file.tell(), array.shape, array.dtype.str)
                file.write(np.ascontiguousarray(array).data)
                return place

            for member in self._members:
                train, held = member.train, member.held
                self.held[member.device] = len(held)
                shares[member.device] = DeviceExamples(
                    (write_array(train.x), write_array(train.y)), (write_array(held.x), write_array(held.y))
                )
        return shares
