"""Acceptance of a model by the limits of its release, its check and its runner. Pure functions."""

from __future__ import annotations

import math
from typing import Final

from fedquilt.edge_agent.releases.release_kind import CheckResult
from fedquilt.edge_agent.runner_status import MAX_LABELS, RunnerStatus
from fedquilt.edge_agent.task.memory_budget import format_megabytes
from fedquilt.edge_agent.task.protocol import WorkResult
from fedquilt.wire import ReleaseLimits

STANDARD_ERRORS: Final = 3.0  # standard errors by which an accuracy must miss its limit: by chance 1 in 700


def judge_check(limits: ReleaseLimits, outcome: WorkResult, inference_j: float | None) -> CheckResult:
    if outcome.code != "ok":
        return CheckResult(f"check failed: {outcome.reason}", {}, killed_externally=outcome.killed_externally)
    metrics = dict(outcome.metrics)
    if inference_j is not None and outcome.examples:
        metrics["energy_j"] = inference_j / outcome.examples
    if outcome.peak_bytes is not None:
        metrics["peak_bytes"] = float(outcome.peak_bytes)
    if refusal_reason := exceeded_limit(limits, metrics):
        return CheckResult(refusal_reason, metrics, outcome.note)
    remarks = [
        reason
        for limit, name, reason in (
            (limits.min_gain, "accuracy", ""),  # the check measures the gain
            (limits.max_energy_j, "energy_j", "energy was not measured: this device has no meter"),
            (limits.max_peak_bytes, "peak_bytes", "memory was not measured: this kernel does not report peaks"),
        )
        if limit is not None and name not in metrics
    ]
    if limits.min_gain is not None and "accuracy" in metrics and "accuracy_before" not in metrics and not outcome.note:
        remarks.append("accuracy was not compared: this device had no model before")
    return CheckResult("", metrics, "; ".join(filter(None, (outcome.note, *remarks))))


def exceeded_limit(limits: ReleaseLimits, metrics: dict[str, float]) -> str:
    """Return a sentence on the first violated limit, or "". Limits without a measurement are skipped."""
    accuracy, previous_accuracy = metrics.get("accuracy"), metrics.get("accuracy_before")
    if limits.min_gain is not None and accuracy is not None and previous_accuracy is not None:
        gain = accuracy - previous_accuracy
        if gain < limits.min_gain - 1e-9:
            return (
                f"accuracy on this device's held-out examples changes from {previous_accuracy:.1%} to {accuracy:.1%}: "
                f"{100 * gain:+.1f} points, at least {100 * limits.min_gain:+.1f} are required"
            )
    latency_s, limit_s = metrics.get("latency_s"), limits.max_latency_s
    if limit_s is not None and latency_s is not None and latency_s > limit_s:
        return f"an answer takes {1000 * latency_s:.1f} ms on this device, {1000 * limit_s:.1f} are permitted"
    energy_j, limit_j = metrics.get("energy_j"), limits.max_energy_j
    if limit_j is not None and energy_j is not None and energy_j > limit_j:
        return f"an answer takes {energy_j:.3g} J on this device, {limit_j:.3g} are permitted"
    peak, limit_bytes = metrics.get("peak_bytes"), limits.max_peak_bytes
    if limit_bytes is not None and peak is not None and peak > limit_bytes:
        size, limit = format_megabytes(int(peak)), format_megabytes(limit_bytes)
        return f"the model takes {size} of memory on this device, {limit} are permitted"
    return ""


def accuracy_loss_reason(min_gain: float | None, previous: RunnerStatus | None, current: RunnerStatus) -> str:
    """Return a sentence if labelled answers show a gain in accuracy below `min_gain`, else ""."""
    if min_gain is None or previous is None or previous.accuracy is None or current.accuracy is None:
        return ""
    gain = current.accuracy - previous.accuracy
    if gain + _chance_difference(previous, current) >= min_gain:
        return ""
    return (
        f"accuracy in use, from {_counted_labels(current)} labels, is {current.accuracy:.1%} after "
        f"{previous.accuracy:.1%} with the model before: {100 * gain:+.1f} points, at least {100 * min_gain:+.1f} are "
        "required"
    )


def needs_more_labels(min_gain: float | None, previous: RunnerStatus | None, current: RunnerStatus) -> bool:
    """Return whether the accuracy limit can only be decided with more labelled answers."""
    if min_gain is None or previous is None or previous.accuracy is None:
        return False
    if current.accuracy is None:
        return True
    return (
        current.labelled < MAX_LABELS
        and current.accuracy - previous.accuracy - _chance_difference(previous, current) < min_gain
    )


def _chance_difference(previous: RunnerStatus, current: RunnerStatus) -> float:
    errors = sum(
        status.accuracy * (1 - status.accuracy) / _counted_labels(status)
        for status in (previous, current)
        if status.accuracy
    )
    return STANDARD_ERRORS * math.sqrt(errors)


def _counted_labels(status: RunnerStatus) -> int:
    return max(1, min(status.labelled, MAX_LABELS))
