"""Numbers put into an ONNX graph by the names of its tensors: the same answers as the network, and what is refused."""

import os
from pathlib import Path
from typing import Any

import made_graphs
import numpy as np
import plain
import pytest

from fedquilt.arrays import tensors
from fedquilt.core import ModelError
from fedquilt.formats import personal_models
from fedquilt.onnx import graph_check
from fedquilt.onnx import weights as onnx_weights

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
def test_a_filled_graph_answers_as_the_network_with_these_tensors(network):
    torch = pytest.importorskip("torch", reason="a network is written as ONNX by torch")
    runtime = pytest.importorskip("onnxruntime", reason="graphs are run by it")
    from fedquilt.models.networks import onnx_file, registry

    unfilled = onnx_file.export_without_weights(network)
    assert unfilled == onnx_file.export_without_weights(network)
    model = registry.load_network(network, seed=3)
    held = {name: value.numpy() for name, value in model.state_dict().items()}
    assert onnx_weights.missing_tensors(unfilled).keys() == {
        name for name, array in held.items() if array.dtype.kind == "f"
    }
    made = b"".join(onnx_weights.fill_graph(unfilled, held))
    graph_check.check_bytes(made)
    onnx.checker.check_model(onnx.load_from_string(made))
    x = torch.rand(5, *registry.input_shape(network))
    (y,) = runtime.InferenceSession(made, providers=["CPUExecutionProvider"]).run(None, {"x": x.numpy()})
    with torch.no_grad():
        assert y == pytest.approx(model(x).numpy(), abs=1e-5)


def test_what_has_its_numbers_keeps_them_and_what_is_not_named_is_left_out():
    other = onnx.numpy_helper.from_array(np.arange(4, dtype=np.int64), "other")
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    made = onnx.load_from_string(b"".join(onnx_weights.fill_graph(graph(lacking(), other), {"w": w, "spare": w})))
    whole = onnx.load_from_string(graph(onnx.numpy_helper.from_array(w, "w"), other))
    assert made == whole


@pytest.mark.parametrize(
    ("payload", "given", "said"),
    [
        (graph(lacking()), {}, "'w' of the network is missing"),
        (graph(lacking()), {"w": np.zeros((3, 2), np.float32)}, r"of shape \(3, 2\), but the network needs float32"),
        (graph(lacking()), {"w": np.zeros((2, 3))}, "is float64 of shape"),
        (graph(lacking(kind=8)), {}, "'w' without data has the unsupported type 8"),
        (graph(lacking())[:-3], {}, "not a valid ONNX file"),
        (b"", {}, "not a valid ONNX file"),
        (b"\x00\x01text", {}, "not a valid ONNX file"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(payload, given, said):
    with pytest.raises(ModelError, match=said):
        onnx_weights.fill_graph(payload, given)


def test_a_result_with_parts_on_boards_says_whose_it_is(tmp_path):
    task = plain.task(job="digits-1", method="fedrep", params={"lr": 0.1}, actions=("check",))
    bundles = {"model": {"a.weight": np.ones((2, 2), np.float32)}, "own": {"b/c": np.array(3.0, np.float32)}}
    path = tmp_path / "shared"
    path.write_bytes(personal_models.encode_personal(task, b"graph", bundles))
    assert personal_models.read_task(path) == task
    found = personal_models.read_personal(path)
    assert found.graph.tobytes() == b"graph"
    assert {name: tensors.encode_tensors(each) for name, each in found.bundles.items()} == {
        name: tensors.encode_tensors(each) for name, each in bundles.items()
    }
    for other in (graph(lacking()), b"", b"short", tensors.encode_tensors(bundles["model"]), b"\xff" * 64):
        path.write_bytes(other)
        assert personal_models.read_task(path) is None


@pytest.mark.parametrize("written", ["{}", '{"job": "digits-1", "method": "fedrep", "params": {}}', "\u00e9"])
def test_a_result_whose_task_cannot_be_read_is_refused_by_name(tmp_path, written):
    path = tmp_path / "shared"
    path.write_bytes(tensors.encode_tensors({"graph": np.zeros(2, np.uint8)}, {"personal": written}))
    with pytest.raises(ModelError, match=r"has an invalid task \(not a fedquilt message: .*: roll out the run again"):
        personal_models.read_task(path)


@pytest.mark.parametrize("payload", [b"no safetensors", tensors.encode_tensors({"model/a": np.ones(2, np.float32)})])
def test_a_damaged_result_is_refused_by_name(tmp_path, payload):
    path = tmp_path / "shared"
    path.write_bytes(payload)
    with pytest.raises(ModelError, match=r"the personalised result (is damaged|has no graph)"):
        personal_models.read_personal(path)


def answer(path: Path | bytes) -> Any:
    runtime = pytest.importorskip("onnxruntime", reason="graphs are run by it")
    session = runtime.InferenceSession(
        path if isinstance(path, bytes) else str(path), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"x": np.arange(6, dtype=np.float32)[None]})[0].tolist()


def test_two_files_become_one_that_answers_the_same(tmp_path):
    path = made_graphs.two_files(tmp_path)
    made = b"".join(onnx_weights.read_with_external_data(path))
    assert answer(made) == answer(path) == [[15.0] * 3]
    assert graph_check.check_bytes(made).weight_bytes == 6 * 3 * 4
    (tmp_path / "whole.onnx").write_bytes(made)
    assert len(onnx_weights.read_with_external_data(tmp_path / "whole.onnx")) == 1


def test_weights_in_constants_and_branches_are_taken_in_too(tmp_path):
    made = made_graphs.product()
    weights = made.graph.initializer.pop()
    branches = [
        onnx.helper.make_graph([onnx.helper.make_node("MatMul", ["f", "w"], ["b"])], "b", [], [made_graphs.value("b")])
        for _ in range(2)
    ]
    for branch in branches:
        branch.initializer.append(weights)
    constant = onnx.numpy_helper.from_array(np.array(True), "c")
    del made.graph.node[-1]
    made.graph.node.extend(
        [
            onnx.helper.make_node("Constant", [], ["c"], value=constant),
            onnx.helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1]),
        ]
    )
    data = bytearray()
    for tensor in (
        *(branch.g.initializer[0] for branch in made.graph.node[-1].attribute),
        made.graph.node[-2].attribute[0].t,
    ):
        tensor.data_location = onnx.TensorProto.EXTERNAL
        place = {"location": "d", "offset": str(len(data)), "length": str(len(tensor.raw_data))}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=value)
        data += tensor.raw_data
        tensor.ClearField("raw_data")
    (tmp_path / "d").write_bytes(data)
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    whole = b"".join(onnx_weights.read_with_external_data(tmp_path / "m.onnx"))
    assert b"external" not in whole
    assert answer(whole) == [[15.0] * 3]


@pytest.mark.parametrize(
    "location",
    ["../device.key", "/etc/hostname", "sub/device.key", "..", ".", "", "a\\b", "*/_ORT_MEM_ADDR_/*", "a\0b"],
)
def test_weights_are_read_from_the_folder_of_the_model_alone(tmp_path, location):
    (tmp_path / "device.key").write_bytes(bytes(100))
    (tmp_path / "m" / "sub").mkdir(parents=True)
    (tmp_path / "m" / "sub" / "device.key").write_bytes(bytes(100))
    path = made_graphs.two_files(tmp_path / "m", location=location)
    with pytest.raises(ModelError, match="which is not a file name in the model's folder: export the model as one"):
        onnx_weights.read_with_external_data(path)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("link", "symbolic link, copy the file itself"),
        ("folder", "Is a directory"),
        ("pipe", "copy a regular file there"),
        ("nothing", "No such file or directory"),
        ("short", "needs 72 bytes of 'model.onnx.data', which has 71"),
    ],
)
def test_what_is_no_plain_file_beside_the_model_is_refused(tmp_path, place, said):
    path = made_graphs.two_files(tmp_path)
    data = tmp_path / "model.onnx.data"
    payload = data.read_bytes()
    data.unlink()
    if place == "link":
        (tmp_path / "other").write_bytes(payload)
        data.symlink_to("other")
    elif place == "folder":
        data.mkdir()
    elif place == "pipe":
        os.mkfifo(data)
    elif place == "short":
        data.write_bytes(payload[:-1])
    with pytest.raises(ModelError) as refused:
        onnx_weights.read_with_external_data(path)
    assert said in str(refused.value)
    assert str(refused.value).startswith("model.onnx: ")


def test_a_file_that_many_tensors_name_is_not_read_beyond_the_size_of_an_onnx_file(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_weights, "MAX_FILE_BYTES", 10_000)
    path = made_graphs.two_files(tmp_path)
    made = onnx.load(path, load_external_data=False)
    for number in range(200):
        made.graph.initializer.append(made.graph.initializer[0])
        made.graph.initializer[-1].name = f"w{number}"
    path.write_bytes(made.SerializeToString())
    with pytest.raises(ModelError, match=r"with the data of 'model\.onnx\.data', the model exceeds 10000 bytes"):
        onnx_weights.read_with_external_data(path)
