"""How long a round may take, decided when it opens from how long earlier rounds took.

Pure functions of what is known: `Took` of each device's last rounds, and the work that the round's
devices are asked for. Policies, `[cohort] deadline`:
    fixed      `deadline_s`
    predicted  each device's own pace times its work, a high percentile of that over the devices asked,
               and `slack` more
    paper      FedStitch (arXiv 2409.07202), section 4.4: the slowest time of the last round, d = max t_i, times the
               ratio of work, which is what its depth factor mu and pool factor sigma stand for. It never
               falls once devices slow down until they just meet it; here for comparison

A time is counted from the question to the answer, transfers included, as that is what a deadline bounds;
so a first round, which brings a device its blocks, makes the next predictions generous. No prediction is
above `deadline_s`, and when one runs out without a quorum the round goes on until there is one, or until
`deadline_s`: a prediction can end a round sooner than "fixed" would, never fail one that "fixed" would not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from fedquilt.coordinator.settings import Cohort
from fedquilt.core import Work

RECENT = 5  # rounds of a device that are remembered
PERCENTILE = 0.9  # share of the devices asked that is expected to be in time, or the quorum where it asks for more
FLOOR_S = 10.0  # messages, claims and small blobs take some time however little there is to compute


class Took(NamedTuple):
    """What one device's part in one round took."""

    round: int
    seconds: float  # from being asked to its update being here
    work: float  # `amount` of what it was asked


Known: TypeAlias = Mapping[str, tuple[Took, ...]]  # device -> its last rounds, oldest first
Policy: TypeAlias = Callable[[Cohort, Known, Mapping[str, float]], float | None]


def amount(work: Work) -> float:
    """Work as one number: operations, as if a device had one example of its own.

    How many it has only the device knows; its pace comes to tell.
    """
    return work.on(1).flops


def noted(known: Known, device: str, took: Took) -> Known:
    """What is known with one answer more."""
    return {**known, device: (*known.get(device, ()), took)[-RECENT:]}


def allowed_s(cohort: Cohort, known: Known, asked: Mapping[str, float]) -> float | None:
    """Seconds for a round that asks devices for so much work; None: `deadline_s`, as nothing tells more."""
    found = POLICIES[cohort.deadline](cohort, known, asked)
    return None if found is None else min(max(found, FLOOR_S), cohort.deadline_s)


def fixed(cohort: Cohort, known: Known, asked: Mapping[str, float]) -> float | None:
    return None


def predicted(cohort: Cohort, known: Known, asked: Mapping[str, float]) -> float | None:
    """A device not seen before is taken for as slow as the slowest."""
    paces = {device: pace(took) for device, took in known.items()}
    if not paces:
        return None
    slowest = max(paces.values())
    times = sorted(paces.get(device, slowest) * work for device, work in asked.items())
    needed = max(PERCENTILE, cohort.quorum / (1 + cohort.over_select))
    return (1 + cohort.slack) * times[math.ceil(needed * len(times)) - 1]


def pace(took: tuple[Took, ...]) -> float:
    """A device's seconds for a unit of work: of its last rounds the slowest.

    The place for what a board's profile says before it has answered anything.
    """
    return max(each.seconds / each.work for each in took)


def paper(cohort: Cohort, known: Known, asked: Mapping[str, float]) -> float | None:
    every = [each for took in known.values() for each in took]
    if not every:
        return None
    last = max(each.round for each in every)
    before = [each for each in every if each.round == last]
    ratio = max(asked.values()) / max(each.work for each in before)  # mu * sigma
    return max(each.seconds for each in before) * ratio


POLICIES: Mapping[str, Policy] = {"fixed": fixed, "predicted": predicted, "paper": paper}
