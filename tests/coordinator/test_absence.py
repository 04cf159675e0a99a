"""A broker that is away for long: what the round loses by it, it gets back."""

from pathlib import Path

import pytest
from by_hand import Hand, Stage, ones

from fedquilt.coordinator.fleet.registry import BrokerOutage
from fedquilt.coordinator.rounds.events import JobEnded, RoundClosed, RoundRetried, UpdateAccepted
from fedquilt.coordinator.rounds.rollout import PhasePassed, ReleaseOffered
from fedquilt.transport.mqtt.connection import RECONNECT


def _away(stage: Stage, seconds: float) -> None:
    stage.link.connected = False
    stage.play(seconds)
    stage.link.connected = True
    stage.link.session += 1


def _begun(folder: Path, **cohort: object) -> tuple[Stage, list[Hand]]:
    stage = Stage(folder, cohort={"deadline_s": 30.0, **cohort})
    hands = [stage.hand(name) for name in "abc"]
    stage.play(10.0)
    return stage, hands


def test_a_broker_that_is_away_for_hours_costs_no_attempt(tmp_path):
    stage, hands = _begun(tmp_path)
    _away(stage, 2 * 3600.0)
    stage.play(RECONNECT.most_s + 15.0)  # of the 30 s, 20 were left
    assert stage.told(RoundRetried) == []
    for hand in hands:
        hand.answer(ones())
    stage.play()
    assert [fact.update.device for fact in stage.told(UpdateAccepted)] == ["a", "b", "c"]
    assert [fact.status for fact in stage.told(JobEnded)] == ["done"]


def test_a_round_ends_at_its_later_deadline(tmp_path):
    stage, hands = _begun(tmp_path, quorum=0.5)
    _away(stage, 5.0)
    for hand in hands[:2]:
        hand.answer(ones())
    stage.play(24.5)
    assert stage.told(RoundClosed) == []
    stage.play(1.5)
    assert len(stage.told(RoundClosed)) == 1


def test_a_round_that_all_have_answered_closes_at_once_though_its_broker_was_away(tmp_path):
    stage, hands = _begun(tmp_path)
    _away(stage, 40.0)
    for hand in hands:
        hand.answer(ones())
    stage.play(1.0)
    assert len(stage.told(RoundClosed)) == 1


def test_an_attempt_that_begins_after_an_absence_has_its_own_deadline(tmp_path):
    stage, _ = _begun(tmp_path)
    _away(stage, 10.0)
    stage.play(41.0)  # 20 were left, 20 are lost
    assert [fact.attempt for fact in stage.told(RoundRetried)] == [1]
    stage.play(31.0)
    assert [fact.attempt for fact in stage.told(RoundRetried)] == [1, 2]


def test_a_coordinator_that_starts_before_its_broker_waits_with_the_round(tmp_path):
    stage, hands = _begun(tmp_path)
    stage.restart()
    stage.link.connected = False
    stage.play(500.0)
    assert stage.told(RoundRetried) == []
    stage.link.connected = True
    stage.play(1.0)
    for hand in hands:
        hand.answer(ones())
    stage.play()
    assert [fact.status for fact in stage.told(JobEnded)] == ["done"]


def test_a_coordinator_that_starts_shortly_before_its_broker_is_back_waits_for_boards_in_their_back_off(tmp_path):
    """It was killed while the broker was away: boards may have their longest back-off before them."""
    stage, hands = _begun(tmp_path)
    stage.link.connected = False
    stage.play(60.0)
    stage.restart()
    _away(stage, 1.0)
    stage.play(30.0 + RECONNECT.most_s - 2.0)
    assert stage.told(RoundRetried) == stage.told(JobEnded) == []
    for hand in hands:
        hand.answer(ones())
    stage.play()
    assert [fact.status for fact in stage.told(JobEnded)] == ["done"]


@pytest.mark.parametrize(
    ("took_s", "lost_s"), [(RECONNECT.first_s / 2, RECONNECT.first_s), (2.0, 2.0 + RECONNECT.most_s)]
)
def test_a_first_connection_is_no_absence_but_a_broker_that_is_away_at_the_start_is(took_s, lost_s):
    absence = BrokerOutage()
    absence.record_connection(False, 5.0)
    absence.record_connection(True, 5.0 + took_s)
    assert absence.lost_s == pytest.approx(lost_s)
    absence.record_connection(False, 100.0)
    absence.record_connection(True, 101.0)
    assert absence.lost_s == pytest.approx(lost_s + 2.0)


@pytest.mark.parametrize(("gone_s", "lost_s"), [(4.0, 8.0), (3600.0, 3600.0 + RECONNECT.most_s)])
def test_each_absence_counts_with_the_back_off_that_follows(gone_s, lost_s):
    absence = BrokerOutage()
    for at_s, reached in ((0.0, True), (1.0, False), (1.5, False), (1.0 + gone_s, True), (9999.0, True)):
        absence.record_connection(reached, at_s)
        assert absence.is_disconnected is not reached
    assert absence.lost_s == lost_s
    absence.record_connection(False, 10000.0)
    absence.record_connection(True, 10001.0)
    assert absence.lost_s == lost_s + 2.0


def test_a_rollout_goes_no_further_while_the_broker_is_away(ground):
    boards = ground.fleet(4)
    id = ground.deploy(canary=0.5, phases=(1.0,), patience_s=60.0)
    while not ground.state(id).offered:
        ground.play(0.1)
    lost = next(board for board in boards if board.name in ground.state(id).offered)
    lost.link.connected = False
    ground.play(1.0)
    ground.link.connected = False
    ground.play(3600.0)
    ground.link.connected = True
    ground.link.session += 1
    ground.play(30.0)
    assert [type(fact) for _, fact in ground.facts if isinstance(fact, ReleaseOffered | PhasePassed)] == [
        ReleaseOffered
    ]
    lost.come()
    ground.play(20.0)
    assert (ground.state(id).status, len(ground.having())) == ("done", 4)
