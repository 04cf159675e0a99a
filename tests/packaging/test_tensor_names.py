"""What a tensor is says the register: no product code compares tensor names with names of torch's."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("fedquilt", "coordinator", "edge_agent", "models", "tools", "profiles")
TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked", "in_proj_weight", "in_proj_bias")
CALLS = ("endswith", "startswith", "removesuffix", "fullmatch", "match", "search")
PERMITTED = {
    "fedquilt/formats/tensor_register.py": "the register itself: attributes of torch's modules, whose types it knows",
    "edge_agent/task/main.py": "the metric `weight` of an update",
    "models/partial/dependency_trace.py": "torch's name for a layer's own weight: what makes a weight is not cut",
}


def comparisons(source: str) -> Iterator[str]:
    """Yield what compares a value with a literal name of a tensor, as `==`, `in`, `endswith` and `match` do."""
    for node in ast.walk(ast.parse(source)):
        given: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            given = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CALLS:
            given = node.args
        elif isinstance(node, ast.MatchValue):
            given = [node.value]
        for each in given:
            if any(map(_names, _texts(each))):
                yield f"line {each.lineno}: {ast.unparse(each)}"


def _texts(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    parts = node.values if isinstance(node, ast.JoinedStr) else getattr(node, "elts", [])
    return [text for part in parts for text in _texts(part)]


def _names(text: str) -> bool:
    leaf = text.strip(".").rpartition(".")[2]
    return leaf in TENSORS or leaf == "running_"


def files() -> Iterator[Path]:
    for folder in PRODUCT:
        yield from (path for path in (ROOT / folder).rglob("*.py") if path.resolve() == path)


def test_no_product_code_compares_tensor_names_with_literals() -> None:
    """A name is no role: `fedquilt.formats.tensor_register` has each tensor's kind, module and type."""
    found = {}
    for path in files():
        name, text = str(path.relative_to(ROOT)), path.read_text()
        suspected = name not in PERMITTED and any(word in text for word in (*TENSORS, "running_"))
        if suspected and (odd := list(comparisons(text))):
            found[name] = odd
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        'name.endswith((".weight", ".bias"))',
        'leaf == "weight"',
        'f"{path}.running_mean" in model',
        'match leaf:\n    case "weight":\n        pass',
    ],
)
def test_a_comparison_with_a_name_is_found(source: str) -> None:
    assert len(list(comparisons(source))) == 1
