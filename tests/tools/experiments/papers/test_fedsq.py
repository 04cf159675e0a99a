"""FedSQ beside its baselines: one small run from one start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="networks are pre-trained and federated")

from fedquilt.tools.lab import papers
from fedquilt.tools.lab.papers.grid import merge_tables


@pytest.mark.nightly
def test_all_three_begin_with_the_same_pretrained_network_and_go_apart(tmp_path: Path) -> None:
    table = papers.load_tables()["fedsq"]
    over = {"pretrain": {"data": {"path": "$digits"}, "fit": {"epochs": 1}}}
    table = replace(table, raw=merge_tables(table.raw, over))
    result = papers.run_table(table, seeds=[1], rounds=2, columns=["cnn, iid"], out=tmp_path)
    rows = result["columns"]["cnn, iid"]
    assert rows.keys() == {"fedavg", "fedprox", "fedsq"}
    curves = {name: [mark["test"] for mark in row["runs"][0]["marks"]] for name, row in rows.items()}
    assert all(len(curve) == 3 for curve in curves.values())
    assert len({curve[0] for curve in curves.values()}) == 1
    assert curves["fedsq"] != curves["fedavg"]
    assert {name: row["values"]["test@0"] for name, row in rows.items()} == {name: c[:1] for name, c in curves.items()}
    assert list(result["told"]) == ["fedsq - fedavg, at the end, cnn, iid", "fedsq - fedprox, at the end, cnn, iid"]
    assert result["figures"] == {}
    made = list((tmp_path / "starts").glob("*/bundle/bundle.json"))
    assert len(made) == 1
    text = papers.format_result(table.grid, result)
    assert text[3].split() == ["0", "1", "2", "end"]  # of rounds that there were
