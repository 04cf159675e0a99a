"""Claims over seeds: how they are judged by their intervals, and how they are told."""

from __future__ import annotations

import pytest

from fedquilt.tools.experiments import tables
from fedquilt.tools.lab import papers


def test_a_claim_holds_if_the_whole_interval_is_on_its_side() -> None:
    """Of 1, 2 and 3 the mean is 2 and the interval, with 4.303 at 2 degrees of freedom, 2 -+ 2.48."""
    low, high = tables.confidence_interval([1.0, 2.0, 3.0])
    assert (low, high) == (pytest.approx(2 - 4.303 / 3**0.5), pytest.approx(2 + 4.303 / 3**0.5))
    shown = papers.judge_claim([1.0, 2.0, 3.0], "points", at_least=0.0)
    assert (shown["verdict"], shown["reached"]) == ("not shown", False)  # though every seed is ahead
    assert (shown["value"], shown["low"], shown["high"]) == (2.0, -0.484, 4.484)
    assert papers.judge_claim([1.9, 2.0, 2.1], "points", at_least=0.0)["verdict"] == "holds"
    assert papers.judge_claim([1.9, 2.0, 2.1], "points", at_least=1.9)["verdict"] == "not shown"
    assert papers.judge_claim([1.9, 2.0, 2.1], "points", at_least=2.5)["verdict"] == "against"
    assert papers.judge_claim([1.9, 2.0, 2.1], "%", at_most=2.5)["verdict"] == "holds"
    assert papers.judge_claim([1.9, 2.0, 2.1], "%", at_most=1.5)["verdict"] == "against"
    assert papers.judge_claim([0.0, 0.0], "", at_least=0.0)["verdict"] == "not shown"


def test_one_seed_has_no_interval_and_shows_nothing() -> None:
    alone = papers.judge_claim([50.0], "points", at_least=0.0)
    assert (alone["verdict"], alone["reached"], alone["low"]) == ("one seed: no interval", False, None)
    (line,) = papers.format_judged_claims({"figures": {"ahead": alone}})
    assert line.startswith("NOT ahead")
    assert "+50.00 points, one seed: no interval" in line


def test_claims_are_told_with_their_intervals() -> None:
    figures = {"ahead": papers.judge_claim([1.9, 2.0, 2.1], "points", at_least=0.0)}
    (ahead,) = papers.format_judged_claims({"figures": figures})
    assert " ".join(ahead.split()) == "ok ahead +2.00 [+1.75, +2.25] points: holds (claimed: above 0)"


def test_quantiles_are_students() -> None:
    for freedom, right in ((1, 12.706), (2, 4.303), (10, 2.228), (11, 2.201), (20, 2.086), (60, 2.000)):
        assert tables.t_quantile(freedom) == pytest.approx(right, abs=1e-3)
