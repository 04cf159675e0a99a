"""Clipping of updates and noise on their sum, for a job with [privacy].

The noise of a round depends on the job's secret, the round, the state and the updates. A coordinator that repeats a
commit after a crash draws the same noise. Other updates, after a lost update or in a restored copy of the home, get
independent noise: otherwise the difference of two results would have none.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from fedquilt.coordinator.rounds.job_state import JobState
from fedquilt.coordinator.settings import JobSettings
from fedquilt.core import Aggregation, DeviceUpdate, Method, UpdateError
from fedquilt.core.messages import has_site_bundles


class PrivateSums:
    """Private aggregation of one job.

    Args:
        aggregation: The method's aggregation, whose change supports noise.
        clip: The largest norm of an update's change.
        secret: The job's random bytes.
    """

    def __init__(self, aggregation: Aggregation, clip: float, secret: bytes) -> None:
        assert aggregation.change is not None
        self._aggregation, self._change = aggregation, aggregation.change
        self._clip, self._secret = clip, secret

    @staticmethod
    def from_job(job: JobSettings, method: Method, load_secret: Callable[[], bytes]) -> PrivateSums | None:
        """Return the private sums of a job with [privacy], or None."""
        return None if job.privacy is None else PrivateSums(method.aggregation, job.privacy.clip, load_secret())

    def clip_update(self, state: Any, update: DeviceUpdate) -> DeviceUpdate:
        """Return an update with weight 1 and a change of norm `clip` at most, or raise UpdateError."""
        if has_site_bundles(update.bundles):
            raise UpdateError("[privacy] takes the updates of devices only, not those of a site")
        update = replace(update, weight=1.0)
        self._aggregation.require_valid_update(state, update)
        assert self._change.norm is not None
        norm = self._change.norm(state, update)
        return update if norm <= self._clip else self._change.scale(state, state, update, self._clip / norm)

    def add_noise(self, job_state: JobState, total: Any) -> Any:
        """Return the sums of a closed round with noise, or None without updates."""
        plan = job_state.privacy_plan
        if total is None:
            return None
        assert plan is not None
        assert self._change.add_noise is not None
        deviation = plan.noise_multiplier * self._clip
        key = noise_key(self._secret, job_state)
        return self._change.add_noise(
            total, lambda name, shape: deviation * draw_gaussian(key + name.encode(), math.prod(shape)).reshape(shape)
        )


def noise_key(secret: bytes, job_state: JobState) -> bytes:
    """Return the key of a round's noise, which differs if the state or an update differs."""
    inputs = [str(job_state.round), job_state.state.sha256 if job_state.state else ""]
    for device, update in sorted(job_state.accepted_updates.items()):
        inputs += [device, *(f"{name} {ref.sha256}" for name, ref in sorted(update.bundles.items()))]
    return hashlib.sha256(secret + "\n".join(inputs).encode()).digest()


def draw_gaussian(key: bytes, count: int) -> np.ndarray:
    """Return `count` independent standard normal numbers, computed from a cryptographic stream."""
    pairs = (count + 1) // 2
    words = np.frombuffer(hashlib.shake_256(key).digest(16 * pairs), "<u8").reshape(2, pairs) >> np.uint64(11)
    radius = np.sqrt(-2 * np.log((words[0] + 1) / 2.0**53))  # of uniform numbers in (0, 1]
    angle = 2 * np.pi * (words[1] / 2.0**53)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
