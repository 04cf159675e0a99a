"""Strict reader and writer of ONNX files without a library, and the permitted part of the format.

Messages are bytes, memoryviews or mapped files, and are not copied, so that a file of 2 GB needs only the pages of its
headers. Unknown fields, repeated single fields and unexpected wire types are refused, because other readers may
interpret them differently. Field numbers are those of onnx.proto (IR version 8 to 14).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast

Kind: TypeAlias = Literal["int", "float", "bytes", "ints", "floats", "doubles", "many"]
Schema: TypeAlias = Mapping[int, tuple[str, Kind]]
"""Field number -> name and kind. An "int", a "float" (32 bits) and "bytes" (a text or a message) occur at most once.
"ints" (variable length), "floats" (4 bytes) and "doubles" (8 bytes) are numbers, packed or repeated. "many" is repeated
"bytes"."""
Pieces: TypeAlias = Sequence[bytes | memoryview]
"""Bytes of a message or text in several parts."""

MAX_FIELDS: Final = 1_000_000  # limit for one file, which takes about a second to read
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_WIRES: Final[Mapping[Kind, tuple[int, ...]]] = {
    "int": (_VARINT,),
    "float": (_FOUR,),
    "bytes": (_BYTES,),
    "ints": (_VARINT, _BYTES),
    "floats": (_FOUR, _BYTES),
    "doubles": (_EIGHT, _BYTES),
    "many": (_BYTES,),
}
_SINGLE_KINDS: Final = frozenset({"int", "float", "bytes"})


class ProtobufError(ValueError): ...


@dataclass
class ProtobufReader:
    """Reader of the messages of one file, with a limit on the number of fields in total."""

    remaining_fields: int = MAX_FIELDS

    def read_message(self, data: memoryview, schema: Schema, description: str) -> dict[str, list[int | memoryview]]:
        """Return the values of each field by name. Packed numbers remain bytes. Unknown fields are errors."""
        message: dict[str, list[int | memoryview]] = {}
        for number, wire, value in self._read_fields(data, description):
            field = schema.get(number)
            if field is None:
                raise ProtobufError(f"{description} has unknown field {number}")
            name, kind = field
            if wire not in _WIRES[kind]:
                raise ProtobufError(f"{description}: field {name!r} has wire type {wire}")
            values = message.setdefault(name, [])
            if values and kind in _SINGLE_KINDS:
                raise ProtobufError(f"{description} has field {name!r} twice")
            values.append(value)
        return message

    def _read_fields(self, data: memoryview, description: str) -> Iterator[tuple[int, int, int | memoryview]]:
        position, end = 0, len(data)
        while position < end:
            self.remaining_fields -= 1
            if self.remaining_fields < 0:
                raise ProtobufError(f"the file has more than {MAX_FIELDS} fields")
            tag, position = _read_varint(data, position, description)
            number, wire = tag >> 3, tag & 7
            value: int | memoryview
            if wire == _VARINT:
                value, position = _read_varint(data, position, description)
            else:
                if wire == _BYTES:
                    size, position = _read_varint(data, position, description)
                elif wire in (_EIGHT, _FOUR):
                    size = 8 if wire == _EIGHT else 4
                else:
                    raise ProtobufError(f"{description} has wire type {wire}")
                if size > end - position:
                    raise ProtobufError(f"{description} is truncated")
                value, position = data[position : position + size], position + size
            yield number, wire, value


def _read_varint(data: memoryview, position: int, description: str) -> tuple[int, int]:
    """Return the number at a position, and the position after the number."""
    value = shift = 0
    while position < len(data) and shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, position
        shift += 7
    raise ProtobufError(f"{description} is truncated")


def encode_message(
    fields: Mapping[str, Sequence[int | memoryview | Pieces]], schema: Schema
) -> list[bytes | memoryview]:
    """Return a message in pieces, with fields in the order of the schema and without copying."""
    encoded: list[bytes | memoryview] = []
    for number, (name, kind) in schema.items():
        if name not in fields:
            continue
        if kind not in ("int", "ints", "bytes", "many"):
            raise ProtobufError(f"{name} has kind {kind}, which cannot be encoded")
        for value in fields[name]:
            if isinstance(value, int):
                encoded.append(_encode_varint(number << 3 | _VARINT) + _encode_varint(value))
                continue
            parts = [value] if isinstance(value, memoryview) else value
            encoded.append(_encode_varint(number << 3 | _BYTES) + _encode_varint(sum(len(part) for part in parts)))
            encoded += parts
    return encoded


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*encoded, value))


def to_signed(value: int | memoryview) -> int:
    """Return a number read from a file as signed 64-bit integer, or raise ProtobufError for bytes."""
    if not isinstance(value, int):
        raise ProtobufError("a field has bytes instead of a number")
    return value - (1 << 64) if value >= 1 << 63 else value


def decode_ints(values: list[int | memoryview], max_count: int, description: str) -> list[int]:
    """Return a field of kind "ints" as signed numbers. Raise ProtobufError for more than `max_count`."""
    numbers: list[int] = []
    for value in values:
        if isinstance(value, int):
            numbers.append(to_signed(value))
        else:
            position = 0
            while position < len(value) and len(numbers) <= max_count:
                number, position = _read_varint(value, position, description)
                numbers.append(to_signed(number))
        if len(numbers) > max_count:
            raise ProtobufError(f"{description} has more than {max_count} numbers")
    return numbers


def decode_text(values: list[int | memoryview] | None, max_bytes: int, description: str) -> str:
    """Return a "bytes" field as text, or "" if absent. Raise ProtobufError if it exceeds `max_bytes`."""
    if not values:
        return ""
    (value,) = values
    if isinstance(value, int) or len(value) > max_bytes:
        raise ProtobufError(f"{description} is a text of more than {max_bytes} bytes")
    try:
        return bytes(value).decode()
    except UnicodeDecodeError:
        raise ProtobufError(f"{description} is not Unicode") from None


_MATHS = """Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast
    CastLike Ceil Celu Clip Cos Cosh CumSum Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid
    HardSwish Hardmax IsInf IsNaN LeakyRelu Less LessOrEqual Log LogSoftmax Max Mean Min Mish Mod Mul Neg Not Or PRelu
    Pow Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softmax Softplus Softsign Sqrt Sub Sum Swish Tan Tanh
    ThresholdedRelu Where Xor"""
_LAYERS = """AveragePool BatchNormalization Conv ConvTranspose DeformConv Dropout Einsum GRU Gemm GlobalAveragePool
    GlobalLpPool GlobalMaxPool GridSample GroupNormalization InstanceNormalization LRN LSTM LayerNormalization
    LpNormalization LpPool MatMul MaxPool MeanVarianceNormalization RMSNormalization RNN RoiAlign"""
_SHAPES = """ArgMax ArgMin Compress Concat Constant ConstantOfShape DepthToSpace Expand EyeLike Flatten Gather
    GatherElements GatherND Identity If NonZero OneHot Pad Range Reshape Resize ReverseSequence ScatterElements
    ScatterND Shape Size Slice SpaceToDepth Split Squeeze Tile TopK Transpose Trilu Unsqueeze Upsample"""
_REDUCTIONS = """ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
    ReduceSumSquare"""
_EIGHT_BITS = """ConvInteger DequantizeLinear DynamicQuantizeLinear MatMulInteger QLinearConv QLinearMatMul
    QuantizeLinear"""
_ONNX_RUNTIME = """QGemm QLinearAdd QLinearAveragePool QLinearConcat QLinearGlobalAveragePool QLinearLeakyRelu
    QLinearMul QLinearSigmoid QLinearSoftmax QLinearWhere"""

OPERATORS: Final[Mapping[str, frozenset[str]]] = {
    "": frozenset(" ".join((_MATHS, _LAYERS, _SHAPES, _REDUCTIONS, _EIGHT_BITS)).split()),
    "com.microsoft": frozenset(_ONNX_RUNTIME.split()),  # operators that ONNX Runtime's quantization writes
}
"""Domain -> permitted operators. "ai.onnx" is another name of the default domain."""


def _schema(*fields: str) -> Schema:
    """Return a schema from texts of number, name and kind, such as "1 key bytes, 2 value bytes"."""
    rows = (field.split() for field in ", ".join(fields).split(", "))
    return {int(number): (name, cast(Kind, kind)) for number, name, kind in rows}


ENTRY: Final = _schema("1 key bytes, 2 value bytes")
OPSET: Final = _schema("1 domain bytes, 2 version int")
MODEL: Final = _schema(
    "1 ir_version int, 2 producer_name bytes, 3 producer_version bytes, 4 domain bytes, 5 model_version int",
    "6 doc_string bytes, 7 graph bytes, 8 opset_import many, 14 metadata_props many, 20 training_info many",
    "25 functions many",
)
GRAPH: Final = _schema(
    "1 node many, 2 name bytes, 5 initializer many, 10 doc_string bytes, 11 input many, 12 output many",
    "13 value_info many, 14 quantization_annotation many, 15 sparse_initializer many, 16 metadata_props many",
)
NODE: Final = _schema(
    "1 input many, 2 output many, 3 name bytes, 4 op_type bytes, 5 attribute many, 6 doc_string bytes",
    "7 domain bytes, 9 metadata_props many",
)
ATTRIBUTE: Final = _schema(
    "1 name bytes, 2 f float, 3 i int, 4 s bytes, 5 t bytes, 6 g bytes, 7 floats floats, 8 ints ints",
    "9 strings many, 10 tensors many, 11 graphs many, 13 doc_string bytes, 20 type int",
)
TENSOR: Final = _schema(
    "1 dims ints, 2 data_type int, 4 float_data floats, 5 int32_data ints, 6 string_data many",
    "7 int64_data ints, 8 name bytes, 9 raw_data bytes, 10 double_data doubles, 11 uint64_data ints",
    "12 doc_string bytes, 13 external_data many, 14 data_location int, 16 metadata_props many",
)
VALUE: Final = _schema("1 name bytes, 2 type bytes, 3 doc_string bytes, 4 metadata_props many")
TYPE: Final = _schema(
    "1 tensor_type bytes, 4 sequence_type bytes, 5 map_type bytes, 6 denotation bytes",
    "8 sparse_tensor_type bytes, 9 optional_type bytes",
)
TENSOR_TYPE: Final = _schema("1 elem_type int, 2 shape bytes")
SHAPE: Final = _schema("1 dim many")
DIM: Final = _schema("1 dim_value int, 2 dim_param bytes, 3 denotation bytes")

_TENSORS_FIX: Final = "export a network whose inputs and outputs are only numeric tensors"
FORBIDDEN_FIELDS: Final[Mapping[str, str]] = {
    "functions": "inline them with `onnx.inliner.inline_local_functions`",
    "training_info": "export the network for inference",
    "sparse_initializer": "export dense weights",
    "string_data": _TENSORS_FIX,
    "tensors": _TENSORS_FIX,
    "graphs": _TENSORS_FIX,
    "sequence_type": _TENSORS_FIX,
    "map_type": _TENSORS_FIX,
    "sparse_tensor_type": _TENSORS_FIX,
    "optional_type": _TENSORS_FIX,
}
"""Forbidden field -> fix."""
