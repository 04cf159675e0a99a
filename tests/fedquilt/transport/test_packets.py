"""Packets that carry messages: what is written is read again, and bytes that are none are named."""

import pytest
from hypothesis import settings

from fedquilt.transport.mqtt import client
from fedquilt.transport.mqtt.client import MalformedPacketError

FUZZ = settings(max_examples=300, deadline=None, derandomize=True, database=None)


def read(level: int, packet: bytes) -> tuple[str | None, bytes, int | None]:
    found = client.find_packet(bytearray(packet), 0)
    assert found is not None
    head, begin, end = found
    assert end == len(packet)
    return client.parse_publish(level, head, bytearray(packet[begin:end]))


@pytest.mark.parametrize("level", [4, 5])
@pytest.mark.parametrize("size", [0, 1, 100, 127, 128, 20_000, 3_000_000])
def test_a_message_is_read_as_it_was_written(level, size):
    payload = bytes(size)
    assert read(level, client.publish_packet(level, 7, "a/b", payload, 1, False)) == ("a/b", payload, 7)
    assert read(level, client.publish_packet(level, 7, "a/b", payload, 0, True)) == ("a/b", payload, None)
    assert client.publish_packet(level, 7, "a/b", payload, 1, True)[0] == 0x33


def test_a_packet_is_taken_once_it_is_whole():
    packet = client.publish_packet(5, 1, "a", b"payload", 1, False)
    for size in range(len(packet)):
        assert client.find_packet(bytearray(packet[:size]), 0) is None
    assert client.find_packet(bytearray(packet + packet), len(packet)) == (0x32, len(packet) + 2, 2 * len(packet))


def test_properties_of_a_message_are_skipped():
    """A broker of MQTT 5 may add some."""
    body = bytearray(b"\x00\x01a" + b"\x05\x26\x00\x00\x00\x00" + b"payload")
    assert client.parse_publish(5, 0x30, body) == ("a", b"payload", None)


def test_an_acknowledgement_has_a_reason_where_the_broker_gives_one():
    assert client.parse_puback(bytearray(client.puback_packet(513)[2:])) == (513, 0)
    assert client.parse_puback(bytearray(b"\x02\x01\x95\x00")) == (513, 149)


@pytest.mark.parametrize("body", [b"", b"\x00", b"\x00\x09a", b"\x00\x01a\x7f"])
def test_what_is_shorter_than_it_says_is_malformed(body):
    with pytest.raises(MalformedPacketError):
        client.parse_publish(5, 0x30, bytearray(body))


def test_a_topic_that_is_longer_than_its_packet_is_malformed_at_either_level():
    with pytest.raises(MalformedPacketError, match="topic"):
        client.parse_publish(4, 0x30, bytearray(b"\x00\x09a"))


def test_a_length_takes_four_bytes_and_a_packet_as_many_as_are_permitted_at_the_most():
    assert client.find_packet(bytearray(b"\x30\x80\x80\x80"), 0) is None
    with pytest.raises(MalformedPacketError, match="four bytes"):
        client.find_packet(bytearray(b"\x30\x80\x80\x80\x80"), 0)
    assert client.find_packet(bytearray(b"\x30\x05"), 0, 5) is None
    with pytest.raises(MalformedPacketError, match="more than 5"):
        client.find_packet(bytearray(b"\x30\x06"), 0, 5)
