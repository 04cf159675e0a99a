"""What `python -m tests.faults` prints of many seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.faults import __main__ as command
from tests.faults import search


def test_an_interrupted_run_prints_what_was_played(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second batch of seeds is interrupted; the first one is reported, and the exit code is not that of success."""
    begun: list[list[int]] = []

    def play(environment: Any, seeds: Iterable[int], among: Sequence[str], kinds: Sequence[str]) -> search.SearchResult:
        begun.append(list(seeds))
        if len(begun) == 2:
            raise KeyboardInterrupt
        return search.SearchResult(len(begun[0]), 3 * len(begun[0]), Counter(), Counter({"noise": 7}), ())

    monkeypatch.setattr(search, "play_seeds", play)
    monkeypatch.setattr(search, "prepare_process", lambda: None)
    assert command.run_many(range(100, 100 + 3 * search.BATCH), (), (), 1) == command.INTERRUPTED
    out = capsys.readouterr().out
    assert f"of the {3 * search.BATCH} seeds from 100 on, {search.BATCH} were played" in out
    assert f"{search.BATCH} seeds, {3 * search.BATCH} rounds" in out
    assert "noise" in out
    assert len(begun) == 2


def test_rounds_are_given_for_each_second_of_processor_time() -> None:
    played = search.SearchResult(10, 300, Counter(), Counter(), ())
    first, *_ = search.report_lines(played, 2.0)
    assert first == "10 seeds, 300 rounds, 150 rounds for each second of processor time"
