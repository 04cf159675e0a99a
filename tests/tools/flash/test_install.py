"""The installer: what it writes into a root, and what it never touches. A root is a folder with two ELF headers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from boards import AARCH64, ARM, HERE, JETSON, X86_64, elf, plant, snapshot, wheel
from ordinary import User

from fedquilt.tools.boards.flash import bundle, own_wheels
from fedquilt.tools.boards.flash import install as installer
from fedquilt.tools.boards.flash.install import InstallRefusedError, RootFileSystem, install_bundle, uninstall

Make = Callable[..., Path]
MINE = (
    "opt/fedquilt/",
    "etc/fedquilt/",
    "etc/systemd/system/fedquilt-",
    "etc/systemd/system/multi-user.target.wants/fedquilt-",
)


def test_everything_lands_in_folders_of_its_own(root: RootFileSystem, make: Make) -> None:
    (root.path / "etc").mkdir()
    (root.path / "etc/hostname").write_text("orin")
    before = snapshot(root.path)
    assert install_bundle(make(), root) > 0
    after = snapshot(root.path)
    assert {name: after[name] for name in before} == before
    new = set(after) - set(before)
    assert len(new) > 10
    assert not {name for name in new if not name.startswith(MINE)}
    wants = "etc/systemd/system/multi-user.target.wants/fedquilt-agent.service"
    assert after[wants] == "link to ../fedquilt-agent.service"
    assert (root.path / wants).resolve().read_text().startswith("[Unit]")


def test_a_second_time_nothing_changes(root: RootFileSystem, make: Make) -> None:
    assert install_bundle(make(), root)
    before = snapshot(root.path)
    assert install_bundle(make(), root) == 0
    assert snapshot(root.path) == before


def test_a_dry_run_says_what_would_be_written_and_writes_nothing(root: RootFileSystem, make: Make) -> None:
    said: list[str] = []
    before = snapshot(root.path)
    would = install_bundle(make(), RootFileSystem(root.path, dry_run=True, print_line=said.append))
    assert snapshot(root.path) == before
    assert "would write /etc/fedquilt/agent.toml" in said
    assert any("would unpack 1 wheels" in line for line in said)
    assert install_bundle(make(), root) == would == len(said)


def test_the_installed_python_finds_the_packages_and_no_others(tmp_path: Path, make: Make) -> None:
    root = RootFileSystem(plant(tmp_path / "board", python=sys.executable), print_line=lambda line: None)
    install_bundle(make(target=HERE), root)
    current = root.path / "opt/fedquilt/current"
    code = "import sys, toy, importlib.metadata as m; print(toy.version, m.version('toy'), sys.prefix); import pytest"
    ran = subprocess.run([current / "bin/python", "-c", code], capture_output=True, text=True, cwd="/")
    assert ran.stdout.split()[:2] == ["1.0", "1.0"]
    assert ran.stdout.split()[2] == str(current)
    assert "No module named 'pytest'" in ran.stderr
    assert (current / "compiled").is_file()
    assert list(current.glob("lib/python*/site-packages/__pycache__/toy*.pyc"))


def test_a_foreign_pythons_files_are_compiled_at_the_first_boot(root: RootFileSystem, make: Make) -> None:
    install_bundle(make(), root)
    assert (root.path / "opt/fedquilt/current/compiled").is_file() == (sys.version_info[:2] == (3, 10))
    assert (
        b"!/opt/fedquilt/current/compiled" in (root.path / "etc/systemd/system/fedquilt-compile.service").read_bytes()
    )


@pytest.mark.parametrize(
    ("number", "name"), [(X86_64, "x86_64"), (ARM, "armv7l"), (0xF3, r"machine 243 of elf\.h")], ids=str
)
def test_another_architecture_is_refused(tmp_path: Path, make: Make, number: int, name: str) -> None:
    root = RootFileSystem(plant(tmp_path / "other", number), print_line=lambda line: None)
    before = snapshot(root.path)
    with pytest.raises(InstallRefusedError, match=f"is {name}, but the bundle is for aarch64"):
        install_bundle(make(), root)
    assert snapshot(root.path) == before


def test_an_elf_header_is_read_in_its_own_byte_order(tmp_path: Path) -> None:
    for name, data, machine in (
        ("little", elf(AARCH64), "aarch64"),
        ("big", elf(AARCH64, big=True), "aarch64"),
        ("script", b"#!/bin/sh\necho a shell script\n", None),
        ("short", b"\x7fELF", None),
    ):
        (tmp_path / name).write_bytes(data)
        assert installer.read_elf_machine(tmp_path / name) == machine
    assert installer.read_elf_machine(tmp_path / "none") is None


def test_a_root_without_the_python_is_told_which_it_has(tmp_path: Path, make: Make) -> None:
    root = RootFileSystem(plant(tmp_path / "newer", python="/usr/bin/python3.12"), print_line=lambda line: None)
    (root.path / "usr/bin/python3.12-config").write_text("")
    with pytest.raises(InstallRefusedError, match=r"has no /usr/bin/python3\.10, but python3\.12: "):
        install_bundle(make(), root)


def test_an_empty_folder_is_no_root(tmp_path: Path, make: Make) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InstallRefusedError, match=r"has no system.*mount it first"):
        install_bundle(make(), RootFileSystem(tmp_path / "empty"))
    assert not list((tmp_path / "empty").iterdir())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        *((name, r"damaged|no whole bundle") for name in ("wheels/toy-1.0-py3-none-any.whl", "etc/agent.toml")),
        *((name, r"damaged|no whole bundle") for name in ("bundle.json", "install.py")),
        ({"format": 99}, "of another version"),
        ({"unpacked_bytes": 10**18}, r"MB free, but 1000000000000 MB are needed"),
    ],
)
def test_a_bundle_that_is_damaged_unknown_or_too_large_is_refused_before_anything_is_written(
    root: RootFileSystem, make: Make, changed: str | dict[str, int], said: str
) -> None:
    bundle = make()
    if isinstance(changed, str):
        data = (bundle / changed).read_bytes()
        (bundle / changed).unlink()
        (bundle / changed).write_bytes(data + b"x")
    else:
        manifest = json.loads((bundle / "bundle.json").read_text())
        (bundle / "bundle.json").write_text(json.dumps({**manifest, **changed}))
    with pytest.raises(InstallRefusedError, match=said):
        install_bundle(bundle, root)
    assert not (root.path / "opt").exists()


def test_links_of_the_root_are_followed_within_it(tmp_path: Path, make: Make) -> None:
    root = RootFileSystem(plant(tmp_path / "root"), print_line=lambda line: None)
    outside = tmp_path / "outside"
    outside.mkdir()
    (root.path / "opt").symlink_to(outside)  # absolute, as the board would see it
    (root.path / "etc").symlink_to("../../outside")  # more ".." than there are folders: the root's own root
    (root.path / outside.relative_to("/")).mkdir(parents=True)
    (root.path / "outside").mkdir()
    assert install_bundle(make(), root)
    assert not list(outside.iterdir())
    assert (root.path / outside.relative_to("/") / "fedquilt/current/pyvenv.cfg").is_file()
    assert (root.path / "outside/fedquilt/agent.toml").is_file()
    assert install_bundle(make(), root) == 0


def test_links_in_circles_are_refused(tmp_path: Path, make: Make) -> None:
    root = RootFileSystem(plant(tmp_path / "root"), print_line=lambda line: None)
    (root.path / "opt").symlink_to("opt")
    with pytest.raises(InstallRefusedError, match="circles"):
        install_bundle(make(), root)


def test_a_wheel_never_writes_beside_its_folder(root: RootFileSystem, make: Make, tmp_path: Path) -> None:
    crooked = wheel(tmp_path / "crooked", "crooked", files={"../../../../../etc/passwd": "root::0:0"})
    with pytest.raises(InstallRefusedError, match="would write outside the environment"):
        install_bundle(make(wheels=(crooked,)), root)
    assert not (root.path / "etc/passwd").exists()
    assert not (root.path / "opt/fedquilt/current").exists()


def test_a_wheels_data_folder_is_sorted(root: RootFileSystem, make: Make, tmp_path: Path) -> None:
    odd = wheel(
        tmp_path / "odd",
        "odd",
        files={"odd-1.0.data/platlib/lib.so": "so", "odd-1.0.data/scripts/run": "x", "odd-1.0.data/headers/h.h": "h"},
    )
    install_bundle(make(wheels=(odd,)), root)
    (site,) = (root.path / "opt/fedquilt/current").resolve().glob("lib/*/site-packages")
    assert (site / "lib.so").read_text() == "so"
    assert not [name for name in snapshot(root.path) if name.endswith(("/run", "/h.h"))]


def test_new_packages_take_the_place_of_the_old(root: RootFileSystem, make: Make, tmp_path: Path) -> None:
    install_bundle(make(), root)
    first = (root.path / "opt/fedquilt/current").readlink()
    install_bundle(make(wheels=(wheel(tmp_path / "newer", "toy", "2.0"),)), root)
    folders = sorted(path.name for path in (root.path / "opt/fedquilt").iterdir())
    second = (root.path / "opt/fedquilt/current").readlink()
    assert second != first
    assert folders == sorted([str(second), "current", "installed.json"])


def test_an_interrupted_installation_is_done_again(root: RootFileSystem, make: Make) -> None:
    bundle = make()
    id = json.loads((bundle / "bundle.json").read_text())["id"]
    (root.path / f"opt/fedquilt/{id}.new/lib").mkdir(parents=True)
    install_bundle(bundle, root)
    assert sorted(p.name for p in (root.path / "opt/fedquilt").iterdir()) == sorted([id, "current", "installed.json"])


def test_secrets_are_for_root_alone(root: RootFileSystem, make: Make) -> None:
    bundle = make({"agent.toml": b"", "device.key": b"k", "device.crt": b"c", "password": b"p"})
    install_bundle(bundle, root)

    def modes() -> dict[str, int]:
        return {path.name: path.stat().st_mode & 0o777 for path in (root.path / "etc/fedquilt").iterdir()}

    assert modes() == {"agent.toml": 0o644, "device.key": 0o600, "device.crt": 0o644, "password": 0o600}
    (root.path / "etc/fedquilt/device.key").chmod(0o644)
    assert install_bundle(bundle, root) == 1
    assert modes()["device.key"] == 0o600


def test_what_was_edited_on_the_board_is_kept_beside_the_new(root: RootFileSystem, make: Make) -> None:
    install_bundle(make({"agent.toml": b"a"}), root)
    install_bundle(make({"agent.toml": b"b"}), root)
    assert not (root.path / "etc/fedquilt/agent.toml.old").exists()
    (root.path / "etc/fedquilt/agent.toml").write_bytes(b"by hand")
    install_bundle(make({"agent.toml": b"c"}), root)
    assert (root.path / "etc/fedquilt/agent.toml").read_bytes() == b"c"
    assert (root.path / "etc/fedquilt/agent.toml.old").read_bytes() == b"by hand"


def test_a_used_token_is_not_brought_back(root: RootFileSystem, make: Make) -> None:
    etc = root.path / "etc/fedquilt"
    install_bundle(make({"token": b"one"}), root)
    assert (etc / "token").read_bytes() == b"one"
    assert (etc / "token").stat().st_mode & 0o777 == 0o600
    (etc / "token").unlink()
    assert install_bundle(make({"token": b"one"}), root) == 0
    install_bundle(make({"token": b"two"}), root)
    assert (etc / "token").read_bytes() == b"two"


def test_a_unit_that_is_no_more_wanted_goes(root: RootFileSystem, make: Make) -> None:
    units = root.path / "etc/systemd/system"
    links = (
        units / "multi-user.target.wants/fedquilt-enrol.service",
        units / "timers.target.wants/fedquilt-enrol.timer",
    )
    install_bundle(make(enrols=True), root)
    assert all(link.resolve().is_file() for link in links)
    install_bundle(make(), root)
    assert not list(units.glob("fedquilt-enrol.*"))
    assert not any(link.is_symlink() for link in links)


def test_uninstalling_leaves_the_identity_and_purging_leaves_nothing(root: RootFileSystem, make: Make) -> None:
    before = snapshot(root.path)
    bundle = make({"agent.toml": b"a", "device.key": b"k"})
    install_bundle(bundle, root)
    (root.path / "var/lib/fedquilt").mkdir(parents=True)
    (root.path / "var/lib/fedquilt/outbox").write_text("an update")
    (root.path / "etc/systemd/system/other.service").write_text("other")
    assert uninstall(RootFileSystem(root.path, dry_run=True, print_line=lambda line: None)) == 9
    assert uninstall(root) == 9
    left = set(snapshot(root.path)) - set(before)
    assert left == {
        "etc/fedquilt/agent.toml",
        "etc/fedquilt/device.key",
        "var/lib/fedquilt/outbox",
        "etc/systemd/system/other.service",
    }
    assert uninstall(root, purge=True) == 2
    assert set(snapshot(root.path)) - set(before) == {"etc/systemd/system/other.service"}
    assert uninstall(root, purge=True) == 0


def test_the_script_installs_into_a_root_from_what_is_in_the_bundle_alone(tmp_path: Path, make: Make) -> None:
    root = plant(tmp_path / "board", python=sys.executable)
    script = make(target=HERE) / "install.sh"
    command = ["sh", str(script), "--root", str(root)]
    env = {"PATH": "/usr/bin:/bin"}
    first = subprocess.run(command, capture_output=True, text=True, env=env, cwd="/")
    assert first.returncode == 0, first.stderr
    assert "write /etc/fedquilt/agent.toml" in first.stdout
    again = subprocess.run(command, capture_output=True, text=True, env=env, cwd="/")
    assert again.stdout == "no changes: installed already\n"
    wrong = subprocess.run([*command[:-1], str(plant(tmp_path / "x", X86_64))], capture_output=True, text=True, env=env)
    assert wrong.returncode == 2
    assert "is x86_64, but the bundle is for aarch64" in wrong.stderr
    out = subprocess.run([*command, "--uninstall", "--purge"], capture_output=True, text=True, env=env)
    assert "removed" in out.stdout or "remove /opt/fedquilt" in out.stdout
    assert not (root / "opt/fedquilt").exists()


def test_the_script_on_a_board_without_such_a_python_says_so(make: Make, tmp_path: Path) -> None:
    script = make(target=JETSON) / "install.sh"
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python3").write_text("#!/bin/sh\nexit 1\n")
    (programs / "python3").chmod(0o755)
    (programs / "dirname").symlink_to("/usr/bin/dirname")
    script.write_text(script.read_text().replace("/usr/bin/python3.10", "/nowhere/python3.10"))
    ran = subprocess.run(["/bin/sh", str(script)], capture_output=True, text=True, env={"PATH": str(programs)})
    assert ran.returncode == 2
    assert "needs /nowhere/python3.10, which is not here or too old" in ran.stderr


def runs(current: Path, etc: Path, settings: bytes, home: Path, packages: str, root: bool) -> list[str]:
    assert (etc / "agent.toml").read_bytes() == settings
    if root:
        with pytest.raises(PermissionError):
            (etc / "device.key").read_bytes()
    code = "import fedquilt.cli, sys; print(fedquilt.__file__); fedquilt.cli.main(['agent', sys.argv[1]])"
    ran = subprocess.run(
        [current / "bin/python", "-c", code, etc / "agent.toml"],
        env={"PYTHONPATH": packages, "HOME": str(home)},
        capture_output=True,
        text=True,
    )
    return [ran.stdout.strip(), ran.stderr]


def test_an_ordinary_user_runs_what_was_installed(user: User, tmp_path: Path) -> None:
    files = {"agent.toml": b'device = "d"\nhome = "/var/lib/fedquilt"\n', "device.key": b"k"}
    house = (own_wheels.build_own_wheel(tmp_path),)
    folder = tmp_path / "bundle"
    bundle.write_folder(
        bundle.collect_files(bundle.BoardFiles("orin-1", files, 1_000_000_000, False), HERE, house), folder
    )
    root = RootFileSystem(plant(user.folder / "board", python=sys.executable), print_line=lambda line: None)
    before = os.umask(0o077)
    try:
        install_bundle(folder, root)
    finally:
        os.umask(before)
    current, etc = root.path / "opt/fedquilt/current", root.path / "etc/fedquilt"
    packages = os.pathsep.join(place for place in sys.path if (Path(place) / "msgspec").is_dir())
    where, said = user.does(runs, current, etc, files["agent.toml"], user.home, packages, user.root)
    assert Path(where).is_relative_to(current)
    assert "/var/lib/fedquilt" in said
    assert "Traceback" not in said
