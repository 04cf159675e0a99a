"""Brokers, ports and certificates that do not fit are named with the mend."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from waiting import LIMIT_S, wait_until

from fedquilt.core import LinkError
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.link import MqttLink

if TYPE_CHECKING:
    from tests.conftest import Authority, Mosquitto, Stage


@pytest.fixture
def secured(mosquitto: Callable[..., Mosquitto], authority: Authority, tmp_path: Path) -> Mosquitto:
    cert, key = authority.issue("broker", "127.0.0.1")
    (tmp_path / "acl").write_text(
        "user coordinator\ntopic readwrite fq/#\n"
        "pattern write fq/1/+/dev/%u/up/#\npattern read fq/1/+/dev/%u/dn/#\n"
        "pattern read fq/1/+/coord/state\npattern read fq/1/+/job/#\n"
    )
    return mosquitto(
        f"cafile {authority.ca}",
        f"certfile {cert}",
        f"keyfile {key}",
        "require_certificate true",
        "use_identity_as_username true",
        "allow_anonymous false",
        f"acl_file {tmp_path / 'acl'}",
    )


def test_a_device_reaches_its_own_branch_only(secured, authority, stage):
    secure_url = secured.url.replace("mqtt:", "mqtts:")

    def settings(name):
        cert, key = authority.issue(name)
        return Broker.from_url(secure_url, ca=authority.ca, cert=cert, key=key)

    coordinator = stage.join(settings("coordinator"), "coordinator", "fq/1/f/dev/+/up/#")
    stage.join(settings("dev-a"), "dev-a", "fq/1/f/dev/dev-a/dn/#", "fq/1/f/dev/dev-b/dn/#", "fq/1/f/coord/state")
    stage.until(lambda: all(link.connected for link in stage.links))
    device = stage.links[1]
    device.publish("fq/1/f/dev/dev-b/up/claim", b"forged")
    device.publish("fq/1/f/coord/state", b"forged")
    device.publish("fq/1/f/dev/dev-a/up/claim", b"own")
    stage.until(lambda: stage.heard["coordinator"])
    coordinator.publish("fq/1/f/dev/dev-b/dn/task", b"for b")
    coordinator.publish("fq/1/f/coord/state", b"state")
    coordinator.publish("fq/1/f/dev/dev-a/dn/task", b"for a")
    stage.until(lambda: b"for a" in stage.payloads("dev-a"))
    assert stage.payloads("coordinator") == [b"own"]
    assert stage.payloads("dev-a") == [b"state", b"for a"]
    assert device.dropped == 2
    assert "Not authorized" in str(device.problem)


def refusal(settings: Broker, stage: Stage, name: str = "agent") -> str:
    link = stage.join(settings, name)
    with pytest.raises(LinkError) as caught:
        link.wait_until_connected(timeout_s=LIMIT_S)
    assert str(caught.value) == link.problem
    assert "\n" not in str(caught.value)
    return str(caught.value)


def told_in_vain(broker: Broker) -> str:
    link = MqttLink(broker, "agent")

    def told() -> str:
        with pytest.raises(LinkError) as caught:
            link.wait_until_connected(timeout_s=0.2)
        said = str(caught.value)
        return "" if said == f"no answer from {broker} within 0.2 s" else said

    try:
        return wait_until(told, "a reason")
    finally:
        link.close()


def test_tls_refusals_name_the_certificate_and_the_mend(secured, authority, stranger, stage):
    url = secured.url.replace("mqtt:", "mqtts:")
    cert, key = authority.issue("dev-a")
    odd, odd_key = stranger.issue("dev-a")
    assert f"is not signed by {stranger.ca}" in refusal(Broker.from_url(url, ca=stranger.ca), stage)
    assert "is not signed by an authority of this system" in refusal(Broker.from_url(url), stage)
    assert "set cert and key" in refusal(Broker.from_url(url, ca=authority.ca), stage)
    said = refusal(Broker.from_url(url, ca=authority.ca, cert=odd, key=odd_key), stage)
    assert "signed by the broker's CA" in said or "has expired or was revoked" in said
    by_name = Broker.from_url(url.replace("127.0.0.1", "localhost"), ca=authority.ca, cert=cert, key=key)
    assert "is for another name" in refusal(by_name, stage)
    assert "or try mqtts://" in told_in_vain(Broker.from_url(secured.url))


def test_a_wrong_password_is_said_and_never_shown(mosquitto, stage, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    passwords = tmp_path / "passwords"
    passwords.write_text("me:s3cret-right\n")
    subprocess.run(["mosquitto_passwd", "-U", str(passwords)], check=True)
    url = mosquitto("allow_anonymous false", f"password_file {passwords}").url
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("s3cret-right\n")
    wrong.write_text("s3cret-wrong\n")
    good = stage.join(Broker.from_url(url.replace("//", "//me@"), password_file=right), "good")
    stage.until(lambda: good.connected)
    said = refusal(Broker.from_url(url.replace("//", "//me@"), password_file=wrong), stage, "wrong")
    assert f"check the user and the password in {wrong}" in said
    assert "a client without a user" in refusal(Broker.from_url(url), stage, "nobody")
    assert "s3cret" not in caplog.text + said + repr(good.broker)
