"""Personalised result of a run, as one blob for all devices that keep parts of the model.

The blob is a safetensors file. It contains the network's ONNX graph without tensor data (`fedquilt.onnx.weights`) as
"graph", and the bundles of an evaluation task as "<bundle>/<tensor>". Its metadata contain the encoded task. A device
builds its network from these and from its private state. With class priors, the graph ends in their addition, and the
device chooses them by its own labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from fedquilt import wire
from fedquilt.core import DECODE_ERRORS, ModelError, Task, UpdateError, WireError
from fedquilt.host.disk import REAL, Disk

if TYPE_CHECKING:
    import numpy as np

    from fedquilt.core import Tensors

GRAPH_TENSOR: Final = "graph"
CLASS_PRIORS: Final = "class_priors"  # initializer of the graph that each device fills with numbers added to the scores
MAX_HEADER_BYTES: Final = 16 << 20
_TASK_KEY: Final = "personal"


class PersonalParts(NamedTuple):
    graph: np.ndarray  # bytes
    bundles: Mapping[str, Tensors]


class _PersonalHeader(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


def encode_personal(task: Task, graph: bytes, bundles: Mapping[str, Tensors]) -> bytes:
    import numpy as np

    from fedquilt.arrays import tensors

    arrays = {f"{name}/{key}": array for name, bundle in bundles.items() for key, array in bundle.items()}
    arrays[GRAPH_TENSOR] = np.frombuffer(graph, np.uint8)
    return tensors.encode_tensors(arrays, {_TASK_KEY: wire.encode(task).decode()})


def read_task(path: Path, disk: Disk = REAL) -> Task | None:
    """Return the task of a personalised result, or None for another file. Raise ModelError if damaged."""
    size = int.from_bytes(disk.read(path, 0, 8), "little")
    if not 0 < size <= MAX_HEADER_BYTES:
        return None
    try:
        metadata = msgspec.json.decode(disk.read(path, 8, size), type=_PersonalHeader).metadata.get(_TASK_KEY)
    except DECODE_ERRORS:
        return None
    try:
        return None if metadata is None else wire.decode(metadata.encode(), Task)
    except (WireError, UnicodeError) as error:
        raise ModelError(f"the personalised result has an invalid task ({error}): roll out the run again") from None


def read_personal(path: Path) -> PersonalParts:
    """Return a personalised result, or raise ModelError if damaged or StoreError if unreadable."""
    import numpy as np

    from fedquilt.arrays import tensors

    try:
        arrays = tensors.read_tensors(path)
    except UpdateError as error:
        raise ModelError(f"the personalised result is damaged ({error}): roll out the run again") from None
    graph = arrays.pop(GRAPH_TENSOR, None)
    if graph is None or graph.dtype != np.uint8 or graph.ndim != 1:
        raise ModelError("the personalised result has no graph: roll out the run again")
    bundles: dict[str, dict[str, np.ndarray]] = {}
    for key, array in arrays.items():
        bundle, _, name = key.partition("/")
        bundles.setdefault(bundle, {})[name] = array
    return PersonalParts(graph, bundles)
