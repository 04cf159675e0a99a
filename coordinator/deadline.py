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
    energy     the time that needs the fewest joules of all boards asked, waiting included, with epochs moved to
               boards that need fewer where the method allows it: `energy_plan`. Times are those of "predicted", at
               every point. A board without known joules keeps its epochs and its time. At the first round, or
               without profiles, it is "predicted"

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
from fedquilt.coordinator import energy_plan
from fedquilt.coordinator.settings import Cohort
from fedquilt.core import OperatingPoint, Profile, Update, Work
from fedquilt.core.messages import ADDED

RECENT = 5  # rounds remembered of each device
PERCENTILE = 0.9  # share of the devices asked that is expected in time, or the quorum if that is more
FLOOR_S = 10.0  # messages, claims and small blobs take some time even without computation
Z90 = statistics.NormalDist().inv_cdf(0.9)
OWN_SPREAD = 0.2  # of log(time / profile), between a device's rounds: assumed, and worth PRIOR observations
FLEET_SPREAD = 0.5  # likewise between devices, and of a profile without any observation
PRIOR = 2
ASSUMED = cost_model.Link(bytes_per_s=1e6)  # until the fleet has shown what transfers take


class Took(NamedTuple):
    """Duration of one device's part in one round."""

    round: int
    seconds: float  # from request to the arrival of its update
    work: float  # `Ask.amount` of its task
    busy_s: float = 0.0  # part of `seconds` within the task itself
    expected_s: float | None = None  # duration predicted by the board's profile, at the point at which the task ran
    examples: int = 1  # of the device's own, that `expected_s` counts
    bytes: int = 0  # of blobs, down and up

    @property
    def rest_s(self) -> float:
        """Seconds outside the task itself: transfers, mostly."""
        return max(self.seconds - self.busy_s, 0.0)


class Ask(NamedTuple):
    """Work of one device in a round: what determines its duration."""

    work: Work = Work()
    profile: Profile | None = None
    bytes: int = 0  # of blobs, some of which the device may have
    epochs: int = 0  # in `work`, where the method lets devices train for unequal numbers of them; 0: it does not
    epoch: Work = Work()  # one of them, the only part of `work` that grows with their number

    def trained_for(self, epochs: int) -> Ask:
        """The same task with another number of epochs."""
        more = epochs - self.epochs
        sums = {name: getattr(self.work, name) + more * getattr(self.epoch, name) for name in ADDED}
        return self._replace(work=msgspec.structs.replace(self.work, **sums), epochs=epochs)

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


def timed(
    known: Known, update: Update, work: Mapping[str, float], took_s: float | None, expected_s: float | None
) -> Known:
    """Durations with that of an answer, whose fact says `took_s` and `expected_s`; `work` is `Ask.amount` by device."""
    if took_s is None:
        return known
    usage = update.usage
    amount = work.get(update.device, 1.0)
    moved = usage.down_bytes + usage.up_bytes
    took = Took(update.round, took_s, amount, usage.wall_s, expected_s, usage.examples or 1, moved)
    return noted(known, update.device, took)


class Allowed(NamedTuple):
    """What a rule decides for a round."""

    seconds: float | None = None  # until its deadline; None: `deadline_s`, for lack of a prediction
    epochs: Mapping[str, int] = {}  # device -> epochs, where they are not those of `Ask`


Policy: TypeAlias = Callable[[Cohort, Known, Asks], Allowed]


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


def allowed(cohort: Cohort, known: Known, asked: Asks) -> Allowed:
    """Decide a round with these tasks by the cohort's rule: never less than FLOOR_S or more than `deadline_s`."""
    found = POLICIES[cohort.deadline](cohort, known, asked)
    if found.seconds is None:
        return found
    return found._replace(seconds=min(max(found.seconds, FLOOR_S), cohort.deadline_s))


def fixed(cohort: Cohort, known: Known, asked: Asks) -> Allowed:
    """No prediction: `deadline_s` applies."""
    return Allowed()


# -- predicted ------------------------------------------------------------------------------------


def predicted(cohort: Cohort, known: Known, asked: Asks) -> Allowed:
    """Prediction for the round: a high percentile over devices of their 90th percentiles, plus slack."""
    fleet = Fleet.of(known)
    found = [_upper_s(known.get(device, ()), ask, fleet) for device, ask in asked.items()]
    times = sorted(time for time in found if time is not None)
    if not times or len(times) < len(found):
        return Allowed()
    needed = max(PERCENTILE, cohort.quorum / (1 + cohort.over_select))
    return Allowed((1 + cohort.slack) * times[math.ceil(needed * len(times)) - 1])


class Fleet(NamedTuple):
    """Assumptions about a device that has not answered, from those that have."""

    logs: tuple[float, ...]  # median of log(time / profile) of each device
    rest_s: float  # longest time outside the task itself
    pace_s: float | None  # slowest pace
    examples: int = 0  # most that a device has; 0: none has told
    link: cost_model.Link = ASSUMED

    def fetch_s(self, ask: Ask) -> float:
        """Time outside the task of a device that has not answered: as others', and as its bytes will take."""
        return max(self.rest_s, self.link.seconds(ask.bytes))

    def examples_of(self, took: Sequence[Took], ask: Ask) -> int:
        """Examples of a device's own: as it told, else the most of another, else as many as the task uses."""
        told = took[-1].examples if took else self.examples
        return told or ask.work.examples or 1

    @staticmethod
    def of(known: Known) -> Fleet:
        """Summarise the durations of all devices."""
        logs = tuple(statistics.median(own) for took in known.values() if (own := _logs(took)))
        rest_s = max((_rest_s(took) for took in known.values()), default=0.0)
        examples = max((each.examples for took in known.values() for each in took), default=0)
        slowest = max((pace(took) for took in known.values()), default=None)
        link = cost_model.Link.measured([(each.bytes, each.rest_s) for took in known.values() for each in took])
        return Fleet(logs, rest_s, slowest, examples, link or ASSUMED)


def _upper_s(took: Sequence[Took], ask: Ask, fleet: Fleet) -> float | None:
    """Time that a device exceeds once in ten rounds; None: nothing to predict it from."""
    base_s, own = ask.expected_s(fleet.examples_of(took, ask)), _logs(took)
    if base_s is not None and own:
        return _rest_s(took) + base_s * _p90(own, OWN_SPREAD)
    if took:
        return pace(took) * ask.amount
    if base_s is not None and fleet.logs:
        return fleet.fetch_s(ask) + base_s * _p90(fleet.logs, FLEET_SPREAD)
    if fleet.pace_s is not None:
        return fleet.pace_s * ask.amount
    if base_s is not None and (ask.work.examples or not ask.work.flops_per_example):  # else it is half a prediction
        return fleet.fetch_s(ask) + base_s * _p90((), FLEET_SPREAD)
    return None


def pace(took: Sequence[Took]) -> float:
    """Seconds of a device per unit of work: the slowest of its last rounds."""
    return max(each.seconds / each.work for each in took)


def _rest_s(took: Sequence[Took]) -> float:
    return max(each.rest_s for each in took)


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


def paper(cohort: Cohort, known: Known, asked: Asks) -> Allowed:
    """Slowest time of the last round, times the ratio of this round's work to that one's (FedStitch, section 4.4)."""
    every = [each for took in known.values() for each in took]
    if not every:
        return Allowed()
    last = max(each.round for each in every)
    before = [each for each in every if each.round == last]
    ratio = max(ask.amount for ask in asked.values()) / max(each.work for each in before)  # mu * sigma
    return Allowed(max(each.seconds for each in before) * ratio)


# -- energy ---------------------------------------------------------------------------------------


def energy(cohort: Cohort, known: Known, asked: Asks) -> Allowed:
    """The plan of fewest joules within the cohort's seconds, or the shortest within its joules."""
    problem = energy_problem(cohort, known, asked)
    plan = problem and energy_planned(cohort, *problem)
    if not plan:
        return predicted(cohort, known, asked)
    moved = {device: plan.epochs[device] for device, ask in asked.items() if ask.epochs not in (0, plan.epochs[device])}
    return Allowed(plan.seconds, moved)


def energy_planned(cohort: Cohort, boards: Mapping[str, energy_plan.Board], passes: int) -> energy_plan.Plan | None:
    """The plan of a cohort's bounds, for what `energy_problem` says; None: there is none."""
    if cohort.joules_per_round is not None:
        return energy_plan.least_seconds(boards, passes, cohort.joules_per_round)
    return energy_plan.least_joules(boards, passes, min(cohort.seconds_per_round or math.inf, cohort.deadline_s))


def energy_problem(cohort: Cohort, known: Known, asked: Asks) -> tuple[dict[str, energy_plan.Board], int] | None:
    """Choices of each board, and how many examples the cohort goes through.

    None: of one of the boards no time can be predicted, or of none the joules.
    """
    fleet, boards, priced = Fleet.of(known), {}, False
    for device, ask in asked.items():
        took = known.get(device, ())
        choices = _choices(cohort, took, ask, fleet)
        priced = priced or bool(choices)
        if not choices and (upper_s := _upper_s(took, ask, fleet)) is not None:
            choices = (energy_plan.Choice(upper_s, 0.0, ask.epochs or 1),)
        if not choices:
            return None
        examples = fleet.examples_of(took, ask)
        idle_w = ask.profile.idle_w if ask.profile else None
        boards[device] = energy_plan.Board(choices, examples, idle_w or 0.0)
    passes = sum(boards[device].examples * (ask.epochs or 1) for device, ask in asked.items())
    return (boards, passes) if priced else None


def _choices(cohort: Cohort, took: Sequence[Took], ask: Ask, fleet: Fleet) -> tuple[energy_plan.Choice, ...]:
    """Times and joules above idle at each point of a board, for each number of epochs; (): not known.

    Points that another one beats in both are left out. A device that has not answered keeps its epochs.
    """
    own = _logs(took)
    logs = own or fleet.logs
    if ask.profile is None or not logs:
        return ()
    spread = OWN_SPREAD if own else FLEET_SPREAD
    rest_s = _rest_s(took) if took else fleet.fetch_s(ask)
    middle, high = math.exp(statistics.median(logs)), _p90(logs, spread)
    examples, idle_w = fleet.examples_of(took, ask), ask.profile.idle_w or 0.0
    points: list[OperatingPoint] = list(ask.profile.points)
    found: list[energy_plan.Choice] = []
    most = int(ask.epochs * cohort.most_work) if own else ask.epochs
    numbers = [ask.epochs, *(each for each in range(1, most + 1) if each != ask.epochs)] if ask.epochs else [0]
    for epochs in numbers:
        work = (ask.trained_for(epochs) if epochs else ask).work.on(examples)
        timed = [(cost_model.seconds(work, point), point) for point in points if point.busy_w is not None]
        rising = sorted(((each_s, point) for each_s, point in timed if each_s is not None), key=lambda each: each[0])
        points, least = [], math.inf
        for each_s, point in rising:
            above_j = max((cost_model.joules(each_s, point) or 0.0) - idle_w * each_s, 0.0) * middle
            if above_j < least:
                least = above_j
                points.append(point)
                found.append(energy_plan.Choice(rest_s + each_s * high, above_j, epochs or 1))
    return tuple(found)


POLICIES: Mapping[str, Policy] = {"fixed": fixed, "predicted": predicted, "paper": paper, "energy": energy}
