"""What is made of runs: claims by row and column, targets that were never reached, and the table as text."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from fedquilt.core import JobError
from fedquilt.tools.lab import papers
from fedquilt.tools.lab.papers.grid import ClaimSpec, Grid, GridColumn, GridRow

PEWS: Grid = papers.load_tables()["fedpews-table2"].grid


def rows(base: list[int | None], pews: list[int | None], finals: list[float], rounds: int = 500) -> dict[str, Any]:
    return {
        name: {
            "rounds": rounds,
            "target": 0.99,
            "values": {"rounds_to": reached, "test": finals},
            "paper": dict(PEWS.axes["column"]["3.2k-0.1"].paper[name]),
            "runs": [],
        }
        for name, reached in (("FedAvg", base), ("FedAvg+PeWS", pews))
    }


def figures(*columns: Any) -> dict[str, Any]:
    """What the claims of FedPeWS's Table 2 come to in the column "32k-1.0"."""
    return {name: told for name, (_, told) in papers.judge_claims(PEWS, {"32k-1.0": rows(*columns)}).items()}


def test_what_is_claimed_is_judged_by_its_interval() -> None:
    """Earlier by some 30 rounds in each seed holds, in one of them later is not shown; never counts as a round more."""
    good = figures([150, 141, 130], [120, 110, 101], [0.998, 0.9981, 0.9982])
    assert [each["verdict"] for each in good.values()] == ["holds", "holds"]
    assert good["32k-1.0: rounds saved by PeWS"]["value"] == 30
    later = figures([150, 110, 130], [100, 120, 101], [0.998, 0.995, 0.998])
    assert [each["verdict"] for each in later.values()] == ["not shown", "not shown"]
    never = figures([400, None], [400, 500], [0.998, 0.999])
    assert never["32k-1.0: rounds saved by PeWS"]["value"] == 0.5  # 501 for what was not reached
    other = papers.judge_claims(PEWS, {"3.2k-0.1": rows([400], [300], [0.9])})
    assert list(other) == ["3.2k-0.1: rounds saved by PeWS"]  # how high it ends is claimed of one column


def test_a_claim_may_be_of_every_row_of_a_ratio_and_of_the_worst_column() -> None:
    """A row that does not tell the value is left out; what is only told is judged by 0."""
    made = Grid(
        about="x",
        rows={name: GridRow() for name in ("base", "good", "mute")},
        claims=(
            ClaimSpec("{row} in {column}", "test", over="base", scale=100.0, unit="points", told=True),
            ClaimSpec("share", "test", row="good", of="base", worst=True, unit="%", at_most=250.0),
        ),
    )

    def column(*values: float) -> dict[str, Any]:
        each = {"base": [0.1, 0.2], "good": list(values), "mute": [None, None]}
        return {name: {"rounds": 1, "values": {"test": known}, "paper": {}} for name, known in each.items()}

    found = papers.judge_claims(made, {"a": column(0.2, 0.3), "b": column(0.1, 0.6)})
    assert {name: told["value"] for name, (_, told) in found.items()} == {
        "good in a": 10.0,
        "good in b": 20.0,
        "share": 250.0,
    }
    assert [told["at_least"] for claim, told in found.values() if claim.told] == [0.0, 0.0]


def test_nothing_is_a_percentage_of_nothing() -> None:
    spec = ClaimSpec("{share} of {row}", "up_bytes", row="a", of="b", unit="%", at_most=90.0)
    grid = Grid(about="x", rows={"a": GridRow(), "b": GridRow()}, claims=(spec,))

    def column(b: float) -> dict[str, Any]:
        each = {"a": [5.0], "b": [b]}
        return {"": {name: {"rounds": 1, "values": {"up_bytes": known}, "paper": {}} for name, known in each.items()}}

    assert list(papers.judge_claims(grid, column(10.0))) == ["{share} of a"]
    with pytest.raises(JobError, match=r"of = 'b': its up_bytes is 0, and has no percentages: write over = 'b'"):
        papers.judge_claims(grid, column(0.0))


def test_the_text_has_the_papers_numbers_beside_ours() -> None:
    result = {
        "table": "fedpews-table2",
        "seeds": [0, 1],
        "columns": {"3.2k-0.1": rows([None, 371], [301, 300], [0.99, 0.98])},
        "figures": {},
        "told": {},
    }
    text = papers.format_result(PEWS, result)
    assert text[:3] == [
        "fedpews-table2: seeds 0, 1; the paper's in brackets",
        "",
        "3.2k-0.1, eta_g 0.1, tau 0.1, target 99 %, 500 rounds",
    ]
    base, pews = text[4:]
    assert " ".join(base.split()) == "FedAvg -, 371 (371) 98.50 ± 0.71 (97.33 ± 3.89)"
    assert " ".join(pews.split()) == "FedAvg+PeWS 301, 300 (301 ± 10.59) 98.50 ± 0.71 (99.66 ± 0.19)"


def test_comparisons_without_a_claim_stand_below_the_table_and_above_the_verdicts() -> None:
    """10 and 30 % beside 20 and 20 %: the mean difference is 0, and both intervals cross their limits."""
    made = Grid(
        about="x",
        rows={"base": GridRow(), "other": GridRow()},
        show=(GridColumn("test", "accuracy %", 100.0),),
        claims=(
            ClaimSpec("{row} over base", "test", over="base", scale=100.0, unit="points", told=True),
            ClaimSpec("other is good", "test", row="other", scale=100.0, unit="%", at_least=5.0),
        ),
    )
    values = {"base": [0.2, 0.2], "other": [0.1, 0.3]}
    rows = {name: {"rounds": 1, "values": {"test": each}, "paper": {}} for name, each in values.items()}
    judged = papers.judge_claims(made, {"": rows})
    result = {
        "table": "made",
        "seeds": [0, 1],
        "columns": {"": rows},
        "figures": {name: told for name, (claim, told) in judged.items() if not claim.told},
        "told": {name: told for name, (claim, told) in judged.items() if claim.told},
    }
    assert [" ".join(line.split()) for line in papers.format_result(made, result)] == [
        "made: seeds 0, 1",
        "",
        "1 rounds",
        "accuracy %",
        "base 20.0 ± 0.0",
        "other 20.0 ± 14.1",
        "",
        "other over base: +0.00 [-127.06, +127.06] points: not shown",
        "NOT other is good 20.00 [-107.06, 147.06] %: not shown (claimed: above 5)",
    ]


def test_a_spread_is_that_of_several_seeds() -> None:
    assert papers.format_spread([0.995], 100.0, 2, False) == "99.50"
    assert papers.format_spread([0.99, 0.98], 100.0, 2, False) == "98.50 ± 0.71"
    assert papers.format_spread([0.99, None], 100.0, 0, True) == "99, -"
    assert papers.format_spread([None], 1.0, 0, False) == ""


def test_a_claim_is_told_as_before() -> None:
    told = papers.judge_claim([1.0, 2.0], "points", at_least=0.0)
    assert msgspec.json.decode(msgspec.json.encode(told)) == told


def test_a_picture_has_a_dot_for_each_seed_of_each_row() -> None:
    shown = (GridColumn("test", "accuracy %", 100.0), GridColumn("held", "accuracy %"))
    made = Grid(about="x", rows={"a": GridRow(), "b": GridRow()}, show=shown)
    values = {"a": [0.25, 0.5], "b": [None, None]}
    rows = {name: {"rounds": 1, "values": {"test": each, "held": each}, "paper": {}} for name, each in values.items()}
    drawn = papers.draw_picture(made, {"table": "made", "columns": {"even": rows}})
    words = [each.text for each in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert "a, even" in words
    assert "b, even" not in words
    assert drawn.count("a, even: ") == 4
