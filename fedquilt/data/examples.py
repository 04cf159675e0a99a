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
    """Load the training and held-out examples of this device's share, in stored order, or raise DataError."""
    return _load_shares(spec, [spec.share])[0]


def load_all_shares(spec: DataSpec) -> list[tuple[Examples, Examples]]:
    return _load_shares(spec, range(spec.shares))


def _load_shares(spec: DataSpec, shares: Sequence[int]) -> list[tuple[Examples, Examples]]:
    reader = open_split(spec)
    rows = _select_rows(reader, spec)
    parts = _split_share_rows(reader, rows, spec, shares)
    _require_nonempty(parts, len(rows), spec, shares)
    return _read_parts(reader, rows, parts, spec, shares)


class SharedLoader:
    """Loader of all devices in a process, which reads their shares in one pass.

    An empty share is an error only for its device. If the data cannot be read in one pass, each share is read alone.
    """

    def __init__(self) -> None:
        # By encoded [data] table: the shares and the number of all examples, or None if one pass is not possible.
        self._shares: dict[bytes, tuple[list[tuple[Examples, Examples]], int] | None] = {}

    def load_share(self, spec: DataSpec) -> tuple[Examples, Examples]:
        fleet_spec = msgspec.structs.replace(spec, share=0)
        key = msgspec.json.encode(fleet_spec)
        if key not in self._shares:
            try:
                reader = open_split(fleet_spec)
                rows = _select_rows(reader, fleet_spec)
                parts = _split_share_rows(reader, rows, fleet_spec, range(spec.shares))
                self._shares[key] = _read_parts(reader, rows, parts, fleet_spec, range(spec.shares)), len(rows)
            except DataError:
                self._shares[key] = None
        cached = self._shares[key]
        if cached is None or spec.share >= len(cached[0]):
            return load_share(spec)
        loaded, count = cached
        _require_nonempty([loaded[spec.share]], count, spec, [spec.share])
        return loaded[spec.share]


def load_split(spec: DataSpec) -> Examples:
    reader = open_split(spec)
    return _read_examples(reader, _select_rows(reader, spec), spec)


def count_labels(spec: DataSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of training and of held-out examples by share and class, (shares, classes).

    No inputs are read. A task without classes counts as one class. Raise DataError if a share is empty.
    """
    import numpy as np

    reader = open_split(spec)
    rows = _select_rows(reader, spec)
    y = _class_labels(reader, rows, spec)
    class_count = int(y.max()) + 1 if len(y) else 0
    parts = _split_share_rows(reader, rows, spec, range(spec.shares))
    _require_nonempty(parts, len(rows), spec, range(spec.shares))
    train, held_out = (
        np.stack([np.bincount(y[part[index]], minlength=class_count) for part in parts]).astype(np.int64)
        for index in (0, 1)
    )
    return train, held_out


def require_nonempty_share(reader: ExampleReader, spec: DataSpec) -> None:
    """Raise DataError if this device's share is empty."""
    _require_nonempty_shares(reader, spec, [spec.share])


def require_nonempty_shares(reader: ExampleReader, spec: DataSpec) -> None:
    _require_nonempty_shares(reader, spec, range(spec.shares))


def _require_nonempty_shares(reader: ExampleReader, spec: DataSpec, shares: Sequence[int]) -> None:
    rows = _select_rows(reader, spec)
    _require_nonempty(_split_share_rows(reader, rows, spec, shares), len(rows), spec, shares)


def open_split(spec: DataSpec) -> ExampleReader:
    """Return a reader of the split's labels and inputs, or raise DataError. No inputs are read."""
    from fedquilt.data import inputs, readers, synthetic

    if spec.is_synthetic:
        return synthetic.open_synthetic(spec)
    reader = readers.open_sources(spec)
    if spec.domains is not None and not (inputs.is_image_shape(reader.shape) and reader.dtype.kind in "uf"):
        raise DataError(
            f"{spec.source_name}: [data] domains changes images, but examples are {reader.dtype} of shape "
            f"{reader.shape}: leave domains out"
        )
    return reader


def _split_share_rows(
    reader: ExampleReader, rows: np.ndarray, spec: DataSpec, share_numbers: Sequence[int]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the training and held-out examples of each share as ascending indices into `rows`."""
    from fedquilt.data import partition

    y = _class_labels(reader, rows, spec)
    splits = []
    owner = None if reader.owner is None else reader.owner[rows]
    origin = None if reader.origin is None else reader.origin[rows]
    rows_by_share = partition.rows_of_shares(y, spec, origin, share_numbers, owner)
    for share, share_rows in zip(share_numbers, rows_by_share, strict=True):
        if not len(share_rows):
            splits.append((share_rows, share_rows))
            continue
        train, held_out = partition.split_held_out(y[share_rows], msgspec.structs.replace(spec, share=share))
        splits.append((share_rows[train], share_rows[held_out]))
    return splits


def _class_labels(reader: ExampleReader, rows: np.ndarray, spec: DataSpec) -> np.ndarray:
    import numpy as np

    return reader.y[rows] if spec.task == "classes" else np.zeros(len(rows), np.int64)


def _require_nonempty(parts: Sequence[tuple[Sized, Sized]], count: int, spec: DataSpec, shares: Sequence[int]) -> None:
    for share, (train, held_out) in zip(shares, parts, strict=True):
        if not len(train) + len(held_out):
            raise DataError(
                f"{spec.source_name}: share {share} of {spec.shares} (partition {spec.partition!r}) has none of the "
                f"{count} examples: set fewer shares, or add examples"
            )


def _select_rows(reader: ExampleReader, spec: DataSpec) -> np.ndarray:
    from fedquilt.data import partition

    rows_per_class = spec.per_class.get(spec.split, 0) if isinstance(spec.per_class, dict) else spec.per_class
    if rows_per_class:
        return partition.sample_rows_by_class(reader.y, rows_per_class, spec.seed)
    return partition.sample_rows(len(reader.y), spec.limit, spec.seed)


def _read_parts(
    reader: ExampleReader,
    rows: np.ndarray,
    parts: Sequence[tuple[np.ndarray, np.ndarray]],
    spec: DataSpec,
    shares: Sequence[int],
) -> list[tuple[Examples, Examples]]:
    import numpy as np

    flat = [part for pair in parts for part in pair]
    examples = _read_examples(reader, rows[np.concatenate(flat)], spec)
    ends = np.cumsum([len(part) for part in flat])
    cut = [
        Examples(examples.x[end - len(part) : end], examples.y[end - len(part) : end])
        for part, end in zip(flat, ends, strict=True)
    ]
    pairs = zip(shares, cut[::2], cut[1::2], strict=True)
    return [
        (_apply_domain(train, spec, share, "train"), _apply_domain(held_out, spec, share, "held"))
        for share, train, held_out in pairs
    ]


def _apply_domain(examples: Examples, spec: DataSpec, share: int, part: str) -> Examples:
    # The noise depends on the seed and the share alone, so a device and a simulation have the same images.
    from fedquilt.arrays import tensors
    from fedquilt.data import inputs

    if spec.domains is None:
        return examples
    rng = tensors.seeded_rng("domain", spec.seed, share, part)
    return Examples(inputs.change_images(examples.x, rng, **spec.domains.values_of_share(share)), examples.y)


def _read_examples(reader: ExampleReader, rows: np.ndarray, spec: DataSpec) -> Examples:
    import numpy as np

    from fedquilt.data import inputs

    x = inputs.fill_missing(reader.take(rows), spec.fill)
    if x.dtype.kind == "f":
        bad_rows = np.flatnonzero(~np.isfinite(x).all(axis=tuple(range(1, x.ndim))))
        if len(bad_rows):
            first_bad_row, verb = rows[bad_rows].min(), "hold" if len(bad_rows) > 1 else "holds"
            raise DataError(
                f"{spec.source_name}: {len(bad_rows)} of {len(rows)} examples {verb} NaN or infinity, the first is "
                f"example {first_bad_row}: correct the file, leave such examples out, "
                "or set [data] fill to a number for NaN"
            )
    return Examples(x, reader.y[rows])
