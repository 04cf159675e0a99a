"""The ONNX of an mlp is made without torch, and predicts as the numpy engine."""

from __future__ import annotations

import sys

import numpy as np
import onnxruntime
import pytest

from fedquilt.core import ModelError
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.models.networks import numpy_init, onnx_file
from fedquilt.onnx import graph_check, weights

IMAGES = {"name": "mlp", "inputs": 12, "hidden": [5, 4], "classes": 3, "input": {"channels": 3, "size": 2}}
NETWORKS = {
    "linear": {"name": "mlp", "inputs": 3, "hidden": [], "classes": 2},
    "one hidden layer": {"name": "mlp", "inputs": 3, "hidden": [4], "classes": 2},
    "images": IMAGES,
}


@pytest.fixture(autouse=True)
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_both_kinds_of_graph_predict_as_the_numpy_engine(network):
    tensors = numpy_init.initial_mlp_weights(network, 7)
    x = np.random.default_rng(1).random((5, 3, 2, 2) if network is IMAGES else (5, 3), np.float32)
    expected = numpy_engine.forward(tensors, x.reshape(5, -1))[-1]
    filled = b"".join(weights.fill_graph(onnx_file.export_without_weights(network), tensors))
    for graph in (onnx_file.export_network(network, tensors), filled):
        graph_check.check_bytes(graph).require_batched_examples()
        (y,) = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"]).run(None, {"x": x})
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_a_part_of_the_network_is_refused():
    tensors = numpy_init.initial_mlp_weights(IMAGES, 7)
    del tensors["1.bias"]
    with pytest.raises(ModelError, match=r"not the whole network 'mlp' \('1.bias' differs\)"):
        onnx_file.export_network(IMAGES, tensors)
