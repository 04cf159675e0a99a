"""Baselines of a stitched network: its donors, unmodified and with a new head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedquilt.coordinator.settings import JobSettings
from fedquilt.core import Bundle, Examples, Method, Runner
from fedquilt.data import inputs
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.algebra import class_moments, joint_head
from fedquilt.models.stitching.stitched_network import Block, StitchedNetwork
from fedquilt.tools.simulation import DeviceData
from fedquilt.tools.simulation.run import iterate_states
from fedquilt.tools.simulation.simulated_job import UNLIMITED_FLEET

BATCH = 64
MAX_ROUNDS = 1000  # more than any search needs


@dataclass(frozen=True)
class BaselineResult:
    name: str
    correct: np.ndarray  # bool, for each test example

    @property
    def accuracy(self) -> float:
        return float(self.correct.mean())


class BaselineSetup:
    """Pooled examples and an engine on which baselines are computed."""

    def __init__(
        self, bundle: Bundle, path: Callable[[str], Path], engine: Runner, train: Examples, test: Examples
    ) -> None:
        self.bundle, self.path, self.engine = bundle, path, engine
        self.train, self.test = train, test
        self.donor_pool = stitched_network.load_donor_pool(bundle.meta)

    def _run_block(self, block: Block, x: np.ndarray) -> np.ndarray:
        return stitched_network.run_block(block, lambda graph, x: self.engine.run(self.path(graph), x), x)

    def _run_in_batches(self, examples: Examples, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        starts = range(0, len(examples), BATCH)
        return np.concatenate(
            [function(inputs.prepare_inputs(examples.x[s : s + BATCH], self.donor_pool.input)) for s in starts]
        )

    def mark_correct(self, network: StitchedNetwork) -> np.ndarray:
        """Return whether a network predicts each test label, by the forward pass that agents use."""

        def scores(x: np.ndarray) -> np.ndarray:
            return stitched_network.compute_label_scores(network, self.donor_pool.blocks, self._run_block, x)

        return np.asarray(self._run_in_batches(self.test, scores).argmax(axis=1) == self.test.y)

    def fit_new_head(self, network: StitchedNetwork) -> StitchedNetwork:
        """Return a network with one new head on its taps, solved by FedStitch from the pooled examples."""

        def features(x: np.ndarray) -> np.ndarray:
            outputs = stitched_network.run_taps(network, self.donor_pool.blocks, self._run_block, x)
            return np.concatenate([stitched_network.global_average_pool(output) for output in outputs], axis=1)

        moments = class_moments.compute_moments(
            self._run_in_batches(self.train, features), self.train.y, len(self.donor_pool.labels)
        )
        sums = joint_head.standardise_sums(moments.to_sums())
        head = joint_head.fit_discriminant(sums, joint_head.best_penalty(sums).ridge)
        return replace(network, head={"weights": head.weights, "bias": head.bias}, early=None)

    def evaluate_unmodified(self) -> list[BaselineResult]:
        """Evaluate all unmodified donors whose classes are aligned with the labels."""
        return [
            BaselineResult(name, self.mark_correct(StitchedNetwork((donor.blocks,), {}, align=donor.align)))
            for name, donor in self.donor_pool.donors.items()
            if donor.align is not None
        ]

    def evaluate_new_heads(self) -> list[BaselineResult]:
        return [
            BaselineResult(name, self.mark_correct(self.fit_new_head(StitchedNetwork((donor.blocks[:-1],), {}))))
            for name, donor in self.donor_pool.donors.items()
        ]

    def compute_accuracy(self, artefact: Any) -> float:
        network = stitched_network.from_artefact(artefact.meta, artefact.tensors)
        return float(self.mark_correct(network).mean())


def run_search(
    job: JobSettings, bundle_folder: Path, members: Iterable[DeviceData], method: Method, engine: Any
) -> Any:
    """Run a bundle's search on devices without memory limits, and return the last method state."""
    unlimited_job = msgspec.structs.replace(job, rounds=MAX_ROUNDS, fleet=UNLIMITED_FLEET)
    *_, last_state = iterate_states(
        unlimited_job, bundle_folder, members, load_method=lambda name: method, engine=engine
    )
    return last_state


def pool_examples(members: Sequence[DeviceData]) -> Examples:
    return Examples(
        np.concatenate([member.train.x for member in members]), np.concatenate([member.train.y for member in members])
    )
