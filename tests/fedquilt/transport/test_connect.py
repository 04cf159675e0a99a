"""Broker settings: what is typed is checked at once, and no secret is ever shown."""

import select
import socket

import pytest

from fedquilt.core import JobError
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.connection import BrokerError, dial


def test_a_url_gives_host_port_user_and_encryption():
    assert Broker.from_url("mqtt://broker.local") == Broker("broker.local", 1883)
    assert Broker.from_url("mqtts://broker.local") == Broker("broker.local", 8883, tls=True)
    assert Broker.from_url("mqtt://dev%2D1@[::1]:1999/") == Broker("::1", 1999, user="dev-1")
    assert str(Broker.from_url("mqtt://dev@[::1]:1999")) == "mqtt://[::1]:1999"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("broker.local:1883", "is invalid: write mqtt"),
        ("http://broker.local", "is invalid: write mqtt"),
        ("mqtt://", "is invalid: write mqtt"),
        ("mqtt://host:0", "is invalid: write mqtt"),
        ("mqtt://host:port", "port"),
        ("mqtt://host:70000", "port"),
        ("mqtt://[::1", "IPv6"),
        ("mqtt://host/topic", "has text after the port"),
        ("mqtt://host?x=1", "has text after the port"),
    ],
)
def test_a_url_that_names_no_broker_is_refused_with_the_form_it_must_have(url, says):
    with pytest.raises(JobError, match=says) as caught:
        Broker.from_url(url)
    assert "mqtt[s]://[user@]host[:port]" in str(caught.value)


@pytest.mark.parametrize("url", ["mqtt://me:hunter2@host", "http://me:hunter2@host", "mqtt://me:hunter2@host:x"])
def test_a_password_in_a_url_is_refused_and_not_repeated(url):
    with pytest.raises(JobError, match=r"\*\*\*") as caught:
        Broker.from_url(url)
    assert "hunter2" not in str(caught.value)


def test_the_password_is_read_from_its_file_and_never_shown(tmp_path):
    file = tmp_path / "password"
    file.write_text("hunter2\nsecond line\n")
    broker = Broker.from_url("mqtt://me@host", password_file=file)
    assert broker.read_password() == "hunter2"
    assert "hunter2" not in repr(broker) + str(broker)
    file.write_text("renewed")
    assert broker.read_password() == "renewed"


@pytest.mark.parametrize(
    ("url", "files", "says"),
    [
        ("mqtts://host", {"ca": "absent"}, "absent cannot be read"),
        ("mqtts://host", {"ca": "text"}, "contains no certificate in PEM"),
        ("mqtts://host", {"cert": "text"}, "give both cert and key"),
        ("mqtts://host", {"cert": "text", "key": "text"}, "use PEM files of one pair"),
        ("mqtts://host", {"cert": "text", "key": "absent"}, "key file .*absent cannot be read"),
        ("mqtt://host", {"ca": "text"}, "write mqtts://"),
        ("mqtt://host", {"password_file": "text"}, "has no user"),
        ("mqtt://me@host", {"password_file": "absent"}, "cannot be read"),
        ("mqtt://me@host", {"password_file": "empty"}, "is empty"),
    ],
)
def test_files_that_cannot_be_used_are_refused_before_anything_is_dialled(tmp_path, url, files, says):
    (tmp_path / "text").write_text("just text\n")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(JobError, match=says):
        Broker.from_url(url, **{name: tmp_path / file for name, file in files.items()})


def test_a_key_that_is_not_the_certificates_is_refused(authority):
    (cert, _), (_, key) = authority.issue("one"), authority.issue("two")
    with pytest.raises(JobError, match="of one pair"):
        Broker.from_url("mqtts://host", cert=cert, key=key)


def test_a_keepalive_out_of_range_is_refused():
    with pytest.raises(JobError, match="is not from 5 to 65535"):
        Broker.from_url("mqtt://host", keepalive_s=1)


def test_a_dial_that_gets_no_answer_waits_without_blocking_and_ends_by_the_callers_clock():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialling = dial(Broker("127.0.0.1", listener.getsockname()[1], tls=True))
        waiting = next(dialling)
        while waiting.events == select.POLLOUT:  # TCP
            waiting = next(dialling)
        assert waiting.events == select.POLLIN  # for the handshake
        with pytest.raises(BrokerError, match=r"no answer from mqtts://127\.0\.0\.1"):
            dialling.throw(TimeoutError())
        assert waiting.socket.fileno() == -1, "its socket is closed"


def test_a_dial_that_is_given_up_closes_its_socket():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialling = dial(Broker("127.0.0.1", listener.getsockname()[1], tls=True))
        waiting = next(dialling)
        dialling.close()
        assert waiting.socket.fileno() == -1
