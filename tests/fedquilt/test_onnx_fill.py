"""Numbers put into an ONNX graph by the names of its tensors: the same answers as the network, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import plain
import pytest

from fedquilt import graph_check, onnx_fill, personal, tensors
from fedquilt.core import ModelError

onnx = pytest.importorskip("onnx", reason="graphs are written with onnx")
NETWORKS: list[dict[str, Any]] = [
    {"name": "mlp", "inputs": 6, "hidden": [5], "classes": 3},
    {"name": "residual", "channels": 1, "classes": 3, "width": 2, "input": {"channels": 1, "size": 8}},
    {"name": "rezero", "inputs": 6, "classes": 3},  # parameters of shape ()
    {"name": "gru", "channels": 2, "steps": 6, "classes": 3, "layers": 2},
    {"name": "vit", "channels": 1, "size": 8, "classes": 3, "patch": 4, "input": {"channels": 1, "size": 8}},
]


def graph(*initializers: Any) -> bytes:
    """A graph that multiplies by "w", (2, 3), with these initializers."""
    helper = onnx.helper
    ends = [helper.make_tensor_value_info(name, 1, ["n", size]) for name, size in (("x", 2), ("y", 3))]
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    made = helper.make_graph([node], "g", ends[:1], ends[1:], list(initializers))
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def lacking(name: str = "w", shape: tuple[int, ...] = (2, 3), kind: int = 1) -> Any:
    return onnx.TensorProto(name=name, dims=shape, data_type=kind)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: str(network["name"]))
def test_a_filled_graph_answers_as_the_network_with_these_tensors(network: dict[str, Any]) -> None:
    """Batch normalisation, recurrence, attention and gains without axes; it may go to boards."""
    torch = pytest.importorskip("torch", reason="a network is written as ONNX by torch")
    runtime = pytest.importorskip("onnxruntime", reason="graphs are run by it")
    from fedquilt.models.networks import onnx_file, registry

    unfilled = onnx_file.unfilled(network)
    assert unfilled == onnx_file.unfilled(network)
    model = registry.load(network, seed=3)
    held = {name: value.numpy() for name, value in model.state_dict().items()}
    assert onnx_fill.lacks(unfilled).keys() == {name for name, array in held.items() if array.dtype.kind == "f"}
    made = b"".join(onnx_fill.filled(unfilled, held))
    graph_check.of_bytes(made)
    onnx.checker.check_model(onnx.load_from_string(made))
    x = torch.rand(5, *registry.input_shape(network))
    (y,) = runtime.InferenceSession(made, providers=["CPUExecutionProvider"]).run(None, {"x": x.numpy()})
    with torch.no_grad():
        assert y == pytest.approx(model(x).numpy(), abs=1e-5)


def test_what_has_its_numbers_keeps_them_and_what_is_not_named_is_left_out() -> None:
    """Nothing else in the file changes."""
    other = onnx.numpy_helper.from_array(np.arange(4, dtype=np.int64), "other")
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    made = onnx.load_from_string(b"".join(onnx_fill.filled(graph(lacking(), other), {"w": w, "spare": w})))
    whole = onnx.load_from_string(graph(onnx.numpy_helper.from_array(w, "w"), other))
    assert made == whole


@pytest.mark.parametrize(
    ("payload", "given", "said"),
    [
        (graph(lacking()), {}, "'w' is missing"),
        (graph(lacking()), {"w": np.zeros((3, 2), np.float32)}, r"of shape \(3, 2\), the network wants float32"),
        (graph(lacking()), {"w": np.zeros((2, 3))}, "is float64 of shape"),
        (graph(lacking(kind=8)), {}, "'w' is of type 8"),
        (graph(lacking())[:-3], {}, "no ONNX file"),
        (b"", {}, "no ONNX file"),
        (b"\x00\x01text", {}, "no ONNX file"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(payload: bytes, given: Any, said: str) -> None:
    """As a board tells it."""
    with pytest.raises(ModelError, match=said):
        onnx_fill.filled(payload, given)


def test_a_result_with_parts_on_boards_says_whose_it_is(tmp_path: Path) -> None:
    """Without its tensors being read; another file says nothing."""
    task = plain.task(job="digits-1", method="fedrep", params={"lr": 0.1}, actions=("check",))
    bundles = {"model": {"a.weight": np.ones((2, 2), np.float32)}, "own": {"b/c": np.array(3.0, np.float32)}}
    path = tmp_path / "shared"
    path.write_bytes(personal.encode(task, b"graph", bundles))
    assert personal.task(path) == task
    found = personal.read(path)
    assert found.graph.tobytes() == b"graph"
    assert {name: tensors.encode(each) for name, each in found.bundles.items()} == {
        name: tensors.encode(each) for name, each in bundles.items()
    }
    for other in (graph(lacking()), b"", b"short", tensors.encode(bundles["model"]), b"\xff" * 64):
        path.write_bytes(other)
        assert personal.task(path) is None


@pytest.mark.parametrize("written", ["{}", '{"job": "digits-1", "method": "fedrep", "params": {}}', "\u00e9"])
def test_a_result_whose_task_cannot_be_read_is_refused_by_name(tmp_path: Path, written: str) -> None:
    """A result that an earlier version has deployed is none for a file that boards could run as it is."""
    path = tmp_path / "shared"
    path.write_bytes(tensors.encode({"graph": np.zeros(2, np.uint8)}, {"personal": written}))
    with pytest.raises(ModelError, match=r"parts on boards: not a fedquilt message: .*; deploy it anew"):
        personal.task(path)


@pytest.mark.parametrize("payload", [b"no safetensors", tensors.encode({"model/a": np.ones(2, np.float32)})])
def test_a_damaged_result_is_refused_by_name(tmp_path: Path, payload: bytes) -> None:
    """Another file, and one without its graph."""
    path = tmp_path / "shared"
    path.write_bytes(payload)
    with pytest.raises(ModelError, match="parts on boards"):
        personal.read(path)
