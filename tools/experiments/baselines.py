"""What must stand beside every accuracy of a stitched network: its donors, and one device alone.

A donor is there unmodified, with a new head, and stitched to itself. The last two can be played by the
method's own halves along a path that is given: nothing is searched, and who is asked, what is sent and
what is solved from it are as in a search.
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
from fedquilt.coordinator.settings import Cohort, Job
from fedquilt.core import Bundle, Examples, Method, Runner
from fedquilt.data import inputs
from fedquilt.methods import fedstitch
from fedquilt.models.stitching import class_moments, joint_head, search, stitched
from fedquilt.models.stitching.search_state import Net, Params, State
from fedquilt.models.stitching.stitched import Block
from fedquilt.models.stitching.vote import Winner
from fedquilt.tools.simulation import Member
from fedquilt.tools.simulation.run import states
from fedquilt.tools.simulation.simulated_job import ROOM

BATCH = 64
MOST_ROUNDS = 1000  # of a search that is compared with: all end before by themselves


@dataclass(frozen=True)
class Result:
    """One network's accuracy on examples that nobody fitted anything to; 0 to 1."""

    name: str
    accuracy: float
    note: str = ""


class Bench:
    """Donors, an engine and the two sets of examples: all that a baseline needs."""

    def __init__(
        self, bundle: Bundle, path: Callable[[str], Path], engine: Runner, train: Examples, test: Examples
    ) -> None:
        """`train`: the devices' own examples, pooled; `test`: examples of no device."""
        self.bundle, self.path, self.engine = bundle, path, engine
        self.train, self.test = train, test
        self.stock = stitched.stock(bundle.meta)

    def _run(self, block: Block, x: np.ndarray) -> np.ndarray:
        return stitched.run_block(block, lambda graph, x: self.engine.run(self.path(graph), x), x)

    def _plain(self, path: list[Block], x: np.ndarray) -> np.ndarray:
        """The output of a donor's own blocks."""
        return stitched.forward(path, [None] * len(path), self._run, x)

    def _batched(self, examples: Examples, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        starts = range(0, len(examples), BATCH)
        return np.concatenate([function(inputs.prepare(examples.x[s : s + BATCH], self.stock.input)) for s in starts])

    def _accuracy(self, scores: np.ndarray) -> float:
        return float((scores.argmax(axis=1) == self.test.y).mean())

    def unmodified(self) -> list[Result]:
        """Each donor as it is, its classes read as our labels."""
        found = []
        for name, donor in self.stock.donors.items():
            if donor.align is None:
                continue
            path = [self.stock.blocks[block] for block in donor.blocks]

            def logits_of(x: np.ndarray, path: list[Block] = path) -> np.ndarray:
                return self._plain(path, x)

            logits = self._batched(self.test, logits_of)
            found.append(Result(name, self._accuracy(stitched.align(logits, donor.align))))
        return found

    def heads(self) -> list[Result]:
        """Each donor's body with a new head, solved as FedStitch solves them from the sums of all devices."""
        found = []
        for name, donor in self.stock.donors.items():
            path = [self.stock.blocks[block] for block in donor.blocks[:-1]]

            def features(x: np.ndarray, path: list[Block] = path) -> np.ndarray:
                return stitched.gap(self._plain(path, x))

            own = class_moments.part(self._batched(self.train, features), self.train.y, len(self.stock.labels))
            given = joint_head.standardised(class_moments.merge([], [own]))
            head = joint_head.discriminant(given, joint_head.strength(given).ridge)
            found.append(Result(name, self._accuracy(self._batched(self.test, features) @ head.weights.T + head.bias)))
        return found

    def stitched_to_themselves(self, job: Job, folder: Path, members: Sequence[Member]) -> list[Result]:
        """Each donor's blocks in order with a junction at every boundary, as if the next block were a stranger's.

        What accuracy the junctions cost where there is nothing to be gained.

        Args:
            job: a search, of which parameters, seed and cohorts count; no device is short of memory.
            folder: the job's bundle.
            members: devices with their examples.

        Raises:
            JobError: a run has failed; says why. So does the method below.
        """
        found = []
        for name in self.stock.donors:
            both, path = mirrored(self.bundle, name)
            bench = Bench(both, self.path, self.engine, self.train, self.test)
            led = self._along(beside_itself(name, path), path, job, folder, members)
            found.append(Result(name, bench.accuracy_of(led)))
        return found

    def _along(self, led: Method, path: Sequence[str], job: Job, folder: Path, members: Sequence[Member]) -> Any:
        """The artefact of a search that a method leads along a path."""
        params = replace(settings.params(job), mode="default", head="ridge", depth=len(path) + 1)
        params = replace(params, max_upsampling=sys.float_info.max)
        params = replace(params, native_continuation="allow", residual="report", stop_below=0.0)
        wanted = msgspec.structs.replace(job, params=asdict(params))
        return fedstitch.result(last_of(wanted, folder, members, led, self.engine))

    def alone(self, job: Job, folder: Path, members: Iterable[Member]) -> list[Result]:
        """Networks that some devices stitch from their own examples only; arguments as of `stitched_to_themselves`."""
        single = msgspec.structs.replace(job, cohort=Cohort())
        found = []
        for member in members:
            state = last_of(single, folder, [member], fedstitch.METHOD, self.engine)
            found.append(Result(member.device, self.accuracy_of(fedstitch.result(state))))
        return found

    def accuracy_of(self, artefact: Any) -> float:
        """A stitched network's accuracy, by the agents' own forward pass."""
        network = stitched.from_artefact(artefact.meta, artefact.tensors)
        return self._accuracy(
            self._batched(self.test, lambda x: stitched.classify(network, self.stock.blocks, self._run, x))
        )


def last_of(job: Job, folder: Path, members: Iterable[Member], method: Method, engine: Any) -> Any:
    """The last state of a search that goes on until it is over, on devices with room for everything.

    Raises:
        JobError: the run has failed; says why.
    """
    whole = msgspec.structs.replace(job, rounds=MOST_ROUNDS, fleet=ROOM)
    *_, last = states(whole, folder, members, load=lambda name: method, engine=engine)
    return last


def pooled(members: Sequence[Member]) -> Examples:
    """Training examples of all devices together."""
    return Examples(
        np.concatenate([member.train.x for member in members]), np.concatenate([member.train.y for member in members])
    )


def along(path: Sequence[str]) -> Method:
    """FedStitch without a search: the junctions of one path are solved block by block, then its head alone."""

    def forced(state: State) -> State:
        while state.phase == "score":
            assert state.current is not None
            winner = Winner(path[len(state.current.path)], 1.0, 1.0, 1)
            state = replace(state, winners=(winner,))
            if search.projected(state):
                return replace(state, phase="fit")
            state = search.grow(state, {})
        return state

    def init(bundle: Bundle, params: Params, seed: int) -> State:
        start = Net(tuple(path[:1]), tuple(path[1:]), 1.0)
        alone = replace(params, join=False, completion=False)  # else the donors would be finished beside it
        return forced(replace(fedstitch.init(bundle, alone, seed), frontier=(), current=start))

    return replace(fedstitch.METHOD, init=init, step=lambda state, total: forced(fedstitch.step(state, total)))


def beside_itself(donor: str, path: Sequence[str]) -> Method:
    """FedStitch without a search along a path of `mirrored`, on the bundle of which that is made."""
    led = along(path)
    return replace(led, init=lambda bundle, params, seed: led.init(mirrored(bundle, donor)[0], params, seed))


def mirrored(bundle: Bundle, donor: str) -> tuple[Bundle, list[str]]:
    """A bundle of one of its donors and a twin of it, whose blocks are the same files; a path that alternates."""
    own, known, twin = bundle.meta["donors"][donor], bundle.meta["blocks"], f"{donor}'s twin"
    blocks = {name: known[name] for name in own["blocks"]}
    copies = {f"{twin}.{block['index']}": {**block, "donor": twin} for block in blocks.values()}
    donors = {donor: own, twin: {**own, "blocks": list(copies)}}
    path = [names[i % 2] for i, names in enumerate(zip(blocks, copies, strict=True))]
    return replace(bundle, meta={**bundle.meta, "donors": donors, "blocks": {**blocks, **copies}}), path
