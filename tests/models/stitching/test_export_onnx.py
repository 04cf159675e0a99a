"""Stitched networks as one ONNX file, against the agents' own forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedquilt import bundle
from fedquilt.core import ModelError
from fedquilt.data import images
from fedquilt.models import stitching

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from fedquilt.edge_agent.engines.onnx_engine import OnnxEngine  # noqa: E402
from fedquilt.models.stitching.export_onnx import stitched  # noqa: E402

DEMO = Path(__file__).resolve().parents[3] / "tools" / "demo"
BUNDLE = bundle.load(DEMO / "bundle")
STOCK = stitching.stitched.stock(BUNDLE.meta)
FILES = {name: DEMO / "bundle" / "blobs" / ref.sha256 for name, ref in BUNDLE.files.items()}

# shrinks 14 -> 7 and grows 7 -> 14 (sizes of the maps), each with a change of channels
ACROSS = ["separable.0", "residual.3", "plain.2", "plain.3"]


def artefact(
    path: list[str], align: Any, head: bool, stock: stitching.stitched.Stock = STOCK
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """An artefact as `fedquilt.methods.fedstitch.result` makes it, with random junctions and head."""
    draw = np.random.default_rng(0)
    blocks = [stock.blocks[name] for name in path]
    arrays: dict[str, np.ndarray] = {}
    junctions = []
    for i in range(1, len(path)):
        before, after = blocks[i - 1], blocks[i]
        own = stitching.stitched.continues(before, after)
        names = {part: None if own else f"junction.{i}.{part}" for part in ("weights", "bias")}
        entry = {"before": i, "in_shape": list(before.out_shape), "out_shape": list(after.in_shape)}
        junctions.append({**entry, **names, "kind": "none" if own else "projection"})
        if not own:
            shape = (after.in_shape[0], before.out_shape[0])
            arrays[f"junction.{i}.weights"] = draw.normal(0, shape[1] ** -0.5, shape).astype(np.float32)
            arrays[f"junction.{i}.bias"] = draw.normal(size=shape[0]).astype(np.float32)
    if head:
        arrays["head.weights"] = draw.normal(size=(10, blocks[-1].out_shape[0]))
        arrays["head.bias"] = draw.normal(size=10)
    meta = {
        "path": path,
        "junctions": junctions,
        "head": {"features": "gap", "weights": "head.weights", "bias": "head.bias"} if head else None,
        "align": align,
        "labels": list(stock.labels)[: len(align) if align else 10],
        "input": {"channels": 1, "size": 28, "mean": [0.0], "std": [1.0]},
    }
    return meta, arrays


def by_the_agents(
    meta: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    x: np.ndarray,
    stock: stitching.stitched.Stock = STOCK,
    files: Mapping[str, Path] = FILES,
) -> np.ndarray:
    """`fedquilt.models.stitching.stitched.classify` with the same junctions and head, block by block."""
    engine = OnnxEngine(2**30)
    between: list[Any] = [None]
    for entry in meta["junctions"]:
        names = {part: entry[part] for part in ("weights", "bias")}
        between.append(None if entry["kind"] == "none" else {part: arrays[name] for part, name in names.items()})
    return stitching.stitched.classify(
        [stock.blocks[name] for name in meta["path"]],
        between,
        lambda block, maps: stitching.stitched.run_block(
            block, lambda name, value: engine.run(files[name], value), maps
        ),
        x,
        head={part: arrays[f"head.{part}"] for part in ("weights", "bias")} if meta["head"] else None,
        groups=meta["align"],
    )


@pytest.mark.parametrize(
    ("path", "align", "head"),
    [
        (ACROSS, None, True),
        ([*ACROSS, "plain.4"], [[i] for i in range(10)], False),
        ([*ACROSS, "plain.4"], [[0, 2, 4, 6, 8], [], [1, 3, 5]], False),
        ([f"residual.{i}" for i in range(5)], [[i] for i in range(10)], False),
        (["plain.0"], None, True),
    ],
    ids=["head", "aligned", "grouped", "one donor", "one block"],
)
def test_the_file_gives_what_the_agents_compute(tmp_path: Path, path: list[str], align: Any, head: bool) -> None:
    """To 1e-4 of the largest score, for 1 image and for 7, alone in its folder; a label without classes scores -inf."""
    meta, arrays = artefact(path, align, head)
    file = tmp_path / "net.onnx"
    file.write_bytes(stitched(meta, arrays, STOCK.blocks, FILES))
    onnx.checker.check_model(str(file), full_check=True)
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    assert [(i.name, i.shape[1:]) for i in session.get_inputs()] == [("x", [1, 28, 28])]
    digits = np.load(DEMO / "digits.npz")["x_test"]
    for count in (1, 7):
        x = images.prepare(digits[:count], STOCK.input)
        (scores,) = session.run(["scores"], {"x": x})
        wanted = by_the_agents(meta, arrays, x)
        largest = np.abs(wanted[np.isfinite(wanted)]).max()
        np.testing.assert_allclose(scores, wanted, rtol=0, atol=1e-4 * largest)


def test_tiles_lie_side_by_side_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminating block whose layer 288 -> 50 is 4 tiles, behind another donor's block of larger maps."""
    pytest.importorskip("torch", reason="preparing cuts torch networks")
    from fedquilt.models.stitching import blocks
    from fedquilt.tools.artefacts.prepare import prepare

    (tmp_path / "net_with_wide_head.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    body = nn.Conv2d(1, 4, 4, 4), nn.ReLU(), nn.Conv2d(4, 8, 2), nn.ReLU()\n"
        "    return nn.Sequential(*body, nn.Flatten(), nn.Linear(288, 50), nn.ReLU(), nn.Linear(50, 3))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(blocks, "TILE_BYTES", 16_000)
    donors = [
        {"name": "plain", "network": {"name": "plain", "channels": 1, "classes": 3}},
        {"name": "wide", "network": {"name": "net_with_wide_head:net"}, "cuts": ["1", "3"], "align": "identity"},
    ]
    job = {"input": {"channels": 1, "size": 28}, "labels": ["a", "b", "c"], "donors": donors}
    made = prepare(job, tmp_path / "out")
    stock = stitching.stitched.stock(made.meta)
    files = {name: tmp_path / "out" / "blobs" / ref.sha256 for name, ref in made.files.items()}
    assert [len(stage) for stage in stock.blocks["wide.2"].stages] == [1, 4, 1]
    meta, arrays = artefact(["plain.0", "wide.1", "wide.2"], [[0], [1], [2]], False, stock)
    (tmp_path / "net.onnx").write_bytes(stitched(meta, arrays, stock.blocks, files))
    onnx.checker.check_model(str(tmp_path / "net.onnx"), full_check=True)
    session = ort.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).normal(size=(5, 1, 28, 28)).astype(np.float32)
    wanted = by_the_agents(meta, arrays, x, stock, files)
    np.testing.assert_allclose(session.run(["scores"], {"x": x})[0], wanted, atol=1e-4 * np.abs(wanted).max())


def test_what_is_projected_is_the_smaller_map() -> None:
    """As the agents do it: before it grows, after it has shrunk."""
    model = onnx.load_from_string(stitched(*artefact(ACROSS, None, True), STOCK.blocks, FILES))
    order = [node.name.split("/") for node in model.graph.node if node.name.startswith("junction")]
    resize = ["resized_rows", "resized"]
    assert [step for junction, step in order if junction == "junction1"] == [*resize, "projected"]
    assert [step for junction, step in order if junction == "junction2"] == ["projected", *resize]


def test_what_running_it_takes_is_in_the_file() -> None:
    """Labels, input, path and memory as metadata; opset and IR version that old runtimes read."""
    model = onnx.load_from_string(stitched(*artefact(ACROSS, None, True), STOCK.blocks, FILES))
    facts = {prop.key: prop.value for prop in model.metadata_props}
    assert facts["labels"] == '["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]'
    assert facts["input"] == '{"channels": 1, "size": 28, "mean": [0.0], "std": [1.0]}'
    assert facts["path"] == " ".join(ACROSS)
    assert int(facts["activation_bytes"]) == max(STOCK.blocks[name].activation_bytes for name in ACROSS)
    assert int(facts["weight_bytes"]) > sum(STOCK.blocks[name].weight_bytes for name in ACROSS)
    assert (model.ir_version, [opset.version for opset in model.opset_import]) == (8, [17])


def test_the_same_network_is_the_same_file() -> None:
    """Equal bytes, so that its sha256 names it."""
    assert stitched(*artefact(ACROSS, None, True), STOCK.blocks, FILES) == stitched(
        *artefact(ACROSS, None, True), STOCK.blocks, FILES
    )


def test_blocks_that_a_store_has_linked_in_are_read(tmp_path: Path) -> None:
    """The same bytes from hard links, which onnx's own loader takes for an attack."""
    for folder in ("bundle", "depot"):
        (tmp_path / folder).mkdir()
    for path in FILES.values():
        (tmp_path / "bundle" / path.name).write_bytes(path.read_bytes())
        (tmp_path / "depot" / path.name).hardlink_to(tmp_path / "bundle" / path.name)
    linked = {name: tmp_path / "depot" / path.name for name, path in FILES.items()}
    assert stitched(*artefact(ACROSS, None, True), STOCK.blocks, linked) == stitched(
        *artefact(ACROSS, None, True), STOCK.blocks, FILES
    )


def test_a_network_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    """No labels, another bundle, a damaged block, weights cut short or outside, a graph from elsewhere."""
    with pytest.raises(ModelError, match="neither a head nor an alignment"):
        stitched(*artefact(["plain.0"], None, False), STOCK.blocks, FILES)
    with pytest.raises(ModelError, match=r"no block 'plain\.0'"):
        stitched(*artefact(["plain.0"], None, True), STOCK.blocks, {})
    with pytest.raises(ModelError, match=r"no block 'plain\.0'"):
        stitched(*artefact(["plain.0"], None, True), {}, FILES)
    (tmp_path / "noise").write_bytes(b"noise")
    with pytest.raises(ModelError, match=r"block 'plain\.0' cannot be read from .*noise"):
        stitched(*artefact(["plain.0"], None, True), STOCK.blocks, {"plain.0.onnx": tmp_path / "noise"})
    large = onnx.load(FILES["residual.3.onnx"], load_external_data=False)
    (tmp_path / "graph").write_bytes(FILES["residual.3.onnx"].read_bytes())
    location = large.graph.initializer[0].external_data[0].value
    (tmp_path / location).write_bytes(b"short")
    with pytest.raises(ModelError, match=rf"block 'residual\.3' .*: {location[:12]} is cut short"):
        stitched(*artefact(["residual.3"], None, True), STOCK.blocks, {"residual.3.onnx": tmp_path / "graph"})
    large.graph.initializer[0].external_data[0].value = "../secret"
    onnx.save(large, tmp_path / "graph")
    with pytest.raises(ModelError, match=r"its weights are in '\.\./secret', not in a file named by its sha256"):
        stitched(*artefact(["residual.3"], None, True), STOCK.blocks, {"residual.3.onnx": tmp_path / "graph"})
    other = onnx.load(FILES["plain.0.onnx"])
    other.opset_import[0].version = 13
    onnx.save(other, tmp_path / "older")
    with pytest.raises(ModelError, match="was not made by `fedquilt prepare`"):
        stitched(*artefact(["plain.0"], None, True), STOCK.blocks, {"plain.0.onnx": tmp_path / "older"})
