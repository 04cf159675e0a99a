"""Check an ONNX graph before a session is made of it: it comes over the network, and a session obeys what it says.

ONNX Runtime up to 1.23.2 (what JetPack 6 gets) reads any file that a graph names as its weights, a board's key for
instance; a graph may call operators without end, or state sizes that no memory holds. Permitted is what networks are
made of, and nothing else:

- operators in OPERATORS, in the two domains there; no functions, sequences, strings, sparse tensors or loops;
- weights inside the graph, or in a regular file beside it that is named by its sha256, as fedquilt writes them;
- tensors as large as the bytes that are there for them; nodes, texts, nesting and stated sizes within bounds.

What an operator makes of sizes that are only computed while it runs, this cannot see: the task's memory budget
holds for that. Reads the file itself (`fedquilt.protobuf`), as boards need not have the `onnx` package.
"""

from __future__ import annotations

import mmap
import re
import stat
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from fedquilt.core import ModelError
from fedquilt.onnx_format import (
    ATTRIBUTE,
    DIM,
    ENTRY,
    GRAPH,
    MODEL,
    NODE,
    OPERATORS,
    OPSET,
    SHAPE,
    TENSOR,
    TENSOR_TYPE,
    TYPE,
    UNUSED,
    VALUE,
    Versions,
)
from fedquilt.protobuf import ProtobufError, Reader, Schema, numbers, signed, text

NODES_MOST: Final = 20_000
TENSORS_MOST: Final = 20_000
DEPTH_MOST: Final = 4  # of graphs within graphs: the branches of `If`
ELEMENTS_MOST: Final = 2**31  # of one tensor, or of a size that the graph states
EDGE_MOST: Final = 65_536  # of a kernel, stride, padding or the like
AXES_MOST: Final = 16
LIST_MOST: Final = 4096  # inputs of a node, numbers in an attribute
NAME_MOST: Final = 4096  # bytes
META_MOST: Final = 1 << 20  # bytes of one text in the metadata: a thousand labels
META_ENTRIES_MOST: Final = 64
FILE_MOST: Final = 2**31 - 1  # bytes of one protobuf file
SMALL: Final = 4096  # elements of constants whose values are read, for the sizes that they state

_ITEM_BYTES: Final = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 16: 2}
_TYPED: Final = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")
_TYPED_BYTES: Final = {"float_data": 4, "double_data": 8}  # of an element; variable length: at least 1
_EDGES: Final = frozenset({"dilations", "kernel_shape", "output_padding", "output_shape", "pads", "strides"})
_SIZED_BY: Final = {  # operator -> the input that states the size of what it makes
    "ConstantOfShape": 0,
    "Expand": 1,
    "Tile": 1,
    "OneHot": 1,
    "Pad": 1,
    "Upsample": 1,
}
_INT64, _FLOAT, _BFLOAT16 = 7, 1, 16
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")

Fields: TypeAlias = Mapping[str, list[int | memoryview]]
FileSize: TypeAlias = Callable[[str], int]  # name of a file beside the graph -> its bytes; ModelError: not to be read


Shape: TypeAlias = tuple[int | None, ...] | None
"""A declared shape. None: one axis has no declared size, or the shape no declared number of axes."""


class Value(NamedTuple):
    """A declared input or output of a graph."""

    name: str
    kind: int  # number of its type in onnx.proto; 0: not declared
    shape: Shape


def fits(given: Sequence[int], wanted: Shape) -> bool:
    """Return whether an array of this shape fits a declared shape."""
    return wanted is None or (
        len(given) == len(wanted) and all(size in (None, own) for own, size in zip(given, wanted, strict=True))
    )


def format_shape(shape: Shape) -> str:
    """Return a declared shape as text, such as "(3, any, any)"."""
    return "any" if shape is None else f"({', '.join('any' if size is None else str(size) for size in shape)})"


@dataclass(frozen=True)
class Graph:
    """Metadata, size, versions, inputs and outputs of a checked graph."""

    metadata: Mapping[str, str]
    weight_bytes: int  # of its initializers, inside and beside it
    activation_bytes: int | None  # per example, as its metadata say; None: they do not
    nodes: int
    versions: Versions
    inputs: tuple[Value, ...]  # without those that are initializers
    outputs: tuple[Value, ...]

    @property
    def input_shape(self) -> Shape:
        """Shape of one example, after `require_examples`."""
        shape = self.inputs[0].shape
        return None if shape is None else shape[1:]

    def require_examples(self) -> None:
        """Raise ModelError unless the graph maps a batch of examples to a batch of answers, one tensor each."""
        for values, side, verb in ((self.inputs, "input", "feeds"), (self.outputs, "output", "reads")):
            if len(values) != 1:
                names = ", ".join(repr(each.name[:40]) for each in values[:6]) or "none"
                raise ModelError(
                    f"the graph has {len(values)} {side}s ({names}), and fedquilt {verb} one: export a network with "
                    f"one {side}, and make other {side}s constants or leave them out"
                )
            if values[0].kind == _BFLOAT16:
                named = f"{side} {values[0].name[:80]!r}"
                raise ModelError(f"{named} is bfloat16, which has no type in numpy: export it with float32")
        ((name, _, shape),) = self.inputs
        if shape == ():
            raise ModelError(f"input {name[:80]!r} is a single number: export it with a batch as its first axis")
        if shape and shape[0] not in (None, 1):
            raise ModelError(
                f"input {name[:80]!r} takes exactly {shape[0]} examples at once: export it with a first axis of any "
                "size (`dynamic_axes`, `dynamic_shapes`), or of 1"
            )


def of_file(path: Path) -> Graph:
    """Check a graph whose weights lie inside it or beside it.

    Raises:
        ModelError: unreadable, or not permitted; says what in it, without the graph's name.
    """
    folder = path.parent

    def size(name: str) -> int:
        try:
            found = (folder / name).lstat()
        except OSError as error:
            raise ModelError(f"its weights {name[:12]} are not beside it: {error.strerror}") from None
        if not stat.S_ISREG(found.st_mode):
            raise ModelError(f"its weights {name[:12]} are a link or no file: a graph reads only what lies beside it")
        return found.st_size

    found = of_bytes(mapped(path), size)
    found.require_examples()
    return found


def mapped(path: Path) -> memoryview:
    """The bytes of an ONNX file, of which only those that are read take memory.

    Raises:
        ModelError: it cannot be read, or is empty or too large; without its name.
    """
    try:
        with path.open("rb") as file:
            length = file.seek(0, 2)
            if not 0 < length <= FILE_MOST:
                raise ModelError(f"it has {length} bytes, and an ONNX file has 1 to {FILE_MOST}")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise ModelError(f"it cannot be read: {error.strerror}") from None


def of_bytes(data: bytes | memoryview, size: FileSize | None = None) -> Graph:
    """Check a graph that is in memory.

    Args:
        data: an ONNX file's bytes.
        size: gives the bytes of a file beside the graph; None: there is no such file.

    Raises:
        ModelError: not permitted; says what in it.
    """
    try:
        return _Check(size or _no_file).model(memoryview(data))
    except ProtobufError as error:
        raise ModelError(f"it is no ONNX file as fedquilt writes them: {error}") from None


def _no_file(name: str) -> int:
    raise ModelError("its weights are in a file, and it has none beside it")


@dataclass
class _Check:
    """The checks of one file, and what has been counted on the way."""

    size: FileSize
    reader: Reader = field(default_factory=Reader)
    nodes: int = 0
    tensors: int = 0

    def model(self, data: memoryview) -> Graph:
        found = self._message(data, MODEL, "the model")
        metadata = _entries(self.reader, found, "metadata_props", META_MOST)
        if len(graphs := _pieces(found, "graph")) != 1:
            raise ModelError("it holds no graph")
        said = metadata.get("activation_bytes")
        if said is not None and not re.fullmatch(r"[0-9]{1,15}", said):
            raise ModelError(f"its metadata say activation_bytes = {said[:40]!r}, and a number of bytes is expected")
        weight_bytes, inputs, outputs = self.graph(graphs[0], 0)
        opsets = [self._opset(piece) for piece in _pieces(found, "opset_import", LIST_MOST)]
        domains = [domain[:80] for domain, _ in opsets]
        if "" not in domains or len(set(domains)) != len(domains):
            raise ModelError(f"it imports the operator sets {domains[:6]}: import ONNX's own (''), and each set once")
        return Graph(
            metadata=metadata,
            weight_bytes=weight_bytes,
            activation_bytes=None if said is None else int(said),
            nodes=self.nodes,
            versions=(dict(opsets)[""], _number(found, "ir_version")),
            inputs=inputs,
            outputs=outputs,
        )

    def _message(self, data: memoryview, schema: Schema, what: str) -> Fields:
        """The fields of a message, none of which is one that no network needs."""
        found = self.reader.message(data, schema, what)
        for name, fix in UNUSED.items():
            _require(name not in found, f"{what} has {name}: {fix}")
        return found

    def _opset(self, data: memoryview) -> tuple[str, int]:
        """Domain and version. Nodes decide which domains are permitted: exporters import more than they use."""
        found = self.reader.message(data, OPSET, "an operator set")
        return _domain(text(found.get("domain"), NAME_MOST, "a domain")), _number(found, "version")

    def graph(self, data: memoryview, depth: int) -> tuple[int, tuple[Value, ...], tuple[Value, ...]]:
        """Check a graph and those within. Returns the bytes of its weights, its inputs and its outputs."""
        if depth > DEPTH_MOST:
            raise ModelError(f"graphs lie within graphs {depth} deep, {DEPTH_MOST} are permitted")
        found = self._message(data, GRAPH, "the graph")
        weight_bytes, weights, known = 0, set(), {}
        for piece in _pieces(found, "initializer"):
            name, nbytes, numbers = self.tensor(piece)
            weight_bytes += nbytes
            weights.add(name)
            if numbers is not None:
                known[name] = numbers
        values = {
            side: [self._value(piece) for piece in _pieces(found, side)] for side in ("input", "output", "value_info")
        }
        for piece in _pieces(found, "node"):
            weight_bytes += self.node(piece, known, depth)
        inputs = tuple(value for value in values["input"] if value.name not in weights)
        return weight_bytes, inputs, tuple(values["output"])

    def node(self, data: memoryview, known: dict[str, list[float]], depth: int) -> int:
        """Check a node; the bytes of weights in graphs that it holds. What a `Constant` says is noted in `known`."""
        self.nodes += 1
        if self.nodes > NODES_MOST:
            raise ModelError(f"it has more than {NODES_MOST} nodes")
        found = self.reader.message(data, NODE, "a node")
        kind = text(found.get("op_type"), NAME_MOST, "an operator")
        domain = _domain(text(found.get("domain"), NAME_MOST, "a domain"))
        if kind not in OPERATORS.get(domain, frozenset()):
            whole = f"{domain}.{kind}" if domain else kind
            raise ModelError(
                f"it calls the operator {whole[:80]!r}, which is not among those that are permitted: "
                "export the network without it"
            )
        inputs = [text([piece], NAME_MOST, "a name") for piece in _pieces(found, "input", LIST_MOST)]
        outputs = [text([piece], NAME_MOST, "a name") for piece in _pieces(found, "output", LIST_MOST)]
        weight_bytes, constant = 0, None
        for piece in _pieces(found, "attribute", LIST_MOST):
            nbytes, values = self._attribute(piece, kind, depth)
            weight_bytes += nbytes
            constant = values if values is not None else constant
        if kind == "Constant" and outputs and constant is not None:
            known[outputs[0]] = constant
        _require_sizes(kind, inputs, known)
        return weight_bytes

    def _attribute(self, data: memoryview, kind: str, depth: int) -> tuple[int, list[float] | None]:
        found = self._message(data, ATTRIBUTE, f"an attribute of {kind}")
        name = text(found.get("name"), NAME_MOST, "a name")
        for value in _pieces(found, "strings", LIST_MOST):
            _require(len(value) <= NAME_MOST, f"{kind}: {name} holds a text of more than {NAME_MOST} bytes")
        text(found.get("s"), META_MOST, f"{name} of {kind}")
        values: list[float] | None = [float(signed(value)) for value in found.get("i", [])] or None
        if "ints" in found:
            values = [float(value) for value in numbers(found["ints"], LIST_MOST, f"{name} of {kind}")]
        if name in _EDGES and any(abs(value) > EDGE_MOST for value in values or ()):
            raise ModelError(f"{name} of {kind} is more than {EDGE_MOST}")
        weight_bytes = 0
        for piece in _pieces(found, "t"):
            _, _, values = self.tensor(piece)
        for piece in _pieces(found, "g"):
            _require(kind == "If", f"{kind} holds a graph, which only If may")
            weight_bytes += self.graph(piece, depth + 1)[0]
        return weight_bytes, values

    def tensor(self, data: memoryview) -> tuple[str, int, list[float] | None]:
        """Check a tensor: its name, its bytes, and its values where they are few and may state a size."""
        self.tensors += 1
        _require(self.tensors <= TENSORS_MOST, f"it has more than {TENSORS_MOST} tensors")
        found = self._message(data, TENSOR, "a tensor")
        name = text(found.get("name"), NAME_MOST, "a name")
        (kind,) = found.get("data_type", [0])
        item = _ITEM_BYTES.get(signed(kind))
        if item is None:
            raise ModelError(f"tensor {name[:80]!r} is of type {signed(kind)}, which is no number that is permitted")
        dims = numbers(found.get("dims", []), AXES_MOST, f"the shape of {name[:80]!r}")
        _require(all(dim >= 0 for dim in dims), f"tensor {name[:80]!r} has a negative size")
        elements = prod(dims)
        _require(elements <= ELEMENTS_MOST, f"tensor {name[:80]!r} has {elements} elements")
        (where,) = found.get("data_location", [0])
        external, raw = bool(found.get("external_data")), _pieces(found, "raw_data")
        typed = {each: found[each] for each in _TYPED if each in found}
        places = external + bool(raw) + len(typed)
        if where not in (0, 1) or (where == 1) != external or places > 1:
            raise ModelError(f"tensor {name[:80]!r} does not say in one way where its numbers are")
        if external:
            self._beside(name, read_location(self.reader, found, name), elements * item)
            return name, elements * item, None
        if raw:
            _require(
                len(raw[0]) == elements * item, f"tensor {name[:80]!r} has {len(raw[0])} bytes, not {elements * item}"
            )
            return name, elements * item, _values(signed(kind), raw[0]) if elements <= SMALL else None
        held = sum(_count(each, values) for each, values in typed.items())
        _require(elements <= held or not elements, f"tensor {name[:80]!r} has fewer numbers than its shape")
        small = "int64_data" in typed and elements <= SMALL
        values = [float(value) for value in numbers(typed["int64_data"], SMALL, name)] if small else None
        return name, elements * item, values

    def _beside(self, name: str, where: Location, nbytes: int) -> None:
        if not _DIGEST.fullmatch(where.file):
            raise ModelError(
                f"tensor {name[:80]!r} is in {where.file[:200]!r}: weights may only be in a file beside the graph that "
                "is named by its sha256"
            )
        size = self.size(where.file)
        length = size - where.offset if where.length is None else where.length
        if length != nbytes or where.offset + length > size:
            left = max(size - where.offset, 0)
            raise ModelError(f"tensor {name[:80]!r} takes {nbytes} bytes, and {where.file[:12]} has {left} from there")

    def _value(self, data: memoryview) -> Value:
        """Check a declared input, output or value in between: a tensor of numbers, of a bounded size."""
        found = self.reader.message(data, VALUE, "a declared value")
        name, kind, dims = text(found.get("name"), NAME_MOST, "a name"), 0, None
        for piece in _pieces(found, "type"):
            for inner in _pieces(self._message(piece, TYPE, f"the type of {name[:80]!r}"), "tensor_type"):
                declared = self.reader.message(inner, TENSOR_TYPE, "a tensor's type")
                kind = _number(declared, "elem_type")
                if kind and kind not in _ITEM_BYTES:
                    raise ModelError(
                        f"value {name[:80]!r} is of type {kind}, which is no number that is permitted: export the "
                        "network with another type, such as float32"
                    )
                for shape in _pieces(declared, "shape"):
                    dims = tuple(self._dims(shape))
                elements = prod(dim for dim in dims or () if dim is not None)
                _require(elements <= ELEMENTS_MOST, f"value {name[:80]!r} is declared with {elements} elements")
        return Value(name, kind, dims)

    def _dims(self, data: memoryview) -> Iterator[int | None]:
        """The sizes of a declared shape. None: a name, nothing, or -1 or 0, which exporters write for unknown."""
        for piece in _pieces(self.reader.message(data, SHAPE, "a shape"), "dim", AXES_MOST):
            size = _number(self.reader.message(piece, DIM, "an axis"), "dim_value")
            _require(size >= -1, f"a declared axis has the size {size}")
            yield size if size > 0 else None


class Location(NamedTuple):
    """Where the numbers of a tensor are, outside the graph."""

    file: str  # as the graph names it
    offset: int
    length: int | None  # None: all bytes from `offset` on


def read_location(reader: Reader, tensor: Fields, name: str) -> Location:
    """Read where a tensor's numbers are.

    Args:
        reader: of the graph.
        tensor: fields of the tensor, with "external_data".
        name: of the tensor, for errors.

    Raises:
        ModelError: the tensor says this twice, or not as ONNX does.
        ProtobufError: the fields are no such messages.
    """
    found = _entries(reader, tensor, "external_data", NAME_MOST)
    if odd := found.keys() - {"location", "offset", "length", "checksum"}:
        raise ModelError(f"tensor {name[:80]!r} says {min(odd)[:40]!r} of the file that it is in")
    length = _whole(found["length"], name) if "length" in found else None
    return Location(found.get("location", ""), _whole(found.get("offset", "0"), name), length)


def _entries(reader: Reader, found: Fields, name: str, most: int) -> dict[str, str]:
    entries: dict[str, str] = {}
    for piece in _pieces(found, name, META_ENTRIES_MOST):
        entry = reader.message(piece, ENTRY, name)
        key = text(entry.get("key"), NAME_MOST, name)
        _require(key not in entries, f"{name} says {key[:80]!r} twice")
        entries[key] = text(entry.get("value"), most, name)
    return entries


def _require_sizes(kind: str, inputs: list[str], known: Mapping[str, list[float]]) -> None:
    """Refuse a size, stated as a constant, that no network needs: it would be allocated, often before anything runs."""

    def stated(place: int) -> list[float]:
        return known.get(inputs[place], []) if place < len(inputs) else []

    sizes = stated(_SIZED_BY[kind]) if kind in _SIZED_BY else []
    if kind == "Resize":
        sizes = [*stated(2), *stated(3)]
    if kind == "Range" and all(len(stated(place)) == 1 for place in range(3)):
        (start,), (limit,), (step,) = stated(0), stated(1), stated(2)
        sizes = [abs(limit - start) / abs(step) if step else float("inf")]
    if kind == "Pad":
        _require(all(abs(size) <= EDGE_MOST for size in sizes), f"Pad by more than {EDGE_MOST}")
        return
    most = prod(max(abs(size), 1.0) for size in sizes)
    _require(most <= ELEMENTS_MOST, f"{kind} is to make {most:.3g} elements, {ELEMENTS_MOST} are permitted")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ModelError(otherwise)


def _number(found: Fields, name: str) -> int:
    """A field of kind "int"; 0 where it is absent, as protobuf has it."""
    return signed(found.get(name, [0])[0])


def _pieces(found: Fields, name: str, most: int = 1 << 30) -> list[memoryview]:
    values = found.get(name, [])
    _require(len(values) <= most, f"{name} stands there {len(values)} times, {most} are permitted")
    return [value for value in values if not isinstance(value, int)]


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def _whole(said: str, name: str) -> int:
    if not re.fullmatch(r"[0-9]{1,15}", said):
        raise ModelError(f"tensor {name[:80]!r} is said to be at {said[:40]!r} of its file")
    return int(said)


def _count(name: str, values: list[int | memoryview]) -> int:
    """How many numbers a typed field holds; of variable length, at most."""
    packed = sum(len(value) // _TYPED_BYTES.get(name, 1) for value in values if not isinstance(value, int))
    return packed + sum(isinstance(value, int) for value in values)


def _values(kind: int, raw: memoryview) -> list[float] | None:
    """The numbers of a small tensor that may state a size: int64 and float32."""
    if kind not in (_INT64, _FLOAT):
        return None
    return [float(value) for (value,) in struct.iter_unpack("<q" if kind == _INT64 else "<f", raw)]
