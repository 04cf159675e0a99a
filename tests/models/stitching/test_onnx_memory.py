"""Bytes that ONNX Runtime holds for a graph's values, against graphs small enough to count by hand."""

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from fedquilt.models.stitching.onnx import memory  # noqa: E402

KERNEL = numpy_helper.from_array(np.ones((2, 2, 1, 1), np.float32), "k")
MAP = 4 * 2 * 8 * 8  # bytes of a value (1, 2, 8, 8); every value here has this size unless it says so


def held(*nodes: tuple[str, str, str], channels: int = 2) -> int | None:
    """Bytes of a graph of nodes ("Conv", "x", "y"), whose input is "x" and output "y"."""
    made = [
        helper.make_node(kind, [*inputs.split(), *(["k"] if kind == "Conv" else [])], [output], **axis(kind))
        for kind, inputs, output in nodes
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2, 8, 8]) for name in "xy")
    y.type.tensor_type.shape.dim[1].dim_value = channels
    graph = helper.make_graph(made, "g", [x], [y], [KERNEL])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    onnx.checker.check_model(model, full_check=True)
    return memory.peak_activation_bytes(model)


def axis(kind: str) -> dict[str, Any]:
    return {"Concat": {"axis": 1}, "ReduceMax": {"axes": [1]}}.get(kind, {})


def test_an_activation_after_a_convolution_takes_nothing():
    assert held(("Conv", "x", "a"), ("Relu", "a", "y")) == 2 * MAP
    assert held(("Conv", "x", "a"), ("Relu", "a", "b"), ("Conv", "b", "y")) == 3 * MAP


def test_an_activation_by_itself_writes_into_its_input_unless_that_is_still_used():
    assert held(("Relu", "x", "y")) == 2 * MAP
    assert held(("Conv", "x", "a"), ("Softmax", "a", "b"), ("Conv", "b", "y")) == 3 * MAP
    assert held(("Conv", "x", "a"), ("Softmax", "a", "b"), ("Add", "a b", "c"), ("Conv", "c", "y")) == 4 * MAP


def test_arithmetic_never_writes_into_its_input():
    wide = ("Concat", "x x x x", "w")
    for kind, count in {"Softmax": 1 + 4 + 0.5, "Elu": 1 + 4 + 0.5, "Neg": 1 + 4 + 4, "Erf": 1 + 4 + 4}.items():
        assert held(wide, (kind, "w", "b"), ("ReduceMax", "b", "y"), channels=1) == count * MAP, kind
    assert held(wide, ("Add", "w w", "b"), ("ReduceMax", "b", "y"), channels=1) == (1 + 4 + 4) * MAP


def test_x_times_its_sigmoid_is_one_operation():
    swish = ("Sigmoid", "a", "s"), ("Mul", "a s", "b")
    assert held(("Conv", "x", "a"), *swish, ("Conv", "b", "y")) == 3 * MAP


def test_hard_swish_computes_its_gate_beside():
    assert held(("Conv", "x", "a"), ("HardSwish", "a", "y")) == 4 * MAP


def test_a_buffer_is_held_for_a_later_value_of_its_size():
    nodes = (("Conv", "x", "a"), ("Conv", "a", "c"), ("Concat", "c c c c c c c c", "wide"), ("ReduceMax", "wide", "r"))
    end = ("Concat", "c r", "y")
    assert held(*nodes, end, channels=3) == (1 + 1 + 8 + 0.5) * MAP  # input, c, wide, r
    later = ("Conv", "c", "b"), ("Concat", "b r", "y")  # b takes the buffer of a, which is held until then
    assert held(*nodes, *later, channels=3) == (1 + 1 + 1 + 8 + 0.5) * MAP


def test_of_several_free_buffers_the_latest_is_taken():
    nodes = (
        ("Conv", "x", "a"),
        ("Conv", "a", "b"),
        ("Concat", "b b b b b b b b", "wide"),
        ("ReduceMax", "wide", "r"),
        ("ReduceMax", "b", "d"),
        ("Conv", "x", "c"),
        ("Concat", "c r d", "y"),
    )
    assert held(*nodes, channels=4) == (1 + 1 + 8 + 0.5) * MAP  # input, b, wide, r


def test_recurrent_layers_compute_all_gates_first():
    """A GRU of 5 steps, 2 inputs and 3 hidden: input (5 * 2), answers (5 * 3) and three gates of them."""
    w, r = (np.ones((1, 9, width), np.float32) for width in (2, 3))
    graph = helper.make_graph(
        [helper.make_node("GRU", ["x", "w", "r"], ["y"], hidden_size=3)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [5, 1, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [5, 1, 1, 3])],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(r, "r")],
    )
    sizes = {"x": 4 * 5 * 2, "y": 4 * 5 * 3}
    assert memory.peak_buffer_bytes(graph, sizes) == 4 * (5 * 2 + 5 * 3 + 3 * 5 * 3)


def test_a_recurrent_layer_of_which_only_the_last_answer_is_used_is_counted():
    graph = helper.make_graph(
        [helper.make_node("GRU", ["x", "w", "r"], ["", "last"], hidden_size=3)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [5, 1, 2])],
        [helper.make_tensor_value_info("last", TensorProto.FLOAT, [1, 1, 3])],
        [numpy_helper.from_array(np.ones((1, 9, width), np.float32), name) for name, width in (("w", 2), ("r", 3))],
    )
    assert memory.peak_buffer_bytes(graph, {"x": 4 * 5 * 2, "last": 4 * 3}) == 4 * (5 * 2 + 3)


def attention(way: str) -> int | None:
    """Bytes of two layers of v <- softmax(v v' / 2) v, where v is the input (n, 64) as (n, 16, 4).

    Args:
        way: to the reshape's first size: "gather" takes it from x's shape; with "slice", a slice of that shape, and
            "slice and gather" the runtime cannot tell that it is n.
    """
    numbers = {"zero": [0], "one": [1], "rows": [16, 4], "first": 0}
    kept = [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in numbers.items()]
    kept.append(numpy_helper.from_array(np.array(2, np.float32), "two"))
    nodes = [helper.make_node("Shape", ["x"], ["s"])]
    if "slice" in way:
        nodes.append(helper.make_node("Slice", ["s", "zero", "one"], ["n" if way == "slice" else "cut"]))
    if "gather" in way:
        nodes.append(helper.make_node("Gather", ["s" if way == "gather" else "cut", "first"], ["g"]))
        nodes.append(helper.make_node("Unsqueeze", ["g", "zero"], ["n"]))
    nodes.append(helper.make_node("Concat", ["n", "rows"], ["to"], axis=0))
    nodes.append(helper.make_node("Reshape", ["x", "to"], ["v0"]))
    for v, after, layer in (("v0", "v1", "0"), ("v1", "y", "1")):
        k, products, halves, shares = (kind + layer for kind in ("k", "products", "halves", "shares"))
        nodes.append(helper.make_node("Transpose", [v], [k], perm=[0, 2, 1]))
        nodes.append(helper.make_node("MatMul", [v, k], [products]))
        nodes.append(helper.make_node("Div", [products, "two"], [halves]))
        nodes.append(helper.make_node("Softmax", [halves], [shares]))
        nodes.append(helper.make_node("MatMul", [shares, v], [after]))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 16, 4])
    graph = helper.make_graph(nodes, "g", [x], [y], kept)
    return memory.peak_activation_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))


def test_of_attention_only_one_square_is_held_where_the_runtime_knows_its_shape():
    few = 64  # bytes of shapes that are held beside
    assert 0 <= (attention("gather") or 0) - 4 * (64 + 64 + 256 + 64) <= few  # input, v, square, next v
    for way in ("slice", "slice and gather"):
        assert 0 <= (attention(way) or 0) - 4 * (64 + 64 + 256 + 256) <= few, way  # softmax beside its input


def test_a_buffer_is_held_only_for_a_value_of_the_very_same_shape():
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["a"]),
        helper.make_node("Transpose", ["a"], ["b"], perm=[0, 2, 3, 1]),
        helper.make_node("Neg", ["b"], ["c"]),
        helper.make_node("ReduceMax", ["c"], ["d"], axes=[1, 2, 3], keepdims=1),
        helper.make_node("Conv", ["x", "k"], ["e"]),
        helper.make_node("Add", ["e", "d"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2, 8, 8]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], [KERNEL])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    assert memory.peak_activation_bytes(model) == 4 * MAP  # x, b and c beside a, which is held for e


@pytest.mark.parametrize(("half_first", "bias"), [(False, False), (True, False), (False, True), (True, True)])
def test_x_times_its_error_function_is_one_operation(half_first, bias):
    numbers = {"root": np.sqrt(2), "one": 1.0, "half": 0.5, "k8": np.ones(8)}
    kept = [KERNEL, *(numpy_helper.from_array(np.array(value, np.float32), name) for name, value in numbers.items())]
    nodes = [helper.make_node("Conv", ["x", "k"], ["a"])]
    if bias:
        nodes.append(helper.make_node("Add", ["a", "k8"], ["b"]))
    v = "b" if bias else "a"
    nodes += [helper.make_node("Div", [v, "root"], ["c"]), helper.make_node("Erf", ["c"], ["d"])]
    nodes.append(helper.make_node("Add", ["d", "one"], ["e"]))
    if half_first:
        nodes += [helper.make_node("Mul", [v, "half"], ["f"]), helper.make_node("Mul", ["f", "e"], ["g"])]
    else:
        nodes += [helper.make_node("Mul", [v, "e"], ["f"]), helper.make_node("Mul", ["f", "half"], ["g"])]
    nodes.append(helper.make_node("Conv", ["g", "k"], ["y"]))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2, 8, 8]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], kept)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    assert memory.peak_activation_bytes(model) == (4 if bias else 3) * MAP


def test_shapes_that_depend_on_the_batch_are_inferred():
    shape = helper.make_node("Shape", ["x"], ["s"], start=0, end=1)
    rest = numpy_helper.from_array(np.array([128], np.int64), "rest")
    whole = helper.make_node("Concat", ["s", "rest"], ["to"], axis=0)
    nodes = [shape, whole, helper.make_node("Reshape", ["x", "to"], ["f"]), helper.make_node("Softmax", ["f"], ["y"])]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2, 8, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 128])
    graph = helper.make_graph(nodes, "g", [x], [y], [rest])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    assert MAP * 2 <= (memory.peak_activation_bytes(model) or 0) <= MAP * 3 + 64


def test_padding_whose_widths_are_turned_is_inferred():
    numbers = {"length": [2], "befores": [0, 0, 0, 0, 0, 1], "square": [4, 2], "flat": [-1]}
    kept = [KERNEL, *(numpy_helper.from_array(np.array(value, np.int64), name) for name, value in numbers.items())]
    nodes = [
        helper.make_node(
            "ConstantOfShape", ["length"], ["none"], value=numpy_helper.from_array(np.array([0], np.int64))
        ),
        helper.make_node("Concat", ["none", "befores"], ["all"], axis=0),
        helper.make_node("Reshape", ["all", "square"], ["pairs"]),
        helper.make_node("Transpose", ["pairs"], ["turned"], perm=[1, 0]),
        helper.make_node("Reshape", ["turned", "flat"], ["widths"]),
        helper.make_node("Conv", ["x", "k"], ["a"]),
        helper.make_node("Pad", ["a", "widths"], ["b"]),
        helper.make_node("Conv", ["b", "k"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2, 8, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2, 8, 9])
    graph = helper.make_graph(nodes, "g", [x], [y], kept)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    wide = MAP * 9 // 8
    assert 0 <= (memory.peak_activation_bytes(model) or 0) - (MAP + 2 * wide) <= 64
