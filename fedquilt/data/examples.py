"""Examples of a device, split into training and held-out examples.

A share is computed from the labels alone, and only the rows of the share are read. Modules that need numpy are imported
on first use, because the agent process checks `[data]` without numpy.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING

import msgspec

from fedquilt.core import DataError, Examples
from fedquilt.data.spec import DataSpec

if TYPE_CHECKING:
    import numpy as np

    from fedquilt.data.readers import ExampleReader


def load_share(spec: DataSpec) -> tuple[Examples, Examples]:
    """Load the training and held-out examples of this device's share, in stored order."""
    return _load_shares(spec, [spec.share])[0]


def load_all_shares(spec: DataSpec) -> list[tuple[Examples, Examples]]:
    return _load_shares(spec, range(spec.shares))


def _load_shares(spec: DataSpec, shares: Sequence[int]) -> list[tuple[Examples, Examples]]:
    reader = open_split(spec)
    used = _select_rows(reader, spec)
    parts = _split_shares(reader, used, spec, shares)
    _require_nonempty(parts, len(used), spec, shares)
    return _read_parts(reader, used, parts, spec, shares)


class SharedLoader:
    """Loader for the devices of one process, which reads the shares of all devices in one pass.

    An empty share is an error for its own device only. If the data cannot be read in one pass, each share is read
    alone.
    """

    def __init__(self) -> None:
        self._shares: dict[bytes, tuple[list[tuple[Examples, Examples]], int] | None] = {}  # and how many there are

    def load_share(self, spec: DataSpec) -> tuple[Examples, Examples]:
        """Load one device's training and held-out examples."""
        whole = msgspec.structs.replace(spec, share=0)
        key = msgspec.json.encode(whole)
        if key not in self._shares:
            try:
                reader = open_split(whole)
                used = _select_rows(reader, whole)
                parts = _split_shares(reader, used, whole, range(spec.shares))
                self._shares[key] = _read_parts(reader, used, parts, whole, range(spec.shares)), len(used)
            except DataError:
                self._shares[key] = None
        known = self._shares[key]
        if known is None or spec.share >= len(known[0]):
            return load_share(spec)
        loaded, count = known
        _require_nonempty([loaded[spec.share]], count, spec, [spec.share])
        return loaded[spec.share]


def load_split(spec: DataSpec) -> Examples:
    reader = open_split(spec)
    return _read_examples(reader, _select_rows(reader, spec), spec)


def count_labels(spec: DataSpec) -> tuple[np.ndarray, np.ndarray]:
    """Count the training and the held-out examples of each class in every share.

    A task without classes counts as one class. No inputs are read.
    """
    import numpy as np

    reader = open_split(spec)
    used = _select_rows(reader, spec)
    y = _class_labels(reader, used, spec)
    kinds = int(y.max()) + 1 if len(y) else 0
    parts = _split_shares(reader, used, spec, range(spec.shares))
    _require_nonempty(parts, len(used), spec, range(spec.shares))
    train, held = (
        np.stack([np.bincount(y[part[which]], minlength=kinds) for part in parts]).astype(np.int64) for which in (0, 1)
    )
    return train, held


def require_nonempty_shares(reader: ExampleReader, spec: DataSpec) -> None:
    used = _select_rows(reader, spec)
    _require_nonempty(_split_shares(reader, used, spec, range(spec.shares)), len(used), spec, range(spec.shares))


def open_split(spec: DataSpec) -> ExampleReader:
    from fedquilt.data import inputs, readers, synthetic

    if spec.is_synthetic:
        return synthetic.open_synthetic(spec)
    reader = readers.open_sources(spec)
    if spec.domains is not None and not (inputs.is_image_shape(reader.shape) and reader.dtype.kind in "uf"):
        raise DataError(
            f"{spec.source_name}: [data] domains changes images, (height, width) or (height, width, 1 or 3), and "
            f"examples are {reader.dtype} of shape {reader.shape}: leave domains out"
        )
    return reader


def _split_shares(
    reader: ExampleReader, used: np.ndarray, spec: DataSpec, shares: Sequence[int]
) -> list[tuple[np.ndarray, np.ndarray]]:
    # Indices into `used`, ascending. A share may be empty.
    from fedquilt.data import partition

    y = _class_labels(reader, used, spec)
    found = []
    owner = None if reader.owner is None else reader.owner[used]
    origin = None if reader.origin is None else reader.origin[used]
    owned = partition.rows_of_shares(y, spec, origin, shares, owner)
    for share, own in zip(shares, owned, strict=True):
        if not len(own):
            found.append((own, own))
            continue
        train, held = partition.split_held_out(y[own], msgspec.structs.replace(spec, share=share))
        found.append((own[train], own[held]))
    return found


def _class_labels(reader: ExampleReader, used: np.ndarray, spec: DataSpec) -> np.ndarray:
    import numpy as np

    return reader.y[used] if spec.task == "classes" else np.zeros(len(used), np.int64)


def _require_nonempty(parts: Sequence[tuple[Sized, Sized]], count: int, spec: DataSpec, shares: Sequence[int]) -> None:
    for share, (train, held) in zip(shares, parts, strict=True):
        if not len(train) + len(held):
            raise DataError(
                f"{spec.source_name}: share {share} of {spec.shares} ({spec.partition!r}) is empty, of {count} "
                "examples: have fewer shares, or more examples in each"
            )


def _select_rows(reader: ExampleReader, spec: DataSpec) -> np.ndarray:
    from fedquilt.data import partition

    each = spec.per_class.get(spec.split, 0) if isinstance(spec.per_class, dict) else spec.per_class
    if each:
        return partition.sample_rows_by_class(reader.y, each, spec.seed)
    return partition.sample_rows(len(reader.y), spec.limit, spec.seed)


def _read_parts(
    reader: ExampleReader,
    used: np.ndarray,
    parts: Sequence[tuple[np.ndarray, np.ndarray]],
    spec: DataSpec,
    shares: Sequence[int],
) -> list[tuple[Examples, Examples]]:
    # One pass over the file. All results are views of one array, if no domain changes them.
    import numpy as np

    flat = [part for pair in parts for part in pair]
    every = _read_examples(reader, used[np.concatenate(flat)], spec)
    ends = np.cumsum([len(part) for part in flat])
    cut = [
        Examples(every.x[end - len(part) : end], every.y[end - len(part) : end])
        for part, end in zip(flat, ends, strict=True)
    ]
    pairs = zip(shares, cut[::2], cut[1::2], strict=True)
    return [
        (_apply_domain(train, spec, share, "train"), _apply_domain(held, spec, share, "held"))
        for share, train, held in pairs
    ]


def _apply_domain(given: Examples, spec: DataSpec, share: int, part: str) -> Examples:
    # The noise depends on the seed and the share alone, so a device and a simulation have the same images.
    from fedquilt.arrays import tensors
    from fedquilt.data import inputs

    if spec.domains is None:
        return given
    rng = tensors.seeded_rng("domain", spec.seed, share, part)
    return Examples(inputs.change_images(given.x, rng, **spec.domains.values_of_share(share)), given.y)


def _read_examples(reader: ExampleReader, rows: np.ndarray, spec: DataSpec) -> Examples:
    import numpy as np

    from fedquilt.data import inputs

    x = inputs.fill_missing(reader.take(rows), spec.fill)
    if x.dtype.kind == "f":
        odd = np.flatnonzero(~np.isfinite(x).all(axis=tuple(range(1, x.ndim))))
        if len(odd):
            first, hold = rows[odd].min(), "hold" if len(odd) > 1 else "holds"
            raise DataError(
                f"{spec.source_name}: {len(odd)} of {len(rows)} examples {hold} NaN or infinity, the first is example "
                f"{first}: correct the file, leave such examples out, or set [data] fill to a number for NaN"
            )
    return Examples(x, reader.y[rows])
