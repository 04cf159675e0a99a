"""What the stitching bench makes of the seconds and scores it saw."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from fedquilt.tools.lab.bench import stitch
from fedquilt.tools.lab.bench.stitch import ScoringComparison

WHOLE = {"cold_s": np.array([9.0, 18.0]), "warm_s": np.array([4.0, 8.0])}
OWN = {"cold_s": np.array([9.0, 36.0]), "warm_s": np.array([5.0, 16.0])}


def round_of(length: int, naive_s: float, own_s: float, stray: float = 0.0) -> ScoringComparison:
    ask: Any = Asked(tuple(f"a.{i}" for i in range(length)), ("b.1", "b.2"), 64)
    scores = np.array([0.25, 0.5])
    own, naive = np.array([own_s, 2 * own_s]), np.array([naive_s, 3 * naive_s])
    seconds = {"output": own, "hybrid": own, "input": own, "naive": naive}
    return ScoringComparison(ask, seconds, {"output": scores + stray, "naive": scores})


class Asked(msgspec.Struct):
    path: tuple[str, ...]
    pool: tuple[str, ...]
    samples: int


def test_the_rounds_compared_are_taken_together() -> None:
    found = stitch._build_result(64, WHOLE, OWN, [round_of(1, 90.0, 2.0), round_of(9, 10.0, 3.0)])
    assert found["figures"]["output_score_to_naive_by_cpu"]["value"] == 20.0
    assert found["figures"]["references_to_plain_forward_by_cpu"]["value"] == 1.25
    assert found["figures"]["output_score_to_naive_by_wall"]["value"] == 30.0
    assert found["figures"]["references_to_plain_forward_by_wall"]["value"] == 2.0
    assert [row["candidates"] for row in found["rounds"]] == [2, 2]
    assert {"path", "blocks", "naive", "output", "hybrid", "input"} <= set(" ".join(stitch.lines(found)).split())
    assert msgspec.json.decode(msgspec.json.encode(found)) == found  # the command's other form


def test_scores_that_differ_are_no_speed_up() -> None:
    same, other = round_of(1, 90.0, 2.0), round_of(5, 90.0, 2.0, stray=0.01)
    assert stitch._build_result(64, WHOLE, OWN, [same])["figures"]["difference_of_scores"]["reached"]
    assert not stitch._build_result(64, WHOLE, OWN, [same, other])["figures"]["difference_of_scores"]["reached"]


def test_large_images_are_held_to_more() -> None:
    """25 times faster is enough for output scores at both sizes, and for hybrid ones at the small size only."""
    compared = [round_of(5, 100.0, 4.0)]
    reached = {
        size: [way for way in stitch.FASTER if found["figures"][f"{way}_score_to_naive_by_cpu"]["reached"]]
        for size in (64, 224)
        for found in [stitch._build_result(size, WHOLE, OWN, compared)]
    }
    assert reached == {64: ["output", "hybrid"], 224: ["output"]}
    assert not stitch._build_result(224, WHOLE, OWN, compared)["figures"]["references_to_plain_forward_by_cpu"][
        "reached"
    ]
