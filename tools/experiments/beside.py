"""Evaluation of the global model of a simulated run, outside of its rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedquilt import evaluation, methods
from fedquilt.coordinator.settings import Job
from fedquilt.coordinator.views import progress
from fedquilt.coordinator.views.scores import Held, Score
from fedquilt.core import Examples
from fedquilt.tools.experiments.evaluate import Evaluator, score_from_sums
from fedquilt.tools.simulation.carriers import Hands
from fedquilt.tools.simulation.simulated_job import Simulation


@dataclass(frozen=True)
class Verdict:
    """Results of one evaluation, None where examples are missing."""

    test: Score | None  # on the examples that no device has
    held: Held | None  # on the devices' held-out shares
    devices: Mapping[str, float]  # device -> accuracy on its held-out share, 0..1


class Judge:
    """Evaluator of one run's global model on the test set and on held-out shares. Close after use.

    Args:
        job: The job.
        folder: Bundle of the job.
        test: Test set, or None for none.
    """

    def __init__(self, job: Job, folder: Path, test: Examples | None) -> None:
        self.checks = methods.load(job.method).check is not None
        self._test = test
        self._evaluator = None if test is None or self.checks else Evaluator(job, folder, test=test)

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *error: object) -> None:
        if self._evaluator is not None:
            self._evaluator.close()

    def evaluate(self, simulation: Simulation, hands: Hands, *, shares: bool) -> Verdict:
        """Evaluate the current state of a simulation.

        Args:
            simulation: Simulation at the end of a round.
            hands: Backend that runs the evaluation.
            shares: Evaluate on the held-out shares of the devices too.

        Raises:
            FedquiltError: If an evaluation failed.
        """
        told = hands.evaluate(simulation) if self.checks and shares else {}
        own = progress.summarise_evaluation(evaluation.add_evaluations(told.values()), told)
        held = None if own is None else Held.from_summary(simulation.completed_rounds, own)
        return Verdict(self._score_test_set(simulation, hands), held, {} if own is None else own.devices)

    def _score_test_set(self, simulation: Simulation, hands: Hands) -> Score | None:
        if self._test is None:
            return None
        done, state = simulation.completed_rounds, simulation.state_digest
        if self._evaluator is not None:
            return self._evaluator.score(simulation.state, done, state)
        return score_from_sums(hands.evaluate_test_set(simulation), done, state)
