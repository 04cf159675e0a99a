"""A coordinator whose client id another one with its certificate has used for a while, and then no longer."""

from sealed_fleets import CLAIM, down_topic, up_topic

from fedquilt.security import authenticated_link
from fedquilt.security.authenticated_link import REQUEST_INTERVAL_S


def hellos(fleet, device="a"):
    return len(fleet.broker.of(down_topic(device, "hello")))


def test_a_board_that_has_a_session_with_another_coordinator_is_asked_for_a_new_one_when_it_speaks(fleet):
    fleet.displace_coordinator()
    board = fleet.boards["a"]
    before = board.session
    board.publish(up_topic("a", "telemetry"), CLAIM)
    fleet.run(3.0)
    assert board.session == before + 1
    board.publish(up_topic("a"), CLAIM)
    fleet.link.publish(down_topic("a"), CLAIM)
    fleet.run()
    assert fleet.payloads("a") == fleet.payloads("coordinator") == [CLAIM]


def test_a_board_that_has_a_session_with_another_coordinator_is_asked_for_a_new_one_when_it_is_silent(fleet):
    fleet.displace_coordinator()
    for _ in range(3):
        fleet.link.publish(down_topic("a"), CLAIM)
        fleet.run(REQUEST_INTERVAL_S)
    assert fleet.payloads("a") == [CLAIM]


def test_boards_that_answer_after_a_lost_connection_keep_their_session(fleet):
    before = hellos(fleet)
    fleet.reconnect(fleet.link)
    for _ in range(5):
        fleet.link.publish(down_topic("a"), CLAIM)
        fleet.run()
        fleet.boards["a"].publish(up_topic("a"), CLAIM)
        fleet.run(REQUEST_INTERVAL_S)
    assert hellos(fleet) == before
    assert fleet.payloads("a") == fleet.payloads("coordinator") == [CLAIM] * 5


def test_a_board_that_does_not_answer_is_asked_every_few_seconds_at_most_and_once_if_it_then_proves_itself(fleet):
    fleet.reconnect(fleet.link)
    fleet.broker.change = lambda topic, payload: None if topic == up_topic("a", "hello") else payload
    before = hellos(fleet)
    for _ in range(100):
        fleet.link.publish(down_topic("a"), CLAIM)
        fleet.run(0.2)
    assert 2 <= hellos(fleet) - before <= 20.0 / REQUEST_INTERVAL_S
    fleet.broker.change = lambda topic, payload: payload
    fleet.run(authenticated_link.RESEND.max_s)
    fleet.link.publish(down_topic("a"), CLAIM)
    fleet.run(REQUEST_INTERVAL_S)
    proved = hellos(fleet)
    for _ in range(100):
        fleet.link.publish(down_topic("a"), CLAIM)
        fleet.run(0.2)
    assert hellos(fleet) == proved


def test_messages_replayed_after_a_lost_connection_cost_a_board_one_handshake(fleet):
    fleet.boards["a"].publish(up_topic("a"), CLAIM)
    fleet.run()
    old = fleet.broker.of(up_topic("a"))[0]
    fleet.coordinate()
    fleet.run(6.0)
    fleet.reconnect(fleet.link)
    before = hellos(fleet)
    for _ in range(100):
        fleet.attacker.publish(up_topic("a"), old)
        fleet.run(0.2)
    assert hellos(fleet) == before + 3  # asked to begin, and two flights
    assert fleet.payloads("coordinator") == []
