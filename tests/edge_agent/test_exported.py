"""What a network's file says of itself, as `fedquilt model export` writes it; all else is refused in one sentence."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from fedquilt.core import ModelError
from fedquilt.edge_agent.engines import exported_model


def test_what_export_writes_is_read() -> None:
    facts = {"input": json.dumps({"channels": 1, "size": 4}), "labels": json.dumps(["day", "night"])}
    found = exported_model.read_metadata(facts)
    assert (found.labels, found.task) == (("day", "night"), "classes")
    assert found.prepare_inputs(np.zeros((2, 4, 4), np.uint8)).shape == (2, 1, 4, 4)


@pytest.mark.parametrize(
    ("own", "shape"),
    [({}, (2, 16)), ({"input": {"mean": [0.5]}}, (2, 16)), ({"input": {"channels": 1, "size": 4}}, (2, 1, 4, 4))],
)
def test_a_layered_network_gets_images_if_its_table_declares_them(own: dict[str, Any], shape: tuple[int, ...]) -> None:
    found = exported_model.read_metadata({"network": json.dumps({"name": "mlp", "inputs": 16, **own})})
    assert found.prepare_inputs(np.zeros((2, 4, 4), np.uint8)).shape == shape


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("input", []),
        ("input", {"channels": 1}),
        ("input", {"channels": 1, "size": 0}),
        ("input", {"channels": 1, "size": 1 << 60}),
        ("input", {"channels": 1, "size": 4, "std": [0.0]}),
        ("input", {"mean": [], "std": []}),
        ("input", {"mean": [0.0], "scale": [1.0]}),
        ("input", {"\ud800": 1}),
        ("network", {"name": "mlp", "task": "wishes"}),
        ("network", {"name": "mlp", "input": None}),
        ("network", {"name": "mlp", "input": {"mean": "x"}}),
        ("network", {"name": "transformer"}),
        ("network", {"name": "transformer", "vocabulary": "x"}),
        ("labels", {"0": "day"}),
    ],
)
def test_anything_else_is_refused(name: str, table: Any) -> None:
    with pytest.raises(ModelError, match=f"metadata '{name}' of the model are damaged"):
        exported_model.read_metadata({name: json.dumps(table)})


def test_what_prepare_has_computed_to_standardise_is_read() -> None:
    table = {"mean": [0.5], "std": [0.25], "standardise": True}
    assert exported_model.read_metadata({"input": json.dumps(table)}).input == table
