"""Report of a demo story, from the coordinator's home and the runners' answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

import msgspec

import fedquilt
from fedquilt.console import units
from fedquilt.coordinator.fleet.telemetry_store import TelemetryStore
from fedquilt.coordinator.rounds.rollout import StatusReported
from fedquilt.coordinator.storage.rollout_log import StoredRollout
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views.run_summary import summarise_events
from fedquilt.tools.lab.demo.request_streams import ResponseCounts, RunnerStatusSample
from fedquilt.tools.report import page, plots

BIN_S: Final = 4.0  # of the plots
SINCE: Final = "seconds since the inputs changed"


class TimelineEntry(NamedTuple):
    """A step of the story with its time."""

    at: float  # seconds since 1970
    said: str
    command: str = ""
    short: str = ""  # for the plots; "": it is in none


class DeviceSummary(msgspec.Struct, frozen=True):
    """Results of one device. Shares are of correct answers, or None without answers."""

    name: str
    answers: int
    before: float | None  # of the first model, on the first images
    dropped: float | None  # of the first model, on the changed ones
    after: float | None  # of the last model
    drift: float | None  # the largest that the coordinator was told
    bad_s: float | None = None  # for which the bad model was in use; None: never
    bad_answers: int = 0  # that it gave


class RolloutSummary(msgspec.Struct, frozen=True):
    id: str
    brings: str
    status: str
    offered: int  # boards
    committed: int
    seconds: float
    moved_bytes: int  # the model's, to every board that it was offered to
    reason: str = ""


class StoryReport(msgspec.Struct, frozen=True):
    home: str  # of the coordinator, whose log has it all
    began: float  # seconds since 1970
    seconds: float
    energy_j: float | None  # of both runs, on all boards
    moved_bytes: int  # of both runs and of all models
    failed: int  # requests to runners that were not answered
    before: float
    dropped: float
    after: float
    runs: tuple[str, ...]
    rollouts: tuple[RolloutSummary, ...]  # the first, the bad one, the last
    boards: tuple[DeviceSummary, ...]
    reason: str = ""  # why the bad model was taken back


class StreamSummary(NamedTuple):
    began: float  # seconds since 1970, as all times
    changed: float  # the images did
    ended: float
    answers: Sequence[ResponseCounts]
    said: Sequence[RunnerStatusSample]
    failed: Sequence[str]


def build_report(
    home: Path, store: Store, runs: Sequence[str], rollouts: Sequence[str], stream: StreamSummary
) -> StoryReport:
    """Build the report of a story.

    Args:
        home: The coordinator's home.
        store: Store of that home.
        runs: Ids of both runs.
        rollouts: Ids of the rollouts of the first, the bad and the last model.
        stream: Answers during the story.

    Raises:
        StoreError: If the stored data cannot be read.
    """
    kept = [store.rollouts.find_rollout(id) for id in rollouts]
    first, bad, last = (model_sha256(each) for each in kept)
    used = seconds_in_use(store, rollouts[1])
    whole = [summarise_events(store.find_job(run).job, store.read_events(run)).total for run in runs]
    with TelemetryStore(home) as boards:
        drifts = {
            each.device: [reading.drift for reading in boards.load_readings(each.device, stream.began, stream.ended)]
            for each in boards.load_statuses()
        }
    groups: tuple[Callable[[ResponseCounts], bool], ...] = (
        lambda each: each.model == first and each.at < stream.changed,
        lambda each: each.model == first and each.at >= stream.changed,
        lambda each: each.model == last,
    )
    found = []
    for device in sorted(drifts):
        own = [each for each in stream.answers if each.device == device]
        before, dropped, after = (share_correct(filter(group, own)) for group in groups)
        found.append(
            DeviceSummary(
                device,
                sum(each.given for each in own),
                before,
                dropped,
                after,
                max((drift for drift in drifts[device] if drift is not None), default=None),
                used.get(device),
                sum(each.given for each in own if each.model == bad),
            )
        )
    before, dropped, after = (share_correct(filter(group, stream.answers)) or 0.0 for group in groups)
    rolled = tuple(_summarise_rollout(each) for each in kept)
    joules = [each.energy_j for each in whole if each.energy_j is not None]
    return StoryReport(
        home=str(home),
        began=stream.began,
        seconds=stream.ended - stream.began,
        energy_j=sum(joules) if joules else None,
        moved_bytes=sum(each.down_bytes + each.up_bytes for each in whole) + sum(each.moved_bytes for each in rolled),
        failed=len(stream.failed),
        before=before,
        dropped=dropped,
        after=after,
        runs=tuple(runs),
        rollouts=rolled,
        boards=tuple(found),
        reason=rollback_reason(kept[1]),
    )


def seconds_in_use(store: Store, rollout: str) -> dict[str, float]:
    """Return for how long each device used a rollout's model before its rollback, in seconds."""
    began: dict[str, float] = {}
    found: dict[str, float] = {}
    for _, at, fact in store.rollouts.read_events(rollout):
        if not isinstance(fact, StatusReported):
            continue
        if fact.phase == "soaking":
            began.setdefault(fact.device, at)
        elif fact.device in began and fact.phase in ("returned", "refused"):
            found.setdefault(fact.device, at - began[fact.device])
    return found


def model_sha256(kept: StoredRollout) -> str:
    assert kept.state.plan.blob is not None
    return kept.state.plan.blob.sha256


def rollback_reason(kept: StoredRollout) -> str:
    """Return the first device's reason against a rollout's model, or else the rollout's."""
    return next((each.reason for each in kept.state.heard.values() if each.reason), kept.state.reason)


def _summarise_rollout(kept: StoredRollout) -> RolloutSummary:
    state = kept.state
    size = 0 if state.plan.blob is None else state.plan.blob.size
    return RolloutSummary(
        state.id,
        state.plan.name,
        state.status,
        len(state.offered),
        state.count_outcomes().get("committed", 0),
        kept.at - kept.created,
        size * len(state.offered),
        state.reason,
    )


def share_correct(answers: Iterable[ResponseCounts]) -> float | None:
    """Return the share of correct answers, or None without answers."""
    found = list(answers)
    count = sum(each.given for each in found)
    return sum(each.right for each in found) / count if count else None


# -- words ----------------------------------------------------------------------------------------


def format_sentences(told: StoryReport) -> list[str]:
    had = [board for board in told.boards if board.bad_s is not None]
    spared = len(told.boards) - len(had)
    whom = ", ".join(f"{board.name} for {board.bad_s:.1f} s ({board.bad_answers} answers)" for board in had)
    bad = f"The bad model was in use on {whom}; {spared} of {len(told.boards)} boards never had it."
    if not had:
        offered = told.rollouts[1].offered
        bad = (
            f"The bad model was in use on no board: it did not pass the check of {offered} board{'s' * (offered > 1)}."
        )
    joules = "" if told.energy_j is None else f", {told.energy_j:.1f} J"
    return [
        f"Right answers: {told.before:.1%} before the inputs changed, {told.dropped:.1%} then, {told.after:.1%} now.",
        bad,
        f"{sum(board.answers for board in told.boards):,} answers, and {told.failed or 'no'} request failed, through "
        "every exchange of models.",
        f"In all {told.seconds / 60:.1f} minutes{joules}, {units.format_bytes(told.moved_bytes)}.",
    ]


# -- the page -------------------------------------------------------------------------------------


def plot_story(told: StoryReport, stream: StreamSummary, moments: Sequence[TimelineEntry]) -> list[plots.Plot]:
    had = next((board.name for board in told.boards if board.bad_s is not None or board.bad_answers), "")
    marks = [(each.at - stream.changed, each.short) for each in moments if each.short]
    first = [
        _accuracy_line(
            "the other boards" if had else "", [each for each in stream.answers if each.device != had], stream
        )
    ]
    if had:
        first.append(_accuracy_line(had, [each for each in stream.answers if each.device == had], stream))
    right = plots.plot_lines(first, "Right answers, by the labels", SINCE, "%", most=100.0)
    drift = plots.plot_lines(
        [_drift_line(stream)], "Drift of the inputs, as the runners tell it", SINCE, "0 to 1", most=1.0
    )
    return [_mark_moments(right, marks), _mark_moments(drift, marks)]


def _accuracy_line(name: str, answers: Sequence[ResponseCounts], stream: StreamSummary) -> plots.PlotLine:
    x, y, low, high = list[float](), list[float](), list[float](), list[float]()
    bins: dict[int, dict[str, list[ResponseCounts]]] = {}
    for each in answers:
        bins.setdefault(int((each.at - stream.changed) // BIN_S), {}).setdefault(each.device, []).append(each)
    for number, devices in sorted(bins.items()):
        shares = [100 * (share_correct(found) or 0.0) for found in devices.values()]
        x.append((number + 0.5) * BIN_S)
        y.append(100 * (share_correct(each for found in devices.values() for each in found) or 0.0))
        low.append(min(shares))
        high.append(max(shares))
    several = len({each.device for each in answers}) > 1
    return plots.PlotLine(name, x, y, low if several else (), high if several else ())


def _drift_line(stream: StreamSummary) -> plots.PlotLine:
    latest: dict[str, RunnerStatusSample] = {}
    said, x, y, low, high = list(stream.said), list[float](), list[float](), list[float](), list[float]()
    at = stream.began
    while at < stream.ended:
        at += BIN_S
        while said and said[0].at <= at:
            first = said.pop(0)
            latest[first.device] = first
        if known := [each.drift for each in latest.values() if each.drift is not None]:
            x.append(at - stream.changed)
            y.append(fmean(known))
            low.append(min(known))
            high.append(max(known))
    return plots.PlotLine("", x, y, low, high)


def _mark_moments(plot: plots.Plot, marks: Sequence[tuple[float, str]]) -> plots.Plot:
    def draw(axis: Any, tip: plots.Tip) -> None:
        plot.draw(axis, tip)
        for number, (at, said) in enumerate(marks):
            axis.axvline(at, color=plots.INK, alpha=0.5, linewidth=1, linestyle=":")
            place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "fontsize": 10}
            axis.annotate(said, (at, 0.03 + 0.09 * (number % 2)), (3, 0), **place)

    named = "; ".join(f"{said} at {at:.0f}" for at, said in marks)
    return replace(plot, draw=draw, summary=f"{plot.summary}; {named}")


def render_page(
    told: StoryReport, pictures: Sequence[plots.Plot], moments: Sequence[TimelineEntry], began: float
) -> str:
    def format_percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f} %"

    boards = page.HtmlTable(
        ["board", "answers", "right at first", "inputs changed", "right now", "most drift", "had the bad model"],
        [
            [
                board.name,
                f"{board.answers:,}",
                *map(format_percent, (board.before, board.dropped, board.after)),
                "-" if board.drift is None else f"{board.drift:.2f}",
                "never" if board.bad_s is None else f"{board.bad_s:.1f} s, {board.bad_answers} answers",
            ]
            for board in told.boards
        ],
    )
    rollouts = page.HtmlTable(
        ["rollout", "brings", "status", "offered to", "committed by", "took", "moved", "why"],
        [
            [
                each.id,
                each.brings,
                each.status,
                f"{each.offered} of {len(told.boards)} boards",
                f"{each.committed} of {len(told.boards)}",
                units.format_duration(each.seconds),
                units.format_bytes(each.moved_bytes),
                each.reason,
            ]
            for each in told.rollouts
        ],
        ["why"],
    )
    steps = page.HtmlTable(
        ["second", "what", "command"],
        [[f"{each.at - began:.0f}", each.said, each.command] for each in moments],
        ["what", "command"],
    )
    tiles = [
        (f"{told.seconds / 60:.1f}", "minutes"),
        ("-" if told.energy_j is None else f"{told.energy_j:.1f}", "joules"),
        (f"{told.moved_bytes / 1e6:.1f}", "megabytes"),
        (format_percent(told.before), "right at first"),
        (format_percent(told.dropped), "inputs changed"),
        (format_percent(told.after), "right now"),
        (f"{sum(board.bad_s is not None for board in told.boards)} of {len(told.boards)}", "had the bad model"),
    ]
    return page.render_page(
        "story.html",
        began=time.strftime("%Y-%m-%d %H:%M", time.localtime(began)),
        version=fedquilt.__version__,
        count=len(told.boards),
        tiles=tiles,
        pictures=page.render_plots(*pictures),
        sentences=format_sentences(told),
        reason=told.reason,
        boards=boards,
        rollouts=rollouts,
        steps=steps,
    )
