"""Run, simulated or on boards, as a value that reads its parts from the log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedquilt import extras, metrics
from fedquilt.api.job import Job
from fedquilt.api.table import Table
from fedquilt.coordinator import facts as history
from fedquilt.coordinator.facts import AnyFact
from fedquilt.coordinator.plan import Plan
from fedquilt.coordinator.store import Row, Store
from fedquilt.coordinator.views import costs, log, scores, why
from fedquilt.core import StoreError
from fedquilt.tools.report import columns

if TYPE_CHECKING:
    import numpy as np


class Run:
    """One run in a coordinator's home. Everything is read from the log on demand.

    `simulate` returns one; `Run.open` opens one of any coordinator.

    Args:
        home: the coordinator's folder.
        id: of the run.

    Raises, from every method:
        StoreError: the home cannot be read.
    """

    def __init__(self, home: Path, id: str) -> None:
        self.home, self.id = home, id

    @classmethod
    def open(cls, home: str | Path, id: str) -> Run:
        """Open a run, by id or the latest of a job's name, in a home of `fedquilt serve`, `run`, `fleet` or `simulate`.

        Raises:
            StoreError: there is no such home or run; lists the runs there are.
        """
        if not (Path(home) / "fedquilt.db").is_file():
            raise StoreError(f"no runs in {home}: give the home of a coordinator, where fedquilt.db lies")
        with Store(Path(home)) as store:
            return cls(Path(home), store.job(id).id)

    @property
    def job(self) -> Job:
        """Job of this run."""
        return Job.of(self._row().job)

    @property
    def status(self) -> str:
        """State of the run: "queued", "running", "interrupted", "waiting", "held", "done", "failed" or "stopped"."""
        with self._store() as store:
            return store.standing(store.job(self.id))

    def rounds(self) -> Table:
        """One row per round: accuracy and loss after it, and its seconds, joules and bytes.

        Columns: round (from 1), accuracy (0..1; on the test set, or on held-out shares if the job has none), loss,
        held_accuracy, worst_decile, train_loss, seconds (on the boards), joules, down_bytes, up_bytes, participants.
        With another main metric, its name replaces accuracy: rmse, held_rmse. Unknown values are None.
        """
        with self._store() as store:
            row, facts = self._read(store)
            return Table(columns.rounds(facts, row.job, scores.read(self.home, row)))

    def devices(self) -> Table:
        """One row per device: its tasks, their cost, and its accuracy on its held-out share.

        Columns: device, tasks, declined, examples, seconds, joules, net_joules (above idle), down_bytes, up_bytes,
        peak_bytes, accuracy (0..1). Unknown values are None.
        """
        with self._store() as store:
            row, facts = self._read(store)
            return Table(columns.devices(facts, row.job, scores.read(self.home, row)))

    def why(self, device: str | None = None, round: int | None = None) -> list[str]:
        """Explain the outcome of a device in every round, of every device in one round, or of all.

        Args:
            device: id; None: every device.
            round: counted from 0, as in the log.

        Raises:
            JobError: the run has no such device or round.
        """
        with self._store() as store:
            return why.lines(why.of(store, self.id), round, device)

    def log(self) -> list[str]:
        """Events of the run as sentences, oldest first; the total cost stands last."""
        with self._store() as store:
            row, facts = self._read(store)
        state, said = history.Rounds(Plan.of(row.job)), []
        for fact in facts:
            state = history.apply(state, fact, 0.0)
            said += log.sentences(fact, log.closing(state, fact))
        return said + costs.lines(costs.account(facts))

    def weights(self) -> dict[str, np.ndarray]:
        """Tensors of the result, as of the last committed round: name -> array.

        Raises:
            JobError: the run has no state yet.
        """
        from fedquilt.tools.artefacts import export

        with self._store() as store:
            return dict(export.artefact(store, self.id).tensors)

    @extras.named()
    def export(self, path: str | Path) -> Path:
        """Write the result as a file in the format of its ending: .onnx or .safetensors. Returns its path.

        A stitched network is always ONNX. Trained weights as ONNX need torch.

        Raises:
            JobError: another ending, or a library is not installed.
            StoreError: the file cannot be written.
            ModelError: the network cannot be written as ONNX.
        """
        from fedquilt.tools.artefacts import export

        with self._store() as store:
            export.export(store, self.id, Path(path))
        return Path(path)

    @extras.named()
    def report(self, path: str | Path) -> Path:
        """Write the run's page: one HTML file that works offline. Returns its path.

        Raises:
            JobError: a library is not installed.
            StoreError: the file cannot be written.
        """
        from fedquilt.tools import report

        with self._store() as store:
            return report.main(store, self.id, Path(path))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and (self.home, self.id) == (other.home, other.id)

    def __hash__(self) -> int:
        return hash((self.home, self.id))

    def __repr__(self) -> str:
        table, metric = self.rounds(), columns.metric_of(self._row().job)
        known = [value for value in table[metric.name] if value is not None]
        reached = f", {metric.title} {metrics.shown(metric, known[-1], 1)}" if known else ""
        return f"<Run {self.id}: {self.status}, {len(table)} rounds{reached}>"

    @contextmanager
    def _store(self) -> Iterator[Store]:
        with Store(self.home, durable=False) as store:
            yield store

    def _row(self) -> Row:
        with self._store() as store:
            return store.job(self.id)

    def _read(self, store: Store) -> tuple[Row, list[AnyFact]]:
        return store.job(self.id), [fact for _, _, fact in store.facts(self.id)]
