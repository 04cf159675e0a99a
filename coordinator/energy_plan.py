"""Plan of a round by energy: how long it lasts, and how many epochs each board trains. Pure: numbers in, a plan out.

A round costs its cohort what each board's task takes above idle, and the idle power of all its boards until the end:

    E(T) = sum over boards of the cheapest joules above idle that are over by T  +  T * sum of idle powers

The first part falls as T grows, since slower clocks may be held; the second grows. T is chosen among the times at which
a choice of some board becomes possible: between two of them nothing changes but the idle time. Where a method lets
devices train for unequal numbers of epochs, the cohort's passes over examples are shared out anew within T, to boards
that need fewer joules for them; together they are at least as many as before.

The search over T is exact: a stretch of times is skipped only where even the idle power of its shortest time and the
cheapest choices of its longest come to more than a plan that is already known. For one T, work is first shared out by
one price of an example for all boards, which is off by less than the step of one board. That is made exact board by
board, over all amounts of work that may still be cheaper. Cohorts of more than EXACT boards are planned to NEAR of
their joules, as far as MOST_SUMS amounts of work tell: there one board's step is little.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import numpy as np

EXACT: Final = 16  # boards
NEAR: Final = 0.001  # share of the joules that does not matter in larger cohorts
MOST_SUMS: Final = 50_000  # amounts of work that are followed for an exact plan, over all boards
FRONT: Final = 200  # times at which a front is computed


class Choice(NamedTuple):
    """One way for a board to carry out its task."""

    seconds: float  # from request to answer, with a reserve
    joules: float  # expected, above idle
    epochs: int = 1  # passes over the board's own examples


class Board(NamedTuple):
    """One board of a cohort."""

    choices: tuple[Choice, ...]
    examples: int = 1  # of its own
    idle_w: float = 0.0  # 0 too where it is unknown


class Plan(NamedTuple):
    """A planned round."""

    seconds: float  # until its end
    joules: float  # of the whole cohort until then, idle included
    epochs: Mapping[str, int]  # device -> passes over its own examples


def least_joules(boards: Mapping[str, Board], passes: int, limit_s: float = math.inf) -> Plan | None:
    """The cheapest plan within a time; where none is possible within it, the shortest one.

    Args:
        boards: device -> board.
        passes: examples that the cohort has to train on in all, each as often as it is.
        limit_s: longest time of the round in seconds.

    Returns:
        The plan, the shorter of two that are equally cheap; None: no plan does so much work.
    """
    problem = _Problem(boards, passes)
    first = problem.first()
    if first is None:
        return None
    last = max(bisect.bisect_right(problem.times, limit_s) - 1, first)
    return problem.plan(problem.cheapest(first, last))


def least_seconds(boards: Mapping[str, Board], passes: int, limit_j: float) -> Plan | None:
    """The shortest plan that costs no more than `limit_j` joules; where none does, the cheapest one.

    Arguments and None are as for `least_joules`.
    """
    problem = _Problem(boards, passes)
    first, last = problem.first(), len(problem.times) - 1
    if first is None:
        return None
    found = problem.shortest(first, last, limit_j)
    return problem.plan(problem.cheapest(first, last) if found is None else found)


def front(boards: Mapping[str, Board], passes: int) -> list[Plan]:
    """Plans of which none is both as short and as cheap as another, the shortest first; (): there is none.

    The shortest and the cheapest plan are always among them; between them up to FRONT times are looked at.
    """
    import numpy as np

    problem = _Problem(boards, passes)
    first = problem.first()
    if first is None:
        return []
    best = problem.cheapest(first, len(problem.times) - 1)
    looked = np.unique(np.linspace(first, best, FRONT).astype(int)).tolist()
    found: list[Plan] = []
    for index in looked:
        if not found or problem.joules(index) < found[-1].joules:
            found.append(problem.plan(index))
    return found


class _Problem:
    """A cohort, and what has been computed of it: times ascend, and a plan is named by the place of its time."""

    def __init__(self, boards: Mapping[str, Board], passes: int) -> None:
        self._names = sorted(boards)
        self._idle_w = sum(board.idle_w for board in boards.values())
        self._passes = passes
        self._matters = 1.0 if len(boards) <= EXACT else 1 - NEAR
        self._tables = [(boards[name].examples, _by_epochs(boards[name].choices)) for name in self._names]
        every = [seconds for _, table in self._tables for times, _ in table.values() for seconds in times]
        self.times = sorted(set(every))
        self._known: dict[int, tuple[float, tuple[int, ...]] | None] = {}

    def first(self) -> int | None:
        """Place of the shortest time in which so much work can be done."""
        if not self.times or self._above_idle(len(self.times) - 1) == math.inf:
            return None
        return bisect.bisect_left(range(len(self.times)), True, key=lambda at: self._above_idle(at) < math.inf)

    def joules(self, at: int) -> float:
        """Joules of the cohort until a time, idle included; infinite: not so much work can be done by then."""
        return self._above_idle(at) + self._idle_w * self.times[at]

    def plan(self, at: int) -> Plan:
        """The plan of a time at which it is possible."""
        found = self._shared(at)
        assert found is not None
        return Plan(self.times[at], self.joules(at), dict(zip(self._names, found[1], strict=True)))

    def cheapest(self, first: int, last: int) -> int:
        """Place of the fewest joules between two places, the shorter time of equal ones."""
        best = min((first, last), key=lambda at: (self.joules(at), at))
        stack = [(first, last)]
        while stack:
            low, high = stack.pop()
            if high - low < 2 or self._least(low, high) >= self.joules(best) * self._matters:
                continue
            middle = (low + high) // 2
            best = min((best, middle), key=lambda at: (self.joules(at), at))
            stack += [(low, middle), (middle, high)]
        return best

    def shortest(self, first: int, last: int, limit_j: float) -> int | None:
        """Place of the shortest time between two places with no more joules than `limit_j`; None: none has so few."""
        if self.joules(first) <= limit_j:
            return first
        if last - first > 1 and self._least(first, last) <= limit_j:
            middle = (first + last) // 2
            if (found := self.shortest(first, middle, limit_j)) is not None:
                return found
            return self.shortest(middle, last, limit_j)
        return last if self.joules(last) <= limit_j else None

    def _least(self, low: int, high: int) -> float:
        """Bound below the joules of all places between two."""
        return self._above_idle(high) + self._idle_w * self.times[low + 1]

    def _above_idle(self, at: int) -> float:
        found = self._shared(at)
        return math.inf if found is None else found[0]

    def _shared(self, at: int) -> tuple[float, tuple[int, ...]] | None:
        """Fewest joules above idle by a time, with each board's epochs; None: not so much work can be done."""
        if at not in self._known:
            self._known[at] = self._share_out(self.times[at])
        return self._known[at]

    def _share_out(self, limit_s: float) -> tuple[float, tuple[int, ...]] | None:
        ways = [
            [_Way(examples * epochs, joules, epochs) for epochs, joules in _possible(table, limit_s)]
            for examples, table in self._tables
        ]
        if not all(ways) or sum(max(ways_of)[0] for ways_of in ways) < self._passes:
            return None
        price, chosen = _by_price(ways, self._passes)
        known_j = sum(way.joules for way in chosen) * self._matters
        chosen = _exact(ways, self._passes, price, known_j) or chosen
        return sum(way.joules for way in chosen), tuple(way.epochs for way in chosen)


class _Way(NamedTuple):
    """What a board may do within a time: examples gone through, joules above idle, epochs."""

    work: int
    joules: float
    epochs: int


def _by_price(ways: Sequence[Sequence[_Way]], passes: int) -> tuple[float, list[_Way]]:
    """Joules for an example at which boards are willing to do all the work, and what each then does.

    Each board goes up along the lower convex edge of its ways, the cheapest steps of all boards first.
    """
    chosen, steps = [], []
    for index, own in enumerate(ways):
        at = min(own, key=lambda way: (way.joules, -way.work))
        chosen.append(at)
        while more := [way for way in own if way.work > at.work]:
            price, _, way = min(((way.joules - at.joules) / (way.work - at.work), -way.work, way) for way in more)
            steps.append((price, way.work, index, way))
            at = way
    done, price = sum(way.work for way in chosen), 0.0
    for step_price, _, index, way in sorted(steps):  # a board's own prices ascend, so its steps stay in order
        if done >= passes:
            break
        before = done - chosen[index].work
        done, price = before + way.work, step_price
        enough = [each for each in ways[index] if before + each.work >= passes]
        chosen[index] = min(enough, key=lambda each: each.joules, default=way)  # the last step may be a shorter one
    return price, chosen


def _exact(ways: Sequence[Sequence[_Way]], passes: int, price: float, known: float) -> list[_Way] | None:
    """The cheapest ways to do all the work, if they come to less than the `known` joules; None: not, or too many sums.

    Board by board, the sums are kept that no other beats in work and joules. Those are left out that even with the
    best that the other boards have at this price of an example would come to more than what is known.
    """
    import numpy as np  # here, as commands that read a log import this module and plan nothing

    least = [min(way.joules - price * way.work for way in own) for own in ways]
    rest = sum(least) + price * passes
    work, joules = np.zeros(1), np.zeros(1)
    before: list[np.ndarray] = []
    for own, least_j in zip(ways, least, strict=True):
        rest -= least_j
        more = np.minimum(work[:, None] + [way.work for way in own], passes).ravel()
        paid = (joules[:, None] + [way.joules for way in own]).ravel()
        hopeful = np.flatnonzero(paid - price * more + rest < known)
        kept = hopeful[_undominated(more[hopeful], paid[hopeful])]
        if not 0 < len(kept) <= MOST_SUMS / len(ways):
            return None
        before.append(kept)
        work, joules = more[kept], paid[kept]
    if work[0] < passes:
        return None
    index, chosen = 0, []
    for own, kept in zip(reversed(ways), reversed(before), strict=True):
        origin, way = divmod(int(kept[index]), len(own))
        chosen.append(own[way])
        index = origin
    return chosen[::-1]


def _by_epochs(choices: Sequence[Choice]) -> dict[int, tuple[list[float], list[float]]]:
    """Epochs -> ascending times, and beside each the fewest joules that so many epochs take by then."""
    found: dict[int, tuple[list[float], list[float]]] = {}
    for epochs, group in itertools.groupby(sorted(choices, key=lambda each: each.epochs), lambda each: each.epochs):
        times: list[float] = []
        joules: list[float] = []
        for each in sorted(group):
            if not joules or each.joules < joules[-1]:
                times.append(each.seconds)
                joules.append(each.joules)
        found[epochs] = times, joules
    return found


def _possible(table: Mapping[int, tuple[list[float], list[float]]], limit_s: float) -> Iterator[tuple[int, float]]:
    """Numbers of epochs that are over by a time, with the fewest joules of each."""
    for epochs, (times, joules) in table.items():
        if at := bisect.bisect_right(times, limit_s):
            yield epochs, joules[at - 1]


def _undominated(work: np.ndarray, joules: np.ndarray) -> np.ndarray:
    """Places of the sums for which no other does as much work for as little, by descending work."""
    import numpy as np

    order = np.lexsort((joules, -work))
    cheapest = np.minimum.accumulate(joules[order])
    return order[np.flatnonzero(np.diff(cheapest, prepend=math.inf) < 0)]
