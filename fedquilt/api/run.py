"""Public class of runs, whose results come from the event log, and tables of results."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fedquilt import extras, metrics
from fedquilt.api.job import Job
from fedquilt.coordinator.rounds.events import ENDED_PHASES
from fedquilt.coordinator.storage.store import MAX_COORDINATOR_GAP_S, InactiveRunError, Store, StoredJob, open_store
from fedquilt.coordinator.views import event_messages, round_outcomes, scores
from fedquilt.coordinator.views.run_summary import RunSummary, is_of_final_evaluation, summarise_events
from fedquilt.core import StoreError
from fedquilt.formats import table_file, toml
from fedquilt.tools.report import columns

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import polars as pl
    from matplotlib.axes import Axes

POLL_S: Final = 0.5
MAX_PRINTED_ROWS: Final = 40  # longer tables show their first and last rows


@dataclass(frozen=True)
class Table:
    """Named columns of equal length, with None for unknown values.

    Iteration yields rows as dictionaries. `pandas.DataFrame(table.columns)` and `polars.DataFrame(table.columns)`
    accept the columns.

    Attributes:
        columns: Values of each column, by name.
    """

    columns: Mapping[str, list[Any]]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    def __getitem__(self, name: str) -> list[Any]:
        """Return the values of a column.

        Raises:
            KeyError: If there is no such column.
        """
        if name not in self.columns:
            raise KeyError(f"no column {name!r}{toml.describe_choices(name, self.columns)}")
        return self.columns[name]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for values in zip(*self.columns.values(), strict=True):
            yield dict(zip(self.columns, values, strict=True))

    def write(self, path: str | Path) -> Path:
        """Write the table to a file, in the format of the suffix: .csv or .json.

        Args:
            path: Path of the file.

        Returns:
            The path.

        Raises:
            JobError: If the suffix is unknown.
            StoreError: If the file cannot be written.
        """
        table_file.write_table(Path(path), tuple(self.columns), self)
        return Path(path)

    def to_pandas(self) -> pd.DataFrame:
        """Return the table as a pandas data frame. Unknown values become NaN or None.

        Raises:
            JobError: If pandas is not installed.
        """
        return extras.load_optional("pandas").DataFrame(dict(self.columns))

    def to_polars(self) -> pl.DataFrame:
        """Return the table as a polars data frame. Unknown values become null.

        Raises:
            JobError: If polars is not installed.
        """
        return extras.load_optional("polars").DataFrame(dict(self.columns), strict=False)

    def __repr__(self) -> str:
        cells = self._format_rows()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join("  ".join(map(str.rjust, row, widths)) for row in cells)

    def _repr_html_(self) -> str:
        head, *body = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self._format_rows()]
        rows = "".join(f"<tr>{row}</tr>" for row in body)
        return f"<table><thead><tr>{head.replace('td>', 'th>')}</tr></thead><tbody>{rows}</tbody></table>"

    def _format_rows(self) -> list[list[str]]:
        body = [[_format_cell(value) for value in row.values()] for row in self]
        if len(body) > MAX_PRINTED_ROWS:
            body = [*body[: MAX_PRINTED_ROWS // 2], ["..."] * len(self.columns), *body[-MAX_PRINTED_ROWS // 2 :]]
        return [list(self.columns), *body]


class Run:
    """One run in a coordinator's home, read from its event log on demand.

    `simulate` returns a run, and `Run.open` opens a run of any coordinator. Every method raises StoreError if the home
    cannot be read.

    Args:
        home: Folder of the coordinator.
        id: Id of the run.
    """

    def __init__(self, home: Path, id: str) -> None:
        self.home, self.id = home, id

    @classmethod
    def open(cls, home: str | Path, id: str) -> Run:
        """Open a run in the home of a coordinator.

        Args:
            home: Folder used by `fedquilt serve`, `run` or `simulate`.
            id: Id of a run, or name of a job for its latest run.

        Returns:
            The run.

        Raises:
            StoreError: If there is no such home or run.
        """
        if not (Path(home) / "fedquilt.db").is_file():
            raise StoreError(f"{home} has no runs: give the home of a coordinator, which contains fedquilt.db")
        with open_store(Path(home)) as store:
            return cls(Path(home), store.find_job(id).id)

    @property
    def job(self) -> Job:
        """Settings of the run's job."""
        return Job.from_settings(self._read_row().job)

    @property
    def status(self) -> str:
        """Status of the run, as a word.

        "armed" (its [trigger] starts further runs), "waiting for approval", "queued", "waiting" (behind other runs),
        "running", "held" (the disk is full), "interrupted" (no coordinator), "stopping", "done", "failed" or "stopped".
        """
        with self._open_store() as store:
            return store.current_status(store.find_job(self.id))

    def rounds(self) -> Table:
        """Return one row per round: metrics, training time, energy and transferred bytes.

        Columns: round (from 1), accuracy (0..1, on the test set, or on held-out shares without a test set), loss,
        held_accuracy, worst_decile, train_loss, seconds (on the devices), joules, down_bytes, up_bytes, participants.
        Another main metric replaces accuracy in the names: rmse, held_rmse. Unknown values are None.
        """
        with self._open_store() as store:
            row, summary = store.find_job(self.id), self._summarise(store)
            return Table(columns.make_round_columns(summary, row.job, scores.read_scores(self.home, row)))

    def follow(self) -> Iterator[dict[str, Any]]:
        """Yield a row of `rounds` for every finished round until the run ends. Blocks between rounds.

        A round that is evaluated during the next round is finished with that evaluation.

        Raises:
            JobError: If the run has not ended and no coordinator has run for MAX_COORDINATOR_GAP_S.
        """
        reader, served_s = RoundReader(self.home, self.id), -math.inf
        while True:
            with self._open_store() as store:
                served_s = time.monotonic() if store.is_served() else served_s
                row = store.find_job(self.id)  # read before the rounds, so that no last round is missed
                resume = store.describe_resume(row)
            has_ended = row.status in ENDED_PHASES
            yield from reader.read_new_rows(has_ended=has_ended)
            if has_ended:
                return
            if time.monotonic() >= served_s + MAX_COORDINATOR_GAP_S:
                raise InactiveRunError(f"no coordinator is running for {self.home}: {resume}")
            time.sleep(POLL_S)

    def devices(self) -> Table:
        """Return one row per device: tasks, their cost, and accuracy on the held-out share.

        Columns: device, tasks, declined, staleness, examples, seconds, joules, net_joules (above idle), down_bytes,
        up_bytes, peak_bytes, accuracy (0..1). Unknown values are None.
        """
        with self._open_store() as store:
            row, summary = store.find_job(self.id), self._summarise(store)
            return Table(columns.make_device_columns(summary, row.job, scores.read_scores(self.home, row)))

    def why(self, device: str | None = None, round: int | None = None) -> list[str]:
        """Return sentences on the outcome of each device in each round.

        Args:
            device: Id of the device, or None for all devices.
            round: Round from 1, or None for all rounds.

        Returns:
            The sentences.

        Raises:
            JobError: If the run has no such device or round.
        """
        with self._open_store() as store:
            return round_outcomes.format_outcomes(round_outcomes.load_outcomes(store, self.id), round, device)

    def log(self) -> list[str]:
        """Return the events of the run as sentences, oldest first, followed by the total cost."""
        sentences = list[str]()
        with self._open_store() as store:
            summary = RunSummary.from_job(store.find_job(self.id).job)
            for _, at_s, event in store.read_events(self.id):
                summary = summary.with_event(event, at_s)
                sentences += event_messages.format_single_event(event, is_of_final_evaluation(summary.state, event))
        return sentences + event_messages.format_energy_summary(summary)

    def weights(self, *, best: bool = False) -> dict[str, np.ndarray]:
        """Return the tensors of the last committed state, by name.

        Args:
            best: Whether to return the state with the best evaluation on devices, not the last one.

        Returns:
            The tensors.

        Raises:
            JobError: If the run has no state yet, or no evaluation.
        """
        from fedquilt.tools.artefacts import export

        with self._open_store() as store:
            return dict(export.load_result(store, self.id, best=best).tensors)

    @extras.report_missing_extras()
    def export(self, path: str | Path, *, best: bool = False, candidate: int | None = None) -> Path:
        """Write the result to a file, in the format of the suffix: .onnx or .safetensors.

        A stitched network is always ONNX. Writing trained weights as ONNX requires torch.

        Args:
            path: Path of the file.
            best: Whether to write the state with the best evaluation on devices, not the last one.
            candidate: Number of a row of `candidates` to write instead of the result, from 1, or None.

        Returns:
            The path.

        Raises:
            JobError: If the suffix or the candidate is unknown, a library is not installed, or there is no evaluation.
            StoreError: If the file cannot be written.
            ModelError: If the network cannot be written as ONNX.
        """
        from fedquilt.tools.artefacts import export

        with self._open_store() as store:
            export.export_result(store, self.id, Path(path), best=best, candidate=candidate)
        return Path(path)

    def candidates(self) -> list[dict[str, Any]]:
        """Return the candidate networks of a stitching job, the cheapest first.

        Each row has the "accuracy" on held-out examples with a 95 % "interval", the costs, and whether the network is
        on the "front" of accuracy and costs. For a cascade, costs are means, and the row has also "worst_flops" and
        the share of "early" exits.

        Returns:
            The candidates, or [] for other jobs.

        Raises:
            JobError: If the run has no state yet.
        """
        from fedquilt.tools.artefacts import export

        with self._open_store() as store:
            return list(export.load_result(store, self.id).meta.get("search", ()))

    @extras.report_missing_extras()
    def plot(self, x: str = "rounds", axes: Any = None) -> Axes:
        """Draw accuracy, or the job's main metric, against a cost.

        Args:
            x: "rounds", "seconds" (virtual time in a simulation), "board seconds", "bytes" or "joules".
            axes: Axes of matplotlib, or None for those of a new figure.

        Returns:
            The axes.

        Raises:
            JobError: If matplotlib is not installed, the run has fewer than two evaluations, or `x` is unknown.
        """
        from fedquilt.tools.report import plots, run_data, sections

        with self._open_store() as store:
            accuracy_plots = sections.make_accuracy_plots(run_data.load_run_data(store, self.id))
        return plots.draw_on_axes(plots.choose_plot(accuracy_plots, x), axes)

    @extras.report_missing_extras()
    def report(self, path: str | Path) -> Path:
        """Write an HTML page about the run, in one file that works offline.

        Args:
            path: Path of the file.

        Returns:
            The path.

        Raises:
            JobError: If a library is not installed.
            StoreError: If the file cannot be written.
        """
        from fedquilt.tools import report

        with self._open_store() as store:
            return report.write_run_page(store, self.id, Path(path))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and (self.home, self.id) == (other.home, other.id)

    def __hash__(self) -> int:
        return hash((self.home, self.id))

    def __repr__(self) -> str:
        table, metric = self.rounds(), columns.find_main_metric(self._read_row().job)
        values = [value for value in table[metric.name] if value is not None]
        latest = f", {metric.title} {metrics.format_value(metric, values[-1], 1)}" if values else ""
        return f"<Run {self.id}: {self.status}, {len(table)} rounds{latest}>"

    def _open_store(self) -> Store:
        return open_store(self.home, durable=False)

    def _read_row(self) -> StoredJob:
        with self._open_store() as store:
            return store.find_job(self.id)

    def _summarise(self, store: Store) -> RunSummary:
        return summarise_events(store.find_job(self.id).job, store.read_events(self.id))


class RoundReader:
    """Reader of a run's finished rounds, which returns each round once."""

    def __init__(self, home: Path, id: str) -> None:
        self._home, self._id = home, id
        self._last_event, self._returned_rows = 0, 0  # events, and rounds
        self._summary: RunSummary | None = None

    def read_new_rows(self, *, has_ended: bool) -> list[dict[str, Any]]:
        """Return the rows completed since the last call.

        While the run has not ended, the last row is left out if its evaluation may still follow.
        """
        with open_store(self._home, durable=False) as store:
            row = store.find_job(self._id)
            summary = self._summary or RunSummary.from_job(row.job)
            for number, at_s, event in store.read_events(self._id, after=self._last_event):
                self._last_event, summary = number, summary.with_event(event, at_s)
            self._summary = summary
            rows = columns.make_scored_rows(summary, row.job, scores.read_scores(self._home, row))
        checked_later = row.job.check.every and not row.job.check.beside
        new_rows = (rows if has_ended or not checked_later else rows[:-1])[self._returned_rows :]
        self._returned_rows += len(new_rows)
        return new_rows


def _format_cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
