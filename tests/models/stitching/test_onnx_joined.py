"""Operations that ONNX Runtime joins into one, and those beside them that it leaves alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from fedquilt.models.stitching.onnx.memory import fuse_operations  # noqa: E402

GELU = (("Div", "v root", "c"), ("Erf", "c", "d"), ("Add", "d one", "e"), ("Mul", "v half", "f"), ("Mul", "f e", "g"))
PARTS = [kind for kind, _, _ in GELU]
CONSTANTS = {"root": np.sqrt(2), "one": 1.0, "half": 0.5, "bias": np.ones(8), "wide": np.ones((8, 8))}


def kinds(*nodes: tuple[str, str, str], output: str = "y", perm: Sequence[int] = ()) -> list[str]:
    """Operations that run for nodes ("Mul", "x half", "y"), in order; `perm`: the order of a Transpose."""
    more: dict[str, Any] = {"Transpose": {"perm": list(perm)}}
    made = [helper.make_node(kind, given.split(), [name], **more.get(kind, {})) for kind, given, name in nodes]
    kept = [numpy_helper.from_array(np.array(value, np.float32), name) for name, value in CONSTANTS.items()]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 8, 8]) for name in ("x", output))
    return [node.op_type for node in fuse_operations(helper.make_graph(made, "g", [x], [y], kept))]


def test_a_scaled_factor_is_part_of_its_product_unless_it_is_used_elsewhere():
    assert kinds(("Mul", "x half", "a"), ("MatMul", "a wide", "y")) == ["MatMul"]
    used_twice = ("Mul", "x half", "a"), ("MatMul", "a wide", "b"), ("Add", "a b", "y")
    assert kinds(*used_twice) == ["Mul", "MatMul", "Add"]


def test_a_scale_between_two_products_belongs_to_the_first():
    assert kinds(("MatMul", "x wide", "a"), ("Mul", "a half", "b"), ("MatMul", "b wide", "y")) == ["MatMul", "MatMul"]


def test_one_number_divided_by_values_is_no_scale():
    assert kinds(("Div", "x half", "a"), ("MatMul", "a wide", "y")) == ["MatMul"]
    assert kinds(("Div", "half x", "a"), ("MatMul", "a wide", "y")) == ["Div", "MatMul"]


@pytest.mark.parametrize(("perm", "one"), [((0, 2, 1), True), ((1, 0, 2), False), ((2, 1, 0), False)])
def test_only_a_factor_whose_last_two_dimensions_are_swapped_is_part_of_its_product(perm, one):
    found = kinds(("Transpose", "x", "a"), ("MatMul", "x a", "y"), perm=perm)
    assert found == (["MatMul"] if one else ["Transpose", "MatMul"])


def test_what_the_graph_puts_out_is_not_joined_with_what_follows():
    assert kinds(("Gemm", "x wide", "a"), ("Relu", "a", "y")) == ["Gemm"]
    assert kinds(("Gemm", "x wide", "a"), ("Relu", "a", "b"), output="a") == ["Gemm", "Relu"]


def test_a_gelu_takes_its_bias_in_only_where_nothing_else_uses_the_sum():
    sums = ("Add", "x bias", "v")
    assert kinds(sums, *GELU, ("Relu", "g", "y")) == ["BiasGelu", "Relu"]
    assert kinds(sums, *GELU, ("Add", "g v", "y")) == ["Add", "Gelu", "Add"]


def used_beside(value: str) -> list[str]:
    """Operations of a GELU of which this value is added to the result."""
    return kinds(("Relu", "x", "v"), *GELU, ("Add", f"g {value}", "y"))


def test_a_gelu_whose_half_is_used_elsewhere_stays_in_its_parts():
    assert used_beside("g") == ["Relu", "Gelu", "Add"]
    assert used_beside("f") == ["Relu", *PARTS, "Add"]


def test_an_error_function_whose_input_is_used_elsewhere_stays_five_operations():
    """The runtime keeps x / sqrt(2) where another operation than the error function takes it."""
    assert used_beside("c") == ["Relu", *PARTS, "Add"]
