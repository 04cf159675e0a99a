"""Limits of a job ([stop]), and the usage and evaluations with which they are compared.

Limits are compared between rounds with the totals and evaluations of the log. So a job can exceed a limit by one round.
Joules do not include tasks without a meter, whose number the job reports after each round.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec.structs import replace

from fedquilt import metrics
from fedquilt.coordinator.settings import JobLimits
from fedquilt.core import BlobRef, EvaluationSums, Update

GAIN_TOLERANCE: Final = 1e-9  # a gain may be this much below `min_gain`


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
    """Best evaluation so far by the main metric, and the number of later evaluations without a gain."""

    metric: str  # a key of `metrics.METRICS`
    value: float
    rounds: int  # completed before the evaluation
    state: BlobRef  # evaluated state
    reference: float  # value from which the next gain is measured
    without_gain: int = 0

    def describe(self) -> str:
        value = metrics.format_value(metrics.METRICS[self.metric], self.value)
        return f"{metrics.METRICS[self.metric].title} {value} after {self.rounds} round{'s' * (self.rounds != 1)}"


def add_evaluation(
    best: BestEvaluation | None, sums: EvaluationSums | None, state: BlobRef | None, rounds: int, min_gain: float
) -> BestEvaluation | None:
    """Return the best evaluation after an evaluation of `state` with the result `sums`.

    An evaluation without a main metric changes nothing. A gain below `min_gain` updates the best value, but
    `without_gain` still counts the evaluation.
    """
    if (main := metrics.main_metric(sums)) is None or state is None:
        return best
    metric, value = main
    if best is None or best.metric != metric.name:
        return BestEvaluation(metric.name, value, rounds, state, value)
    sign = 1 if metric.higher else -1
    gain = sign * (value - best.reference)
    if gain > 0 and gain >= min_gain - GAIN_TOLERANCE:
        best = replace(best, reference=value, without_gain=0)
    else:
        best = replace(best, without_gain=best.without_gain + 1)
    return replace(best, value=value, rounds=rounds, state=state) if sign * (value - best.value) > 0 else best


def describe_reached_limit(limits: JobLimits, usage: ResourceUsage, best: BestEvaluation | None = None) -> str | None:
    if limits.patience is not None and best is not None and best.without_gain >= limits.patience:
        min_gain = f" of {limits.min_gain:g}" if limits.min_gain else ""
        evaluations = f"{best.without_gain} evaluation{'s' * (best.without_gain > 1)}"
        return f"patience: no gain{min_gain} in {evaluations}; the best is {best.describe()}"
    if limits.max_joules is not None and usage.joules >= limits.max_joules:
        return f"max_joules: {usage.joules:.4g} J of {limits.max_joules:.4g} J are used{_unmetered_suffix(usage)}"
    if limits.max_bytes is not None and usage.bytes >= limits.max_bytes:
        return f"max_bytes: {usage.bytes} bytes of {limits.max_bytes} are used"
    if limits.max_wall_s is not None and usage.wall_s >= limits.max_wall_s:
        return f"max_wall_s: {usage.wall_s:.4g} s of {limits.max_wall_s:.4g} s are used"
    return None


def describe_unmetered_tasks(limits: JobLimits, usage: ResourceUsage) -> str | None:
    """Return a note if `max_joules` does not cover all tasks, because some have no meter, or else None."""
    if limits.max_joules is None or not usage.unmetered:
        return None
    if not usage.metered:
        return (
            f"max_joules = {limits.max_joules:.4g} has no effect: no device of this job measures its energy. The job "
            "ends after its rounds or at another limit of [stop]"
        )
    return f"{usage.joules:.4g} J of max_joules = {limits.max_joules:.4g} J are used{_unmetered_suffix(usage)}"


def _unmetered_suffix(usage: ResourceUsage) -> str:
    if not usage.unmetered:
        return ""
    return f", not counting {usage.unmetered} task{'s' * (usage.unmetered > 1)} on devices without a power meter"
