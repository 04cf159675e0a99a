"""Energy plan of a round: the duration of the round, and the epochs of each device.

The energy of a round is the energy of the tasks above idle, and the idle power of all devices until the end:

    E(T) = sum over devices of the fewest joules above idle that end by T  +  T * sum of idle powers

The first part falls as T grows, since slower clocks become possible, and the second part grows. T is selected among
the times at which an option of some device becomes possible. Between two such times only the idle energy changes. If a
method lets devices train for unequal numbers of epochs, the passes over examples are distributed within T to devices
that need fewer joules. Their total is at least as high as before.

The search over T is exact. An interval is skipped only if the idle energy of its shortest time and the cheapest
options of its longest time exceed a known plan. For one T, work is first distributed by one price per example for all
devices, which is off by less than the step of one device. The distribution is then made exact device by device, over
all amounts of work that may be cheaper. Cohorts of more than EXACT devices are planned to within NEAR of the minimum,
as far as MOST_SUMS amounts of work allow.

Pure: no I/O and no clock.
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


class EpochChoice(NamedTuple):
    seconds: float  # from request to answer, with a reserve
    joules: float  # expected, above idle
    epochs: int = 1  # passes over the board's own examples


class DeviceForecast(NamedTuple):
    choices: tuple[EpochChoice, ...]
    examples: int = 1  # of its own
    idle_w: float = 0.0  # 0 too where it is unknown


class EnergyPlan(NamedTuple):
    seconds: float  # until its end
    joules: float  # of the whole cohort until then, idle included
    epochs: Mapping[str, int]  # device -> passes over its own examples


def plan_least_energy(
    boards: Mapping[str, DeviceForecast], passes: int, limit_s: float = math.inf
) -> EnergyPlan | None:
    """Return the plan of fewest joules within a time limit, or the shortest plan if none fits.

    Args:
        boards: Options of each device.
        passes: Examples that the cohort must train on, counted in every epoch.
        limit_s: Longest duration of the round in seconds.

    Returns:
        The shorter of two plans with equal joules, or None if the devices cannot do all the work.
    """
    problem = _EnergyProblem(boards, passes)
    first = problem.first_feasible_index()
    if first is None:
        return None
    last = max(bisect.bisect_right(problem.times, limit_s) - 1, first)
    return problem.plan_at(problem.cheapest_index(first, last))


def plan_least_time(boards: Mapping[str, DeviceForecast], passes: int, limit_j: float) -> EnergyPlan | None:
    """Return the shortest plan within a joule limit, else the cheapest, or None if the work is too much."""
    problem = _EnergyProblem(boards, passes)
    first, last = problem.first_feasible_index(), len(problem.times) - 1
    if first is None:
        return None
    found = problem.shortest_index(first, last, limit_j)
    return problem.plan_at(problem.cheapest_index(first, last) if found is None else found)


def pareto_front(boards: Mapping[str, DeviceForecast], passes: int) -> list[EnergyPlan]:
    """Return plans of which none is both shorter and cheaper than another, the shortest first.

    The list is empty if the devices cannot do all the work. Up to FRONT durations between the shortest and the
    cheapest plan, both included, are computed.
    """
    import numpy as np

    problem = _EnergyProblem(boards, passes)
    first = problem.first_feasible_index()
    if first is None:
        return []
    best = problem.cheapest_index(first, len(problem.times) - 1)
    looked = np.unique(np.linspace(first, best, FRONT).astype(int)).tolist()
    found: list[EnergyPlan] = []
    for index in looked:
        if not found or problem.total_joules(index) < found[-1].joules:
            found.append(problem.plan_at(index))
    return found


class _EnergyProblem:
    """Cohort with cached results. A plan is identified by the index of its duration in `times`."""

    def __init__(self, boards: Mapping[str, DeviceForecast], passes: int) -> None:
        self._names = sorted(boards)
        self._idle_w = sum(board.idle_w for board in boards.values())
        self._passes = passes
        self._matters = 1.0 if len(boards) <= EXACT else 1 - NEAR
        self._tables = [(boards[name].examples, _options_by_epochs(boards[name].choices)) for name in self._names]
        every = [seconds for _, table in self._tables for times, _ in table.values() for seconds in times]
        self.times = sorted(set(every))
        self._known: dict[int, tuple[float, tuple[int, ...]] | None] = {}

    def first_feasible_index(self) -> int | None:
        if not self.times or self._joules_above_idle(len(self.times) - 1) == math.inf:
            return None
        return bisect.bisect_left(range(len(self.times)), True, key=lambda at: self._joules_above_idle(at) < math.inf)

    def total_joules(self, at: int) -> float:
        return self._joules_above_idle(at) + self._idle_w * self.times[at]

    def plan_at(self, at: int) -> EnergyPlan:
        found = self._find_distribution(at)
        assert found is not None
        return EnergyPlan(self.times[at], self.total_joules(at), dict(zip(self._names, found[1], strict=True)))

    def cheapest_index(self, first: int, last: int) -> int:
        """Return the index of the duration with the fewest joules, within NEAR in large cohorts."""
        best = min((first, last), key=lambda at: (self.total_joules(at), at))
        stack = [(first, last)]
        while stack:
            low, high = stack.pop()
            if high - low < 2 or self._lower_bound_j(low, high) >= self.total_joules(best) * self._matters:
                continue
            middle = (low + high) // 2
            best = min((best, middle), key=lambda at: (self.total_joules(at), at))
            stack += [(low, middle), (middle, high)]
        return best

    def shortest_index(self, first: int, last: int, limit_j: float) -> int | None:
        if self.total_joules(first) <= limit_j:
            return first
        if last - first > 1 and self._lower_bound_j(first, last) <= limit_j:
            middle = (first + last) // 2
            if (found := self.shortest_index(first, middle, limit_j)) is not None:
                return found
            return self.shortest_index(middle, last, limit_j)
        return last if self.total_joules(last) <= limit_j else None

    def _lower_bound_j(self, low: int, high: int) -> float:
        return self._joules_above_idle(high) + self._idle_w * self.times[low + 1]

    def _joules_above_idle(self, at: int) -> float:
        found = self._find_distribution(at)
        return math.inf if found is None else found[0]

    def _find_distribution(self, at: int) -> tuple[float, tuple[int, ...]] | None:
        if at not in self._known:
            self._known[at] = self._distribute_work(self.times[at])
        return self._known[at]

    def _distribute_work(self, limit_s: float) -> tuple[float, tuple[int, ...]] | None:
        """Return the joules above idle and the epochs of each device, or None if the limit is too short."""
        ways = [
            [_EpochOption(examples * epochs, joules, epochs) for epochs, joules in _feasible_options(table, limit_s)]
            for examples, table in self._tables
        ]
        if not all(ways) or sum(max(ways_of)[0] for ways_of in ways) < self._passes:
            return None
        price, chosen = _distribute_by_price(ways, self._passes)
        known_j = sum(way.joules for way in chosen) * self._matters
        chosen = _distribute_exactly(ways, self._passes, price, known_j) or chosen
        return sum(way.joules for way in chosen), tuple(way.epochs for way in chosen)


class _EpochOption(NamedTuple):
    """Option of a device within a time limit: examples times epochs, joules above idle, and epochs."""

    work: int
    joules: float
    epochs: int


def _distribute_by_price(ways: Sequence[Sequence[_EpochOption]], passes: int) -> tuple[float, list[_EpochOption]]:
    """Return the price per example at which all the work is done, and the option of each device.

    Each device moves up along the lower convex hull of its options, the cheapest steps of all devices first.
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


def _distribute_exactly(
    ways: Sequence[Sequence[_EpochOption]], passes: int, price: float, known: float
) -> list[_EpochOption] | None:
    """Return the cheapest options that do all the work for fewer joules than `known`, or None.

    Device by device, the sums are kept that no other sum beats in work and joules. Sums that exceed `known` are
    dropped, even with the best options of the remaining devices at this price. The result is also None with too many
    sums.
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
        kept = hopeful[_pareto_indices(more[hopeful], paid[hopeful])]
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


def _options_by_epochs(choices: Sequence[EpochChoice]) -> dict[int, tuple[list[float], list[float]]]:
    """Return, by number of epochs, ascending times and the fewest joules by each time."""
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


def _feasible_options(
    table: Mapping[int, tuple[list[float], list[float]]], limit_s: float
) -> Iterator[tuple[int, float]]:
    for epochs, (times, joules) in table.items():
        if at := bisect.bisect_right(times, limit_s):
            yield epochs, joules[at - 1]


def _pareto_indices(work: np.ndarray, joules: np.ndarray) -> np.ndarray:
    """Return the indices of options that no other option beats in work and joules, the most work first."""
    import numpy as np

    order = np.lexsort((joules, -work))
    cheapest = np.minimum.accumulate(joules[order])
    return order[np.flatnonzero(np.diff(cheapest, prepend=math.inf) < 0)]
