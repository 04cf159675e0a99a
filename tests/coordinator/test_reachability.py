"""Devices and brokers that cannot be reached."""

from pathlib import Path
from typing import Any

import pytest
from by_hand import Hand, Stage, constant_model

from fedquilt import wire
from fedquilt.coordinator.device_columns import ELIGIBLE
from fedquilt.coordinator.fleet.registry import (
    MAX_REQUESTS,
    OFFLINE_GRACE_S,
    QUIET_LIMIT_S,
    RECONNECT_GRACE_S,
    REQUEST_INTERVAL_S,
    REQUESTS_PER_S,
    BrokerOutage,
    SilenceDetector,
)
from fedquilt.coordinator.rounds.events import CohortSelected, JobEnded, RoundClosed, RoundRetried, UpdateAccepted
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


def test_a_broker_that_is_away_for_long_costs_no_attempt(tmp_path):
    stage, hands = _begun(tmp_path)
    _away(stage, 600.0)
    stage.play(RECONNECT.max_s + 15.0)  # of the 30 s, 20 were left
    assert stage.told(RoundRetried) == []
    stage.submit(*hands)
    assert [fact.update.device for fact in stage.told(UpdateAccepted)] == ["a", "b", "c"]
    assert [fact.status for fact in stage.told(JobEnded)] == ["done"]


def test_a_round_ends_at_its_later_deadline(tmp_path):
    stage, hands = _begun(tmp_path, quorum=0.5)
    _away(stage, 5.0)
    for hand in hands[:2]:
        hand.answer(constant_model())
    stage.play(24.5)
    assert stage.told(RoundClosed) == []
    stage.play(1.5)
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
    stage.submit(*hands)
    assert [fact.status for fact in stage.told(JobEnded)] == ["done"]


@pytest.mark.parametrize(
    ("took_s", "lost_s"), [(RECONNECT.first_s / 2, RECONNECT.first_s), (2.0, 2.0 + RECONNECT.max_s)]
)
def test_a_first_connection_is_no_absence_but_a_broker_that_is_away_at_the_start_is(took_s, lost_s):
    absence = BrokerOutage()
    absence.record_connection(False, 5.0)
    absence.record_connection(True, 5.0 + took_s)
    assert absence.lost_s == pytest.approx(lost_s)
    absence.record_connection(False, 100.0)
    absence.record_connection(True, 101.0)
    assert absence.lost_s == pytest.approx(lost_s + 2.0)


@pytest.mark.parametrize(("gone_s", "lost_s"), [(4.0, 8.0), (3600.0, 3600.0 + RECONNECT.max_s)])
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


SILENT_S = QUIET_LIMIT_S + MAX_REQUESTS * REQUEST_INTERVAL_S
TURN_S = 1.0  # two looks of the coordinator at its store, which are its turns where nothing comes


def played(silence: SilenceDetector, seconds: float, begin_s: float, hears: bool = True) -> tuple[list[str], list[str]]:
    """Devices that are asked and that become silent in so many steps of a second."""
    ask, silent = list[str](), list[str]()
    for step in range(1, int(seconds) + 1):
        found = silence.step(begin_s + step, hears)
        ask += found.devices_to_request
        silent += found.silent
    return ask, silent


@pytest.fixture
def silence() -> SilenceDetector:
    """At second 100 of a clock that began long ago."""
    found = SilenceDetector()
    found.step(100.0, True)
    return found


def test_a_device_is_asked_three_times_after_35_s_and_is_silent_after_50(silence):
    silence.record_contact("a")
    assert played(silence, 34, 100.0) == ([], [])
    assert played(silence, 1, 134.0) == (["a"], [])
    assert played(silence, 14, 135.0) == (["a", "a"], [])
    assert played(silence, 1, 149.0) == ([], ["a"])
    assert played(silence, 1000, 150.0) == ([], [])


def test_any_message_brings_a_silent_device_back(silence):
    silence.record_contact("a")
    played(silence, SILENT_S, 100.0)
    assert [silence.record_contact("a"), silence.record_contact("a")] == [True, False]
    assert played(silence, SILENT_S, 150.0)[1] == ["a"]


def test_a_device_that_answers_is_asked_again_after_as_long(silence):
    silence.record_contact("a")
    for turn in range(10):
        assert played(silence, QUIET_LIMIT_S, 100.0 + turn * QUIET_LIMIT_S) == (["a"], [])
        silence.record_contact("a")


def test_a_retained_presence_is_no_sign_of_life(silence):
    silence.expect_contact("a")
    assert played(silence, 14, 100.0) == (["a", "a"], [])
    silence.expect_contact("a")
    assert played(silence, 1, 114.0) == ([], ["a"])


def test_a_device_that_is_offline_is_not_asked(silence):
    silence.record_contact("a")
    silence.forget("a")
    assert played(silence, 1000, 100.0) == ([], [])


def test_an_outage_of_the_broker_makes_nobody_silent(silence):
    silence.record_contact("a")
    assert played(silence, 1000, 100.0, hears=False) == ([], [])
    assert silence.step(1100.0 + 3600.0, True) == ([], [])
    assert played(silence, 33, 4700.0) == ([], [])
    assert played(silence, 1, 4733.0) == (["a"], [])


def test_idle_devices_are_not_asked_in_a_storm(silence):
    names = [f"d{number}" for number in range(10_000)]
    for name in names:
        silence.record_contact(name)
    played(silence, QUIET_LIMIT_S - 1, 100.0)
    for step in range(20):
        ask = silence.step(100.0 + QUIET_LIMIT_S + step, True).devices_to_request
        assert len(ask) == REQUESTS_PER_S
        for name in ask:
            silence.record_contact(name)
    assert silence.step(100.0 + QUIET_LIMIT_S + 20, True).devices_to_request == []


# -- in the coordinator -------------------------------------------------------------------------------------------


def begun(folder: Path, **table: Any) -> tuple[Stage, list[Hand]]:
    """A job whose first round three devices have been asked for."""
    stage = Stage(folder, **{"cohort": {"deadline_s": 600.0}, "rounds": 2, **table})
    hands = [stage.hand(name) for name in "abc"]
    stage.play(RECONNECT_GRACE_S + TURN_S)
    assert [fact.devices for fact in stage.told(CohortSelected)] == [("a", "b", "c")]
    return stage, hands


def closed_after_s(stage: Stage, most_s: float) -> float:
    """Virtual seconds until a round is committed, in steps of 50 ms."""
    begin_s, count = stage.broker.now_s, len(stage.told(RoundClosed))
    while len(stage.told(RoundClosed)) == count:
        assert stage.broker.now_s < begin_s + most_s, "the round is still open"
        stage.play(0.05)
    return stage.broker.now_s - begin_s


def goes_offline(hand: Hand) -> None:
    hand.say("presence", wire.Presence(online=False, boot="1"), retain=True)


def test_a_round_closes_within_5_s_after_a_device_went_offline_that_alone_has_not_answered(tmp_path):
    stage, (a, b, c) = begun(tmp_path)
    a.answer(constant_model())
    b.answer(constant_model())
    stage.play(60.0)
    goes_offline(c)
    assert OFFLINE_GRACE_S - 0.1 <= closed_after_s(stage, 10.0) <= OFFLINE_GRACE_S + TURN_S
    assert [fact.update.device for fact in stage.told(UpdateAccepted)] == ["a", "b"]
    stage.play()
    assert [fact.devices for fact in stage.told(CohortSelected)[1:]] == [("a", "b")]


@pytest.mark.parametrize(("quorum", "closes"), [(0.6, True), (1.0, False)])
def test_a_round_of_a_fixed_size_closes_early_if_its_quorum_is_reached(tmp_path, quorum, closes):
    stage, (a, b, c) = begun(tmp_path, cohort={"deadline_s": 600.0, "size": 3, "quorum": quorum})
    goes_offline(c)
    a.answer(constant_model())
    b.answer(constant_model())
    stage.play(OFFLINE_GRACE_S + TURN_S)
    assert bool(stage.told(RoundClosed)) == closes


def test_a_silent_device_is_not_waited_for_and_not_selected_until_its_next_message(tmp_path):
    stage, (a, b, c) = begun(tmp_path, rounds=4)
    c.answers = False
    a.answer(constant_model())
    b.answer(constant_model())
    assert closed_after_s(stage, 100.0) <= SILENT_S + TURN_S
    stage.play()
    assert stage.told(CohortSelected)[-1].devices == ("a", "b")
    assert stage.server.registry.online_devices(stage.broker.now_s) == {"a", "b"}
    labels = stage.server.registry.eligibility(stage.server.active_jobs()[0].requirements, stage.broker.now_s)
    assert labels == {"a": ELIGIBLE, "b": ELIGIBLE, "c": "silent"}
    c.say("telemetry", wire.Telemetry(power_w=1.0))
    stage.play()
    assert stage.told(CohortSelected)[-1].devices == ("c",)


def test_after_a_restart_retained_presence_counts_for_seconds_only(tmp_path):
    stage, (a, b, c) = begun(tmp_path)
    c.answers = False
    stage.restart()
    stage.play(RECONNECT_GRACE_S + MAX_REQUESTS * REQUEST_INTERVAL_S + TURN_S)
    assert stage.server.registry.online_devices(stage.broker.now_s) == {"a", "b"}
    a.answer(constant_model())
    b.answer(constant_model())
    assert closed_after_s(stage, 10.0) <= TURN_S
