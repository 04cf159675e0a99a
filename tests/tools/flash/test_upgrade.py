"""Bundles of an upgrade as typed, and the launcher of a flashed board: it starts what it has to."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from boards import HERE, PYTHON, TARGET, plant, wheel

import fedquilt
from fedquilt import cli
from fedquilt.edge_agent.upgrade import archive, environment_build, launcher
from fedquilt.edge_agent.upgrade.launcher import VersionChoice
from fedquilt.tools.boards.flash import bundle
from fedquilt.tools.boards.flash.install import RootFileSystem, install_bundle
from fedquilt.tools.identity.authority import CertificateAuthority

Make = Callable[..., Path]
SHOWS = "import os, sys; print({name!r}, *sys.argv[1:], os.environ['FEDQUILT_LAUNCHED'])\ndef main(): pass\n"


def flash(*arguments: str) -> int:
    return cli.main(["rollout", "build", "agents.tar", "--target", TARGET, "--python", PYTHON, *arguments])


needs_target = pytest.mark.skipif(not TARGET, reason=f"no target is a {platform.machine()}")


@needs_target
def test_a_bundle_is_fedquilt_alone_signed_where_the_authority_is(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CertificateAuthority.create(place / "fedquilt-ca", "site", time.time())
    assert flash() == 0
    said = capsys.readouterr().out
    assert "signed by the authority in fedquilt-ca" in said
    assert "to deploy it: fedquilt rollout agent agents.tar --home HOME" in said
    with archive.open_bundle(place / "agents.tar") as made:
        manifest = made.manifest
        made.verify_wheels()
        environment_build.require_fitting_machine(manifest)
        environment_build.require_valid_signature(made, str(place / "fedquilt-ca/ca.crt"), unsigned=False)
    assert (manifest.version, manifest.machine, manifest.python) == (
        fedquilt.__version__,
        platform.machine(),
        PYTHON,
    )
    assert list(manifest.wheels) == [f"fedquilt_board-{fedquilt.__version__}-py3-none-any.whl"]
    assert manifest.present["msgspec"] == "99.0"
    assert "cryptography" in manifest.present
    assert flash() == 0
    with archive.open_bundle(place / "agents.tar") as made:
        assert made.manifest.number > manifest.number > 0, "boards tell by it which one was signed later"
    with tarfile.open(place / "agents.tar") as packed:
        assert {name.split("/")[0] for name in packed.getnames()} == {"upgrade.json", "upgrade.sig", "wheels"}


@needs_target
def test_a_whole_bundle_needs_nothing_of_the_board(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert flash("--whole") == 0
    assert "not signed: no authority in fedquilt-ca" in capsys.readouterr().out
    with archive.open_bundle(place / "agents.tar") as made:
        assert made.manifest.present == {}
        assert any(name.startswith("msgspec-") for name in made.manifest.wheels)
        assert made.signature is None
        made.verify_wheels()


# -- a flashed board ------------------------------------------------------------------------------


def started(root: RootFileSystem) -> subprocess.CompletedProcess[str]:
    text = (root.path / "etc/systemd/system/fedquilt-agent.service").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    words = shlex.split(line.partition("=")[2])
    moved = [str(root.path) + word if word.startswith(("/opt", "/var")) else word for word in words]
    return subprocess.run(moved, capture_output=True, text=True, cwd="/", check=False)


def test_a_flashed_board_starts_what_was_flashed_or_what_came_over_the_air(tmp_path: Path, make: Make) -> None:
    root = RootFileSystem(plant(tmp_path / "root", python=sys.executable), print_line=lambda line: None)

    def flashed(name: str) -> Path:
        files = {"fedquilt/__init__.py": "", "fedquilt/cli.py": SHOWS.format(name=name)}
        return make(target=HERE, wheels=(wheel(tmp_path / name, "toy", files=files),))

    install_bundle(flashed("first"), root)
    done = started(root)
    assert done.stdout.startswith("first -v agent /etc/fedquilt/agent.toml "), done.stderr
    told = json.loads(done.stdout.split(maxsplit=4)[4])
    versions, identity = root.path / "var/lib/fedquilt-agent", os.readlink(root.path / "opt/fedquilt/current")
    assert (told["folder"], told["flashed"], told["running"]) == (str(versions), identity, "")
    (versions / ("b" * 64) / "bin").mkdir(parents=True)
    program = launcher.python_path(versions, "b" * 64)
    program.write_text("#!/bin/sh\necho second\n")
    program.chmod(0o755)
    launcher.write_choice(versions, VersionChoice(identity, "b" * 64, ""))
    assert started(root).stdout == "second\n"
    install_bundle(flashed("third"), root)
    done = started(root)
    assert done.stdout.startswith("third ")
    assert "flashed again" in done.stderr
    assert started(root).stderr == ""


def test_the_unit_may_write_where_versions_lie(make: Make) -> None:
    board = bundle.BoardFiles("orin-1", {"agent.toml": b""}, None)
    text = bundle.render_units(board)["fedquilt-agent.service"].decode()
    assert "StateDirectory=fedquilt fedquilt-agent\n" in text
    assert "WorkingDirectory" not in text
