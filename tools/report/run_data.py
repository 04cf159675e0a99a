"""Data of a run's page, read from the coordinator's store, and the candidates of a stitching job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedquilt import methods, profiles
from fedquilt.console import table
from fedquilt.coordinator.rounds.events import AnyEvent, JobConstants
from fedquilt.coordinator.settings import JobSettings
from fedquilt.coordinator.storage.store import Store, StoredJob
from fedquilt.coordinator.views import round_outcomes
from fedquilt.coordinator.views.run_summary import ProgressPoint, RunSummary, progress_points
from fedquilt.coordinator.views.scores import EvaluationScore, HeldOutScore, read_scores
from fedquilt.core import FedquiltError
from fedquilt.tools.report import plots
from fedquilt.tools.report.rendering import HtmlTable, PageSection, render_plots

Candidates = Sequence[Mapping[str, Any]]

LONGEST = 70  # letters of a candidate's name


def load_candidates(store: Store, run: str) -> Candidates:
    """Return the candidates of a run's result, or () for other jobs and runs without a result."""
    from fedquilt.tools.artefacts import export

    try:
        if "onnx" not in methods.load(store.find_job(run).job.method).engines:
            return ()  # it trains a network
        found = export.load_result(store, run).meta.get("search", ())
    except FedquiltError:
        return ()
    return found if all(each.get("flops") and each.get("accuracy") is not None for each in found) else ()


def make_candidate_section(found: Candidates, job: JobSettings) -> PageSection | None:
    if not found:
        return None
    note = (
        "Costs are of one example, milliseconds and joules those of the board's first operating point, from its "
        "profile. Accuracies are on held-out examples, with 95 % intervals. On the front are candidates that no other "
        "beats: none is as accurate and as cheap, and better in one of the two. "
        "`fedquilt model export RUN --candidate N` writes any candidate. "
        'A "joined" candidate has one head on several taps, a "donor" a new head on one tap of an unmodified donor, a '
        '"stitched" one a new head on one stitched path, and an "aligned" one its last donor\'s own classes. A '
        '"cascade" runs its larger network only for examples to which its cheap one has no clear answer: its '
        "costs are means, with MFLOP at worst in brackets, and its accuracy is slightly too high, because the same "
        "examples determine what is clear."
    )
    return PageSection(
        (), render_plots(_plot_accuracy_by_cost(found)), [note], HtmlTable(*make_candidate_table(found, job))
    )


def make_candidate_table(found: Candidates, job: JobSettings) -> tuple[list[str], list[list[str]]]:
    from fedquilt.models.stitching.search import candidates

    known = [str(name).partition(":")[0] for name in (job.params.get("board"), *job.fleet.boards) if name]
    named = [name for name in dict.fromkeys(known) if name in profiles.board_names()]
    on_boards = [title for board in named for title in (f"ms, {board}", "mJ")]
    mflop = "MFLOP (at worst)" if any(each["early"] for each in found) else "MFLOP"
    head = ["", "candidate", "kind", "accuracy", "interval", "front", mflop, "MB", *on_boards]
    rows = []
    for number, each in enumerate(found, 1):
        costs = [candidates.board_cost(each["flops"], each["read_bytes"], board) for board in named]
        took = [amount for ms, joules in costs for amount in (ms, None if joules is None else 1e3 * joules)]
        rows.append(
            [
                str(number),
                _format_short_name(each),
                str(each["kind"]),
                f"{100 * each['accuracy']:.1f} %",
                "-".join(f"{100 * end:.1f}" for end in each["interval"]),
                "chosen" if each["chosen"] else "front" if each["front"] else "",
                f"{each['flops'] / 1e6:.3g}" + (f" ({each['worst_flops'] / 1e6:.3g})" if each["early"] else ""),
                f"{each['weight_bytes'] / 1e6:.3g}",
                *("" if amount is None else f"{amount:.3g}" for amount in took),
            ]
        )
    return head, rows


def format_candidate_table(found: Candidates, job: JobSettings) -> list[str]:
    """Return the candidate table as text with full names below the numbered rows, or [] without candidates."""
    if not found:
        return []
    head, rows = make_candidate_table(found, job)
    short = [[row[0], *row[3:]] for row in (head, *rows)]
    whole = [f"{number}: {_format_full_name(each)}" for number, each in enumerate(found, 1)]
    return [*table.format_table(short, ">>><" + ">" * (len(head) - 6)), "", *whole]


def _plot_accuracy_by_cost(found: Candidates) -> plots.Plot:
    best = sorted((each for each in found if each["front"]), key=lambda each: each["flops"])
    kinds = sorted({str(each["kind"]) for each in found})

    def get_coordinates(each: Mapping[str, Any]) -> tuple[float, float]:
        return each["flops"] / 1e6, 100 * each["accuracy"]

    def draw(axis: Any, tip: plots.Tip) -> None:
        rising = [get_coordinates(each) for each in best]
        axis.plot([x for x, _ in rising], [y for _, y in rising], color=plots.COLOURS[len(kinds)], linewidth=1.8)
        for each in found:
            x, y = get_coordinates(each)
            ink = plots.COLOURS[kinds.index(str(each["kind"]))]
            fill = ink if each["front"] else "none"  # those off the front lie close together
            (dot,) = axis.plot([x], [y], "o", color=ink, markerfacecolor=fill, markersize=6, clip_on=False)
            tip(dot, f"{_format_short_name(each)} ({each['kind']}): {y:.1f} % at {x:.3g} MFLOP")
        axis.set_xlim(left=0.0)
        axis.set_xlabel("MFLOP of one example")
        axis.set_ylabel("accuracy on held-out examples, %")

    told = "; ".join(
        f"{_format_short_name(each)} {get_coordinates(each)[1]:.1f} % at {get_coordinates(each)[0]:.3g} MFLOP"
        for each in best
    )
    keys = (*kinds, "front (filled dots)")
    return plots.Plot("Accuracy by cost", f"Accuracy by cost; on the front: {told}", draw, plots.BODY, keys=keys)


def _format_full_name(candidate: Mapping[str, Any]) -> str:
    from fedquilt.models.stitching import stitched_network

    early = candidate["early"] or {"taps": ()}
    return stitched_network.network_name(candidate["taps"], candidate["kind"] != "aligned", early["taps"])


def _format_short_name(candidate: Mapping[str, Any]) -> str:
    name = _format_full_name(candidate)
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}..."


Dated = tuple[float, AnyEvent]  # wall-clock seconds, and the event


@dataclass(frozen=True)
class RunData:
    home: Path  # of the store
    row: StoredJob
    facts: tuple[Dated, ...]
    summary: RunSummary
    points: tuple[ProgressPoint, ...]
    parts: Mapping[int, Mapping[str, round_outcomes.DeviceOutcome]]
    scores: tuple[EvaluationScore, ...]
    held: tuple[HeldOutScore, ...]  # of evaluations in the rounds and outside of them
    partition: str  # SVG; "": the data is not at hand
    candidates: Candidates = ()  # of a stitching job's result


def load_run_data(store: Store, run: str) -> RunData:
    """Return the data of a run's page, by its id or the name of its job."""
    row = store.find_job(run)
    facts = tuple((at, fact) for _, at, fact in store.read_events(row.id))
    told = round_outcomes.RoundOutcomes(JobConstants.from_job(row.job))
    for at, fact in facts:
        told.apply_event(fact, at)
    parts, summary = told.by_round, told.summary
    points, found = tuple(progress_points(summary)), read_scores(store.home, row)
    held = [HeldOutScore.from_summary(point.rounds, point.personal) for point in points if point.personal]
    return RunData(
        store.home,
        row,
        facts,
        summary,
        points,
        parts,
        found.scores,
        tuple({score.rounds: score for score in sorted((*held, *found.held), key=lambda score: score.rounds)}.values()),
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

        for count in (len(devices), row.job.fleet.devices):  # all were heard of; or some never came
            counts = count_examples(row.job, count)
            if devices <= set(counts.devices):
                return render_picture(draw_counts(counts))
    except (FedquiltError, ModuleNotFoundError):
        pass
    return ""
