"""Partition of a data set among devices: seeded, exact and equal on every machine.

Every device computes the same partition from the labels and takes its own share, so that shares are disjoint and cover
all rows without communication. Groups of classes or sources split rows and devices first, and each group is partitioned
by itself. Only uniform and gamma draws of PCG64 are used. A random order sorts uniform draws, without numpy's
shuffle.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from fedquilt.arrays import tensors
from fedquilt.core import DataError, derive_seed
from fedquilt.data.spec import DataSpec

MAX_DIRICHLET_DRAWS = 1000  # attempts at a Dirichlet partition with the minimum size
SHARDS_PER_DEVICE = 2  # for each device with partition = "shards" (McMahan et al. 2017, section 3)


def rows_of_shares(
    y: np.ndarray,
    spec: DataSpec,
    origin: np.ndarray | None = None,
    selected: Sequence[int] | None = None,
    owner: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Return the ascending rows of each selected share, or raise DataError for an impossible partition.

    With `partition = "all"`, all shares of a group are equal. Otherwise shares are disjoint and cover all rows.

    Args:
        y: Labels (n,).
        spec: Partition and number of shares.
        origin: Source of each row (n,), required only for groups of sources.
        selected: Selected shares, from 0, or None for all.
        owner: User of each row, (n,) strings, required only with `partition = "column"`.
    """
    if spec.partition == "column":
        return _group_rows(_assign_users(owner, spec), range(spec.shares) if selected is None else selected)
    owners: dict[str, Callable[[np.ndarray, DataSpec], np.ndarray]] = {
        "iid": _assign_iid,
        "dirichlet": _assign_dirichlet,
        "classes": _assign_classes,
        "shards": _assign_shards,
        "quantity": _assign_quantity,
    }
    selected = range(spec.shares) if selected is None else selected
    rows_by_share: dict[int, np.ndarray] = {}
    for number, (members, team) in enumerate(_split_groups(y, spec, origin)):
        team_shares = [share for share in selected if share in team]
        if not team_shares:
            continue
        if spec.partition == "all":
            rows_by_share |= dict.fromkeys(team_shares, members)
            continue
        seed = derive_seed("group", spec.seed, number) if spec.groups else spec.seed
        owner = owners[spec.partition](y[members], msgspec.structs.replace(spec, share=0, shares=len(team), seed=seed))
        rows = _group_rows(owner, [share - team.start for share in team_shares])
        rows_by_share |= {share: members[share_rows] for share, share_rows in zip(team_shares, rows, strict=True)}
    return [rows_by_share[share] for share in selected]


def _group_rows(owner: np.ndarray, shares: Sequence[int]) -> list[np.ndarray]:
    # One sort: a fleet may have many more shares than classes.
    sorted_rows = np.argsort(owner, kind="stable")
    starts, ends = (np.searchsorted(owner, shares, side, sorter=sorted_rows) for side in ("left", "right"))
    return [sorted_rows[start:end] for start, end in zip(starts, ends, strict=True)]


def split_held_out(y: np.ndarray, spec: DataSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of a share's training and held-out rows, each ascending.

    Of n rows, round(held * n) are held out, but at least one and at most n - 1, unless held is 0 or n is 1. Each
    class contributes its proportion, rounded by largest remainder.
    """
    held_out_count = round(spec.held * len(y))
    if spec.held > 0 and len(y) > 1:
        held_out_count = min(max(held_out_count, 1), len(y) - 1)
    rng = tensors.seeded_rng("held", spec.seed, spec.share)
    members = _shuffle_by_class(y, rng)
    exact_counts = np.array([held_out_count * len(rows) / max(1, len(y)) for rows in members])
    held_out_counts = np.floor(exact_counts).astype(int)
    largest = np.argsort(held_out_counts - exact_counts, kind="stable")[: held_out_count - int(held_out_counts.sum())]
    held_out_counts[largest] += 1
    is_held_out = np.zeros(len(y), bool)
    for member, count in zip(members, held_out_counts, strict=True):
        is_held_out[member[:count]] = True
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)


def sample_rows(count: int, limit: int, seed: int) -> np.ndarray:
    """Return `limit` random rows of `count`, ascending. A limit of 0, or of at least `count`, selects all."""
    if limit == 0 or limit >= count:
        return np.arange(count)
    return np.sort(_random_order(count, tensors.seeded_rng("limit", seed))[:limit])


def sample_rows_by_class(y: np.ndarray, rows_per_class: int, seed: int) -> np.ndarray:
    members = _shuffle_by_class(y, tensors.seeded_rng("per class", seed))
    return np.sort(np.concatenate([member[:rows_per_class] for member in members])) if members else np.arange(0)


def _split_groups(y: np.ndarray, spec: DataSpec, origin: np.ndarray | None) -> list[tuple[np.ndarray, range]]:
    if not spec.groups:
        return [(np.arange(len(y)), range(spec.shares))]
    if spec.groups == "source":
        number = np.zeros(len(y), int) if origin is None else origin
        count, noun = len(spec.sources), "sources"
    else:
        of_class = {kind: number for number, group in enumerate(spec.groups) for kind in group}
        count, noun = len(spec.groups), "groups"
        if missing := [int(kind) for kind in np.unique(y) if kind not in of_class]:
            raise DataError(
                f"{spec.source_name}: class {missing[0]} is in no group of [data] groups: add it to a group"
            )
        number = np.array([of_class[int(kind)] for kind in y], int)
    if count > spec.shares:
        raise DataError(
            f"{spec.source_name}: {count} {noun} are more than {spec.shares} shares: simulate at least {count} devices"
        )
    teams = np.array_split(np.arange(spec.shares), count)
    return [
        (np.flatnonzero(number == group), range(int(team[0]), int(team[-1]) + 1)) for group, team in enumerate(teams)
    ]


def _assign_users(owner: np.ndarray | None, spec: DataSpec) -> np.ndarray:
    if owner is None:
        raise DataError(
            f"{spec.source_name}: partition = 'column' requires a table, an .npz file or a folder with the user of "
            "each example: choose another partition"
        )
    users = np.unique(owner)
    if all(re.fullmatch(r"-?\d{1,18}", user) for user in users):
        users = users[np.argsort(users.astype(np.int64), kind="stable")]
    if len(users) < spec.shares:
        raise DataError(
            f"{spec.source_name}: column {spec.column!r} has {len(users)} users for {spec.shares} devices: simulate at "
            f"most {len(users)} devices (shares)"
        )
    device = {
        user: share for share, device_users in enumerate(np.array_split(users, spec.shares)) for user in device_users
    }
    return np.array([device[user] for user in owner], int)


def _assign_iid(y: np.ndarray, spec: DataSpec) -> np.ndarray:
    return _deal_evenly(_random_order(len(y), tensors.seeded_rng("iid", spec.seed)), range(spec.shares), len(y))


def _assign_dirichlet(y: np.ndarray, spec: DataSpec) -> np.ndarray:
    """Return the share of each row, by Dirichlet(alpha) shares of each class (Hsu et al. 2019)."""
    _require_enough_examples(len(y), spec)
    rng = tensors.seeded_rng("dirichlet", spec.seed)
    members = _shuffle_by_class(y, rng)
    owner, largest_min_size = np.zeros(len(y), int), 0
    for _ in range(MAX_DIRICHLET_DRAWS):
        for member in members:
            gammas = rng.standard_gamma(spec.alpha, spec.shares)
            total = float(gammas.sum())
            # A tiny alpha can draw only zeros. Then one device gets the class, as in the limit of alpha = 0.
            proportions = gammas / total if total > 0 else np.eye(spec.shares)[rng.integers(spec.shares)]
            ends = np.rint(np.cumsum(proportions)[:-1] * len(member)).astype(int)
            owner[member] = np.searchsorted(ends, np.arange(len(member)), side="right")
        min_size = int(np.bincount(owner, minlength=spec.shares).min())
        if min_size >= spec.min_size:
            return owner
        largest_min_size = max(largest_min_size, min_size)
    possible = f"set min_size = {largest_min_size}, " if largest_min_size else ""
    raise DataError(
        f"{spec.source_name}: none of {MAX_DIRICHLET_DRAWS} Dirichlet({spec.alpha}) partitions gives each of "
        f"{spec.shares} devices {spec.min_size} examples: {possible}raise alpha, or lower shares"
    )


def _assign_quantity(y: np.ndarray, spec: DataSpec) -> np.ndarray:
    """Return the share of each row. Sizes above `min_size` follow a power law, P(size > s) ~ s^-alpha."""
    _require_enough_examples(len(y), spec)
    rng = tensors.seeded_rng("quantity", spec.seed)
    logs = -np.log(1.0 - rng.random(spec.shares)) / spec.alpha
    weights = np.exp(logs - logs.max())  # the largest is 1, however small alpha is
    spare_rows, cumulative = len(y) - spec.shares * spec.min_size, np.cumsum(weights)
    ends = np.rint(cumulative / cumulative[-1] * spare_rows).astype(int) + spec.min_size * np.arange(1, spec.shares + 1)
    owner = np.zeros(len(y), int)
    owner[_random_order(len(y), rng)] = np.searchsorted(ends[:-1], np.arange(len(y)), side="right")
    return owner


def _require_enough_examples(count: int, spec: DataSpec) -> None:
    if spec.shares * spec.min_size > count:
        raise DataError(
            f"{spec.source_name}: {count} examples are too few for {spec.shares} shares of at least {spec.min_size}: "
            "simulate fewer devices"
        )


def _assign_classes(y: np.ndarray, spec: DataSpec) -> np.ndarray:
    """Return the share of each row. Each share has `classes` classes, and each class is split evenly."""
    rng = tensors.seeded_rng("classes", spec.seed)
    members = _shuffle_by_class(y, rng)
    if not len(members) / spec.shares <= spec.classes <= len(members):
        raise DataError(
            f"{spec.source_name}: {len(members)} classes cannot be assigned to {spec.shares} devices with "
            f"{spec.classes} each: set classes from {-(-len(members) // spec.shares)} to {len(members)}"
        )
    shares_by_class: list[list[int]] = [[] for _ in members]
    for share in range(spec.shares):
        # Classes with the fewest devices so far come first, in random order, so that every class is assigned.
        chosen_classes = np.lexsort(
            (rng.random(len(shares_by_class)), np.array([len(shares) for shares in shares_by_class]))
        )[: spec.classes]
        for class_ in chosen_classes:
            shares_by_class[class_].append(share)
    owner = np.zeros(len(y), int)
    for member, shares in zip(members, shares_by_class, strict=True):
        owner[member] = _deal_evenly(np.arange(len(member)), shares, len(member))
    return owner


def _assign_shards(y: np.ndarray, spec: DataSpec) -> np.ndarray:
    """Return the share of each row, from shards of rows sorted by class (McMahan et al. 2017, section 3)."""
    count = spec.shares * SHARDS_PER_DEVICE
    if count > len(y):
        raise DataError(
            f"{spec.source_name}: {spec.shares} devices need {count} shards of at least one example, but there are "
            f"{len(y)} examples: simulate at most {len(y) // SHARDS_PER_DEVICE} devices"
        )
    rng = tensors.seeded_rng("shards", spec.seed)
    sorted_rows = np.concatenate(_shuffle_by_class(y, rng))
    owner = np.zeros(len(y), int)
    for position, shard in zip(_random_order(count, rng), np.array_split(sorted_rows, count), strict=True):
        owner[shard] = position // SHARDS_PER_DEVICE
    return owner


def _deal_evenly(rows: np.ndarray, shares: range | list[int], count: int) -> np.ndarray:
    owner = np.zeros(count, int)
    for share, part in zip(shares, np.array_split(rows, len(shares)), strict=True):
        owner[part] = share
    return owner


def _shuffle_by_class(y: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    return [(class_rows := np.flatnonzero(y == kind))[_random_order(len(class_rows), rng)] for kind in np.unique(y)]


def _random_order(count: int, rng: np.random.Generator) -> np.ndarray:
    return np.argsort(rng.random(count), kind="stable")
