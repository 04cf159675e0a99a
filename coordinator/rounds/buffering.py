"""Buffered mode: devices that get no task now, and the choice between synchronous and buffered rounds.

With `[cohort] fair = "contributions"`, a device is selected at most twice during a task of another device. So a device
that is selected again after each of its tasks does at least half as many tasks as any other device.

`choose_mode` compares how many updates each mode aggregates in a second, by predicted durations. An update of buffered
mode counts with its staleness weight. Synchronous rounds select as many devices as buffered mode has at work, and have
the best deadline that meets the quorum.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Collection, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from fedquilt.coordinator.rounds.deadline import DeviceWorkload, DurationsByDevice
from fedquilt.coordinator.settings import CohortSettings

Mode: TypeAlias = Literal["synchronous", "buffered"]

MAX_SELECTIONS: Final = 2  # selections of a device during a task of another device, with fair = "contributions"
MIN_GAIN: Final = 1.5  # factor by which buffered mode must be faster to be chosen
SIMULATED_COMMITS: Final = 200
ASSUMED_EXAMPLES: Final = 100  # of a device, because the coordinator does not know the numbers before the first updates


class Backoff(msgspec.Struct, frozen=True):
    """Commits for which a device is not selected, because its tasks became too old."""

    until_round: int
    commits: int

    @staticmethod
    def after_task(previous: Backoff | None, round: int, max_staleness: int) -> Backoff:
        """Return the backoff after a task became too old: `max_staleness` commits, or twice the previous backoff."""
        commits = max(max_staleness, 1) if previous is None else 2 * previous.commits
        return Backoff(round + commits, commits)


def devices_ahead(latest_selections: Mapping[str, tuple[int, ...]], working_devices: Collection[str]) -> set[str]:
    """Return the devices that were selected MAX_SELECTIONS times since the oldest running task began.

    `latest_selections` has for each device the `JobState.selection_count` at its latest selections, oldest first, at
    most MAX_SELECTIONS.
    """
    oldest_number = min((latest_selections[device][-1] for device in working_devices), default=math.inf)
    return {
        device
        for device, numbers in latest_selections.items()
        if len(numbers) == MAX_SELECTIONS and numbers[0] >= oldest_number
    }


def unneeded_devices(
    free_devices: Collection[str],
    durations: DurationsByDevice,
    end_times_s: Mapping[str, float],
    remaining_updates: int,
    now_s: float,
) -> set[str]:
    """Return the devices whose update would arrive after the last update that the job needs.

    Args:
        free_devices: Devices that can be selected.
        durations: Recent durations of tasks. A device without any is needed.
        end_times_s: Expected end of each running task, infinite if unknown.
        remaining_updates: Updates that the job still needs.
        now_s: Time of the coordinator's clock.
    """
    if not 0 < remaining_updates <= len(end_times_s):
        return set()
    last_needed_s = sorted(end_times_s.values())[remaining_updates - 1]
    return {
        device
        for device in free_devices
        if device in durations and now_s + durations[device][-1].seconds >= last_needed_s
    }


class ModeChoice(NamedTuple):
    mode: Mode
    reason: str  # sentence


def choose_mode(cohort: CohortSettings, workloads: Mapping[str, DeviceWorkload]) -> ModeChoice:
    """Choose the faster mode, by the predicted duration of a task on each device."""
    durations_s = {
        device: workload.predict_duration_s(workload.work.max_examples or ASSUMED_EXAMPLES)
        for device, workload in workloads.items()
    }
    if unknown_devices := sorted(device for device, duration_s in durations_s.items() if duration_s is None):
        return ModeChoice("synchronous", f"no profile predicts the duration of a task on {unknown_devices[0]}")
    known_s = sorted(duration_s for duration_s in durations_s.values() if duration_s is not None)
    synchronous_rate, deadline_s = best_synchronous_rate(cohort, known_s)
    gain = simulate_buffered_rate(cohort, known_s) / synchronous_rate
    slowest = f"the slowest device takes {known_s[-1] / known_s[0]:.1f} times as long as the fastest"
    reason = f"{slowest}, and buffered rounds aggregate {gain:.1f} times as many updates in a second"
    if deadline_s < known_s[-1]:
        reason += f" as rounds with a deadline of {deadline_s / known_s[0]:.1f} times the fastest device's time"
    return ModeChoice("buffered" if gain >= MIN_GAIN else "synchronous", reason)


def best_synchronous_rate(cohort: CohortSettings, durations_s: list[float]) -> tuple[float, float]:
    """Return the most updates in a second that synchronous rounds aggregate, and their deadline.

    Args:
        cohort: Settings. A round selects `concurrency` devices and closes at the deadline with the `quorum`.
        durations_s: Duration of a task on each device, ascending.
    """
    count = len(durations_s)
    size = min(cohort.concurrency or count, count)
    # probability that the slowest device of a random cohort is the one with this index
    probabilities = [0.0] * count
    probabilities[-1] = size / count
    for index in range(count - 1, 0, -1):
        probabilities[index - 1] = probabilities[index] * max(index - size + 1, 0) / index
    rates, punctual_s, late_probability = [], 0.0, 1.0
    for index, (deadline_s, probability) in enumerate(zip(durations_s, probabilities, strict=True)):
        punctual_s, late_probability = punctual_s + probability * deadline_s, late_probability - probability
        share, mean_duration_s = (index + 1) / count, punctual_s + max(late_probability, 0.0) * deadline_s
        if share >= cohort.quorum:
            rates.append((share * size / mean_duration_s, deadline_s))
    return max(rates)


def simulate_buffered_rate(cohort: CohortSettings, durations_s: list[float]) -> float:
    """Return the updates in a second that buffered rounds aggregate, each with its staleness weight.

    Args:
        cohort: Settings, of which `size`, `concurrency` and `staleness` are used.
        durations_s: Duration of a task on each device.
    """
    size = min(cohort.size, len(durations_s))
    concurrency = min(cohort.concurrency or len(durations_s), len(durations_s))
    # the first devices in an order that mixes fast and slow ones
    waiting = deque(sorted(range(len(durations_s)), key=lambda index: index * 0.618033988749895 % 1))
    running: list[tuple[float, int, int]] = []  # end of the task, device, and commits before its start
    buffer: list[int] = []  # devices, which are selected again after the commit
    now_s = total_weight = 0.0
    commits = 0
    while commits < SIMULATED_COMMITS:
        while waiting and len(running) < concurrency:
            device = waiting.popleft()
            heapq.heappush(running, (now_s + durations_s[device], device, commits))
        now_s, device, round = heapq.heappop(running)
        if commits - round > cohort.staleness.max:
            waiting.append(device)
            continue
        total_weight += cohort.staleness.weight(commits - round)
        buffer.append(device)
        if len(buffer) == size:
            waiting.extend(buffer)
            buffer, commits = [], commits + 1
    return total_weight / now_s
