"""Graphs that torch would not write, cut into tiles or left alone."""

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from fedquilt.models.stitching.onnx import memory, tiled_linear  # noqa: E402


def product(bias: tuple[int, ...] = (6,), **attributes: Any) -> onnx.ModelProto:
    """One Gemm of (n, 4), or of the transpose of (4, 3), and weights 4 x 6, all ones."""
    arrays = {"weights": np.ones((4, 6), np.float32), "bias": np.ones(bias, np.float32)}
    x = [4, 3] if "transA" in attributes else ["n", 4]
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", *arrays], ["y"], **attributes)],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 6])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def test_rows_are_taken_from_weights_that_lie_either_way():
    ((first, *others),) = tiled_linear.split_into_stages(product(), 4 * 10)
    weights = {tensor.name: numpy_helper.to_array(tensor).shape for tensor in first.graph.initializer}
    assert (weights, len(others)) == ({"weights": (2, 4), "bias": (2,)}, 2)


@pytest.mark.parametrize(
    "model",
    [product(alpha=2.0), product(beta=0.5), product(transA=1), product(bias=(1, 6)), product(bias=(1,))],
    ids=["alpha", "beta", "transposed input", "bias as a row", "one bias for all"],
)
def test_a_product_that_is_no_linear_layer_stays_whole(model):
    assert tiled_linear.split_into_stages(model, 4 * 10) == [[model]]


def test_a_graph_with_branches_stays_whole():
    branch = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["taken"])],
        "branch",
        [],
        [helper.make_tensor_value_info("taken", TensorProto.FLOAT, ["n", 4])],
    )
    model = product()
    model.graph.node[0].output[0] = "made"
    always = numpy_helper.from_array(np.array(True), "always")
    model.graph.initializer.append(always)
    model.graph.node.append(helper.make_node("If", ["always"], ["kept"], then_branch=branch, else_branch=branch))
    model.graph.node.append(helper.make_node("Concat", ["made", "kept"], ["y"], axis=1))
    assert tiled_linear.split_into_stages(model, 4 * 10) == [[model]]


def test_what_is_alive_is_not_told_where_a_shape_is_not_known():
    model = product()
    model.graph.node[0].output[0] = "made"
    model.graph.node.append(helper.make_node("Other", ["made"], ["between"], domain="elsewhere"))
    model.graph.node.append(helper.make_node("Relu", ["between"], ["y"]))
    model.opset_import.append(helper.make_opsetid("elsewhere", 1))
    assert memory.peak_activation_bytes(product()) == 4 * (4 + 6)
    assert memory.peak_activation_bytes(model) is None
