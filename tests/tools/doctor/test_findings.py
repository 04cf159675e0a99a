"""How findings are shown to people."""

from __future__ import annotations

import io
import re

import pytest

from fedquilt.tools.boards.doctor import findings

LONG = "the examples at /home/jetson/pumps/readings-of-the-year.csv cannot be read by this user ([data] of agent.toml)"
MEND = "sudo chown --recursive fedquilt:fedquilt /home/jetson/pumps && sudo systemctl restart fedquilt-agent.service"
FOUND = [findings.Finding("FQ101", "ok", "well"), findings.Finding("FQ309", "error", LONG, MEND)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_sentences_fit_a_terminals_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    lines = findings.format_findings(FOUND)
    sentences = [line for line in lines if "fix:" not in line]
    assert max(map(len, sentences)) <= 80
    assert len(sentences) == 4
    assert re.sub(r"\s+", " ", " ".join(lines[1:3])) == f"error FQ309 {LONG}"
    assert lines[2].startswith(" " * 16 + lines[2].strip()[0])
    assert f"fix: {MEND}" in lines[3]


def test_without_a_terminal_each_sentence_is_one_line() -> None:
    assert findings.format_findings(FOUND)[1] == f"error    FQ309  {LONG}"
