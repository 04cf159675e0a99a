"""Acceptance of a model by the limits of its release, its check and its runner. Pure functions."""

from __future__ import annotations

import math
from typing import Final

from fedquilt.edge_agent.releases.release_kind import CheckResult
from fedquilt.edge_agent.runner_status import LATEST, RunnerStatus
from fedquilt.edge_agent.task.memory_budget import format_megabytes
from fedquilt.edge_agent.task.protocol import WorkResult
from fedquilt.wire import ReleaseLimits

ERRORS: Final = 3.0  # standard errors by which an accuracy has to miss its limit: chance does so once in 700 times


def judge_check(limits: ReleaseLimits, outcome: WorkResult, answers_j: float | None) -> CheckResult:
    """Return the result of a check by the limits of the release."""
    if outcome.code != "ok":
        return CheckResult(f"its check failed: {outcome.reason}", {}, killed=outcome.killed)
    told = dict(outcome.metrics)
    if answers_j is not None and outcome.examples:
        told["energy_j"] = answers_j / outcome.examples
    if outcome.peak_bytes is not None:
        told["peak_bytes"] = float(outcome.peak_bytes)
    if refused := exceeded_limit(limits, told):
        return CheckResult(refused, told, outcome.note)
    unknown = [
        said
        for limit, name, said in (
            (limits.min_gain, "accuracy", ""),  # the check measures the gain itself
            (limits.max_energy_j, "energy_j", "joules were not measured: this device has no meter"),
            (limits.max_peak_bytes, "peak_bytes", "its memory was not measured: the kernel does not tell it"),
        )
        if limit is not None and name not in told
    ]
    if limits.min_gain is not None and "accuracy" in told and "accuracy_before" not in told and not outcome.note:
        unknown.append("its accuracy was compared with nothing: no model ran here before")
    return CheckResult("", told, "; ".join(filter(None, (outcome.note, *unknown))))


def exceeded_limit(limits: ReleaseLimits, told: dict[str, float]) -> str:
    accuracy, before = told.get("accuracy"), told.get("accuracy_before")
    if limits.min_gain is not None and accuracy is not None and before is not None:
        gain = accuracy - before
        if gain < limits.min_gain - 1e-9:
            return (
                f"its accuracy is {accuracy:.1%} on this device's held-out examples, and {before:.1%} with what runs "
                f"now: {100 * gain:+.1f} points, at least {100 * limits.min_gain:+.1f} are wanted"
            )
    latency_s, most_s = told.get("latency_s"), limits.max_latency_s
    if most_s is not None and latency_s is not None and latency_s > most_s:
        return f"an answer takes {1000 * latency_s:.1f} ms here, at most {1000 * most_s:.1f} are wanted"
    energy_j, most_j = told.get("energy_j"), limits.max_energy_j
    if most_j is not None and energy_j is not None and energy_j > most_j:
        return f"an answer takes {energy_j:.3g} J here, at most {most_j:.3g} are wanted"
    peak, most = told.get("peak_bytes"), limits.max_peak_bytes
    if most is not None and peak is not None and peak > most:
        return f"it takes {format_megabytes(int(peak))} of memory here, at most {format_megabytes(most)} are wanted"
    return ""


def accuracy_loss_reason(min_gain: float | None, before: RunnerStatus | None, now: RunnerStatus) -> str:
    """Return why labels in use show that a model misses its limit, or "" if they do not."""
    if min_gain is None or before is None or before.accuracy is None or now.accuracy is None:
        return ""
    gain = now.accuracy - before.accuracy
    if gain + _chance_difference(before, now) >= min_gain:
        return ""
    return (
        f"{now.accuracy:.1%} of its answers in use are right, of {_counted_labels(now)} with labels, and "
        f"{before.accuracy:.1%} were with what ran before: {100 * gain:+.1f} points, at least "
        f"{100 * min_gain:+.1f} are wanted"
    )


def needs_more_labels(min_gain: float | None, before: RunnerStatus | None, now: RunnerStatus) -> bool:
    if min_gain is None or before is None or before.accuracy is None:
        return False
    if now.accuracy is None:
        return True
    return now.labelled < LATEST and now.accuracy - before.accuracy - _chance_difference(before, now) < min_gain


def _chance_difference(before: RunnerStatus, now: RunnerStatus) -> float:
    # Difference of two accuracies that chance may explain, from their standard errors.
    errors = sum(told.accuracy * (1 - told.accuracy) / _counted_labels(told) for told in (before, now) if told.accuracy)
    return ERRORS * math.sqrt(errors)


def _counted_labels(told: RunnerStatus) -> int:
    return max(1, min(told.labelled, LATEST))
