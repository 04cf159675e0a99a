"""Detection of a task process that makes no progress, such as a stopped or deadlocked one."""

from __future__ import annotations

from typing import Final

import msgspec

SAMPLE_S: Final = 5.0  # interval of samples
STALL_S: Final = 60.0  # time without progress after which the process is ended


class StallDetector(msgspec.Struct, frozen=True):
    cpu_ticks: int = -1  # at the latest sample
    sampled_s: float = 0.0
    idle_s: float = 0.0  # time without progress until the latest sample

    @property
    def is_stalled(self) -> bool:
        return self.idle_s >= STALL_S

    def is_sample_due(self, now_s: float) -> bool:
        return self.cpu_ticks < 0 or now_s >= self.sampled_s + SAMPLE_S

    def add_sample(self, cpu_ticks: int, now_s: float) -> StallDetector:
        """Return the detector after a sample. A change of the processor time is progress."""
        if cpu_ticks != self.cpu_ticks:
            return StallDetector(cpu_ticks, now_s)
        # a longer interval means that this agent was stopped too, and its task process with it
        idle_s = self.idle_s + min(now_s - self.sampled_s, 2 * SAMPLE_S)
        return StallDetector(cpu_ticks, now_s, idle_s)
