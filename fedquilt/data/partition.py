"""Shares of a data set for simulated fleets, from its labels alone: exact, seeded, the same on every machine.

Every device computes the same partition and takes its own share, so shares are disjoint and cover
everything without communication. With groups, of classes or of sources, rows and devices
are first split among these, and each group is a partition of its own. Only uniform and gamma draws
of PCG64 are used, and orders come from sorting uniform draws: they do not depend on how numpy shuffles.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from fedquilt import tensors
from fedquilt.core import DataError, derive_seed
from fedquilt.data.spec import DataSpec

DRAWS = 1000  # attempts at a Dirichlet partition before its minimum size counts as out of reach


def rows(y: np.ndarray, spec: DataSpec, origin: np.ndarray | None = None) -> np.ndarray:
    """Rows of share `spec.share`, ascending. `y` and `origin` as in `shares`.

    Raises:
        DataError: no partition of these labels satisfies the spec.
    """
    return shares(y, spec, origin, [spec.share])[0]


def shares(
    y: np.ndarray,
    spec: DataSpec,
    origin: np.ndarray | None = None,
    wanted: Sequence[int] | None = None,
    owner: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Rows of each wanted share, or of every share, ascending.

    With `partition = "all"` they are the same for all, or for all of a group; else disjoint, and all rows together.


    Args:
        y: labels, (n,).
        spec: partition and number of shares.
        origin: source of each row, (n,); needed only for groups of sources.
        wanted: shares, from 0; None: every share.
        owner: user of each row, (n,) words; needed only with `partition = "column"`.

    Raises:
        DataError: no partition of these labels satisfies the spec.
    """
    if spec.partition == "column":
        return _rows(_by_owner(owner, spec), range(spec.shares) if wanted is None else wanted)
    owners: dict[str, Callable[[np.ndarray, DataSpec], np.ndarray]] = {
        "iid": _iid,
        "dirichlet": _dirichlet,
        "classes": _classes,
        "shards": _shards,
    }
    wanted = range(spec.shares) if wanted is None else wanted
    found: dict[int, np.ndarray] = {}
    for number, (members, team) in enumerate(_groups(y, spec, origin)):
        mine = [share for share in wanted if share in team]
        if not mine:
            continue
        if spec.partition == "all":
            found |= dict.fromkeys(mine, members)
            continue
        seed = derive_seed("group", spec.seed, number) if spec.groups else spec.seed
        owner = owners[spec.partition](y[members], msgspec.structs.replace(spec, share=0, shares=len(team), seed=seed))
        rows = _rows(owner, [share - team.start for share in mine])
        found |= {share: members[own] for share, own in zip(mine, rows, strict=True)}
    return [found[share] for share in wanted]


def _rows(owner: np.ndarray, wanted: Sequence[int]) -> list[np.ndarray]:
    """Rows of each wanted share, ascending: in one sort, as a fleet may have many more shares than classes."""
    order = np.argsort(owner, kind="stable")
    first, last = (np.searchsorted(owner, wanted, side, sorter=order) for side in ("left", "right"))
    return [order[start:end] for start, end in zip(first, last, strict=True)]


def hold_out(y: np.ndarray, spec: DataSpec) -> tuple[np.ndarray, np.ndarray]:
    """Split the device's own rows in two parts, each ascending: for training, and held out.

    round(held * n) are held out, at least one of two or more; each class gives its share, rounded by
    largest remainder, and its rows are drawn.
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
    """Draw `limit` of `count` rows, ascending; all of them if limit is 0 or not less."""
    if limit == 0 or limit >= count:
        return np.arange(count)
    return np.sort(_order(count, tensors.rng("limit", seed))[:limit])


def sample_each(y: np.ndarray, each: int, seed: int) -> np.ndarray:
    """Draw `each` rows of every class, ascending; all rows of a class that has no more."""
    members = _by_class(y, tensors.rng("per class", seed))
    return np.sort(np.concatenate([member[:each] for member in members])) if members else np.arange(0)


# -- groups ---------------------------------------------------------------------------------------


def _groups(y: np.ndarray, spec: DataSpec, origin: np.ndarray | None) -> list[tuple[np.ndarray, range]]:
    """Rows of each group, ascending, and its devices."""
    if not spec.groups:
        return [(np.arange(len(y)), range(spec.shares))]
    if spec.groups == "source":
        number = np.zeros(len(y), int) if origin is None else origin
        count, what = len(spec.sources), "sources"
    else:
        of_class = {kind: number for number, group in enumerate(spec.groups) for kind in group}
        count, what = len(spec.groups), "groups"
        if missing := [int(kind) for kind in np.unique(y) if kind not in of_class]:
            raise DataError(f"{spec.where}: class {missing[0]} is in none of [data] groups: list it in one of them")
        number = np.array([of_class[int(kind)] for kind in y], int)
    if count > spec.shares:
        raise DataError(f"{spec.where}: {count} {what} among {spec.shares} shares: have a device or more for each")
    teams = np.array_split(np.arange(spec.shares), count)
    return [
        (np.flatnonzero(number == group), range(int(team[0]), int(team[-1]) + 1)) for group, team in enumerate(teams)
    ]


# -- who owns which row, each (n,) ----------------------------------------------------------------


def _by_owner(owner: np.ndarray | None, spec: DataSpec) -> np.ndarray:
    """Cut the users in order into one run per device, as even in users as possible.

    Numbers are sorted by size, words alphabetically. With as many users as devices, device i has user i.
    """
    if owner is None:
        raise DataError(
            f"{spec.where}: partition = 'column' is for tables and .npz files, which say whose examples are"
        )
    users = np.unique(owner)
    if all(re.fullmatch(r"-?\d{1,18}", user) for user in users):
        users = users[np.argsort(users.astype(np.int64), kind="stable")]
    if len(users) < spec.shares:
        raise DataError(
            f"{spec.where}: column {spec.column!r} names {len(users)} users, and there are {spec.shares} devices: "
            "have fewer devices (shares), as each has one user or more"
        )
    device = {user: share for share, some in enumerate(np.array_split(users, spec.shares)) for user in some}
    return np.array([device[user] for user in owner], int)


def _iid(y: np.ndarray, spec: DataSpec) -> np.ndarray:
    """Deal rows out: sizes differ by at most one."""
    return _dealt(_order(len(y), tensors.rng("iid", spec.seed)), range(spec.shares), len(y))


def _dirichlet(y: np.ndarray, spec: DataSpec) -> np.ndarray:
    """Split each class in proportions drawn from Dirichlet(alpha) (Hsu et al. 2019, arXiv 1909.06335)."""
    if spec.shares * spec.min_size > len(y):
        raise DataError(f"{spec.where}: {spec.shares} shares of at least {spec.min_size} of only {len(y)} examples")
    rng = tensors.rng("dirichlet", spec.seed)
    members = _by_class(y, rng)
    owner = np.zeros(len(y), int)
    for _ in range(DRAWS):
        for member in members:
            drawn = rng.standard_gamma(spec.alpha, spec.shares)
            total = float(drawn.sum())
            # a tiny alpha can draw nothing but zeros: then one device has the class, as alpha towards 0 has it
            proportions = drawn / total if total > 0 else np.eye(spec.shares)[rng.integers(spec.shares)]
            ends = np.rint(np.cumsum(proportions)[:-1] * len(member)).astype(int)
            owner[member] = np.searchsorted(ends, np.arange(len(member)), side="right")
        if np.bincount(owner, minlength=spec.shares).min() >= spec.min_size:
            return owner
    raise DataError(
        f"{spec.where}: none of {DRAWS} Dirichlet({spec.alpha}) partitions gives each of {spec.shares} devices "
        f"{spec.min_size} examples: raise alpha, or lower shares or min_size"
    )


def _classes(y: np.ndarray, spec: DataSpec) -> np.ndarray:
    """Give each device the same number of classes, every class to some device, dealt out among its devices."""
    rng = tensors.rng("classes", spec.seed)
    members = _by_class(y, rng)
    if not len(members) / spec.shares <= spec.classes <= len(members):
        raise DataError(
            f"{spec.where}: {len(members)} classes cannot go to {spec.shares} devices with {spec.classes} classes "
            f"each: set classes from {-(-len(members) // spec.shares)} to {len(members)}"
        )
    having: list[list[int]] = [[] for _ in members]
    for share in range(spec.shares):
        # the classes with fewest devices so far, ties by lot: all differ, and in the end none is left out
        taken = np.lexsort((rng.random(len(having)), np.array([len(shares) for shares in having])))[: spec.classes]
        for kind in taken:
            having[kind].append(share)
    owner = np.zeros(len(y), int)
    for member, shares in zip(members, having, strict=True):
        owner[member] = _dealt(np.arange(len(member)), shares, len(member))
    return owner


def _shards(y: np.ndarray, spec: DataSpec) -> np.ndarray:
    """Sort by class, cut into equal pieces, and give each device its number by lot (McMahan et al. 2017, section 3)."""
    count = spec.shares * spec.shards
    if count > len(y):
        raise DataError(
            f"{spec.where}: {spec.shares} devices with {spec.shards} shards each are {count} shards, of only {len(y)} "
            "examples: lower shards or shares"
        )
    rng = tensors.rng("shards", spec.seed)
    in_order = np.concatenate(_by_class(y, rng))
    owner = np.zeros(len(y), int)
    for place, shard in zip(_order(count, rng), np.array_split(in_order, count), strict=True):
        owner[shard] = place // spec.shards
    return owner


def _dealt(order: np.ndarray, shares: range | list[int], count: int) -> np.ndarray:
    """Owner of each of `count` rows, when rows in this order are dealt out as evenly as possible."""
    owner = np.zeros(count, int)
    for share, part in zip(shares, np.array_split(order, len(shares)), strict=True):
        owner[part] = share
    return owner


def _by_class(y: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Rows of each class that occurs, ascending by class, each in a random order."""
    return [(found := np.flatnonzero(y == kind))[_order(len(found), rng)] for kind in np.unique(y)]


def _order(count: int, rng: np.random.Generator) -> np.ndarray:
    return np.argsort(rng.random(count), kind="stable")
