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
    JobConstants,
    JobState,
    RoundCommitted,
    UpdateAccepted,
)
from fedquilt.coordinator.storage.store import StoredJob
from fedquilt.coordinator.views import event_messages, round_outcomes, run_summary, wait_reasons
from fedquilt.coordinator.views.run_summary import RunSummary
from fedquilt.tools.report import columns, sections

LINES: Final = 1000  # of the log
CELLS: Final = 40_000  # limit on devices times rounds in memory; earlier rounds are read again on request
LEAST: Final = 2  # rounds that are held in any case
DRAWN: Final = 300  # points of a run's plots


class LogLine(NamedTuple):
    seq: int
    at: float  # wall-clock seconds
    run: str
    kind: str  # of the fact
    round: int | None
    device: str | None
    text: str
    more: tuple[str, ...]  # reasons, below it


class UpdateTiming(NamedTuple):
    took_s: float
    wall_s: float
    down_bytes: int
    up_bytes: int


@dataclass
class RoundTimes:
    began: float  # wall-clock seconds
    took_s: float | None = None  # None while running
    asked: dict[str, float] = field(default_factory=dict)  # device -> wall-clock seconds of the last time
    timed: dict[str, UpdateTiming] = field(default_factory=dict)


class RunFollower:
    """State of one run after the events so far."""

    def __init__(self, row: StoredJob, cells: int = CELLS) -> None:
        self.row, self.seq, self.cells = row, 0, cells
        self.lines: deque[LogLine] = deque(maxlen=LINES)
        self.turns: dict[int, RoundTimes] = {}
        self._parts = round_outcomes.RoundOutcomes(JobConstants.from_job(row.job))
        self.at: float | None = None  # wall-clock seconds of the last fact
        self.first: int | None = None  # earliest round in which devices were looked at
        self.last: int | None = None  # latest one

    @property
    def state(self) -> JobState:
        return self._parts.summary.state

    @property
    def summary(self) -> RunSummary:
        return self._parts.summary

    @property
    def parts(self) -> Mapping[int, Mapping[str, round_outcomes.DeviceOutcome]]:
        return self._parts.by_round

    def add_event(self, seq: int, at: float, fact: AnyEvent) -> None:
        """Apply the next event of the run and add its log line."""
        before = self.summary
        self._parts.apply_event(fact, at)
        text, *more = event_messages.format_event(before, fact, self.summary)
        round: int | None = fact.round + 1 if hasattr(fact, "round") else None
        device = fact.update.device if isinstance(fact, UpdateAccepted) else getattr(fact, "device", None)
        kind = type(fact).__name__
        self.lines.append(LogLine(seq, at, self.row.id, kind, round, device, text, tuple(more)))
        if isinstance(fact, CohortSelected | EligibilityRecorded) and fact.round in self._parts.by_round:
            self.first = fact.round if self.first is None else self.first
            self.last = fact.round
        self._record_times(at, fact)
        self.seq, self.at = seq, at
        if isinstance(fact, RoundCommitted):
            self._forget_old_rounds()

    def _record_times(self, at: float, fact: AnyEvent) -> None:
        match fact:
            case CohortSelected():
                turn = self.turns.setdefault(fact.round, RoundTimes(at))
                turn.asked.update(dict.fromkeys(fact.devices, at))
            case UpdateAccepted():
                usage, turn = fact.update.usage, self.turns.setdefault(fact.round, RoundTimes(at))
                took_s = usage.wall_s if fact.took_s is None else fact.took_s
                turn.timed[fact.update.device] = UpdateTiming(took_s, usage.wall_s, usage.down_bytes, usage.up_bytes)
            case RoundCommitted():
                if fact.round in self.turns:
                    self.turns[fact.round].took_s = fact.took_s

    def _forget_old_rounds(self) -> None:
        found = self._parts.by_round
        count = sum(map(len, found.values()))
        for number in sorted(found)[:-LEAST]:
            if count <= self.cells:
                break
            count -= len(found.pop(number))
            self.turns.pop(number, None)

    # -- what is shown --

    def make_round_rows(self) -> list[dict[str, Any]]:
        rows = columns.make_round_rows(self.summary)
        if len(rows) > DRAWN:
            rows = [rows[round(i * (len(rows) - 1) / (DRAWN - 1))] for i in range(DRAWN)]
        return rows

    def find_last_metric(self) -> float | None:
        known = (each.scores for each in reversed(self.summary.committed_rounds()) if each.rounds_before)
        return next((scores.weighted for scores in known if scores is not None), None)

    def make_summary(self) -> dict[str, Any]:
        state, metric = self.state, columns.find_main_metric(self.row.job)
        return {
            "done": self.summary.completed_rounds,
            "metric": {"title": metric.title, "share": metric.share, "value": self.find_last_metric()},
            "down_bytes": self.summary.total.down_bytes,
            "up_bytes": self.summary.total.up_bytes,
            "joules": state.usage.joules if state.usage.metered else None,
            "metered": state.usage.metered,
            "tasks": state.usage.metered + state.usage.unmetered,
            "declined": self.summary.total.declined,
            "fact_at": self.at,
            "reason": state.reason,
        }

    def describe_current_round(
        self, hold: str | None = None, boards: Mapping[str, DeviceStatus] = {}
    ) -> dict[str, Any]:
        """Return phase, devices, counts and wait reason of the current round."""
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
            "waits": hold
            or (wait.text if (wait := wait_reasons.find_round_wait(self.row, state, boards)) is not None else None),
        }

    def list_device_rounds(self, device: str) -> list[dict[str, Any]]:
        found = []
        for number in sorted(self.parts, reverse=True):
            part = self.parts[number].get(device)
            if part is not None:
                found.append(
                    {
                        "round": number + 1,
                        "code": part.code,
                        "text": part.text,
                        **self._split_device_time(number, device),
                    }
                )
        return found

    def _split_device_time(self, number: int, device: str) -> dict[str, Any]:
        # fetching and sending are reported as one time, which is divided by bytes
        turn = self.turns.get(number)
        if turn is None:
            return {}
        asked, timed = turn.asked.get(device), turn.timed.get(device)
        told: dict[str, Any] = {"at": turn.began, "asked": asked}
        if timed is None:
            return told
        took_s = timed.took_s if turn.took_s is None else turn.took_s
        split = run_summary.split_round_time(number, took_s, [(timed.took_s, timed.wall_s)])
        before_s = min(max((asked or turn.began) - turn.began, 0.0), split.wait_s)
        moved = timed.down_bytes + timed.up_bytes
        down_s = split.transfer_s * (timed.down_bytes / moved if moved else 0.5)
        return {
            **told,
            "before_s": before_s,
            "down_s": down_s,
            "train_s": split.compute_s,
            "up_s": split.transfer_s - down_s,
            "after_s": split.wait_s - before_s,
            "down_bytes": timed.down_bytes,
            "up_bytes": timed.up_bytes,
        }


def count_outcomes(parts: Mapping[str, round_outcomes.DeviceOutcome], running: bool) -> list[dict[str, Any]]:
    codes = Counter(part.code for part in parts.values())
    words = {**sections.MEANINGS, "asked": "at work"} if running else sections.MEANINGS
    return [{"code": code, "text": words.get(code, code), "count": count} for code, count in codes.most_common()]


def find_round_outcomes(
    facts: Iterable[AnyEvent], plan: JobConstants, round: int
) -> Mapping[str, round_outcomes.DeviceOutcome] | None:
    """Return the outcomes of all devices in one round from a run's events, or None without that round."""
    told = round_outcomes.RoundOutcomes(plan)
    for fact in facts:
        told.apply_event(fact)
        for number in [number for number in told.by_round if number < min(round, told.summary.state.round)]:
            del told.by_round[number]
        if told.summary.state.round > round:
            break
    return told.by_round.get(round)
