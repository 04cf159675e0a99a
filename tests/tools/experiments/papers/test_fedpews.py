"""FedPeWS's tables run again: small runs, and what is told of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedquilt.core import JobError
from fedquilt.tools.experiments.papers import fedpews

COLUMN = fedpews.TABLES["fedpews-table2"].columns["3.2k-0.1"]


def told(base: list[int | None], pews: list[int | None], finals: list[float]) -> dict[str, Any]:
    """A result of one column with these rounds to the target."""
    of = {"FedAvg": (base, COLUMN.base), "FedAvg+PeWS": (pews, COLUMN.pews)}
    accounts = {
        name: {
            "rounds_to_target": rounds,
            "final_percent": finals,
            "paper": {"rounds": paper.rounds, "final": paper.final, "rounds_sd": paper.rounds_sd, "final_sd": 0.5},
        }
        for name, (rounds, paper) in of.items()
    }
    settings = {"server_lr": 1.0, "diversity": 2.0, "tau": 0.1, "rounds": 500, "target": 99.0}
    return {"32k-1.0": {"settings": settings, "methods": accounts}}


def test_the_first_round_that_reaches_the_target_counts_from_one() -> None:
    """At the target is there; one that falls again has been there; None where it never is."""
    assert fedpews.first_reached([0.5, 0.99, 0.9, 1.0], 99.0) == 2
    assert fedpews.first_reached([0.99], 99.0) == 1
    assert fedpews.first_reached([0.989999, 0.5], 99.0) is None


def test_both_begin_alike_and_a_run_is_the_same_again() -> None:
    """Alone or beside another seed; with a warm-up round it is not its base; 2 devices, 2 rounds, larger batches."""
    column = replace(COLUMN, batch=20)
    pytest.importorskip("torch")
    (base,), (again, other), (pews,) = (
        fedpews.play(column, 0.0, seeds, warmup, 2) for seeds, warmup in (([1], 0), ([1, 2], 0), ([1], 1))
    )
    assert base["accuracy"] == pytest.approx(again["accuracy"], abs=0.01)  # last bits may go by who is beside it
    assert other["accuracy"] != again["accuracy"]
    assert base["accuracy"] != pews["accuracy"]
    assert len(base["accuracy"]) == 2
    assert all(0 <= value <= 1 for value in base["accuracy"])
    assert base["covered"] == 0.0 < pews["covered"] < 1.0  # nobody has drawn all of them
    assert pews["up_bytes"] < base["up_bytes"]  # masks save more than they take
    assert base["up_bytes"] >= 2 * 2 * 4 * 14_884


def test_what_is_claimed_is_judged_by_its_interval() -> None:
    """Earlier by some 30 rounds in each seed holds, in one of them later is not shown; never counts as a round more."""
    table = fedpews.TABLES["fedpews-table2"]
    good = fedpews._figures(table, told([150, 141, 130], [120, 110, 101], [99.8, 99.81, 99.82]))
    assert [each["verdict"] for each in good.values()] == ["holds", "holds"]
    assert good["32k-1.0: rounds saved by PeWS"]["value"] == 30
    later = fedpews._figures(table, told([150, 110, 130], [100, 120, 101], [99.8, 99.5, 99.8]))
    assert [each["verdict"] for each in later.values()] == ["not shown", "not shown"]
    never = fedpews._figures(table, told([400, None], [400, 500], [99.8, 99.9]))
    assert never["32k-1.0: rounds saved by PeWS"]["value"] == 0.5  # 501 for what was not reached


def test_lines_have_the_papers_numbers_beside_ours() -> None:
    """And a dash for a seed that did not get there."""
    result = {
        "reproduce": "fedpews-table2",
        "seeds": [0, 1],
        "mu": 0.0,
        "columns": told([None, 371], [301, 300], [99.0, 98.0]),
        "figures": {},
    }
    shown = "\n".join(fedpews.lines(result))
    assert "rounds to target -, 371" in shown
    assert "(371 ± NA" in shown
    assert "301, 300" in shown
    assert "98.50 ± 0.71 %" in shown
    assert "(99.66 ± 0.50)" in shown


def test_a_table_or_column_that_does_not_exist_is_named() -> None:
    """Before anything is run."""
    with pytest.raises(JobError, match="'table9' is unknown; there are: fedpews-table2, fedpews-table6"):
        fedpews.run("table9")
    with pytest.raises(JobError, match=r"has no column '64k'; it has: 32k-1\.0"):
        fedpews.run("fedpews-table2", columns=["64k"])


def test_a_short_run_of_a_column_tells_a_curve_for_each_method() -> None:
    """One round of one seed through the processes; figures are not judged by fewer rounds than the paper's."""
    pytest.importorskip("torch")
    said: list[str] = []
    result = fedpews.run("fedpews-table6", [0], 1, said.append, ["3.2k-0.1"], workers=1)
    assert [line.split(" s from")[0].rsplit(",")[0] for line in said[::2]] == [
        "[1/2] 3.2k-0.1 FedProx+PeWS",
        "[2/2] 3.2k-0.1 FedProx",
    ]
    assert all(line.startswith("  seed 0: 99 % not reached, ends at ") for line in said[1::2])
    assert result["figures"] == {}
    accounts = result["columns"]["3.2k-0.1"]["methods"]
    assert list(accounts) == ["FedProx", "FedProx+PeWS"]
    assert [len(each["runs"][0]["accuracy"]) for each in accounts.values()] == [1, 1]
    assert result["mu"] == 0.01


def test_one_seed_alone_has_no_spread() -> None:
    """Its final accuracy is told as it is."""
    assert fedpews._spread([99.5]) == "99.50 %"
    assert fedpews._spread([99.0, 98.0]) == "98.50 ± 0.71 %"
