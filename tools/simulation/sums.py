"""Sums of what simulated devices send, folded where their orders are carried out: the coordinator merges a few of them.

Only folds that add up are (`core.adds_up`): their sums have the same bits in any order and grouping. A sum counts only
if the round counts exactly the updates that are in it (`coordinator.folding`); otherwise they are folded one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedquilt import methods, tensors
from fedquilt.core import Contribution, summed
from fedquilt.edge_agent.task.protocol import Order, Outcome


class Sums:
    """Folds outcomes of one round after the other."""

    def __init__(self) -> None:
        self._state: tuple[str, Any] = ("", None)  # the last one, and its file

    def __call__(self, file: str, orders: Sequence[Order], outcomes: Sequence[Outcome]) -> bytes:
        """Packed sum of all outcomes that are updates; b"": there is none, or one of them cannot be folded here.

        Args:
            file: of the round's state.
            orders: of one round of a job.
            outcomes: of these orders, with the bytes of their bundles.
        """
        total = None
        with contextlib.suppress(Exception):  # whatever it is, the coordinator comes upon it and says what it is
            method = methods.load(orders[0].task.method)
            if self._state[0] != file:
                self._state = file, tensors.unpack(Path(file).read_bytes(), method.state)
            if summed(method.fold, self._state[1]) is None:
                return b""
            for order, outcome in zip(orders, outcomes, strict=True):
                if outcome.code == "ok":
                    total = method.fold(self._state[1], total, _given(order, outcome))
            return b"" if total is None else tensors.pack(total)
        return b""


def _given(order: Order, outcome: Outcome) -> Contribution:
    bundles = {name: tensors.decode(outcome.blobs[ref.sha256]) for name, ref in outcome.bundles.items()}
    return Contribution(order.device, order.task.round, outcome.weight, outcome.metrics, bundles)
