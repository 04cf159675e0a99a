"""Operations that ONNX Runtime fuses before it runs a graph on a CPU.

Of fused operations only the output of the last one has a buffer (`memory`). Fused are:

- a convolution or product with bias, and the activation of its result,
- x * sigmoid(x), and x * (1 + erf(x / sqrt(2))) / 2, with the bias that was added to x in the latter,
- a product of matrices and a scale of its result or of one factor, or a factor transposed in its last two dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx

ACTIVATIONS = {"Clip", "HardSigmoid", "LeakyRelu", "Relu", "Sigmoid", "Tanh"}
ACTIVATED = {"Conv", "Gemm"}
SCALES = {"Div", "Mul"}
GELU, BIAS_GELU, SWISH = "Gelu", "BiasGelu", "QuickGelu"  # the runtime's names of what it makes


def fuse_operations(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return a graph's operations in order, with fused operations in place of their last one."""
    found = _FusionPass(graph)
    for node in graph.node:
        found.fuse_starting_at(node)
    return found.fused_nodes()


class _FusionPass:
    """Nodes of a graph, of which some make place for a joined one."""

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
