"""What devices are sent of a large state: stored by a worker, before the tasks are made that name it."""

from __future__ import annotations

from typing import Any, NamedTuple

from fedquilt.blobs.store import Depot
from fedquilt.coordinator import mending, summing
from fedquilt.coordinator.facts import Committed
from fedquilt.core import BlobRef, DeviceView, Method, Tensors, alike

Encoded = dict[int, tuple[Tensors, BlobRef]]  # bundles that are stored, by their identity


class Done(NamedTuple):
    """End of a round."""

    fact: Committed
    state: Any  # as it is stored
    encoded: Encoded  # bundles that all devices are sent next


def known(method: Method, ref: BlobRef) -> bool:
    """Whether it is known before devices are asked what all of them are sent of a stored state, which is large."""
    return ref.size > mending.WHOLE_BYTES and alike(method.send) is not None


def encoded(method: Method, state: Any, ref: BlobRef, depot: Depot) -> Encoded:
    """Store what all devices are sent of a state, stored as `ref`; what is small, or another for each, is left."""
    order = method.send(state, DeviceView("", None)) if known(method, ref) else None
    made = [value for value in order.bundles.values() if not isinstance(value, BlobRef)] if order else []
    return {id(value): (value, summing.stored(depot, value)) for value in made}
