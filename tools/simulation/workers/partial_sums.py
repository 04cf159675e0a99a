"""Partial sums of updates, folded by the workers so that the coordinator merges few sums.

Only updates with mergeable accumulators (`Aggregation.accumulator`) are summed, because their sums are bit-identical in
any order and grouping. A sum counts only if the round counts exactly its updates
(`coordinator.updates.partial_aggregate`). Otherwise the updates are folded one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.core import DeviceUpdate, Method
from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult


class OutcomeSums:
    def __init__(self) -> None:
        self._state: tuple[str, Any] = ("", None)  # the last one, and its file
        self._waiting: tuple[Method, list[DeviceUpdate]] | None = None  # what the next sum is of

    def prepare_sum(self, file: str, orders: Sequence[WorkRequest], outcomes: Sequence[WorkResult]) -> bool:
        """Validate updates for the next `pack_sum`. Return whether they can be summed.

        Args:
            file: File of the method state, or "" to disable folding.
            orders: Work requests of one round of a job.
            outcomes: Results of these requests, with the bytes of their bundles.
        """
        self._waiting = None
        with contextlib.suppress(Exception):  # the coordinator folds the same updates and reports the error
            if not file:
                return False
            method = methods.load(orders[0].task.method)
            if self._state[0] != file:
                self._state = file, tensors.unpack_state(Path(file).read_bytes(), method.state)
            if method.aggregation.accumulator(self._state[1]) is None:
                return False
            done = zip(orders, outcomes, strict=True)
            given = [_read_update(order, outcome) for order, outcome in done if outcome.code == "ok"]
            for each in given:
                method.aggregation.require_valid_update(self._state[1], each)
            self._waiting = (method, given) if given else None
        return self._waiting is not None

    def pack_sum(self) -> bytes:
        """Return the packed sum of the prepared updates, or b"" if they cannot be summed."""
        waiting, self._waiting = self._waiting, None
        with contextlib.suppress(Exception):  # the coordinator folds these updates one by one then
            assert waiting is not None
            method, given = waiting
            return tensors.pack_state(reduce(partial(method.aggregation.fold, self._state[1]), given, None))
        return b""


def _read_update(order: WorkRequest, outcome: WorkResult) -> DeviceUpdate:
    bundles = {name: tensors.decode_tensors(outcome.blobs[ref.sha256]) for name, ref in outcome.bundles.items()}
    return DeviceUpdate(order.device, order.task.round, outcome.weight, outcome.metrics, bundles)
