"""The client that handles messages beside paho: what it rests on in paho, and what it tells paho's keep-alive."""

from __future__ import annotations

import ast
import inspect
import socket

import paho.mqtt
import paho.mqtt.client as paho
import pytest

from fedquilt.transport import mqtt_client, packets
from fedquilt.transport.mqtt_client import Client

REPLACED = ("_create_socket", "_packet_queue", "loop_read", "loop_write", "want_write")
CLOCKS = {"_last_bytes_received", "_last_msg_in"}  # one of both, by version


def private_names() -> set[str]:
    """Names of itself that the client uses, and has from paho."""
    tree = ast.parse(inspect.getsource(mqtt_client))
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Client")
    begin = next(node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    methods = {node.name for node in found.body if isinstance(node, ast.FunctionDef)}

    def of_self(top: ast.AST, stored: bool) -> set[str]:
        nodes = [node for node in ast.walk(top) if isinstance(node, ast.Attribute) and node.attr.startswith("_")]
        mine = [node for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "self"]
        return {node.attr for node in mine if not stored or isinstance(node.ctx, ast.Store)}

    return of_self(found, stored=False) - of_self(begin, stored=True) - methods


def test_what_the_client_rests_on_is_in_this_version_of_paho() -> None:
    """Private names of another package: one that is gone is named here, and not by a connection that never comes."""
    there = set(dir(paho.Client(paho.CallbackAPIVersion.VERSION2)))
    used = private_names()
    assert used >= {"_in_packet", "_packet_handle", "_sock", *CLOCKS}  # the search finds something
    missing = ({*used, *REPLACED} - there) - CLOCKS
    assert not missing, f"paho {paho.mqtt.__version__} has no {', '.join(sorted(missing))}"
    assert there & CLOCKS, f"paho {paho.mqtt.__version__} notes by another name when bytes came last"


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_busy_connection_is_alive_without_a_ping(way: str) -> None:
    """What this client reads and writes past paho counts for paho's keep-alive."""
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        client = Client(here, 4, "busy")
        client._sock, client._last_msg_out, client._last_msg_in = here, 0.0, 0.0
        if way == "out":
            client.send("t", b"payload", 0, False)
            client.loop_write()
            assert client._last_msg_out > 0
        else:
            there.sendall(packets.publish(4, 1, "t", b"payload", 0, False))
            client.loop_read()
            assert client._last_msg_in > 0
            assert client._last_bytes_received == client._last_msg_in
