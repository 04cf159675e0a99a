"""GENE-FL's tables: what follows from the architecture agrees with the paper to its last digit."""

from __future__ import annotations

import pytest

from fedquilt.core import DataError, JobError

genefl = pytest.importorskip("fedquilt.tools.reproduce.genefl")


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


def test_claims_are_judged_in_the_worst_seed() -> None:
    """One seed short of a figure is the figure not reached."""

    def seed(up: int, ours: float, inherited: float) -> dict[str, object]:
        new = {"inherited": inherited, "scratch": 0.5, "whole": 0.6, "gene_bytes": 1.0, "model_bytes": 9.0}
        return {
            "seed": 0,
            "fedavg": {"accuracy": 0.9, "up_bytes": 100},
            "genefl": {"accuracy": ours, "up_bytes": up},
            "newcomers": new,
        }

    good = genefl._figures([seed(10, 0.95, 0.8), seed(25, 0.91, 0.6)])
    assert all(claim["reached"] for claim in good.values())
    bad = genefl._figures([seed(10, 0.95, 0.8), seed(26, 0.89, 0.51)])
    assert not any(claim["reached"] for claim in bad.values())
