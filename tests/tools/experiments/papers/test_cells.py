"""Cells of a table: which value of a run a name stands for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fedquilt.tools.experiments.single_run import EvaluationPoint, SeedRun
from fedquilt.tools.lab.papers import cells


def run(tests: Sequence[float | None], *, first: int = 1, **figures: float) -> SeedRun:
    marks = [
        EvaluationPoint(
            rounds=rounds,
            test=test,
            held=None,
            mean=None,
            worst_decile=None,
            seconds=None,
            real_s=0.0,
            down_bytes=0,
            up_bytes=10 * rounds,
            energy_j=None,
        )
        for rounds, test in enumerate(tests, first)
    ]
    return SeedRun(method="fedavg", seed=0, params={}, devices=2, tested=4, marks=tuple(marks), figures=figures)


@pytest.mark.parametrize(
    ("tests", "target", "rounds"),
    [
        ([0.5, 0.99, 0.9, 1.0], 0.99, 2),
        ([0.99], 0.99, 1),
        ([0.989999, 0.5], 0.99, None),
        ([None, 1.0], 0.99, 2),
    ],
)
def test_the_first_round_that_reaches_the_target_counts_from_one(
    tests: Sequence[float | None], target: float, rounds: int | None
) -> None:
    assert cells.read_value(run(tests), "rounds_to", target) == rounds


def test_a_value_is_that_of_the_last_evaluation_or_of_the_one_that_is_named() -> None:
    curve = run([0.1, 0.4, 0.7], first=0, share=25.0, up_bytes=7.0)
    assert [cells.read_value(curve, name) for name in ("test", "test@0", "test@1", "test@9")] == [0.7, 0.1, 0.4, None]
    assert (cells.read_value(curve, "up_bytes@1"), cells.read_value(curve, "up_bytes")) == (10, 7.0)
    assert (cells.read_value(curve, "share"), cells.read_value(curve, "unknown")) == (25.0, None)
    assert cells.read_value(run([]), "test") is None
