"""Graphs run within a budget."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import made_graphs
import numpy as np
import pytest

from fedquilt.core import DataError, MemoryBudgetError, ModelError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from product_graphs import MB, product  # noqa: E402

from fedquilt.costs.peak_memory import SESSION_BYTES  # noqa: E402
from fedquilt.edge_agent.engines.onnx_engine import LARGEST_BATCH, OnnxEngine  # noqa: E402


@pytest.fixture
def weights() -> np.ndarray:
    return np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize("where", ["inside", "beside", "linked"])
def test_a_graph_without_extension_finds_its_weights_beside_it(tmp_path: Path, weights: np.ndarray, where: str) -> None:
    """[1, 10, 100] @ w: the first column is 0 + 40 + 800. A depot may have linked the files in."""
    graph = product(tmp_path, weights, external=where != "inside")
    if where == "linked":
        (tmp_path / "depot").mkdir()
        for path in list(tmp_path.glob("?" * 64)):
            (tmp_path / "depot" / path.name).hardlink_to(path)
        graph = tmp_path / "depot" / graph.name
    y = OnnxEngine(100 * MB, base_bytes=0).run(graph, np.array([[1, 10, 100]]))
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, [[840, 951, 1062, 1173]])


@pytest.mark.parametrize(
    ("held_bytes", "batch"), [(0, LARGEST_BATCH), (MB, 8), (3 * MB, 4), (6 * MB, 2), (11 * MB, 1), (None, 1)]
)
def test_micro_batches_fit_beside_the_weights_and_give_the_same_answer(
    tmp_path: Path, held_bytes: int | None, batch: int
) -> None:
    """Half of 20 MB is for sessions, 2 MB go to examples and answers, the rest is for what the runtime holds.

    For up to four examples, sessions other than the graph's own (6 MB) make room. Of a graph that does not
    say what it needs, one example runs at a time.
    """
    weights = np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32)
    graph = product(tmp_path, weights, activation_bytes=held_bytes)
    engine = OnnxEngine(20 * MB, base_bytes=0)
    x = np.random.default_rng(1).normal(size=(256, 1024)).astype(np.float32)
    np.testing.assert_allclose(engine.run(graph, x), x @ weights, rtol=1e-4, atol=1e-3)
    assert engine.batch(graph, 2 * MB) == batch


def test_only_a_roomy_budget_pays_for_optimizing(tmp_path: Path) -> None:
    """4 MB of weights: 3.5 times that and a session's own 2 MB are 16 MB, and half the room must do."""
    weights = np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32)
    graph = product(tmp_path, weights, activation_bytes=8192)
    x = np.random.default_rng(1).normal(size=(5, 1024)).astype(np.float32)
    tight, roomy = (OnnxEngine(size * MB, base_bytes=0) for size in (31, 33))
    assert (tight.memory_plan(graph).is_roomy, roomy.memory_plan(graph).is_roomy) == (False, True)
    np.testing.assert_allclose(tight.run(graph, x), roomy.run(graph, x), rtol=1e-4, atol=1e-4)


def test_what_the_process_holds_already_counts(tmp_path: Path, weights: np.ndarray) -> None:
    """The runtime itself holds some 50 MB, so a budget of 20 MB leaves nothing."""
    with pytest.raises(
        MemoryBudgetError, match=r"needs \d+ MB for its weights and one example, the budget has 0 MB left"
    ):
        OnnxEngine(20 * MB).run(product(tmp_path, weights), np.ones((1, 3)))


def test_the_least_recently_used_session_goes_first(tmp_path: Path, weights: np.ndarray) -> None:
    a, b, c = (product(tmp_path, weights + i) for i in range(3))
    engine = OnnxEngine(2 * 2 * (SESSION_BYTES + 2 * weights.nbytes), base_bytes=0)
    for graph in (a, b, a, c):
        engine.run(graph, np.ones((1, 3)))
    assert engine.loaded_graphs() == (a, c)
    engine.close()
    assert engine.loaded_graphs() == ()


def test_an_empty_batch_gives_an_empty_answer(tmp_path: Path, weights: np.ndarray) -> None:
    assert OnnxEngine(100 * MB, base_bytes=0).run(product(tmp_path, weights), np.ones((0, 3))).shape == (0, 4)


def test_what_cannot_be_run_names_the_graph(tmp_path: Path, weights: np.ndarray, capfd: pytest.CaptureFixture) -> None:
    engine = OnnxEngine(100 * MB, base_bytes=0)
    with pytest.raises(ModelError, match=r"graph .*absent is missing"):
        engine.run(tmp_path / "absent", np.ones((1, 3)))
    (tmp_path / "noise").write_bytes(b"not a graph")
    with pytest.raises(ModelError, match="graph noise cannot be run"):
        engine.run(tmp_path / "noise", np.ones((1, 3)))
    graph = product(tmp_path, weights)
    with pytest.raises(ModelError, match=f"graph {graph.name[:12]} cannot be run.*Expected: 3"):
        engine.run(graph, np.ones((1, 5)))
    lonely = product(tmp_path, weights + 1)
    (tmp_path / hashlib.sha256((weights + 1).tobytes()).hexdigest()).unlink()
    with pytest.raises(ModelError, match=f"graph {lonely.name[:12]} cannot be run"):
        engine.run(lonely, np.ones((1, 3)))
    assert capfd.readouterr() == ("", "")


def test_sessions_go_for_what_else_needs_their_room(tmp_path: Path) -> None:
    """Three graphs of 1 MB: the longest unused go first, as many as must, and never the one in hand."""
    weights = np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)
    graphs = []
    for i in range(3):
        (tmp_path / str(i)).mkdir()
        graphs.append(product(tmp_path / str(i), weights + i, activation_bytes=4096))
    engine = OnnxEngine(40 * MB, base_bytes=0)
    for graph in graphs:
        engine.run(graph, np.ones((1, 512), np.float32))
    assert engine.loaded_graphs() == tuple(graphs)
    held = engine.memory_plan(graphs[0]).session_bytes
    engine.make_room(engine.available_bytes - 3 * held)
    assert engine.loaded_graphs() == tuple(graphs)
    engine.make_room(engine.available_bytes - 3 * held + 1)
    assert engine.loaded_graphs() == tuple(graphs[1:])
    engine.batch(graphs[1], caller_bytes=engine.available_bytes)
    assert engine.loaded_graphs() == (graphs[1],)
    engine.make_room(engine.available_bytes)
    assert engine.loaded_graphs() == ()


@pytest.mark.parametrize(("activation_bytes", "roomy"), [(2 * MB, True), (2 * MB + 4, False)])
def test_large_activations_are_not_laid_out_anew(tmp_path: Path, activation_bytes: int, roomy: bool) -> None:
    weights = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    graph = product(tmp_path, weights, activation_bytes=activation_bytes)
    assert OnnxEngine(64 * MB, base_bytes=0).memory_plan(graph).is_roomy is roomy


def test_a_graph_that_names_the_boards_key_is_refused_before_the_runtime_sees_it(tmp_path: Path) -> None:
    """ONNX Runtime up to 1.23.2 would read it: the key's bytes would go up as the board's answer."""
    (tmp_path / "device.key").write_bytes(b"-----BEGIN PRIVATE KEY-----")
    (tmp_path / "blobs").mkdir()
    tensor = onnx.TensorProto(name="k", data_type=onnx.TensorProto.UINT8, dims=[27], data_location=1)
    tensor.external_data.add(key="location", value="../device.key")
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Cast", ["k"], ["c"], to=1), onnx.helper.make_node("Add", ["x", "c"], ["y"])],
        "thief",
        [value("x", onnx.TensorProto.FLOAT, ["n", 27])],
        [value("y", onnx.TensorProto.FLOAT, ["n", 27])],
        [tensor],
    )
    path = tmp_path / "blobs" / "graph"
    path.write_bytes(
        onnx.helper.make_model(
            graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
        ).SerializeToString()
    )
    engine = OnnxEngine(100 * MB, base_bytes=0)
    with pytest.raises(ModelError, match=r"graph graph cannot be run: tensor 'k' is in file '\.\./device\.key'"):
        engine.run(path, np.zeros((1, 27)))
    with pytest.raises(ModelError, match=r"device\.key"):
        engine.read_metadata(path)


KEEPS = """
import sys
import numpy as np
import psutil
from fedquilt.edge_agent.engines.onnx_engine import OnnxEngine

SIZE = 64 << 20
engine, process = OnnxEngine(int(sys.argv[1])), psutil.Process()
before = process.memory_info().rss
np.ones(SIZE, np.uint8)
shares = []
for used in (engine.available_bytes, engine.available_bytes // 4, 0):
    engine.make_room(engine.available_bytes, None, used)
    shares.append((process.memory_info().rss - before) / SIZE)
print(*shares)
"""


@pytest.mark.parametrize(("budget_bytes", "stays"), [(4 << 30, True), (1 << 30, False)])
def test_with_plenty_of_room_freed_memory_is_kept_until_the_room_is_needed(budget_bytes: int, stays: bool) -> None:
    done = subprocess.run([sys.executable, "-c", KEEPS, str(budget_bytes)], capture_output=True, text=True, check=True)
    kept, beside, after = (float(word) for word in done.stdout.split())
    assert min(kept, beside) > 0.9 if stays else max(kept, beside) < 0.1
    assert after < 0.1


# -- graphs of other exporters ------------------------------------------------------------------------


def written(folder: Path, made: Any) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(made.SerializeToString())
    return path


@pytest.mark.parametrize("kind", [made_graphs.INT32, made_graphs.INT64, made_graphs.HALF])
def test_inputs_are_cast_to_the_type_that_the_graph_takes(tmp_path: Path, kind: int) -> None:
    """Bytes of a file as int32, tokens as int64, images in half precision: the sum of 0 to 5 is 15."""
    engine = OnnxEngine(100 * MB, base_bytes=0)
    found = engine.run(written(tmp_path, made_graphs.product(kind=kind)), np.arange(12, dtype=np.float32).reshape(2, 6))
    np.testing.assert_array_equal(found, [[15] * 3, [51] * 3])


@pytest.mark.parametrize("odd", [0.5, 2.0**31, np.nan])
def test_numbers_that_are_not_whole_are_not_cut(tmp_path: Path, odd: float) -> None:
    """Pixels between 0 and 1 would all become 0, and the model would answer."""
    engine = OnnxEngine(100 * MB, base_bytes=0)
    x = np.full((1, 6), odd, np.float32)
    with pytest.raises(
        DataError, match="the network takes int32, and values of this device's examples are not integers"
    ):
        engine.run(written(tmp_path, made_graphs.product(kind=made_graphs.INT32)), x)


@pytest.mark.parametrize(
    ("to", "declared"), [(made_graphs.HALF, ("n", 3)), (made_graphs.INT64, None), (made_graphs.FLOAT, None)]
)
def test_answers_are_float32_whatever_the_graph_declares(
    tmp_path: Path, to: int, declared: tuple[object, ...] | None
) -> None:
    made = made_graphs.product(output=made_graphs.value("z", declared, to))
    made.graph.node.append(onnx.helper.make_node("Cast", ["y"], ["z"], to=to))
    found = OnnxEngine(100 * MB, base_bytes=0).run(written(tmp_path, made), np.ones((5, 6), np.float32))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.full((5, 3), 6))
