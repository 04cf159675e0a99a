"""What `fedquilt methods` tells of a method."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedquilt import methods
from fedquilt.cli import main
from fedquilt.core import JobError
from fedquilt.tools.experiments import method_pages
from fedquilt.tools.lab import papers

ROOT = Path(__file__).parents[3]


def test_a_parameter_has_its_range_default_and_what_its_line_says() -> None:
    found = {each.name: each for each in method_pages.make_card("fedprox").parameters}
    assert next(iter(found)) == "epochs"
    assert (found["epochs"].kind, found["epochs"].default) == ("integer >= 1", 1)
    assert "passes" in found["epochs"].about
    assert found["optimizer"].kind == "text or table"
    assert found["mixed"].kind == "true or false"
    rules = {each.name: each for each in method_pages.make_card("fedopt").parameters}["server"]
    assert rules.kind == '"sgd" or "adagrad" or "adam" or "yogi"'
    assert found["batch"].kind == "integer >= 1, <= 1000000000"
    assert {each.name: each for each in method_pages.make_card("fedsdg").parameters}["preset"].about == ""


def test_a_page_has_lists_as_in_a_job_file_and_what_the_method_works_with_and_needs() -> None:
    pages = {name: "\n".join(method_pages.format_card(method_pages.make_card(name))) for name in ("fedavg", "fedsq")}
    assert "| `augment` | list of text or table | `[]` |" in pages["fedavg"]
    buffered = "buffered rounds, [`[cohort] mode`](../jobs.md#rounds-without-stragglers)"
    assert f"| works with | {buffered}; " in pages["fedavg"]
    assert "| needs trained weights for | the choice of units that are on |" in pages["fedsq"]
    assert "needs trained weights" not in pages["fedavg"]


def test_methods_are_listed_with_their_first_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert [line.split()[0] for line in shown] == methods.builtin_names()
    assert main(["methods", "scaffold", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["paper"] == "arXiv 1910.06378"


def test_a_card_names_the_tables_that_run_the_method() -> None:
    lines = method_pages.format_card(method_pages.make_card("fedlora", papers.find_tables_of_method))
    assert any("`fedquilt lab reproduce fedsdg --data FOLDER`" in line for line in lines)
    assert any(
        "(../stitching.md#" in line
        for line in method_pages.format_card(method_pages.make_card("fedstitch", papers.find_tables_of_method))
    )
    assert not any(
        "Compared in" in line
        for line in method_pages.format_card(method_pages.make_card("scaffold", papers.find_tables_of_method))
    )


def test_an_unknown_method_is_told_with_the_known_ones() -> None:
    with pytest.raises(JobError, match=r"'fedfoo' is unknown; did you mean 'fedproto'\? There are: afl, apfl"):
        method_pages.make_card("fedfoo")


def test_the_pages_in_the_repository_are_those_that_would_be_written(tmp_path: Path) -> None:
    (tmp_path / "gone.md").write_text("of a method that is no more")
    fresh = {path.name: path.read_text() for path in method_pages.write_pages(tmp_path, papers.find_tables_of_method)}
    assert not (tmp_path / "gone.md").exists()
    assert {path.name: path.read_text() for path in (ROOT / "docs" / "methods").glob("*.md")} == fresh
