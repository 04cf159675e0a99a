"""Which devices are new is decided by the coordinator: a device cannot count twice by claiming lost state."""

from __future__ import annotations

import pytest
from by_hand import MODEL, Stage

from fedquilt.coordinator.rounds.events import CohortSelected, RoundCommitted

PARAMS = {"scaffold": {"momentum": 0.0, "lr": 0.1}, "feddyn": {}}
COUNT = {"scaffold": "known", "feddyn": "participants"}


@pytest.mark.parametrize("method", PARAMS)
@pytest.mark.parametrize("claim", [0.0, 1.0])
def test_a_device_counts_once_whatever_it_claims(tmp_path, method, claim):
    stage = Stage(tmp_path, method=method, params=PARAMS[method], rounds=3, cohort={"deadline_s": 5.0, "quorum": 1.0})
    hands = [stage.hand(name) for name in "ab"]
    stage.play(0.5)
    for round in range(3):
        for hand in hands:
            is_new = claim if hand.name == "b" else float(round == 0)
            hand.answer(MODEL, metrics={"steps": 1.0, "loss": 0.5, "new": is_new})
        stage.play(1.0)
        committed = [event for event in stage.facts if isinstance(event, RoundCommitted)]
        assert len(committed) == round + 1
        if (job := stage.server.find_job(stage.job)) is not None:
            assert getattr(job.state, COUNT[method]) == 2
    assert {event.devices for event in stage.facts if isinstance(event, CohortSelected)} == {("a", "b")}
