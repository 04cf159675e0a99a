"""Six methods do what golden.json holds: the same devices asked, the same states, the same exported bytes.

What moves on purpose is kept anew by `python -m tests.goldens --write`, and the commit says why it moved.
"""

from __future__ import annotations

from pathlib import Path

import goldens
import msgspec
import pytest
from goldens import Golden


@pytest.fixture(scope="module")
def kept() -> goldens.File:
    return goldens.load()


@pytest.mark.parametrize("method", goldens.CHANGES)
def test_a_golden_run_is_what_was_kept(method: str, kept: goldens.File, tmp_path: Path) -> None:
    """Bit for bit where this processor multiplies as the one that wrote the file; else to 1e-5."""
    if method == "fedstitch":
        pytest.importorskip("onnxruntime")
    same = goldens.probe(method) == kept.probes[method]
    moved = goldens.differences(kept.runs[method], goldens.play(method, tmp_path), bits=same)
    assert moved == [], f"{method}; if it is meant to: python -m tests.goldens --write, and say why in the commit"


def changed(run: Golden, *, by: float) -> Golden:
    """The run with another last state: other bytes, and sums that are off by this share."""
    last = run.states[-1]
    values = msgspec.structs.replace(last.values, total=last.values.total + by * last.values.magnitudes)
    return msgspec.structs.replace(run, states=[*run.states[:-1], goldens.Content("f" * 64, values)])


def test_what_moved_is_told(kept: goldens.File) -> None:
    """Where only the last bits differ, values do not, unless they do; who was asked counts everywhere."""
    run = kept.runs["fedavg"]
    assert goldens.differences(run, run, bits=True) == []
    assert goldens.differences(run, changed(run, by=1e-7), bits=False) == []
    (told,) = goldens.differences(run, changed(run, by=1e-7), bits=True)
    assert "after 5 rounds has other bytes, and the same values" in told
    (told,) = goldens.differences(run, changed(run, by=1e-3), bits=False)
    assert "other values" in told
    others = msgspec.structs.replace(run, asked=[*run.asked[:-1], ["jetson-nano-00"]])
    (told,) = goldens.differences(run, others, bits=False)
    assert "other devices are asked, from time 4 on" in told


def test_golden_runs_ask_a_part_of_the_fleet_and_evaluate(kept: goldens.File) -> None:
    """Else a change of how devices are drawn would show in none of them."""
    for method, run in kept.runs.items():
        most = 3 + (method == "fedstitch")  # whose last phases hear every device once, so what is left may be fewer
        assert run.asked
        assert all(0 < len(asked) <= most if most > 3 else len(asked) == most for asked in run.asked)
        assert len({tuple(asked) for asked in run.asked}) > 2
        # a device of a stitching job that was heard has nothing to do, and another is asked in the same round
        assert len(run.states) <= len(run.asked) + 1 if most > 3 else len(run.states) == len(run.asked) + 1
