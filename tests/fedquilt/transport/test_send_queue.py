"""What goes out when, and who is blamed when the broker hangs up."""

from fedquilt.transport.mqtt.link import (
    MAX_IN_FLIGHT_BYTES,
    MAX_IN_FLIGHT_MESSAGES,
    MAX_OFFLINE_BYTES,
    MAX_OFFLINE_MESSAGES,
    QueuedMessage,
    SendQueue,
)


def reliable(name: str, size: int = 10) -> QueuedMessage:
    """A QoS-1 message."""
    return QueuedMessage(name, bytes(size), retain=False, reliable=True)


def queue(*messages: QueuedMessage) -> SendQueue:
    made = SendQueue()
    for message in messages:
        made.add(message)
    return made


def take_all(made: SendQueue, window: int = 20) -> list[str]:
    topics = []
    while (message := made.take_next(window)) is not None:
        made.record_in_flight(hash(message.topic), message)
        topics.append(message.topic)
    return topics


def test_backlog_falls_when_a_message_is_done_not_when_it_is_taken():
    made = queue(*map(reliable, "abc"))
    assert take_all(made) == ["a", "b", "c"]
    assert made.backlog == 30
    assert made.remove_sent(hash("b")) is not None
    assert made.remove_sent(hash("b")) is None
    assert made.backlog == 20


def test_a_window_of_reliable_messages_and_a_mebibyte_are_under_way_at_once():
    made = queue(*map(reliable, "abc"))
    assert take_all(made, window=2) == ["a", "b"]
    made.remove_sent(hash("a"))
    assert take_all(made, window=2) == ["c"]
    large = queue(reliable("x", MAX_IN_FLIGHT_BYTES * 2), reliable("y"))
    assert take_all(large) == ["x"]
    tiny = queue(*(QueuedMessage(str(n), b"", False, reliable=False) for n in range(MAX_IN_FLIGHT_MESSAGES + 1)))
    assert len(take_all(tiny)) == MAX_IN_FLIGHT_MESSAGES


def test_when_a_connection_breaks_reliable_messages_are_sent_again_first_and_one_by_one():
    made = queue(reliable("a"), reliable("b"), QueuedMessage("lost", bytes(10), False, reliable=False))
    assert take_all(made) == ["a", "b", "lost"]
    made.add(QueuedMessage("lost too", bytes(10), False, reliable=False))
    made.add(reliable("c"))
    made.add(reliable("d"))
    assert made.handle_disconnect() is None
    assert made.backlog == 40
    assert take_all(made) == ["a"]
    made.remove_sent(hash("a"))
    assert take_all(made) == ["b"]
    made.remove_sent(hash("b"))
    assert take_all(made) == ["c", "d"]


def test_the_message_alone_under_way_at_the_third_break_is_blamed():
    made = queue(reliable("guilty", 1000), reliable("innocent"))
    assert take_all(made) == ["guilty", "innocent"]
    assert made.handle_disconnect() is None
    assert take_all(made) == ["guilty"]
    assert made.handle_disconnect() is None
    assert take_all(made) == ["guilty"]
    culprit = made.handle_disconnect()
    assert culprit.topic == "guilty"
    assert (take_all(made), made.backlog) == (["innocent"], 10)


def test_a_network_that_fails_blames_nobody_and_a_broker_that_says_too_large_blames_at_once():
    made = queue(reliable("a"))
    for _ in range(10):
        take_all(made)
        assert made.handle_disconnect(is_clean=True) is None
    take_all(made)
    assert made.handle_disconnect(max_breaks=1) is not None
    assert made.backlog == 0


def test_without_a_connection_the_oldest_are_given_up_beyond_the_bounds():
    made = queue(reliable("old", MAX_OFFLINE_BYTES), reliable("new"))
    assert made.drop_oldest() == 1
    assert take_all(made) == ["new"]
    many = queue(*(reliable(str(n), 0) for n in range(MAX_OFFLINE_MESSAGES + 3)))
    assert many.drop_oldest() == 3
