"""Insertion of tensor data into ONNX graphs without weights, by name or from external files.

A graph whose initializers have the names of the network's tensors can be sent to devices without data. Each device
inserts the tensors received and its own. Exporters such as torch's write a graph and its data as two files, combined by
`read_with_external_data`. Only numpy is needed. The result must be checked (`fedquilt.onnx.graph_check`) before use.
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
from fedquilt.onnx.file_format import (
    ATTRIBUTE,
    GRAPH,
    MODEL,
    NODE,
    TENSOR,
    Pieces,
    ProtobufError,
    ProtobufReader,
    Schema,
    decode_ints,
    decode_text,
    encode_message,
    to_signed,
)
from fedquilt.onnx.graph_check import (
    MAX_AXES,
    MAX_DEPTH,
    MAX_FILE_BYTES,
    MAX_NAME_BYTES,
    ExternalDataLocation,
    map_file,
    read_external_location,
)

if TYPE_CHECKING:
    from fedquilt.core import Tensors

MAX_MESSAGE_DEPTH: Final = 3 * (MAX_DEPTH + 2)  # nesting of messages, because each graph is in an attribute of a node
DTYPES: Final[Mapping[int, str]] = {1: "<f4", 7: "<i8", 10: "<f2", 11: "<f8"}  # of onnx.proto's data types
DATA_FIELDS: Final = frozenset(name for name, kind in TENSOR.values() if kind in ("floats", "doubles")) | {
    "raw_data",
    "int32_data",
    "int64_data",
    "uint64_data",
    "external_data",
}
_RAW_DATA: Final = {9: TENSOR[9]}


class MissingTensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


def missing_tensors(graph: bytes | memoryview) -> dict[str, MissingTensor]:
    """Return shape and type of the initializers without data, by name. Raise ModelError if invalid."""
    return {name: tensor for name, (tensor, _) in _read_graph_and_missing(graph)[2].items()}


def fill_graph(graph: bytes | memoryview, tensors: Tensors) -> list[bytes | memoryview]:
    """Return an ONNX file in pieces with the missing tensors inserted. Raise ModelError on a mismatch."""
    model, inner, missing = _read_graph_and_missing(graph)
    initializers: list[memoryview | Pieces] = []
    for initializer_data in inner["initializer"]:
        assert isinstance(initializer_data, memoryview)
        initializers.append(initializer_data)
    for name, (expected, index) in missing.items():
        array = tensors.get(name)
        if array is None:
            raise ModelError(f"tensor {name!r} of the network is missing: roll out the model again")
        if array.shape != expected.shape or array.dtype != expected.dtype:
            raise ModelError(
                f"tensor {name!r} is {array.dtype} of shape {array.shape}, but the network needs {expected.dtype} of "
                f"shape {expected.shape}"
            )
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        initializer = inner["initializer"][index]
        assert isinstance(initializer, memoryview)
        initializers[index] = [initializer, *encode_message({"raw_data": [raw]}, _RAW_DATA)]
    return encode_message({**model, "graph": [encode_message({**inner, "initializer": initializers}, GRAPH)]}, MODEL)


Fields = dict[str, list[int | memoryview]]


def _read_graph_and_missing(graph: bytes | memoryview) -> tuple[Fields, Fields, dict[str, tuple[MissingTensor, int]]]:
    """Return the fields of model and graph, and name -> (tensor, index) of initializers without data."""
    reader = ProtobufReader()
    try:
        model = reader.read_message(memoryview(graph), MODEL, "the model")
        (data,) = model.get("graph", [0])
        if isinstance(data, int):
            raise ProtobufError("it has no graph")
        inner = reader.read_message(data, GRAPH, "the graph")
        inner.setdefault("initializer", [])
        missing: dict[str, tuple[MissingTensor, int]] = {}
        for index, initializer in enumerate(inner["initializer"]):
            if isinstance(initializer, int):
                continue
            tensor = reader.read_message(initializer, TENSOR, "a tensor")
            name = decode_text(tensor.get("name"), MAX_NAME_BYTES, "a name")
            shape = tuple(decode_ints(tensor.get("dims", []), MAX_AXES, f"the shape of {name[:80]!r}"))
            if DATA_FIELDS & tensor.keys() or prod(shape) <= 0:
                continue
            (kind,) = tensor.get("data_type", [0])
            if to_signed(kind) not in DTYPES:
                raise ProtobufError(f"tensor {name[:80]!r} without data has the unsupported type {to_signed(kind)}")
            missing[name] = (MissingTensor(shape, np.dtype(DTYPES[to_signed(kind)])), index)
    except ProtobufError as error:
        raise ModelError(f"the file is not a valid ONNX file ({error}): export the model again") from None
    return model, inner, missing


def read_with_external_data(path: Path) -> Pieces:
    """Return an ONNX file with the external data of its folder inserted, in pieces, or raise ModelError."""
    try:
        data = map_file(path)
        inlined = _ExternalTensorFiles(path.parent, len(data)).inline_tensors(data, MODEL)
    except ProtobufError as error:
        raise ModelError(f"{path.name} is not a valid ONNX file ({error}): export the model again") from None
    except ModelError as error:
        raise ModelError(f"{path.name}: {error}") from None
    return [inlined] if isinstance(inlined, memoryview) else inlined


_INNER_SCHEMAS: Final[Mapping[str, Schema]] = {  # fields that contain tensors, also in inner messages
    "graph": GRAPH,
    "g": GRAPH,
    "initializer": TENSOR,
    "node": NODE,
    "attribute": ATTRIBUTE,
    "t": TENSOR,
}


@dataclass
class _ExternalTensorFiles:
    folder: Path
    total_bytes: int
    reader: ProtobufReader = field(default_factory=ProtobufReader)

    def inline_tensors(self, data: memoryview, schema: Schema, depth: int = 0) -> memoryview | Pieces:
        """Return a message with its external tensors inserted, or the same bytes if it has none."""
        if depth > MAX_MESSAGE_DEPTH:
            raise ModelError(f"graphs are nested more than {MAX_DEPTH} deep: export a simpler network")
        fields = self.reader.read_message(data, schema, "the graph")
        if schema is TENSOR:
            return self._inline_tensor(data, fields)
        inlined: dict[str, Sequence[int | memoryview | Pieces]] = dict(fields)
        for name in _INNER_SCHEMAS.keys() & fields.keys():
            inlined[name] = [
                message if isinstance(message, int) else self.inline_tensors(message, _INNER_SCHEMAS[name], depth + 1)
                for message in fields[name]
            ]
        pairs = (pair for name in fields for pair in zip(inlined[name], fields[name], strict=True))
        return encode_message(inlined, schema) if any(new is not old for new, old in pairs) else data

    def _inline_tensor(self, data: memoryview, fields: Fields) -> memoryview | Pieces:
        if "external_data" not in fields:
            return data
        name = decode_text(fields.get("name"), MAX_NAME_BYTES, "a name")
        raw = self._read_external_data(name, read_external_location(self.reader, fields, name))
        kept_fields = {key: value for key, value in fields.items() if key not in ("external_data", "data_location")}
        return encode_message({**kept_fields, "raw_data": [[raw]]}, TENSOR)

    def _read_external_data(self, name: str, location: ExternalDataLocation) -> bytes:
        file = location.file
        if file in ("", ".", "..") or any(character in file for character in "/\\\0"):
            raise ModelError(
                f"tensor {name[:80]!r} is in {file[:200]!r}, which is not a file name in the model's folder: export "
                "the model as one file (`external_data=False`)"
            )
        try:
            opened = os.open(self.folder / file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(opened, "rb") as stream:
                info = os.fstat(opened)
                if not stat.S_ISREG(info.st_mode):
                    raise ModelError(f"tensor {name[:80]!r} is in {file[:200]!r}: copy a regular file there")
                length = info.st_size - location.offset if location.length is None else location.length
                self.total_bytes += max(length, 0)
                if self.total_bytes > MAX_FILE_BYTES:
                    raise ModelError(f"with the data of {file[:200]!r}, the model exceeds {MAX_FILE_BYTES} bytes")
                stream.seek(location.offset)
                raw = stream.read(max(length, 0))
        except OSError as error:
            reason = "symbolic link, copy the file itself" if error.errno == errno.ELOOP else error.strerror
            raise ModelError(f"cannot read {file[:200]!r} with tensor {name[:80]!r}: {reason}") from None
        if len(raw) != length:
            raise ModelError(f"tensor {name[:80]!r} needs {length} bytes of {file[:200]!r}, which has {len(raw)}")
        return raw
