"""Evaluations beside the rounds of a simulated run: of its global model, at no cost to any device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedquilt import evaluation, methods
from fedquilt.coordinator.settings import Job
from fedquilt.coordinator.views import progress
from fedquilt.coordinator.views.scores import Held, Score
from fedquilt.core import Examples
from fedquilt.tools.experiments.evaluate import Evaluator, score_of
from fedquilt.tools.simulation.carriers import Hands
from fedquilt.tools.simulation.simulated_job import Simulation


@dataclass(frozen=True)
class Verdict:
    """Results of an evaluation; None: there was nothing to evaluate on."""

    test: Score | None  # on the examples that no device has
    held: Held | None  # on the devices' held-out shares
    devices: Mapping[str, float]  # device -> accuracy on its held-out share, 0..1


class Judge:
    """Evaluates the global model of one run on the test set and on held-out shares. Close it after use.

    Args:
        folder: the job's bundle.
        test: examples that no device has; None: there are none.
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

    def look(self, simulation: Simulation, hands: Hands, *, shares: bool) -> Verdict:
        """Evaluate the simulation's present state.

        Args:
            simulation: at the end of a round.
            hands: carry out the evaluation.
            shares: evaluate on the devices' held-out shares too.

        Raises:
            FedquiltError: an evaluation failed.
        """
        told = hands.evaluate(simulation) if self.checks and shares else {}
        own = progress.of_devices(evaluation.add_evaluations(told.values()), told)
        held = None if own is None else Held.of(simulation.done, own)
        return Verdict(self._score(simulation, hands), held, {} if own is None else own.devices)

    def _score(self, simulation: Simulation, hands: Hands) -> Score | None:
        if self._test is None:
            return None
        done, state = simulation.done, simulation.state_digest
        if self._evaluator is not None:
            return self._evaluator.score(simulation.state, done, state)
        return score_of(hands.test(simulation), done, state)
