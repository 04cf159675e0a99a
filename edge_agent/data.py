"""A board's own examples: where they lie, which share of them is this board's, and what is held out.

`DataSpec` is the `[data]` table of a job or an agent. Formats are read by `readers`, shares drawn by
`partition`; both are imported when examples are loaded, so that the daemon, which only checks its
table, holds no numpy. A share is drawn from the labels alone, and only its rows are then read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from fedquilt.core import DataError, Examples

if TYPE_CHECKING:
    import numpy as np

    from fedquilt.edge_agent.readers import Reader

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]


class DataSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where examples are, and which are this device's.

    A simulated fleet of n devices gives all the same table, and device i `share = i`, `shares = n`.
    """

    path: str  # file or folder; for torchvision its root
    format: Literal["auto", "npz", "idx", "folder", "torchvision"] = "auto"  # auto: by what is at the path
    split: str = "train"
    x: str = ""  # npz: name of the array of inputs; default x_<split>, else x
    y: str = ""  # npz: name of the array of labels; default y_<split>, else y
    dataset: str = ""  # torchvision: name of the class, "CIFAR10"
    download: bool = False  # torchvision: fetch it if it is not there
    size: Natural = 0  # image files: scale to size x size; 0: as they are, all alike
    limit: Natural = 0  # use so many of all examples, drawn by the seed; 0: all
    held: Annotated[float, Meta(ge=0, lt=1)] = 0.2  # share of the device's own that is held out
    partition: Literal["all", "iid", "dirichlet", "classes"] = "all"
    share: Natural = 0  # this device's, counted from 0
    shares: Positive = 1
    alpha: Annotated[float, Meta(gt=0)] = 0.5  # dirichlet: concentration; small is unlike, large is like iid
    min_size: Positive = 2  # dirichlet: draw again until the smallest share has so many
    classes: Positive = 2  # classes: how many each device has
    seed: Natural = 0


def load(spec: DataSpec) -> tuple[Examples, Examples]:
    """This device's examples: those to train on, and those held out for evaluation. In stored order, apart.

    Raises:
        DataError: unreadable, labels that do not match, or nothing in this share; names the file and the mend.
    """
    from fedquilt.edge_agent import readers

    reader = readers.open_(spec)
    rows = _used(reader, spec)
    train, held = _own(reader.y[rows], spec)
    return _examples(reader, rows[train], spec), _examples(reader, rows[held], spec)


def load_shares(spec: DataSpec) -> list[tuple[Examples, Examples]]:
    """What `load` gives to each of the spec's shares, for a fleet in one process: all is read once.

    Raises:
        DataError: as `load`.
    """
    every = load_all(spec)
    parts = (_own(every.y, msgspec.structs.replace(spec, share=share)) for share in range(spec.shares))
    return [(Examples(every.x[train], every.y[train]), Examples(every.x[held], every.y[held])) for train, held in parts]


def load_all(spec: DataSpec) -> Examples:
    """All examples of the split, unpartitioned: a common test set.

    Raises:
        DataError: as `load`.
    """
    from fedquilt.edge_agent import readers

    reader = readers.open_(spec)
    return _examples(reader, _used(reader, spec), spec)


def _own(y: np.ndarray, spec: DataSpec) -> tuple[np.ndarray, np.ndarray]:
    """The share's rows of `y`, each ascending: to train on, and held out."""
    from fedquilt.edge_agent import partition

    if spec.share >= spec.shares:
        raise DataError(f"[data] share {spec.share} of {spec.shares}: shares are counted from 0 to {spec.shares - 1}")
    own = partition.rows(y, spec)
    if not len(own):
        raise DataError(
            f"{spec.path}: share {spec.share} of {spec.shares} ({spec.partition!r}) is empty, of {len(y)} examples: "
            "have fewer shares, or more examples in each"
        )
    train, held = partition.hold_out(y[own], spec)
    return own[train], own[held]


def _used(reader: Reader, spec: DataSpec) -> np.ndarray:
    """The rows the spec's `limit` leaves, in stored order."""
    from fedquilt.edge_agent import partition

    return partition.sample(len(reader.y), spec.limit, spec.seed)


def _examples(reader: Reader, rows: np.ndarray, spec: DataSpec) -> Examples:
    import numpy as np

    x = reader.take(rows)
    if x.dtype.kind == "f":
        odd = np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(axis=1))
        if len(odd):
            raise DataError(
                f"{spec.path}: example {rows[odd[0]]} holds NaN or infinity, as do {len(odd) - 1} others here: "
                "mend the file, or leave them out"
            )
    return Examples(x, reader.y[rows])
