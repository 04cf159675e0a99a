"""What is folded gives what the explicit projection gives; what cannot be folded is left alone."""

from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import GraphProto, TensorProto, helper, numpy_helper

from fedquilt.models.stitching.onnx import export

DRAWS = np.random.default_rng(0)
A, BIAS = DRAWS.normal(size=(5, 3)).astype(np.float32), DRAWS.normal(size=5).astype(np.float32)
X = DRAWS.normal(size=(2, 3, 6, 6)).astype(np.float32)


def graph(kernel: int = 1, with_bias: bool = True, residual: bool = False, outputs: int = 5, **attributes: Any) -> Any:
    """A convolution of 5 channels, a ReLU, and where asked a sum with what came in."""
    w = DRAWS.normal(size=(outputs, 5 // attributes.get("group", 1), kernel, kernel)).astype(np.float32)
    tensors = [numpy_helper.from_array(w, "w")]
    if with_bias:
        tensors.append(numpy_helper.from_array(DRAWS.normal(size=outputs).astype(np.float32), "b"))
    nodes = [
        helper.make_node("Conv", ["x", *(tensor.name for tensor in tensors)], ["c"], **attributes),
        helper.make_node("Relu", ["c"], ["r" if residual else "y"]),
    ]
    if residual:
        nodes.append(helper.make_node("Add", ["x", "r"], ["y"]))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 5, 6, 6])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", outputs, None, None])
    return helper.make_graph(nodes, "g", [x], [y], tensors)


def run(made: GraphProto, x: np.ndarray) -> np.ndarray:
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


@pytest.mark.parametrize(
    "changes",
    [{}, {"with_bias": False}, {"strides": [2, 2]}, {"kernel": 2}, {"kernel": 3, "strides": [2, 2], "outputs": 2}],
    ids=str,
)
def test_folded_equals_explicit(changes):
    explicit = graph(**changes)
    folded = export.fold_projection(explicit, A, BIAS)
    projected = np.einsum("qp,nphw->nqhw", A, X) + BIAS[:, None, None]
    np.testing.assert_allclose(run(folded, X), run(explicit, projected), atol=1e-5)
    assert {tensor.name for tensor in folded.initializer} == {"c/folded_weight", "c/folded_bias"}
    assert [tensor.name for tensor in explicit.initializer][:1] == ["w"]  # what was given is as it was


@pytest.mark.parametrize(
    "changes",
    [
        {"kernel": 3, "pads": [1, 1, 1, 1]},  # wrong at the borders
        {"group": 5},  # depthwise: each channel has its own
        {"residual": True},  # what comes in goes elsewhere too
        {"kernel": 3, "auto_pad": "SAME_UPPER"},
    ],
    ids=str,
)
def test_what_cannot_be_folded_is_left_alone(changes):
    assert export.fold_projection(graph(**changes), A, BIAS) is None


def test_along_time_it_folds_as_well():
    w, b = (DRAWS.normal(size=size).astype(np.float32) for size in ((4, 5, 3), 4))
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["y"], strides=[2])]
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", c, None]) for name, c in (("x", 5), ("y", 4))]
    tensors = [numpy_helper.from_array(w, "w"), numpy_helper.from_array(b, "b")]
    explicit, series = helper.make_graph(nodes, "g", info[:1], info[1:], tensors), X.reshape(2, 3, 36)
    folded = export.fold_projection(explicit, A, BIAS)
    assert folded is not None
    projected = np.einsum("qp,npl->nql", A, series) + BIAS[:, None]
    np.testing.assert_allclose(run(folded, series), run(explicit, projected), atol=1e-5)


def test_what_would_cost_more_is_left_alone():
    """From 50 channels to 5: behind the projection a convolution to 100 channels takes 5, folded it would take 50."""
    wide = DRAWS.normal(size=(5, 50)).astype(np.float32)
    assert export.fold_projection(graph(outputs=100), wide, BIAS) is None
    assert export.fold_projection(graph(outputs=4), wide, BIAS) is not None
