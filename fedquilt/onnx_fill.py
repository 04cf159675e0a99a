"""Put the numbers of a network's tensors into an ONNX graph that names them and lacks them.

A graph whose initializers bear the names of the network's tensors can go to boards without their numbers, and each
board puts in its own: what it was sent, and what it alone has. Needs numpy and no library of ONNX's, which boards
need not have. What comes out has yet to be checked (`fedquilt.graph_check`) before anything runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from fedquilt.core import ModelError
from fedquilt.onnx_format import GRAPH, MODEL, TENSOR
from fedquilt.protobuf import Pieces, ProtobufError, Reader, numbers, signed, text, written

if TYPE_CHECKING:
    from fedquilt.core import Tensors

NAME_MOST: Final = 4096  # bytes
AXES_MOST: Final = 16
KINDS: Final[Mapping[int, str]] = {1: "<f4", 7: "<i8", 10: "<f2", 11: "<f8"}  # of onnx.proto's data types
NUMBERS: Final = frozenset(name for name, kind in TENSOR.values() if kind in ("floats", "doubles")) | {
    "raw_data",
    "int32_data",
    "int64_data",
    "uint64_data",
    "external_data",
}
_RAW: Final = {9: TENSOR[9]}


class Lack(NamedTuple):
    """A tensor that a graph lacks."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


def lacks(graph: bytes | memoryview) -> dict[str, Lack]:
    """The tensors that a graph names and lacks, by name.

    Raises:
        ModelError: it is no ONNX graph as fedquilt writes them.
    """
    return {name: lack for name, (lack, _) in _read(graph)[2].items()}


def filled(graph: bytes | memoryview, tensors: Tensors) -> list[bytes | memoryview]:
    """The ONNX file with the tensors that the graph lacks, in pieces; the tensors are not copied.

    Args:
        graph: an ONNX file without the numbers of some of its tensors.
        tensors: those of the network, by name; what the graph does not name is left out.

    Raises:
        ModelError: no such graph, or a tensor that it lacks is missing, of another shape or of another type.
    """
    model, inner, lacking = _read(graph)
    whole: list[memoryview | Pieces] = []
    for piece in inner["initializer"]:
        assert isinstance(piece, memoryview)
        whole.append(piece)
    for name, (lack, at) in lacking.items():
        given = tensors.get(name)
        if given is None:
            raise ModelError(f"the network's tensor {name!r} is missing")
        if given.shape != lack.shape or given.dtype != lack.dtype:
            raise ModelError(
                f"tensor {name!r} is {given.dtype} of shape {given.shape}, the network wants {lack.dtype} of shape "
                f"{lack.shape}"
            )
        raw = np.ascontiguousarray(given).reshape(-1).view(np.uint8).data
        own = inner["initializer"][at]
        assert isinstance(own, memoryview)
        whole[at] = [own, *written({"raw_data": [raw]}, _RAW)]
    return written({**model, "graph": [written({**inner, "initializer": whole}, GRAPH)]}, MODEL)


Fields = dict[str, list[int | memoryview]]


def _read(graph: bytes | memoryview) -> tuple[Fields, Fields, dict[str, tuple[Lack, int]]]:
    """Fields of the model, fields of its graph, and each tensor that lacks its numbers with its place among all."""
    reader = Reader()
    try:
        model = reader.message(memoryview(graph), MODEL, "the model")
        (data,) = model.get("graph", [0])
        if isinstance(data, int):
            raise ProtobufError("it holds no graph")
        inner = reader.message(data, GRAPH, "the graph")
        inner.setdefault("initializer", [])
        found: dict[str, tuple[Lack, int]] = {}
        for at, piece in enumerate(inner["initializer"]):
            if isinstance(piece, int):
                continue
            tensor = reader.message(piece, TENSOR, "a tensor")
            name = text(tensor.get("name"), NAME_MOST, "a name")
            shape = tuple(numbers(tensor.get("dims", []), AXES_MOST, f"the shape of {name[:80]!r}"))
            if NUMBERS & tensor.keys() or prod(shape) <= 0:
                continue
            (kind,) = tensor.get("data_type", [0])
            if signed(kind) not in KINDS:
                raise ProtobufError(f"tensor {name[:80]!r} is of type {signed(kind)}, which cannot be put in")
            found[name] = (Lack(shape, np.dtype(KINDS[signed(kind)])), at)
    except ProtobufError as error:
        raise ModelError(f"it is no ONNX file as fedquilt writes them: {error}") from None
    return model, inner, found
