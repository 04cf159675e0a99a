"""A task whose graph names the board's key, carried out by a real process of the agent's."""

from __future__ import annotations

import pytest
from children import METHODS, Place, carried_out, child

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

KEY = b"-----BEGIN PRIVATE KEY-----"


def graph(weights: object) -> bytes:
    """y = x + weights."""
    value = onnx.helper.make_tensor_value_info
    made = onnx.helper.make_graph(
        [onnx.helper.make_node("Cast", ["k"], ["c"], to=1), onnx.helper.make_node("Add", ["x", "c"], ["y"])],
        "thief",
        [value("x", onnx.TensorProto.FLOAT, ["n", len(KEY)])],
        [value("y", onnx.TensorProto.FLOAT, ["n", len(KEY)])],
        [weights],
    )
    opset = [onnx.helper.make_opsetid("", 17)]
    return bytes(onnx.helper.make_model(made, opset_imports=opset, ir_version=8).SerializeToString())


@pytest.mark.parametrize("outside", [True, False])
def test_a_board_answers_no_task_with_its_key(place: Place, monkeypatch: pytest.MonkeyPatch, outside: bool) -> None:
    monkeypatch.setitem(
        METHODS,
        "thief",
        """
        from pathlib import Path
        def work(task, site):
            y = site.engine.run(Path(task.params["graph"]), np.zeros((1, 27), np.float32))
            raise RuntimeError("it says " + y.astype(np.uint8).tobytes().decode())
        """,
    )
    blobs = place.folder / "blobs"
    blobs.mkdir()
    (place.folder / "device.key").write_bytes(KEY)
    tensor = onnx.TensorProto(name="k", data_type=onnx.TensorProto.UINT8, dims=[len(KEY)])
    if outside:
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="../device.key")
    else:
        tensor.raw_data = KEY
    (blobs / "graph").write_bytes(graph(tensor))
    order = place.order("thief", engine="onnx")
    order.task.params["graph"] = str(blobs / "graph")
    with child(place.command()) as worker:
        outcome = carried_out(worker, order)
    told = f"{outcome.code}: {outcome.reason}"
    if outside:
        assert "tensor 'k' is in '../device.key'" in told
        assert KEY.decode() not in told
    else:
        assert KEY.decode() in told
