import json
import zlib
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wired import MESSAGES, NUMBERED, SHA

from fedquilt import wire
from fedquilt.core import Task, Update, WireError, WireMessage

FUZZ = settings(max_examples=100, deadline=None, derandomize=True, database=None)
KINDS = [type(message) for message in MESSAGES]


def seal(fields: bytes) -> bytes:
    """A whole envelope, with the right checksum, around what follows the checksum."""
    return b'{"v":1,"crc":"%08x"' % zlib.crc32(fields) + fields


def only_named_errors(payload: bytes, kind: type[WireMessage]) -> None:
    """Decoding gives a value of that kind or WireError, and nothing else comes out."""
    with suppress(WireError):
        assert isinstance(wire.decode(payload, kind), kind)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_back_as_it_was_sent(message):
    """decode(encode(m)) == m for each kind of message."""
    assert wire.decode(wire.encode(message), type(message)) == message


def test_a_message_is_one_json_object_that_any_dashboard_reads():
    """The envelope adds a version and a checksum, nothing else."""
    fields = b',"online":true,"boot":"b1","seq":0}'
    payload = wire.encode(wire.Presence(online=True, boot="b1"))
    assert payload == b'{"v":1,"crc":"3adf1764"' + fields
    assert zlib.crc32(fields) == 0x3ADF1764


def test_any_single_flipped_bit_is_seen():
    payload = wire.encode(wire.Ack(**NUMBERED, accepted=True))
    for place in range(len(payload)):
        for bit in range(8):
            flipped = payload[:place] + bytes([payload[place] ^ 1 << bit]) + payload[place + 1 :]
            with pytest.raises(WireError):
                wire.decode(flipped, wire.Ack)


def test_another_version_is_named_in_the_error():
    payload = wire.encode(wire.CoordState(online=True)).replace(b'"v":1', b'"v":2')
    with pytest.raises(WireError, match="protocol version 2, this side uses 1"):
        wire.decode(payload, wire.CoordState)


def test_one_kind_of_message_is_not_taken_for_another():
    with pytest.raises(WireError, match="not a CoordState"):
        wire.decode(wire.encode(wire.Presence(online=True, boot="b")), wire.CoordState)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_a_newer_device_tells_besides_is_skipped_and_what_asks_or_answers_is_refused(message):
    payload = wire.encode(message)
    fields = b',"of_a_later_version":{"a":[1]}' + payload[payload.index(b",", payload.index(b"crc")) :]
    if type(message) in wire.DEVICE_MESSAGES.values():
        assert wire.decode(seal(fields), type(message)) == message
    else:
        with pytest.raises(WireError, match="unknown field `of_a_later_version`"):
            wire.decode(seal(fields), type(message))


def test_an_update_without_layouts_does_not_name_them():
    """Those of a large network alone would exceed a message."""
    (update,) = (message for message in MESSAGES if isinstance(message, Update))
    assert b"layouts" not in wire.encode(update)
    told = msgspec.structs.replace(update, layouts={"model": {"w": "f4:2"}})
    assert wire.decode(wire.encode(told), Update).layouts == told.layouts


def test_a_message_too_large_is_refused_by_both_sides():
    """64 KiB for control messages; a manifest may fill a chunk."""
    state = wire.RoundState(job="j", method="m", round=0, rounds=1, phase="open", cohort=tuple(["d" * 60] * 1200))
    with pytest.raises(WireError, match="exceeds the 65536 allowed"):
        wire.encode(state)
    with pytest.raises(WireError, match="exceeds the 65536 allowed"):
        wire.decode(b"{" * 65537, wire.RoundState)
    manifest = wire.BlobManifest(sha256=SHA, size=1 << 20, chunk=1024, digests=SHA * 1024)
    assert wire.decode(wire.encode(manifest), wire.BlobManifest) == manifest
    with pytest.raises(WireError, match="exceeds the 262144 allowed"):
        wire.encode(wire.BlobManifest(sha256=SHA, size=1 << 30, chunk=1024, digests=SHA * 5000))


def test_text_that_is_not_unicode_is_refused_before_it_is_sent():
    with pytest.raises(WireError, match="not Unicode"):
        wire.encode(wire.MissingBlob(sha256=SHA, reason="\udcff"))


@pytest.mark.parametrize("sha256", [SHA + "\n", SHA[:-1], SHA.upper(), "../" + SHA])
def test_a_digest_is_64_hex_digits_and_nothing_more(sha256):
    body = json.dumps({"sha256": sha256, "chunk": 1024})[1:].encode()
    with pytest.raises(WireError):
        wire.decode(seal(b"," + body), wire.ChunkRequest)


@FUZZ
@given(st.sampled_from(KINDS), st.sampled_from(MESSAGES), st.data())
def test_mutated_messages_with_a_right_checksum_give_only_the_named_error(kind, message, data):
    """Valid fields, cut and spliced, so that the decoder behind the checksum is reached."""
    fields = wire.encode(message)[len(b'{"v":1,"crc":"00000000"') :]
    start = data.draw(st.integers(0, len(fields)))
    end = data.draw(st.integers(start, min(len(fields), start + 8)))
    only_named_errors(seal(fields[:start] + data.draw(st.binary(max_size=8)) + fields[end:]), kind)


def test_a_bottomless_message_gives_the_named_error():
    body = b',"params":' + b"[" * 60000
    with pytest.raises(WireError):
        wire.decode(seal(body), Task)


# -- topics --

TOPICS = wire.Topics("lab")
BUILT = [
    (TOPICS.coord, "coord", "", ""),
    (TOPICS.round_topic("digits-1"), "round", "", ""),
    (TOPICS.device_topic("tx2-1", "up", "presence"), "presence", "tx2-1", "up"),
    (TOPICS.device_topic("tx2-1", "dn", "task"), "task", "tx2-1", "dn"),
    (TOPICS.device_topic("tx2-1", "dn", "presence"), "presence", "tx2-1", "dn"),
    (TOPICS.device_topic("tx2-1", "dn", "blob/get"), "get", "tx2-1", "dn"),
    (TOPICS.blob_topic("tx2-1", "up", SHA, "manifest"), "manifest", "tx2-1", "up"),
    (TOPICS.blob_topic("tx2-1", "dn", SHA, "missing"), "missing", "tx2-1", "dn"),
    (TOPICS.chunk_topic("tx2-1", "dn", SHA, 12), "chunk", "tx2-1", "dn"),
]


@pytest.mark.parametrize(("topic", "leaf", "device", "direction"), BUILT)
def test_every_topic_that_is_built_is_understood(topic, leaf, device, direction):
    route = wire.parse_topic(topic)
    assert (route.subtopic, route.device, route.direction) == (leaf, device, direction)
    if leaf == "chunk":
        assert (route.sha256, route.index, route.message_type) == (SHA, 12, None)


@pytest.mark.parametrize(
    "topic",
    [
        "",
        "fq/2/lab/coord/state",
        "fq/1/lab\n/coord/state",
        "fq/1/lab/dev/tx2-1/dn/profile",
        "fq/1/lab/dev/tx2-1/up/task",
        "fq/1/lab/dev/TX2/up/claim",
        "fq/1/lab/dev/../up/claim",
        f"fq/1/lab/dev/tx2-1/up/blob/{SHA}/-1",
        f"fq/1/lab/dev/tx2-1/up/blob/{SHA}/٣",
        f"fq/1/lab/dev/tx2-1/up/blob/{SHA}/99999999",
        f"fq/1/lab/dev/tx2-1/up/blob/{SHA[:16]}/0",
    ],
)
def test_what_is_no_topic_of_ours_is_refused(topic):
    """Other versions, wrong directions, names that no device may have."""
    with pytest.raises(WireError, match="not a topic"):
        wire.parse_topic(topic)


@FUZZ
@given(st.sampled_from([topic for topic, *_ in BUILT]), st.text(max_size=30), st.data())
def test_arbitrary_and_mutated_topics_give_only_the_named_error(topic, text, data):
    place = data.draw(st.integers(0, len(topic)))
    for candidate in (text, topic[:place] + text + topic[place:], topic[:place] + text):
        with suppress(WireError):
            assert isinstance(wire.parse_topic(candidate), wire.Route)


def test_a_device_subscribes_to_its_own_branch_only():
    """What an access control list would allow it."""
    assert TOPICS.device_filters("tx2-1") == ("fq/1/lab/dev/tx2-1/dn/#", "fq/1/lab/coord/state")
