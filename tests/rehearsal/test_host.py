"""What a rehearsal needs of this machine, which Debian archive it takes, and how its root file system is made."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from fedquilt.core import JobError
from tests.rehearsal import host
from tests.rehearsal.host import HostMachine

ALL = dict.fromkeys(host.PROGRAMS, "/usr/bin/x")


def test_a_machine_that_has_it_all_has_no_hindrance(tmp_path: Path) -> None:
    assert HostMachine(0, ALL, 10**10).hindrance(tmp_path / "none") == ""
    assert HostMachine(0, ALL, 0).hindrance(tmp_path) == ""


def test_all_that_is_missing_is_told_with_its_mend(tmp_path: Path) -> None:
    few = {name: path for name, path in ALL.items() if name not in ("systemd-nspawn", "mosquitto")}
    assert HostMachine(1000, few, 10**7).hindrance(tmp_path / "none") == (
        "a rehearsal needs root, as it makes a root file system and boots it: sudo make rehearsal; "
        "and programs: sudo apt install systemd-container mosquitto; "
        "and 1000 MB of disk, and 10 MB are free: make room, or name another --out"
    )


def test_this_machine_is_seen_as_it_is(tmp_path: Path) -> None:
    seen = HostMachine.detect(tmp_path / "not" / "yet")
    assert seen.free_bytes > 0
    assert set(seen.programs) <= set(host.PROGRAMS)
    assert all(Path(path).is_file() for path in seen.programs.values())


def test_only_one_runs_at_a_time(tmp_path: Path) -> None:
    with (
        host.hold_lock(tmp_path / "lock"),
        pytest.raises(JobError, match="another rehearsal runs"),
        host.hold_lock(tmp_path / "lock"),
    ):
        pass
    with host.hold_lock(tmp_path / "lock"):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_as_ctrl_c_does(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), host.interrupt_on_signals():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


MAIN = "http://near.example/debian/|bookworm|main|Debian|Debian"


@pytest.mark.parametrize("main", [MAIN, MAIN.replace("bookworm", "sid")])
def test_the_mirror_is_the_one_that_apt_has_for_the_suite(main: str) -> None:
    others = (
        "http://x.example/|bookworm|main|Somebody|Somebody",
        "http://s.example/debian-security/|bookworm-security|main|Debian|Debian-Security",
        "http://near.example/debian/|bookworm|contrib|Debian|Debian",
    )
    assert host.debian_mirror(lambda *words: "\n".join((*others, main))) == "http://near.example/debian"
    far = "http://far.example/debian/|trixie|main|Debian|Debian"
    assert host.debian_mirror(lambda *words: f"{far}\n{MAIN}\n") == "http://near.example/debian"


def test_where_apt_knows_no_debian_one_has_to_be_named() -> None:
    with pytest.raises(JobError, match=r"no archive of Debian's here: name one with --mirror URL"):
        host.debian_mirror(lambda *words: "http://u.example/ubuntu/|noble|main|Ubuntu|Ubuntu\njunk\n")
    with pytest.raises(JobError, match=r"\(/no/such cannot be run: No such file.*\): name one with --mirror"):
        host.debian_mirror(lambda *words: host.run_program("/no/such"))


def test_a_program_that_fails_is_told_by_its_last_words() -> None:
    assert host.run_program(sys.executable, "-c", "print('given')") == "given\n"
    with pytest.raises(JobError, match=r"ended with 3: the end$"):
        host.run_program(sys.executable, "-c", "import sys; print('a\\nthe end', file=sys.stderr); sys.exit(3)")


DEBOOTSTRAP = """#!/bin/sh
echo $*
shift 4
eval root=\\${$(($# - 1))}
mkdir -p "$root/bin" && echo "E: $SAYS" && exit $CODE
"""


def test_a_root_file_system_appears_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs/unshare").write_text(DEBOOTSTRAP)
    (tmp_path / "programs/unshare").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}:/usr/bin:/bin")
    monkeypatch.setenv("SAYS", "no such suite")
    root, log = tmp_path / "out/root", tmp_path / "log"
    monkeypatch.setenv("CODE", "1")
    with pytest.raises(JobError, match=r"with http://m\.example ended with 1: E: no such suite \(.*log\)"):
        host.create_root(root, "http://m.example", log)
    assert not root.exists()
    (tmp_path / "out/root.new/rest").touch()
    monkeypatch.setenv("CODE", "0")
    host.create_root(root, "http://m.example", log)
    assert (root / "bin").is_dir()
    assert not (root / "rest").exists()
    assert not (tmp_path / "out/root.new").exists()
    words = log.read_text().splitlines()[0].split()
    assert words[:2] == ["--mount", "debootstrap"]
    assert f"--arch={host.debian_architecture()}" in words
    assert any(word.startswith("--include=python3,systemd") for word in words)
    assert words[-3:] == ["bookworm", f"{root}.new", "http://m.example"]
