"""The link over real brokers: what is promised holds, and every refusal is one clear sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from fedquilt.core import LinkError
from fedquilt.transport.link import Message
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.client import payload_limit
from fedquilt.transport.mqtt.connection import RetryDelay
from fedquilt.transport.mqtt.link import MqttLink

if TYPE_CHECKING:
    from tests.conftest import Stage


KIB = 1024
DIES = """
import sys
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.link import MqttLink
link = MqttLink(Broker.from_url(sys.argv[1]), "doomed", ("presence/doomed", b"lost"))
link.wait_until_connected(10)
link.publish("presence/doomed", b"here", retain=True)
while link.backlog:
    link.wait(1)
print("ready", flush=True)
link.wait(60)
"""


def test_messages_go_round_reliably_and_unreliably_and_retained_ones_stay(url, stage):
    first = stage.join(url, "first", "room/#")
    stage.until(lambda: first.connected)
    first.publish("room/a", b"reliable", retain=True)
    first.publish("room/b", b"unreliable", reliable=False)
    first.publish("elsewhere", b"not asked for")
    assert first.backlog == len(b"reliable" + b"unreliable" + b"not asked for")
    stage.until(lambda: len(stage.heard["first"]) == 2)
    assert stage.heard["first"] == [Message("room/a", b"reliable"), Message("room/b", b"unreliable")]
    stage.join(url, "second", "room/#")
    stage.until(lambda: stage.heard["second"])
    assert stage.heard["second"] == [Message("room/a", b"reliable", True)]
    stage.until(lambda: first.backlog == 0)


def test_the_last_will_tells_that_a_client_was_lost_and_a_goodbye_does_not(url, stage):
    watch = stage.join(url, "watch", "presence/+")
    polite = stage.join(url, "polite", will=("presence/polite", b"lost"))
    stage.until(lambda: watch.connected and polite.connected)
    with subprocess.Popen([sys.executable, "-c", DIES, url], stdout=subprocess.PIPE) as doomed:
        assert doomed.stdout.readline() == b"ready\n"
        polite.publish("presence/polite", b"leaving")
        stage.links.remove(polite)
        polite.close()
        os.kill(doomed.pid, signal.SIGKILL)
    stage.until(lambda: len(stage.heard["watch"]) == 3)
    assert sorted(stage.payloads("watch")) == [b"here", b"leaving", b"lost"]
    stage.join(url, "later", "presence/+")
    stage.until(lambda: stage.heard["later"])
    assert stage.heard["later"] == [Message("presence/doomed", b"lost", True)]


def test_a_goodbye_in_the_middle_of_a_flood_leaves_no_will(mosquitto, stage):
    url = mosquitto().url
    feed = stage.join(url, "feed", "will/+", "end")
    for n in range(10):
        leaving = stage.join(url, f"leaving-{n}", "flood", will=(f"will/{n}", b"lost"))
        stage.until(lambda link=leaving: feed.connected and link.connected)
        for _ in range(100):
            feed.publish("flood", bytes(60_000), reliable=False)
        stage.until(lambda name=f"leaving-{n}": stage.heard[name])
        stage.links.remove(leaving)
        leaving.close()
    feed.publish("end", b"end")
    stage.until(lambda: b"end" in stage.payloads("feed"))
    assert stage.payloads("feed") == [b"end"]


def test_a_client_that_computes_for_long_is_kept_only_if_it_is_tended(mosquitto, stage):
    broker = Broker.from_url(mosquitto().url)
    watch = stage.join(broker, "watch", "will/+")
    short = dataclasses.replace(broker, keepalive_s=1)
    tended, left = (stage.join(short, name, will=(f"will/{name}", name.encode())) for name in ("tended", "left"))
    stage.until(lambda: watch.connected and tended.connected and left.connected)
    stage.links = [watch]  # nobody drives the two any more
    with tended.keep_alive():
        stage.until(lambda: b"left" in stage.payloads("watch"))
    stage.links = [watch, tended, left]
    watch.publish("will/end", b"end")
    stage.until(lambda: b"end" in stage.payloads("watch"))
    assert stage.payloads("watch") == [b"left", b"end"]
    stage.until(lambda: tended.connected and left.connected)
    assert (tended.session, left.session) == (1, 2)


def test_after_a_broker_restart_subscriptions_and_queued_messages_are_there_again(mosquitto, stage):
    broker = mosquitto()
    link = stage.join(broker.url, "agent", "room/#")
    stage.until(lambda: link.connected)
    assert link.session == 1
    broker.kill()
    stage.until(lambda: not link.connected)
    assert link.problem is not None
    assert "closed the connection" in link.problem
    link.publish("room/a", b"kept")
    link.publish("room/b", b"best effort", reliable=False)
    assert link.backlog == len(b"kept")
    broker.restart()
    stage.until(lambda: stage.heard["agent"])
    assert (link.session, link.problem, link.dropped) == (2, None, 0)
    link.publish("room/c", b"last")
    stage.until(lambda: len(stage.heard["agent"]) == 2)
    assert stage.payloads("agent") == [b"kept", b"last"]


def test_reliable_messages_under_way_when_the_broker_dies_arrive_in_order(mosquitto, stage):
    broker = mosquitto("max_queued_messages 0")
    sender = stage.join(broker.url, "sender")
    reader = stage.join(broker.url, "reader", "n/+")
    stage.until(lambda: sender.connected and reader.connected)
    for n in range(100):
        sender.publish(f"n/{n}", b"%d" % n)
    sender.wait(0.0)  # some are under way now
    broker.kill()
    stage.until(lambda: not sender.connected and not reader.connected)
    broker.restart()
    stage.until(lambda: reader.connected)
    stage.until(lambda: sender.backlog == 0 and b"99" in stage.payloads("reader"))
    numbers = list(dict.fromkeys(int(payload) for payload in stage.payloads("reader")))
    assert numbers[numbers.index(99) :] == [99]
    assert numbers == sorted(numbers)
    assert sender.dropped == 0


def test_an_absent_broker_makes_no_caller_wait_longer_than_asked():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for scheme in ("mqtt", "mqtts"):
            link = MqttLink(Broker.from_url(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"), "patient")
            began_s = time.monotonic()
            link.wait(0.05)
            link.wait(0.05)
            assert time.monotonic() - began_s < 1.0
            assert not link.connected
            link.close()


def eventually(stage: Stage, call: Callable[[], Any]) -> Any:
    results: list[Any] = []

    def tried() -> bool:
        with contextlib.suppress(BlockingIOError):
            results.append(call())
        return bool(results)

    stage.until(tried)
    return results[0]


def test_a_broker_that_hangs_up_at_mqtt_5_is_asked_in_3_1_1(stage):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        link = stage.join(f"mqtt://127.0.0.1:{listener.getsockname()[1]}", "agent")
        for level in (5, 4):
            with eventually(stage, listener.accept)[0] as connection:
                connection.setblocking(False)
                packet = eventually(stage, lambda to=connection: to.recv(1000))
                assert packet[packet.index(b"MQTT") + 4] == level
                if level == 4:
                    connection.sendall(b"\x20\x02\x00\x00")
                    stage.until(lambda: link.connected)


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "check that it is an MQTT port"),
        (b"\x20\x03\x00\x00\x00" + b"\x32\x02\xff\xff", "closed the connection"),  # a topic longer than its packet
        (b"\x20\x03\x00\x00\x00" + b"\x30\xff\xff\xff\xff\xff", "closed the connection"),  # a length of five bytes
        (b"\x20\x03\x00\x00\x00" + b"\x30\xff\xff\xff\x7f", "a packet of 268435455 bytes"),  # it is not waited for
        (b"\x20\x02\x00", "check that it is an MQTT port"),
    ],
)
def test_bytes_that_are_not_mqtt_cost_the_connection_and_nothing_else(stage, sent, says):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        link = stage.join(f"mqtt://127.0.0.1:{listener.getsockname()[1]}", "agent")
        with eventually(stage, listener.accept)[0] as connection:
            connection.setblocking(False)
            eventually(stage, lambda: connection.recv(1000))
            connection.sendall(sent)
        stage.until(lambda: link.problem is not None)
        assert says in str(link.problem) or "sent bytes that are not MQTT" in str(link.problem)


def test_two_clients_of_one_name_are_told_so(mosquitto, stage):
    url = mosquitto().url
    first = stage.join(url, "twin")
    stage.until(lambda: first.connected)
    stage.join(url, "twin")
    stage.until(lambda: "as if another client used the id 'twin'" in str(first.problem))


def test_what_waits_for_a_connection_is_bounded_and_the_oldest_go_first(caplog):
    link = MqttLink(Broker.from_url("mqtt://127.0.0.1:1"), "offline")
    for _ in range(200):
        link.publish("t", bytes(100_000))
    assert (link.dropped, link.backlog) == (33, 167 * 100_000)
    assert "oldest messages are dropped" in str(link.problem)
    assert len(caplog.records) == 1


def test_payloads_are_limited_by_what_the_broker_announces(mosquitto, stage):
    link = stage.join(mosquitto("max_packet_size 131072").url, "agent", "t")
    stage.until(lambda: link.connected)
    assert link.max_payload == 127 * KIB
    with pytest.raises(LinkError, match="130049 bytes to t exceeds the limit of 130048"):
        link.publish("t", bytes(127 * KIB + 1))
    link.publish("t", bytes(127 * KIB))
    stage.until(lambda: stage.heard["agent"])
    assert stage.payloads("agent") == [bytes(127 * KIB)]


def test_what_makes_a_broker_hang_up_is_dropped_and_what_is_behind_it_arrives(mosquitto, stage):
    link = stage.join(mosquitto("message_size_limit 200000").url, "agent", "t")
    stage.until(lambda: link.connected)
    link.publish("t", b"before")
    link.publish("t", bytes(256 * KIB))
    link.publish("t", b"behind")
    stage.until(lambda: link.dropped and not link.backlog and b"behind" in stage.payloads("agent"))
    assert (link.dropped, link.max_payload, link.backlog) == (1, 128 * KIB, 0)
    assert "refused a message of 262144 bytes to t, which is dropped" in str(link.problem)


def test_limits_by_protocol_announcement_and_setting():
    assert payload_limit(5, 128 * KIB) == 127 * KIB
    assert payload_limit(5, None) == 1024 * KIB
    assert payload_limit(4, None) == 121 * KIB
    assert payload_limit(5, 100) == 0


@pytest.mark.parametrize("away_s", [0.2, 1.0, 5.0, 20.0])
@pytest.mark.parametrize("quick", range(16))
def test_a_client_is_back_before_the_broker_was_away_twice_as_long(quick, away_s):
    tries = iter(range(1000))
    retry, now_s = RetryDelay(lambda: 0.999 if next(tries) < quick else 0.0), 0.0
    retry.record_connection(-60.0)
    now_s += retry.record_failure(True, now_s)
    while now_s < away_s:
        now_s += retry.record_failure(False, now_s)
    assert now_s <= 2 * away_s + 0.1


def test_wait_ends_for_a_ready_descriptor_a_message_and_a_drained_backlog(mosquitto, stage):
    link = stage.join(mosquitto().url, "agent", "t")
    stage.until(lambda: link.connected)
    began_s = time.monotonic()
    reading, writing = os.pipe()
    try:
        os.write(writing, b"x")
        link.wait(30.0, [reading])
    finally:
        os.close(reading)
        os.close(writing)
    link.publish("elsewhere", b"x")
    link.wait(30.0)
    assert link.backlog == 0
    link.publish("t", b"x")
    while not link.receive():
        link.wait(30.0)
    link.wait(0.0)
    assert time.monotonic() - began_s < 10.0
