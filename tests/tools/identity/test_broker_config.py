"""The configuration that is written, on a real Mosquitto: who is let in, and how far they reach."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from certified import Certified
from waiting import LIMIT_S

from fedquilt.core import JobError, LinkError
from fedquilt.tools.identity import broker_config
from fedquilt.tools.identity.authority import DAY_S, CertificateAuthority, clock_s
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.link import MqttLink


class Site(Certified):
    def __init__(self, folder: Path, start: Callable[..., Any]) -> None:
        super().__init__(folder)
        self.out = folder / "etc"
        self.authority.issue_with_new_key(
            "tower", "observer", clock_s()
        )  # the rules name it, whatever certificate it has then
        self.mosquitto = start(*self.configure_broker(self.out))
        self.url = self.mosquitto.url.replace("mqtt://", "mqtts://")

    def broker(self, name: str, kind: Any = "device", *, days_ago: float = 0.0, url: str | None = None) -> Broker:
        return super().broker(name, kind, url=url or self.url, days_ago=days_ago)


@pytest.fixture
def site(tmp_path: Path, mosquitto: Callable[..., Any]) -> Site:
    return Site(tmp_path, mosquitto)


def refusal(broker: Broker, stage: Any) -> str:
    for _ in range(20):
        link = stage.join(broker, "client")
        with pytest.raises(LinkError) as caught:
            link.wait_until_connected(timeout_s=5.0)
        if "closed the connection without an answer" not in str(caught.value):
            break
        assert f"whether {broker.cert} has expired or was revoked" in str(caught.value)
    return str(caught.value)


def test_a_device_reaches_its_own_branch_and_the_coordinator_the_fleets(site: Site, stage: Any) -> None:
    root = "fq/1/fleet"
    coordinator = stage.join(site.broker("coordinator", kind="coordinator"), "coordinator", f"{root}/dev/+/up/#")
    one = stage.join(site.broker("dev-a"), "one", f"{root}/dev/dev-a/dn/#", f"{root}/coord/state")
    spy = stage.join(site.broker("dev-b"), "spy", f"{root}/dev/dev-a/dn/#", f"{root}/dev/dev-a/up/#", "#")
    stage.until(lambda: coordinator.connected and one.connected and spy.connected)
    coordinator.publish(f"{root}/coord/state", b"state", retain=True)
    coordinator.publish(f"{root}/dev/dev-a/dn/task", b"task")
    one.publish(f"{root}/dev/dev-a/up/claim", b"claim")
    stage.until(lambda: stage.payloads("coordinator") == [b"claim"])
    stage.until(lambda: sorted(stage.payloads("one")) == [b"state", b"task"])
    for topic in (
        f"{root}/dev/dev-a/up/claim",
        f"{root}/dev/dev-b/dn/task",
        f"{root}/coord/state",
        f"{root}/job/j/round",
        "fq/1/other/dev/dev-b/up/claim",
    ):
        before = spy.dropped
        spy.publish(topic, b"forged")
        stage.until(lambda before=before: spy.dropped > before)
        assert f"refuses messages to {topic}" in spy.problem
        assert "permit this client's certificate or user" in spy.problem
    spy.publish(f"{root}/dev/dev-b/up/claim", b"own")
    stage.until(lambda: stage.payloads("coordinator") == [b"claim", b"own"])
    assert stage.payloads("spy") == [b"state"]
    assert sorted(stage.payloads("one")) == [b"state", b"task"]


def test_an_observer_reads_what_is_said_but_no_blob_and_writes_nothing(site: Site, stage: Any) -> None:
    root = "fq/1/fleet"
    coordinator = stage.join(site.broker("coordinator", kind="coordinator"), "coordinator", f"{root}/dev/+/up/#")
    board = stage.join(site.broker("dev-a"), "board", f"{root}/dev/dev-a/dn/#")
    tower = stage.join(site.broker("tower", kind="observer"), "tower", f"{root}/#")
    stage.until(lambda: coordinator.connected and board.connected and tower.connected)
    board.publish(f"{root}/dev/dev-a/up/blob/{'0' * 64}/0", b"a part of a model")
    board.publish(f"{root}/dev/dev-a/up/claim", b"claim")
    coordinator.publish(f"{root}/dev/dev-a/dn/task", b"task")
    coordinator.publish(f"{root}/job/j/round", b"round")
    coordinator.publish(f"{root}/coord/state", b"state", retain=True)
    stage.until(lambda: len(stage.payloads("tower")) >= 4 and len(stage.payloads("coordinator")) == 2)
    assert sorted(stage.payloads("tower")) == [b"claim", b"round", b"state", b"task"]
    for topic in ("dev/tower/up/claim", "dev/dev-a/up/claim", "dev/dev-a/dn/task", "coord/state", "job/j/round"):
        before = tower.dropped
        tower.publish(f"{root}/{topic}", b"forged")
        stage.until(lambda before=before: tower.dropped > before)
        assert f"refuses messages to {root}/{topic}" in tower.problem
    assert (coordinator.session, coordinator.connected) == (1, True)
    assert stage.payloads("coordinator") == [b"a part of a model", b"claim"]
    site.authority.revoke_name("tower", clock_s())
    site.configure_broker(site.out)
    assert "tower" not in (site.out / "acl").read_text()


def test_who_has_no_certificate_or_one_that_is_not_good_stays_out_and_is_told_why(
    site: Site, stage: Any, stranger: Any
) -> None:
    none = Broker.from_url(site.url, ca=site.authority.folder / "ca.crt")
    assert "requires a client certificate" in refusal(none, stage)
    expired = refusal(site.broker("dev-a", days_ago=400), stage)
    assert "dev-a.crt" in expired
    assert "certificate expired" in expired
    assert "renew it" in expired
    assert "server.crt" in refusal(site.broker("server", kind="server"), stage)
    cert, key = stranger.issue("dev-c")
    strange = Broker.from_url(site.url, ca=site.authority.folder / "ca.crt", cert=cert, key=key)
    assert "signed by the broker's CA" in refusal(strange, stage)


def test_a_revoked_device_is_refused_once_the_broker_has_the_list(site: Site, stage: Any) -> None:
    lost, kept = site.broker("dev-a"), site.broker("dev-b")
    first: MqttLink = stage.join(lost, "first")
    first.wait_until_connected(LIMIT_S)
    site.authority.revoke_name("dev-a", clock_s())
    shutil.copy(site.authority.folder / "crl.pem", site.out / "crl.pem")
    site.mosquitto.reload()
    first.close()
    said = refusal(lost, stage)
    assert "certificate revoked" in said
    assert "to use this device again" in said
    site.mosquitto.kill()
    site.mosquitto.restart()
    assert "certificate revoked" in refusal(lost, stage)
    stage.join(kept, "kept").wait_until_connected(LIMIT_S)


def test_a_device_cannot_take_over_anothers_session_by_its_client_id(site: Site, stage: Any) -> None:
    mine = stage.join(site.broker("dev-a"), "fedquilt-fleet-dev-a")
    mine.wait_until_connected(LIMIT_S)
    thief = stage.join(site.broker("dev-b"), "fedquilt-fleet-dev-a")
    thief.wait_until_connected(LIMIT_S)
    before = mine.session
    mine.publish("fq/1/fleet/dev/dev-a/up/claim", b"still here")
    stage.until(lambda: mine.backlog == 0)
    assert (mine.connected, mine.session, mine.problem) == (True, before, None)


def test_the_broker_announces_its_packet_limit(site: Site, stage: Any) -> None:
    link = stage.join(site.broker("dev-a"), "one")
    link.wait_until_connected(LIMIT_S)
    assert 256 * 1024 < link.max_payload < broker_config.MAX_PACKET


def test_writing_again_keeps_the_brokers_certificate_while_it_is_good(tmp_path: Path) -> None:
    authority = CertificateAuthority.create(tmp_path / "ca", "site", 0.0)
    out = tmp_path / "out"

    def written(hosts: list[str], at_s: float) -> bytes:
        broker_config.write_config(authority, hosts, out, at_s)
        return (out / "broker.crt").read_bytes()

    first = written(["broker.site"], 0.0)
    assert (out / "broker.key").stat().st_mode & 0o777 == 0o600
    assert written(["broker.site"], DAY_S) == first
    second = written(["broker.site", "10.0.0.1"], DAY_S)
    assert second != first
    third = written(["10.0.0.1", "broker.site"], 600 * DAY_S)
    assert third != second
    authority.revoke_name("broker", 601 * DAY_S)
    assert written(["10.0.0.1", "broker.site"], 601 * DAY_S) != third


def test_the_rules_that_the_pages_show_are_those_that_are_written() -> None:
    shown = (Path(__file__).parents[3] / "docs/tutorials/fleet.md").read_text()
    written = broker_config.mosquitto_acl("fleet").split("\n", 1)[1]
    assert f"```\n{written}```\n" in shown
    for page in (Path(__file__).parents[3] / "README.md", *(Path(__file__).parents[3] / "docs").rglob("*.md")):
        rules = re.findall(r"^(?:topic|pattern) (?:read|write|readwrite|deny) .*$", page.read_text(), re.MULTILINE)
        assert set(rules) <= set(written.splitlines()), page


def test_hosts_and_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    authority = CertificateAuthority.create(tmp_path / "ca", "site", clock_s())
    for hosts, installed, match in (
        (["b"], "etc", "absolute path"),
        (["b"], '/a"b', "absolute path"),
        ([], "/x", "--host"),
    ):
        with pytest.raises(JobError, match=match):
            broker_config.write_config(authority, hosts, tmp_path / "out", clock_s(), installed=installed)
    with pytest.raises(JobError, match="neither a host name"):
        broker_config.write_config(authority, ["a b"], tmp_path / "out", clock_s())
    assert not (tmp_path / "out" / "fedquilt.conf").exists()
