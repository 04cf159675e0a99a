"""Warm workers that carry out many devices' orders: the same bits for 1 or N, on this machine or on several.

Which orders are carried out together (`hands.carry_out`) follows from their order alone, never from the number of
workers, as training in one graph decides the last bits of a result. Whether they can be is learnt as it goes: the
first order of a run goes alone, and each call's first answer speaks for the next.

Orders may be announced before they are asked for, one by one as a round's devices begin them (`coming`, `begun`): a
worker that is free begins them at once. What has come of announced orders counts only if exactly these are then asked
for; otherwise it is thrown away, and they are carried out as if nothing had been announced.

An order has the same outcome wherever and however often it is carried out. So orders of a worker that is lost are
given to another.
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
from fedquilt.edge_agent.task.protocol import Order, Outcome
from fedquilt.tools.simulation import Member
from fedquilt.tools.simulation.scratch import Scratch
from fedquilt.tools.simulation.workers import Answer, Place, PoolError, Setup, Share, Sum, Work, Workers

TOGETHER: Final = 32  # orders at most that go to a worker at once; more are hardly faster, and keep others waiting
LOST: Final = 3  # workers lost with the same orders, after which these are taken for the cause


@dataclass
class Package:
    """Orders that go to one worker together."""

    orders: Sequence[Order]
    given: bool = False  # whether a worker has it, or has had it
    answer: Answer | None = None
    sum: bytes | None = None  # of the updates in it, once its worker has made it
    lost: int = 0  # how many workers have been lost that had it

    def holds(self, orders: Sequence[Order]) -> bool:
        """Whether it is of exactly these orders, not of equal ones: their files are theirs alone."""
        return len(orders) == len(self.orders) and all(map(operator.is_, orders, self.orders))


class Sums(Protocol):
    """Who is to have the sums of what orders come to."""

    def state_of(self, orders: Sequence[Order]) -> str:
        """File of the state of the round that these orders are of; "": they are not to be folded."""
        ...

    def summed(self, orders: Sequence[Order], outcomes: Sequence[Outcome], packed: Callable[[], bytes]) -> None:
        """Take what waits for the packed sum of those outcomes that are updates; they follow one by one."""
        ...


class Pool:
    """Workers for one fleet, alive within `with`.

    Args:
        workers: not started yet.
        members: asked for once, one by one: their examples are written to a file.
        together: train orders in one graph that the engine can.

    Raises:
        PoolError: a worker ends unasked; says its last words.
    """

    def __init__(self, workers: Workers, members: Iterable[Member], *, together: bool = False) -> None:
        self._workers, self._members, self._together = workers, members, together
        self._joint = False
        self._given: dict[int, Package] = {}  # worker -> what it works on
        self._sizes: deque[int] = deque()  # of the packages that are announced and not complete
        self._begun: list[Order] = []  # orders of the first of them
        self._ahead: list[Package] = []  # announced, and not asked for yet
        self._sums: Sums | None = None
        self.folder = Path()
        self.held: dict[str, int] = {}  # device -> how many held-out examples it has

    def __enter__(self) -> Pool:
        self._scratch = Scratch()
        self.folder = self._scratch.path
        try:
            self._workers.start(self.folder)
            self._workers.begin(Setup(str(self.folder / "examples"), self._lay_out()))
        except BaseException:
            self._end(now=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(now=kind is not None)

    def _end(self, *, now: bool) -> None:
        self._workers.stop(now=now)
        self._scratch.cleanup()

    def warm(self) -> None:
        """Wait until the workers are ready."""
        self._workers.warm()

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

    def fold_for(self, sums: Sums) -> None:
        """Have what orders come to folded by the workers, and say so to `sums`."""
        self._sums = sums

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
        for package, answer in zip(packages, self._spread(packages), strict=True):
            if answer.summed and self._sums is not None:
                self._sums.summed(
                    package.orders, [done.outcome for done in answer.done], partial(self._sum_of, package)
                )
            for done in answer.done:
                if first:
                    self._joint, first = done.joint, False
                yield next(following), done.outcome

    # -- within -----------------------------------------------------------------------------------

    def _split(self, count: int) -> list[int]:
        """How many of so many orders go together: about as many each time, TOGETHER at most."""
        if not self._joint:  # whether more go together is not known, or was not so when asked last
            return [1] * count
        return [len(part) for part in np.array_split(np.arange(count), math.ceil(count / TOGETHER))]

    def _spread(self, packages: Sequence[Package]) -> Iterator[Answer]:
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
        """Give packages to the workers that are free, one to each."""
        left = (each for each in packages if not each.given)
        for worker in self._workers.ready:
            if worker not in self._given:
                if (package := next(left, None)) is None:
                    return
                package.given = True
                state = self._sums.state_of(package.orders) if self._sums is not None else ""
                self._workers.give(worker, Work(tuple(package.orders), self._together, state))
                self._given[worker] = package

    def _collect(self, *, block: bool) -> None:
        """Take the answers and sums that workers have made; with `block` wait until something has happened.

        Raises:
            PoolError: several workers were lost with the same orders; names their devices.
        """
        for worker, answer in self._workers.done(block=block):
            package = self._given[worker]
            if answer is None or isinstance(answer, Sum) or not answer.summed:
                del self._given[worker]
            if isinstance(answer, Sum):
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

    def _sum_of(self, package: Package) -> bytes:
        """Wait for a package's sum; b"": there is none, so that its updates are folded one by one."""
        with contextlib.suppress(PoolError):  # a worker has died: the next orders find out, and say why
            while package.sum is None:
                self._collect(block=True)
        return package.sum or b""

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
