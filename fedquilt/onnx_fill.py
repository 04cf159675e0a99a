"""Put the numbers of tensors into an ONNX graph that lacks them: a network's by name, or those of a file beside it.

A graph whose initializers bear the names of the network's tensors can go to boards without their numbers, and each
board puts in its own: what it was sent, and what it alone has. Needs numpy and no library of ONNX's, which boards
need not have. Exporters such as torch's write a graph and the numbers of its tensors as two files, of which
`read_whole` makes one. What comes out has yet to be checked (`fedquilt.graph_check`) before anything runs it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from fedquilt.core import ModelError
from fedquilt.graph_check import DEPTH_MOST, FILE_MOST, Location, mapped, read_location
from fedquilt.onnx_format import ATTRIBUTE, GRAPH, MODEL, NODE, TENSOR
from fedquilt.protobuf import Pieces, ProtobufError, Reader, Schema, numbers, signed, text, written

if TYPE_CHECKING:
    from fedquilt.core import Tensors

NAME_MOST: Final = 4096  # bytes
AXES_MOST: Final = 16
MESSAGES_MOST: Final = 3 * (DEPTH_MOST + 2)  # within each other: each graph is in an attribute of a node
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


# -- two files ------------------------------------------------------------------------------------


def read_whole(path: Path) -> Pieces:
    """Read an ONNX file with the numbers that it has in files beside it, as the pieces of one file.

    The graph may be anybody's, so it gets plain files of its own folder and nothing else: no path, link or device.

    Returns:
        One piece, which is not read yet, if the file has all its numbers itself.

    Raises:
        ModelError: a file cannot be read, is too large or lies elsewhere, or has fewer bytes than the graph says.
    """
    try:
        data = mapped(path)
        found = _TensorFiles(path.parent, len(data)).inline(data, MODEL)
    except ProtobufError as error:
        raise ModelError(f"{path.name}: it is no ONNX file as fedquilt writes them: {error}") from None
    except ModelError as error:
        raise ModelError(f"{path.name}: {error}") from None
    return [found] if isinstance(found, memoryview) else found


_INNER: Final[Mapping[str, Schema]] = {  # fields that hold a tensor, or a message that does
    "graph": GRAPH,
    "g": GRAPH,
    "initializer": TENSOR,
    "node": NODE,
    "attribute": ATTRIBUTE,
    "t": TENSOR,
}


@dataclass
class _TensorFiles:
    """Files beside a graph that hold numbers of its tensors, and the bytes of the whole model so far."""

    folder: Path
    size: int
    reader: Reader = field(default_factory=Reader)

    def inline(self, data: memoryview, schema: Schema, depth: int = 0) -> memoryview | Pieces:
        """Return a message with the numbers of its tensors inside, or the same message if nothing was outside."""
        if depth > MESSAGES_MOST:
            raise ModelError(f"graphs lie within graphs more than {DEPTH_MOST} deep")
        fields = self.reader.message(data, schema, "the graph")
        if schema is TENSOR:
            return self._tensor(data, fields)
        made: dict[str, Sequence[int | memoryview | Pieces]] = dict(fields)
        for name in _INNER.keys() & fields.keys():
            made[name] = [
                piece if isinstance(piece, int) else self.inline(piece, _INNER[name], depth + 1)
                for piece in fields[name]
            ]
        changed = any(new is not old for name in fields for new, old in zip(made[name], fields[name], strict=True))
        return written(made, schema) if changed else data

    def _tensor(self, data: memoryview, fields: Fields) -> memoryview | Pieces:
        if "external_data" not in fields:
            return data
        name = text(fields.get("name"), NAME_MOST, "a name")
        raw = self._read(name, read_location(self.reader, fields, name))
        left = {key: value for key, value in fields.items() if key not in ("external_data", "data_location")}
        return written({**left, "raw_data": [[raw]]}, TENSOR)

    def _read(self, name: str, where: Location) -> bytes:
        file = where.file
        if file in ("", ".", "..") or any(mark in file for mark in "/\\\0"):
            raise ModelError(
                f"tensor {name[:80]!r} is in {file[:200]!r}: fedquilt reads files of the model's own folder alone; "
                "export the model as one file (`external_data=False`)"
            )
        try:
            opened = os.open(self.folder / file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(opened, "rb") as stream:
                found = os.fstat(opened)
                if not stat.S_ISREG(found.st_mode):
                    raise ModelError(f"tensor {name[:80]!r} is in {file[:200]!r}, which is no plain file")
                length = found.st_size - where.offset if where.length is None else where.length
                self.size += max(length, 0)
                if self.size > FILE_MOST:
                    raise ModelError(f"with the numbers of {file[:200]!r} it has more than {FILE_MOST} bytes")
                stream.seek(where.offset)
                raw = stream.read(max(length, 0))
        except OSError as error:
            why = "it is a link: copy the file itself there" if error.errno == errno.ELOOP else error.strerror
            raise ModelError(f"tensor {name[:80]!r} is in {file[:200]!r} beside the model: {why}") from None
        if len(raw) != length:
            raise ModelError(f"tensor {name[:80]!r} takes {length} bytes of {file[:200]!r}, and {len(raw)} are there")
        return raw
