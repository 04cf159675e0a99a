"""The client that handles messages beside paho: what it rests on in paho, and what it tells paho's keep-alive."""

import ast
import inspect
import socket
import threading

import paho.mqtt
import paho.mqtt.client as paho
import pytest

from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.client import MqttClient, publish_packet
from fedquilt.transport.mqtt.link import MqttLink

REPLACED = ("_create_socket", "_packet_queue", "loop_read", "loop_write", "want_write")
CLOCKS = {"_last_bytes_received", "_last_msg_in"}  # one of both, by version


def private_names() -> set[str]:
    tree = ast.parse(inspect.getsource(inspect.getmodule(MqttClient)))
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "MqttClient")
    begin = next(node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    methods = {node.name for node in found.body if isinstance(node, ast.FunctionDef)}

    def of_self(top: ast.AST, stored: bool) -> set[str]:
        nodes = [node for node in ast.walk(top) if isinstance(node, ast.Attribute) and node.attr.startswith("_")]
        mine = [node for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "self"]
        return {node.attr for node in mine if not stored or isinstance(node.ctx, ast.Store)}

    return of_self(found, stored=False) - of_self(begin, stored=True) - methods


def test_what_the_client_rests_on_is_in_this_version_of_paho():
    there = set(dir(paho.Client(paho.CallbackAPIVersion.VERSION2)))
    used = private_names()
    assert used >= {"_in_packet", "_packet_handle", "_sock", *CLOCKS}  # the search finds something
    missing = ({*used, *REPLACED} - there) - CLOCKS
    assert not missing, f"paho {paho.mqtt.__version__} has no {', '.join(sorted(missing))}"
    assert there & CLOCKS, f"paho {paho.mqtt.__version__} notes by another name when bytes came last"


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_busy_connection_is_alive_without_a_ping(way):
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        client = MqttClient(here, 4, "busy")
        client._sock, client._last_msg_out, client._last_msg_in = here, 0.0, 0.0
        if way == "out":
            client.queue_message("t", b"payload", 0, False)
            client.loop_write()
            assert client._last_msg_out > 0
        else:
            there.sendall(publish_packet(4, 1, "t", b"payload", 0, False))
            client.loop_read()
            assert client._last_msg_in > 0
            assert client._last_bytes_received == client._last_msg_in


def test_a_broker_that_takes_no_byte_is_lost_by_the_keep_alive():
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        client = MqttClient(here, 4, "stuck")
        client._sock = here
        client.queue_message("t", bytes(8 << 20), 0, False)
        assert client.loop_write() == 0
        assert client._blocked_s is not None
        client._blocked_s -= 1.4 * client.keepalive
        assert client.loop_write() == 0
        there.recv(1 << 20)
        assert client.loop_write() == 0
        assert not client.is_unread
        client._blocked_s -= 1.4 * client.keepalive
        assert client.loop_write() == 0
        client._blocked_s -= 0.2 * client.keepalive
        assert client.loop_write() == paho.MQTT_ERR_KEEPALIVE
        assert client.is_unread
        assert client.socket() is None


def test_a_link_whose_session_is_taken_over_names_the_other_client():
    """DISCONNECT with reason code 142, as brokers of MQTT 5 send."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = MqttLink(Broker.from_url(f"mqtt://127.0.0.1:{server.getsockname()[1]}"), "a")

        def welcome_and_end():
            with server.accept()[0] as client:
                client.recv(4096)
                client.sendall(b"\x20\x03\x00\x00\x00" + b"\xe0\x02\x8e\x00")

        broker = threading.Thread(target=welcome_and_end)
        broker.start()
        while link.problem is None:
            link.wait(0.1)
        broker.join()
        assert link.problem.startswith(f"another client uses the id 'a' at {link.broker}: give each agent its own")
        link.close()


def test_a_link_to_a_broker_that_sends_and_does_not_read_is_lost_and_says_so():
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = MqttLink(Broker.from_url(f"mqtt://127.0.0.1:{server.getsockname()[1]}"), "a")
        taken = []

        def welcome():
            taken.append(server.accept()[0])
            taken[0].recv(4096)
            taken[0].sendall(b"\x20\x03\x00\x00\x00")

        broker = threading.Thread(target=welcome)
        broker.start()
        link.wait_until_connected(60.0)
        broker.join()
        with taken[0]:
            link.subscribe(["t"])
            for _ in range(16):
                link.publish("a", bytes(1 << 19), reliable=False)
            while link._client is not None and link._client._blocked_s is None:
                link.wait(0.1)
            assert link._client._blocked_s is not None
            taken[0].sendall(publish_packet(5, 1, "t", b"payload", 0, False))
            link.wait(60.0)
            assert [message.payload for message in link.receive()] == [b"payload"]
            assert link.connected
            link._client._blocked_s -= 2 * link.broker.keepalive_s
            link.wait(0.0)
            assert not link.connected
            assert link.problem == f"{link.broker} has stopped reading: check the network, and the broker's load"
        link.close()
