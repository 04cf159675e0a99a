"""Check that each attempt at a round ends by its deadline, in virtual time."""

from __future__ import annotations

import math

from fedquilt.coordinator.rounds.events import (
    AnyEvent,
    CohortSelected,
    JobEnded,
    JobResumed,
    RoundClosed,
    RoundCommitted,
    RoundRetried,
    TaskDeclined,
    UpdateLost,
)
from fedquilt.coordinator.rounds.next_event import LEFT


class AttemptCheck:
    def __init__(self, deadline_s: float, slack_s: float) -> None:
        self._deadline_s, self._slack_s = deadline_s, slack_s
        self._opened_s = math.inf  # no attempt runs
        self._latest_s = math.inf
        self._began_s = math.inf  # when the attempt, or the coordinator that has it, began
        self._declined = False

    def check_event(self, event: AnyEvent, now_s: float) -> str:
        """Apply an event written now. Return what is wrong with the time of an attempt, or ""."""
        wrong = ""
        match event:
            case TaskDeclined():
                self._declined = True
            case CohortSelected() if self._opened_s == math.inf:
                self._start_attempt(now_s)
            case RoundRetried():
                wrong = self._problem_if_early(now_s) or self._problem_if_late(now_s)
                self._start_attempt(now_s)
            case JobResumed() | UpdateLost():
                self._start_attempt(now_s)
            case RoundClosed():
                wrong = self._problem_if_late(now_s)
                self._opened_s = math.inf
            case RoundCommitted() | JobEnded():
                self._opened_s = math.inf
            case _:
                pass
        return wrong

    def extend_for_restart(self, now_s: float, away_s: float) -> None:
        if self._opened_s == math.inf:
            return
        least_s = LEFT * self._deadline_s
        if now_s - self._began_s >= self._deadline_s:
            least_s = self._deadline_s  # a clock does not show how long nobody was there
        self._latest_s = max(self._latest_s + away_s, now_s + least_s)
        self._began_s = now_s

    def _start_attempt(self, now_s: float) -> None:
        self._opened_s = self._began_s = now_s
        self._latest_s, self._declined = now_s + self._deadline_s, False

    def _problem_if_early(self, now_s: float) -> str:
        """Return that an attempt without declines was given up before its deadline, or ""."""
        lasted_s = now_s - self._opened_s
        if self._declined or lasted_s >= self._deadline_s - self._slack_s:
            return ""
        return f"an attempt is given up after {lasted_s:.1f} s, and its deadline is {self._deadline_s:g} s"

    def _problem_if_late(self, now_s: float) -> str:
        """Return that an attempt has lasted longer than its deadline allows, or ""."""
        if self._opened_s == math.inf or now_s <= self._latest_s + self._slack_s:
            return ""
        lasted_s, late_s = now_s - self._opened_s, now_s - self._latest_s
        return f"an attempt has lasted {lasted_s:.1f} s, {late_s:.1f} s longer than its deadline allows"
