"""Sub-models on a fleet of mixed memory: one small run on drawn pictures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="networks are trained")

from fedquilt.testing.toy_networks import write_images
from fedquilt.tools.lab import papers
from fedquilt.tools.lab.papers import custom
from fedquilt.tools.lab.papers.grid import merge_tables


@pytest.mark.usefixtures("runs_here")
def test_a_small_run_tells_the_whole_network_and_its_parts(tmp_path: Path) -> None:
    table = papers.load_tables()["submodels"]
    path = str(write_images(tmp_path / "drawn.npz", 14))
    before = {"data": {"path": path, "limit": 40}, "fit": {"epochs": 1, "batch": 16}}
    over: dict[str, Any] = {
        "job": {
            "model": {"width": 4},
            "fleet": {"devices": 4},
            "data": {"path": path, "limit": 60},
            "test": {"limit": 40},
        },
        "rows": {"FedLPS, pre-trained": {"pretrain": before}},
    }
    table = replace(table, raw=merge_tables(table.raw, over))
    chosen = ["FedAvg, whole on all", "FeDepth", "FedLPS, pre-trained"]
    result = papers.run_table(table, seeds=[0], rounds=1, rows=chosen, out=tmp_path)
    rows = {name: row["values"] for name, row in result["columns"][""].items()}
    assert set(rows) == set(chosen)
    for name, values in rows.items():
        parts = [values[part][0] for part in custom.BUDGETS]
        assert 0 <= values["test"][0] <= 1
        if name in ("FedAvg, whole on all", "FeDepth"):
            assert parts == [None] * 3
        else:
            assert all(0 <= value <= 1 for value in parts)
    told = [{values["test"][0], *(values[part][0] for part in custom.BUDGETS)} for values in rows.values()]
    assert any(len(each) > 2 for each in told)
    assert "FeDepth over FedAvg" in result["told"]
    line = next(line for line in papers.format_result(table.grid, result) if line.startswith("FeDepth"))
    assert len(line.split()) == 2  # no parts
