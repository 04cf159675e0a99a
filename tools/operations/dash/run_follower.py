"""State of one run for the dashboard, updated event by event with bounded memory."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from fedquilt.coordinator.fleet.device_status import DeviceStatus
from fedquilt.coordinator.rounds.events import (
    AnyEvent,
    CohortSelected,
    EligibilityRecorded,
    RoundCommitted,
    UpdateAccepted,
)
from fedquilt.coordinator.rounds.job_state import JobConstants, JobState
from fedquilt.coordinator.storage.store import StoredJob
from fedquilt.coordinator.views import event_messages, round_outcomes, run_summary, wait_reasons
from fedquilt.coordinator.views.run_summary import RunSummary
from fedquilt.tools.report import columns, sections

MAX_LOG_LINES: Final = 1000  # number of log lines in memory
MAX_CELLS: Final = 40_000  # limit on devices times rounds in memory; earlier rounds are read again on request
MIN_ROUNDS: Final = 2
MAX_PLOT_POINTS: Final = 300


class LogLine(NamedTuple):
    seq: int
    at: float  # wall-clock seconds
    run: str
    kind: str  # class of the event
    round: int | None
    device: str | None
    text: str
    more: tuple[str, ...]  # further lines


class UpdateTiming(NamedTuple):
    took_s: float
    wall_s: float
    down_bytes: int
    up_bytes: int


@dataclass
class RoundTimes:
    started_s: float  # wall-clock seconds
    took_s: float | None = None  # None while running
    task_sent_s: dict[str, float] = field(default_factory=dict)  # device -> wall-clock seconds of the latest task
    update_timings: dict[str, UpdateTiming] = field(default_factory=dict)


class RunFollower:
    def __init__(self, row: StoredJob, max_cells: int = MAX_CELLS) -> None:
        self.row, self.seq, self.max_cells = row, 0, max_cells
        self.lines: deque[LogLine] = deque(maxlen=MAX_LOG_LINES)
        self.round_times: dict[int, RoundTimes] = {}
        self._outcomes = round_outcomes.RoundOutcomes(JobConstants.from_job(row.job))
        self.last_event_s: float | None = None  # wall-clock seconds
        self.first_round: int | None = None  # first round with an eligibility check
        self.last_round: int | None = None  # latest round with an eligibility check

    @property
    def state(self) -> JobState:
        return self._outcomes.summary.state

    @property
    def summary(self) -> RunSummary:
        return self._outcomes.summary

    @property
    def parts(self) -> Mapping[int, Mapping[str, round_outcomes.DeviceOutcome]]:
        return self._outcomes.by_round

    def add_event(self, seq: int, time_s: float, event: AnyEvent) -> None:
        old_summary = self.summary
        self._outcomes.apply_event(event, time_s)
        text, *details = event_messages.format_event(old_summary, event, self.summary)
        round: int | None = event.round + 1 if hasattr(event, "round") else None
        device = event.update.device if isinstance(event, UpdateAccepted) else getattr(event, "device", None)
        kind = type(event).__name__
        self.lines.append(LogLine(seq, time_s, self.row.id, kind, round, device, text, tuple(details)))
        if isinstance(event, CohortSelected | EligibilityRecorded) and event.round in self._outcomes.by_round:
            self.first_round = event.round if self.first_round is None else self.first_round
            self.last_round = event.round
        self._record_times(time_s, event)
        self.seq, self.last_event_s = seq, time_s
        if isinstance(event, RoundCommitted):
            self._forget_old_rounds()

    def _record_times(self, time_s: float, event: AnyEvent) -> None:
        match event:
            case CohortSelected():
                round_times = self.round_times.setdefault(event.round, RoundTimes(time_s))
                round_times.task_sent_s.update(dict.fromkeys(event.devices, time_s))
            case UpdateAccepted():
                usage, round_times = event.update.usage, self.round_times.setdefault(event.round, RoundTimes(time_s))
                took_s = usage.wall_s if event.took_s is None else event.took_s
                round_times.update_timings[event.update.device] = UpdateTiming(
                    took_s, usage.wall_s, usage.down_bytes, usage.up_bytes
                )
            case RoundCommitted():
                if event.round in self.round_times:
                    self.round_times[event.round].took_s = event.took_s

    def _forget_old_rounds(self) -> None:
        outcomes = self._outcomes.by_round
        count = sum(map(len, outcomes.values()))
        for number in sorted(outcomes)[:-MIN_ROUNDS]:
            if count <= self.max_cells:
                break
            count -= len(outcomes.pop(number))
            self.round_times.pop(number, None)

    # -- values of pages --

    def make_round_rows(self) -> list[dict[str, Any]]:
        rows = columns.make_round_rows(self.summary)
        if len(rows) > MAX_PLOT_POINTS:
            rows = [rows[round(i * (len(rows) - 1) / (MAX_PLOT_POINTS - 1))] for i in range(MAX_PLOT_POINTS)]
        return rows

    def make_summary(self) -> dict[str, Any]:
        state, metric = self.state, columns.find_main_metric(self.row.job)
        points = run_summary.progress_points(self.summary)
        personal = [point.personal for point in points if point.rounds and point.personal]
        return {
            "done": self.summary.completed_rounds,
            "metric": {
                "title": metric.title,
                "share": metric.share,
                "held_out": personal[-1].weighted if personal else None,
                "test": None,
            },
            "down_bytes": self.summary.total.down_bytes,
            "up_bytes": self.summary.total.up_bytes,
            "joules": state.usage.joules if state.usage.metered else None,
            "metered": state.usage.metered,
            "tasks": state.usage.metered + state.usage.unmetered,
            "declined": self.summary.total.declined,
            "fact_at": self.last_event_s,
            "reason": state.reason,
        }

    def describe_current_round(
        self, wait_reason: str | None = None, devices: Mapping[str, DeviceStatus] = {}
    ) -> dict[str, Any]:
        """Return the current round's phase, selected devices, counts and reason to wait, if any."""
        state = self.state
        parts = self.parts.get(state.round, {})
        return {
            "round": state.round + 1,
            "name": event_messages.format_round_name(state.round, self.summary.final_evaluation_round),
            "phase": state.phase,
            "attempt": state.attempt,
            "asked": sorted(state.pending_devices),
            "answered": len(state.accepted_updates),
            "selected": len(state.pending_devices) + len(state.accepted_updates) + len(state.decline_reasons),
            "counts": count_outcomes(parts, running=True),
            "waits": wait_reason
            or (wait.text if (wait := wait_reasons.find_round_wait(self.row, state, devices)) is not None else None),
        }

    def format_contributions(self) -> dict[str, str]:
        """Return the updates of each device as text, in buffered mode, or {} in synchronous mode."""
        if not self.state.is_buffered:
            return {}
        texts = {}
        for device, cost in self.summary.device_costs().items():
            share, age = run_summary.format_contribution(cost, self.summary.total)
            texts[device] = f"updates: {cost.tasks} ({share}), mean age: {age} commits"
        return texts

    def list_device_rounds(self, device: str) -> list[dict[str, Any]]:
        device_rounds = []
        for number in sorted(self.parts, reverse=True):
            part = self.parts[number].get(device)
            if part is not None:
                device_rounds.append(
                    {
                        "round": number + 1,
                        "code": part.code,
                        "text": part.text,
                        **self._split_device_time(number, device),
                    }
                )
        return device_rounds

    def _split_device_time(self, number: int, device: str) -> dict[str, Any]:
        # fetching and sending are reported as one time, which is divided by bytes
        round_times = self.round_times.get(number)
        if round_times is None:
            return {}
        task_sent_s, timing = round_times.task_sent_s.get(device), round_times.update_timings.get(device)
        times: dict[str, Any] = {"at": round_times.started_s, "asked": task_sent_s}
        if timing is None:
            return times
        took_s = timing.took_s if round_times.took_s is None else round_times.took_s
        split = run_summary.split_round_time(number, took_s, [(timing.took_s, timing.wall_s)])
        before_s = min(max((task_sent_s or round_times.started_s) - round_times.started_s, 0.0), split.wait_s)
        transferred_bytes = timing.down_bytes + timing.up_bytes
        down_s = split.transfer_s * (timing.down_bytes / transferred_bytes if transferred_bytes else 0.5)
        return {
            **times,
            "before_s": before_s,
            "down_s": down_s,
            "train_s": split.compute_s,
            "up_s": split.transfer_s - down_s,
            "after_s": split.wait_s - before_s,
            "down_bytes": timing.down_bytes,
            "up_bytes": timing.up_bytes,
        }


def count_outcomes(parts: Mapping[str, round_outcomes.DeviceOutcome], running: bool) -> list[dict[str, Any]]:
    codes = Counter(part.code for part in parts.values())
    descriptions = {**sections.MEANINGS, "asked": "at work"} if running else sections.MEANINGS
    return [{"code": code, "text": descriptions.get(code, code), "count": count} for code, count in codes.most_common()]


def find_round_outcomes(
    events: Iterable[AnyEvent], constants: JobConstants, round: int
) -> Mapping[str, round_outcomes.DeviceOutcome] | None:
    outcomes = round_outcomes.RoundOutcomes(constants)
    for event in events:
        outcomes.apply_event(event)
        for number in [number for number in outcomes.by_round if number < min(round, outcomes.summary.state.round)]:
            del outcomes.by_round[number]
        if outcomes.summary.state.round > round:
            break
    return outcomes.by_round.get(round)
