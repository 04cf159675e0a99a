"""The bench of FedSQ's rounds, on the smallest network there is."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="rounds of training are measured")

from fedquilt.tools.lab.bench import fedsq


def test_both_ratios_come_from_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ways, the warming turn left out; a ratio is of rounds of the same turn."""
    network = {"name": "cnn", "channels": 3, "size": 8, "classes": 10, "width": 2, "input": {"channels": 3, "size": 8}}
    monkeypatch.setattr(fedsq, "CASES", {"tiny": (network, ("7", "9"))})
    result = fedsq.measure(examples=32, turns=2)
    ways = {f"{arm} {cache}" for arm in ("fedavg", "fedsq") for cache in ("float32", "off")}
    assert result["seconds"]["tiny"].keys() == ways
    assert all(len(each) == 2 and min(each) > 0 for each in result["seconds"]["tiny"].values())
    assert result["figures"].keys() == {"cached_tiny", "uncached_tiny"}
    assert any("uncached tiny" in line for line in fedsq.lines(result))


def test_a_ratio_is_the_median_of_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of 2/1, 3/1 and 9/1 give 3, which misses both limits."""
    told = {"fedavg float32": [1, 1, 1], "fedsq float32": [2, 3, 9], "fedavg off": [2, 1, 1], "fedsq off": [2, 1, 7]}
    monkeypatch.setattr(fedsq, "CASES", {"told": ({}, ())})
    monkeypatch.setattr(fedsq, "_time_rounds", lambda *args: told)
    figures = fedsq.measure()["figures"]
    assert (figures["cached_told"]["value"], figures["cached_told"]["reached"]) == (3.0, False)
    assert (figures["uncached_told"]["value"], figures["uncached_told"]["reached"]) == (1.0, True)
