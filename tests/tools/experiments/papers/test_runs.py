"""Short runs of papers' tables on small data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_tasks import write_images

from fedquilt.tools.experiments import single_run
from fedquilt.tools.lab import papers
from fedquilt.tools.lab.papers import cells, custom
from fedquilt.tools.lab.papers.grid import merge_tables

pytest.importorskip("torch", reason="networks are trained")


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


@pytest.mark.nightly
def test_a_small_run_of_all_methods_tells_accuracy_bytes_and_gates(tmp_path: Path) -> None:
    data = {"path": str(write_images(tmp_path / "drawn.npz", 28))}
    table = papers.load_tables()["fedsdg"]
    over: dict[str, Any] = {
        "pretrain": {"data": {**data, "limit": 40}, "fit": {"epochs": 1, "batch": 16}},
        "job": {"data": {**data, "limit": 60}, "fleet": {"devices": 2}},
    }
    table = replace(table, raw=merge_tables(table.raw, over))
    result = papers.run_table(table, seeds=[0], rounds=1, columns=["0.3"], out=tmp_path)
    told = {name: row["values"] for name, row in result["columns"]["0.3"].items()}
    assert told.keys() == {"fedsdg", "fedlora", "fedprox", "local"}
    assert all(0 <= each["held"][0] <= 1 for each in told.values())
    figures = {name: row["runs"][0]["figures"] for name, row in result["columns"]["0.3"].items()}
    shared = 4 * (4 * 8 * (128 + 192) + 650)
    assert figures["fedsdg"]["shared_bytes"] == figures["fedlora"]["shared_bytes"] == shared
    assert 100 < told["fedsdg"]["sent"][0] < 110
    assert told["fedsdg"]["up_bytes"][0] == pytest.approx(2 * shared * told["fedsdg"]["sent"][0] / 100)
    assert told["local"]["up_bytes"] == [0]
    gates = figures["fedsdg"]["gates"]
    assert {device: len(values) for device, values in gates.items()} == {"dev-00": 4, "dev-01": 4}
    least, most = told["fedsdg"]["least_gate"][0], told["fedsdg"]["most_gate"][0]
    assert 0 < least < most < 1
    assert told["fedlora"]["least_gate"] == [None]
    text = papers.format_result(table.grid, result)
    assert any(line.startswith("fedsdg") and f"{least:.2f}" in line for line in text)


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


def test_newcomers_come_online_in_the_running_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two known devices and two new ones on drawn pictures: 2 rounds, then fingerprints, then a round of all four."""
    rounds: list[Any] = []
    real = single_run.simulate

    def simulate(*args: Any, **options: Any) -> Any:
        ended = real(*args, **options)
        rounds.append([each.devices for each in ended.rounds])
        return ended

    monkeypatch.setattr(single_run, "simulate", simulate)
    table = papers.load_tables()["genefl"]
    data = {"path": str(write_images(tmp_path / "drawn.npz", 28)), "limit": 0, "partition": "iid", "groups": []}
    over: dict[str, Any] = {
        "job": {"params": {"epochs": 1}, "fleet": {"devices": 4}, "data": data},
        "rows": {name: {"members": [0, 2]} for name in ("FedAvg", "Local")}
        | {name: {"members": [2, 4]} for name in ("scratch", "whole")}
        | {"GENE-FL": {"away": 2}},
    }
    grid = replace(table, raw=merge_tables(table.raw, over)).fill_marks(None)
    todo = cells.make_cells(grid, "genefl", [0], 2, [""], tmp_path)
    runs = {cell.case: cells.run_case(cell.case, lambda done: None) for cell in todo}
    result = papers.make_result("genefl", grid, todo, runs, [0], 2)
    known, new = ("dev-00", "dev-01"), ("dev-02", "dev-03")
    assert dict(zip(["FedAvg", "Local", "scratch", "FedAvg again", "whole", "GENE-FL"], rounds, strict=True)) == {
        "FedAvg": [known] * 2,
        "Local": [known] * 2,
        "scratch": [new],
        "FedAvg again": [known] * 2,  # whose model the newcomers of "whole" begin with
        "whole": [new],
        "GENE-FL": [known] * 3 + [(*known, *new)] * 2,
    }
    told = {name: row["values"] for name, row in result["columns"][""].items()}
    assert told["Local"]["up_bytes"] == [0]
    assert 0 < told["GENE-FL"]["up_bytes"][0] < told["FedAvg"]["up_bytes"][0]
    assert all(0 <= told[name]["mean"][0] <= 1 for name in ("FedAvg", "Local", "GENE-FL"))
    assert all(0 <= told[name]["newcomers"][0] <= 1 for name in ("GENE-FL", "scratch", "whole"))
    assert 0 < told["GENE-FL"]["begun_bytes"][0] < told["whole"]["begun_bytes"][0]
    assert any(line.startswith("Local") for line in papers.format_result(grid, result))


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
