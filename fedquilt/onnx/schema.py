"""Permitted part of the ONNX format: operators, message fields and supported versions.

Field numbers are those of onnx.proto (IR version 8 to 14). `UNUSED` lists fields that exporters write but graphs must
not have. Any other unlisted field is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, TypeAlias

from fedquilt.onnx.protobuf import Schema

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
_RUNTIMES_OWN = """QGemm QLinearAdd QLinearAveragePool QLinearConcat QLinearGlobalAveragePool QLinearLeakyRelu
    QLinearMul QLinearSigmoid QLinearSoftmax QLinearWhere"""

OPERATORS: Final[Mapping[str, frozenset[str]]] = {
    "": frozenset(" ".join((_MATHS, _LAYERS, _SHAPES, _REDUCTIONS, _EIGHT_BITS)).split()),
    "com.microsoft": frozenset(_RUNTIMES_OWN.split()),  # what ONNX Runtime's quantization writes
}
"""Domain -> operators that a graph may call. The default domain's other name, "ai.onnx", is taken as it."""

ENTRY: Final[Schema] = {1: ("key", "bytes"), 2: ("value", "bytes")}
OPSET: Final[Schema] = {1: ("domain", "bytes"), 2: ("version", "int")}
MODEL: Final[Schema] = {
    1: ("ir_version", "int"),
    2: ("producer_name", "bytes"),
    3: ("producer_version", "bytes"),
    4: ("domain", "bytes"),
    5: ("model_version", "int"),
    6: ("doc_string", "bytes"),
    7: ("graph", "bytes"),
    8: ("opset_import", "many"),
    14: ("metadata_props", "many"),
    20: ("training_info", "many"),
    25: ("functions", "many"),
}
GRAPH: Final[Schema] = {
    1: ("node", "many"),
    2: ("name", "bytes"),
    5: ("initializer", "many"),
    10: ("doc_string", "bytes"),
    11: ("input", "many"),
    12: ("output", "many"),
    13: ("value_info", "many"),
    14: ("quantization_annotation", "many"),
    15: ("sparse_initializer", "many"),
    16: ("metadata_props", "many"),
}
NODE: Final[Schema] = {
    1: ("input", "many"),
    2: ("output", "many"),
    3: ("name", "bytes"),
    4: ("op_type", "bytes"),
    5: ("attribute", "many"),
    6: ("doc_string", "bytes"),
    7: ("domain", "bytes"),
    9: ("metadata_props", "many"),
}
ATTRIBUTE: Final[Schema] = {
    1: ("name", "bytes"),
    2: ("f", "float"),
    3: ("i", "int"),
    4: ("s", "bytes"),
    5: ("t", "bytes"),
    6: ("g", "bytes"),
    7: ("floats", "floats"),
    8: ("ints", "ints"),
    9: ("strings", "many"),
    10: ("tensors", "many"),
    11: ("graphs", "many"),
    13: ("doc_string", "bytes"),
    20: ("type", "int"),
}
TENSOR: Final[Schema] = {
    1: ("dims", "ints"),
    2: ("data_type", "int"),
    4: ("float_data", "floats"),
    5: ("int32_data", "ints"),
    6: ("string_data", "many"),
    7: ("int64_data", "ints"),
    8: ("name", "bytes"),
    9: ("raw_data", "bytes"),
    10: ("double_data", "doubles"),
    11: ("uint64_data", "ints"),
    12: ("doc_string", "bytes"),
    13: ("external_data", "many"),
    14: ("data_location", "int"),
    16: ("metadata_props", "many"),
}
VALUE: Final[Schema] = {
    1: ("name", "bytes"),
    2: ("type", "bytes"),
    3: ("doc_string", "bytes"),
    4: ("metadata_props", "many"),
}
TYPE: Final[Schema] = {
    1: ("tensor_type", "bytes"),
    4: ("sequence_type", "bytes"),
    5: ("map_type", "bytes"),
    6: ("denotation", "bytes"),
    8: ("sparse_tensor_type", "bytes"),
    9: ("optional_type", "bytes"),
}
TENSOR_TYPE: Final[Schema] = {1: ("elem_type", "int"), 2: ("shape", "bytes")}
SHAPE: Final[Schema] = {1: ("dim", "many")}
DIM: Final[Schema] = {1: ("dim_value", "int"), 2: ("dim_param", "bytes"), 3: ("denotation", "bytes")}

_TENSORS: Final = "export a network that takes and gives tensors of numbers alone"
UNUSED: Final[Mapping[str, str]] = {
    "functions": "inline them, `onnx.inliner.inline_local_functions` does",
    "training_info": "export the network for inference",
    "sparse_initializer": "export dense weights",
    "string_data": _TENSORS,
    "tensors": _TENSORS,
    "graphs": _TENSORS,
    "sequence_type": _TENSORS,
    "map_type": _TENSORS,
    "sparse_tensor_type": _TENSORS,
    "optional_type": _TENSORS,
}
"""Field that no graph may have -> how to do without."""

Versions: TypeAlias = tuple[int, int]
"""Opset and IR version of a graph."""

RUNTIMES: Final[Mapping[tuple[int, int], Versions]] = {
    (1, 19): (21, 10),
    (1, 21): (22, 10),
    (1, 23): (23, 11),
    (1, 24): (25, 13),
    (1, 25): (26, 13),
    (1, 32): (28, 14),
}
"""Release of ONNX Runtime -> greatest opset and IR version that it and later ones load. The last one is the newest."""


def explain_unsupported(graph: Versions, libraries: Mapping[str, str]) -> str:
    """Return why a device's ONNX Runtime cannot load a graph, or "" if it can or is unknown.

    Args:
        graph: Opset and IR version of the graph.
        libraries: Versions of the device's libraries (`fedquilt.core.Profile.versions`).
    """
    found = {}
    for name in ("onnxruntime", "onnxruntime-gpu"):
        if numbers := re.match(r"(\d{1,4})\.(\d{1,4})", libraries.get(name, "")):
            found[int(numbers[1]), int(numbers[2])] = f"{name} {libraries[name][:20]}"
    release = max(found, default=(0, 0))  # with both installed, the device may use the newer one
    if not min(RUNTIMES) <= release <= max(RUNTIMES):
        return ""
    opset, ir_version = RUNTIMES[max(row for row in RUNTIMES if row <= release)]
    if graph[0] <= opset and graph[1] <= ir_version:
        return ""
    return (
        f"{found[release]} loads opset {opset} and IR version {ir_version} at most, and the model has opset {graph[0]} "
        f"and IR version {graph[1]}: export it with opset_version={min(graph[0], opset)} and that IR version, or "
        "install a newer ONNX Runtime there"
    )
