"""Baselines of a stitched network: its donors, and networks of single devices.

A donor is evaluated unmodified, with a new head, and stitched to itself. In the last two cases the client and server
code of the method follows a fixed path: nothing is searched, but selection, messages and solutions are as in a
search.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import CohortSettings, JobSettings
from fedquilt.core import Bundle, Examples, Method, Runner
from fedquilt.data import inputs
from fedquilt.methods import fedstitch
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.algebra import class_moments, joint_head
from fedquilt.models.stitching.search import steps
from fedquilt.models.stitching.search.state import ScoredPath, SearchParams, SearchState
from fedquilt.models.stitching.stitched_network import Block
from fedquilt.models.stitching.vote import Winner
from fedquilt.tools.simulation import DeviceData
from fedquilt.tools.simulation.run import iterate_states
from fedquilt.tools.simulation.simulated_job import ROOM

BATCH = 64
MOST_ROUNDS = 1000  # of a search that is compared with: all end before by themselves


@dataclass(frozen=True)
class BaselineResult:
    name: str
    accuracy: float
    note: str = ""


class BaselineSetup:
    """Pooled examples and an engine on which baselines are computed.

    Args:
        bundle: Bundle of the job.
        path: Function that returns the file of a graph.
        engine: Engine that runs the graphs.
        train: Pooled examples of all devices.
        test: Examples of no device.
    """

    def __init__(
        self, bundle: Bundle, path: Callable[[str], Path], engine: Runner, train: Examples, test: Examples
    ) -> None:
        self.bundle, self.path, self.engine = bundle, path, engine
        self.train, self.test = train, test
        self.stock = stitched_network.load_donor_pool(bundle.meta)

    def _run_block(self, block: Block, x: np.ndarray) -> np.ndarray:
        return stitched_network.run_block(block, lambda graph, x: self.engine.run(self.path(graph), x), x)

    def _run_path(self, path: list[Block], x: np.ndarray) -> np.ndarray:
        return stitched_network.run_path(path, [None] * len(path), self._run_block, x)

    def _run_in_batches(self, examples: Examples, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        starts = range(0, len(examples), BATCH)
        return np.concatenate(
            [function(inputs.prepare_inputs(examples.x[s : s + BATCH], self.stock.input)) for s in starts]
        )

    def _score_accuracy(self, scores: np.ndarray) -> float:
        return float((scores.argmax(axis=1) == self.test.y).mean())

    def evaluate_unmodified(self) -> list[BaselineResult]:
        """Evaluate all unmodified donors whose classes are aligned with the labels."""
        found = []
        for name, donor in self.stock.donors.items():
            if donor.align is None:
                continue
            path = [self.stock.blocks[block] for block in donor.blocks]

            def logits_of(x: np.ndarray, path: list[Block] = path) -> np.ndarray:
                return self._run_path(path, x)

            logits = self._run_in_batches(self.test, logits_of)
            found.append(BaselineResult(name, self._score_accuracy(stitched_network.align_logits(logits, donor.align))))
        return found

    def evaluate_new_heads(self) -> list[BaselineResult]:
        """Evaluate each donor's body with a new head, solved by FedStitch from the pooled examples."""
        found = []
        for name, donor in self.stock.donors.items():
            path = [self.stock.blocks[block] for block in donor.blocks[:-1]]

            def features(x: np.ndarray, path: list[Block] = path) -> np.ndarray:
                return stitched_network.global_average_pool(self._run_path(path, x))

            own = class_moments.device_moments(
                self._run_in_batches(self.train, features), self.train.y, len(self.stock.labels)
            )
            given = joint_head.standardise(class_moments.merge_moments([], [own]))
            head = joint_head.fit_discriminant(given, joint_head.best_penalty(given).ridge)
            found.append(
                BaselineResult(
                    name, self._score_accuracy(self._run_in_batches(self.test, features) @ head.weights.T + head.bias)
                )
            )
        return found

    def evaluate_self_stitched(
        self, job: JobSettings, folder: Path, members: Sequence[DeviceData]
    ) -> list[BaselineResult]:
        """Evaluate each donor with a junction between all its blocks, to measure the cost of junctions.

        Args:
            job: Search job. Its parameters, seed and cohorts are used, with unlimited memory.
            folder: Bundle of the job.
            members: Devices with their examples.

        Raises:
            JobError: If a run has failed.
        """
        found = []
        for name in self.stock.donors:
            both, path = add_twin_donor(self.bundle, name)
            bench = BaselineSetup(both, self.path, self.engine, self.train, self.test)
            led = self._stitch_along_path(make_twin_path_method(name, path), path, job, folder, members)
            found.append(BaselineResult(name, bench.compute_accuracy(led)))
        return found

    def _stitch_along_path(
        self, led: Method, path: Sequence[str], job: JobSettings, folder: Path, members: Sequence[DeviceData]
    ) -> Any:
        params = replace(settings.parse_params(job), mode="default", head="ridge", depth=len(path) + 1)
        params = replace(params, max_upsampling=sys.float_info.max)
        params = replace(params, native_continuation="allow", residual="report", stop_below=0.0)
        wanted = msgspec.structs.replace(job, params=asdict(params))
        return fedstitch.result(run_to_last_state(wanted, folder, members, led, self.engine))

    def evaluate_single_devices(
        self, job: JobSettings, folder: Path, members: Iterable[DeviceData]
    ) -> list[BaselineResult]:
        """Evaluate networks that single devices stitch from their own examples.

        Args and Raises are those of `evaluate_self_stitched`.
        """
        single = msgspec.structs.replace(job, cohort=CohortSettings())
        found = []
        for member in members:
            state = run_to_last_state(single, folder, [member], fedstitch.METHOD, self.engine)
            found.append(BaselineResult(member.device, self.compute_accuracy(fedstitch.result(state))))
        return found

    def compute_accuracy(self, artefact: Any) -> float:
        """Return the accuracy of a stitched network, with the forward pass of the agents."""
        network = stitched_network.from_artefact(artefact.meta, artefact.tensors)
        return self._score_accuracy(
            self._run_in_batches(
                self.test, lambda x: stitched_network.classify(network, self.stock.blocks, self._run_block, x)
            )
        )


def run_to_last_state(
    job: JobSettings, folder: Path, members: Iterable[DeviceData], method: Method, engine: Any
) -> Any:
    """Run a search on devices with unlimited memory until its end, and return the last method state.

    Raises:
        JobError: If the run has failed.
    """
    whole = msgspec.structs.replace(job, rounds=MOST_ROUNDS, fleet=ROOM)
    *_, last = iterate_states(whole, folder, members, load=lambda name: method, engine=engine)
    return last


def pool_examples(members: Sequence[DeviceData]) -> Examples:
    return Examples(
        np.concatenate([member.train.x for member in members]), np.concatenate([member.train.y for member in members])
    )


def make_path_method(path: Sequence[str]) -> Method:
    """Return FedStitch without a search: it solves the junctions of one path, then its head."""

    def force_path(state: SearchState) -> SearchState:
        while state.phase == "score":
            assert state.current is not None
            winner = Winner(path[len(state.current.path)], 1.0, 1.0, 1)
            state = replace(state, winners=(winner,))
            if steps.junction_winners(state):
                return replace(state, phase="fit")
            state = steps.grow_paths(state, {})
        return state

    def init(bundle: Bundle, params: SearchParams, seed: int) -> SearchState:
        start = ScoredPath(tuple(path[:1]), tuple(path[1:]), 1.0)
        alone = replace(params, join=False, completion=False)  # else the donors would be finished beside it
        return force_path(replace(fedstitch.init(bundle, alone, seed), frontier=(), current=start))

    return replace(fedstitch.METHOD, init=init, step=lambda state, total: force_path(fedstitch.step(state, total)))


def make_twin_path_method(donor: str, path: Sequence[str]) -> Method:
    """Return FedStitch without a search, along a path of `add_twin_donor`, for the original bundle."""
    led = make_path_method(path)
    return replace(led, init=lambda bundle, params, seed: led.init(add_twin_donor(bundle, donor)[0], params, seed))


def add_twin_donor(bundle: Bundle, donor: str) -> tuple[Bundle, list[str]]:
    """Return a bundle with one donor and an identical twin, and the path that alternates between them."""
    own, known, twin = bundle.meta["donors"][donor], bundle.meta["blocks"], f"{donor}'s twin"
    blocks = {name: known[name] for name in own["blocks"]}
    copies = {f"{twin}.{block['index']}": {**block, "donor": twin} for block in blocks.values()}
    donors = {donor: own, twin: {**own, "blocks": list(copies)}}
    path = [names[i % 2] for i, names in enumerate(zip(blocks, copies, strict=True))]
    return replace(bundle, meta={**bundle.meta, "donors": donors, "blocks": {**blocks, **copies}}), path
