"""Bytes that ONNX Runtime holds for a graph's values, against graphs small enough to count by hand."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from fedquilt.models.stitching.onnx import memory  # noqa: E402

MAP = 4 * 2 * 8 * 8  # bytes of a value (1, 2, 8, 8); every value here has this size unless it says so
KERNEL = np.ones((2, 2, 1, 1), np.float32)


def peak(
    nodes: Sequence[onnx.NodeProto],
    constants: Mapping[str, Any],
    x: Sequence[int] = (2, 8, 8),
    y: Sequence[int] = (2, 8, 8),
) -> int | None:
    """Bytes of a graph from "x" to "y"; shapes are without the batch."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", *x])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", *y])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in {"k": KERNEL, **constants}.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    onnx.checker.check_model(model, full_check=True)
    return memory.peak_activation_bytes(model)


def made(*nodes: tuple[str, str, str], **attributes: Mapping[str, Any]) -> list[onnx.NodeProto]:
    """Nodes ("Conv", "x", "y"), with attributes by the names of their outputs."""
    common = {"Concat": {"axis": 1}, "ReduceMax": {"axes": [1]}}
    return [
        helper.make_node(
            kind, [*given.split(), *["k"][: kind == "Conv"]], [y], **attributes.get(y, common.get(kind, {}))
        )
        for kind, given, y in nodes
    ]


CONVOLVED, WIDE = ("Conv", "x", "a"), ("Concat", "x x x x", "w")
LONG = (CONVOLVED, ("Conv", "a", "c"), ("Concat", "c c c c c c c c", "wide"), ("ReduceMax", "wide", "r"))
BRANCHED = (CONVOLVED, ("Conv", "a", "b"), ("Concat", "b b b b b b b b", "wide"), ("ReduceMax", "wide", "r"))


@pytest.mark.parametrize(
    ("nodes", "maps"),
    [
        # an activation after a convolution takes nothing unless the convolution's result is used elsewhere
        ([CONVOLVED, ("Relu", "a", "b"), ("Add", "a b", "y")], 4),
        ([CONVOLVED, ("Relu", "a", "y")], 2),
        ([CONVOLVED, ("Relu", "a", "b"), ("Conv", "b", "y")], 3),
        # by itself it writes into its input unless that is still used
        ([("Relu", "x", "y")], 2),
        ([CONVOLVED, ("Softmax", "a", "b"), ("Conv", "b", "y")], 3),
        ([CONVOLVED, ("Softmax", "a", "b"), ("Add", "a b", "c"), ("Conv", "c", "y")], 4),
        *(([WIDE, (kind, "w", "b"), ("ReduceMax", "b", "y")], 1 + 4 + 0.5) for kind in ("Softmax", "Elu")),
        # arithmetic never writes into its input
        *(([WIDE, (kind, "w", "b"), ("ReduceMax", "b", "y")], 1 + 4 + 4) for kind in ("Neg", "Erf")),
        ([WIDE, ("Add", "w w", "b"), ("ReduceMax", "b", "y")], 1 + 4 + 4),
        ([CONVOLVED, ("HardSwish", "a", "y")], 4),
        # a buffer is held for a later value of its size: input, c, wide, r, and b in the buffer of a
        ([*LONG, ("Concat", "c r", "y")], 1 + 1 + 8 + 0.5),
        ([*LONG, ("Conv", "c", "b"), ("Concat", "b r", "y")], 1 + 1 + 1 + 8 + 0.5),
        # of several free buffers the latest is taken
        ([*BRANCHED, ("ReduceMax", "b", "d"), ("Conv", "x", "c"), ("Concat", "c r d", "y")], 1 + 1 + 8 + 0.5),
    ],
    ids=str,
)
def test_buffers_of_a_graph_are_those_of_the_runtime(nodes, maps):
    last, given, _ = nodes[-1]
    channels = {"ReduceMax": 1, "Concat": len(given.split()) + 1}.get(last, 2)  # of one value 2, of the others 1
    assert peak(made(*nodes), {}, y=(channels, 8, 8)) == maps * MAP


@pytest.mark.parametrize(("output", "held"), [("y", 5 * 2 + 5 * 3 + 3 * 5 * 3), ("last", 5 * 2 + 3)])
def test_recurrent_layers_compute_all_gates_first(output, held):
    """A GRU of 5 steps, 2 inputs and 3 hidden: input (5 * 2), answers (5 * 3) and three gates of them."""
    shape = {"y": [5, 1, 1, 3], "last": [1, 1, 3]}[output]
    node = helper.make_node("GRU", ["x", "w", "r"], ["y"] if output == "y" else ["", "last"], hidden_size=3)
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)
        for name, dims in (("x", [5, 1, 2]), (output, shape))
    )
    weights = [
        numpy_helper.from_array(np.ones((1, 9, width), np.float32), name) for name, width in (("w", 2), ("r", 3))
    ]
    graph = helper.make_graph([node], "g", [x], [y], weights)
    assert memory.peak_buffer_bytes(graph, {"x": 4 * 5 * 2, output: 4 * int(np.prod(shape))}) == 4 * held


def attention(way: str) -> int | None:
    """Bytes of two layers of v <- softmax(v v' / 2) v, where v is the input (n, 64) as (n, 16, 4).

    Args:
        way: to the reshape's first size: "gather" takes it from x's shape; with "slice", a slice of that shape, and
            "slice and gather" the runtime cannot tell that it is n.
    """
    nodes = [("Shape", "x", "s")]
    if "slice" in way:
        nodes.append(("Slice", "s zero one", "n" if way == "slice" else "cut"))
    if "gather" in way:
        nodes += [("Gather", "s first" if way == "gather" else "cut first", "g"), ("Unsqueeze", "g zero", "n")]
    nodes += [("Concat", "n rows", "to"), ("Reshape", "x to", "v0")]
    for v, after, i in (("v0", "v1", 0), ("v1", "y", 1)):
        nodes += [("Transpose", v, f"t{i}"), ("MatMul", f"{v} t{i}", f"p{i}"), ("Div", f"p{i} two", f"h{i}")]
        nodes += [("Softmax", f"h{i}", f"s{i}"), ("MatMul", f"s{i} {v}", after)]
    turned = {"perm": [0, 2, 1]}
    numbers = {"zero": [0], "one": [1], "rows": [16, 4], "first": 0, "two": np.float32(2)}
    return peak(made(*nodes, to={"axis": 0}, t0=turned, t1=turned), numbers, (64,), (16, 4))


def test_softmax_writes_into_its_input_where_the_runtime_knows_its_shape():
    few = 64  # bytes of shapes that are held beside
    # input, v, v', scores, softmax of the scaled scores, next v
    assert 0 <= (attention("gather") or 0) - 4 * (64 + 64 + 64 + 256 + 256 + 64) <= few
    for way in ("slice", "slice and gather"):
        assert 0 <= (attention(way) or 0) - 4 * (64 + 64 + 256 + 256) <= few, way  # softmax beside its input


def test_a_buffer_is_held_only_for_a_value_of_the_very_same_shape():
    nodes = [CONVOLVED, ("Transpose", "a", "b"), ("Neg", "b", "c"), ("ReduceMax", "c", "d"), ("Conv", "x", "e")]
    attributes = {"b": {"perm": [0, 2, 3, 1]}, "d": {"axes": [1, 2, 3], "keepdims": 1}}
    # x, b and c beside a, which is held for e
    assert peak(made(*nodes, ("Add", "e d", "y"), **attributes), {}) == 4 * MAP


def test_shapes_that_depend_on_the_batch_are_inferred():
    nodes = [("Shape", "x", "s"), ("Concat", "s rest", "to"), ("Reshape", "x to", "f"), ("Softmax", "f", "y")]
    model = made(*nodes, s={"start": 0, "end": 1}, to={"axis": 0})
    assert MAP * 2 <= (peak(model, {"rest": [128]}, y=(128,)) or 0) <= MAP * 3 + 64


def test_padding_whose_widths_are_turned_is_inferred():
    none = {"value": numpy_helper.from_array(np.array([0], np.int64))}
    nodes = [
        ("ConstantOfShape", "length", "none"),
        ("Concat", "none befores", "all"),
        ("Reshape", "all square", "pairs"),
    ]
    nodes += [("Transpose", "pairs", "turned"), ("Reshape", "turned flat", "widths"), CONVOLVED]
    nodes += [("Pad", "a widths", "b"), ("Conv", "b", "y")]
    numbers = {"length": [2], "befores": [0, 0, 0, 0, 0, 1], "square": [4, 2], "flat": [-1]}
    model = made(*nodes, none=none, all={"axis": 0}, turned={"perm": [1, 0]})
    assert 0 <= (peak(model, numbers, y=(2, 8, 9)) or 0) - (MAP + 2 * MAP * 9 // 8) <= 64
