"""The embedded broker: closed to strangers, clean in its ends, and without amqtt's known faults."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from waiting import LIMIT_S

from fedquilt.core import JobError, LinkError
from fedquilt.tools import broker
from fedquilt.tools.broker import EmbeddedBroker, format_password_line
from fedquilt.transport.mqtt.broker import Broker

if TYPE_CHECKING:
    from tests.conftest import Stage


def test_a_broker_open_to_the_network_needs_a_password_file() -> None:
    for host in ("0.0.0.0", "192.168.1.5", "board.local"):
        with pytest.raises(JobError, match=f"broker on {host} would be open to the network: add --password-file"):
            EmbeddedBroker(host)
    EmbeddedBroker("127.0.0.5")
    EmbeddedBroker("localhost")


@pytest.mark.parametrize("text", ["", "me:plain-password\n", "me\n"])
def test_a_password_file_without_hashes_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "passwords"
    file.write_text(text)
    with pytest.raises(JobError, match=r"python -m fedquilt\.tools\.broker USER"):
        EmbeddedBroker(password_file=file)
    with pytest.raises(JobError, match="absent cannot be read"):
        EmbeddedBroker(password_file=tmp_path / "absent")


def test_only_the_right_password_gets_in(tmp_path: Path, stage: Stage) -> None:
    file, right, wrong = tmp_path / "passwords", tmp_path / "right", tmp_path / "wrong"
    file.write_text(format_password_line("me", "open sesame") + "\n")
    right.write_text("open sesame\n")
    wrong.write_text("open barley\n")
    with EmbeddedBroker(password_file=file) as broker:
        url = broker.url.replace("//", "//me@")
        stage.join(Broker.from_url(url, password_file=right), "right").wait_until_connected(LIMIT_S)
        with pytest.raises(LinkError, match=f"check the user and the password in {wrong}"):
            stage.join(Broker.from_url(url, password_file=wrong), "wrong").wait_until_connected(timeout_s=10.0)
        with pytest.raises(LinkError, match="a client without a user"):
            stage.join(broker.url, "nobody").wait_until_connected(timeout_s=10.0)


@pytest.mark.parametrize(("user", "password"), [("", "x"), ("a b", "x"), ("a:b", "x"), ("me", "")])
def test_a_user_or_password_that_no_file_could_hold_is_refused(user: str, password: str) -> None:
    with pytest.raises(JobError):
        format_password_line(user, password)


def test_a_port_in_use_is_said(embedded_broker: EmbeddedBroker) -> None:
    with pytest.raises(LinkError, match=rf"cannot listen on 127\.0\.0\.1:{embedded_broker.port} .*choose another port"):
        EmbeddedBroker(port=embedded_broker.port).start()


def test_a_broker_that_does_not_begin_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "START_S", 0.05)
    monkeypatch.setattr(EmbeddedBroker, "_run_event_loop", lambda self, make, ready, failures: None)
    with pytest.raises(LinkError, match=r"did not start within 0\.05 s: run the command again"):
        EmbeddedBroker().start()


def test_it_stops_with_clients_connected_and_starts_again(stage: Stage) -> None:
    broker = EmbeddedBroker().start()
    link = stage.join(broker.url, "agent")
    stage.until(lambda: link.connected)
    broker.stop()
    broker.stop()
    stage.until(lambda: not link.connected)
    with broker:
        stage.until(lambda: link.connected)
        assert link.session == 2


def test_thirty_newcomers_at_once_each_hear_their_own_retained_message(
    embedded_broker: EmbeddedBroker, stage: Stage
) -> None:
    first = stage.join(embedded_broker.url, "first")
    for n in range(30):
        first.publish(f"dev/{n}/task", b"%d" % n, retain=True)
    stage.until(lambda: first.connected and not first.backlog)
    for n in range(30):
        stage.join(embedded_broker.url, f"dev-{n}", f"dev/{n}/#")
    stage.until(lambda: all(stage.heard[f"dev-{n}"] for n in range(30)))
    assert all(set(stage.payloads(f"dev-{n}")) == {b"%d" % n} for n in range(30))


def test_the_command_listens_until_it_is_terminated(stage: Stage) -> None:
    command = [sys.executable, "-m", "fedquilt.cli", "broker", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[2]
        link = stage.join(url, "agent", "t")
        link.publish("t", b"hello")
        stage.until(lambda: stage.heard["agent"])
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
        assert (process.returncode, errors) == (0, "")
