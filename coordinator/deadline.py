"""How long a round may take, decided when it opens from profiles and from how long earlier rounds took.

Pure functions of what is known: `Took` of each device's last rounds, and the `Ask` of each of the round's
devices. Policies, `[cohort] deadline`:
    fixed      `deadline_s`
    predicted  what each device's profile says of its work at its fastest point, corrected by how much longer
               than that its own tasks took of late, with their spread: its 90th percentile. Of these a high
               percentile over the devices asked, and `slack` more. Without a profile: its own pace
    paper      FedStitch (arXiv 2409.07202), section 4.4: the slowest time of the last round, d = max t_i, times the
               ratio of work, which is what its depth factor mu and pool factor sigma stand for. It never
               falls once devices slow down until they just meet it; here for comparison

A time is counted from the question to the answer, transfers included, as that is what a deadline bounds.
With a profile, what is not the task itself is kept apart, as it does not grow with the work; and a task's
time is compared with the profile at the point at which the board was held, so that boards which slow down
to meet a deadline do not lengthen the next one. No prediction is above `deadline_s`, and when one runs out
without a quorum the round goes on until there is one, or until `deadline_s`: a prediction can end a round
sooner than "fixed" would, never fail one that "fixed" would not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from fedquilt import cost_model
from fedquilt.coordinator.settings import Cohort
from fedquilt.core import OperatingPoint, Profile, Work

RECENT = 5  # rounds of a device that are remembered
PERCENTILE = 0.9  # share of the devices asked that is expected to be in time, or the quorum where it asks for more
FLOOR_S = 10.0  # messages, claims and small blobs take some time however little there is to compute
Z90 = statistics.NormalDist().inv_cdf(0.9)
OWN_SPREAD = 0.2  # of log(time / profile), between a device's rounds: assumed, and worth PRIOR observations
FLEET_SPREAD = 0.5  # likewise between devices, and of a profile that nothing has confirmed
PRIOR = 2
LINK_BYTES_PER_S = 1e6  # assumed of a device that has fetched nothing yet


class Took(NamedTuple):
    """What one device's part in one round took."""

    round: int
    seconds: float  # from being asked to its update being here
    work: float  # `Ask.amount` of what it was asked
    busy_s: float = 0.0  # of the seconds, in the task itself
    expected_s: float | None = None  # what the board's profile says of the task, at the point at which it ran


class Ask(NamedTuple):
    """What a round asks of one device, as far as time is concerned."""

    work: Work = Work()
    profile: Profile | None = None
    bytes: int = 0  # of blobs, some of which it may have

    @property
    def amount(self) -> float:
        """Work as one number; of a method that does not say what a round takes, all rounds take the same."""
        return amount(self.work) or 1.0

    @property
    def expected_s(self) -> float | None:
        """What the board's profile says of the task at its fastest point, as if it had one example of its own."""
        return expected_s(self.work, self.profile)


Known: TypeAlias = Mapping[str, tuple[Took, ...]]  # device -> its last rounds, oldest first
Asks: TypeAlias = Mapping[str, Ask]
Policy: TypeAlias = Callable[[Cohort, Known, Asks], float | None]


def amount(work: Work) -> float:
    """Work as one number: operations, as if a device had one example of its own.

    How many it has only the device knows; its pace comes to tell.
    """
    return work.on(1).flops


def expected_s(work: Work, profile: Profile | None, point: str | None = None) -> float | None:
    """What a profile says of a task at one of its points, or at the fastest; None: it does not say.

    `point` is as in `Usage`: None where the board's own governor was at work, which mostly is at the fastest;
    "a, then b" where it changed on the way, of which nobody knows the shares: the mean.
    """
    points: Sequence[OperatingPoint] = profile.points if profile else ()
    work = work.on(1)
    if point is None:
        every = [cost_model.seconds(work, each) for each in points]
        return min((time for time in every if time is not None), default=None)
    named = {each.name: each for each in points}
    held = [named.get(name) for name in point.split(", then ")]
    times = [None if each is None else cost_model.seconds(work, each) for each in held]
    found = [time for time in times if time is not None]
    return statistics.fmean(found) if len(found) == len(times) else None


def noted(known: Known, device: str, took: Took) -> Known:
    """What is known with one answer more."""
    return {**known, device: (*known.get(device, ()), took)[-RECENT:]}


def allowed_s(cohort: Cohort, known: Known, asked: Asks) -> float | None:
    """Seconds for a round that asks this of devices; None: `deadline_s`, as nothing tells more."""
    found = POLICIES[cohort.deadline](cohort, known, asked)
    return None if found is None else min(max(found, FLOOR_S), cohort.deadline_s)


def fixed(cohort: Cohort, known: Known, asked: Asks) -> float | None:
    return None


# -- predicted ------------------------------------------------------------------------------------


def predicted(cohort: Cohort, known: Known, asked: Asks) -> float | None:
    fleet = Fleet.of(known)
    found = [_upper_s(known.get(device, ()), ask, fleet) for device, ask in asked.items()]
    times = sorted(time for time in found if time is not None)
    if not times or len(times) < len(found):
        return None
    needed = max(PERCENTILE, cohort.quorum / (1 + cohort.over_select))
    return (1 + cohort.slack) * times[math.ceil(needed * len(times)) - 1]


class Fleet(NamedTuple):
    """What is taken for granted of a device that has not answered, from those that have."""

    logs: tuple[float, ...]  # of each device, log(time / profile): its middle one
    rest_s: float  # the longest that was not the task itself
    pace_s: float | None  # the slowest

    @staticmethod
    def of(known: Known) -> Fleet:
        logs = tuple(statistics.median(own) for took in known.values() if (own := _logs(took)))
        rest_s = max((_rest_s(took) for took in known.values()), default=0.0)
        return Fleet(logs, rest_s, max((pace(took) for took in known.values()), default=None))


def _upper_s(took: Sequence[Took], ask: Ask, fleet: Fleet) -> float | None:
    """A time that a device exceeds once in ten rounds; None: nothing tells."""
    base_s, own = ask.expected_s, _logs(took)
    if base_s is not None and own:
        return _rest_s(took) + base_s * _p90(own, OWN_SPREAD)
    if took:
        return pace(took) * ask.amount
    fetch_s = ask.bytes / LINK_BYTES_PER_S
    if base_s is not None and fleet.logs:
        return max(fleet.rest_s, fetch_s) + base_s * _p90(fleet.logs, FLEET_SPREAD)
    if fleet.pace_s is not None:
        return fleet.pace_s * ask.amount
    if base_s is not None and not ask.work.flops_per_example:  # else the profile knows the half of it
        return fetch_s + base_s * _p90((), FLEET_SPREAD)
    return None


def pace(took: Sequence[Took]) -> float:
    """A device's seconds for a unit of work: of its last rounds the slowest."""
    return max(each.seconds / each.work for each in took)


def _rest_s(took: Sequence[Took]) -> float:
    return max(max(each.seconds - each.busy_s, 0.0) for each in took)


def _logs(took: Sequence[Took]) -> list[float]:
    return [math.log(each.busy_s / each.expected_s) for each in took if each.expected_s and each.busy_s > 0]


def _p90(logs: Sequence[float], spread: float) -> float:
    """The 90th percentile of the next ratio after these, as of a log-normal around their median.

    Its variance is theirs and `spread` squared, the latter with the weight of PRIOR observations.
    """
    if not logs:
        return math.exp(Z90 * spread)
    middle = statistics.median(logs)
    squares = sum((each - middle) ** 2 for each in logs) + PRIOR * spread**2
    variance = squares / (len(logs) - 1 + PRIOR) * (1 + 1 / len(logs))
    return math.exp(middle + Z90 * math.sqrt(variance))


# -- paper ----------------------------------------------------------------------------------------


def paper(cohort: Cohort, known: Known, asked: Asks) -> float | None:
    every = [each for took in known.values() for each in took]
    if not every:
        return None
    last = max(each.round for each in every)
    before = [each for each in every if each.round == last]
    ratio = max(ask.amount for ask in asked.values()) / max(each.work for each in before)  # mu * sigma
    return max(each.seconds for each in before) * ratio


POLICIES: Mapping[str, Policy] = {"fixed": fixed, "predicted": predicted, "paper": paper}
