"""Which graphs may be run: what networks are made of, and nothing that reads, loops or claims without bounds."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_graphs
import numpy as np
import pytest

import fedquilt
from fedquilt.core import ModelError
from fedquilt.onnx import graph_check
from fedquilt.onnx.file_format import OPERATORS
from fedquilt.tools.lab import demo

onnx = pytest.importorskip("onnx")
hypothesis = pytest.importorskip("hypothesis")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

BUNDLE = Path(demo.__file__).parent / "bundle" / "blobs"
SECRET = b"-----BEGIN PRIVATE KEY-----"


def model(*nodes: Any, tensors: tuple[Any, ...] = (), opsets: tuple[Any, ...] = (("", 17),), **more: Any) -> Any:
    """A model from "x", (n, 4), to "y"."""
    value = helper.make_tensor_value_info
    y = value("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(list(nodes), "g", [value("x", TensorProto.FLOAT, ["n", 4])], [y], list(tensors))
    opset_imports = [helper.make_opsetid(*each) for each in opsets]
    return helper.make_model(graph, opset_imports=opset_imports, ir_version=8, **more)


def node(kind: str, *inputs: str, **attributes: Any) -> Any:
    return helper.make_node(kind, list(inputs or ("x",)), ["y"], **attributes)


def constant(name: str, *numbers: float, kind: Any = np.int64) -> Any:
    return numpy_helper.from_array(np.array(numbers, kind), name)


def beside(location: str, nbytes: int, **more: Any) -> Any:
    tensor = TensorProto(name="w", data_type=TensorProto.UINT8, dims=[nbytes], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, "offset": "0", "length": str(nbytes), **more}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def stored(folder: Path, made: Any) -> Path:
    path = folder / "graph"
    path.write_bytes(made if isinstance(made, bytes) else made.SerializeToString())
    return path


def subgraph(*nodes: Any) -> Any:
    return helper.make_graph(list(nodes), "s", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])


def nested(depth: int) -> Any:
    inner = node("Identity")
    for _ in range(depth):
        inner = node("If", "c", then_branch=subgraph(inner), else_branch=subgraph(node("Identity")))
    return inner


def with_function() -> Any:
    made = model(node("Relu"))
    relu = helper.make_node("Relu", ["a"], ["b"])
    made.functions.append(helper.make_function("", "Relu", ["a"], ["b"], [relu], [helper.make_opsetid("", 17)]))
    return made


def short_data() -> Any:
    return TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1000], raw_data=bytes(4))


def claiming(dims: list[int]) -> Any:
    return TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims, float_data=[1.0])


def named_twice() -> Any:
    tensor = beside("f" * 64, 9)
    tensor.external_data.add(key="location", value="../device.key")
    return tensor


HOSTILE: dict[str, tuple[Callable[[], Any], str]] = {
    "an absolute path": (
        lambda: model(node("Relu"), tensors=(beside("/etc/passwd", 9),)),
        "in a file of the graph's folder",
    ),
    "a path outside": (
        lambda: model(node("Relu"), tensors=(beside("../device.key", 9),)),
        "in a file of the graph's folder",
    ),
    "a plain name": (lambda: model(node("Relu"), tensors=(beside("device.key", 9),)), "named by its sha256"),
    "memory": (lambda: model(node("Relu"), tensors=(beside("*/_ORT_MEM_ADDR_/*", 9),)), "named by its sha256"),
    "no such file": (
        lambda: model(node("Relu"), tensors=(beside("e" * 64, 9),)),
        "cannot be read in the graph's folder",
    ),
    "another key": (lambda: model(node("Relu"), tensors=(beside("e" * 64, 9, basepath="/"),)), "'basepath'"),
    "a key twice": (lambda: model(node("Relu"), tensors=(named_twice(),)), "has key 'location' twice"),
    "beyond its end": (lambda: model(node("Relu"), tensors=(beside("f" * 64, 99),)), "needs 99 bytes, but ffff"),
    "beyond by offset": (
        lambda: model(node("Relu"), tensors=(beside("f" * 64, 9, offset="8"),)),
        "has 8 after the offset",
    ),
    "a negative offset": (
        lambda: model(node("Relu"), tensors=(beside("f" * 64, 9, offset="-9"),)),
        "of external data is not a number",
    ),
    "a loop": (lambda: model(node("Loop", "x", body=subgraph(node("Relu")))), "the operator 'Loop'"),
    "a scan": (lambda: model(node("Scan", "x", body=subgraph(node("Relu")), num_scan_inputs=1)), "operator 'Scan'"),
    "random numbers": (lambda: model(node("RandomNormal", shape=[9])), "the operator 'RandomNormal'"),
    "an unknown operator": (lambda: model(node("Nonsense")), "the operator 'Nonsense'"),
    "a custom domain": (lambda: model(node("Relu", domain="evil"), opsets=(("", 17), ("evil", 1))), "'evil.Relu'"),
    "it is not imported": (lambda: model(node("Relu", domain="evil")), "'evil.Relu'"),
    "in a branch": (
        lambda: model(
            node("If", "c", then_branch=subgraph(node("Relu", domain="evil")), else_branch=subgraph(node("Relu"))),
            opsets=(("", 17), ("evil", 1)),
        ),
        "'evil.Relu'",
    ),
    "the runtime's own": (lambda: model(node("Inverse", domain="com.microsoft")), "'com.microsoft.Inverse'"),
    "functions": (with_function, "the model has functions: inline them"),
    "a graph in Relu": (lambda: model(node("Relu", body=subgraph(node("Relu")))), "Relu contains a graph"),
    "deep nesting": (lambda: model(nested(5)), "5 deep"),
    "data cut short": (lambda: model(node("Relu"), tensors=(short_data(),)), "has 4 bytes, not 4000"),
    "a claimed size": (lambda: model(node("Relu"), tensors=(claiming([1 << 20]),)), "fewer numbers than its shape"),
    "a huge size": (lambda: model(node("Relu"), tensors=(claiming([1 << 40]),)), f"has {1 << 40} elements"),
    "sizes that wrap": (lambda: model(node("Relu"), tensors=(claiming([1 << 32, 1 << 32]),)), "elements"),
    "a negative size": (lambda: model(node("Relu"), tensors=(claiming([-1]),)), "negative size"),
    "many axes": (lambda: model(node("Relu"), tensors=(claiming([1] * 17),)), "more than 16 numbers"),
    "texts": (lambda: model(node("Relu"), tensors=(helper.make_tensor("w", 8, [1], [b"x"]),)), "has string_data"),
    "a sequence": (lambda: with_input(helper.make_tensor_sequence_value_info("x", 1, [4])), "has sequence_type"),
    "no examples": (lambda: with_input(made_graphs.value("x", ())), "single number"),
    "a bomb": (lambda: model(node("ConstantOfShape", "s"), tensors=(constant("s", 1 << 20, 1 << 20),)), "1.1e+12"),
    "a bomb in a branch, of a size from outside": (
        lambda: model(
            node("If", "c", then_branch=subgraph(node("ConstantOfShape", "s")), else_branch=subgraph(node("Identity"))),
            tensors=(constant("s", 1 << 20, 1 << 20),),
        ),
        "1.1e+12",
    ),
    "a bomb by Expand": (lambda: model(node("Expand", "x", "s"), tensors=(constant("s", 1 << 40, 4),)), "Expand"),
    "a bomb by Tile": (lambda: model(node("Tile", "x", "s"), tensors=(constant("s", 1 << 40, 1),)), "Tile"),
    "a bomb by Constant": (
        lambda: model(
            helper.make_node("Constant", [], ["s"], value_ints=[1 << 20, 1 << 20]), node("ConstantOfShape", "s")
        ),
        "ConstantOfShape makes",
    ),
    "a bomb by Range": (
        lambda: model(
            node("Range", "a", "b", "c"), tensors=(constant("a", 0), constant("b", 1 << 40), constant("c", 1))
        ),
        "Range",
    ),
    "a bomb by Pad": (
        lambda: model(node("Pad", "x", "s"), tensors=(constant("s", 0, 0, 0, 1 << 30),)),
        "Pad adds more",
    ),
    "a bomb by Resize": (
        lambda: model(node("Resize", "x", "", "s"), tensors=(constant("s", 1e6, 1e6, kind=np.float32),)),
        "Resize",
    ),
    "a bomb by pads": (lambda: model(node("MaxPool", kernel_shape=[1], pads=[1 << 40, 0])), "pads of MaxPool"),
    "many nodes": (lambda: model(*[node("Relu")] * 20_001), "more than 20000 nodes"),
    "a long name": (lambda: model(node("Relu", "x" * 5000)), "more than 4096 bytes"),
    "odd metadata": (lambda: with_metadata("9" * 5000), "is not a number of bytes"),
    "two graphs": (lambda: model(node("Relu")).SerializeToString() * 2, "twice"),
    "an unknown field": (lambda: model(node("Relu")).SerializeToString() + b"\xfa\x07\x00", "field 127"),
    "a group": (lambda: b"\x0b\x0c", "wire type 3"),
    "nothing": (lambda: b"", "the file has 0 bytes"),
    "no graph": (lambda: onnx.ModelProto(ir_version=8, opset_import=[helper.make_opsetid("", 17)]), "no graph"),
    "noise": (lambda: b"not a graph", "not a valid ONNX file"),
}


def with_input(declared: Any) -> Any:
    made = model(node("Relu"))
    made.graph.input[0].CopyFrom(declared)
    return made


def with_metadata(said: str) -> Any:
    made = model(node("Relu"))
    helper.set_model_props(made, {"activation_bytes": said})
    return made


@pytest.mark.parametrize("case", HOSTILE)
def test_a_graph_with_what_no_network_needs_is_refused(tmp_path, case):
    made, said = HOSTILE[case]
    (tmp_path / ("f" * 64)).write_bytes(bytes(16))
    with pytest.raises(ModelError) as refused:
        graph_check.check_file(stored(tmp_path, made()))
    assert said in str(refused.value)


@pytest.mark.parametrize("how", ["link", "folder", "fifo"])
def test_weights_are_read_from_a_plain_file_beside_the_graph_alone(tmp_path, how):
    name = "e" * 64
    (tmp_path / "device.key").write_bytes(SECRET)
    (tmp_path / "blobs").mkdir()
    place = tmp_path / "blobs" / name
    if how == "link":
        place.symlink_to("../device.key")
    elif how == "folder":
        place.mkdir()
    else:
        os.mkfifo(place)
    with pytest.raises(ModelError, match="a link or not a file"):
        graph_check.check_file(stored(tmp_path / "blobs", model(node("Relu"), tensors=(beside(name, len(SECRET)),))))


def test_what_networks_are_made_of_passes(tmp_path):
    payload = np.arange(16, dtype=np.float32).tobytes()
    location = hashlib.sha256(payload).hexdigest()
    (tmp_path / location).write_bytes(payload)
    far = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4, 4], data_location=TensorProto.EXTERNAL)
    far.external_data.add(key="location", value=location)
    typed = helper.make_tensor("t", TensorProto.INT64, [2], [-1, 4])
    made = model(
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Reshape", ["a", "t"], ["b"]),
        helper.make_node("Constant", [], ["c"], value=constant("", 1, kind=np.bool_)),
        helper.make_node("Squeeze", ["c"], ["d"]),
        node("If", "d", then_branch=subgraph(node("Identity", "b")), else_branch=subgraph(node("Relu", "b"))),
        tensors=(far, typed),
    )
    helper.set_model_props(made, {"activation_bytes": "64", "weight_bytes": "80"})
    found = graph_check.check_file(stored(tmp_path, made))
    assert (found.weight_bytes, found.activation_bytes, found.nodes) == (64 + 16, 64, 7)
    assert found.metadata["weight_bytes"] == "80"


@pytest.mark.parametrize("domains", [("ai.onnx.ml",), ("ai.onnx.ml", "com.microsoft", "a.domain.that.nobody.knows")])
def test_a_domain_that_no_node_uses_does_not_matter(domains):
    made = made_graphs.product(opsets=[("", 17), *((domain, 2) for domain in domains)])
    assert graph_check.check_bytes(made.SerializeToString()).nodes > 0


@pytest.mark.parametrize(
    ("declared", "shape"),
    [
        (["n", 3, 8, 8], (3, 8, 8)),
        ([-1, 3, -1, -1], (3, None, None)),  # as paddle writes it
        ([0, 3, 0, 8], (3, None, 8)),
        (["", 3, "", 8], (3, None, 8)),
        ([None, None], (None,)),
        (["n"], ()),
        (None, None),
    ],
)
def test_an_axis_without_a_size_is_unknown(declared, shape):
    found = graph_check.check_bytes(made_graphs.product(declared).SerializeToString())
    found.require_batched_examples()
    assert found.input_shape == shape


def test_inputs_with_a_value_are_weights():
    made = made_graphs.product(inputs=[made_graphs.value("w", (6, 3))])
    found = graph_check.check_bytes(made.SerializeToString())
    found.require_batched_examples()
    assert [each.name for each in found.inputs] == ["x"]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            lambda: made_graphs.product(inputs=[made_graphs.value("state", (2, 1, 128)), made_graphs.value("sr", ())]),
            "the graph has 3 inputs ('x', 'state', 'sr'), but fedquilt feeds one: export a network with one input",
        ),
        (lambda: without_inputs(), "the graph has 0 inputs (none), but fedquilt feeds one"),
        (lambda: with_outputs("y", "f"), "the graph has 2 outputs ('y', 'f'), but fedquilt reads one"),
        (
            lambda: made_graphs.product((4, 6)),
            "input 'x' takes exactly 4 examples at once: export it with a first axis",
        ),
        (lambda: made_graphs.product(kind=made_graphs.BFLOAT16), "input 'x' is bfloat16"),
        (
            lambda: made_graphs.product(output=made_graphs.value("y", kind=made_graphs.BFLOAT16)),
            "output 'y' is bfloat16, which numpy does not support: export it with float32",
        ),
        (lambda: made_graphs.product(()), "input 'x' is a single number"),
    ],
)
def test_a_graph_that_cannot_be_fed_is_refused_with_a_fix(tmp_path, made, said):
    with pytest.raises(ModelError) as refused:
        graph_check.check_file(stored(tmp_path, made()))
    assert said in str(refused.value)


def without_inputs() -> Any:
    made = made_graphs.product()
    del made.graph.input[:]
    return made


def with_outputs(*names: str) -> Any:
    made = made_graphs.product()
    del made.graph.output[:]
    made.graph.output.extend(made_graphs.value(name) for name in names)
    return made


def test_weights_in_a_branch_count_too():
    branch = subgraph(node("Add", "x", "w"))
    branch.initializer.append(constant("w", 1, 2, 3, 4, kind=np.float32))
    held = constant("c", 1, kind=np.bool_)
    made = model(node("If", "c", then_branch=branch, else_branch=subgraph(node("Identity"))), tensors=(held,))
    assert graph_check.check_bytes(made.SerializeToString()).weight_bytes == 1 + 16


def test_every_graph_of_the_demo_passes_and_says_what_it_weighs():
    found = 0
    for path in BUNDLE.iterdir():
        try:
            if not onnx.load_from_string(path.read_bytes()).graph.node:
                continue
        except Exception:
            continue
        graph = graph_check.check_file(path)
        assert graph.weight_bytes == int(graph.metadata["weight_bytes"])
        found += 1
    assert found == 16


def test_permitted_operators_are_those_of_onnx_without_loops_randomness_texts_and_sequences():
    known = {schema.name: schema for schema in onnx.defs.get_all_schemas() if not schema.domain}
    assert OPERATORS[""] <= known.keys()
    assert not OPERATORS[""] & {
        "Loop",
        "Scan",
        "SequenceMap",
        "RandomNormal",
        "RandomUniform",
        "Bernoulli",
        "Multinomial",
    }
    assert not [name for name in OPERATORS[""] if name.startswith(("Sequence", "String", "Optional", "Random"))]


def test_sessions_are_made_in_one_place():
    root = Path(fedquilt.__file__).parent
    places = [root, *(each for each in root.iterdir() if each.is_symlink())]  # rglob does not follow links
    paths = [path for place in places for path in place.rglob("*.py")]
    found = {f"{path.parent.name}/{path.name}" for path in paths if ".InferenceSession(" in path.read_text()}
    assert found == {"engines/execution_providers.py", "gpu_check/tasks.py"}
