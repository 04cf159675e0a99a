"""What must stand beside every accuracy of a stitched network: its donors, and one device alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt.core import Bundle, Examples, Runner
from fedquilt.methods import fedstitch
from fedquilt.models import images, projection, stitch
from fedquilt.models.search import Params
from fedquilt.models.stitch import Block
from fedquilt.tools.local_run import Member, search_alone

BATCH = 64


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
        self.stock = stitch.stock(bundle.meta)

    def _run(self, block: Block, x: np.ndarray) -> np.ndarray:
        return stitch.run_block(block, lambda graph, x: self.engine.run(self.path(graph), x), x)

    def _plain(self, path: list[Block], x: np.ndarray) -> np.ndarray:
        """The output of a donor's own blocks."""
        return stitch.forward(path, [None] * len(path), self._run, x)

    def _batched(self, examples: Examples, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        starts = range(0, len(examples), BATCH)
        return np.concatenate([function(images.prepare(examples.x[s : s + BATCH], self.stock.input)) for s in starts])

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
            found.append(Result(name, self._accuracy(stitch.align(logits, donor.align))))
        return found

    def heads(self, ridge: float) -> list[Result]:
        """Each donor's body with a new closed-form head: what the devices' sums would give, exactly."""
        found = []
        for name, donor in self.stock.donors.items():
            path = [self.stock.blocks[block] for block in donor.blocks[:-1]]

            def features(x: np.ndarray, path: list[Block] = path) -> np.ndarray:
                return stitch.gap(self._plain(path, x))

            labels = np.eye(len(self.stock.labels))[self.train.y]
            sums = projection.moments(self._batched(self.train, features), labels)
            weights, bias = projection.solve(sums, ridge)
            found.append(Result(name, self._accuracy(self._batched(self.test, features) @ weights.T + bias)))
        return found

    def alone(self, members: Sequence[Member], params: Params, seed: int) -> list[Result]:
        """What each of some devices stitches from its own examples only."""
        found = []
        for member in members:
            state = search_alone(fedstitch.METHOD, self.bundle, self.path, self.engine, [member], params, seed=seed)
            found.append(Result(member.device, self.accuracy_of(fedstitch.result(state))))
        return found

    def accuracy_of(self, artefact: Any) -> float:
        """A stitched network's accuracy, by the agents' own forward pass."""
        meta, tensors = artefact.meta, artefact.tensors
        path = [self.stock.blocks[block] for block in meta["path"]]
        between: list[Any] = [None] * len(path)
        for junction in meta["junctions"]:
            if junction["kind"] == "projection":
                parts = {part: tensors[junction[part]] for part in ("weights", "bias")}
                between[junction["before"]] = parts
        head = {part: tensors[meta["head"][part]] for part in ("weights", "bias")} if meta["head"] else None
        return self._accuracy(
            self._batched(
                self.test, lambda x: stitch.classify(path, between, self._run, x, head=head, groups=meta["align"])
            )
        )
