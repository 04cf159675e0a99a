"""Robust aggregates, which a share of arbitrary updates can move only by a bounded amount.

Papers: Blanchard et al., NeurIPS 2017 (arXiv 1703.02757), section 4: Krum. Yin et al., ICML 2018 (arXiv 1803.01498),
Definitions 1 and 2: median and trimmed mean of every value. Sun et al., Can You Really Backdoor Federated Learning?
(arXiv 1911.07963), section 4: norm clipping, the first step of centred clipping (Karimireddy et al., ICML 2021,
arXiv 2012.10333) with the received model as the centre. Karimireddy et al., ICLR 2022 (arXiv 2006.09365), Algorithm 1:
bucketing.

All rules read the updates in blocks of BLOCK values, so that only one block is in memory besides the updates and the
result: 8 bytes for each value of each update, 17 MB with 32 updates, about three times as much during sorting.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Final

import numpy as np

from fedquilt.core import Tensors

BLOCK: Final = 1 << 16  # values of a tensor that are read from all updates at once


class UpdateRows:
    """Updates of a round, or means of groups of updates, read in blocks.

    Args:
        updates: Updates with the same names, shapes and types.
        groups: Indices of the updates of each row, or None if each update is a row.
    """

    def __init__(self, updates: Sequence[Tensors], groups: Sequence[Sequence[int]] | None = None) -> None:
        self.updates, self._groups = updates, groups

    def __len__(self) -> int:
        return len(self.updates if self._groups is None else self._groups)

    def empty_arrays(self, names: Collection[str]) -> dict[str, np.ndarray]:
        return {name: np.empty(self.updates[0][name].shape, self.updates[0][name].dtype) for name in names}

    def iterate_blocks(self, name: str) -> Iterator[tuple[slice, np.ndarray]]:
        flat = [np.reshape(update[name], -1) for update in self.updates]
        for start in range(0, flat[0].size, BLOCK):
            part = slice(start, start + BLOCK)
            block = np.stack([values[part] for values in flat]).astype(np.float64)
            if self._groups is not None:
                block = np.stack([block[list(group)].mean(axis=0) for group in self._groups])
            yield part, block


def trimmed_mean(rows: UpdateRows, names: Collection[str], cut: int) -> dict[str, np.ndarray]:
    """Return the mean of every value without the `cut` largest and `cut` smallest.

    The mean of integers is rounded down.

    Args:
        rows: More than 2 * cut rows.
        names: Tensors to return.
        cut: Values to leave out at either end.
    """
    found = rows.empty_arrays(names)
    for name, array in found.items():
        flat = array.reshape(-1)
        for part, block in rows.iterate_blocks(name):
            block.sort(axis=0)
            flat[part] = block[cut : len(block) - cut].mean(axis=0)
    return found


def median(rows: UpdateRows, names: Collection[str]) -> dict[str, np.ndarray]:
    return trimmed_mean(rows, names, (len(rows) - 1) // 2)


def mean_of_chosen_rows(rows: UpdateRows, names: Collection[str], chosen: Sequence[int]) -> dict[str, np.ndarray]:
    found = rows.empty_arrays(names)
    for name, array in found.items():
        flat = array.reshape(-1)
        for part, block in rows.iterate_blocks(name):
            flat[part] = block[list(chosen)].mean(axis=0)
    return found


def krum_scores(rows: UpdateRows, names: Collection[str], f: int) -> np.ndarray:
    """Return each row's sum of squared distances to its rows - f - 2 nearest neighbours, (rows,)."""
    count = len(rows)
    distances = np.zeros((count, count))
    for name in names:
        for _, block in rows.iterate_blocks(name):
            for i in range(1, count):
                distances[i, :i] += np.square(block[:i] - block[i]).sum(axis=1)
    near: np.ndarray = np.sort(distances + distances.T, axis=1)[:, 1 : count - f - 1]  # the first is to itself
    return near.sum(axis=1)


def difference_norms(rows: UpdateRows, names: Collection[str], centre: Tensors) -> np.ndarray:
    squares = np.zeros(len(rows))
    for name in names:
        middle = np.reshape(centre[name], -1)
        for part, block in rows.iterate_blocks(name):
            squares += np.square(block - middle[part]).sum(axis=1)
    return np.sqrt(squares)


def clipped_mean(
    rows: UpdateRows, names: Collection[str], centre: Tensors, lengths: np.ndarray, radius: float
) -> dict[str, np.ndarray]:
    """Return centre + the mean of the rows' differences, each clipped to the norm `radius`.

    Args:
        rows: Models.
        names: Tensors to return.
        centre: Model to subtract.
        lengths: Norms of the differences from `difference_norms`, (rows,).
        radius: Largest norm.
    """
    shares = np.minimum(1.0, radius / np.maximum(lengths, np.finfo(np.float64).tiny))[:, None]
    found = rows.empty_arrays(names)
    for name, array in found.items():
        flat, middle = array.reshape(-1), np.reshape(centre[name], -1)
        for part, block in rows.iterate_blocks(name):
            flat[part] = middle[part] + (shares * (block - middle[part])).mean(axis=0)
    return found


def draw_buckets(count: int, size: int, rng: np.random.Generator) -> list[list[int]]:
    order = rng.permutation(count).tolist()
    return [sorted(order[start : start + size]) for start in range(0, count, size)]


def tolerates_attackers(rule: str, count: int, f: int, size: int) -> bool:
    """Return whether a rule bounds the effect of f arbitrary updates among `count`, averaged in groups of `size`.

    Krum needs more than 2 f + 2 rows, all other rules more than 2 f.
    """
    return math.ceil(count / size) > 2 * f + (2 if rule in ("krum", "multi_krum") else 0)
