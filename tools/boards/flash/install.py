"""Installer of a bundle into a root file system. Standard library only.

The installer is part of the bundle and runs with the board's Python, without pip and network: a wheel is an archive,
and a virtual environment consists of a few links. All files are in fedquilt's own folders, or are units:

    /opt/fedquilt/ID/       Python packages, with the hash of their content as ID; `current` links to the active ID
    /etc/fedquilt/          agent.toml, files for the broker, the board's identity
    /etc/systemd/system/    fedquilt-*.service, fedquilt-enrol.timer, fedquilt-serve-model.path
    /var/lib/fedquilt-agent/  versions of the agent from over-the-air upgrades; launch.py starts the active version

A second installation changes nothing. A file edited on the board is kept as NAME.old beside the new file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from fedquilt.host import virtual_environment
else:
    import environment as virtual_environment  # on a board the module is in the folder of this file

OPT, ETC, UNITS, STATE = (
    "opt/fedquilt",
    "etc/fedquilt",
    "etc/systemd/system",
    tuple(f"var/lib/fedquilt{name}" for name in ("", "-agent", "-clocks", "-models", "-ca")),
)
WANTS = {
    f".{kind}": f"{UNITS}/{target}.target.wants"
    for kind, target in (("service", "multi-user"), ("timer", "timers"), ("path", "paths"))
}
INSTALLED = f"{OPT}/installed.json"
BROUGHT = ("install.py", "environment.py", "launch.py", "sysusers.conf")  # files of a bundle that stay on the board
MACHINES = {0xB7: "aarch64", 0x3E: "x86_64", 0x28: "armv7l", 0x03: "i686"}  # e_machine, elf(5)
FORMAT = 1


class InstallRefusedError(Exception): ...


class RootFileSystem:
    """A root file system. Paths are relative to the root, and changes are printed.

    Args:
        path: Folder of the root.
        dry_run: Whether to print changes without making them.
        say: Function that prints a line.
    """

    def __init__(self, path: str | Path, dry_run: bool = False, say: Callable[[str], None] = print) -> None:
        self.path, self.dry_run, self.say = Path(path).resolve(), dry_run, say
        self.changes = 0

    def resolve(self, name: str | PurePosixPath, links: int = 20) -> Path:
        """Return the real path of a name, with links resolved inside this root."""
        done, waiting = self.path, list(PurePosixPath(name).parts)
        while waiting:
            part = waiting.pop(0)
            if part == "/":
                done = self.path
            elif part == "..":
                done = done.parent if done != self.path else done
            elif (done / part).is_symlink():
                links -= 1
                if links < 0:
                    raise InstallRefusedError(f"links go in circles at /{name} in {self.path}")
                waiting = list(PurePosixPath(os.readlink(done / part)).parts) + waiting
            else:
                done = done / part
        return done

    def path_for(self, name: str) -> Path:
        path = PurePosixPath(name)
        return self.resolve(path.parent) / path.name

    def record_change(self, what: str) -> bool:
        """Count and print a change. Return False in a dry run, where the caller must not make the change."""
        self.changes += 1
        self.say(f"would {what}" if self.dry_run else what)
        return not self.dry_run

    def write_file(self, name: str, data: bytes, mode: int = 0o644) -> bool:
        """Write a file atomically. Return False if the same content and mode existed already."""
        path = self.path_for(name)
        if (
            path.is_file()
            and not path.is_symlink()
            and path.read_bytes() == data
            and path.stat().st_mode & 0o777 == mode
        ):
            return False
        if self.record_change(f"write /{name}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(path.name + ".new")
            new.unlink(missing_ok=True)
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(data)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            new.replace(path)
        return True

    def create_symlink(self, name: str, to: str) -> bool:
        path = self.path_for(name)
        if path.is_symlink() and os.readlink(path) == to:
            return False
        if self.record_change(f"link /{name} to {to}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(path.name + ".new")
            new.unlink(missing_ok=True)
            new.symlink_to(to)
            new.replace(path)
        return True

    def remove_path(self, name: str) -> bool:
        path = self.path_for(name)
        if not path.is_symlink() and not path.exists():
            return False
        if self.record_change(f"remove /{name}"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        return True

    def read_json(self, name: str) -> dict[str, Any]:
        try:
            return json.loads(self.path_for(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}


# -- what is asked of a board ---------------------------------------------------------------------


def read_elf_machine(path: Path) -> str | None:
    try:
        with open(path, "rb") as file:
            head = file.read(20)
    except OSError:
        return None
    if len(head) < 20 or head[:4] != b"\x7fELF":
        return None
    number = struct.unpack("<H" if head[5] == 1 else ">H", head[18:20])[0]
    return MACHINES.get(number, f"machine {number} of elf.h")


def check_compatibility(root: RootFileSystem, manifest: Mapping[str, Any]) -> None:
    python, wanted = manifest["interpreter"], manifest["machine"]
    where = "this board" if root.path == Path("/") else str(root.path)
    shells = [root.resolve(name) for name in (python.lstrip("/"), "bin/sh", "usr/bin/env", "sbin/init")]
    found = next((name for name in map(read_elf_machine, shells) if name is not None), None)
    if found is None:
        raise InstallRefusedError(f"{where} holds no system: neither {python} nor /bin/sh is a program; mount it first")
    if found != wanted:
        raise InstallRefusedError(
            f"{where} is {found}, and this bundle for {wanted}: build one with the --target of that board"
        )
    if read_elf_machine(root.resolve(python.lstrip("/"))) is None:
        others = sorted(path.name for path in root.resolve("usr/bin").glob("python3.[0-9]*") if "-" not in path.name)
        raise InstallRefusedError(
            f"{where} has no {python}{' but ' + ', '.join(others) if others else ''}: build the bundle with the "
            "--python that is there"
        )


def read_manifest(bundle: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise InstallRefusedError(f"{bundle} is of another release of fedquilt: install it with its own install.sh")
        for name, digest in manifest["files"].items():
            if hashlib.sha256((bundle / name).read_bytes()).hexdigest() != digest:
                raise InstallRefusedError(f"{name} of the bundle is damaged: copy it again")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InstallRefusedError(f"{bundle} is no whole bundle ({error}): copy it again") from None
    return manifest


# -- install and uninstall ------------------------------------------------------------------------


def install_bundle(bundle: Path, root: RootFileSystem, *, start: bool = True) -> int:
    """Install a bundle into a root. Return the number of changes."""
    manifest = read_manifest(bundle)
    check_compatibility(root, manifest)
    mask = os.umask(0o022)  # an administrator's 077 would shut the new folders to the agent's user
    try:
        return _install_and_start(bundle, root, manifest, start)
    finally:
        os.umask(mask)


def _install_and_start(bundle: Path, root: RootFileSystem, manifest: Mapping[str, Any], start: bool) -> int:
    before = root.changes
    _install_packages(bundle, root, manifest)
    _install_settings(bundle, root, manifest)
    units = sorted(name.split("/")[1] for name in manifest["files"] if name.startswith("units/"))
    for unit in units:
        root.write_file(f"{UNITS}/{unit}", (bundle / "units" / unit).read_bytes())
        root.create_symlink(f"{WANTS[Path(unit).suffix]}/{unit}", f"../{unit}")
    for unit in set(root.read_json(INSTALLED).get("units", ())) - set(units):
        _remove_unit(root, unit)
    note = {"version": manifest["version"], "device": manifest["device"], "id": manifest["id"], "units": units}
    note["settings"] = {name: digest for name, digest in manifest["files"].items() if name.startswith("etc/")}
    root.write_file(INSTALLED, (json.dumps(note, indent=1, sort_keys=True) + "\n").encode())
    changes = root.changes - before
    if root.path == Path("/") and start and not root.dry_run:
        _start_units(units, root.say, changed=changes > 0)
    return changes


def _install_packages(bundle: Path, root: RootFileSystem, manifest: Mapping[str, Any]) -> None:
    home = f"{OPT}/{manifest['id']}"
    if not (root.path_for(home) / "bundle.json").is_file():
        _require_free_space(root, manifest["unpacked_bytes"])
        if root.record_change(f"unpack {len(manifest['wheels'])} wheels into /{home}"):
            _unpack_environment(bundle, root.path_for(home), manifest)
    root.create_symlink(f"{OPT}/current", manifest["id"])
    keep = {"current", "installed.json", manifest["id"]}
    folder = root.path_for(OPT)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name not in keep:
            root.remove_path(f"{OPT}/{path.name}")


def _unpack_environment(bundle: Path, home: Path, manifest: Mapping[str, Any]) -> None:
    # a virtual environment without running Python: the board's Python may not run on this machine
    new = home.with_name(home.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    wheels = [(name, bundle / "wheels" / name) for name in manifest["wheels"]]
    try:
        virtual_environment.unpack_wheels(
            wheels, virtual_environment.packages_folder(new, manifest["python"]), manifest["unpacked_bytes"]
        )
    except virtual_environment.InvalidWheelError as error:
        raise InstallRefusedError(str(error)) from None
    virtual_environment.make_environment(new, manifest["python"], manifest["interpreter"])
    for name in BROUGHT:
        shutil.copy(bundle / name, new / name)
    if virtual_environment.compile_packages(new, manifest["python"], f"/{OPT}/current"):
        (new / "compiled").touch()  # else fedquilt-compile.service does it at the first boot
    shutil.copy(bundle / "bundle.json", new / "bundle.json")
    virtual_environment.make_world_readable(new)
    new.replace(home)


def _require_free_space(root: RootFileSystem, needed: int) -> None:
    folder = root.resolve(OPT)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise InstallRefusedError(
            f"{folder} has {free / 1e6:.0f} MB free, and {needed / 1e6:.0f} MB are needed: make room"
        )


def _install_settings(bundle: Path, root: RootFileSystem, manifest: Mapping[str, Any]) -> None:
    if not root.path_for(ETC).is_dir() and root.record_change(f"make /{ETC}"):
        root.path_for(ETC).mkdir(parents=True)
        root.path_for(ETC).chmod(0o755)
    was = root.read_json(INSTALLED).get("settings", {})
    for name, digest in sorted(manifest["files"].items()):
        if not name.startswith("etc/"):
            continue
        data, at = (bundle / name).read_bytes(), f"{ETC}/{name[4:]}"
        if name == "etc/token" and was.get(name) == digest:
            continue  # it was brought before, and works once
        path, mode = root.path_for(at), 0o600 if name in manifest["secret"] else 0o644
        if path.is_file() and name in was and hashlib.sha256(path.read_bytes()).hexdigest() not in (was[name], digest):
            root.write_file(f"{at}.old", path.read_bytes(), mode)
        root.write_file(at, data, mode)


def uninstall(root: RootFileSystem, *, purge: bool = False) -> int:
    """Remove the installation from a root. Return the number of changes."""
    before = root.changes
    units = {path.name for path in root.path_for(UNITS).glob("fedquilt-*")} if root.path_for(UNITS).is_dir() else set()
    if root.path == Path("/") and units and not root.dry_run:
        _run_systemctl("stop", *sorted(units))
    for unit in sorted(units):
        _remove_unit(root, unit)
    for name in (OPT, *((ETC, *STATE) if purge else ())):
        root.remove_path(name)
    if root.path == Path("/") and units and not root.dry_run:
        _run_systemctl("daemon-reload")
    if not purge and root.path_for(ETC).is_dir():
        root.say(f"kept: /{ETC} and /{STATE[0]}, with the board's identity (--purge removes them)")
    return root.changes - before


def _remove_unit(root: RootFileSystem, unit: str) -> None:
    root.remove_path(f"{WANTS[Path(unit).suffix]}/{unit}")
    root.remove_path(f"{UNITS}/{unit}")


def _start_units(units: Sequence[str], say: Callable[[str], None], *, changed: bool) -> None:
    if not Path("/run/systemd/system").is_dir():
        say("systemd does not run here: /opt/fedquilt/current/bin/fedquilt agent /etc/fedquilt/agent.toml is the agent")
        return
    _run_systemctl("daemon-reload")
    _run_systemctl("restart" if changed else "start", "--no-block", *units)
    name = "fedquilt-serve" if "fedquilt-serve.service" in units else "fedquilt-agent"
    say(f"started; `journalctl -fu {name}` shows what it does")


def _run_systemctl(*arguments: str) -> None:
    subprocess.run(["systemctl", *arguments], check=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Install or uninstall. Return 0, 2 for a refused bundle, or 6 for missing rights or disk errors."""
    parser = argparse.ArgumentParser(prog="install.sh", description="Put fedquilt's agent onto this board.")
    parser.add_argument("--root", default="/", help="a mounted root file system instead of this board's")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    parser.add_argument("--no-start", action="store_true", help="start nothing now")
    parser.add_argument("--uninstall", action="store_true", help="take fedquilt out again")
    parser.add_argument("--purge", action="store_true", help="with --uninstall: settings, identity and state as well")
    options = parser.parse_args(arguments)
    root = RootFileSystem(options.root, options.dry_run)
    if root.path == Path("/") and os.geteuid() != 0 and not options.dry_run:
        print("fedquilt: this needs root: sudo sh install.sh", file=sys.stderr)
        return 6
    try:
        if options.uninstall:
            changes = uninstall(root, purge=options.purge)
        else:
            changes = install_bundle(Path(__file__).resolve().parent, root, start=not options.no_start)
    except InstallRefusedError as error:
        print(f"fedquilt: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"fedquilt: {error.strerror}: {error.filename}", file=sys.stderr)
        return 6
    print(describe_changes(changes, options.dry_run))
    return 0


def describe_changes(changes: int, dry_run: bool) -> str:
    if not changes:
        return "nothing to do: all is so already"
    return f"{changes} things {'would change' if dry_run else 'changed'}"


if __name__ == "__main__":
    sys.exit(main())
