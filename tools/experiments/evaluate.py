"""`fedquilt evaluate`: what a run's global model comes to on examples that no device has.

A process beside the coordinator, which holds no torch. It reads committed states from the coordinator's store and
writes what it finds to HOME/evaluations/RUN.json. The coordinator drops a state when the next is committed, so what
is wanted of every round has to be followed while it runs; when rounds are faster than evaluations, some are passed
over, and the last one never is.

A method's own `check` is given the test set as the held-out share of a device that has taken part in nothing and has
room for everything: what such a newcomer would have. A stitched network is run as it would be exported.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from fedquilt import bundle, columns, evaluation, methods, metrics, tensors
from fedquilt.coordinator.facts import Committed, Rounds, Started, apply
from fedquilt.coordinator.plan import Plan
from fedquilt.coordinator.settings import Job
from fedquilt.coordinator.store import Row, Store
from fedquilt.coordinator.views import scores
from fedquilt.coordinator.views.scores import Score, Scores
from fedquilt.core import (
    DETAILED,
    BlobRef,
    DeviceView,
    EvaluationSums,
    Examples,
    Method,
    Profile,
    StoreError,
)
from fedquilt.data import examples
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent import engines
from fedquilt.tools.simulation import Member
from fedquilt.tools.simulation.hands import delivered
from fedquilt.tools.simulation.scratch import Scratch

BUDGET_BYTES = 1 << 40  # nothing is refused here
LOOK_S = 1.0  # between looks at a store that has nothing new
NOBODY = "evaluator"
ENDED = ("done", "failed", "stopped")


# -- what it is tested on -------------------------------------------------------------------------


def test_set(job: Job) -> Examples:
    """The examples that no device has.

    Raises:
        JobError: the job names none, or the table is wrong.
        DataError: they cannot be read.
    """
    return examples.load_all(DataSpec.parse(scores.test_table(job)))


# -- one state ------------------------------------------------------------------------------------


class Evaluator:
    """Scores states of one job on its test set.

    Raises:
        JobError: no engine of the method's is installed here, or the bundle is not to be had.
        DataError: the test set cannot be read.
    """

    def __init__(self, job: Job, folder: Path, *, test: Examples | None = None, engine: Any = None) -> None:
        self.job, self.method, self._folder = job, methods.load(job.method), folder
        self._test = test_set(job) if test is None else test
        self._bundle = bundle.load(folder)
        self._engine = engine
        self._cache = Scratch()

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the temporary folder."""
        self._cache.cleanup()

    def score(self, state: Any, rounds: int, sha256: str = "", *, budget_bytes: int = BUDGET_BYTES) -> Score | None:
        """Evaluate a state on the test set; None: the method has nothing to test yet.

        Args:
            state: of the method.
            rounds: completed before the state.
            sha256: of the state.
            budget_bytes: of a device that has taken part in nothing: methods of sub-models send as much as it holds, by
                default the whole network.
        """
        if self.method.check is None:
            return self._stitched(state, rounds, sha256)
        engine = self._made(self.job.engine or _first(self.method))
        order = self.method.send(state, self._newcomer(engine.name, budget_bytes))
        if order is None:
            return None
        newcomer = Member(NOBODY, Examples(self._test.x[:0], self._test.y[:0]), self._test)
        with tempfile.TemporaryDirectory(dir=self._cache.path) as folder:
            given = delivered(
                self.method, order, newcomer, Path(folder), engine=engine, actions=("check",), path=self._path
            )
            return score_of(self.method.check(*given), rounds, sha256)

    def _newcomer(self, engine: str, budget_bytes: int) -> DeviceView:
        profile = Profile(
            device=NOBODY,
            board="none",
            memory_bytes=budget_bytes,
            budget_bytes=budget_bytes,
            engines=(engine,),
            versions={},
        )
        return DeviceView(NOBODY, profile)

    def _path(self, ref: BlobRef) -> Path:
        return bundle.file(self._folder, ref)

    def _made(self, name: str) -> Any:
        if self._engine is None:
            self._engine = engines.make(name, BUDGET_BYTES)
        return self._engine

    def _stitched(self, state: Any, rounds: int, sha256: str) -> Score | None:
        from fedquilt.tools.experiments.baselines import Bench

        if not self.method.done(state):
            return None
        engine = self._made(self.job.engine or _first(self.method))
        bench = Bench(self._bundle, lambda name: self._path(self._bundle.files[name]), engine, self._test, self._test)
        accuracy = bench.accuracy_of(self.method.result(state))
        return Score(rounds, accuracy, len(self._test), None, sha256)


def score_of(sums: EvaluationSums | None, rounds: int, sha256: str) -> Score | None:
    """Return the score of a state, or None without examples."""
    if sums is None or (main := metrics.main(sums)) is None:
        return None
    loss = math.fsum(sums.loss) / sums.examples
    return Score(rounds, main[1], sums.examples, loss, sha256, main[0].name, sums)


def _first(method: Method) -> str:
    """The first of the method's engines that is installed here."""
    there = engines.available()
    return next((name for name in method.engines if name in there), method.engines[0])


# -- a run ----------------------------------------------------------------------------------------


def evaluate(
    store: Store,
    run: str,
    *,
    follow: bool = False,
    say: Callable[[Score], None] = lambda score: None,
    sleep: Callable[[float], None] = time.sleep,
    make: Callable[[Job, Path], Evaluator] = Evaluator,
) -> Scores:
    """Score what the store still has of a run's states; with `follow` all that come, until the run has ended.

    Raises:
        StoreError: there is no such run.
        JobError, DataError: it cannot be tested.
    """
    row = store.job(run)
    found, states = scores.read(store.home, row), _States(store, row)
    with make(row.job, row.bundle) as evaluator:
        while True:
            ended = store.status(row.id) in ENDED  # before its states are looked at
            score = _latest(states, evaluator, {score.state for score in found.scores}, ended)
            if score is not None:
                say(score)
                found = msgspec.structs.replace(found, scores=(*found.scores, score))
                scores.write(scores.file(store.home, row.id), found)
            elif ended or not follow:
                return found
            else:
                sleep(LOOK_S)


class _States:
    """The latest state of a run; each look reads what the log has got since the one before."""

    def __init__(self, store: Store, row: Row) -> None:
        self.store, self._run, self._seen = store, row.id, 0
        self._rounds = Rounds(Plan.of(row.job))
        self._latest: tuple[int, BlobRef] | None = None

    @property
    def settling(self) -> bool:
        """Whether what an evaluation of the latest state needs is being gathered."""
        return self._rounds.settling

    def look(self) -> tuple[int, BlobRef] | None:
        """(rounds, state); None: the run has none yet. A closing evaluation leaves the state as it was."""
        for seq, _, fact in self.store.facts(self._run, self._seen):
            self._seen, self._rounds = seq, apply(self._rounds, fact, 0.0)
            if isinstance(fact, Started):
                self._latest = (0, fact.state)
            elif isinstance(fact, Committed) and (self._latest is None or fact.state != self._latest[1]):
                self._latest = (self._rounds.counted, fact.state)
        return self._latest


def _latest(states: _States, evaluator: Evaluator, known: set[str], ended: bool) -> Score | None:
    """The latest state's score; None: there is no new one, or it is gone already as the next has been committed."""
    latest = states.look()
    if latest is None or latest[1].sha256 in known or (states.settling and not ended):
        return None
    done, ref = latest
    path = states.store.depot.path(ref.sha256)
    try:
        payload = None if path is None else path.read_bytes()
    except FileNotFoundError:
        payload = None
    if payload is None:
        if ended:
            raise StoreError(
                f"the state after {done} rounds ({ref.sha256[:12]}) is gone from {states.store.home}, or damaged"
            )
        return None
    return evaluator.score(tensors.unpack(payload, evaluator.method.state), done, ref.sha256)


def lines(score: Score, confusion: bool = False) -> list[str]:
    """Describe a score for people, and on request list the rows of its confusion matrix."""
    metric, sums = metrics.KNOWN[score.metric], score.evaluation
    over = "of" if metric.share else "on"
    value = f"{metric.title} {metrics.shown(metric, score.value)} {over} {score.examples} examples"
    said = [f"after {score.rounds} rounds: {', '.join([value, *(metrics.describe(sums)[1:] if sums else ())])}"]
    if not confusion:
        return said
    if sums is None or (rows := evaluation.confusion(sums)) is None:
        return [*said, f"no confusion matrix: there is one for up to {DETAILED} classes"]
    head = ["true, predicted", *map(str, range(len(rows)))]
    return [*said, *columns.table([head, *([str(at), *map(str, row)] for at, row in enumerate(rows))], "<>", 10**6)]


def told(found: Scores, confusion: bool = False) -> dict[str, Any]:
    """Return scores for JSON, with metrics in place of sums, and on request with confusion matrices."""
    made: dict[str, Any] = msgspec.to_builtins(found)
    for score, row in zip(found.scores, made["scores"], strict=True):
        sums = score.evaluation
        row["metrics"] = evaluation.metrics_of(sums) if sums else {}
        if confusion:
            row["confusion"] = evaluation.confusion(sums) if sums else None
        del row["evaluation"]
    return made
