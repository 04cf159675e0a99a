"""The training engines under test, with small networks and examples for them."""

from __future__ import annotations

import numpy as np
import pytest

from fedquilt.arrays import tensors
from fedquilt.core import Examples
from fedquilt.edge_agent.engines.numpy_engine import NumpyEngine

AMPLE = 8 * 2**30
TIGHT = 1  # nothing fits: one example at a time
MLP = {"name": "mlp", "inputs": 6, "hidden": [5, 4], "classes": 3}
LINEAR = {"name": "mlp", "inputs": 2, "hidden": [], "classes": 2}
CNN = {"name": "cnn", "channels": 1, "size": 8, "classes": 2, "width": 2, "input": {"channels": 1, "size": 8}}


def numpy_one(budget_bytes: int) -> NumpyEngine:
    return NumpyEngine(budget_bytes, base_bytes=0)


def torch_one(budget_bytes: int):
    module = pytest.importorskip("fedquilt.edge_agent.engines.torch.engine")  # before torch: it says how threads wait
    return module.TorchEngine(budget_bytes, base_bytes=0)


both = pytest.mark.parametrize("engine", [numpy_one, torch_one], ids=["numpy", "torch"])


def table(count: int = 20, inputs: int = 6, classes: int = 3, seed: int = 0) -> Examples:
    """Rows of random values; a row's label is the place of the largest of its first `classes` values.

    Half is added to that largest value, so that a network can learn to tell the classes apart.
    """
    x = tensors.seeded_rng("table", seed).normal(size=(count, inputs)).astype(np.float32)
    y = x[:, :classes].argmax(axis=1)
    x[np.arange(count), y] += 0.5
    return Examples(x, y)


def pictures(count: int = 24) -> Examples:
    """Grey 8x8 images, bright in the left half or in the right."""
    y = np.arange(count) % 2
    x = tensors.seeded_rng("pictures").integers(0, 60, (count, 8, 8), dtype=np.uint8)
    for image, side in zip(x, y, strict=True):
        image[:, 4 * side : 4 * side + 4] += 150
    return Examples(x, y)


def torch_start(network, seed=0):
    torch = pytest.importorskip("torch")
    from fedquilt.models.networks import registry

    torch.manual_seed(seed)
    model = registry.build_network({key: value for key, value in network.items() if key != "input"})
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def same_bits(a, b) -> bool:
    return tensors.encode_tensors(a) == tensors.encode_tensors(b)


def close(a, b, tolerance: float = 1e-5) -> bool:
    return a.keys() == b.keys() and all(np.allclose(a[name], b[name], rtol=0, atol=tolerance) for name in a)
