"""The bench of deadlines plays whole jobs, the same at every call."""

from __future__ import annotations

import pytest

from fedquilt.tools.lab.bench import deadlines, planned_rounds


def test_the_same_seed_plays_the_same_job_and_everybody_asked_answers() -> None:
    """Three rounds of ten, all of which are waited for."""
    first, again = (deadlines.play("predicted", "paper", 1, 3) for _ in range(2))
    assert first == again
    assert first.tasks == 30
    assert 0 < first.in_time <= 30
    assert first != deadlines.play("predicted", "paper", 2, 3)


def test_at_the_fastest_point_no_rule_changes_how_long_anybody_takes() -> None:
    """Only how many are called late."""
    plays = [deadlines.play(rule, "max", 0, 3) for rule in ("fixed", "predicted", "paper")]
    assert len({round(play.waiting_s, 3) for play in plays}) == 1
    assert plays[0].in_time == 30


def test_the_result_has_a_row_for_each_rule_and_governor_and_reads_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the figures and where the profiles' numbers are from, and with training."""
    monkeypatch.setattr(planned_rounds, "CASES", {"fednova": ("predicted", "energy")})
    result = deadlines.measure(seeds=(0,), count=2)
    assert len(result["table"]) == 12
    assert all(row["tasks"] == 20 for row in result["table"])
    assert [row["deadline"] for row in result["training"]["table"]] == ["predicted", "energy"]
    shown = "\n".join(deadlines.lines(result))
    assert "waiting, predicted over paper" in shown
    rows = {(row["governor"], row["deadline"]): row for row in result["table"]}
    ours, theirs = rows["energy", "predicted"], rows["paper", "paper"]
    judged = result["figures"]["joules a round, predicted and energy over paper's both"]
    assert judged["value"] == pytest.approx(ours["joules"] / theirs["joules"], abs=1e-3)
    assert f"governor energy over paper's both: {ours['waiting_s'] / theirs['waiting_s']:.2f} x" in shown
    assert "jetson-nano" in shown
