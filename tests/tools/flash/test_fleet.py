"""Many boards from one table: each its own name, budget and token; what is done is not done again, and all is told."""

from __future__ import annotations

import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from boards import INTERPRETER, TARGET

from fedquilt import cli
from fedquilt.core import JobError
from fedquilt.formats import toml
from fedquilt.tools.boards.flash import fleet
from fedquilt.tools.boards.flash.fleet import BoardRow, EnrolmentState, FlashState
from fedquilt.tools.identity.register import CertificateRegister, EnrolmentToken, IssuedCertificate

pytestmark = pytest.mark.skipif(not TARGET, reason="no target is a machine like this one")

TABLE = """name,target,budget,labels,address
orin-1,,1GB,hall-a,
orin-2,,,hall-b window,me@orin-2
"""


@pytest.fixture
def site(place: Path) -> Path:
    assert cli.main(["identity", "init", "--ca", str(place / "ca")]) == 0
    (place / "boards.csv").write_text(TABLE)
    (place / "agent.toml").write_text(
        'device = "any"\nhome = "x"\nbudget = "2GB"\n[broker]\nurl = "mqtts://hub:8883"\nca = "ca/ca.crt"\n'
        '[enrol]\nurl = "https://hub:8884"\n'
    )
    return place


def flash(site: Path, *more: str) -> int:

    words = ["board", "flash", "agent.toml", "--boards", "boards.csv", "--ca", "ca", "--target", TARGET]
    return cli.main([*words, "--python", INTERPRETER, *more])


def test_each_board_gets_its_own_name_budget_and_token(site: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert flash(site) == 0
    said = capfd.readouterr().out
    with tarfile.open(site / "fedquilt-boards/orin-1.tar") as archive:
        first = {one.name.split("/", 1)[1]: archive.extractfile(one).read() for one in archive if one.isfile()}  # type: ignore[union-attr]
    table = toml.parse_toml(first["etc/agent.toml"].decode(), "")
    assert (table["device"], table["budget"]) == ("orin-1", "1GB")
    second = toml.read_toml(site / "board/etc/fedquilt/agent.toml")
    assert (second["device"], second["budget"]) == ("orin-2", "2GB")
    assert (table["labels"], second["labels"]) == (["hall-a"], ["hall-b", "window"])
    tokens = {first["etc/token"], (site / "board/etc/fedquilt/token").read_bytes()}
    assert len(tokens) == 2
    register = CertificateRegister(site / "ca/register.db")
    assert [one.pattern for one in register.list_tokens()] == ["orin-1", "orin-2"]
    register.close()
    assert {path.stat().st_mode & 0o777 for path in (site / "fedquilt-boards").glob("*.token")} == {0o600}
    assert "hall-b window" in said
    assert "me@orin-2" in said
    assert said.count("waits for its first boot") == 2
    assert "not enrolled yet: orin-1, orin-2" in said


def test_a_run_that_broke_off_goes_on(site: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (site / "down").touch()
    assert flash(site) == 2
    both = capfd.readouterr()
    assert "1 of 2 boards were not flashed" in both.err
    assert "No route to host" in both.out
    assert "not written: orin-2; repeat the command" in both.out
    made = (site / "fedquilt-boards/orin-1.tar").stat().st_mtime_ns
    token = (site / "fedquilt-boards/orin-2.token").read_bytes()
    (site / "down").unlink()
    assert flash(site) == 0
    said = capfd.readouterr().out
    assert "orin-1: flashed before" in said
    assert (site / "fedquilt-boards/orin-1.tar").stat().st_mtime_ns == made
    assert (site / "board/etc/fedquilt/token").read_bytes() == token
    register = CertificateRegister(site / "ca/register.db")
    assert len(register.list_tokens()) == 2
    register.close()


def redeem(register: CertificateRegister, token: str) -> None:
    with register.transaction():
        register.redeem_token(token, "orin-1", "key of the first card", time.time())


def cancel(register: CertificateRegister, token: str) -> None:
    register.delete_tokens("orin-1")


@pytest.mark.parametrize("spend", [redeem, cancel])
def test_a_row_that_changed_gets_a_new_token_once_the_first_is_spent(site: Path, spend: Any) -> None:
    (site / "boards.csv").write_text("name,budget\norin-1,1GB\n")
    assert flash(site) == 0
    file = site / "fedquilt-boards/orin-1.token"
    first = file.read_text().strip()
    register = CertificateRegister(site / "ca/register.db")
    spend(register, first)
    (site / "boards.csv").write_text("name,budget\norin-1,2GB\n")
    assert flash(site) == 0
    with register.transaction():
        taken = register.redeem_token(file.read_text().strip(), "orin-1", "key of the second card", time.time())
    register.close()
    assert isinstance(taken, EnrolmentToken), taken


@pytest.mark.parametrize("watch", [(), ("--watch",)])
def test_a_watch_ends_with_the_enrolment_of_the_last_board(
    site: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, watch: tuple[str, ...]
) -> None:
    (site / "boards.csv").write_text(TABLE.splitlines()[0] + "\norin-1,,1GB,hall-a,\n")

    def enrols(seconds: float) -> None:
        register = CertificateRegister(site / "ca/register.db")
        register.add_certificate(issued(time.time() + 1, time.time() + 1e6)._replace(name="orin-1"))
        register.close()

    real = SimpleNamespace(sleep=enrols, time=time.time, strftime=time.strftime)
    monkeypatch.setattr(fleet, "time", real)  # no other thread's sleep is meant
    assert flash(site, *watch) == 0
    last = capfd.readouterr().out.rsplit("written to", 1)[1]
    assert f"{'enrolled' if watch else 'waits for its first boot'}" in last


def test_a_dry_run_makes_no_token(site: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert flash(site, "--dry-run") == 0
    register = CertificateRegister(site / "ca/register.db")
    assert register.list_tokens() == []
    register.close()
    assert list((site / "fedquilt-boards").iterdir()) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name,color\norin-1,red\n", r"line 2: unknown column 'color': .*name,target,budget,labels,address"),
        ("name,target\norin-1,jetpack6,x\n", "more values than columns"),
        ("name,target\nOrin 1,jetpack6\n", "board name 'Orin 1' is invalid"),
        ("name,target\na,jetpack6\nb,jetpack8\n", r"line 3: unknown target 'jetpack8': choose one of "),
        ("name,target\na,jetpack6\na,jetpack6\n", r"line 3: board a is in the table twice"),
        ("name,target,budget\na,jetpack6,much\n", r"line 2: 'much' is not a size"),
        ("name,target,labels\na,jetpack6,site=lab Hall\n", r"line 2: 'Hall' is not a label"),
        ("name\na\n", "a has no target"),
        ("name,target\n", "has no board"),
    ],
)
def test_a_table_with_a_fault_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(JobError, match=says):
        fleet.read_table(tmp_path / "t.csv")
    with pytest.raises(JobError, match="cannot be read"):
        fleet.read_table(tmp_path / "none.csv")


# -- how they are ---------------------------------------------------------------------------------


def issued(at_s: float, ends_s: float = 1e9, revoked_s: float | None = None) -> IssuedCertificate:
    return IssuedCertificate("1", "a", "device", "k", at_s, ends_s, revoked_s, "")


def test_enrolment_is_what_the_register_says() -> None:
    token = EnrolmentToken("a", 100.0, 1000.0, None, None, None)
    used = token._replace(used_s=200.0)
    waits = EnrolmentState("waits for its first boot, until 1970-01-01 00:16 UTC", is_waiting=True)
    assert fleet.determine_enrolment_state([], [token], 150.0) == waits
    assert fleet.determine_enrolment_state([issued(50.0)], [token], 150.0) == waits
    enrolled = EnrolmentState("enrolled 1970-01-01 00:03 UTC")
    assert fleet.determine_enrolment_state([issued(50.0), issued(200.0)], [used], 250.0) == enrolled
    assert fleet.determine_enrolment_state([], [token], 2000.0) == EnrolmentState("token expired", is_expired=True)
    assert fleet.determine_enrolment_state([issued(50.0, revoked_s=60.0)], [], 150.0) == EnrolmentState()


def test_a_watch_tells_each_change_once_and_ends_when_all_are_there() -> None:
    rows = [BoardRow("a", "jetpack6"), BoardRow("b", "jetpack6"), BoardRow("lost", "jetpack6")]
    waits, enrolled = EnrolmentState("waits", is_waiting=True), EnrolmentState("enrolled")
    seen = iter([waits, waits, enrolled])
    waited: list[float] = []
    said: list[str] = []

    def look() -> list[FlashState]:
        enrolment = next(seen)
        return [*(FlashState(one, "x.img", enrolment, True) for one in rows[:2]), FlashState(rows[2], "not", waits)]

    ended = fleet.watch_boards(look, waited.append, said.append)
    assert [one.enrolment for one in ended] == [enrolled, enrolled, waits]
    assert len(waited) == 2
    assert [line.split("  ")[1] for line in said if "  a: " in line] == ["a: waits", "a: enrolled"]
    assert fleet.format_states(ended, 200)[-2:] == [
        "not written: lost; repeat the command to continue with them",
        "not enrolled yet: lost",
    ]


def test_states_join_table_and_register(site: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert flash(site) == 0
    from fedquilt.tools.boards import flash as tool

    plan = fleet.FlashPlan(tool.FlashContent(TARGET, site / "agent.toml"), None, site / "fedquilt-boards", site / "ca")
    rows = fleet.read_table(site / "boards.csv", TARGET)
    register = CertificateRegister(site / "ca/register.db")
    with register.transaction():
        register.add_certificate(issued(time.time() + 1, time.time() + 1e6)._replace(name="orin-1"))
        register.add_certificate(issued(time.time() + 1, time.time() + 1e6)._replace(name="other", serial="2"))
    register.close()
    one, two = fleet.read_states(rows, plan, {"orin-2": "no route"})
    assert one.enrolment.text.startswith("enrolled ")
    assert two.enrolment.is_waiting
