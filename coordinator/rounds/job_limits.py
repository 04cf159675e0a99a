"""Limits of a job: [stop].

Limits are compared with the totals and evaluations of the log between rounds. So a job can exceed a limit by one round,
and its result is that of a whole round. Joules do not include tasks without a meter: a job with `max_joules` on devices
without meters continues, and reports after each round how many tasks were not counted.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec.structs import replace

from fedquilt import metrics
from fedquilt.coordinator.settings import JobLimits
from fedquilt.core import BlobRef, EvaluationSums, Method, Update

ROUNDING: Final = 1e-9  # by which a gain may be below `min_gain`


class ResourceUsage(msgspec.Struct, frozen=True):
    joules: float = 0.0  # gross, of the metered tasks
    metered: int = 0  # number of metered tasks
    unmetered: int = 0  # number of tasks without a meter
    bytes: int = 0
    wall_s: float = 0.0  # of committed rounds

    def add_update(self, update: Update) -> ResourceUsage:
        usage = update.usage
        return replace(
            self,
            joules=self.joules + (usage.energy_j or 0.0),
            metered=self.metered + (usage.energy_j is not None),
            unmetered=self.unmetered + (usage.energy_j is None),
            bytes=self.bytes + update.down_bytes + update.up_bytes,
        )


class BestEvaluation(msgspec.Struct, frozen=True):
    """Best of the evaluations so far by the main metric, and the number of evaluations without a gain since."""

    metric: str  # a key of `metrics.KNOWN`
    value: float
    rounds: int  # completed before it
    state: BlobRef  # that was evaluated
    reference: float  # value from which the next gain is measured
    without_gain: int = 0

    def describe(self) -> str:
        value = metrics.format_value(metrics.KNOWN[self.metric], self.value)
        return f"{metrics.KNOWN[self.metric].title} {value} after {self.rounds} round{'s' * (self.rounds != 1)}"


def add_evaluation(
    best: BestEvaluation | None, sums: EvaluationSums | None, state: BlobRef | None, rounds: int, min_gain: float
) -> BestEvaluation | None:
    """Return the best evaluation after one more.

    Args:
        best: The best evaluation so far, or None.
        sums: The evaluation, or None if no device has evaluated.
        state: The evaluated state.
        rounds: The number of rounds completed before it.
        min_gain: The least change of the main metric for the better that counts as a gain.
    """
    if (main := metrics.main_metric(sums)) is None or state is None:
        return best
    metric, value = main
    if best is None or best.metric != metric.name:
        return BestEvaluation(metric.name, value, rounds, state, value)
    sign = 1 if metric.higher else -1
    gain = sign * (value - best.reference)
    gained = gain > 0 and gain >= min_gain - ROUNDING
    best = (
        replace(best, reference=value, without_gain=0) if gained else replace(best, without_gain=best.without_gain + 1)
    )
    return replace(best, value=value, rounds=rounds, state=state) if sign * (value - best.value) > 0 else best


def describe_reached_limit(limits: JobLimits, spent: ResourceUsage, best: BestEvaluation | None = None) -> str | None:
    if limits.patience is not None and best is not None and best.without_gain >= limits.patience:
        least = f" of {limits.min_gain:g}" if limits.min_gain else ""
        some = f"{best.without_gain} evaluation{'s' * (best.without_gain > 1)}"
        return f"patience: no gain{least} in {some}; the best is {best.describe()}"
    if limits.max_joules is not None and spent.joules >= limits.max_joules:
        return f"max_joules: {spent.joules:.4g} J of {limits.max_joules:.4g} J are used up{_unmetered_suffix(spent)}"
    if limits.max_bytes is not None and spent.bytes >= limits.max_bytes:
        return f"max_bytes: {spent.bytes} bytes of {limits.max_bytes} are used up"
    if limits.max_wall_s is not None and spent.wall_s >= limits.max_wall_s:
        return f"max_wall_s: {spent.wall_s:.4g} s of {limits.max_wall_s:.4g} s are used up"
    return None


def describe_unmetered_tasks(limits: JobLimits, spent: ResourceUsage) -> str | None:
    """Return a sentence on tasks missing from the joules, or None without tasks or a limit."""
    if limits.max_joules is None or not spent.unmetered:
        return None
    if not spent.metered:
        return (
            f"max_joules = {limits.max_joules:.4g} ends nothing here: no board that has answered has a meter for its "
            "joules; the job runs to its rounds, or to another limit of [stop]"
        )
    return f"max_joules counts {spent.joules:.4g} J of {limits.max_joules:.4g} J{_unmetered_suffix(spent)}"


def _unmetered_suffix(spent: ResourceUsage) -> str:
    if not spent.unmetered:
        return ""
    return f", without {spent.unmetered} task{'s' * (spent.unmetered > 1)} on boards that have no meter"


def describe_early_end(method: Method, name: str, rounds: int, round: int) -> str | None:
    """Return a sentence on a job that ends before its method has finished, or None.

    Args:
        method: The method of the job.
        name: The name of the method.
        rounds: The greatest number of rounds of the job.
        round: The number of the committed round.
    """
    if method.done is Method.done or round + 1 < rounds:
        return None
    return f"the job's {rounds} rounds are over before {name} has ended: the result is what it has so far; raise rounds"
