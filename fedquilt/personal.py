"""A run's result as it goes to boards that have a part of it each for themselves: one blob, the same for all.

It is a safetensors file. Its tensors are the network's ONNX graph without the numbers of the network's tensors
(`fedquilt.onnx_fill`) under "graph", and the bundles that a task of the method has, as "<bundle>/<tensor>". Its
metadata say of which run and method it is. A board puts the network together of these and of what it has kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from fedquilt.core import UNDECODABLE, Code, Count, Label, ModelError, Name, Told, UpdateError
from fedquilt.disk import REAL, Disk

if TYPE_CHECKING:
    import numpy as np

    from fedquilt.core import Tensors

GRAPH: Final = "graph"
HEADER_MOST: Final = 16 << 20  # bytes of a file's header
_KEY: Final = "personal"


class About(Told, frozen=True):
    """What a file says of itself."""

    job: Name  # whose private parts belong to it
    method: Code
    params: dict[Label, Any]  # of a task
    seed: Count = 0


class Parts(NamedTuple):
    """Content of a file."""

    graph: np.ndarray  # bytes
    bundles: Mapping[str, Tensors]


class _Head(msgspec.Struct):
    """Header of a safetensors file, as far as it is read here."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


def encode(about: About, graph: bytes, bundles: Mapping[str, Tensors]) -> bytes:
    """The bytes of such a file."""
    import numpy as np

    from fedquilt import tensors

    held = {f"{name}/{key}": array for name, bundle in bundles.items() for key, array in bundle.items()}
    held[GRAPH] = np.frombuffer(graph, np.uint8)
    return tensors.encode(held, {_KEY: msgspec.json.encode(about).decode()})


def about(path: Path, disk: Disk = REAL) -> About | None:
    """What a file says of itself; None: it is none of this kind, such as an ONNX file. Imports no numpy.

    Raises:
        OSError: it cannot be read.
    """
    size = int.from_bytes(disk.read(path, 0, 8), "little")
    if not 0 < size <= HEADER_MOST:
        return None
    try:
        said = msgspec.json.decode(disk.read(path, 8, size), type=_Head).metadata.get(_KEY)
        return None if said is None else msgspec.json.decode(said, type=About)
    except UNDECODABLE:
        return None


def read(path: Path) -> Parts:
    """The tensors of a file.

    Raises:
        ModelError: it is none of this kind.
        StoreError: it cannot be read.
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
