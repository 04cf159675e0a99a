"""Data of a run's page, read from the coordinator's store, and the candidates of a stitching job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedquilt import methods, profiles
from fedquilt.console import table
from fedquilt.coordinator.rounds.events import AnyEvent
from fedquilt.coordinator.rounds.job_state import JobConstants
from fedquilt.coordinator.settings import JobSettings
from fedquilt.coordinator.storage.store import Store, StoredJob
from fedquilt.coordinator.views import round_outcomes
from fedquilt.coordinator.views.run_summary import ProgressPoint, RunSummary, progress_points
from fedquilt.coordinator.views.scores import EvaluationScore, HeldOutScore, list_held_out_scores, read_scores
from fedquilt.core import FedquiltError
from fedquilt.tools.report import plots
from fedquilt.tools.report.rendering import HtmlTable, PageSection, render_plots

Candidates = Sequence[Mapping[str, Any]]

MAX_NAME_LETTERS = 70  # letters of a candidate's name


def load_candidates(store: Store, run: str) -> Candidates:
    """Return the candidates of a stitching run's result, or () if there are none or some lack values."""
    from fedquilt.tools.artefacts import export

    try:
        if "onnx" not in methods.load(store.find_job(run).job.method).engines:
            return ()  # the method trains a network
        candidates = export.load_result(store, run).meta.get("search", ())
    except FedquiltError:
        return ()
    complete = all(candidate.get("flops") and candidate.get("accuracy") is not None for candidate in candidates)
    return candidates if complete else ()


def make_candidate_section(candidates: Candidates, job: JobSettings) -> PageSection | None:
    if not candidates:
        return None
    note = (
        "Costs are of one example, milliseconds and joules those of the board's first operating point, from its "
        "profile. Accuracies are on held-out examples, with 95 % intervals. A candidate is on the front if no other is "
        "at least as accurate and as cheap, and better in one of the two. "
        "`fedquilt model export RUN --candidate N` writes any candidate. "
        'A "joined" candidate has one head on several taps, a "donor" a new head on one tap of an unmodified donor, a '
        '"stitched" one a new head on one stitched path, and an "aligned" one its last donor\'s own classes. A '
        '"cascade" runs its larger network only for examples for which the scores of its cheap network are close: its '
        "costs are means, with MFLOP at worst in brackets, and its accuracy is slightly too high, because the same "
        "examples determine the threshold."
    )
    return PageSection(
        (), render_plots(_plot_accuracy_by_cost(candidates)), [note], HtmlTable(*make_candidate_table(candidates, job))
    )


def make_candidate_table(search_result: Candidates, job: JobSettings) -> tuple[list[str], list[list[str]]]:
    from fedquilt.models.stitching.search import candidates

    requested_boards = [str(name).partition(":")[0] for name in (job.params.get("board"), *job.fleet.boards) if name]
    boards = [name for name in dict.fromkeys(requested_boards) if name in profiles.board_names()]
    on_boards = [title for board in boards for title in (f"ms, {board}", "mJ")]
    mflop = "MFLOP (at worst)" if any(candidate["early"] for candidate in search_result) else "MFLOP"
    head = ["", "candidate", "kind", "accuracy", "interval", "front", mflop, "MB", *on_boards]
    rows = []
    for number, candidate in enumerate(search_result, 1):
        costs = [candidates.board_cost(candidate["flops"], candidate["read_bytes"], board) for board in boards]
        costs_on_boards = [amount for ms, joules in costs for amount in (ms, None if joules is None else 1e3 * joules)]
        rows.append(
            [
                str(number),
                _format_short_name(candidate),
                str(candidate["kind"]),
                f"{100 * candidate['accuracy']:.1f} %",
                "-".join(f"{100 * end:.1f}" for end in candidate["interval"]),
                "chosen" if candidate["chosen"] else "front" if candidate["front"] else "",
                f"{candidate['flops'] / 1e6:.3g}"
                + (f" ({candidate['worst_flops'] / 1e6:.3g})" if candidate["early"] else ""),
                f"{candidate['weight_bytes'] / 1e6:.3g}",
                *("" if amount is None else f"{amount:.3g}" for amount in costs_on_boards),
            ]
        )
    return head, rows


def format_candidate_table(candidates: Candidates, job: JobSettings) -> list[str]:
    """Return a table of numbered candidates and their full names as lines, or [] without candidates."""
    if not candidates:
        return []
    head, rows = make_candidate_table(candidates, job)
    short_rows = [[row[0], *row[3:]] for row in (head, *rows)]
    full_names = [f"{number}: {_format_full_name(candidate)}" for number, candidate in enumerate(candidates, 1)]
    return [*table.format_table(short_rows, ">>><" + ">" * (len(head) - 6)), "", *full_names]


def _plot_accuracy_by_cost(candidates: Candidates) -> plots.Plot:
    best = [candidate for candidate in candidates if candidate["front"]]
    best.sort(key=lambda candidate: candidate["flops"])
    kinds = sorted({str(candidate["kind"]) for candidate in candidates})

    def get_coordinates(candidate: Mapping[str, Any]) -> tuple[float, float]:
        return candidate["flops"] / 1e6, 100 * candidate["accuracy"]

    def draw(axis: Any, add_tooltip: plots.AddTooltip) -> None:
        front_points = [get_coordinates(candidate) for candidate in best]
        axis.plot(
            [x for x, _ in front_points], [y for _, y in front_points], color=plots.COLOURS[len(kinds)], linewidth=1.8
        )
        for candidate in candidates:
            x, y = get_coordinates(candidate)
            ink = plots.COLOURS[kinds.index(str(candidate["kind"]))]
            fill = ink if candidate["front"] else "none"  # candidates off the front overlap
            (dot,) = axis.plot([x], [y], "o", color=ink, markerfacecolor=fill, markersize=6, clip_on=False)
            add_tooltip(dot, f"{_format_short_name(candidate)} ({candidate['kind']}): {y:.1f} % at {x:.3g} MFLOP")
        axis.set_xlim(left=0.0)
        axis.set_xlabel("MFLOP of one example")
        axis.set_ylabel("accuracy on held-out examples, %")

    front = [(_format_short_name(candidate), *get_coordinates(candidate)) for candidate in best]
    summary = "; ".join(f"{name} {y:.1f} % at {x:.3g} MFLOP" for name, x, y in front)
    keys = (*kinds, "front (filled dots)")
    return plots.Plot("Accuracy by cost", f"Accuracy by cost; on the front: {summary}", draw, plots.BODY, keys=keys)


def _format_full_name(candidate: Mapping[str, Any]) -> str:
    from fedquilt.models.stitching import stitched_network

    early = candidate["early"] or {"taps": ()}
    return stitched_network.network_name(candidate["taps"], candidate["kind"] != "aligned", early["taps"])


def _format_short_name(candidate: Mapping[str, Any]) -> str:
    name = _format_full_name(candidate)
    return name if len(name) <= MAX_NAME_LETTERS else f"{name[: MAX_NAME_LETTERS - 3]}..."


TimedEvent = tuple[float, AnyEvent]  # wall-clock seconds, and the event


@dataclass(frozen=True)
class RunData:
    home: Path
    row: StoredJob
    events: tuple[TimedEvent, ...]
    summary: RunSummary
    points: tuple[ProgressPoint, ...]
    parts: Mapping[int, Mapping[str, round_outcomes.DeviceOutcome]]
    scores: tuple[EvaluationScore, ...]
    held_out_scores: tuple[HeldOutScore, ...]  # from evaluations in rounds and outside of rounds
    partition: str  # SVG, or "" if the data is not readable here
    candidates: Candidates = ()  # candidates of a stitching job's result


def load_run_data(store: Store, run: str) -> RunData:
    """Return the data of a run's page by run id or job name, or raise StoreError if there is no run."""
    row = store.find_job(run)
    events = tuple((time_s, event) for _, time_s, event in store.read_events(row.id))
    outcomes = round_outcomes.RoundOutcomes(JobConstants.from_job(row.job))
    for time_s, event in events:
        outcomes.apply_event(event, time_s)
    parts, summary = outcomes.by_round, outcomes.summary
    points, stored_scores = tuple(progress_points(summary)), read_scores(store.home, row)
    return RunData(
        store.home,
        row,
        events,
        summary,
        points,
        parts,
        stored_scores.scores,
        tuple(list_held_out_scores(summary, stored_scores)),
        _draw_partition(row, {device for devices in parts.values() for device in devices}),
        load_candidates(store, row.id),
    )


def _draw_partition(row: StoredJob, devices: Set[str]) -> str:
    # only for simulated devices: the coordinator never sees the data of real devices
    if not row.job.data or not devices:
        return ""
    try:
        from fedquilt.tools.report.partition import count_examples, draw_counts
        from fedquilt.tools.report.plots import render_picture

        for count in (len(devices), row.job.fleet.devices):  # some devices of the fleet may never have connected
            counts = count_examples(row.job, count)
            if devices <= set(counts.devices):
                return render_picture(draw_counts(counts))
    except (FedquiltError, ModuleNotFoundError):
        pass
    return ""
