"""A run's result as it goes to boards that have a part of it each for themselves: one blob, the same for all.

The blob is a safetensors file. Its tensors are the network's ONNX graph without the numbers of the network's tensors
(`fedquilt.onnx_fill`) under "graph", and the bundles of an evaluation's task, as "<bundle>/<tensor>". Its metadata
hold that task, encoded as on the wire. A board puts the network together of these and of what it has kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from fedquilt import wire
from fedquilt.core import UNDECODABLE, ModelError, Task, UpdateError, WireError
from fedquilt.disk import REAL, Disk

if TYPE_CHECKING:
    import numpy as np

    from fedquilt.core import Tensors

GRAPH: Final = "graph"
HEADER_MOST: Final = 16 << 20  # bytes of a file's header
_KEY: Final = "personal"


class Parts(NamedTuple):
    """Content of a file."""

    graph: np.ndarray  # bytes
    bundles: Mapping[str, Tensors]


class _Head(msgspec.Struct):
    """Metadata in the header of a safetensors file."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


def encode(task: Task, graph: bytes, bundles: Mapping[str, Tensors]) -> bytes:
    """Encode the evaluation's task for a device that is new to the run, the network's graph and the task's bundles.

    Raises:
        WireError: the task is larger than a message may be.
    """
    import numpy as np

    from fedquilt import tensors

    held = {f"{name}/{key}": array for name, bundle in bundles.items() for key, array in bundle.items()}
    held[GRAPH] = np.frombuffer(graph, np.uint8)
    return tensors.encode(held, {_KEY: wire.encode(task).decode()})


def task(path: Path, disk: Disk = REAL) -> Task | None:
    """Read the evaluation's task in a file; None: the file is of another kind, such as ONNX. Imports no numpy.

    Raises:
        ModelError: the task was written by another version, or is damaged.
        OSError: the file cannot be read.
    """
    size = int.from_bytes(disk.read(path, 0, 8), "little")
    if not 0 < size <= HEADER_MOST:
        return None
    try:
        found = msgspec.json.decode(disk.read(path, 8, size), type=_Head).metadata.get(_KEY)
    except UNDECODABLE:
        return None
    try:
        return None if found is None else wire.decode(found.encode(), Task)
    except (WireError, UnicodeError) as error:
        raise ModelError(f"the task in the result of a run with parts on boards: {error}; deploy it anew") from None


def read(path: Path) -> Parts:
    """Read the graph and the bundles of a file.

    Raises:
        ModelError: the file is of another kind, or damaged.
        StoreError: the file cannot be read.
    """
    import numpy as np

    from fedquilt import tensors

    try:
        held = tensors.read(path)
    except UpdateError as error:
        raise ModelError(f"the result of a run with parts on boards is damaged: {error}") from None
    graph = held.pop(GRAPH, None)
    if graph is None or graph.dtype != np.uint8 or graph.ndim != 1:
        raise ModelError("the result of a run with parts on boards has no graph: deploy it anew")
    bundles: dict[str, dict[str, np.ndarray]] = {}
    for key, array in held.items():
        bundle, _, name = key.partition("/")
        bundles.setdefault(bundle, {})[name] = array
    return Parts(graph, bundles)
