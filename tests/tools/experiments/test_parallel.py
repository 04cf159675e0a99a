"""Runs by several processes."""

from __future__ import annotations

import operator

import pytest

from fedquilt.tools.experiments import parallel


def test_each_result_comes_with_the_number_of_its_run() -> None:
    """In whatever order they are finished; nothing to do is nothing started."""
    assert dict(parallel.spread(operator.floordiv, [(9, 3), (8, 2)], workers=2)) == {0: 3, 1: 4}
    assert list(parallel.spread(operator.floordiv, [])) == []


def test_what_a_run_raises_is_raised_here() -> None:
    """With its own type."""
    with pytest.raises(ZeroDivisionError):
        dict(parallel.spread(operator.floordiv, [(1, 0)]))
