"""Energy plan of a round: the duration of the round, and the epochs of each device.

The energy of a round is the energy of the tasks above idle, and the idle power of all devices until the end:

    E(T) = sum over devices of the fewest joules above idle that end by T  +  T * sum of idle powers

The first part falls as T grows, since slower clocks become possible, and the second part grows. T is selected among the
times at which an option of some device becomes possible. Between two such times only the idle energy changes. If a
method lets devices train for unequal numbers of epochs, the passes over examples are distributed within T to devices
that need fewer joules. Their total is at least as high as before.

The search over T is exact. An interval is skipped only if the idle energy of its shortest time and the cheapest options
of its longest time exceed a known plan. For one T, work is first distributed by one price per example for all devices.
The result exceeds the minimum by less than the last option that it adds. The distribution is then made exact device by
device, over all amounts of work that may be cheaper. Cohorts of more than MAX_EXACT_DEVICES devices are planned to
within JOULES_TOLERANCE of the minimum, as far as MAX_SUMS amounts of work allow. No I/O and no clock.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import numpy as np

MAX_EXACT_DEVICES: Final = 16
JOULES_TOLERANCE: Final = 0.001  # permitted excess over the minimum in larger cohorts, as a share
MAX_SUMS: Final = 50_000  # largest number of work amounts that an exact plan compares, over all devices
MAX_FRONT_PLANS: Final = 200  # times at which a front is computed


class EpochChoice(NamedTuple):
    seconds: float  # from selection to update, at the 90th percentile
    joules: float  # expected joules above idle
    epochs: int = 1  # passes over the device's own examples


class DeviceForecast(NamedTuple):
    choices: tuple[EpochChoice, ...]
    examples: int = 1  # number of the device's own examples
    idle_w: float = 0.0  # idle power, or 0 if unknown


class EnergyPlan(NamedTuple):
    seconds: float  # duration of the round
    joules: float  # energy of the whole cohort, idle energy included
    epochs: Mapping[str, int]  # device -> passes over the device's own examples


def plan_least_energy(
    forecasts: Mapping[str, DeviceForecast], passes: int, limit_s: float = math.inf
) -> EnergyPlan | None:
    """Return the plan of fewest joules within a time limit, or the shortest plan if none fits.

    Args:
        forecasts: Options of each device.
        passes: Examples that the cohort must train on, counted in every epoch.
        limit_s: Longest duration of the round in seconds.

    Returns:
        The shorter of two plans with equal joules, or None if the devices cannot do all the work.
    """
    problem = _EnergyProblem(forecasts, passes)
    first = problem.first_feasible_index()
    if first is None:
        return None
    last = max(bisect.bisect_right(problem.times, limit_s) - 1, first)
    return problem.plan_at(problem.cheapest_index(first, last))


def plan_least_time(forecasts: Mapping[str, DeviceForecast], passes: int, limit_j: float) -> EnergyPlan | None:
    """Return the shortest plan within a joule limit, else the cheapest, or None if the work is too much."""
    problem = _EnergyProblem(forecasts, passes)
    first, last = problem.first_feasible_index(), len(problem.times) - 1
    if first is None:
        return None
    index = problem.shortest_index(first, last, limit_j)
    return problem.plan_at(problem.cheapest_index(first, last) if index is None else index)


def pareto_front(forecasts: Mapping[str, DeviceForecast], passes: int) -> list[EnergyPlan]:
    """Return plans of which none is both shorter and cheaper than another, the shortest first.

    The list is empty if the devices cannot do all the work. Up to MAX_FRONT_PLANS durations between the shortest and
    the cheapest plan, both included, are computed.
    """
    import numpy as np

    problem = _EnergyProblem(forecasts, passes)
    first = problem.first_feasible_index()
    if first is None:
        return []
    best = problem.cheapest_index(first, len(problem.times) - 1)
    indices = np.unique(np.linspace(first, best, MAX_FRONT_PLANS).astype(int)).tolist()
    plans: list[EnergyPlan] = []
    for index in indices:
        if not plans or problem.total_joules(index) < plans[-1].joules:
            plans.append(problem.plan_at(index))
    return plans


class _EnergyProblem:
    """Energy plans of a cohort, one for each duration in `times`. Plans are identified by their index."""

    def __init__(self, forecasts: Mapping[str, DeviceForecast], passes: int) -> None:
        self._names = sorted(forecasts)
        self._idle_w = sum(board.idle_w for board in forecasts.values())
        self._passes = passes
        self._tolerance = 1.0 if len(forecasts) <= MAX_EXACT_DEVICES else 1 - JOULES_TOLERANCE
        self._tables = [(forecasts[name].examples, _options_by_epochs(forecasts[name].choices)) for name in self._names]
        all_times = [seconds for _, table in self._tables for times, _ in table.values() for seconds in times]
        self.times = sorted(set(all_times))
        self._distributions: dict[int, tuple[float, tuple[int, ...]] | None] = {}

    def first_feasible_index(self) -> int | None:
        if not self.times or self._joules_above_idle(len(self.times) - 1) == math.inf:
            return None
        return bisect.bisect_left(
            range(len(self.times)), True, key=lambda index: self._joules_above_idle(index) < math.inf
        )

    def total_joules(self, index: int) -> float:
        return self._joules_above_idle(index) + self._idle_w * self.times[index]

    def plan_at(self, index: int) -> EnergyPlan:
        distribution = self._find_distribution(index)
        assert distribution is not None
        return EnergyPlan(
            self.times[index], self.total_joules(index), dict(zip(self._names, distribution[1], strict=True))
        )

    def cheapest_index(self, first: int, last: int) -> int:
        """Return the index of the duration with the fewest joules, within JOULES_TOLERANCE in large cohorts."""
        best = min((first, last), key=lambda index: (self.total_joules(index), index))
        stack = [(first, last)]
        while stack:
            low, high = stack.pop()
            if high - low < 2 or self._lower_bound_j(low, high) >= self.total_joules(best) * self._tolerance:
                continue
            middle = (low + high) // 2
            best = min((best, middle), key=lambda index: (self.total_joules(index), index))
            stack += [(low, middle), (middle, high)]
        return best

    def shortest_index(self, first: int, last: int, limit_j: float) -> int | None:
        if self.total_joules(first) <= limit_j:
            return first
        if last - first > 1 and self._lower_bound_j(first, last) <= limit_j:
            middle = (first + last) // 2
            if (index := self.shortest_index(first, middle, limit_j)) is not None:
                return index
            return self.shortest_index(middle, last, limit_j)
        return last if self.total_joules(last) <= limit_j else None

    def _lower_bound_j(self, low: int, high: int) -> float:
        return self._joules_above_idle(high) + self._idle_w * self.times[low + 1]

    def _joules_above_idle(self, index: int) -> float:
        distribution = self._find_distribution(index)
        return math.inf if distribution is None else distribution[0]

    def _find_distribution(self, index: int) -> tuple[float, tuple[int, ...]] | None:
        if index not in self._distributions:
            self._distributions[index] = self._distribute_work(self.times[index])
        return self._distributions[index]

    def _distribute_work(self, limit_s: float) -> tuple[float, tuple[int, ...]] | None:
        """Return the joules above idle and each device's epochs, or None if the work needs more time."""
        options = [
            [_EpochOption(examples * epochs, joules, epochs) for epochs, joules in _feasible_options(table, limit_s)]
            for examples, table in self._tables
        ]
        if not all(options) or sum(max(device_options)[0] for device_options in options) < self._passes:
            return None
        price, options_by_device = _distribute_by_price(options, self._passes)
        limit_j = sum(option.joules for option in options_by_device) * self._tolerance
        options_by_device = _distribute_exactly(options, self._passes, price, limit_j) or options_by_device
        return sum(option.joules for option in options_by_device), tuple(option.epochs for option in options_by_device)


class _EpochOption(NamedTuple):
    """Number of epochs that a device can train within a time limit.

    Attributes:
        work: Number of examples times epochs.
        joules: Fewest joules above idle.
        epochs: Number of epochs.
    """

    work: int
    joules: float
    epochs: int


def _distribute_by_price(options: Sequence[Sequence[_EpochOption]], passes: int) -> tuple[float, list[_EpochOption]]:
    """Return the price in joules per example at which all the work is done, and the option of each device.

    Each device starts with its cheapest option. Steps to more work are then taken in the order of their price per
    example.
    """
    selected_options, steps = [], []
    for index, device_options in enumerate(options):
        current = min(device_options, key=lambda option: (option.joules, -option.work))
        selected_options.append(current)
        while larger := [option for option in device_options if option.work > current.work]:
            price, _, option = min(
                ((option.joules - current.joules) / (option.work - current.work), -option.work, option)
                for option in larger
            )
            steps.append((price, option.work, index, option))
            current = option
    done_work, price = sum(option.work for option in selected_options), 0.0
    for step_price, _, index, option in sorted(steps):  # the prices of a device ascend, so its steps stay in order
        if done_work >= passes:
            break
        other_work = done_work - selected_options[index].work
        done_work, price = other_work + option.work, step_price
        sufficient = [candidate for candidate in options[index] if other_work + candidate.work >= passes]
        # a smaller last step may be enough
        selected_options[index] = min(sufficient, key=lambda candidate: candidate.joules, default=option)
    return price, selected_options


def _distribute_exactly(
    options: Sequence[Sequence[_EpochOption]], passes: int, price: float, limit_j: float
) -> list[_EpochOption] | None:
    """Return the cheapest options that do all the work for fewer joules than `limit_j`, or None.

    The sums of work and joules are extended device by device. A sum is dropped if another one has more work for fewer
    joules, or if the remaining devices must raise it to `limit_j` at this price. The result is also None if there are
    too many sums.
    """
    import numpy as np  # slow import, not needed by commands that only read a log

    min_prices = [min(option.joules - price * option.work for option in device_options) for device_options in options]
    min_remaining_j = sum(min_prices) + price * passes
    work, joules = np.zeros(1), np.zeros(1)
    kept_indices: list[np.ndarray] = []
    for device_options, min_price in zip(options, min_prices, strict=True):
        min_remaining_j -= min_price
        work_sums = np.minimum(work[:, None] + [option.work for option in device_options], passes).ravel()
        joule_sums = (joules[:, None] + [option.joules for option in device_options]).ravel()
        candidates = np.flatnonzero(joule_sums - price * work_sums + min_remaining_j < limit_j)
        indices = candidates[_pareto_indices(work_sums[candidates], joule_sums[candidates])]
        if not 0 < len(indices) <= MAX_SUMS / len(options):
            return None
        kept_indices.append(indices)
        work, joules = work_sums[indices], joule_sums[indices]
    if work[0] < passes:
        return None
    index, selected_options = 0, []
    for device_options, indices in zip(reversed(options), reversed(kept_indices), strict=True):
        origin, option = divmod(int(indices[index]), len(device_options))
        selected_options.append(device_options[option])
        index = origin
    return selected_options[::-1]


def _options_by_epochs(choices: Sequence[EpochChoice]) -> dict[int, tuple[list[float], list[float]]]:
    """Return, for each number of epochs, ascending times with the fewest joules possible by each time."""
    options: dict[int, tuple[list[float], list[float]]] = {}
    for epochs, group in itertools.groupby(
        sorted(choices, key=lambda choice: choice.epochs), lambda choice: choice.epochs
    ):
        times: list[float] = []
        joules: list[float] = []
        for choice in sorted(group):
            if not joules or choice.joules < joules[-1]:
                times.append(choice.seconds)
                joules.append(choice.joules)
        options[epochs] = times, joules
    return options


def _feasible_options(
    table: Mapping[int, tuple[list[float], list[float]]], limit_s: float
) -> Iterator[tuple[int, float]]:
    """Yield (epochs, fewest joules) for the numbers of epochs that are possible within `limit_s`."""
    for epochs, (times, joules) in table.items():
        if index := bisect.bisect_right(times, limit_s):
            yield epochs, joules[index - 1]


def _pareto_indices(work: np.ndarray, joules: np.ndarray) -> np.ndarray:
    """Return the indices of options that no other option beats in work and joules, the most work first."""
    import numpy as np

    order = np.lexsort((joules, -work))
    cheapest = np.minimum.accumulate(joules[order])
    return order[np.flatnonzero(np.diff(cheapest, prepend=math.inf) < 0)]
