"""A Python that comes along to a board whose own is too old, and units for its older systemd."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from boards import ELF, PYTHON, TARGET, plant, wheel

from fedquilt import cli
from fedquilt.core import JobError
from fedquilt.tools.boards import targets
from fedquilt.tools.boards.flash import bundle, install, portable_python

pytestmark = pytest.mark.skipif(not TARGET, reason="no target is a machine like this one")


@pytest.fixture
def brought(tmp_path: Path) -> Path:
    """An archive whose Python is a script that starts this one, as the real one's starts its loader."""
    start = tmp_path / f"made/bin/python{PYTHON}"
    start.parent.mkdir(parents=True)
    start.write_text(f'#!/bin/sh\necho "$0" >> "{tmp_path}/started"\nexec {sys.executable} "$@"\n')
    start.chmod(0o755)
    portable_python.pack_folder(tmp_path / "made", tmp_path / "python.tar")
    return tmp_path / "python.tar"


def old_board(tmp_path: Path) -> Path:
    """A root with a shell and Python 3.6."""
    return plant(tmp_path / "board", ELF, "/usr/bin/python3.6")


def made(tmp_path: Path, brought: Path) -> Path:
    """A bundle for it."""
    target = replace(
        targets.find_target("jetpack5"),
        machine="aarch64" if ELF == 0xB7 else "x86_64",
        python=PYTHON,
        interpreter=f"{targets.BROUGHT}{PYTHON}",
    )
    board = bundle.BoardFiles("tx2", {"agent.toml": b'device = "tx2"\n', "device.key": b"k"}, 10**9)
    house = (wheel(tmp_path / "wheels", "toy"),)
    bundle.write_folder(bundle.collect_files(board, target, house, "", own_python=brought), tmp_path / "bundle")
    return tmp_path / "bundle"


def test_it_is_put_beside_the_packages_and_starts_them(tmp_path: Path, brought: Path) -> None:
    """The environment's python leads to it, and its configuration names it as home."""
    root = install.RootFileSystem(old_board(tmp_path), say=lambda line: None)
    install.install_bundle(made(tmp_path, brought), root)
    home = root.path / "opt/fedquilt/current"
    assert (home / "bin/python").readlink() == Path(f"/opt/fedquilt/current/python/bin/python{PYTHON}")
    assert "home = /opt/fedquilt/current/python/bin\n" in (home / "pyvenv.cfg").read_text()
    assert (home / f"python/bin/python{PYTHON}").stat().st_mode & 0o777 == 0o755
    assert install.install_bundle(tmp_path / "bundle", root) == 0


def test_on_the_board_it_installs_itself(tmp_path: Path, brought: Path) -> None:
    """There is no other Python that could: install.sh unpacks it first."""
    board, place = old_board(tmp_path), made(tmp_path, brought)
    words = ["sh", str(place / "install.sh"), "--root", str(board)]
    subprocess.run(words, check=True, env={"PATH": "/usr/bin:/bin"}, stdout=subprocess.DEVNULL)
    assert {*(tmp_path / "started").read_text().split()} == {str(place / f"python/bin/python{PYTHON}")}
    assert (board / "etc/fedquilt/agent.toml").is_file()


def test_an_archive_that_would_write_elsewhere_is_refused(tmp_path: Path) -> None:
    """Here, and on the board."""
    (tmp_path / "x").write_text("")
    for name in ("etc/passwd", "python/../../x"):
        with tarfile.open(tmp_path / "bad.tar", "w") as archive:
            archive.add(tmp_path / "x", f"python/bin/python{PYTHON}")
            archive.add(tmp_path / "x", name)
        with pytest.raises(JobError, match=r"holds no python/bin/python3\.N"):
            portable_python.read_python_version(tmp_path / "bad.tar")
        bad = made(tmp_path, tmp_path / "bad.tar")
        with pytest.raises(install.InstallRefusedError, match="would write to"):
            install.install_bundle(bad, install.RootFileSystem(old_board(tmp_path), say=lambda line: None))
        subprocess.run(["rm", "-r", str(bad)], check=True)


def test_targets_and_archive_have_to_fit(place: Path, brought: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is missing or too much on the command line is told, with the command that makes one."""
    assert cli.main(["board", "flash", "agent.toml", "--target", "jetpack4"]) == 2
    assert "python -m fedquilt.tools.boards.flash.portable_python FILE" in capsys.readouterr().err
    along = ["--own-python", str(brought)]
    assert cli.main(["board", "flash", "agent.toml", "--target", "jetpack6", *along]) == 2
    assert "is for jetpack4 and jetpack5" in capsys.readouterr().err
    assert cli.main(["board", "flash", "agent.toml", "--target", "jetpack5", "--system-packages", *along]) == 2
    assert "not for one that comes along" in capsys.readouterr().err
    other = "3.10" if PYTHON != "3.10" else "3.12"
    assert cli.main(["board", "flash", "agent.toml", "--target", "jetpack5", "--python", other, *along]) == 2
    assert f"holds Python {PYTHON}" in capsys.readouterr().err


SECRET = bundle.BoardFiles("b", {"agent.toml": b"", "device.key": b"k", "password": b"p"}, 10**9)


def agent(systemd: int) -> str:
    return bundle.render_units(SECRET, systemd)["fedquilt-agent.service"].decode()


def test_an_older_systemd_gets_secrets_as_copies_of_the_users_own() -> None:
    """LoadCredential= came with systemd 247; JetPack 5 has 245."""
    new, old = agent(249), agent(245)
    assert "LoadCredential=device.key" in new
    assert "/run/fedquilt-agent" not in new
    assert "LoadCredential" not in old
    assert "CREDENTIALS_DIRECTORY" not in old
    assert "--credentials /run/fedquilt-agent\n" in old
    assert "RuntimeDirectoryMode=0700" in old
    for name in ("device.key", "password"):
        copy = (
            f"ExecStartPre=+/usr/bin/install -o fedquilt -g fedquilt -m 0400 /etc/fedquilt/{name} /run/fedquilt-agent/"
        )
        assert copy in old


def test_a_systemd_that_knows_no_group_of_system_calls_gets_no_filter() -> None:
    """JetPack 4's 237 would leave next to nothing allowed."""
    assert "SystemCallFilter=@system-service" in agent(245)
    for name, text in bundle.render_units(SECRET, 237).items():
        assert "SystemCall" not in text.decode(), name


def test_programs_of_units_have_whole_paths() -> None:
    """systemd 237 takes no other; /bin is a link to /usr/bin where the two are one."""
    for text in bundle.render_units(replace(SECRET, enrols=True), 237).values():
        for line in text.decode().splitlines():
            if line.startswith("Exec"):
                assert line.split("=", 1)[1].lstrip("-+").startswith("/"), line


def test_libraries_and_not_their_plugins_come_along(tmp_path: Path) -> None:
    """Of Debian's packages, made small: what the loader finds by name, and Python without what no agent needs."""
    packages = []
    for name in ("libc6", "python"):
        top = tmp_path / name
        (top / "DEBIAN").mkdir(parents=True)
        (top / "DEBIAN/control").write_text(
            f"Package: {name}\nVersion: 1\nArchitecture: arm64\nMaintainer: n <n@example.org>\nDescription: x\n"
        )
        files = {
            "libc6": ("lib/aarch64-linux-gnu/libc.so.6", "usr/lib/aarch64-linux-gnu/gconv/X.so"),
            "python": ("usr/bin/python3.11", "usr/lib/python3.11/os.py", "usr/lib/python3.11/idlelib/x.py"),
        }[name]
        for file in files:
            (top / file).parent.mkdir(parents=True, exist_ok=True)
            (top / file).write_text("x")
        built = subprocess.run(["dpkg-deb", "-b", str(top), str(tmp_path)], capture_output=True, check=False)
        if built.returncode:
            pytest.skip("there is no dpkg-deb here")
        packages.append(tmp_path / f"{name}_1_arm64.deb")
    (tmp_path / "scratch").mkdir()
    home = portable_python.unpack_packages(packages, tmp_path / "scratch")
    names = {path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()}
    assert names == {"bin/python3.11", "libexec/python3.11", "libc/libc.so.6", "lib/python3.11/os.py"}
    assert portable_python.pack_folder(home, tmp_path / "p.tar") > 0
    assert portable_python.read_python_version(tmp_path / "p.tar") == "3.11"


def test_the_command_line_tells_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No apt: in one line."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert portable_python.main([str(tmp_path / "p.tar")]) == 2
    assert "apt" in capsys.readouterr().err
