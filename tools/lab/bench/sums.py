"""Benchmark of exact sums against plain float64 sums.

Updates of the size of ResNet-50 are added up by `fedquilt.arrays.exact_sums`, and by numpy in float64 in place, which
is the least that a sum takes; then updates of the small network of `bench coordinator`. The same updates are added up
backwards and
in two groups: the bits have to be the same. Moments of frozen features, which a head is solved from, are added up
likewise, and by a product of all their factors, which is the least that their sum takes: what an update and a sum take,
and what a board costs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from fedquilt.arrays import exact_sums, tensors
from fedquilt.core import DeviceUpdate
from fedquilt.models.stitching.algebra import class_moments
from fedquilt.models.stitching.algebra.exact_moments import ExactMomentSums
from fedquilt.tools.report.thresholds import compare_at_most, format_figures

ENTRIES: Final = 24_000_000  # 96 MB in float32
SMALL: Final = ((64, 16), (16,), (16, 10), (10,))  # shapes of the small network's tensors
UPDATES: Final = 4
MOMENTS: Final = (
    (80, 5440, False),
    (64, 1280, False),
    (600, 1280, True),
)  # examples, features, whether they go in float64
LABELS: Final = 10
MOST_BYTES: Final = 16.0  # an entry: twice a float64


def measure(
    entries: int = ENTRIES, updates: int = UPDATES, moments: Sequence[tuple[int, int, bool]] = MOMENTS
) -> dict[str, Any]:
    exact_s, total = _measure_seconds(_exact, entries, range(updates))
    plain_s, _ = _measure_seconds(_plain, entries, range(updates))
    backwards = _measure_seconds(_exact, entries, range(updates)[::-1])[1].rounded_value()
    half = updates // 2
    groups = [_measure_seconds(_exact, entries, some)[1] for some in (range(half), range(half, updates))]
    whole = total.rounded_value()
    same = whole.tobytes() == backwards.tobytes() == exact_sums.merge_sums(*groups).rounded_value().tobytes()
    return {
        "entries": entries,
        "exact_ns": 1e9 * exact_s / entries,
        "plain_ns": 1e9 * plain_s / entries,
        "small_us": {"exact": _measure_small_us(_exact), "plain": _measure_small_us(_plain)},
        "moments": [_measure_moments(*each) for each in moments],
        "figures": {
            "bytes_an_entry": compare_at_most(sum(limb.nbytes for limb in total.limbs) / entries, MOST_BYTES, "bytes"),
            "orders_and_groups_with_other_bits": compare_at_most(float(not same), 0.0, ""),
        },
    }


def lines(result: dict[str, Any]) -> list[str]:
    small = result["small_us"]
    return [
        f"an update of {4e-6 * result['entries']:.0f} MB: {result['exact_ns']:.1f} ns an entry, "
        f"in plain float64 {result['plain_ns']:.1f} ns",
        f"an update of four small tensors: {small['exact']:.0f} us, in plain float64 {small['plain']:.0f} us",
        *(
            f"moments of {each['examples']} examples of {each['features']} features: {each['update_mb']:.2f} MB, "
            f"summed {each['sum_mb']:.2f}; {each['added_ms']:.1f} ms, by a product {each['merged_ms']:.1f}"
            for each in result["moments"]
        ),
        *format_figures(result),
    ]


def _measure_moments(examples: int, features: int, exactly: bool) -> dict[str, float]:
    roll, updates = np.random.default_rng(0), []
    for board in range(-(-features // examples) + 1):  # so many are merged at once
        z = np.maximum(roll.normal(size=(examples, features)), 0).astype(np.float32)
        part = class_moments.device_moments(z, roll.integers(0, LABELS, examples), LABELS)
        given = {"moments": class_moments.to_tensors(part, exactly)}
        updates.append(DeviceUpdate(f"board-{board}", 0, float(examples), {}, given))
    begun = time.process_time()
    total = functools.reduce(ExactMomentSums.add_update, updates, ExactMomentSums())
    total.total_sums()
    between = time.process_time()
    class_moments.merge_moments([], [class_moments.unpack_tensors(update.bundles["moments"]) for update in updates])
    ended = time.process_time()
    limbs = [limb for each in total.sum_parts().sums.values() for limb in each.limbs]
    return {
        "examples": examples,
        "features": features,
        "update_mb": len(tensors.encode_tensors(updates[0].bundles["moments"])) / 1e6,
        "sum_mb": sum(limb.nbytes for limb in limbs) / 1e6,
        "added_ms": 1e3 * (between - begun) / len(updates),
        "merged_ms": 1e3 * (ended - between) / len(updates),
    }


def _measure_seconds(add: Callable[[Any, np.ndarray, float], Any], entries: int, updates: range) -> tuple[float, Any]:
    took: list[float] = []
    total = None
    for weight, update in _updates(entries, updates):
        begun = time.process_time()
        total = add(total, update, weight)
        took.append(time.process_time() - begun)
    return min(took[1:], default=took[0]), total


def _updates(entries: int, which: range) -> Iterator[tuple[float, np.ndarray]]:
    base = np.random.default_rng(0).normal(size=entries).astype(np.float32)
    for k in which:  # as models differ: by a small part of each value, and of some values by all
        yield 20.0 + 13 * k, np.roll(base, k * k) * np.float32(0.05)


def _exact(total: exact_sums.ExactSum | None, update: np.ndarray, weight: float) -> exact_sums.ExactSum:
    return exact_sums.add_to_sum(total, update, weight)


def _plain(total: np.ndarray | None, update: np.ndarray, weight: float) -> np.ndarray:
    if total is None:
        return update.astype(np.float64) * weight
    total += update.astype(np.float64) * weight
    return total


def _measure_small_us(add: Callable[[Any, np.ndarray, float], Any]) -> float:
    update = [np.full(shape, 0.1, np.float32) for shape in SMALL]
    once = functools.partial(_all, add, update)
    totals = once([None] * len(update))
    best = []
    for _ in range(5):
        begun = time.process_time()
        for _ in range(400):
            totals = once(totals)
        best.append((time.process_time() - begun) / 400)
    return 1e6 * min(best)


def _all(add: Callable[[Any, np.ndarray, float], Any], update: list[np.ndarray], totals: list[Any]) -> list[Any]:
    return [add(total, array, 37.0) for total, array in zip(totals, update, strict=True)]
