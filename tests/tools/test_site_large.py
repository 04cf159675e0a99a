"""Sites whose sums are large: they lie on the disk on both sides, and go up in turn."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
from sited import federation, plan, states

from fedquilt.blobs.queueing import Queue
from fedquilt.coordinator import mending, summing
from fedquilt.coordinator.facts import Rejected
from fedquilt.coordinator.limits import Limits
from fedquilt.on_disk import Scratch
from fedquilt.tools.site import virtual


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Everything is large; devices that have had to wait for their turn."""
    found: set[str] = set()

    def begin(queue: Queue, now_s: float) -> list[str]:
        begun = plain(queue, now_s)
        found.update(f"site-{number}" for number in range(4) if math.isinf(queue.held_s(f"site-{number}")))
        return begun

    plain = Queue.begin
    monkeypatch.setattr(Queue, "begin", begin)
    monkeypatch.setattr(virtual, "LARGE_BYTES", 0)
    monkeypatch.setattr(summing, "Scratch", partial(Scratch, least=1))
    for module in (mending, summing):
        monkeypatch.setattr(module, "WHOLE_BYTES", 0)
    return found


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_sites_with_large_sums_wait_for_their_turn_and_come_to_the_bits_of_all_boards(
    tmp_path: Path, waited: set[str], method: str
) -> None:
    """Four sites; no sum is ever in memory as a whole, neither where it is made nor above."""
    table = {"cohort": {"start_devices": 4, "deadline_s": 60}}
    with federation(plan(tmp_path / "sited", method, **table), (2, 2, 1, 1), limits=Limits(waiting_mb=0)) as made:
        assert made.play() == "done", made.facts[-1]
        assert not [fact for fact in made.facts if isinstance(fact, Rejected)]
        assert waited
        sited = made.states
    assert sited == states(tmp_path / "flat", method, (), waits=6)
