"""Accounting of differential privacy of devices, and the end of a job whose budget is spent.

Each aggregated update is clipped to the norm C, and the sum gets Gaussian noise of standard deviation z C (McMahan et
al., Learning Differentially Private Recurrent Language Models, ICLR 2018). Two runs are neighbours if, in one of them,
all updates of one device change nothing. A device contributes to at most K rounds. Its contributions together are as
private as a single one with the noise multiplier z / sqrt(K) (Dong et al., Gaussian Differential Privacy, JRSS B 2022,
corollary 3.3), also if earlier results decide in which rounds it takes part (Smith and Thakurta, Fully Adaptive
Composition for Gaussian Differential Privacy, 2022). The epsilon of that noise is exact (Balle and Wang, Improving the
Gaussian Mechanism for Differential Privacy, ICML 2018, theorem 8).

The selection of devices does not lower epsilon, because everybody who knows the job can repeat it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

from fedquilt.coordinator.device_columns import NEVER, DeviceSet
from fedquilt.coordinator.rounds.events import PrivacyPlanned
from fedquilt.coordinator.rounds.job_state import JobState
from fedquilt.coordinator.rounds.selection import SPENT

BISECTIONS: Final = 100
MULTIPLIER_DIGITS: Final = 4  # of the noise multiplier, which is rounded up


def plan_noise(state: JobState, devices: int) -> PrivacyPlanned:
    """Return the noise with which each of the devices can contribute its share of the job's rounds."""
    privacy, size = state.constants.privacy, state.cohort_size or devices
    assert privacy is not None
    contributions = min(math.ceil(state.constants.rounds * size / devices), state.constants.rounds)
    multiplier = find_noise_multiplier(privacy.epsilon, privacy.delta, contributions)
    return PrivacyPlanned(state.round, devices, contributions, multiplier)


def find_noise_multiplier(epsilon: float, delta: float, contributions: int) -> float:
    """Return the least z, rounded up to four digits, with which K contributions cost at most `epsilon`."""
    low, high = 0.0, 1.0
    while gaussian_delta(high, epsilon) < delta:
        high *= 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(middle, epsilon) <= delta else (low, middle)
    multiplier = math.sqrt(contributions) / low
    step = 10.0 ** (math.floor(math.log10(multiplier)) + 1 - MULTIPLIER_DIGITS)
    return float(f"{math.ceil(multiplier / step) * step:.{MULTIPLIER_DIGITS}g}")


def compute_epsilon(noise_multiplier: float, delta: float, contributions: int) -> float:
    """Return the epsilon of K contributions, an upper bound within the precision of floats."""
    if not contributions:
        return 0.0
    mu = math.sqrt(contributions) / noise_multiplier
    low, high = 0.0, 1.0
    while gaussian_delta(mu, high) > delta:
        high *= 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if gaussian_delta(mu, middle) <= delta else (middle, high)
    return high


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return the least delta of the Gaussian mechanism with sensitivity `mu` and noise of standard deviation 1."""
    return _normal_cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * _normal_cdf(-mu / 2 - epsilon / mu)


def _normal_cdf(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def count_contributions(state: JobState, device: str) -> int:
    """Return the number of a device's aggregated updates, without the running round."""
    return len(state.history.get(device, NEVER))


def spent_epsilon_after_round(state: JobState) -> float | None:
    """Return the epsilon that a job with [privacy] has spent once the running round is committed, or else None."""
    privacy, plan = state.constants.privacy, state.privacy_plan
    if privacy is None or plan is None or "work" not in state.task_actions:
        return None
    contributions = max((count_contributions(state, device) + 1 for device in state.accepted_updates), default=0)
    epsilon = compute_epsilon(plan.noise_multiplier, privacy.delta, contributions)
    return max(epsilon, state.spent_epsilon)


def devices_without_budget(state: JobState, devices: Collection[str]) -> set[str]:
    """Return the devices that have made all their contributions and get no further task."""
    plan = state.privacy_plan
    if plan is None or "work" not in state.task_actions or state.completed_rounds < plan.contributions:
        return set()
    return {device for device in devices if count_contributions(state, device) >= plan.contributions}


def is_budget_spent(state: JobState, available_devices: DeviceSet, needed_devices: int) -> bool:
    """Return whether a round could start only with devices that have made all their contributions."""
    spent_devices = state.eligibility.devices_with(SPENT)
    return len(available_devices) < needed_devices <= len(available_devices | spent_devices)


def describe_spent_budget(state: JobState) -> str:
    """Return the spent part of the budget as text, or "" without [privacy]."""
    privacy = state.constants.privacy
    if privacy is None:
        return ""
    return f"epsilon {state.spent_epsilon:.3g} of {privacy.epsilon:g} spent, at delta {privacy.delta:.3g}"
