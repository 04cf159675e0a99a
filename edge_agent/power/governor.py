"""Local energy coordinator: chooses a task's operating point. Pure: numbers in, a point out.

Compared are the joules that the whole board uses until the deadline,

    E(point) = busy_w * t + idle_w * (deadline - t)

and not until the end of the work. A board that finishes early is not switched off, it waits for the round
to close and draws idle_w meanwhile; without that, every second saved would look free of cost, and racing
to idle would win whenever busy_w * t happens to fall with the clock. For one deadline the sum orders the points
as (busy_w - idle_w) * t does: what the work itself takes above idle. FedStitch (arXiv 2409.07202) has the same
sum in its equation 5, and its Table II shows that the order is an open question: from 1.12 to 1.30 GHz the time falls
by 12 % and the power as well, so there the fastest point is simply the best; from 0.85 to 1.12 GHz the
power grows by 25 % and the time falls by 17 %. So no point is preferred: each is computed.

Times and powers are those of `learned`: the profile's at first, and then what tasks of this engine and workload have
shown. An estimate is less sure the less is known of its point. Where the deadline is tight, a point counts as slow as
it may well be, so known points are chosen; where there is slack, as cheap as it may be, so unknown ones are tried
(as BoFL does, Middleware 2022), and are known from then on.

Policies:
    energy   the cheapest of the points that meet the deadline with `margin` to spare
    paper    FedStitch, section IV-D: the frequency goes down while the task is below the deadline and up while
             it is above, until just under it. That walk ends at the slowest point that meets the deadline with
             `margin`, whatever its power, so it is found directly; the paper gives neither step nor margin
    max      the fastest
    board    none: the board's own governor stays in charge
If no point meets the deadline, each policy takes the fastest. A point whose profile lacks the numbers
is left out; without any, the policy is `board`. An unknown idle_w lies between 0 and the least that any point draws at
work: the point is held that costs fewest joules above the cheapest one in the worse of these two cases. Joules are
linear in idle_w, so no value between them is worse.
The owner's bounds come first: a point above `max_w` is never chosen, whatever the deadline, and above `max_c`
nothing is held. The board's own governor, under `board` or for want of a point, heeds its power mode alone.

A task that turns out late is stepped up, never down, and at most once every STEP_S.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from fedquilt.core import OperatingPoint, Work
from fedquilt.core.latest import latest
from fedquilt.edge_agent.power.learned import Learned, Seen, estimates, taught

STEP_S: Final = 3.0  # shortest interval between changes of clocks: each takes time, and its effect has to be seen first
LEAST_DONE: Final = 0.02  # share of the work to be done at a point before its pace is meaningful
CAUTION: Final = 1.645  # spreads by which a point may be slower than estimated: one in twenty is
CURIOSITY: Final = 0.6  # spreads by which it is taken for cheaper than estimated

Policy: TypeAlias = Literal["energy", "paper", "max", "board"]


class Rule(NamedTuple):
    """Operator's policy."""

    policy: Policy = "energy"
    margin: float = 0.05  # share of the predicted time that is kept as reserve
    max_w: float | None = None  # most that a point may draw; None: no limit
    max_c: float | None = None  # hottest that the board may be at a held point; None: the clock helper's limit alone

    def permitted(self, points: Sequence[OperatingPoint]) -> Sequence[OperatingPoint]:
        """Points within `max_w`. One whose power is not known may be above it, and is left out."""
        if self.max_w is None:
            return points
        return [point for point in points if point.busy_w is not None and point.busy_w <= self.max_w]

    def too_hot(self, temperature_c: float | None) -> bool:
        """Whether nothing may be held at a temperature; one that is not known is too hot only if a limit is set."""
        return self.max_c is not None and (temperature_c is None or temperature_c > self.max_c)


class Forecast(NamedTuple):
    """Prediction of a task at one point."""

    point: OperatingPoint
    seconds: float
    most_s: float  # as long as it may take, as far as the point is unknown
    watts: float | None  # None: unknown
    spread: float  # of the joules, as a share of those above idle: 1 at the most

    def above_j(self, idle_w: float) -> float:
        """Joules of the work above an idle board's; the point's watts have to be known."""
        assert self.watts is not None
        return (self.watts - idle_w) * self.seconds

    def energy_j(self, left_s: float, idle_w: float) -> float:
        """Joules until the deadline, which is `left_s` ahead, idle included."""
        return self.above_j(idle_w) + idle_w * max(left_s, self.seconds)

    def least_j(self, left_s: float, idle_w: float) -> float:
        """As few joules as that may be, as far as the point is unknown."""
        return self.energy_j(left_s, idle_w) - CURIOSITY * self.spread * max(self.above_j(idle_w), 0.0)


def forecasts(points: Sequence[OperatingPoint], work: Work, learned: Learned = Learned()) -> list[Forecast]:
    """Predictions of a task at each point whose time can be predicted, fastest first.

    Args:
        points: of the board.
        work: of the task.
        learned: of this engine and workload on this board.
    """
    found = []
    for point, each in zip(points, estimates(learned, points, work), strict=True):
        if each is not None:
            most_s = each.seconds * (1 + CAUTION * each.seconds_spread)
            spread = min(math.hypot(each.seconds_spread, each.watts_spread), 1.0)
            found.append(Forecast(point, each.seconds, most_s, each.watts, spread))
    return sorted(found, key=lambda each: each.seconds)


@latest
def choose(
    rule: Rule,
    points: Sequence[OperatingPoint],
    work: Work,
    left_s: float,
    idle_w: float | None = None,
    learned: Learned = Learned(),
) -> OperatingPoint | None:
    """Choose the point to hold; None: leave the clocks to the board. Among equals the faster one."""
    found = forecasts(rule.permitted(points), work, learned)
    if rule.max_w is not None:
        found = [each for each in found if each.watts is not None and each.watts <= rule.max_w]
    if rule.policy == "board" or not found:
        return None
    if rule.policy == "max":
        return _fastest(found)
    if rule.policy == "energy" and all(each.watts is None for each in found):
        return None
    in_time = [each for each in found if max(each.seconds * (1 + rule.margin), each.most_s) <= left_s]
    if rule.policy == "paper" and in_time:
        return in_time[-1].point
    priced = [each for each in in_time if each.watts is not None]
    if not priced:
        return _fastest(found)
    if idle_w is not None:
        return min(priced, key=lambda each: (each.least_j(left_s, idle_w), each.seconds)).point
    bounds_w = (0.0, min(each.watts for each in found if each.watts is not None))
    cheapest_j = [min(each.least_j(left_s, bound_w) for each in priced) for bound_w in bounds_w]

    def excess_j(each: Forecast) -> float:
        return max(each.least_j(left_s, bound_w) - j for bound_w, j in zip(bounds_w, cheapest_j, strict=True))

    return min(priced, key=lambda each: (excess_j(each), each.seconds)).point


def step_up(
    rule: Rule,
    points: Sequence[OperatingPoint],
    seen: Seen,
    rest: Work,
    left_s: float,
    idle_w: float | None = None,
    learned: Learned = Learned(),
) -> OperatingPoint | None:
    """Choose a faster point for the rest of a task that would miss its deadline at the held one; None: stay.

    What the present stretch shows counts at once, however unlike all before it is: the task may be of a new kind.

    Args:
        rule: policy; only "energy" and "paper" step up.
        points: of the board.
        seen: present stretch, at the point held now.
        rest: work that is left.
        left_s: seconds until the deadline.
        idle_w: watts of the idle board; None: unknown.
        learned: before this stretch.
    """
    if rule.policy not in ("energy", "paper") or seen.work.tasks < LEAST_DONE or seen.seconds <= 0:
        return None
    rest_s = seen.seconds / seen.work.tasks * rest.tasks
    if rest_s <= left_s:
        return None
    known = taught(learned, seen, at_once=True)
    others = [point for point in points if point.name != seen.point.name]
    told = forecasts(others, rest, known)
    faster = [each.point for each in told if each.seconds < rest_s or _above(each.point, seen.point)]
    return choose(rule, faster, rest, left_s, idle_w, known)


def _fastest(found: Sequence[Forecast]) -> OperatingPoint:
    """The fastest by estimate, or the highest of the points that are above it: no work is slower at higher clocks.

    So a clock that seemed to be of no use, by a profile of other work, is raised before a task is late.
    """
    above = [each for each in found if _above(each.point, found[0].point)]
    return max([found[0], *above], key=lambda each: (sum(_clocks(each.point)), -each.seconds)).point


def _above(one: OperatingPoint, other: OperatingPoint) -> bool:
    """Whether a point has no clock below another's, and one above; a clock left to the board compares with none."""
    pairs = [(a, b) for a, b in zip(_clocks(one), _clocks(other), strict=True) if a and b]
    return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)


def _clocks(point: OperatingPoint) -> tuple[float, ...]:
    return (point.cpu_hz or 0.0, point.gpu_hz or 0.0, point.emc_hz or 0.0)
