"""Shares of a data set for simulated fleets, from its labels alone: exact, seeded, the same on every machine.

Every device works out the same partition and takes its own share, so shares are disjoint and cover
everything without a word between devices. Only uniform and gamma draws of PCG64 are used, and orders
come from sorting uniform draws: they do not depend on how numpy shuffles.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedquilt import tensors
from fedquilt.core import DataError
from fedquilt.edge_agent.data import DataSpec

DRAWS = 1000  # of a Dirichlet partition, before its minimum size is called out of reach


def rows(y: np.ndarray, spec: DataSpec) -> np.ndarray:
    """The rows of share `spec.share`, ascending. `y` is (n,).

    Raises:
        DataError: no partition of these labels is as the spec wants it.
    """
    owners: dict[str, Callable[[np.ndarray, DataSpec], np.ndarray]] = {
        "iid": _iid,
        "dirichlet": _dirichlet,
        "classes": _classes,
    }
    if spec.partition == "all":
        return np.arange(len(y))
    return np.flatnonzero(owners[spec.partition](y, spec) == spec.share)


def hold_out(y: np.ndarray, spec: DataSpec) -> tuple[np.ndarray, np.ndarray]:
    """The device's own rows in two parts, each ascending: to train on, and held out.

    round(held * n) are held out, at least one where there are two; each class gives its due, rounded by
    largest remainder, and what the class gives is drawn.
    """
    wanted = round(spec.held * len(y))
    if spec.held > 0 and len(y) > 1:
        wanted = min(max(wanted, 1), len(y) - 1)
    rng = tensors.rng("held", spec.seed, spec.share)
    members = _by_class(y, rng)
    due = np.array([wanted * len(rows) / max(1, len(y)) for rows in members])
    given = np.floor(due).astype(int)
    largest = np.argsort(given - due, kind="stable")[: wanted - int(given.sum())]
    given[largest] += 1
    held = np.zeros(len(y), bool)
    for member, count in zip(members, given, strict=True):
        held[member[:count]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def sample(count: int, limit: int, seed: int) -> np.ndarray:
    """`limit` of `count` rows, ascending; all of them where limit is 0 or not less."""
    if limit == 0 or limit >= count:
        return np.arange(count)
    return np.sort(_order(count, tensors.rng("limit", seed))[:limit])


# -- who owns which row, each (n,) ----------------------------------------------------------------


def _iid(y: np.ndarray, spec: DataSpec) -> np.ndarray:
    """Dealt out: sizes differ by at most one."""
    return _dealt(_order(len(y), tensors.rng("iid", spec.seed)), range(spec.shares), len(y))


def _dirichlet(y: np.ndarray, spec: DataSpec) -> np.ndarray:
    """Each class is split in proportions drawn from Dirichlet(alpha) (Hsu et al. 2019, arXiv 1909.06335)."""
    if spec.shares * spec.min_size > len(y):
        raise DataError(f"{spec.path}: {spec.shares} shares of at least {spec.min_size} of only {len(y)} examples")
    rng = tensors.rng("dirichlet", spec.seed)
    members = _by_class(y, rng)
    owner = np.zeros(len(y), int)
    for _ in range(DRAWS):
        for member in members:
            drawn = rng.standard_gamma(spec.alpha, spec.shares)
            total = float(drawn.sum())
            # a tiny alpha can draw nothing but zeros: then the class is split evenly
            proportions = drawn / total if total > 0 else np.full(spec.shares, 1 / spec.shares)
            ends = np.rint(np.cumsum(proportions)[:-1] * len(member)).astype(int)
            owner[member] = np.searchsorted(ends, np.arange(len(member)), side="right")
        if np.bincount(owner, minlength=spec.shares).min() >= spec.min_size:
            return owner
    raise DataError(
        f"{spec.path}: none of {DRAWS} Dirichlet({spec.alpha}) partitions gives each of {spec.shares} devices "
        f"{spec.min_size} examples: raise alpha, or lower shares or min_size"
    )


def _classes(y: np.ndarray, spec: DataSpec) -> np.ndarray:
    """So many classes each, every class with somebody, each dealt out among those who have it."""
    rng = tensors.rng("classes", spec.seed)
    members = _by_class(y, rng)
    if not len(members) / spec.shares <= spec.classes <= len(members):
        raise DataError(
            f"{spec.path}: {len(members)} classes cannot go to {spec.shares} devices with {spec.classes} classes each: "
            f"set classes from {-(-len(members) // spec.shares)} to {len(members)}"
        )
    having: list[list[int]] = [[] for _ in members]
    for share in range(spec.shares):
        # those that fewest have so far, ties by lot: all differ, and in the end none is left out
        taken = np.lexsort((rng.random(len(having)), np.array([len(shares) for shares in having])))[: spec.classes]
        for kind in taken:
            having[kind].append(share)
    owner = np.zeros(len(y), int)
    for member, shares in zip(members, having, strict=True):
        owner[member] = _dealt(np.arange(len(member)), shares, len(member))
    return owner


def _dealt(order: np.ndarray, shares: range | list[int], count: int) -> np.ndarray:
    """Owner of each of `count` rows, when rows in this order are dealt out as evenly as can be."""
    owner = np.zeros(count, int)
    for share, part in zip(shares, np.array_split(order, len(shares)), strict=True):
        owner[part] = share
    return owner


def _by_class(y: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """The rows of each class that occurs, ascending by class, each in a random order."""
    return [(found := np.flatnonzero(y == kind))[_order(len(found), rng)] for kind in np.unique(y)]


def _order(count: int, rng: np.random.Generator) -> np.ndarray:
    return np.argsort(rng.random(count), kind="stable")
