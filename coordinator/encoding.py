"""Encoding of the bundles that all devices receive of a large state, before tasks are built."""

from __future__ import annotations

from typing import Any, NamedTuple

from fedquilt.blobs.store import Depot
from fedquilt.coordinator import mending, summing
from fedquilt.coordinator.facts import Committed
from fedquilt.core import BlobRef, DeviceView, Method, Tensors, task_key

Encoded = dict[int, tuple[Tensors, BlobRef]]  # bundles that are stored, by their identity


class Done(NamedTuple):
    """Result of a commit: event, stored state, and encoded bundles of the next round."""

    fact: Committed
    state: Any  # as it is stored
    encoded: Encoded  # bundles that all devices are sent next


def can_encode_early(method: Method, ref: BlobRef) -> bool:
    """Return whether a stored state is large and all devices receive the same bundles."""
    return ref.size > mending.WHOLE_BYTES and task_key(method.send) is not None


def encode_common_bundles(method: Method, state: Any, ref: BlobRef, depot: Depot) -> Encoded:
    """Store the bundles that all devices receive of a state.

    Return an empty mapping unless `can_encode_early`.
    """
    order = method.send(state, DeviceView("", None)) if can_encode_early(method, ref) else None
    made = [value for value in order.bundles.values() if not isinstance(value, BlobRef)] if order else []
    return {id(value): (value, summing.store_tensors(depot, value)) for value in made}
