"""Deadline of a round, computed when it opens from profiles and from the durations of earlier rounds.

Pure functions of `Took`, the durations of each device's last rounds, and `Ask`, the work of each of the round's
devices. Policies, `[cohort] deadline`:
    fixed      `deadline_s`
    predicted  the time that each device's profile predicts at its fastest point, times the ratio of its own
               recent tasks to that prediction, with their spread: its 90th percentile. Of these a high
               percentile over the devices asked, plus `slack`. Without a profile: the device's own pace
    paper      FedStitch (arXiv 2409.07202), section 4.4: the slowest time of the last round, d = max t_i, times the
               ratio of work, which the paper's depth factor mu and pool factor sigma express. It never
               falls once devices slow down until they just meet it; kept for comparison

A time runs from the request to the answer, transfers included, as the deadline bounds both.
With a profile, the time outside the task is separate, as it does not grow with the work; and a task's
time is compared with the profile at the point at which the board was held, so that boards which slow down
to meet a deadline do not lengthen the next one. No prediction exceeds `deadline_s`, and when one passes
without a quorum the round continues until there is one, or until `deadline_s`: a prediction can end a round
earlier than "fixed", and never fails one that "fixed" would complete.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from fedquilt import cost_model
from fedquilt.coordinator.settings import Cohort
from fedquilt.core import OperatingPoint, Profile, Work

RECENT = 5  # rounds remembered of each device
PERCENTILE = 0.9  # share of the devices asked that is expected in time, or the quorum if that is more
FLOOR_S = 10.0  # messages, claims and small blobs take some time even without computation
Z90 = statistics.NormalDist().inv_cdf(0.9)
OWN_SPREAD = 0.2  # of log(time / profile), between a device's rounds: assumed, and worth PRIOR observations
FLEET_SPREAD = 0.5  # likewise between devices, and of a profile without any observation
PRIOR = 2
LINK_BYTES_PER_S = 1e6  # assumed for a device that has fetched nothing yet


class Took(NamedTuple):
    """Duration of one device's part in one round."""

    round: int
    seconds: float  # from request to the arrival of its update
    work: float  # `Ask.amount` of its task
    busy_s: float = 0.0  # part of `seconds` within the task itself
    expected_s: float | None = None  # duration predicted by the board's profile, at the point at which the task ran
    examples: int = 1  # of the device's own, that `expected_s` counts


class Ask(NamedTuple):
    """Work of one device in a round: what determines its duration."""

    work: Work = Work()
    profile: Profile | None = None
    bytes: int = 0  # of blobs, some of which the device may have

    @property
    def amount(self) -> float:
        """Work as one number; 1 where the method predicts none, so that all rounds count alike."""
        return amount(self.work) or 1.0

    def expected_s(self, examples: int = 1) -> float | None:
        """Duration predicted by the board's profile at its fastest point, with so many examples of the device's own."""
        return expected_s(self.work, self.profile, examples=examples)


class Short(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory that a device lacked. 0 and None: not known."""

    peak_bytes: int = 0
    flops: float = 0.0
    budget_bytes: int | None = None

    @staticmethod
    def of(ask: Ask) -> Short:
        """Requirements of a task on a device."""
        return Short(ask.work.peak_bytes, ask.work.on(1).flops, ask.profile.budget_bytes if ask.profile else None)

    def same(self, other: Short) -> bool:
        """Whether memory and work are no better than in `other`, so that the answer would be the same."""
        if self.budget_bytes != other.budget_bytes:
            return False
        if self.peak_bytes and other.peak_bytes:
            return other.peak_bytes >= self.peak_bytes
        return other.flops >= self.flops


Known: TypeAlias = Mapping[str, tuple[Took, ...]]  # device -> its last rounds, oldest first
Asks: TypeAlias = Mapping[str, Ask]
Policy: TypeAlias = Callable[[Cohort, Known, Asks], float | None]


def amount(work: Work) -> float:
    """Work as one number: operations, as if a device had as many examples of its own as the task uses at most, or one.

    Only the device knows how many it has; its measured pace makes up for that.
    """
    return work.on(work.examples or 1).flops


def expected_s(work: Work, profile: Profile | None, point: str | None = None, examples: int = 1) -> float | None:
    """Duration of a task that a profile predicts at one of its points, or at the fastest; None: no prediction.

    `point` is as in `Usage`: None where the board's own governor was active, which mostly means the fastest;
    "a, then b" where it changed during the task, in unknown shares: their mean. `examples`: the device's own.
    """
    points: Sequence[OperatingPoint] = profile.points if profile else ()
    work = work.on(examples)
    if point is None:
        every = [cost_model.seconds(work, each) for each in points]
        return min((time for time in every if time is not None), default=None)
    named = {each.name: each for each in points}
    held = [named.get(name) for name in point.split(", then ")]
    times = [None if each is None else cost_model.seconds(work, each) for each in held]
    found = [time for time in times if time is not None]
    return statistics.fmean(found) if len(found) == len(times) else None


def noted(known: Known, device: str, took: Took) -> Known:
    """Durations with one more answer."""
    return {**known, device: (*known.get(device, ()), took)[-RECENT:]}


def allowed_s(cohort: Cohort, known: Known, asked: Asks) -> float | None:
    """Seconds allowed for a round with these tasks; None: `deadline_s`, for lack of a prediction."""
    found = POLICIES[cohort.deadline](cohort, known, asked)
    return None if found is None else min(max(found, FLOOR_S), cohort.deadline_s)


def fixed(cohort: Cohort, known: Known, asked: Asks) -> float | None:
    """No prediction: `deadline_s` applies."""
    return None


# -- predicted ------------------------------------------------------------------------------------


def predicted(cohort: Cohort, known: Known, asked: Asks) -> float | None:
    """Prediction for the round: a high percentile over devices of their 90th percentiles, plus slack."""
    fleet = Fleet.of(known)
    found = [_upper_s(known.get(device, ()), ask, fleet) for device, ask in asked.items()]
    times = sorted(time for time in found if time is not None)
    if not times or len(times) < len(found):
        return None
    needed = max(PERCENTILE, cohort.quorum / (1 + cohort.over_select))
    return (1 + cohort.slack) * times[math.ceil(needed * len(times)) - 1]


class Fleet(NamedTuple):
    """Assumptions about a device that has not answered, from those that have."""

    logs: tuple[float, ...]  # median of log(time / profile) of each device
    rest_s: float  # longest time outside the task itself
    pace_s: float | None  # slowest pace
    examples: int = 0  # most that a device has; 0: none has told

    @staticmethod
    def of(known: Known) -> Fleet:
        """Summarise the durations of all devices."""
        logs = tuple(statistics.median(own) for took in known.values() if (own := _logs(took)))
        rest_s = max((_rest_s(took) for took in known.values()), default=0.0)
        examples = max((each.examples for took in known.values() for each in took), default=0)
        return Fleet(logs, rest_s, max((pace(took) for took in known.values()), default=None), examples)


def _upper_s(took: Sequence[Took], ask: Ask, fleet: Fleet) -> float | None:
    """Time that a device exceeds once in ten rounds; None: nothing to predict it from."""
    told = took[-1].examples if took else fleet.examples  # only the device knows how many it has, until it has told
    many = told or ask.work.examples or 1
    base_s, own = ask.expected_s(many), _logs(took)
    if base_s is not None and own:
        return _rest_s(took) + base_s * _p90(own, OWN_SPREAD)
    if took:
        return pace(took) * ask.amount
    fetch_s = ask.bytes / LINK_BYTES_PER_S
    if base_s is not None and fleet.logs:
        return max(fleet.rest_s, fetch_s) + base_s * _p90(fleet.logs, FLEET_SPREAD)
    if fleet.pace_s is not None:
        return fleet.pace_s * ask.amount
    if base_s is not None and (ask.work.examples or not ask.work.flops_per_example):  # else it is half a prediction
        return fetch_s + base_s * _p90((), FLEET_SPREAD)
    return None


def pace(took: Sequence[Took]) -> float:
    """Seconds of a device per unit of work: the slowest of its last rounds."""
    return max(each.seconds / each.work for each in took)


def _rest_s(took: Sequence[Took]) -> float:
    return max(max(each.seconds - each.busy_s, 0.0) for each in took)


def _logs(took: Sequence[Took]) -> list[float]:
    return [math.log(each.busy_s / each.expected_s) for each in took if each.expected_s and each.busy_s > 0]


def _p90(logs: Sequence[float], spread: float) -> float:
    """90th percentile of the next ratio after these, as of a log-normal around their median.

    Its variance combines theirs and `spread` squared, the latter with the weight of PRIOR observations.
    """
    if not logs:
        return math.exp(Z90 * spread)
    middle = statistics.median(logs)
    squares = sum((each - middle) ** 2 for each in logs) + PRIOR * spread**2
    variance = squares / (len(logs) - 1 + PRIOR) * (1 + 1 / len(logs))
    return math.exp(middle + Z90 * math.sqrt(variance))


# -- paper ----------------------------------------------------------------------------------------


def paper(cohort: Cohort, known: Known, asked: Asks) -> float | None:
    """Slowest time of the last round, times the ratio of this round's work to that one's (FedStitch, section 4.4)."""
    every = [each for took in known.values() for each in took]
    if not every:
        return None
    last = max(each.round for each in every)
    before = [each for each in every if each.round == last]
    ratio = max(ask.amount for ask in asked.values()) / max(each.work for each in before)  # mu * sigma
    return max(each.seconds for each in before) * ratio


POLICIES: Mapping[str, Policy] = {"fixed": fixed, "predicted": predicted, "paper": paper}
