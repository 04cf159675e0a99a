"""FedPeWS's tables run again: a small run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedquilt.tools.lab import papers
from fedquilt.tools.lab.papers.grid import merge_tables

pytest.importorskip("torch", reason="a network is trained")


@pytest.mark.nightly
def test_a_short_run_of_a_column_tells_a_curve_for_each_method(tmp_path: Path) -> None:
    table = papers.load_tables()["fedpews-table6"]
    faster = {"3.2k-0.1": {"shares": {"warmup": 0.5}, "job": {"params": {"batch": 20}}}}
    table = replace(table, raw=merge_tables(table.raw, {"axes": {"column": faster}}))
    both = papers.run_table(table, seeds=[1, 2], rounds=2, columns=["3.2k-0.1"], out=tmp_path / "both")
    (column,) = both["columns"].values()
    base, pews = (column[name]["runs"] for name in ("FedProx", "FedProx+PeWS"))
    assert (base[0]["params"]["mu"], base[0]["params"]["warmup"], pews[0]["params"]["warmup"]) == (0.01, 0, 1)
    curves = [[mark["test"] for mark in run["marks"]] for run in (*base, *pews)]
    assert [len(curve) for curve in curves] == [2] * 4
    assert all(0 <= value <= 1 for curve in curves for value in curve)
    assert curves[0] != curves[1]  # another seed
    assert curves[0] != curves[2]  # a warm-up
    assert pews[0]["marks"][-1]["up_bytes"] < base[0]["marks"][-1]["up_bytes"]  # masks save more than they take
    assert base[0]["marks"][-1]["up_bytes"] >= 2 * 2 * 4 * 14_884
    assert both["figures"] == {}
    alone = papers.run_table(table, seeds=[1], rounds=2, columns=["3.2k-0.1"], out=tmp_path / "alone")
    again = alone["columns"]["3.2k-0.1"]["FedProx"]["runs"][0]
    assert [mark["test"] for mark in again["marks"]] == curves[0]
