"""Checks of a job's event log by an independent interpretation: selected devices, declines, and times of attempts.

They use no state of the coordinator. Selections are drawn again from the devices that were eligible at the time, so a
device is found that is skipped without a reason, or selected although it declined.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from fedquilt.coordinator.rounds.decisions import MIN_REMAINING_SHARE
from fedquilt.coordinator.rounds.events import (
    AnyEvent,
    CohortSelected,
    EligibilityRecorded,
    JobEnded,
    JobResumed,
    RoundClosed,
    RoundCommitted,
    RoundRetried,
    TaskDeclined,
    TasksCancelled,
    UpdateAccepted,
    UpdateLost,
    UpdateRejected,
)
from fedquilt.coordinator.rounds.selection import (
    DECLINE_REASONS,
    DISK_FULL,
    MEMORY_DECLINE_ROUNDS,
    CohortDraw,
    select_cohort,
)
from fedquilt.coordinator.settings import JobSettings


class SelectionCheck:
    def __init__(self, job: JobSettings) -> None:
        self._job = job
        self._round, self._file = 0, False
        self._eligible: set[str] = set()
        self._answered: set[str] = set()
        self._asked: set[str] = set()
        self._declined: set[str] = set()  # in the running attempt
        self._silent: list[str] = []  # asked in earlier attempts at the round, the latest last
        self._since: dict[str, int] = {}  # round in which a device was asked last, or first seen
        self._refused: dict[str, tuple[str, int]] = {}  # code and round of a device's last refusal

    def check_event(self, event: AnyEvent) -> str:
        match event:
            case EligibilityRecorded():
                return self._check_survey(event)
            case CohortSelected():
                return self._check_selection(event)
            case UpdateAccepted():
                self._answered.add(event.update.device)
                self._asked.discard(event.update.device)
                self._refused.pop(event.update.device, None)
            case TaskDeclined() | UpdateRejected():
                self._declined.add(event.device)
                self._asked.discard(event.device)
                if event.code:
                    self._refused[event.device] = (event.code, event.round)
            case UpdateLost():
                self._answered.discard(event.device)
                self._asked.add(event.device)
            case TasksCancelled():
                self._asked -= set(event.devices)
                self._silent = [each for each in self._silent if each not in event.devices] + sorted(event.devices)
            case RoundClosed():
                self._close_tasks()
            case RoundRetried():
                self._silent = [each for each in self._silent if each not in self._asked] + sorted(self._asked)
                self._asked.clear()
                self._declined.clear()
            case JobResumed():
                self._silent.clear()
                self._declined.clear()
                self._refused.clear()
                self._file = bool(self._asked or self._answered)
            case RoundCommitted():
                self._round, self._file = event.round + 1, False
                self._answered.clear()
                self._declined.clear()
                self._close_tasks()
                self._silent.clear()
            case _:
                pass
        return ""

    def _close_tasks(self) -> None:
        if self._job.cohort.mode != "buffered":
            self._asked.clear()

    def _check_survey(self, event: EligibilityRecorded) -> str:
        ineligible = {device: reason for reason, devices in event.ineligible.items() for device in devices}
        self._eligible = (self._eligible | set(event.eligible)) - ineligible.keys()
        self._since = {**dict.fromkeys((*event.eligible, *ineligible), event.round), **self._since}
        return next(filter(None, map(self._problem_of_reason, ineligible, ineligible.values())), "")

    def _problem_of_reason(self, device: str, reason: str) -> str:
        kind = DECLINE_REASONS.get(reason)
        if kind is None or kind.duration == "attempt" or reason == DISK_FULL:  # a full disk is also told by telemetry
            return ""
        code, round = self._refused.get(device, ("", -MEMORY_DECLINE_ROUNDS))
        until = {"round": round + 1, "rounds": round + MEMORY_DECLINE_ROUNDS, "start": math.inf}[kind.duration]
        if code == reason and self._round < until:
            return ""
        return f"{device} is ineligible in round {self._round} for its refusal ({reason}), and has not refused of late"

    def _check_selection(self, event: CohortSelected) -> str:
        cohort = self._job.cohort
        pool = self._eligible - self._answered - self._asked - self._declined
        most = fewest = float(len(pool))
        if cohort.size:
            wanted = math.ceil((cohort.size - len(self._answered)) * (1 + cohort.over_select))
            if cohort.mode == "buffered":
                wanted = cohort.concurrency
            # an asked device that is offline is replaced, except just after the coordinator has started
            most = min(wanted - len(self._asked & self._eligible), most)
            fewest = min(wanted - len(self._asked), fewest)
        right = self._expected_selection(pool, len(event.devices))
        if event.devices != right or not fewest <= len(event.devices) <= most:
            return (
                f"round {event.round}, attempt {event.attempt} selected {', '.join(event.devices)}: of "
                f"{', '.join(sorted(pool)) or 'no'} eligible devices {', '.join(right) or 'none'} came first, and "
                f"{fewest:g} to {most:g} were to be selected"
            )
        self._file = True
        self._asked.update(event.devices)
        self._since.update(dict.fromkeys(event.devices, event.round))
        return ""

    def _expected_selection(self, pool: set[str], count: int) -> tuple[str, ...]:
        silent = [device for device in self._silent if device in pool]
        fresh = pool.difference(silent)
        draw = CohortDraw(self._job.seed, self._round, last_selected_rounds=self._since, turns=self._job.cohort.turns)
        drawn = select_cohort(draw, fresh, min(count, len(fresh)))
        return tuple(sorted((*drawn, *silent[: count - len(drawn)])))


def check_selections(job: JobSettings, events: Iterable[AnyEvent]) -> str:
    selection = SelectionCheck(job)
    return next(filter(None, map(selection.check_event, events)), "")


def find_causeless_decline(events: Iterable[AnyEvent], causes: Mapping[str, int]) -> str:
    left = dict(causes)
    for event in events:
        if isinstance(event, TaskDeclined) and event.code in ("failed", "memory"):
            left[event.device] = left.get(event.device, 0) - 1
            if left[event.device] < 0:
                return f"{event.device} has declined round {event.round} ({event.code}: {event.reason}) without a cause"
    return ""


class AttemptCheck:
    def __init__(self, deadline_s: float, slack_s: float) -> None:
        self._deadline_s, self._slack_s = deadline_s, slack_s
        self._opened_s = math.inf  # no attempt runs
        self._latest_s = math.inf
        self._began_s = math.inf  # when the attempt, or the coordinator that has it, began
        self._declined = False

    def check_event(self, event: AnyEvent, now_s: float) -> str:
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
        least_s = MIN_REMAINING_SHARE * self._deadline_s
        if now_s - self._began_s >= self._deadline_s:
            least_s = self._deadline_s  # a clock does not show how long nobody was there
        self._latest_s = max(self._latest_s + away_s, now_s + least_s)
        self._began_s = now_s

    def _start_attempt(self, now_s: float) -> None:
        self._opened_s = self._began_s = now_s
        self._latest_s, self._declined = now_s + self._deadline_s, False

    def _problem_if_early(self, now_s: float) -> str:
        lasted_s = now_s - self._opened_s
        if self._declined or lasted_s >= self._deadline_s - self._slack_s:
            return ""
        return f"an attempt is given up after {lasted_s:.1f} s, and its deadline is {self._deadline_s:g} s"

    def _problem_if_late(self, now_s: float) -> str:
        if self._opened_s == math.inf or now_s <= self._latest_s + self._slack_s:
            return ""
        lasted_s, late_s = now_s - self._opened_s, now_s - self._latest_s
        return f"an attempt has lasted {lasted_s:.1f} s, {late_s:.1f} s longer than its deadline allows"
