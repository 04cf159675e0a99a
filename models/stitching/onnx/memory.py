"""Memory that ONNX Runtime needs for a graph's values, from the graph alone.

The rules are those of the runtime's allocation planner on a CPU, without its pattern of one large block
(`fedquilt.edge_agent.engines.onnx_engine`):

- Some operations are fused first, of which only the last one's output has a buffer: a convolution or product with bias
  and the activation of its result; x * sigmoid(x); x * (1 + erf(x / sqrt(2))) / 2 with the bias that was added to x; a
  product of matrices and a scale of its result or of one factor, or a factor transposed in its last two dimensions.
- The buffer of a value is allocated when the value is computed, and is free after the last use. A later value of the
  same shape reuses the latest free buffer. Until then the runtime holds the buffer. Unused buffers are returned, and so
  are those of values whose shapes the runtime learns only while running.
- The input belongs to the caller and stays. The output has its own buffer.
- Activations and softmax write into an input without other users, if its shape is known before. Sums and products never
  do. Reshaping shares its input's buffer.
- Recurrent layers compute the gates of all steps first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

ITEM_BYTES = {onnx.TensorProto.INT64: 8, onnx.TensorProto.DOUBLE: 8, onnx.TensorProto.BOOL: 1}  # all others: 4
SHARES = {"Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"}
ACTIVATIONS = {"Clip", "HardSigmoid", "LeakyRelu", "Relu", "Sigmoid", "Tanh"}
ACTIVATED = {"Conv", "Gemm"}
SCALES = {"Div", "Mul"}
GELU, BIAS_GELU, SWISH = "Gelu", "BiasGelu", "QuickGelu"  # the runtime's names of what it makes
IN_PLACE = ACTIVATIONS | {"Elu", "LogSoftmax", "Selu", "Softmax", "Softplus"}
ARITHMETIC = {
    *("Add", "Cast", "Concat", "ConstantOfShape", "Div", "Gather", "Mod", "Mul", "Reshape", "Slice", "Squeeze", "Sub"),
    *("Transpose", "Unsqueeze"),
}
FEW = 1000  # items: shapes have fewer, weights that are left out more
GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}


def peak_activation_bytes(model: onnx.ModelProto) -> int | None:
    """Return the peak bytes of one example's values, or None if a shape is unknown."""
    return peak_buffer_bytes(model.graph, _value_sizes(model), _shapes_known_before_run(model))


def peak_buffer_bytes(
    graph: onnx.GraphProto, sizes: Mapping[str, int], planned: Mapping[str, object] | None = None
) -> int | None:
    """Return the peak bytes that the runtime holds for values, or None if a size is unknown.

    `sizes` are of the values of one example, and `planned` the shapes known before running, None if all are.
    """
    nodes = _NodeUses(graph)
    shapes: Mapping[str, object] = sizes if planned is None else planned
    if not nodes.computed <= sizes.keys():
        return None
    buffers: list[_ValueBuffer] = []
    held: dict[str, _ValueBuffer] = {}  # by the values that lie there
    free: list[_ValueBuffer] = []  # the latest last
    steps = len(nodes.order)
    for place, node in enumerate(nodes.order):
        for name in node.output if node.op_type != "Constant" else ():
            if not name:
                continue
            given = nodes.find_reused_input(place, name, shapes)
            buffer = held.get(given) if given else None
            if buffer is None and name != nodes.output:
                buffer = _remove_buffer_of_shape(free, shapes.get(name))
            if buffer is None:
                buffer = _ValueBuffer(sizes[name], place, shapes.get(name))
                buffers.append(buffer)
            held[name] = buffer
            buffer.last = steps if name == nodes.output else max(place, buffer.last)
        buffers += [_ValueBuffer(size, place, None, place) for size in [_scratch_bytes(node, sizes)] if size]
        for name in {*node.input} & held.keys():
            held[name].last = max(held[name].last, place)
        for name in [name for name in held if nodes.until.get(name, -1) <= place and name != nodes.output]:
            buffer = held.pop(name)
            if buffer not in held.values():
                free.append(buffer)
    always = sizes.get(nodes.input, 0)
    return always + max(
        (sum(each.size for each in buffers if each.first <= place <= each.last) for place in range(steps)), default=0
    )


@dataclass(eq=False)
class _ValueBuffer:
    size: int
    first: int
    shape: object  # None if the runtime learns the shape only while running
    last: int = -1


class _NodeUses:
    def __init__(self, graph: onnx.GraphProto) -> None:
        self.order = fuse_operations(graph)
        self.input, self.output = graph.input[0].name, graph.output[0].name
        constants = {tensor.name for tensor in graph.initializer}
        constants |= {name for node in self.order if node.op_type == "Constant" for name in node.output}
        made = {name for node in self.order for name in node.output if name}
        self.computed = {self.input, *made} - constants
        self.until = {name: place for place, node in enumerate(self.order) for name in node.input}

    def find_reused_input(self, place: int, output: str, shapes: Mapping[str, object]) -> str | None:
        node = self.order[place]
        given = node.input[0] if node.input else ""
        if given not in self.computed or given == self.input or output == self.output:
            return None
        if node.op_type in SHARES:
            return given
        alike = shapes.get(output) is not None and shapes.get(given) == shapes.get(output)
        return given if node.op_type in IN_PLACE and alike and self.until[given] == place else None


def _remove_buffer_of_shape(free: list[_ValueBuffer], shape: object) -> _ValueBuffer | None:
    found = next((buffer for buffer in reversed(free) if buffer.shape == shape), None) if shape is not None else None
    if found is not None:
        free.remove(found)
    return found


def _scratch_bytes(node: onnx.NodeProto, sizes: Mapping[str, int]) -> int:
    if node.op_type == "HardSwish":  # a product with a hard sigmoid of its own
        return sizes[node.output[0]]
    if node.op_type == BIAS_GELU:  # x with its bias
        return sizes[node.output[0]]
    if node.op_type in GATES and node.output[0]:
        return GATES[node.op_type] * sizes[node.output[0]]
    return 0


# -- shapes ---------------------------------------------------------------------------------------


Dims = tuple["int | str | None", ...]  # of a value's shape: numbers, names, None where nothing is known


def _value_sizes(model: onnx.ModelProto) -> dict[str, int]:
    found = _fold_and_infer_shapes(_single_example_model(model))
    known = {
        name: (kind, shape) for name, (kind, dims) in found.items() if (shape := _dims_if_all_fixed(dims)) is not None
    }
    return {name: ITEM_BYTES.get(kind, 4) * math.prod(shape) for name, (kind, shape) in known.items()}


def _shapes_known_before_run(model: onnx.ModelProto) -> dict[str, Dims]:
    # Follows the batch through shapes made of single sizes, not through slices of shapes.
    one = onnx.ModelProto()
    one.CopyFrom(model)
    del one.graph.value_info[:]
    first = one.graph.input[0].type.tensor_type.shape.dim
    batch = first[0].dim_param if first else ""  # shape inference invents names for unknown sizes
    shapes = {node.output[0] for node in one.graph.node if node.op_type == "Shape"}
    for node in [node for node in one.graph.node if node.op_type == "Slice" and node.input[0] in shapes]:
        one.graph.node.remove(node)
        one.graph.input.append(onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.INT64, [None]))
    return {
        name: (kind, *dims)
        for name, (kind, dims) in _fold_and_infer_shapes(one).items()
        if dims is not None and all(isinstance(dim, int) or (batch and dim == batch) for dim in dims)
    }


def _fold_and_infer_shapes(model: onnx.ModelProto) -> dict[str, tuple[int, Dims | None]]:
    while True:
        graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        found = {
            value.name: (value.type.tensor_type.elem_type, _value_dims(value))
            for value in (*graph.input, *graph.value_info, *graph.output)
        }
        if not _fold_shape_arithmetic(model, {name: dims for name, (_, dims) in found.items() if dims is not None}):
            return found


def _value_dims(value: onnx.ValueInfoProto) -> Dims | None:
    """Return a value's dimensions, with None for an unknown one, or None without a shape."""
    kind = value.type.tensor_type
    if not kind.HasField("shape"):
        return None
    return tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in kind.shape.dim)


def _dims_if_all_fixed(dims: Dims | None) -> tuple[int, ...] | None:
    if dims is None:
        return None
    numbers = tuple(dim for dim in dims if isinstance(dim, int))
    return numbers if len(numbers) == len(dims) else None


def _single_example_model(model: onnx.ModelProto) -> onnx.ModelProto:
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


def _fold_shape_arithmetic(model: onnx.ModelProto, shapes: Mapping[str, Dims]) -> bool:
    """Replace operations on shapes by constants, in place. Return whether any was replaced."""
    # onnx's inference follows sizes through additions and products, not through divisions.
    inside = (tensor for tensor in model.graph.initializer if tensor.data_location != onnx.TensorProto.EXTERNAL)
    known = {tensor.name: numpy_helper.to_array(tensor) for tensor in inside}
    whole = {node.output[0]: shapes.get(node.input[0]) for node in model.graph.node if node.op_type == "Shape"}
    changed = False
    for node in model.graph.node:
        if node.op_type == "Constant":
            known[node.output[0]] = ReferenceEvaluator(_single_node_model(model, node)).run(None, {})[0]
            continue
        fed: dict[str, np.ndarray] | None = None
        if node.op_type == "Shape" and (shape := _dims_if_all_fixed(shapes.get(node.input[0]))) is not None:
            fed = {node.input[0]: np.zeros(shape, np.float32)}
        elif node.op_type == "Gather" and (dims := whole.get(node.input[0])) and node.input[1] in known:
            at = known[node.input[1]]
            if all(isinstance(dims[int(place)], int) for place in at.flat):
                sizes = np.array([dim if isinstance(dim, int) else 0 for dim in dims], np.int64)
                fed = {node.input[0]: sizes, node.input[1]: at}
        elif node.op_type in ARITHMETIC and {*node.input} - {""} <= known.keys():
            fed = {name: known[name] for name in node.input if name}
        if fed is None:
            continue
        value = np.asarray(ReferenceEvaluator(_single_node_model(model, node)).run(None, fed)[0])
        if value.size > FEW:
            continue
        known[node.output[0]] = value
        name = node.output[0]
        node.CopyFrom(onnx.helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value)))
        changed = True
    return changed


def _single_node_model(model: onnx.ModelProto, node: onnx.NodeProto) -> onnx.ModelProto:
    inputs = [onnx.ValueInfoProto(name=name) for name in dict.fromkeys(node.input) if name]
    graph = onnx.helper.make_graph([node], "node", inputs, [onnx.ValueInfoProto(name=node.output[0])])
    return onnx.helper.make_model(graph, opset_imports=model.opset_import)


# -- fused operations --------------------------------------------------------------------------------


def fuse_operations(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return a graph's operations in order, with fused operations in place of their last one."""
    found = _FusionPass(graph)
    for node in graph.node:
        found.fuse_starting_at(node)
    return found.fused_nodes()


class _FusionPass:
    def __init__(self, graph: onnx.GraphProto) -> None:
        self._nodes = list(graph.node)
        self._output = graph.output[0].name
        self._made: dict[int, onnx.NodeProto | None] = {}  # by place: what runs there instead, None: nothing
        self._constants = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self._constants[node.output[0]] = tuple(node.attribute[0].t.dims)
        self._places = {id(node): place for place, node in enumerate(self._nodes)}
        self._makers = {name: place for place, node in enumerate(self._nodes) for name in node.output if name}
        self._users: dict[str, list[int]] = {}
        for place, node in enumerate(self._nodes):
            for name in node.input:
                self._users.setdefault(name, []).append(place)

    def fused_nodes(self) -> list[onnx.NodeProto]:
        now = [self._made.get(place, node) for place, node in enumerate(self._nodes)]
        return [node for node in now if node is not None]

    def fuse_starting_at(self, node: onnx.NodeProto) -> None:
        place = self._places[id(node)]
        if node.op_type in ACTIVATED:
            after = self._only_user(node.output[0])
            if after is not None and self._nodes[after].op_type in ACTIVATIONS:
                self._replace([place, after], node.op_type, node.input)
        elif node.op_type == "Sigmoid":
            after = self._only_user(node.output[0])
            if after is not None and self._matches(after, "Mul", {node.input[0], node.output[0]}):
                self._replace([place, after], SWISH, node.input)
        elif node.op_type == "Erf":
            self._fuse_gelu(place)
        elif node.op_type == "MatMul":
            self._fuse_matmul_with_neighbours(place)

    def _fuse_gelu(self, place: int) -> None:
        # Half of x may be taken before or after the product with x.
        before = self._makers.get(self._nodes[place].input[0])
        x = None if before is None else self._input_if_scaling(before)
        one = self._only_user(self._nodes[place].output[0])
        if before is None or x is None or self._only_user(self._nodes[before].output[0]) is None:
            return
        if one is None or self._nodes[one].op_type != "Add":
            return
        times = self._only_user(self._nodes[one].output[0])
        if times is None or self._nodes[times].op_type != "Mul":
            return
        other = next(name for name in self._nodes[times].input if name != self._nodes[one].output[0])
        if other == x:
            half = self._only_user(self._nodes[times].output[0])
            if half is None or self._input_if_scaling(half) is None:
                return
            places = [before, place, one, times, half]
        else:
            half = self._makers.get(other)
            if half is None or self._input_if_scaling(half) != x or self._only_user(other) is None:
                return
            places = [before, half, place, one, times]
        adding = self._makers.get(x)
        if adding is not None and self._adds_bias(adding) and {*self._users[x]} <= {*places}:
            self._replace([adding, *places], BIAS_GELU, self._nodes[adding].input)
        else:
            self._replace(places, GELU, [x])

    def _fuse_matmul_with_neighbours(self, place: int) -> None:
        places, factors = [place], list(self._nodes[place].input)
        for at, name in enumerate(factors):
            maker = self._makers.get(name)
            if maker is None or maker in self._made or self._only_user(name) is None:
                continue
            within = self._input_if_scaling(maker)
            if within is None and self._swaps_last_axes(maker):
                within = self._nodes[maker].input[0]
            if within is not None:
                places.append(maker)
                factors[at] = within
        after = self._only_user(self._nodes[place].output[0])
        if after is not None and self._input_if_scaling(after) is not None:
            places.append(after)
        self._replace(places, "MatMul", factors)

    def _replace(self, places: Sequence[int], kind: str, inputs: Sequence[str]) -> None:
        last = max(places)
        self._made |= dict.fromkeys(places, None)
        self._made[last] = onnx.helper.make_node(kind, list(inputs), list(self._nodes[last].output))

    def _only_user(self, name: str) -> int | None:
        users = self._users.get(name, [])
        return users[0] if len(users) == 1 and name != self._output else None

    def _matches(self, place: int, kind: str, inputs: set[str]) -> bool:
        return self._nodes[place].op_type == kind and {*self._nodes[place].input} == inputs

    def _input_if_scaling(self, place: int) -> str | None:
        node = self._nodes[place]
        if node.op_type not in SCALES:
            return None
        by = [name for name in node.input if math.prod(self._constants.get(name, (2,))) == 1]
        if len(by) != 1 or (node.op_type == "Div" and by[0] != node.input[1]):
            return None
        return next(name for name in node.input if name != by[0])

    def _adds_bias(self, place: int) -> bool:
        node = self._nodes[place]
        return node.op_type == "Add" and any(len(self._constants.get(name, ())) == 1 for name in node.input)

    def _swaps_last_axes(self, place: int) -> bool:
        node = self._nodes[place]
        if node.op_type != "Transpose" or not node.attribute:
            return False
        order = list(node.attribute[0].ints)
        return order == [*range(len(order) - 2), len(order) - 1, len(order) - 2]
