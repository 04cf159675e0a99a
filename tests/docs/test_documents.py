"""Lines that a page shows are compared with what its command prints."""

from __future__ import annotations

import math

import pytest

import documents


@pytest.mark.parametrize(
    ("shown", "printed", "tolerance", "same"),
    [
        ("accuracy 98.9 %,  14 J", "accuracy 97.0 %, 20 J", math.inf, True),
        ("the 95 % interval is [9.4, 15.9] points.", "the 95 % interval is [10, 15.9] points.", math.inf, True),
        ("accuracy 98.9 %", "accuracy 98.9 J", math.inf, False),
        ("accuracy 98.9 %", "accuracy -98.9 %", math.inf, False),
        ("tx2 7", "tx1 7", math.inf, False),
        ("it took 1.0 s", "it took 1.1 s", 0.2, True),
        ("it took [1.0] s", "it took [1.3] s", 0.2, False),
        ("it took 1.0 s", "it took 1.1 s", 0.0, False),
    ],
)
def test_numbers_may_differ_by_a_share_and_text_may_not(shown: str, printed: str, tolerance: float, same: bool) -> None:
    """Whether they stand alone, in brackets or before a unit."""
    if same:
        documents.require_lines(shown, f"before\n{printed}\n", tolerance)
    else:
        with pytest.raises(AssertionError):
            documents.require_lines(shown, printed, tolerance)
