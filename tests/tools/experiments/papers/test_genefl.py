"""GENE-FL's tables: what follows from the architecture agrees with the paper to its last digit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedquilt.core import DataError, JobError
from fedquilt.testing.toys import pictures

genefl = pytest.importorskip("fedquilt.tools.experiments.papers.genefl")


def test_the_byte_columns_follow_from_resnet18() -> None:
    """FedAvg's gibibytes, FedFina's and FedLG's mebibytes, with nothing trained."""
    pytest.importorskip("torch")
    result = genefl.run("genefl-bytes")
    assert all(claim["reached"] for claim in result["figures"].values())
    assert result["rows"]["FedFina, the four 3x3 convolutions of layer4"]["ours"] == 31.5
    text = "\n".join(genefl.lines(result))
    assert "41.655 GiB (paper 41.66)" in text
    assert "18.281 MiB (paper 18.28)" in text


def test_what_is_missing_is_said() -> None:
    """An unknown table, and a table of digits without a folder."""
    with pytest.raises(JobError, match="unknown; there are: genefl, genefl-bytes"):
        genefl.run("genefl-fast")
    with pytest.raises(DataError, match="needs --data"):
        genefl.run("genefl")


def one(ours: float, local: float, inherited: float, up: int = 10) -> dict[str, Any]:
    """What one seed came to, beside 90 % of FedAvg and 50 % from scratch."""
    new = {"inherited": inherited, "scratch": 0.5, "whole": 0.6, "gene_bytes": 1.0, "model_bytes": 9.0}
    return {
        "seed": 0,
        "fedavg": {"accuracy": 0.9, "up_bytes": 100},
        "genefl": {"accuracy": ours, "up_bytes": up},
        "local": {"accuracy": local, "up_bytes": 0},
        "newcomers": new,
    }


def test_claims_are_judged_by_their_intervals() -> None:
    """Ahead in the mean is not enough where seeds differ; Local is one of those to be ahead of."""
    good = genefl._figures([one(0.95, 0.90, 0.60), one(0.951, 0.901, 0.61), one(0.952, 0.902, 0.62)])
    assert [claim["verdict"] for claim in good.values()] == ["holds"] * 4
    mixed = genefl._figures([one(0.95, 0.96, 0.8, 26), one(0.94, 0.951, 0.52, 26), one(0.97, 0.9805, 0.55, 26)])
    assert [claim["verdict"] for claim in mixed.values()] == ["against", "holds", "against", "not shown"]
    assert all("one seed" in claim["verdict"] for claim in genefl._figures([one(0.95, 0.9, 0.8)]).values())


def test_newcomers_come_online_in_the_running_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two known devices and two new ones on drawn pictures: 2 rounds, then fingerprints, then a round of all four."""
    pytest.importorskip("torch")
    rounds: list[Any] = []
    real = genefl.common.federated

    def federated(*args: Any, **options: Any) -> Any:
        run = real(*args, **options)
        rounds.append([each.devices for each in run.rounds])
        return run

    monkeypatch.setattr(genefl.common, "federated", federated)
    monkeypatch.setattr(genefl, "KNOWN", 2)
    monkeypatch.setattr(genefl, "NEW", 2)
    monkeypatch.setattr(genefl, "TRAINING", {**genefl.TRAINING, "epochs": 1})
    monkeypatch.setattr(genefl, "SPEC", {"held": 0.4, "partition": "iid"})
    monkeypatch.setattr(genefl, "GROUPS", ())
    found = genefl.play(str(pictures(tmp_path / "drawn.npz", 28)), 0, 2)
    known, everybody = ("dev-00", "dev-01"), ("dev-00", "dev-01", "dev-02", "dev-03")
    new = ("dev-02", "dev-03")
    assert rounds == [[known] * 2, [known] * 2, [known] * 3 + [everybody] * 2, [new], [new]]
    assert found["local"]["up_bytes"] == 0 < found["genefl"]["up_bytes"] < found["fedavg"]["up_bytes"]
    told = {**{name: found[name]["accuracy"] for name in ("fedavg", "genefl", "local")}, **found["newcomers"]}
    assert all(0 <= told[name] <= 1 for name in ("fedavg", "genefl", "local", "inherited", "scratch", "whole"))
    assert 0 < told["gene_bytes"] < told["model_bytes"]
    assert "Local" in genefl._seed_line(found)
