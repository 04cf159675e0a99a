"""Blocks of many weights, cut into tiles of linear layers and into pieces of chains."""

from typing import Any

import numpy as np
import pytest
from block_graphs import graphs_of, require_same_outputs

torch = pytest.importorskip("torch", reason="blocks are cut from torch networks")
onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from torch import nn  # noqa: E402

from fedquilt.models.stitching.onnx import (  # noqa: E402
    blocks,
    memory,
    tiled_linear,
)


class Product(nn.Module):
    """A linear layer written out: x W + b."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.bias = nn.Parameter(torch.randn(12, 7)), nn.Parameter(torch.randn(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights + self.bias


class Around(nn.Module):
    """What goes past a layer: its input is added to its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


@pytest.mark.parametrize(
    ("layers", "tiles", "most"),
    [
        ([nn.Linear(12, 7)], [1, 4], [0, 26]),
        ([nn.Linear(12, 7, bias=False)], [1, 3], [0, 36]),
        ([Product()], [1, 3, 1], [0, 36, 7]),
        ([nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 9)], [1, 2, 1, 2], [0, 26, 0, 25]),
        ([nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2)], [1, 4, 1], [0, 26, 18]),
        ([nn.Linear(12, 1), nn.ReLU(), nn.Linear(1, 19)], [1, 1], [13, 38]),
        ([nn.Linear(12, 1), nn.ReLU(), nn.Linear(1, 12)], [1], [37]),
    ],
    ids=["linear", "no bias", "product", "two", "large then small", "too much together", "small enough"],
)
def test_a_large_linear_layer_becomes_tiles_that_hold_no_more_than_allowed(layers, tiles, most, tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "TILE_BYTES", 4 * 38)
    end = _end(*layers)
    made = blocks.export_block(end)
    assert [len(stage) for stage in made] == tiles
    assert [max(graph.weight_bytes for graph in stage) for stage in made] == [4 * number for number in most]
    for graph in graphs_of([made]):
        onnx.checker.check_model(onnx.load_from_string(graph.graph), full_check=True)
    for stage in made:
        rows = [_facts(graph)[1][0] for graph in stage]
        assert max(rows) - min(rows) <= 1
    require_same_outputs([made], end.module, end.in_shape, tmp_path)


@pytest.mark.parametrize(
    "layers",
    [[Around(), nn.Linear(12, 2)], [nn.Unflatten(1, (3, 4)), nn.Linear(4, 7), nn.Flatten(), nn.Linear(21, 1)]],
    ids=["something goes past", "several vectors per example"],
)
def test_a_layer_around_which_the_graph_cannot_be_cut_stays_in_it(layers, tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "TILE_BYTES", 4 * 27)
    end = _end(*layers)
    made = blocks.export_block(end)
    assert [len(stage) for stage in made] == [1] * len(made)
    assert max(graph.weight_bytes for graph in graphs_of([made])) > 4 * 27
    require_same_outputs([made], end.module, end.in_shape, tmp_path)


@pytest.mark.parametrize(
    ("most", "held"), [(468, [468]), (320, [312, 156]), (160, [156, 156, 156]), (100, [156, 156, 156])]
)
def test_a_chain_of_layers_is_cut_where_one_value_goes_on(most, held, tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "TILE_BYTES", 4 * most)
    end = _end(*(Around() for _ in range(3)))
    made = blocks.export_block(end)
    assert [[graph.weight_bytes for graph in stage] for stage in made] == [[4 * each] for each in held]
    require_same_outputs([made], end.module, end.in_shape, tmp_path)


def test_every_graph_says_what_it_takes(monkeypatch):
    monkeypatch.setattr(blocks, "TILE_BYTES", 4 * 26)
    made = blocks.export_block(_end(nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert [_facts(graph) for graph in graphs_of([made])] == [
        ([3, 2, 2], [12], 4 * 24, 0),
        ([12], [2], 4 * 14, 4 * 26),
        ([12], [2], 4 * 14, 4 * 26),
        ([4], [2], 4 * 10, 4 * 10),
    ]


def test_layers_whose_biases_are_equal_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "TILE_BYTES", 4 * 26)
    large, small = nn.Linear(12, 4), nn.Linear(4, 4)
    for layer in (large, small):
        nn.init.zeros_(layer.bias)
    end = _end(large, nn.ReLU(), small)
    made = blocks.export_block(end)
    assert [[graph.weight_bytes for graph in stage] for stage in made] == [[0], [104, 104], [80]]
    require_same_outputs([made], end.module, end.in_shape, tmp_path)


def _end(*layers: nn.Module) -> blocks.DonorBlock:
    """The terminating block of a donor: 3 maps of 2 x 2, flattened, then these layers."""
    torch.manual_seed(0)
    donor = nn.Sequential(nn.Conv2d(1, 3, 1), nn.Flatten(), *layers)
    return blocks.split_donor(donor, "d", (1, 2, 2), cuts=["0"])[-1]


def _facts(graph: blocks.BlockGraph) -> tuple[list[int], list[int], int, int]:
    """Shapes of what comes in and goes out, and bytes of activations and of weights, as the graph says."""
    model = onnx.load_from_string(graph.graph)
    x, y = (value.type.tensor_type.shape.dim[1:] for value in (model.graph.input[0], model.graph.output[0]))
    said = {prop.key: int(prop.value) for prop in model.metadata_props}
    return [d.dim_value for d in x], [d.dim_value for d in y], said["activation_bytes"], said["weight_bytes"]


# -- graphs that torch would not write ---------------------------------------------------------------


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
