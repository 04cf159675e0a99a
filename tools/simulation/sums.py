"""Sums of what simulated devices send, folded where their orders are carried out: the coordinator merges a few of them.

They are made once the outcomes are on their way, while the coordinator examines these.

Only folds that add up are (`core.adds_up`): their sums have the same bits in any order and grouping. A sum counts only
if the round counts exactly the updates that are in it (`coordinator.folding`); otherwise they are folded one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

from fedquilt import methods, tensors
from fedquilt.core import Contribution, Method, required, summed
from fedquilt.edge_agent.task.protocol import Order, Outcome


class Sums:
    """Folds outcomes of one round after the other."""

    def __init__(self) -> None:
        self._state: tuple[str, Any] = ("", None)  # the last one, and its file
        self._waiting: tuple[Method, list[Contribution]] | None = None  # what the next sum is of

    def takes(self, file: str, orders: Sequence[Order], outcomes: Sequence[Outcome]) -> bool:
        """Whether `sum` gives the sum of those of these outcomes that are updates; not if one of them cannot be folded.

        Args:
            file: of the round's state; "": they are not to be folded.
            orders: of one round of a job.
            outcomes: of these orders, with the bytes of their bundles.
        """
        self._waiting = None
        with contextlib.suppress(Exception):  # whatever it is, the coordinator comes upon it and says what it is
            if not file:
                return False
            method = methods.load(orders[0].task.method)
            if self._state[0] != file:
                self._state = file, tensors.unpack(Path(file).read_bytes(), method.state)
            if summed(method.fold, self._state[1]) is None:
                return False
            done = zip(orders, outcomes, strict=True)
            given = [_given(order, outcome) for order, outcome in done if outcome.code == "ok"]
            for each in given:
                required(method.fold, self._state[1], each)
            self._waiting = (method, given) if given else None
        return self._waiting is not None

    def sum(self) -> bytes:
        """Packed sum of what was taken last; b"": it cannot be made."""
        waiting, self._waiting = self._waiting, None
        with contextlib.suppress(Exception):  # the coordinator folds these updates one by one then
            assert waiting is not None
            method, given = waiting
            return tensors.pack(reduce(partial(method.fold, self._state[1]), given, None))
        return b""


def _given(order: Order, outcome: Outcome) -> Contribution:
    bundles = {name: tensors.decode(outcome.blobs[ref.sha256]) for name, ref in outcome.bundles.items()}
    return Contribution(order.device, order.task.round, outcome.weight, outcome.metrics, bundles)
