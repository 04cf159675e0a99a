"""Tables of the papers: found by their files, listed, and run with what they want."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedquilt import methods
from fedquilt.cli import main
from fedquilt.core import JobError, StoreError
from fedquilt.tools.experiments import papers

DOCS = Path(__file__).parents[4] / "docs"


def module(data: bool = False) -> ModuleType:
    """Two tables that remember what they were run with."""
    made: Any = ModuleType("made", "What it is.\n\nWhat differs from the paper.")
    made.TABLES = {"t1": 1, "t2": 2}
    made.SEEDS = (4, 5)
    made.COVERS = {"t1": ("fedavg", "moon"), "t2": ("moon",)}
    made.PAGE = "training.md"
    made.lines = lambda result: [f"ours {result['ours']}, the paper's 3"]

    def run(table: str, seeds: Any, rounds: int | None, say: Any) -> dict[str, Any]:
        say(f"running {table}")
        return {"ours": 2, "seeds": list(seeds), "rounds": rounds}

    def run_with_data(table: str, seeds: Any, rounds: int | None, data: Path | None, say: Any) -> dict[str, Any]:
        return {"folder": str(data), "seeds": list(seeds)}

    made.run = run_with_data if data else run
    return made


def known(data: bool = False) -> dict[str, ModuleType]:
    return dict.fromkeys(("t1", "t2"), module(data))


def test_every_module_of_the_folder_is_a_table_that_can_be_run() -> None:
    """Names are unique, each has its module's docstring, and takes what the verb gives."""
    found = papers.modules()
    assert {"fedpews-table2", "fedpews-table6"} <= set(found)
    for row in papers.catalogue(found):
        assert row["about"].endswith((".", "?", ":"))
    for each in found.values():
        assert {"table", "seeds", "rounds", "say"} <= papers._takes(each)
        assert callable(each.lines)


def test_a_table_gets_its_modules_seeds_unless_others_are_given() -> None:
    """And the result carries what the module says of how it differs from the paper."""
    said: list[str] = []
    result = papers.run("t1", known(), say=said.append)
    assert (result["seeds"], result["rounds"], said) == ([4, 5], None, ["running t1"])
    assert "differs from the paper" in result["about"]
    assert papers.run("t2", known(), seeds=[1], rounds=3)["rounds"] == 3


def test_data_goes_where_it_is_taken_and_is_refused_where_not() -> None:
    """A table that makes its own says so; one that wants some says that itself."""
    with pytest.raises(JobError, match="leave --data out"):
        papers.run("t1", known(), folder=Path("x"))
    assert papers.run("t1", known(data=True), folder=Path("x"))["folder"] == "x"
    assert papers.run("t1", known(data=True))["folder"] == "None"


def test_the_list_has_each_paper_once_with_its_tables() -> None:
    """And says which take data."""
    assert papers.listed(papers.catalogue(known(data=True))) == [
        "What it is.",
        "  t1 (--data FOLDER)",
        "  t2 (--data FOLDER)",
    ]


def test_an_unknown_table_names_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    """With the exit code of a wrong command line."""
    assert main(["reproduce", "table-99"]) == 2
    assert "fedpews-table2" in capsys.readouterr().err


def test_without_a_table_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """For people and for programs."""
    assert main(["reproduce"]) == 0
    assert "fedpews-table2" in capsys.readouterr().out
    assert main(["reproduce", "--format", "json"]) == 0
    rows = {row["table"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["fedpews-table2"]["takes_data"] is False
    assert (rows["genefl"]["takes_data"], rows["genefl-bytes"]["takes_data"]) == (True, False)


def test_a_method_is_told_the_commands_of_the_tables_that_run_it() -> None:
    """With the page of docs/ where the figures are; a table that needs no folder has none in its command."""
    assert papers.covering("moon", known()) == [
        ("fedquilt reproduce t1", "training.md"),
        ("fedquilt reproduce t2", "training.md"),
    ]
    assert papers.covering("fedavg", known(data=True)) == [("fedquilt reproduce t1 --data FOLDER", "training.md")]
    assert papers.covering("scaffold", known()) == []


def test_columns_go_where_a_table_has_some_and_are_refused_where_not() -> None:
    """Of FedPeWS's tables each can be run alone."""
    with pytest.raises(JobError, match="leave --columns out"):
        papers.run("t1", known(), columns=["a"])
    with pytest.raises(JobError, match=r"has no column '64k'"):
        papers.run("fedpews-table2", papers.modules(), columns=["64k"])


def test_tables_cover_methods_that_there_are_and_their_pages_exist() -> None:
    """Each table names some, and its page has the heading that it points to."""
    for table, found in papers.modules().items():
        assert found.COVERS[table]
        assert set(found.COVERS[table]) <= set(methods.names())
        page, _, anchor = found.PAGE.partition("#")
        headings = [line.lstrip("# ") for line in (DOCS / page).read_text().splitlines() if line.startswith("#")]
        assert not anchor or anchor in [heading.lower().replace(",", "").replace(" ", "-") for heading in headings]


def test_a_picture_is_drawn_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And refused before any work where there is none."""
    made: Any = module()
    monkeypatch.setattr(papers, "modules", lambda: {"t1": made})
    options = {"seeds": None, "rounds": None, "folder": None, "columns": None, "out": None, "format": "text"}
    with pytest.raises(JobError, match="t1 has no picture: leave --picture out"):
        papers.main("t1", **options, picture=tmp_path / "p.svg")
    made.picture = lambda result: f"<svg>{result['ours']}</svg>"
    assert papers.main("t1", **options, picture=tmp_path / "p.svg") == 0
    assert (tmp_path / "p.svg").read_text() == "<svg>2</svg>"
    capsys.readouterr()
    assert papers.main("t1", **options, picture=tmp_path / "new" / "folder" / "p.svg") == 0
    assert (tmp_path / "new" / "folder" / "p.svg").exists()
    capsys.readouterr()
    (tmp_path / "no").write_text("a file is in the folder's place")
    with pytest.raises(StoreError, match="cannot write"):
        papers.main("t1", **options, picture=tmp_path / "no" / "p.svg")
    assert "ours 2" in capsys.readouterr().out  # what took minutes is not lost


def test_a_claim_that_does_not_come_out_is_told_by_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The result is printed and written all the same; figures are as in a bench."""
    for reached in (True, False):
        made = module()
        figures = {"rounds saved": {"value": 1.0, "at_least": 2.0, "unit": "", "reached": reached}}
        run = made.run
        made.run = lambda table, seeds, rounds, say, run=run, figures=figures: {  # type: ignore[attr-defined]
            **run(table, seeds, rounds, say),
            "figures": figures,
        }
        monkeypatch.setattr(papers, "modules", lambda made=made: {"t1": made})
        out = tmp_path / "result.json"
        options = {"seeds": None, "rounds": None, "folder": None, "columns": None, "picture": None}
        assert papers.main("t1", **options, out=out, format="text") == (0 if reached else 1)
        assert "ours 2, the paper's 3" in capsys.readouterr().out
        assert json.loads(out.read_text())["figures"] == figures
