"""GENE-FL's tables: newcomers in a running job, and what follows from the architecture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedquilt.arrays import tensors
from fedquilt.models.networks import registry
from fedquilt.testing.toy_networks import write_images
from fedquilt.tools.experiments import single_run
from fedquilt.tools.lab import papers
from fedquilt.tools.lab.papers import cells
from fedquilt.tools.lab.papers.grid import merge_tables

pytest.importorskip("torch", reason="networks are built")


def test_the_papers_bytes_follow_from_resnet18() -> None:
    """Tables II and III: 1,000 uploads by FedAvg in GiB, the layers of FedFina and FedLG in MiB."""
    narrow, wide = (
        {name: value.detach().numpy() for name, value in registry.build_network(table).named_parameters()}
        for table in ({"name": "torchvision/resnet18", "classes": classes} for classes in (10, 100))
    )
    last = [narrow[f"layer4.{i}.conv{j}.weight"] for i in (0, 1) for j in (1, 2)]
    some = [narrow[f"{name}.weight"] for name in ("layer4.1.conv1", "layer4.1.conv2", "layer2.0.conv1")]
    gib = [1000 * tensors.total_bytes([held]) / 2**30 for held in (narrow, wide)]
    assert gib == [pytest.approx(41.66, abs=0.01), pytest.approx(41.83, abs=0.01)]
    assert sum(each.nbytes for each in last) / 2**20 == pytest.approx(31.50, abs=0.01)
    assert sum(each.nbytes for each in some) / 2**20 == pytest.approx(18.28, abs=0.01)


def rows(ours: list[float], local: list[float], inherited: list[float], up: float = 10.0) -> dict[str, Any]:
    """What seeds came to, beside 90 % of FedAvg and 50 % from scratch."""
    count = len(ours)
    values = {
        "FedAvg": {"mean": [0.9] * count, "up_bytes": [100.0] * count},
        "Local": {"mean": local, "up_bytes": [0.0] * count},
        "GENE-FL": {"mean": ours, "up_bytes": [up] * count, "newcomers": inherited},
        "scratch": {"newcomers": [0.5] * count},
    }
    none = {"mean": [None], "up_bytes": [None], "newcomers": [None]}
    return {name: {"rounds": 1, "values": {**none, **known}} for name, known in values.items()}


def test_claims_are_judged_by_their_intervals() -> None:
    def verdicts(*given: Any) -> list[str]:
        found = papers.judge_claims(papers.load_tables()["genefl"].grid, {"": rows(*given)})
        return [told["verdict"] for _, told in found.values()]

    assert verdicts([0.95, 0.951, 0.952], [0.90, 0.901, 0.9021], [0.60, 0.61, 0.62]) == ["holds"] * 4
    mixed = verdicts([0.95, 0.94, 0.97], [0.96, 0.951, 0.9805], [0.8, 0.52, 0.55], 26.0)
    assert mixed == ["against", "holds", "against", "not shown"]
    assert all("one seed" in verdict for verdict in verdicts([0.95], [0.9], [0.8]))


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
