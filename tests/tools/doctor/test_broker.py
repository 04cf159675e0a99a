"""One fault of a broker is planted in a real one, and that is what is found."""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from certified import Certified

from fedquilt import wire
from fedquilt.cli import main
from fedquilt.coordinator.delivery.executor import LinkExecutor
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.storage.store import Store
from fedquilt.edge_agent.agent_state import AgentState
from fedquilt.security import authenticated_link
from fedquilt.tools.boards import doctor
from fedquilt.tools.boards.doctor import ExaminationTarget, broker
from fedquilt.tools.boards.doctor import broker as checks_broker
from fedquilt.tools.boards.doctor.findings import Finding, Numbered, to_finding
from fedquilt.tools.identity.authority import DAY_S, clock_s
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.link import MqttLink


class Site(Certified):
    def __init__(self, folder: Path, start: Callable[..., Any]) -> None:
        super().__init__(folder)
        self.out, self.start = folder / "etc", start
        self.lines = self.configure_broker(self.out)

    def serve(self, **changed: str) -> str:
        lines = [f"{key} {changed.get(key, value)}" for key, _, value in (line.partition(" ") for line in self.lines)]
        return self.start(*lines).url.replace("mqtt://", "mqtts://")


@pytest.fixture
def site(tmp_path: Path, mosquitto: Callable[..., Any]) -> Site:
    return Site(tmp_path, mosquitto)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[[Broker], None]]:
    over = threading.Event()
    threads = []

    def run(broker: Broker, ready: threading.Event) -> None:
        will = (wire.Topics("fleet").coord, wire.encode(wire.CoordState(online=False)))
        with Store(tmp_path / "runs") as store:
            link = MqttLink(broker, "coordinator", will)
            server = Server(
                LinkExecutor(
                    link, "fleet", store.blob_store, store.begin_epoch(), authenticated_link.load_identity(broker)
                ),
                store,
            )
            while not over.is_set():
                link.wait(0.05)
                server.step(time.monotonic())
                if link.connected and link.backlog == 0:
                    ready.set()
            server.shut_down()

    def start(broker: Broker) -> None:
        ready = threading.Event()
        threads.append(threading.Thread(target=run, args=(broker, ready)))
        threads[-1].start()
        assert ready.wait(120.0)

    yield start
    over.set()
    for thread in threads:
        thread.join()


def examined(folder: Path, **broker: Any) -> list[Finding]:
    groups = doctor.select_groups(ExaminationTarget(broker=broker, root=folder))
    return doctor.run_groups({"broker": groups["broker"]}, limit_s=20.0)


def asked(board: Any, **broker: Any) -> list[Finding]:
    board.table |= {"broker": broker, "home": str(board.root / "var/lib/fedquilt")}
    groups = doctor.select_groups(ExaminationTarget(settings=board.shipped()))
    return doctor.run_groups({"broker": groups["broker"]}, limit_s=20.0)


def bad(found: list[Finding]) -> list[tuple[str, str]]:
    return [(one.number, one.severity) for one in found if one.severity != "ok"]


def told_by(steps: Iterable[Numbered]) -> list[Finding]:
    return [to_finding(number, verdict) for number, verdict in steps]


def last(found: list[Finding]) -> Finding:
    return [one for one in found if one.severity != "ok"][-1]


# -- getting there --------------------------------------------------------------------------------


def test_a_name_that_nobody_knows_is_found(board: Any) -> None:
    found = last(asked(board, url="mqtt://broker.invalid"))
    assert (found.number, found.severity) == ("FQ401", "error")
    assert found.fix == "getent hosts broker.invalid"


def test_a_port_where_nobody_listens_is_found(board: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found = asked(board, url=f"mqtt://127.0.0.1:{probe.getsockname()[1]}")
    assert [(one.number, one.severity) for one in found] == [("FQ401", "ok"), ("FQ402", "error")]
    assert "refused" in last(found).sentence


def test_a_port_without_tls_is_found(board: Any, mosquitto: Callable[..., Any], authority: Any) -> None:
    url = mosquitto().url.replace("mqtt://", "mqtts://")
    found = last(asked(board, url=url, ca=str(authority.ca)))
    assert (found.number, found.severity) == ("FQ403", "error")


def test_a_brokers_certificate_of_another_authority_name_or_time_is_found(
    board: Any, site: Site, stranger: Any
) -> None:
    url, ca = site.serve(), str(site.ca)
    found = last(asked(board, url=url, ca=str(stranger.ca)))
    assert (found.number, found.severity) == ("FQ405", "error")
    assert "openssl" in (found.fix or "")
    found = last(asked(board, url=url.replace("127.0.0.1", "localhost"), ca=ca))
    assert (found.number, found.severity) == ("FQ406", "error")
    issued, key = site.authority.issue_with_new_key("broker", "server", clock_s() - 900 * DAY_S, hosts=["127.0.0.1"])
    (site.out / "broker.crt").write_text(issued.pem)
    (site.out / "broker.key").write_bytes(key)
    found = last(asked(board, url=site.serve(), ca=ca))
    assert (found.number, found.severity) == ("FQ404", "error")
    assert "set the clock" in found.sentence


def test_a_brokers_certificate_that_ends_soon_is_found(authority: Any) -> None:
    cert, key = authority.issue("soon", "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            line, _ = server.accept()
            with context.wrap_socket(line, server_side=True) as secure, contextlib.suppress(ConnectionResetError):
                secure.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        broker = Broker.from_url(f"mqtts://127.0.0.1:{server.getsockname()[1]}", ca=authority.ca)
        deadline_s = time.monotonic() + 20
        found = told_by(checks_broker.check_connection(broker, time.time(), deadline_s))
        thread.join()
    assert bad(found) == [("FQ407", "warning")]


def test_a_wrong_password_is_found_and_not_shown(
    board: Any, mosquitto: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "users").write_text("")
    url = mosquitto("allow_anonymous false", f"password_file {tmp_path / 'users'}").url
    board.write("etc/fedquilt/password", "correct horse").chmod(0o600)
    board.table["broker"] = {"url": url.replace("//", "//orin@"), "password_file": "/etc/fedquilt/password"}
    assert main(["doctor", str(board.shipped()), "--root", str(board.root), "--format", "json"]) == 11
    shown = capsys.readouterr()
    assert "horse" not in shown.out + shown.err
    told = json.loads(shown.out)
    assert told["severity"] == "error"
    (row,) = [one for one in told["findings"] if one["severity"] == "error"]
    assert (row["number"], row["group"]) == ("FQ408", "broker")
    assert "orin" in row["sentence"]
    assert row["fix"]


# -- its limits and rules -------------------------------------------------------------------------


def test_a_fleets_own_broker_with_its_coordinator_has_no_finding(
    board: Any, site: Site, serving: Callable[[Broker], None]
) -> None:
    url = site.serve()
    serving(Broker.from_url(url, **site.files("coordinator", "coordinator")))
    found = asked(board, url=url, **site.files("orin-07"))
    assert bad(found) == []
    assert [one.number for one in found] == ["FQ401", "FQ402", "FQ403", "FQ408", "FQ409", "FQ411", "FQ412", "FQ414"]
    assert "so do responses" in found[-3].sentence
    assert "signed: the coordinator has proved its identity" in found[-1].sentence


def test_without_a_coordinator_the_brokers_word_has_to_do(board: Any, site: Site) -> None:
    found = asked(board, url=site.serve(), **site.files("orin-07"))
    assert bad(found) == []
    assert "while a coordinator is online" in found[-3].sentence


def test_rules_that_shut_a_device_out_of_its_own_branch_are_found(board: Any, site: Site, tmp_path: Path) -> None:
    (tmp_path / "acl").write_text("pattern read fq/1/fleet/dev/%u/dn/#\n")
    found = asked(board, url=site.serve(acl_file=str(tmp_path / "acl")), **site.files("orin-07"))
    assert bad(found) == [("FQ411", "error")]
    assert "refuses" in last(found).sentence


def test_rules_that_keep_a_devices_answers_from_it_are_found(
    board: Any, site: Site, serving: Callable[[Broker], None], tmp_path: Path
) -> None:
    rules = (site.out / "acl").read_text().replace("pattern read fq/1/fleet/dev/%u/dn/#", "")
    (tmp_path / "acl").write_text(rules)
    url = site.serve(acl_file=str(tmp_path / "acl"))
    serving(Broker.from_url(url, **site.files("coordinator", "coordinator")))
    found = asked(board, url=url, **site.files("orin-07"))
    assert bad(found) == [("FQ411", "error"), ("FQ414", "error")]
    assert "do not arrive" in found[-3].sentence


@pytest.mark.parametrize(
    ("rule", "severity"), [("topic readwrite fq/#", "error"), ("topic write fq/1/fleet/dev/+/up/#", "warning")]
)
def test_rules_that_let_a_device_into_anothers_branch_are_found(
    board: Any, site: Site, tmp_path: Path, rule: str, severity: str
) -> None:
    (tmp_path / "acl").write_text(f"user orin-07\n{rule}\npattern read fq/1/fleet/dev/%u/dn/#\n")
    found = asked(board, url=site.serve(acl_file=str(tmp_path / "acl")), **site.files("orin-07"))
    assert bad(found) == [("FQ412", severity)]


def test_a_packet_limit_below_what_messages_need_is_found(board: Any, mosquitto: Callable[..., Any]) -> None:
    url = mosquitto("max_packet_size 40000").url
    assert bad(asked(board, url=url)) == [("FQ409", "warning")]
    assert bad(asked(board, url=mosquitto("max_packet_size 8000").url)) == [("FQ409", "error")]


def test_an_embedded_broker_of_this_machine_has_no_finding(board: Any, embedded_broker: Any) -> None:
    found = asked(board, url=embedded_broker.url)
    assert bad(found) == []
    assert "3.1.1" in found[2].sentence


def test_an_open_broker_on_a_network_is_found() -> None:
    seen = broker.PermissionResult(has_arrived=True, has_other_arrived=True)
    told = [
        told_by(broker.judge_device(seen, Broker(host, 1883, user=user), "a"))
        for host, user in (("10.0.0.9", None), ("b", "u"))
    ]
    assert [bad(one) for one in told] == [[("FQ412", "warning")], [("FQ412", "error")]]


def test_a_running_agent_is_not_disturbed(board: Any, mosquitto: Callable[..., Any]) -> None:
    broker = mosquitto()
    lock = AgentState(board.root / "var/lib/fedquilt").lock_home()
    found = asked(board, url=broker.url)
    lock.release()
    assert bad(found) == []
    assert "agent is running" in found[-1].sentence
    assert "fedquilt-doctor" not in broker.log()


def test_a_certificate_that_the_broker_refuses_is_found_beside_a_running_agent(
    board: Any, site: Site, stranger: Any
) -> None:
    url = site.serve()
    lock = AgentState(board.root / "var/lib/fedquilt").lock_home()
    assert bad(asked(board, url=url, **site.files("orin-07"))) == []
    cert, key = map(str, stranger.issue("orin-07"))
    found = asked(board, url=url, ca=str(site.ca), cert=cert, key=key)
    lock.release()
    assert bad(found) == [("FQ408", "error")]
    assert "refuses" in last(found).sentence


def test_a_coordinators_rights_and_certificate_are_examined(site: Site, tmp_path: Path) -> None:
    url = site.serve()
    for name, kind, days, found in (
        ("coordinator", "coordinator", None, []),
        ("orin-07", "device", None, [("FQ413", "error"), ("FQ414", "error")]),
        ("coordinator", "coordinator", 20, [("FQ414", "warning")]),
    ):
        assert bad(examined(tmp_path, url=url, **site.files(name, kind, days=days))) == found


def test_another_coordinator_of_the_fleet_is_named(mosquitto: Callable[..., Any], stage: Any, tmp_path: Path) -> None:
    broker = mosquitto()
    assert bad(examined(tmp_path, url=broker.url)) == []
    other = stage.join(Broker.from_url(broker.url), "other")
    state = wire.ProcessState("0" * 32, 1, True, "site:/srv/runs")
    other.publish(wire.Topics("fleet").coordinator_process, wire.encode(state), retain=True)
    stage.until(lambda: other.connected and other.backlog == 0)
    told = examined(tmp_path, url=broker.url)
    assert bad(told) == [("FQ416", "warning")]
    assert "runs at site:/srv/runs" in next(each.sentence for each in told if each.number == "FQ416")


def test_an_observer_examines_a_fleet_and_throws_nobody_off(
    site: Site, serving: Callable[[Broker], None], tmp_path: Path
) -> None:
    watcher = site.files("tower", "observer")
    site.lines = site.configure_broker(site.out)
    url = site.serve()
    broker = Broker.from_url(url, **site.files("coordinator", "coordinator"))
    serving(broker)
    told = examined(tmp_path, url=url, **watcher)
    assert bad(told) == []
    assert "receives from 0 devices, and cannot publish; the coordinator is online" in told[-1].sentence
    unknown = examined(tmp_path, url=url, **site.files("unknown", "observer"))
    assert bad(unknown) == [("FQ415", "error")]
    (fix,) = [one.fix for one in unknown if one.number == "FQ415"]
    command = (
        fix.partition(" on the authority")[0].replace("BROKER", "127.0.0.1").replace("FOLDER", str(site.out / "again"))
    )
    assert main([*shlex.split(command)[1:], "--ca", str(site.authority.folder)]) == 0
    assert "user unknown" in (site.out / "again" / "acl").read_text()
    assert "tower" in (site.out / "acl").read_text()


def test_a_device_whose_certificate_is_of_another_authority_is_refused_by_the_coordinator(
    board: Any, mosquitto: Callable[..., Any], site: Site, serving: Callable[[Broker], None], stranger: Any
) -> None:
    crt, key = site.out / "broker.crt", site.out / "broker.key"
    url = mosquitto(f"certfile {crt}", f"keyfile {key}").url.replace("mqtt://", "mqtts://")
    serving(Broker.from_url(url, **site.files("coordinator", "coordinator")))
    cert, own = stranger.issue("orin-07")
    found = asked(board, url=url, ca=str(site.ca), cert=str(cert), key=str(own))
    assert ("FQ414", "error") in bad(found)
    assert "unknown ca" in found[-1].sentence


def test_a_fleet_without_certificates_on_a_network_is_told_that_it_is_unsigned() -> None:
    told = told_by(("FQ414", checks_broker.load_identity(Broker(host, 1883))[1]) for host in ("10.0.0.9", "127.0.0.1"))
    assert [each.severity for each in told] == ["warning", "ok"]
    assert all("unsigned" in each.sentence for each in told)


def test_a_group_that_hangs_or_breaks_is_a_finding_and_keeps_nobody_waiting() -> None:
    never = threading.Event()

    def breaks() -> Iterator[Finding]:
        yield Finding("FQ102", "ok", "well until then")
        yield Finding("FQ103", "ok", str(1 // 0))

    groups: dict[str, doctor.Group] = {
        "hangs": lambda: [Finding("FQ101", "ok", str(never.wait(60)))],
        "breaks": breaks,
        "works": lambda: [Finding("FQ101", "ok", "well")],
    }
    found = doctor.run_groups(groups, limit_s=0.3)
    never.set()
    assert [one.number for one in found] == ["FQ001", "FQ002", "FQ101", "FQ102"]
    assert "hangs was not examined within 0.3 s" in found[0].sentence
    assert "ZeroDivisionError" in found[1].sentence


def test_a_healthy_board_with_its_broker_leaves_by_0(
    board: Any, mosquitto: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    board.table |= {"broker": {"url": mosquitto().url}, "cache": "1MB"}
    assert main(["doctor", str(board.shipped()), "--root", str(board.root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("checks: no problems")
    assert {line.split()[0] for line in lines[:-1]} == {"ok"}
