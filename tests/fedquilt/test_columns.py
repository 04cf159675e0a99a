"""Tables fit their width, and are coloured for people alone."""

import io

from fedquilt.console import table


class Terminal(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_columns_are_as_wide_as_their_widest_cell():
    rows = [["method", "n"], ["fedavg", "100"], ["scaffold", ""]]
    assert table.format_table(rows, "<>", 80) == ["method      n", "fedavg    100", "scaffold"]


def test_the_last_text_is_wrapped_into_what_is_left():
    rows = [["a", "one two three four five six"], ["bcd", "short"]]
    assert table.format_table(rows, "<~", 25) == ["a    one two three four", "     five six", "bcd  short"]


def test_a_table_that_is_too_wide_is_told_in_blocks_with_its_first_column():
    rows = [["who", "aaaa", "bbbb", "cccc"], ["x", "1", "2", "3"]]
    assert table.format_table(rows, "<>", 16) == ["who  aaaa  bbbb", "x       1     2", "", "who  cccc", "x       3"]
    assert table.format_table([["w" * 30, "1"]], "<", 16) == ["w" * 30 + "  1"]
    assert table.format_table([], "<", 16) == []


def test_colour_is_for_terminals_where_nobody_has_refused_it(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert table.colour_text("done", "green", io.StringIO()) == "done"
    assert table.colour_text("done", "green", Terminal()) == "\x1b[32mdone\x1b[0m"
    assert table.colour_text("done", None, Terminal()) == "done"
    monkeypatch.setattr("sys.stdout", Terminal())
    assert table.format_table([["done", "1"], ["x", "2"]], "<", 80, {"done": "green"})[0] == "\x1b[32mdone\x1b[0m  1"
    monkeypatch.setenv("NO_COLOR", "1")
    assert table.format_table([["done", "1"]], "<", 80, {"done": "green"}) == ["done  1"]


def test_what_is_no_terminal_has_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert table.line_width(io.StringIO()) == 80
    assert table.line_width(Terminal()) == 120
    monkeypatch.setenv("COLUMNS", "40")
    assert table.line_width(Terminal()) == 80


def test_a_long_sentence_is_folded_for_people_alone(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    line = "  update received: " + ", ".join(f"jetson-nano-{number:02}" for number in range(6))
    assert table.fold_line(line, out=io.StringIO()) == [line]
    first, second = table.fold_line(line, out=Terminal())
    assert (len(first) <= 80, first[:3], second[:5]) == (True, "  u", "    j")
    assert f"{first} {second[4:]}" == line
    assert table.fold_line("", out=Terminal()) == [""]
    assert table.fold_line(line, 9, Terminal())[1].startswith(" " * 9 + "j")


def test_markdown_is_shown_without_its_signs():
    page = [
        "# a",
        "",
        "`b` *c* ([d](e.md))",
        "f, 2 * 3 * 4, `exit.*`, [`[k] l`](m.md)",
        "",
        "    n * o",
        "    p",
        "",
        "- g",
        "  h",
        "- i [x](y.md)",
        "",
        "| j | k |",
        "|---|---|",
        "| `l` | m \\| n |",
    ]
    paragraph, code = "b c f, 2 * 3 * 4, exit.*, [k] l", ["    n * o", "    p"]
    listed, rows = ["- g h", "- i x"], ["j  k", "l  m | n"]
    assert table.format_markdown(page) == ["a", "", paragraph, "", *code, "", *listed, "", *rows]
