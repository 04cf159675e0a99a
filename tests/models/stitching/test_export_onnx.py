"""Stitched networks as one ONNX file, against the agents' own forward pass."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

from fedquilt.core import ModelError
from fedquilt.data import inputs
from fedquilt.edge_agent.engines.onnx_engine import OnnxEngine
from fedquilt.formats import job_bundle
from fedquilt.models.stitching import stitched_network as stitch
from fedquilt.models.stitching.algebra import joint_head
from fedquilt.models.stitching.onnx import memory
from fedquilt.models.stitching.onnx.export import export_stitched
from fedquilt.onnx import graph_check

PARTS = ("weights", "bias")
onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")


DEMO = Path(__file__).resolve().parents[3] / "tools" / "lab" / "demo"
BUNDLE = job_bundle.load_bundle(DEMO / "bundle")
STOCK = stitch.load_donor_pool(BUNDLE.meta)
FILES = {name: DEMO / "bundle" / "blobs" / ref.sha256 for name, ref in BUNDLE.files.items()}

# shrinks 14 -> 7 and grows 7 -> 14 (sizes of the maps), each with a change of channels
ACROSS = ["negative.0", "turned.3", "upright.2", "upright.3"]
# a stem that four taps share, two depths of one donor, and upright.2 and upright.3 again, behind their own donor
JOINED = [ACROSS, ACROSS[:2], [f"negative.{i}" for i in range(3)], ACROSS[:1], [f"upright.{i}" for i in range(4)]]


def artefact(
    taps: list[list[str]], align: Any, head: bool | str, stock: stitch.DonorPool = STOCK
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """An artefact as `fedquilt.methods.fedstitch.result` makes it, with random junctions and head."""
    draw = np.random.default_rng(0)
    junctions = {}
    for ids in stitch.path_prefixes(taps):
        before, after = ([None, *(stock.blocks[name] for name in ids)])[-2:]
        if before is not None and not stitch.is_continuation(before, after):
            shape = (after.in_shape[0], before.out_shape[0])
            junctions[stitch.junction_name(ids)] = {
                "weights": draw.normal(0, shape[1] ** -0.5, shape).astype(np.float32),
                "bias": draw.normal(size=shape[0]).astype(np.float32),
            }
    width = sum(stock.blocks[tap[-1]].out_shape[0] for tap in taps)
    wide = 33 if head == "drawn" else width
    weights = {"weights": draw.normal(size=(10, wide)), "bias": draw.normal(size=10)} if head else None
    if head == "drawn" and weights is not None:
        weights["hidden"] = draw.normal(size=(wide, width))
    network = stitch.StitchedNetwork(tuple(map(tuple, taps)), junctions, weights, align)
    return stitch.to_artefact(network, replace(stock, labels=stock.labels[: len(align) if align else 10]))


def by_the_agents(
    meta: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    x: np.ndarray,
    stock: stitch.DonorPool = STOCK,
    files: Mapping[str, Path] = FILES,
) -> np.ndarray:
    """`fedquilt.models.stitching.stitched_network.compute_label_scores` of what the artefact holds, block by block."""
    engine = OnnxEngine(2**30)

    def run(block: stitch.Block, maps: np.ndarray) -> np.ndarray:
        return stitch.run_block(block, lambda name, value: engine.run(files[name], value), maps)

    return stitch.compute_label_scores(stitch.from_artefact(meta, arrays), stock.blocks, run, x)


def require_same_scores(
    folder: Path, made: Any, x: np.ndarray, stock: stitch.DonorPool = STOCK, files: Mapping[str, Path] = FILES
) -> onnx.ModelProto:
    """The file of an artefact, whose scores are the agents'."""
    payload = export_stitched(*made, stock.blocks, files)
    (folder / "net.onnx").write_bytes(payload)
    onnx.checker.check_model(str(folder / "net.onnx"), full_check=True)
    session = ort.InferenceSession(payload, providers=["CPUExecutionProvider"])
    assert [(i.name, i.shape[1:]) for i in session.get_inputs()] == [("x", list(x.shape[1:]))]
    wanted = by_the_agents(*made, x, stock, files)
    largest = np.abs(wanted[np.isfinite(wanted)]).max()
    np.testing.assert_allclose(session.run(["scores"], {"x": x})[0], wanted, rtol=0, atol=1e-4 * largest)
    return onnx.load_from_string(payload)


def digits(count: int) -> np.ndarray:
    return inputs.prepare_images(np.load(DEMO / "digits.npz")["x_test"][:count], STOCK.input)


@pytest.mark.parametrize(
    ("taps", "align", "head"),
    [
        ([ACROSS], None, True),
        ([[*ACROSS, "upright.4"]], [[i] for i in range(4)], False),
        ([[*ACROSS, "upright.4"]], [[0, 2], [], [1, 3]], False),
        ([[f"turned.{i}" for i in range(5)]], [[i] for i in range(3)], False),
        ([["upright.0"]], None, True),
        (JOINED, None, True),
        (JOINED[::-1], None, True),
        (JOINED, None, "drawn"),
        ([[f"upright.{i}" for i in range(5)], ["upright.0"]], None, True),
    ],
    ids=[
        "head",
        "aligned",
        "grouped",
        "one donor",
        "one block",
        "joined",
        "joined backwards",
        "drawn features",
        "a vector and maps",
    ],
)
def test_the_file_gives_what_the_agents_compute(tmp_path, taps, align, head):
    for count in (1, 7):
        require_same_scores(tmp_path, artefact(taps, align, head), digits(count))


@pytest.mark.parametrize("leave", [9, 5, 0])
def test_a_cascade_gives_what_the_agents_compute_and_runs_the_rest_for_some_examples_only(tmp_path, leave):
    meta, arrays = artefact(JOINED, None, True)
    draw = np.random.default_rng(5)
    taps = [JOINED[0], JOINED[3]]  # upright.2 and upright.3 are behind both
    width = sum(STOCK.blocks[tap[-1]].out_shape[0] for tap in taps)
    head = {"early.weights": draw.normal(size=(10, width)), "early.bias": draw.normal(size=10)}
    names = {"weights": "early.weights", "bias": "early.bias"}
    x = digits(9)
    first = {**meta, "taps": taps, "head": names, "early": None}
    margins = np.sort(stitch.score_margins(by_the_agents(first, arrays | head, x)))
    margin = float(np.append(margins, 1e9)[9 - leave]) - 1e-3
    meta["early"] = {"taps": taps, "head": names, "margin": margin, "share": 0.5}
    payload = export_stitched(meta, arrays | head, STOCK.blocks, FILES)
    (tmp_path / "net.onnx").write_bytes(payload)
    onnx.checker.check_model(str(tmp_path / "net.onnx"), full_check=True)
    wanted = by_the_agents(meta, arrays | head, x)
    scores = OnnxEngine(2**30).run(tmp_path / "net.onnx", x)  # the graph check of boards, one example at a time
    np.testing.assert_allclose(scores, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
    nodes = onnx.load_from_string(payload).graph.node
    whole = export_stitched(*artefact(JOINED, None, True), STOCK.blocks, FILES)
    held, alone = (graph_check.check_bytes(each).activation_bytes for each in (payload, whole))
    shared = 4 * sum(np.prod(STOCK.blocks[tap[-1]].out_shape) for tap in taps)  # the second network reads both
    assert held >= alone + shared
    [choice] = [node for node in nodes if node.op_type == "If"]
    branches = {attribute.name: [node.name for node in attribute.g.node] for attribute in choice.attribute}
    first = {node.name for node in nodes}
    assert len(branches["then_branch"]) == 1
    assert any(name.startswith("block") for name in branches["else_branch"])
    assert not first & set(branches["else_branch"])  # nothing is computed twice


def test_a_cascade_whose_first_network_is_no_part_of_its_second_is_refused():
    meta, arrays = artefact([["upright.0"]], None, True)
    meta["early"] = {"taps": [["turned.0"]], "head": meta["head"], "margin": 1.0, "share": 0.5}
    with pytest.raises(ModelError, match="not a part of its second"):
        export_stitched(meta, arrays, STOCK.blocks, FILES)


def test_tiles_lie_side_by_side_in_the_file(tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="preparing cuts torch networks")
    from fedquilt.models.stitching.onnx import blocks
    from fedquilt.tools.artefacts.prepare import prepare_bundle

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
    made = prepare_bundle(job, tmp_path / "out")
    stock = stitch.load_donor_pool(made.meta)
    files = {name: tmp_path / "out" / "blobs" / ref.sha256 for name, ref in made.files.items()}
    assert [len(stage) for stage in stock.blocks["wide.2"].stages] == [1, 4, 1]
    x = np.random.default_rng(0).normal(size=(5, 1, 28, 28)).astype(np.float32)
    made = artefact([["plain.0", "wide.1", "wide.2"]], [[0], [1], [2]], False, stock)
    require_same_scores(tmp_path, made, x, stock, files)


def test_what_is_projected_is_the_smaller_map():
    model = onnx.load_from_string(export_stitched(*artefact([ACROSS], None, True), STOCK.blocks, FILES))
    order = [node.name.split("/") for node in model.graph.node if node.name.startswith("junction")]
    resize = ["resized_rows", "resized"]
    assert [step for junction, step in order if junction == "junction1"] == [*resize, "projected"]
    assert [step for junction, step in order if junction == "junction2"] == ["projected", *resize]


def test_shared_beginnings_and_repeated_blocks_are_in_the_file_once(tmp_path):
    meta, arrays = artefact(JOINED, None, True)
    model = onnx.load_from_string(export_stitched(meta, arrays, STOCK.blocks, FILES))
    separable = onnx.load(FILES["negative.0.onnx"]).graph.node
    assert sum(node.name.startswith("block0/") for node in model.graph.node) == len(separable)
    assert sum(node.input[0] == "x" for node in model.graph.node) == 2  # the two donors' stems
    names = [tensor.name for tensor in model.graph.initializer]
    assert len(names) == len(set(names))
    blocks = {name for tap in JOINED for name in tap}
    own = {name for name in names if name.partition("/")[0] not in blocks}
    sizes = {tensor.name: len(tensor.raw_data) for tensor in model.graph.initializer}
    facts = {prop.key: prop.value for prop in model.metadata_props}
    wanted = sum(STOCK.blocks[name].weight_bytes for name in blocks) + sum(sizes[name] for name in own)
    assert int(facts["weight_bytes"]) == sum(sizes.values()) == wanted
    assert sum(sizes[name] for name in own if "head" in name) == sum(arrays[f"head.{p}"].size * 4 for p in PARTS)


@pytest.mark.parametrize("order", [1, -1])
def test_a_block_behind_a_folded_junction_keeps_its_own_weights(tmp_path, order):
    draw = np.random.default_rng(1)
    blocks, files = {}, {}
    for name, q, p in (("few.0", 3, 1), ("many.0", 8, 1), ("many.1", 2, 8)):
        shape, donor = (q, p, 1, 1), name[:-2]
        weights = numpy_helper.from_array(draw.normal(size=shape).astype(np.float32), "weights")
        bias = numpy_helper.from_array(draw.normal(size=q).astype(np.float32), "bias")
        node = helper.make_node("Conv", ["x", "weights", "bias"], ["y"], name="convolution")
        info = [helper.make_tensor_value_info(v, 1, ["n", c, 28, 28]) for v, c in (("x", p), ("y", q))]
        graph = helper.make_graph([node], name, info[:1], info[1:], [weights, bias])
        files[f"{name}.onnx"] = tmp_path / f"{name}.onnx"
        opset = helper.make_opsetid("", 17)
        onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), files[f"{name}.onnx"])
        stages, shapes = ((f"{name}.onnx",),), ((p, 28, 28), (q, 28, 28))
        kind = "start" if name.endswith("0") else "middle"
        blocks[name] = stitch.Block(donor, int(name[-1]), kind, stages, (), *shapes, 1, 4, 4, 4)
    stock = stitch.DonorPool(STOCK.input, STOCK.labels, {}, blocks)
    made = artefact([["many.0", "many.1"], ["few.0", "many.1"]][::order], None, True, stock)
    model = require_same_scores(tmp_path, made, digits(3), stock, files)
    assert sum("folded" in tensor.name for tensor in model.graph.initializer) == 2
    assert not any("projected" in node.name for node in model.graph.node)


def test_the_runtime_pools_a_tap_before_it_computes_the_next_and_memory_covers_that(tmp_path):
    model = onnx.load_from_string(export_stitched(*artefact(JOINED, None, True), STOCK.blocks, FILES))
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "run")
    seen = onnx.ModelProto()
    seen.CopyFrom(model)
    values = [name for node in model.graph.node for name in node.output]
    seen.graph.output.extend(onnx.ValueInfoProto(name=name) for name in values if name != "scores")
    x = np.zeros((1, 1, 28, 28), np.float32)
    names = ["scores", *(name for name in values if name != "scores")]
    found = ort.InferenceSession(seen.SerializeToString(), providers=["CPUExecutionProvider"]).run(names, {"x": x})
    sizes = {"x": x.nbytes} | {name: value.nbytes for name, value in zip(names, found, strict=True)}
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    session.run(None, {"x": x})
    events = json.loads(Path(session.end_profiling()).read_text())
    ends = "_kernel_time"
    ran = [event["name"].removesuffix(ends) for event in events if event["name"].endswith(ends)]
    pooled = [ran.index(f"head/{i}/pooled") for i in range(5)]
    assert pooled == sorted(pooled)
    first = [min(ran.index(name) for name in ran if name.startswith(f"block{place}/")) for place in (4, 6)]
    assert pooled[1] < first[0] < pooled[2]  # negative.1 comes after the taps of turned.3
    assert pooled[3] < first[1]  # upright.0 comes after negative.0's
    nodes = {node.name: node for node in model.graph.node}
    model.graph.ClearField("node")
    model.graph.node.extend(nodes[name] for name in ran)
    alive = memory.peak_buffer_bytes(model.graph, sizes)
    facts = {prop.key: prop.value for prop in model.metadata_props}
    assert alive is not None
    assert max(STOCK.blocks[name].activation_bytes for name in ACROSS) <= alive <= int(facts["activation_bytes"])


def test_a_class_that_nobody_has_never_wins(tmp_path):
    """Its score is -inf in the file too, though every other score is far below zero; none is NaN."""
    meta, arrays = artefact([["upright.0"]], None, True)
    bias = np.where(np.arange(10) == 3, joint_head.ABSENT_BIAS, -1e6)
    head = joint_head.export_head({"weights": arrays["head.weights"], "bias": bias})
    arrays |= {f"head.{part}": head[part] for part in PARTS}
    require_same_scores(tmp_path, (meta, arrays), digits(5))
    session = ort.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    scores = session.run(None, {"x": digits(5)})[0]
    assert (scores[:, 3] == -np.inf).all()
    assert (np.isfinite(scores).sum(axis=1) == 9).all()
    assert (scores < 0).all()


def test_what_running_it_takes_is_in_the_file():
    model = onnx.load_from_string(export_stitched(*artefact([ACROSS], None, True), STOCK.blocks, FILES))
    facts = {prop.key: prop.value for prop in model.metadata_props}
    assert facts["labels"] == '["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]'
    assert facts["input"] == '{"channels": 1, "size": 28}'
    assert facts["taps"] == json.dumps([ACROSS])
    largest = max(STOCK.blocks[name].activation_bytes for name in ACROSS)
    assert int(facts["activation_bytes"]) >= largest + 4 * 28 * 28  # the file's input is held beside a block's maps
    assert int(facts["weight_bytes"]) > sum(STOCK.blocks[name].weight_bytes for name in ACROSS)
    assert (model.ir_version, [opset.version for opset in model.opset_import]) == (8, [17])


def test_the_same_network_is_the_same_file_also_of_blocks_that_a_store_has_linked_in(tmp_path):
    """Equal bytes, so that its sha256 names it."""
    linked = {name: tmp_path / path.name for name, path in FILES.items()}
    for path in FILES.values():
        (tmp_path / f"{path.name}.stored").write_bytes(path.read_bytes())
        (tmp_path / path.name).hardlink_to(tmp_path / f"{path.name}.stored")
    assert export_stitched(*artefact([ACROSS], None, True), STOCK.blocks, linked) == export_stitched(
        *artefact([ACROSS], None, True), STOCK.blocks, FILES
    )


def test_a_network_that_cannot_be_written_says_why(tmp_path):
    (tmp_path / "noise").write_bytes(b"noise")
    noise = {"upright.0.onnx": tmp_path / "noise"}
    for head, blocks, files, why in (
        (False, STOCK.blocks, FILES, "neither a head nor an alignment"),
        (True, STOCK.blocks, {}, r"no block 'upright\.0'"),
        (True, {}, FILES, r"no block 'upright\.0'"),
        (True, STOCK.blocks, noise, r"block 'upright\.0' in .*noise is unusable"),
    ):
        with pytest.raises(ModelError, match=why):
            export_stitched(*artefact([["upright.0"]], None, head), blocks, files)
    location = "0" * 64
    large = onnx.load(FILES["turned.3.onnx"])
    onnx.save(large, tmp_path / "graph", save_as_external_data=True, location=location, size_threshold=0)
    large = onnx.load(tmp_path / "graph", load_external_data=False)
    (tmp_path / location).write_bytes(b"short")
    with pytest.raises(
        ModelError, match=rf"'turned\.3' .* needs 4608 bytes, but {location[:12]} has 5 after the offset"
    ):
        export_stitched(*artefact([["turned.3"]], None, True), STOCK.blocks, {"turned.3.onnx": tmp_path / "graph"})
    large.graph.initializer[0].external_data[0].value = "../secret"
    onnx.save(large, tmp_path / "graph")
    with pytest.raises(
        ModelError, match=r"is in file '\.\./secret': weights may only be in a file .* named by its sha256"
    ):
        export_stitched(*artefact([["turned.3"]], None, True), STOCK.blocks, {"turned.3.onnx": tmp_path / "graph"})
    other = onnx.load(FILES["upright.0.onnx"])
    other.opset_import[0].version = 13
    onnx.save(other, tmp_path / "older")
    with pytest.raises(ModelError, match="was not made by `fedquilt prepare`"):
        export_stitched(*artefact([["upright.0"]], None, True), STOCK.blocks, {"upright.0.onnx": tmp_path / "older"})
