"""Evaluation of the global model of a simulated run, outside of its rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedquilt import methods
from fedquilt.coordinator.settings import JobSettings
from fedquilt.coordinator.views import run_summary
from fedquilt.coordinator.views.scores import EvaluationScore, HeldOutScore
from fedquilt.core import Examples, evaluation
from fedquilt.tools.experiments.evaluation import Evaluator, score_from_sums
from fedquilt.tools.simulation.simulated_job import Simulation
from fedquilt.tools.simulation.workers.backend import WorkBackend


@dataclass(frozen=True)
class EvaluationResult:
    """Results of one evaluation, None where examples are missing."""

    test: EvaluationScore | None  # on the examples that no device has
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

    def evaluate(self, simulation: Simulation, hands: WorkBackend, *, shares: bool) -> EvaluationResult:
        """Evaluate the current state of a simulation."""
        told = hands.evaluate(simulation) if self.checks and shares else {}
        total = evaluation.add_evaluations(told.values())
        if total is not None and simulation.running is not None and total.right_with_priors is not None:
            simulation.running.class_counts = evaluation.count_classes(total)
        own = run_summary.summarise_evaluation(total, told)
        held = None if own is None else HeldOutScore.from_summary(simulation.completed_rounds, own)
        return EvaluationResult(self._score_test_set(simulation, hands), held, {} if own is None else own.devices)

    def _score_test_set(self, simulation: Simulation, hands: WorkBackend) -> EvaluationScore | None:
        if self._test is None:
            return None
        done, state = simulation.completed_rounds, simulation.state_digest
        if self._evaluator is not None:
            return self._evaluator.score(simulation.state, done, state)
        return score_from_sums(hands.evaluate_test_set(simulation), done, state)
