"""Evaluation of a run's global model on a test set.

Evaluation is a separate process, because the coordinator does not load torch. The process reads committed states from
the coordinator's store and writes scores to HOME/evaluations/RUN.json. The coordinator deletes a state when the next
state is committed, so scores of every round require following the run. If rounds are faster than evaluations, some
states are skipped, but never the last.

A method's own `check` receives the test set as the held-out share of a new device with unlimited memory. A stitched
network is run as it would be exported.
"""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fedquilt import methods, metrics
from fedquilt.arrays import tensors
from fedquilt.console import table
from fedquilt.coordinator.rounds.events import ENDED_PHASES, JobStarted, RoundCommitted
from fedquilt.coordinator.rounds.job_state import JobConstants, JobState, apply_event
from fedquilt.coordinator.settings import JobSettings
from fedquilt.coordinator.storage.store import Store, StoredJob
from fedquilt.coordinator.views import run_summary, scores
from fedquilt.coordinator.views.scores import EvaluationScore, HeldOutScore, RunScores
from fedquilt.core import (
    BlobRef,
    DataError,
    DeviceView,
    EvaluationSums,
    Examples,
    FedquiltError,
    JobError,
    Method,
    Profile,
    StoreError,
    evaluation,
)
from fedquilt.data import examples, readers
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent import engines
from fedquilt.formats import job_bundle
from fedquilt.tools.artefacts import export
from fedquilt.tools.simulation import DeviceData
from fedquilt.tools.simulation.local_backend import make_task_and_context
from fedquilt.tools.simulation.pool import ScratchFolder
from fedquilt.tools.simulation.run import WorkBackend
from fedquilt.tools.simulation.simulated_job import Simulation

log = logging.getLogger(__name__)

BUDGET_BYTES = 1 << 40  # large enough for any task
POLL_S = 1.0  # interval of reads from a store without new states
EVALUATOR_ID = "evaluator"


def load_test_set(job: JobSettings) -> Examples:
    with scores.name_test_table():
        return examples.load_split(DataSpec.parse(scores.make_test_table(job)))


class Evaluator:
    def __init__(self, job: JobSettings, folder: Path, *, test: Examples | None = None) -> None:
        self.job, self.method, self._folder = job, methods.load(job.method), folder
        self._test = load_test_set(job) if test is None else test
        self._bundle = job_bundle.load_bundle(folder)
        self._engine: Any = None
        self._cache = ScratchFolder()

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._cache.cleanup()

    def score(
        self, state: Any, rounds: int, sha256: str = "", *, budget_bytes: int = BUDGET_BYTES
    ) -> EvaluationScore | None:
        """Return the score of a state on the test set, or None if the method has nothing to evaluate yet."""
        if self.method.check is None:
            return self._score_stitched(state, rounds, sha256)
        engine = self._get_engine(self.job.engine or _choose_engine(self.method))
        spec = self.method.send(state, self._make_device_view(engine.name, budget_bytes))
        if spec is None:
            return None
        newcomer = DeviceData(EVALUATOR_ID, Examples(self._test.x[:0], self._test.y[:0]), self._test)
        with tempfile.TemporaryDirectory(dir=self._cache.path) as folder:
            task_and_context = make_task_and_context(
                self.method,
                spec,
                newcomer,
                Path(folder),
                engine=engine,
                actions=("check",),
                path_of_blob=self._find_blob,
            )
            return score_from_sums(self.method.check(*task_and_context), rounds, sha256)

    def _make_device_view(self, engine: str, budget_bytes: int) -> DeviceView:
        profile = Profile(
            device=EVALUATOR_ID,
            board="none",
            memory_bytes=budget_bytes,
            budget_bytes=budget_bytes,
            engines=(engine,),
            versions={},
        )
        return DeviceView(EVALUATOR_ID, profile)

    def _find_blob(self, ref: BlobRef) -> Path:
        return job_bundle.verify_file(self._folder, ref)

    def _get_engine(self, name: str) -> Any:
        if self._engine is None:
            self._engine = engines.create_engine(name, BUDGET_BYTES)
        return self._engine

    def _score_stitched(self, state: Any, rounds: int, sha256: str) -> EvaluationScore | None:
        from fedquilt.tools.experiments.baselines import BaselineSetup

        if not self.method.is_done(state):
            return None
        engine = self._get_engine(self.job.engine or _choose_engine(self.method))
        bench = BaselineSetup(
            self._bundle, lambda name: self._find_blob(self._bundle.files[name]), engine, self._test, self._test
        )
        accuracy = bench.compute_accuracy(self.method.result(state))
        return EvaluationScore(rounds, accuracy, len(self._test), None, sha256)


def find_untrained_tensors(method: str, state: Any) -> Sequence[str]:
    """Return the tensors of a method's result whose trained values are on devices only."""
    loaded = methods.load(method)
    return loaded.result(state).untrained_tensors if loaded.traits.private_data else ()


def require_whole_network(method: str, state: Any) -> None:
    """Raise JobError if trained tensors are on devices only, so that the server cannot evaluate the network."""
    if untrained := find_untrained_tensors(method, state):
        raise JobError(
            f"{method} leaves {len(untrained)} trained tensors ({untrained[0]}, ...) on devices, so the run has no "
            "whole network for a test set: set [check] every = 1, and read the devices' own accuracy in "
            "`fedquilt report`"
        )


def score_from_sums(sums: EvaluationSums | None, rounds: int, sha256: str) -> EvaluationScore | None:
    if sums is None or (main := metrics.main_metric(sums)) is None:
        return None
    loss = math.fsum(sums.loss) / sums.examples
    return EvaluationScore(rounds, main[1], sums.examples, loss, sha256, main[0].name, sums)


def _choose_engine(method: Method) -> str:
    available = engines.available_engines()
    return next((name for name in method.engines if name in available), method.engines[0])


def evaluate_run(
    store: Store,
    run: str,
    *,
    follow: bool = False,
    report_score: Callable[[EvaluationScore], None] = lambda score: None,
    sleep: Callable[[float], None] = time.sleep,
) -> RunScores:
    """Score the latest stored state of a run if it has no score, and return all stored scores.

    With `follow`, new states are scored until the run has ended.
    """
    row = store.find_job(run)
    _require_test_set(row)
    all_scores, states = scores.read_scores(store.home, row), _StateReader(store, row)
    with Evaluator(row.job, row.bundle) as evaluator:
        while True:
            has_ended = store.stored_status(row.id) in ENDED_PHASES  # read before the states, so that none is missed
            score = _score_latest_if_new(states, evaluator, {score.state for score in all_scores.scores}, has_ended)
            if score is not None:
                report_score(score)
                all_scores = msgspec.structs.replace(all_scores, scores=(*all_scores.scores, score))
                try:
                    scores.write_scores(scores.scores_path(store.home, row.id), all_scores)
                except StoreError as error:  # such as a home of another user: the score is shown all the same
                    log.warning("%s: the score is not stored", error)
            elif has_ended or not follow:
                return all_scores
            else:
                sleep(POLL_S)


def describe_test_result(store: Store, run: str) -> list[str]:
    """Score the result of a run on its [test], and return a line on the score, or [] without [test]."""
    job = store.find_job(run).job
    if not job.test:
        return []
    try:
        run_scores = convert_to_units(evaluate_run(store, run), job).scores
    except FedquiltError as error:  # such as a network that differs by device
        return table.fold_line(f"no test result: {error}")
    return [f"test {_format_main_metric(score)}" for score in run_scores[-1:]]


def _require_test_set(row: StoredJob) -> None:
    if row.job.test:
        return
    try:
        load_test_set(row.job)
    except DataError as error:
        reason = str(error).partition(": ")[0]
        raise JobError(
            f"job {row.job.name!r} has no test set, as {reason}: name a file with labels, as in `fedquilt model "
            f"evaluate {row.job.name} --data test.csv`"
        ) from None


def evaluate_state(store: Store, run: str, *, best: bool = False, data: Path | None = None) -> RunScores:
    """Score one state of a run without storing the score.

    Args:
        store: Store of the run.
        run: Id of the run, or name of its job.
        best: Score the state with the best evaluation by devices instead of the last one.
        data: File or folder to evaluate on, read as in training, or None for the job's test set.

    Raises:
        JobError: If there is no such state, or the method has no whole network.
        DataError: If the examples cannot be read.
    """
    row = store.find_job(run)
    job = row.job if data is None else msgspec.structs.replace(row.job, test=_make_test_settings(row.job, data))
    state = export.load_state(store, row, best=best)
    require_whole_network(job.method, state.value)
    with Evaluator(job, row.bundle) as evaluator:
        score = evaluator.score(state.value, state.rounds, state.sha256)
    return RunScores(scores.make_test_table(job), () if score is None else (score,))


def _make_test_settings(job: JobSettings, data: Path) -> dict[str, str]:
    table = {"path": str(data), "split": "train"}
    spec = DataSpec.parse({**scores.make_test_table(msgspec.structs.replace(job, test=table)), **table})
    return {**table, "split": "test"} if readers.has_test_split(data, spec) else table


def convert_to_units(run_scores: RunScores, job: JobSettings) -> RunScores:
    """Return scores with the errors of a regression in the unit of its targets.

    Errors stay in standard deviations if the targets of [data] have different ones.
    """
    stds = set((job.data.get("target") or {}).get("std", ()))
    if len(stds) != 1:
        return run_scores
    (std,) = stds
    all_scores = tuple(_convert_score(score, std) for score in run_scores.scores)
    return msgspec.structs.replace(run_scores, scores=all_scores)


def _convert_score(score: EvaluationScore, std: float) -> EvaluationScore:
    if score.evaluation is None:
        return score
    loss = None if score.loss is None else score.loss * std**2
    return msgspec.structs.replace(
        score, value=score.value * std, loss=loss, evaluation=evaluation.rescale_errors(score.evaluation, std)
    )


class _StateReader:
    def __init__(self, store: Store, row: StoredJob) -> None:
        self.store, self._run, self._last_seq = store, row.id, 0
        self.rounds = JobState(JobConstants.from_job(row.job))
        self._latest: tuple[int, BlobRef] | None = None

    def read_latest(self) -> tuple[int, BlobRef] | None:
        """Read new events, and return the completed rounds and the blob of the latest model, or None."""
        # an evaluation-only round leaves the state unchanged
        for seq, _, event in self.store.read_events(self._run, self._last_seq):
            self._last_seq, self.rounds = seq, apply_event(self.rounds, event, 0.0)
            if isinstance(event, JobStarted):
                self._latest = (0, event.state)
            elif isinstance(event, RoundCommitted) and (self._latest is None or event.state != self._latest[1]):
                self._latest = (self.rounds.completed_rounds, event.state)
        return self._latest


def _score_latest_if_new(
    states: _StateReader, evaluator: Evaluator, scored_digests: set[str], has_ended: bool
) -> EvaluationScore | None:
    # The result is also None if the state was deleted because the next state was committed.
    latest = states.read_latest()
    if latest is None or (states.rounds.is_evaluation_round and not has_ended):
        return None
    rounds_done, ref = latest
    is_scored = ref.sha256 in scored_digests
    if is_scored and not evaluator.method.traits.private_data:
        return None
    payload = _read_state(states.store, ref)
    if payload is None:
        if has_ended:
            state_text = f"the state after {rounds_done} rounds ({ref.sha256[:12]})"
            raise StoreError(f"{state_text} is missing or damaged: restore {states.store.home}")
        return None
    state: Any = tensors.unpack_state(payload, evaluator.method.state)
    require_whole_network(evaluator.job.method, state)
    return None if is_scored else evaluator.score(state, rounds_done, ref.sha256)


def _read_state(store: Store, ref: BlobRef) -> bytes | None:
    path = store.blob_store.blob_path(ref.sha256)
    try:
        return None if path is None else path.read_bytes()
    except FileNotFoundError:
        return None


def format_score(score: EvaluationScore, job: JobSettings | None = None) -> list[str]:
    """Return lines about a score and, with `job` and if it fits the terminal, its confusion matrix."""
    sums = score.evaluation
    text = _format_main_metric(score) if sums is None else metrics.describe_evaluation(sums)  # None if stitched
    score_lines = table.fold_line(f"after {score.rounds} rounds: test {text}")
    if job is None or sums is None or (rows := evaluation.confusion_matrix(sums)) is None:
        return score_lines
    names = scores.class_names(job, len(rows))
    cells = [[name, *map(str, row)] for name, row in zip(names, rows, strict=True)]
    matrix_lines = table.format_table([["true, predicted", *names], *cells], "<>", 10**6)
    if max(map(len, matrix_lines)) > table.line_width():
        matrix_lines = [f"--format json has the confusion matrix of {len(rows)} classes"]
    return [*score_lines, *matrix_lines]


def _format_main_metric(score: EvaluationScore) -> str:
    metric = metrics.METRICS[score.metric]
    return f"{metric.title} {metrics.format_value(metric, score.value)} on {score.examples} examples"


def scores_to_dict(run_scores: RunScores) -> dict[str, Any]:
    """Return scores for JSON, with metrics and confusion matrices instead of sums."""
    result: dict[str, Any] = msgspec.to_builtins(run_scores)
    for score, row in zip(run_scores.scores, result["scores"], strict=True):
        sums = score.evaluation
        row["metrics"] = evaluation.compute_metrics(sums) if sums else {}
        row["confusion"] = evaluation.confusion_matrix(sums) if sums else None
        del row["evaluation"]
    return result


@dataclass(frozen=True)
class EvaluationResult:
    test: EvaluationScore | None  # on the test set
    held: HeldOutScore | None  # on the devices' held-out shares
    devices: Mapping[str, float]  # device -> accuracy on its held-out share, 0..1


class LiveEvaluator:
    """Evaluator of one run's global model on the test set and on held-out shares. Close after use."""

    def __init__(self, job: JobSettings, folder: Path, test: Examples | None) -> None:
        self.checks = methods.load(job.method).check is not None
        self._test = test
        self._evaluator = None if test is None or self.checks else Evaluator(job, folder, test=test)

    def __enter__(self) -> LiveEvaluator:
        return self

    def __exit__(self, *error: object) -> None:
        if self._evaluator is not None:
            self._evaluator.close()

    def evaluate(self, simulation: Simulation, backend: WorkBackend, *, shares: bool) -> EvaluationResult:
        """Evaluate the model, with `shares` also on held-out shares, and update the class counts of the run."""
        sums_by_device = backend.evaluate(simulation) if self.checks and shares else {}
        total = evaluation.add_evaluations(sums_by_device.values())
        if total is not None and simulation.running is not None and total.correct_with_priors is not None:
            simulation.running.class_counts = evaluation.count_classes(total)
        summary = run_summary.summarise_evaluation(total, sums_by_device)
        held = None if summary is None else HeldOutScore.from_summary(simulation.completed_rounds, summary)
        rounds_done, state = simulation.completed_rounds, simulation.state_digest
        test = None
        if self._evaluator is not None:
            test = self._evaluator.score(simulation.state, rounds_done, state)
        elif self._test is not None:
            test = score_from_sums(backend.evaluate_test_set(simulation), rounds_done, state)
        return EvaluationResult(test, held, {} if summary is None else summary.devices)
