"""Conversion of a method's order into a `Task`, with its cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from fedquilt import tensors
from fedquilt.core import Action, BlobRef, Order, Task, Tensors, Work


def make_task(
    order: Order, *, blob: Callable[[Tensors | BlobRef], BlobRef], actions: tuple[Action, ...], **named: Any
) -> Task:
    """Build the task message of an order.

    Args:
        order: of the method.
        blob: stores a bundle's tensors, or finds them; returns their reference.
        actions: "train", "check" or both.
        named: the other fields of `Task`.
    """
    return Task(
        actions=actions,
        params=dict(order.params),
        bundles={name: blob(value) for name, value in order.bundles.items()},
        work=order.work if "work" in actions else evaluation(order),
        **named,
    )


def evaluation(order: Order) -> Work:
    """Estimate evaluation cost as one forward pass, a third of a training epoch.

    No method predicts it; one whose evaluation adapts the model first (Per-FedAvg) takes more.
    """
    passes = 3 * max(1, int(order.params.get("epochs", 1)))
    return msgspec.structs.replace(
        order.work,
        flops=order.work.flops / passes,
        flops_per_example=order.work.flops_per_example / passes,
        read_bytes=order.work.read_bytes / 3,
    )


def blob_bytes(order: Order) -> int:
    """Total size of the blobs that a device needs for an order, whether it has them or not."""
    refs = {value for value in order.bundles.values() if isinstance(value, BlobRef)}
    made = [value for value in order.bundles.values() if not isinstance(value, BlobRef)]
    return sum(ref.size for ref in refs) + tensors.total_bytes(made)
