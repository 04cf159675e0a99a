"""Updates under a codec, from devices driven by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from by_hand import MODEL, Hand, Stage

from fedquilt.arrays import tensors
from fedquilt.coordinator.jobs import retention
from fedquilt.coordinator.rounds.events import RoundCommitted, UpdateAccepted, UpdateRejected
from fedquilt.coordinator.views import round_outcomes
from fedquilt.core import Update
from fedquilt.models.local_training import NetworkState


@pytest.fixture
def coded(tmp_path: Path) -> Stage:
    """A job of one round whose updates go up by int8."""
    return Stage(tmp_path, wire={"codec": "int8"})


def by_int8(hand: Hand, value: float, **changes: Any) -> Update:
    """An answer of which every entry has moved from what was sent by `value`, in 127 steps."""
    task = next(task for task in reversed(hand.tasks) if task)
    assert task.wire.codec == "int8"
    step = np.full(1, value / 127, np.float32)
    sent = {f"{name}#int8": np.full(array.shape, 127, np.int8) for name, array in MODEL.items()}
    sent |= {f"{name}#step": step for name in MODEL}
    return hand.answer(sent, **{"bases": {"model": task.bundles["model"].sha256}, **changes})


def ended_at(stage: Stage) -> list[float]:
    stored = stage.store.depot.blob_path(stage.told(RoundCommitted)[0].state.sha256)
    return tensors.unpack_state(stored.read_bytes(), NetworkState).model["1.bias"].tolist()


def test_a_coded_update_is_decoded_when_it_comes_and_kept_as_it_will_be_folded(coded):
    a, b = coded.hand("a"), coded.hand("b")
    coded.play()
    update = by_int8(a, 1.0)
    coded.play()
    (fact,) = coded.told(UpdateAccepted)
    assert fact.update.bases == {}
    kept = coded.store.depot.blob_path(fact.update.bundles["model"].sha256)
    assert kept is not None
    np.testing.assert_allclose(tensors.read_tensors(kept)["1.bias"], [1, 1], rtol=1e-6)
    assert coded.store.depot.blob_path(update.bundles["model"].sha256) is None
    assert [ack.accepted for ack in a.acks] == [True]
    by_int8(b, 3.0)
    coded.play()
    np.testing.assert_allclose(ended_at(coded), [2, 2], rtol=1e-6)


def test_coded_updates_on_both_sides_of_a_restart_count_as_if_there_were_none(coded):
    a, b = coded.hand("a"), coded.hand("b")
    coded.play()
    by_int8(a, 1.0)
    coded.play()
    coded.restart()
    coded.play()
    by_int8(b, 3.0)
    coded.play()
    np.testing.assert_allclose(ended_at(coded), [2, 2], rtol=1e-6)
    assert coded.told(UpdateRejected) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bases": {"model": "a" * 64}}, "bundle 'model' has moved from aaaaaaaaaaaa, which this round has not sent"),
        ({"bases": {}, "value": np.inf}, "'1.bias#step' holds 1 values that are not finite"),
        ({"value": -1.0}, "tensor '1.bias', part step: -0.00787402, wanted a number of at least 0"),
    ],
)
def test_a_coded_update_that_cannot_be_decoded_is_refused_with_its_reason(coded, changes, said):
    a, b = coded.hand("a"), coded.hand("b")
    coded.play()
    bad = by_int8(a, **{"value": 1.0, **changes})
    by_int8(b, 3.0)
    coded.play()
    assert said in coded.told(UpdateRejected)[0].reason
    assert coded.store.depot.blob_path(bad.bundles["model"].sha256) is None
    coded.play(40.0)
    assert coded.told(RoundCommitted) == [] or ended_at(coded) == pytest.approx([3, 3])


def test_a_device_of_an_older_version_is_not_asked_and_the_log_says_why(coded):
    old, new = coded.hand("old", codecs=("raw",)), coded.hand("new")
    coded.play()
    by_int8(new, 2.0)
    coded.play()
    assert old.tasks == []
    np.testing.assert_allclose(ended_at(coded), [2, 2], rtol=1e-6)
    assert "[wire]" in round_outcomes.load_outcomes(coded.store, coded.job).found[0]["old"].text


def test_blobs_that_a_large_round_replaces_are_looked_up_together_and_go_by_its_end(coded, monkeypatch):
    monkeypatch.setattr(retention, "TOGETHER", 1.5)
    hands = [coded.hand(name) for name in "abc"]
    coded.play()
    sent = []
    for hand, value in zip(hands[:2], (1.0, 3.0), strict=True):
        sent.append(by_int8(hand, value).bundles["model"].sha256)
        coded.play()
    assert [coded.store.depot.blob_path(sha256) is None for sha256 in sent] == [True, False]
    sent.append(by_int8(hands[2], 5.0).bundles["model"].sha256)
    coded.play()
    assert coded.told(RoundCommitted)
    assert [coded.store.depot.blob_path(sha256) for sha256 in sent] == [None, None, None]
