"""Certificates of a signed link: who gets a session, renewal and daily checks."""

import math

import pytest
from sealed_fleets import CLAIM, Fleet, TamperingBroker, up_topic

from fedquilt.core import JobError, SiteRight, WireError
from fedquilt.security import authenticated_link, handshake
from fedquilt.security.authenticated_link import AuthenticatedFleetLink
from fedquilt.security.handshake import LinkIdentity
from fedquilt.transport.link import Message
from fedquilt.transport.memory_link import MemoryBroker
from fedquilt.transport.mqtt.broker import Broker


def test_who_has_not_the_right_certificate_gets_no_session_and_the_log_says_why(fleet, site, stranger, caplog):
    cases = {
        "c1": (LinkIdentity(site.broker("other")), "certificate is for 'other'"),
        "c2": (LinkIdentity(site.broker("c2", "observer")), "certificate is for 'an observer'"),
        "c3": (LinkIdentity(site.broker("c3", days_ago=400)), "expired"),
        "c4": (LinkIdentity(site.broker("c4", "server")), "unsuitable certificate purpose"),
    }
    cert, key = stranger.issue("c5")
    strange = site.broker("c5")
    strange = type(strange).from_url("mqtts://localhost", ca=site.ca, cert=cert, key=key)
    cases["c5"] = (LinkIdentity(strange), "unable to get local issuer certificate")
    for name, (identity, _) in cases.items():
        fleet.join(name, identity)
    fleet.run()
    for name, (_, said) in cases.items():
        assert not fleet.boards[name].connected, name
        assert any(f"dev/{name}/up" in line and said in line for line in caplog.messages), (name, caplog.messages)


def test_a_board_takes_nobody_but_the_coordinator_for_it(site, caplog):
    for name, kind, said in (
        ("a", "device", "unsuitable certificate purpose"),
        ("hub", "server", "certificate of 'hub', not of the coordinator"),
    ):
        posing = LinkIdentity(site.broker(name, kind))
        with pytest.raises(JobError, match="identity issue coordinator"):
            AuthenticatedFleetLink(MemoryBroker().connect(), posing, "f")
        posing.require_coordinator_certificate = lambda: math.inf
        fleet = Fleet.__new__(Fleet)
        fleet.site, fleet.broker, fleet.boards, fleet.heard, fleet.epoch = site, TamperingBroker(), {}, {}, 0
        fleet.identities = {"coordinator": posing}
        fleet.coordinate()
        board = fleet.join("b")
        fleet.run()
        assert not board.connected
        assert said in caplog.text
        assert said in str(board.problem)


def test_a_certificate_that_no_board_takes_for_the_coordinators_is_refused_with_the_mend(site):
    unfit = LinkIdentity(site.broker("coordinator", "device"))
    with pytest.raises(
        JobError, match=r"unsuitable certificate purpose.*`fedquilt identity issue coordinator` makes one"
    ):
        unfit.require_coordinator_certificate()


def test_without_an_authority_there_is_no_signing_and_no_silence(site):
    files = site.files("d")
    with pytest.raises(JobError, match="set ca to the certificate of the fleet's authority"):
        authenticated_link.load_identity(
            type(site.broker("d")).from_url("mqtts://host", cert=files["cert"], key=files["key"])
        )
    assert authenticated_link.load_identity(type(site.broker("d")).from_url("mqtt://host")) is None


def test_certificates_are_checked_anew_every_day(fleet, site):
    first = fleet.boards["a"].session
    site.files("b", days_ago=400)
    fleet.broker.now_s += authenticated_link.SESSION_S + 1.0
    fleet.run()
    assert fleet.boards["a"].session == first + 1
    fleet.boards["b"].publish(up_topic("b"), b"1")
    fleet.run()
    assert fleet.payloads("coordinator") == [b"1"]
    fleet.broker.now_s += authenticated_link.SESSION_S + 1.0
    fleet.run()
    for name in ("a", "b"):
        fleet.boards[name].publish(up_topic(name), b"2")
    fleet.run()
    assert fleet.heard["coordinator"][1:] == [Message(up_topic("a"), b"2")]


def test_a_renewed_certificate_is_used_without_a_restart(fleet, site, tmp_path):
    site.files("a")
    fleet.coordinate()
    fleet.run(6.0)
    assert fleet.boards["a"].connected
    fleet.boards["a"].publish(up_topic("a"), CLAIM)
    fleet.run()
    assert fleet.payloads("coordinator") == [CLAIM]


def test_a_coordinator_says_in_time_that_its_certificate_ends(site, caplog):
    fleet = Fleet(site)
    assert "certificate expires on" not in caplog.text
    site.files("coordinator", "coordinator", days_ago=705)
    fleet.broker.now_s += authenticated_link.SESSION_S + 1.0
    fleet.run()
    said = [line for line in caplog.messages if "coordinator's certificate expires on 20" in line]
    assert len(said) == 1
    assert "`fedquilt identity issue coordinator`" in said[0]
    site.files("coordinator", "coordinator", days_ago=735)
    fleet.broker.now_s += authenticated_link.SESSION_S + 1.0
    fleet.run()
    assert "certificate has expired at 20" in caplog.messages[-1]


def test_a_site_has_the_right_of_its_certificate_and_loses_it_with_another_certificate(fleet, site):
    right = SiteRight(("cam-*", "door-7"), 40)
    fleet.join("plant", LinkIdentity(Broker.from_url("mqtts://localhost", **site.files("plant", "site", right=right))))
    fleet.join("other")
    fleet.run()
    assert fleet.link.site_right("plant") == right
    assert fleet.link.site_right("other") is None
    fleet.identities["plant"] = LinkIdentity(site.broker("plant"))
    fleet.join("plant")
    fleet.run()
    assert fleet.boards["plant"].connected
    assert fleet.link.site_right("plant") is None


@pytest.mark.parametrize("uri", ["fedquilt:site:", "fedquilt:site:x:cam-*", "fedquilt:site:0:a", "fedquilt:site:3:*a"])
def test_a_right_that_cannot_be_read_is_none(uri):
    with pytest.raises(WireError, match="has an invalid right"):
        handshake.right_from_uri(uri)
