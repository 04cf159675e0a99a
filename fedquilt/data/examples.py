"""Examples of a board: their source, its share of them, and its held-out part.

`DataSpec` is the `[data]` table of a job or an agent. Files are read by `readers`, put together and
brought to one shape by `mixture`, drawn rather than read by `synthetic`; shares are drawn by
`partition`. All are imported when examples are loaded, so that the daemon, which only checks its
table, holds no numpy. A share is drawn from the labels alone, and only its rows are then read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from fedquilt.core import DataError, Examples
from fedquilt.data.spec import DataSpec

if TYPE_CHECKING:
    import numpy as np

    from fedquilt.data.readers import Reader


def load(spec: DataSpec) -> tuple[Examples, Examples]:
    """Load this device's examples: for training, and held out for evaluation. In stored order, apart.

    Raises:
        DataError: unreadable, labels that do not match, or nothing in this share; names the file and the mend.
    """
    reader = open_(spec)
    used = _used(reader, spec)
    return _read(reader, used, _some(_parts(reader, used, spec, [spec.share]), len(used), spec, [spec.share]), spec)[0]


def load_shares(spec: DataSpec) -> list[tuple[Examples, Examples]]:
    """Load all shares of the spec as `load` would, for a fleet in one process: everything is read once.

    Raises:
        DataError: as `load`.
    """
    reader = open_(spec)
    used, shares = _used(reader, spec), range(spec.shares)
    return _read(reader, used, _some(_parts(reader, used, spec, shares), len(used), spec, shares), spec)


class Together:
    """Shared `load` for the devices of one process: the first call reads the shares of all of them, in one pass.

    A share without examples is an error for its own device only. If the file or an example in it is unusable,
    each device finds out for itself whether its own share is affected.
    """

    def __init__(self) -> None:
        self._shares: dict[bytes, tuple[list[tuple[Examples, Examples]], int] | None] = {}  # and how many there are

    def load(self, spec: DataSpec) -> tuple[Examples, Examples]:
        """Load one device's examples, as the function `load`.

        Raises:
            DataError: as the function.
        """
        whole = msgspec.structs.replace(spec, share=0)
        key = msgspec.json.encode(whole)
        if key not in self._shares:
            try:
                reader = open_(whole)
                used = _used(reader, whole)
                self._shares[key] = (
                    _read(reader, used, _parts(reader, used, whole, range(spec.shares)), whole),
                    len(used),
                )
            except DataError:
                self._shares[key] = None
        known = self._shares[key]
        if known is None or spec.share >= len(known[0]):
            return load(spec)
        shares, count = known
        train, held = shares[spec.share]
        if not len(train) + len(held):
            raise _empty(spec, spec.share, count)
        return train, held


def load_all(spec: DataSpec) -> Examples:
    """Load all examples of the split, unpartitioned: a common test set.

    Raises:
        DataError: as `load`.
    """
    reader = open_(spec)
    return _examples(reader, _used(reader, spec), spec)


def label_counts(spec: DataSpec) -> tuple[np.ndarray, np.ndarray]:
    """Number of examples by class in every share: for training, and held out, (shares, classes) each. Reads no inputs.

    For a task without classes all examples count as one.

    Raises:
        DataError: as `load`.
    """
    import numpy as np

    reader = open_(spec)
    used = _used(reader, spec)
    y = _kinds(reader, used, spec)
    kinds = int(y.max()) + 1 if len(y) else 0
    parts = _some(_parts(reader, used, spec, range(spec.shares)), len(used), spec, range(spec.shares))
    train, held = (
        np.stack([np.bincount(y[part[which]], minlength=kinds) for part in parts]).astype(np.int64) for which in (0, 1)
    )
    return train, held


def require_shares(reader: Reader, spec: DataSpec) -> None:
    """Check that every share has an example. Reads no inputs.

    Raises:
        DataError: one has none, or the examples cannot be shared out as the spec wants.
    """
    used = _used(reader, spec)
    _some(_parts(reader, used, spec, range(spec.shares)), len(used), spec, range(spec.shares))


def open_(spec: DataSpec) -> Reader:
    """Open the split: all its labels, and a function that reads the inputs of some rows.

    Raises:
        DataError: nothing is there, or nothing readable; names the file and the mend.
    """
    from fedquilt.data import sources, synthetic

    if spec.synthetic:
        return synthetic.open_(spec)
    return sources.open_(spec)


def _parts(
    reader: Reader, used: np.ndarray, spec: DataSpec, shares: Sequence[int]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Places in `used` of each of these shares, ascending: for training, and held out. A share may be empty."""
    from fedquilt.data import partition

    y = _kinds(reader, used, spec)
    found = []
    owner = None if reader.owner is None else reader.owner[used]
    origin = None if reader.origin is None else reader.origin[used]
    owned = partition.shares(y, spec, origin, shares, owner)
    for share, own in zip(shares, owned, strict=True):
        if not len(own):
            found.append((own, own))
            continue
        train, held = partition.hold_out(y[own], msgspec.structs.replace(spec, share=share))
        found.append((own[train], own[held]))
    return found


def _kinds(reader: Reader, used: np.ndarray, spec: DataSpec) -> np.ndarray:
    """Class of each used example (n,); all 0 if the task has no classes."""
    import numpy as np

    return reader.y[used] if spec.task == "classes" else np.zeros(len(used), np.int64)


def _some(
    parts: Sequence[tuple[np.ndarray, np.ndarray]], count: int, spec: DataSpec, shares: Sequence[int]
) -> Sequence[tuple[np.ndarray, np.ndarray]]:
    """Check that none of the parts of these shares is empty; `count`: of examples in all."""
    for share, (train, held) in zip(shares, parts, strict=True):
        if not len(train) + len(held):
            raise _empty(spec, share, count)
    return parts


def _empty(spec: DataSpec, share: int, count: int) -> DataError:
    return DataError(
        f"{spec.where}: share {share} of {spec.shares} ({spec.partition!r}) is empty, of {count} examples: "
        "have fewer shares, or more examples in each"
    )


def _used(reader: Reader, spec: DataSpec) -> np.ndarray:
    """Rows that the spec's `limit` or `per_class` leaves, in stored order."""
    from fedquilt.data import partition

    each = spec.per_class.get(spec.split, 0) if isinstance(spec.per_class, dict) else spec.per_class
    if each:
        return partition.sample_each(reader.y, each, spec.seed)
    return partition.sample(len(reader.y), spec.limit, spec.seed)


def _read(
    reader: Reader, used: np.ndarray, parts: Sequence[tuple[np.ndarray, np.ndarray]], spec: DataSpec
) -> list[tuple[Examples, Examples]]:
    """Examples of each pair of parts, in one pass over the file; they are views of one array."""
    import numpy as np

    flat = [part for pair in parts for part in pair]
    every = _examples(reader, used[np.concatenate(flat)], spec)
    ends = np.cumsum([len(part) for part in flat])
    cut = [
        Examples(every.x[end - len(part) : end], every.y[end - len(part) : end])
        for part, end in zip(flat, ends, strict=True)
    ]
    return list(zip(cut[::2], cut[1::2], strict=True))


def _examples(reader: Reader, rows: np.ndarray, spec: DataSpec) -> Examples:
    import numpy as np

    x = reader.take(rows)
    if isinstance(spec.fill, float) and x.dtype.kind == "f":  # a table's own are filled as it is read
        x = np.where(np.isnan(x), x.dtype.type(spec.fill), x)
    if x.dtype.kind == "f":
        odd = np.flatnonzero(~np.isfinite(x).all(axis=tuple(range(1, x.ndim))))
        if len(odd):
            first, hold = rows[odd].min(), "hold" if len(odd) > 1 else "holds"
            raise DataError(
                f"{spec.where}: {len(odd)} of {len(rows)} examples {hold} NaN or infinity, the first is example "
                f"{first}: mend the file, leave such examples out, or set [data] fill to a number for NaN"
            )
    return Examples(x, reader.y[rows])
