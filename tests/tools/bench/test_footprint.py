"""The footprint bench, on its smallest network: real processes, real peaks."""

from __future__ import annotations

import pytest

from fedquilt.tools.lab.bench import footprint
from fedquilt.tools.report.thresholds import format_figures


def test_a_network_is_trained_and_scored_and_steps_down_in_processes_of_its_own() -> None:
    """Ratios are of two measured or reckoned sizes, and a budget for 2 examples carries mini-batches of 8."""
    pytest.importorskip("torch")
    pytest.importorskip("onnxruntime")
    result = footprint.measure(networks=("separable",), batches=(8,), tight={"separable": 2})
    assert [(row["work"], row["batch"]) for row in result["rows"]] == [("training", 8), ("scoring", 8)]
    for row in result["rows"]:
        assert row["ratio"] == pytest.approx(row["predicted_mb"] / row["true_mb"], rel=0.02)
        assert 5 < row["true_mb"] < 400
    assert result["stepped"][0]["peak_mb"] > 100
    told = footprint.lines(result)
    assert any(line.startswith("training  separable") for line in told)
    assert told[-len(result["figures"]) :] == format_figures(result)


def test_who_could_take_part_follows_from_the_papers_shares() -> None:
    """2.1 GB of work beside torch: only the devices with 4 and 8 GB, 40 %; 1 MB: everybody."""
    assert footprint._device_coverage("torch", 2_100_000_000)["share"] == pytest.approx(0.4)
    assert footprint._device_coverage("torch", 101_000_000)["share"] == pytest.approx(1.0)
