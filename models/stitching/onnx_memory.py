"""Memory that ONNX Runtime takes for a graph's values, from the graph alone. Imports onnx.

The rules are those of the runtime's allocation planner on a processor, with its pattern of one large block off
(`fedquilt.edge_agent.engines.onnx_engine`):

- A value's buffer is taken when it is computed, and is free after its last use. A later value of the same size takes
  the latest such buffer; until then the runtime holds it. Buffers that none takes are returned, and so are those of
  values whose shapes the runtime learns only as it runs.
- The input belongs to the caller and stays; the output has a buffer of its own.
- Element-wise operations write into an input that nothing else uses; reshaping shares its input's buffer.
- Activations after a convolution or product are part of it, and x * sigmoid(x) is one operation that is not in place.
- Recurrent layers compute the gates of all steps first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

ITEM_BYTES = {onnx.TensorProto.INT64: 8, onnx.TensorProto.DOUBLE: 8, onnx.TensorProto.BOOL: 1}  # all others: 4
SHARES = {"Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"}
ACTIVATIONS = {"Clip", "HardSigmoid", "LeakyRelu", "Relu", "Sigmoid", "Tanh"}
IN_PLACE = ACTIVATIONS | {"Abs", "Add", "Div", "Elu", "Erf", "Exp", "Mul", "Neg", "Reciprocal", "Sqrt", "Sub"}
FUSING = {"Conv", "Gemm"}  # with an activation that follows
ARITHMETIC = {"Add", "Cast", "Concat", "Div", "Gather", "Mod", "Mul", "Reshape", "Slice", "Squeeze", "Sub", "Unsqueeze"}
FEW = 1000  # items: shapes have fewer, weights that are left out more
GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}


def activation_bytes(model: onnx.ModelProto) -> int | None:
    """Peak bytes of one example's values held at the same time; None: a shape is unknown."""
    return alive_bytes(model.graph, _sizes(model), _planned(model))


def alive_bytes(graph: onnx.GraphProto, sizes: Mapping[str, int], planned: Collection[str] | None = None) -> int | None:
    """Peak bytes that the runtime holds at once for values.

    Args:
        graph: with one input and one output.
        sizes: bytes of each value of one example.
        planned: values whose shapes the runtime knows before it runs; None: all.

    Returns:
        None if the size of a computed value is not given.
    """
    nodes = _Nodes(graph)
    if not nodes.computed <= sizes.keys():
        return None
    buffers: list[_Buffer] = []
    held: dict[str, _Buffer] = {}  # by the values that lie there
    free: list[_Buffer] = []  # the latest last
    steps = len(graph.node)
    for place, node in enumerate(graph.node):
        for name in node.output if node.op_type != "Constant" else ():
            if not name:
                continue
            given = nodes.taken_over(place, name, sizes)
            buffer = held.get(given) if given else None
            if name in nodes.gone:
                buffer = _Buffer(0, place)
            elif buffer is None:
                known = name != nodes.output and (planned is None or name in planned)
                buffer = _reused(free, sizes[name]) if known else None
            if buffer is None:
                buffer = _Buffer(sizes[name], place)
                buffers.append(buffer)
            held[name] = buffer
            buffer.last = steps if name == nodes.output else max(place, buffer.last)
        buffers += [_Buffer(size, place, place) for size in [_scratch(node, sizes)] if size]
        for name in {*node.input} & held.keys():
            held[name].last = max(held[name].last, place)
        for name in [name for name in held if nodes.until.get(name, -1) <= place and name != nodes.output]:
            buffer = held.pop(name)
            if buffer.size and buffer not in held.values() and (planned is None or name in planned):
                free.append(buffer)
    always = sizes.get(nodes.input, 0)
    return always + max(
        (sum(each.size for each in buffers if each.first <= place <= each.last) for place in range(steps)), default=0
    )


@dataclass(eq=False)
class _Buffer:
    """Bytes that the runtime holds from one node to another."""

    size: int
    first: int
    last: int = -1


class _Nodes:
    """Where values of a graph are used, and which operations the runtime joins."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        self.input, self.output = graph.input[0].name, graph.output[0].name
        constants = {tensor.name for tensor in graph.initializer}
        constants |= {name for node in graph.node if node.op_type == "Constant" for name in node.output}
        made = {name for node in graph.node for name in node.output if name}
        self.computed = {self.input, *made} - constants
        self.until = {name: place for place, node in enumerate(graph.node) for name in node.input}
        self._users: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self._users.setdefault(name, []).append(node)
        self._maker = {name: node for node in graph.node for name in node.output}
        self.gone = {name for name in made if self._gate_of_itself(name)}

    def taken_over(self, place: int, output: str, sizes: Mapping[str, int]) -> str | None:
        """Name of the value whose buffer a node's output takes; None: it takes another one."""
        node = self._graph.node[place]
        inputs = [name for name in node.input if name in self.computed and name != self.input]
        if node.op_type in SHARES:
            return node.input[0] if node.input[0] in inputs and output != self.output else None
        fused = node.op_type in ACTIVATIONS and self._fused(node.input[0])
        if node.op_type not in IN_PLACE or (output == self.output and not fused) or self.gone & {*node.input}:
            return None
        last = [name for name in inputs[:2] if self.until[name] == place and sizes[name] == sizes[output]]
        return last[0] if last else None

    def _fused(self, name: str) -> bool:
        maker = self._maker.get(name)
        return maker is not None and maker.op_type in FUSING and len(self._users[name]) == 1

    def _gate_of_itself(self, name: str) -> bool:
        """Whether a value is the sigmoid of x in x * sigmoid(x), which the runtime never computes by itself."""
        maker, users = self._maker[name], self._users.get(name, [])
        return (
            maker.op_type == "Sigmoid"
            and len(users) == 1
            and users[0].op_type == "Mul"
            and {*users[0].input} == {maker.input[0], name}
        )


def _reused(free: list[_Buffer], size: int) -> _Buffer | None:
    found = next((buffer for buffer in reversed(free) if buffer.size == size), None)
    if found is not None:
        free.remove(found)
    return found


def _scratch(node: onnx.NodeProto, sizes: Mapping[str, int]) -> int:
    """Bytes that an operation takes for itself while it runs."""
    if node.op_type == "HardSwish":  # a product with a hard sigmoid of its own
        return sizes[node.output[0]]
    if node.op_type in GATES and node.output[0]:
        return GATES[node.op_type] * sizes[node.output[0]]
    return 0


# -- shapes ---------------------------------------------------------------------------------------


def _sizes(model: onnx.ModelProto) -> dict[str, int]:
    """Bytes of the values of one example whose shapes can be inferred."""
    one = _one_example(model)
    while True:
        graph = onnx.shape_inference.infer_shapes(one, data_prop=True).graph
        kinds = {
            value.name: value.type.tensor_type
            for value in (*graph.input, *graph.value_info, *graph.output)
            if value.type.tensor_type.HasField("shape")
            and all(dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim)
        }
        shapes = {name: tuple(dim.dim_value for dim in kind.shape.dim) for name, kind in kinds.items()}
        if not _fold(one, shapes):
            return {name: ITEM_BYTES.get(kinds[name].elem_type, 4) * math.prod(shapes[name]) for name in shapes}


def _planned(model: onnx.ModelProto) -> set[str]:
    """Values whose shapes are known before any example is: numbers, or the name of the batch."""
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    first = graph.input[0].type.tensor_type.shape.dim
    batch = first[0].dim_param if first else ""  # inference makes up names for what it does not know
    return {
        value.name
        for value in graph.value_info
        if value.type.tensor_type.HasField("shape")
        and all(dim.dim_value or (batch and dim.dim_param == batch) for dim in value.type.tensor_type.shape.dim)
    }


def _one_example(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy for one example, in which large weights are known by their shapes alone."""
    one = onnx.ModelProto()
    one.CopyFrom(model)
    for value in (*one.graph.input, *one.graph.output):
        if value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[0].dim_value = 1
    del one.graph.value_info[:]
    large = [tensor for tensor in one.graph.initializer if math.prod(tensor.dims) > FEW]
    for tensor in large:
        one.graph.initializer.remove(tensor)
        one.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return one


def _fold(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Turn arithmetic of shapes into constants, as attention divides widths; False: there is none left.

    onnx's own inference follows sizes through additions and products, not through divisions.
    """
    inside = (tensor for tensor in model.graph.initializer if tensor.data_location != onnx.TensorProto.EXTERNAL)
    known = {tensor.name: numpy_helper.to_array(tensor) for tensor in inside}
    changed = False
    for node in model.graph.node:
        if node.op_type == "Constant":
            known[node.output[0]] = ReferenceEvaluator(_alone(model, node)).run(None, {})[0]
            continue
        if node.op_type == "Shape" and node.input[0] in shapes:
            fed = {node.input[0]: np.zeros(shapes[node.input[0]], np.float32)}
        elif node.op_type in ARITHMETIC and {*node.input} - {""} <= known.keys():
            fed = {name: known[name] for name in node.input if name}
        else:
            continue
        value = np.asarray(ReferenceEvaluator(_alone(model, node)).run(None, fed)[0])
        if value.size > FEW:
            continue
        known[node.output[0]] = value
        name = node.output[0]
        node.CopyFrom(onnx.helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value)))
        changed = True
    return changed


def _alone(model: onnx.ModelProto, node: onnx.NodeProto) -> onnx.ModelProto:
    """A model of one node whose inputs are all given."""
    inputs = [onnx.ValueInfoProto(name=name) for name in dict.fromkeys(node.input) if name]
    graph = onnx.helper.make_graph([node], "node", inputs, [onnx.ValueInfoProto(name=node.output[0])])
    return onnx.helper.make_model(graph, opset_imports=model.opset_import)
