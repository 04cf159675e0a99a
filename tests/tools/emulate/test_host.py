"""What an emulation asks of this machine, and which Debian archive it takes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from fedquilt.core import JobError
from fedquilt.tools.emulate import host, programs
from fedquilt.tools.emulate.host import HostMachine

ALL = dict.fromkeys(host.PROGRAMS, "/usr/bin/x")
GOOD = HostMachine("x86_64", 0, ALL, 10**10)


def test_a_machine_that_has_it_all_is_asked_for_nothing() -> None:
    """And disk only while there is no root file system yet."""
    host.require_all(GOOD, made=False)
    host.require_all(HostMachine("x86_64", 0, ALL, 0), made=True)


@pytest.mark.parametrize(
    ("machine", "told"),
    [
        (HostMachine("x86_64", 1000, ALL, 10**10), "root, .*sudo fedquilt emulate"),
        (HostMachine("x86_64", 0, {**ALL, "debootstrap": ""}, 10**7), "1000 MB of disk, and 10 MB are free: make room"),
        (HostMachine("aarch64", 0, ALL, 10**10), "another machine than an aarch64"),
    ],
)
def test_each_want_is_told_with_its_mend(machine: HostMachine, told: str) -> None:
    """As what has to be done."""
    with pytest.raises(JobError, match=told):
        host.require_all(machine, made=False)


def test_programs_are_told_by_the_packages_that_bring_them_and_all_wants_at_once() -> None:
    """One command installs them."""
    few = {name: path for name, path in ALL.items() if name not in ("qemu-aarch64-static", "mosquitto")}
    with pytest.raises(JobError, match=r"root, .*; and programs: sudo apt install qemu-user-static mosquitto$"):
        host.require_all(HostMachine("x86_64", 1, few, 10**10), made=False)


def test_this_machine_is_seen_as_it_is(tmp_path: Path) -> None:
    """Also where the folder is yet to be made."""
    seen = HostMachine.detect(tmp_path / "not" / "yet")
    assert seen.free_bytes > 0
    assert set(seen.programs) <= {*host.PROGRAMS, *host.BOOTED}
    assert all(Path(path).is_file() for path in seen.programs.values())


def listing(*lines: str) -> programs.Run:
    def listed(words: Sequence[str]) -> str:
        assert words[:2] == ["apt-get", "indextargets"]
        return "".join(f"{line}\n" for line in lines)

    return listed


MAIN = "http://near.example/debian/|bookworm|main|Debian|Debian"


def test_the_mirror_is_the_one_that_apt_has_for_the_suite() -> None:
    """Not the one of security updates, nor somebody else's."""
    found = programs.debian_mirror(
        "bookworm",
        listing(
            "http://x.example/|bookworm|main|Somebody|Somebody",
            "http://far.example/debian/|trixie|main|Debian|Debian",
            "http://s.example/debian-security/|bookworm-security|main|Debian|Debian-Security",
            "http://near.example/debian/|bookworm|contrib|Debian|Debian",
            MAIN,
        ),
    )
    assert found == "http://near.example/debian"


def test_another_releases_archive_has_the_suite_too() -> None:
    """A machine with Debian 13 emulates Debian 12."""
    assert (
        programs.debian_mirror("bookworm", listing(MAIN.replace("bookworm", "trixie"))) == "http://near.example/debian"
    )


def test_where_apt_knows_no_debian_one_has_to_be_named() -> None:
    """Ubuntu, lists that were never fetched, or no apt at all."""
    with pytest.raises(JobError, match=r"no archive of Debian's here: name one with --mirror URL"):
        programs.debian_mirror("bookworm", listing("http://u.example/ubuntu/|noble|main|Ubuntu|Ubuntu", "junk"))

    def no_apt(words: Sequence[str]) -> str:
        raise JobError("apt-get cannot be run: No such file or directory")

    with pytest.raises(JobError, match=r"\(apt-get cannot be run.*\): name one with --mirror"):
        programs.debian_mirror("bookworm", no_apt)


def test_a_program_that_fails_is_told_by_its_last_words() -> None:
    """Or that it is not there."""
    assert programs.run([sys.executable, "-c", "print(input())"], "given\n") == "given\n"
    with pytest.raises(JobError, match=r"ended with 3: the end$"):
        programs.run([sys.executable, "-c", "import sys; print('a\\nthe end', file=sys.stderr); sys.exit(3)"])
    with pytest.raises(JobError, match=r"^/no/such cannot be run: No such file"):
        programs.run(["/no/such"])
