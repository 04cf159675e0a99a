"""Many boards from one table: each its own name, budget and token; what is done is not done again, and all is told."""

from __future__ import annotations

import re
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from boards import INTERPRETER, TARGET

from fedquilt import cli
from fedquilt.core import JobError
from fedquilt.formats import toml
from fedquilt.tools.boards.flash import fleet
from fedquilt.tools.identity.register import CertificateRegister

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


def test_a_run_that_broke_off_goes_on(site: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (site / "down").touch()
    assert flash(site) == 2
    both = capfd.readouterr()
    assert "1 of 2 boards were not flashed" in both.err
    assert "No route to host" in both.out
    assert re.search("orin-2 .* not written: .*No route to host", both.out)
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
        register.redeem_token(file.read_text().strip(), "orin-1", "key of the second card", time.time())
    register.close()


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
