"""Check of untrusted ONNX graphs before a session is created.

ONNX Runtime up to 1.23.2 (in JetPack 6) reads any file that a graph names as its weights, such as a device's key. A
graph may also call operators without end, or declare sizes beyond any memory. Permitted are only:

- operators in OPERATORS, without functions, sequences, strings, sparse tensors and loops,
- weights inside the graph, or in a regular file in the graph's folder that is named by its sha256,
- tensors whose size equals that of their data, and bounded nodes, texts, nesting and declared sizes.

Sizes computed at run time are not checked, and are limited by the task's memory budget. The file is parsed by
`fedquilt.onnx.file_format`, because devices need not have the `onnx` package.
"""

from __future__ import annotations

import mmap
import re
import stat
import struct
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from fedquilt.core import ModelError
from fedquilt.onnx.file_format import (
    ATTRIBUTE,
    DIM,
    ENTRY,
    FORBIDDEN_FIELDS,
    GRAPH,
    MODEL,
    NODE,
    OPERATORS,
    OPSET,
    SHAPE,
    TENSOR,
    TENSOR_TYPE,
    TYPE,
    VALUE,
    ProtobufError,
    ProtobufReader,
    Schema,
    decode_ints,
    decode_text,
    to_signed,
)

MAX_NODES: Final = 20_000
MAX_TENSORS: Final = 20_000
MAX_DEPTH: Final = 4  # nesting of graphs, which are branches of `If`
MAX_ELEMENTS: Final = 2**31  # of one tensor or stated size
MAX_EDGE: Final = 65_536  # size of a kernel, stride or padding
MAX_AXES: Final = 16
MAX_LIST: Final = 4096  # inputs of a node, or numbers in an attribute
MAX_NAME_BYTES: Final = 4096
MAX_METADATA_BYTES: Final = 1 << 20  # of one text in the metadata, such as a thousand labels
MAX_METADATA_ENTRIES: Final = 64
MAX_FILE_BYTES: Final = 2**31 - 1  # limit of protobuf
MAX_SIZES: Final = 4096  # elements of constants that are read as sizes

_ITEM_BYTES: Final = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 16: 2}
_TYPED_FIELDS: Final = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")
_TYPED_BYTES: Final = {"float_data": 4, "double_data": 8}  # bytes of an element, at least 1 for variable lengths
_EDGES: Final = frozenset({"dilations", "kernel_shape", "output_padding", "output_shape", "pads", "strides"})
# operator -> index of the input that states the size of the output
_SIZED_BY: Final = {"ConstantOfShape": 0, "Expand": 1, "Tile": 1, "OneHot": 1, "Pad": 1, "Upsample": 1}
_INT64, _FLOAT, _BFLOAT16 = 7, 1, 16
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")

Fields: TypeAlias = Mapping[str, list[int | memoryview]]
FileSize: TypeAlias = Callable[[str], int]  # name of a file in the graph's folder -> bytes; raises ModelError

Shape: TypeAlias = tuple[int | None, ...] | None
"""Declared shape, or None for an unknown number of axes. An axis of unknown size is None."""


class GraphValue(NamedTuple):
    name: str
    kind: int  # type number in onnx.proto, or 0 if not declared
    shape: Shape


def fits_shape(shape: Sequence[int], pattern: Shape) -> bool:
    """Return whether a shape agrees with a declared shape, in which unknown sizes agree with any size."""
    return pattern is None or (
        len(shape) == len(pattern) and all(size in (None, axis) for axis, size in zip(shape, pattern, strict=True))
    )


def format_shape(shape: Shape) -> str:
    return "any" if shape is None else f"({', '.join('any' if size is None else str(size) for size in shape)})"


@dataclass(frozen=True)
class CheckedGraph:
    metadata: Mapping[str, str]
    weight_bytes: int  # of the initializers, inside and beside the graph
    activation_bytes: int | None  # per example, from the metadata, or None
    nodes: int
    inputs: tuple[GraphValue, ...]  # without initializers
    outputs: tuple[GraphValue, ...]

    @property
    def input_shape(self) -> Shape:
        """Shape of one example, valid after `require_batched_examples`."""
        shape = self.inputs[0].shape
        return None if shape is None else shape[1:]

    def require_batched_examples(self) -> None:
        """Raise ModelError unless the graph has one output and one input, whose first axis is a batch."""
        for values, side, verb in ((self.inputs, "input", "feeds"), (self.outputs, "output", "reads")):
            if len(values) != 1:
                names = ", ".join(repr(value.name[:40]) for value in values[:6]) or "none"
                raise ModelError(
                    f"the graph has {len(values)} {side}s ({names}), but fedquilt {verb} one: export a network with "
                    f"one {side}, and make other {side}s constants or leave them out"
                )
            if values[0].kind == _BFLOAT16:
                value_text = f"{side} {values[0].name[:80]!r}"
                raise ModelError(f"{value_text} is bfloat16, which numpy does not support: export it with float32")
        ((name, _, shape),) = self.inputs
        if shape == ():
            raise ModelError(f"input {name[:80]!r} is a single number: export it with a batch as its first axis")
        if shape and shape[0] not in (None, 1):
            raise ModelError(
                f"input {name[:80]!r} takes exactly {shape[0]} examples at once: export it with a first axis of any "
                "size (`dynamic_axes`, `dynamic_shapes`), or of 1"
            )


def check_file(path: Path) -> CheckedGraph:
    """Return the checked graph of an ONNX file with batched examples. ModelErrors omit the file's name."""
    folder = path.parent

    def file_size(name: str) -> int:
        try:
            info = (folder / name).lstat()
        except OSError as error:
            raise ModelError(
                f"weights file {name[:12]} cannot be read in the graph's folder: {error.strerror}"
            ) from None
        if not stat.S_ISREG(info.st_mode):
            raise ModelError(f"weights file {name[:12]} is a link or not a file: copy the file into the graph's folder")
        return info.st_size

    checked = check_bytes(map_file(path), file_size)
    checked.require_batched_examples()
    return checked


def map_file(path: Path) -> memoryview:
    """Return an ONNX file mapped into memory, or raise ModelError with a text that omits the file's name."""
    try:
        with path.open("rb") as file:
            length = file.seek(0, 2)
            if not 0 < length <= MAX_FILE_BYTES:
                raise ModelError(f"the file has {length} bytes, but an ONNX file has 1 to {MAX_FILE_BYTES}")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise ModelError(
            f"the file cannot be read ({error.strerror}): name a file of `fedquilt model export`"
        ) from None


def check_bytes(data: bytes | memoryview, size: FileSize | None = None) -> CheckedGraph:
    """Return the checked graph of an ONNX file in memory, or raise ModelError.

    `size` returns the size of a file with weights. Without it, no such files are permitted.
    """
    try:
        return _GraphCheck(size or _refuse_file).check_model(memoryview(data))
    except ProtobufError as error:
        raise ModelError(f"the file is not a valid ONNX file ({error}): export the model again") from None


def _refuse_file(name: str) -> int:
    raise ModelError("the graph has weights in another file: export it with its weights in one file")


@dataclass
class _GraphCheck:
    size: FileSize
    reader: ProtobufReader = field(default_factory=ProtobufReader)
    nodes: int = 0
    tensors: int = 0

    def check_model(self, data: memoryview) -> CheckedGraph:
        model = self._read_message(data, MODEL, "the model")
        metadata = _read_unique_entries(self.reader, model, "metadata_props", MAX_METADATA_BYTES)
        if len(graphs := _bytes_fields(model, "graph")) != 1:
            raise ModelError("the file has no graph: export the model again")
        activation_text = metadata.get("activation_bytes")
        if activation_text is not None and not re.fullmatch(r"[0-9]{1,15}", activation_text):
            problem = f"activation_bytes = {activation_text[:40]!r} in the metadata is not a number of bytes"
            raise ModelError(f"{problem}: export the model again")
        weight_bytes, inputs, outputs = self.check_graph(graphs[0], 0, ChainMap())
        domains = [self._read_domain(opset)[:80] for opset in _bytes_fields(model, "opset_import", MAX_LIST)]
        if "" not in domains or len(set(domains)) != len(domains):
            raise ModelError(f"the graph imports operator sets {domains[:6]}: import ONNX's own (''), and each once")
        return CheckedGraph(
            metadata=metadata,
            weight_bytes=weight_bytes,
            activation_bytes=None if activation_text is None else int(activation_text),
            nodes=self.nodes,
            inputs=inputs,
            outputs=outputs,
        )

    def _read_message(self, data: memoryview, schema: Schema, description: str) -> Fields:
        message = self.reader.read_message(data, schema, description)
        for name, fix in FORBIDDEN_FIELDS.items():
            _require(name not in message, f"{description} has {name}: {fix}")
        return message

    def _read_domain(self, data: memoryview) -> str:
        # Nodes decide which domains are permitted: exporters import more than they use.
        opset = self.reader.read_message(data, OPSET, "an operator set")
        return _normalise_domain(decode_text(opset.get("domain"), MAX_NAME_BYTES, "a domain"))

    def check_graph(
        self, data: memoryview, depth: int, outer: ChainMap[str, list[float]]
    ) -> tuple[int, tuple[GraphValue, ...], tuple[GraphValue, ...]]:
        """Check a graph, and return the bytes of its weights, its inputs except weights, and its outputs.

        `outer` has the constants of enclosing graphs by name. Raise ModelError if the graph is not permitted.
        """
        if depth > MAX_DEPTH:
            raise ModelError(f"graphs are nested {depth} deep: at most {MAX_DEPTH} are permitted")
        graph = self._read_message(data, GRAPH, "the graph")
        weight_bytes, weights, constants = 0, set(), outer.new_child()
        for node in _bytes_fields(graph, "initializer"):
            name, nbytes, numbers = self.check_tensor(node)
            weight_bytes += nbytes
            weights.add(name)
            if numbers is not None:
                constants[name] = numbers
        values = {
            side: [self._check_declared_value(node) for node in _bytes_fields(graph, side)]
            for side in ("input", "output", "value_info")
        }
        for node in _bytes_fields(graph, "node"):
            weight_bytes += self.check_node(node, constants, depth)
        inputs = tuple(value for value in values["input"] if value.name not in weights)
        return weight_bytes, inputs, tuple(values["output"])

    def check_node(self, data: memoryview, constants: ChainMap[str, list[float]], depth: int) -> int:
        """Check a node, and return the bytes of weights in its attributes. Add its constant to `constants`."""
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise ModelError(f"the graph has more than {MAX_NODES} nodes: export a smaller network")
        node = self.reader.read_message(data, NODE, "a node")
        kind = decode_text(node.get("op_type"), MAX_NAME_BYTES, "an operator")
        domain = _normalise_domain(decode_text(node.get("domain"), MAX_NAME_BYTES, "a domain"))
        if kind not in OPERATORS.get(domain, frozenset()):
            qualified_name = f"{domain}.{kind}" if domain else kind
            problem = f"the graph calls the operator {qualified_name[:80]!r}, which is not permitted"
            raise ModelError(f"{problem}: export the network without this operator")
        inputs = [
            decode_text([attribute], MAX_NAME_BYTES, "a name") for attribute in _bytes_fields(node, "input", MAX_LIST)
        ]
        outputs = [
            decode_text([attribute], MAX_NAME_BYTES, "a name") for attribute in _bytes_fields(node, "output", MAX_LIST)
        ]
        weight_bytes, constant = 0, None
        for attribute in _bytes_fields(node, "attribute", MAX_LIST):
            nbytes, values = self._check_attribute(attribute, kind, constants, depth)
            weight_bytes += nbytes
            constant = values if values is not None else constant
        if kind == "Constant" and outputs and constant is not None:
            constants[outputs[0]] = constant
        _require_bounded_sizes(kind, inputs, constants)
        return weight_bytes

    def _check_attribute(
        self, data: memoryview, kind: str, constants: ChainMap[str, list[float]], depth: int
    ) -> tuple[int, list[float] | None]:
        """Check an attribute, and return the bytes of its weights, and numbers that may be a tensor's shape."""
        attribute = self._read_message(data, ATTRIBUTE, f"an attribute of {kind}")
        name = decode_text(attribute.get("name"), MAX_NAME_BYTES, "a name")
        for value in _bytes_fields(attribute, "strings", MAX_LIST):
            _require(len(value) <= MAX_NAME_BYTES, f"{name} of {kind} has a text of more than {MAX_NAME_BYTES} bytes")
        decode_text(attribute.get("s"), MAX_METADATA_BYTES, f"{name} of {kind}")
        values: list[float] | None = [float(to_signed(value)) for value in attribute.get("i", [])] or None
        if "ints" in attribute:
            values = [float(value) for value in decode_ints(attribute["ints"], MAX_LIST, f"{name} of {kind}")]
        if name in _EDGES and any(abs(value) > MAX_EDGE for value in values or ()):
            raise ModelError(f"{name} of {kind} is above {MAX_EDGE}")
        weight_bytes = 0
        for subgraph in _bytes_fields(attribute, "t"):
            _, _, values = self.check_tensor(subgraph)
        for subgraph in _bytes_fields(attribute, "g"):
            _require(kind == "If", f"{kind} contains a graph, which is permitted only for If")
            weight_bytes += self.check_graph(subgraph, depth + 1, constants)[0]
        return weight_bytes, values

    def check_tensor(self, data: memoryview) -> tuple[str, int, list[float] | None]:
        """Check a tensor, and return its name, its bytes, and its values if they may be a tensor's shape."""
        self.tensors += 1
        _require(self.tensors <= MAX_TENSORS, f"the graph has more than {MAX_TENSORS} tensors")
        tensor = self._read_message(data, TENSOR, "a tensor")
        name = decode_text(tensor.get("name"), MAX_NAME_BYTES, "a name")
        (kind,) = tensor.get("data_type", [0])
        item_bytes = _ITEM_BYTES.get(to_signed(kind))
        if item_bytes is None:
            raise ModelError(f"tensor {name[:80]!r} has type {to_signed(kind)}, which is not permitted: use float32")
        dims = decode_ints(tensor.get("dims", []), MAX_AXES, f"the shape of {name[:80]!r}")
        _require(all(dim >= 0 for dim in dims), f"tensor {name[:80]!r} has a negative size")
        elements = prod(dims)
        _require(elements <= MAX_ELEMENTS, f"tensor {name[:80]!r} has {elements} elements, more than {MAX_ELEMENTS}")
        (location,) = tensor.get("data_location", [0])
        external, raw = bool(tensor.get("external_data")), _bytes_fields(tensor, "raw_data")
        typed = {field: tensor[field] for field in _TYPED_FIELDS if field in tensor}
        storage_count = external + bool(raw) + len(typed)
        if location not in (0, 1) or (location == 1) != external or storage_count > 1:
            raise ModelError(f"tensor {name[:80]!r} has no data, or several data fields: export the model again")
        nbytes = elements * item_bytes
        if external:
            self._check_external_data(name, read_external_location(self.reader, tensor, name), nbytes)
            return name, nbytes, None
        if raw:
            _require(len(raw[0]) == nbytes, f"tensor {name[:80]!r} has {len(raw[0])} bytes, not {nbytes}")
            return name, nbytes, _decode_values(to_signed(kind), raw[0]) if elements <= MAX_SIZES else None
        value_count = sum(_count_elements(field, values) for field, values in typed.items())
        _require(elements <= value_count or not elements, f"tensor {name[:80]!r} has fewer numbers than its shape")
        is_small = "int64_data" in typed and elements <= MAX_SIZES
        values = [float(value) for value in decode_ints(typed["int64_data"], MAX_SIZES, name)] if is_small else None
        return name, nbytes, values

    def _check_external_data(self, name: str, location: ExternalDataLocation, nbytes: int) -> None:
        if not _DIGEST.fullmatch(location.file):
            raise ModelError(
                f"tensor {name[:80]!r} is in file {location.file[:200]!r}: weights may only be in a file of the "
                "graph's folder that is named by its sha256"
            )
        size = self.size(location.file)
        length = size - location.offset if location.length is None else location.length
        if length != nbytes or location.offset + length > size:
            available = f"{max(size - location.offset, 0)} after the offset"
            raise ModelError(f"tensor {name[:80]!r} needs {nbytes} bytes, but {location.file[:12]} has {available}")

    def _check_declared_value(self, data: memoryview) -> GraphValue:
        value = self.reader.read_message(data, VALUE, "a declared value")
        name, kind, dims = decode_text(value.get("name"), MAX_NAME_BYTES, "a name"), 0, None
        for type_data in _bytes_fields(value, "type"):
            for inner in _bytes_fields(
                self._read_message(type_data, TYPE, f"the type of {name[:80]!r}"), "tensor_type"
            ):
                declared = self.reader.read_message(inner, TENSOR_TYPE, "a tensor's type")
                kind = _int_field(declared, "elem_type")
                if kind and kind not in _ITEM_BYTES:
                    raise ModelError(
                        f"value {name[:80]!r} has type {kind}, which is not permitted: export the network with another "
                        "type, such as float32"
                    )
                for shape in _bytes_fields(declared, "shape"):
                    dims = tuple(self._iterate_axis_sizes(shape))
                elements = prod(dim for dim in dims or () if dim is not None)
                problem = f"value {name[:80]!r} is declared with {elements} elements, more than {MAX_ELEMENTS}"
                _require(elements <= MAX_ELEMENTS, problem)
        return GraphValue(name, kind, dims)

    def _iterate_axis_sizes(self, data: memoryview) -> Iterator[int | None]:
        """Yield the size of each axis, None if named or unknown. Exporters write unknown sizes as -1 or 0."""
        for dimension in _bytes_fields(self.reader.read_message(data, SHAPE, "a shape"), "dim", MAX_AXES):
            size = _int_field(self.reader.read_message(dimension, DIM, "an axis"), "dim_value")
            _require(size >= -1, f"a declared axis has the negative size {size}")
            yield size if size > 0 else None


class ExternalDataLocation(NamedTuple):
    file: str  # as the graph names it
    offset: int
    length: int | None  # None for all bytes from `offset`


def read_external_location(reader: ProtobufReader, tensor: Fields, name: str) -> ExternalDataLocation:
    entries = _read_unique_entries(reader, tensor, "external_data", MAX_NAME_BYTES)
    if odd := entries.keys() - {"location", "offset", "length", "checksum"}:
        raise ModelError(f"tensor {name[:80]!r} has the unknown entry {min(odd)[:40]!r} on its external data")
    length = _parse_int(entries["length"], name) if "length" in entries else None
    return ExternalDataLocation(entries.get("location", ""), _parse_int(entries.get("offset", "0"), name), length)


def _read_unique_entries(reader: ProtobufReader, message: Fields, name: str, max_bytes: int) -> dict[str, str]:
    entries: dict[str, str] = {}
    for entry_data in _bytes_fields(message, name, MAX_METADATA_ENTRIES):
        entry = reader.read_message(entry_data, ENTRY, name)
        key = decode_text(entry.get("key"), MAX_NAME_BYTES, name)
        _require(key not in entries, f"{name} has key {key[:80]!r} twice")
        entries[key] = decode_text(entry.get("value"), max_bytes, name)
    return entries


def _require_bounded_sizes(kind: str, inputs: list[str], constants: Mapping[str, list[float]]) -> None:
    """Raise ModelError if the constant inputs of an operator, such as Expand, make its output too large."""

    def constant_values(index: int) -> list[float]:
        return constants.get(inputs[index], []) if index < len(inputs) else []

    sizes = constant_values(_SIZED_BY[kind]) if kind in _SIZED_BY else []
    if kind == "Resize":
        sizes = [*constant_values(2), *constant_values(3)]
    if kind == "Range" and all(len(constant_values(index)) == 1 for index in range(3)):
        (start,), (limit,), (step,) = constant_values(0), constant_values(1), constant_values(2)
        sizes = [abs(limit - start) / abs(step) if step else float("inf")]
    if kind == "Pad":
        _require(all(abs(size) <= MAX_EDGE for size in sizes), f"Pad adds more than {MAX_EDGE} elements")
        return
    largest_size = prod(max(abs(size), 1.0) for size in sizes)
    _require(largest_size <= MAX_ELEMENTS, f"{kind} makes {largest_size:.3g} elements, more than {MAX_ELEMENTS}")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ModelError(problem)


def _int_field(message: Fields, name: str) -> int:
    return to_signed(message.get(name, [0])[0])


def _bytes_fields(message: Fields, name: str, max_count: int = 1 << 30) -> list[memoryview]:
    values = message.get(name, [])
    _require(len(values) <= max_count, f"field {name} occurs {len(values)} times: {max_count} are permitted")
    return [value for value in values if not isinstance(value, int)]


def _normalise_domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def _parse_int(text: str, name: str) -> int:
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise ModelError(f"tensor {name[:80]!r}: offset or length {text[:40]!r} of external data is not a number")
    return int(text)


def _count_elements(name: str, values: list[int | memoryview]) -> int:
    packed = sum(len(value) // _TYPED_BYTES.get(name, 1) for value in values if not isinstance(value, int))
    return packed + sum(isinstance(value, int) for value in values)


def _decode_values(kind: int, raw: memoryview) -> list[float] | None:  # None for types that cannot be sizes
    if kind not in (_INT64, _FLOAT):
        return None
    return [float(value) for (value,) in struct.iter_unpack("<q" if kind == _INT64 else "<f", raw)]
