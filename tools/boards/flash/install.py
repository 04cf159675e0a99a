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

PROGRAM_FOLDER, SETTINGS_FOLDER, UNIT_FOLDER, STATE_FOLDERS = (
    "opt/fedquilt",
    "etc/fedquilt",
    "etc/systemd/system",
    tuple(f"var/lib/fedquilt{name}" for name in ("", "-agent", "-clocks", "-models", "-ca")),
)
WANTS_FOLDERS = {
    f".{kind}": f"{UNIT_FOLDER}/{target}.target.wants"
    for kind, target in (("service", "multi-user"), ("timer", "timers"), ("path", "paths"))
}
INSTALLATION_RECORD = f"{PROGRAM_FOLDER}/installed.json"
# files of a bundle that stay on the board
INSTALLER_FILES = ("install.py", "environment.py", "launch.py", "sysusers.conf")
MACHINES = {0xB7: "aarch64", 0x3E: "x86_64", 0x28: "armv7l", 0x03: "i686"}  # e_machine, elf(5)
FORMAT = 1


class InstallRefusedError(Exception): ...


class RootFileSystem:
    """A root file system. Paths are relative to the root, and changes are printed.

    Args:
        path: Folder of the root.
        dry_run: Whether to print changes without making them.
        print_line: Function that prints a line.
    """

    def __init__(self, path: str | Path, dry_run: bool = False, print_line: Callable[[str], None] = print) -> None:
        self.path, self.dry_run, self.print_line = Path(path).resolve(), dry_run, print_line
        self.changes = 0

    def resolve(self, name: str | PurePosixPath, max_links: int = 20) -> Path:
        """Return the real path of a name, with links resolved inside this root. Refuse a loop of links."""
        resolved, remaining_parts = self.path, list(PurePosixPath(name).parts)
        while remaining_parts:
            part = remaining_parts.pop(0)
            if part == "/":
                resolved = self.path
            elif part == "..":
                resolved = resolved.parent if resolved != self.path else resolved
            elif (resolved / part).is_symlink():
                max_links -= 1
                if max_links < 0:
                    raise InstallRefusedError(f"symbolic links at /{name} in {self.path} form a loop: remove one")
                remaining_parts = list(PurePosixPath(os.readlink(resolved / part)).parts) + remaining_parts
            else:
                resolved = resolved / part
        return resolved

    def path_for(self, name: str) -> Path:
        """Return the real path of a name. A link at its end is not followed."""
        path = PurePosixPath(name)
        return self.resolve(path.parent) / path.name

    def record_change(self, change: str) -> bool:
        """Count and print a change. Return False in a dry run, where the caller must not make the change."""
        self.changes += 1
        self.print_line(f"would {change}" if self.dry_run else change)
        return not self.dry_run

    def write_file(self, name: str, data: bytes, mode: int = 0o644) -> bool:
        """Write a file atomically, or only print in a dry run. Return False if content and mode are the same."""
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
            temporary = path.with_name(path.name + ".new")
            temporary.unlink(missing_ok=True)
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(data)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            temporary.replace(path)
        return True

    def create_symlink(self, name: str, to: str) -> bool:
        """Create a link, replacing a file, or only print in a dry run. Return False if the link exists."""
        path = self.path_for(name)
        if path.is_symlink() and os.readlink(path) == to:
            return False
        if self.record_change(f"link /{name} to {to}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(path.name + ".new")
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(to)
            temporary.replace(path)
        return True

    def remove_path(self, name: str) -> bool:
        """Remove a file, link or folder, or only print in a dry run. Return False if there is none."""
        path = self.path_for(name)
        if not path.is_symlink() and not path.exists():
            return False
        if self.record_change(f"remove /{name}"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        return True

    def read_json_or_empty(self, name: str) -> dict[str, Any]:
        try:
            return json.loads(self.path_for(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}


# -- compatibility --------------------------------------------------------------------------------


def read_elf_machine(path: Path) -> str | None:
    """Return a program's machine type as by `uname -m`, or None if the file is missing or no ELF file."""
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
    """Raise InstallRefusedError unless a root's system has the manifest's machine type and Python."""
    python, required = manifest["interpreter"], manifest["machine"]
    description = "this board" if root.path == Path("/") else str(root.path)
    program_paths = [root.resolve(name) for name in (python.lstrip("/"), "bin/sh", "usr/bin/env", "sbin/init")]
    machine = next((name for name in map(read_elf_machine, program_paths) if name is not None), None)
    if machine is None:
        raise InstallRefusedError(
            f"{description} has no system (neither {python} nor /bin/sh is a program): mount it first"
        )
    if machine != required:
        raise InstallRefusedError(
            f"{description} is {machine}, but the bundle is for {required}: build one with the board's --target"
        )
    if read_elf_machine(root.resolve(python.lstrip("/"))) is None:
        others = sorted(path.name for path in root.resolve("usr/bin").glob("python3.[0-9]*") if "-" not in path.name)
        raise InstallRefusedError(
            f"{description} has no {python}{', but ' + ', '.join(others) if others else ''}: build the bundle with "
            "another --python"
        )


def read_manifest(bundle: Path) -> dict[str, Any]:
    """Return a bundle's manifest, or raise InstallRefusedError if a file is damaged or missing."""
    try:
        manifest = json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise InstallRefusedError(f"{bundle} is of another version of fedquilt: install it with its own install.sh")
        for name, digest in manifest["files"].items():
            if hashlib.sha256((bundle / name).read_bytes()).hexdigest() != digest:
                raise InstallRefusedError(f"{name} of the bundle is damaged: copy it again")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InstallRefusedError(f"{bundle} is not a complete bundle ({error}): copy it again") from None
    return manifest


# -- install and uninstall ------------------------------------------------------------------------


def install_bundle(bundle: Path, root: RootFileSystem, *, start: bool = True) -> int:
    """Install a bundle into a root. Return the number of changes, or raise InstallRefusedError.

    With `start`, the units are started if the root is this machine.
    """
    manifest = read_manifest(bundle)
    check_compatibility(root, manifest)
    mask = os.umask(0o022)  # an administrator's 077 would shut the new folders to the agent's user
    try:
        return _install_and_start(bundle, root, manifest, start)
    finally:
        os.umask(mask)


def _install_and_start(bundle: Path, root: RootFileSystem, manifest: Mapping[str, Any], start: bool) -> int:
    changes_before = root.changes
    _install_packages(bundle, root, manifest)
    _remove_other_packages(root, manifest["id"])
    _install_settings(bundle, root, manifest)
    units = sorted(name.split("/")[1] for name in manifest["files"] if name.startswith("units/"))
    for unit in units:
        root.write_file(f"{UNIT_FOLDER}/{unit}", (bundle / "units" / unit).read_bytes())
        root.create_symlink(f"{WANTS_FOLDERS[Path(unit).suffix]}/{unit}", f"../{unit}")
    for unit in set(root.read_json_or_empty(INSTALLATION_RECORD).get("units", ())) - set(units):
        _remove_unit(root, unit)
    record = {"version": manifest["version"], "device": manifest["device"], "id": manifest["id"], "units": units}
    record["settings"] = {name: digest for name, digest in manifest["files"].items() if name.startswith("etc/")}
    root.write_file(INSTALLATION_RECORD, (json.dumps(record, indent=1, sort_keys=True) + "\n").encode())
    changes = root.changes - changes_before
    if root.path == Path("/") and start and not root.dry_run:
        _start_units(units, root.print_line, has_changed=changes > 0)
    return changes


def _install_packages(bundle: Path, root: RootFileSystem, manifest: Mapping[str, Any]) -> None:
    home = f"{PROGRAM_FOLDER}/{manifest['id']}"
    if not (root.path_for(home) / "bundle.json").is_file():
        _require_free_space(root, manifest["unpacked_bytes"])
        if root.record_change(f"unpack {len(manifest['wheels'])} wheels into /{home}"):
            _unpack_environment(bundle, root.path_for(home), manifest)
    root.create_symlink(f"{PROGRAM_FOLDER}/current", manifest["id"])


def _remove_other_packages(root: RootFileSystem, id: str) -> None:
    folder = root.path_for(PROGRAM_FOLDER)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name not in ("current", "installed.json", id):
            root.remove_path(f"{PROGRAM_FOLDER}/{path.name}")


def _unpack_environment(bundle: Path, home: Path, manifest: Mapping[str, Any]) -> None:
    # a virtual environment without running Python: the board's Python may not run on this machine
    temporary = home.with_name(home.name + ".new")
    shutil.rmtree(temporary, ignore_errors=True)
    wheels = [(name, bundle / "wheels" / name) for name in manifest["wheels"]]
    try:
        virtual_environment.unpack_wheels(
            wheels, virtual_environment.packages_folder(temporary, manifest["python"]), manifest["unpacked_bytes"]
        )
    except virtual_environment.InvalidWheelError as error:
        raise InstallRefusedError(str(error)) from None
    virtual_environment.make_environment(temporary, manifest["python"], manifest["interpreter"])
    for name in INSTALLER_FILES:
        shutil.copy(bundle / name, temporary / name)
    if virtual_environment.compile_packages(temporary, manifest["python"], f"/{PROGRAM_FOLDER}/current"):
        (temporary / "compiled").touch()  # else fedquilt-compile.service does it at the first boot
    shutil.copy(bundle / "bundle.json", temporary / "bundle.json")
    virtual_environment.set_public_modes(temporary)
    temporary.replace(home)


def _require_free_space(root: RootFileSystem, needed_bytes: int) -> None:
    folder = root.resolve(PROGRAM_FOLDER)
    while not folder.exists():
        folder = folder.parent
    free_disk_bytes = shutil.disk_usage(folder).free
    if free_disk_bytes < needed_bytes:
        raise InstallRefusedError(
            f"{folder} has {free_disk_bytes / 1e6:.0f} MB free, but {needed_bytes / 1e6:.0f} MB are needed: free space"
        )


def _install_settings(bundle: Path, root: RootFileSystem, manifest: Mapping[str, Any]) -> None:
    if not root.path_for(SETTINGS_FOLDER).is_dir() and root.record_change(f"make /{SETTINGS_FOLDER}"):
        root.path_for(SETTINGS_FOLDER).mkdir(parents=True)
        root.path_for(SETTINGS_FOLDER).chmod(0o755)
    installed = root.read_json_or_empty(INSTALLATION_RECORD).get("settings", {})
    for name, digest in sorted(manifest["files"].items()):
        if not name.startswith("etc/"):
            continue
        data, target = (bundle / name).read_bytes(), f"{SETTINGS_FOLDER}/{name[4:]}"
        if name == "etc/token" and installed.get(name) == digest:
            continue  # the token was installed before, and is valid once
        path, mode = root.path_for(target), 0o600 if name in manifest["secret"] else 0o644
        if (
            path.is_file()
            and name in installed
            and hashlib.sha256(path.read_bytes()).hexdigest() not in (installed[name], digest)
        ):
            root.write_file(f"{target}.old", path.read_bytes(), mode)
        root.write_file(target, data, mode)


def uninstall(root: RootFileSystem, *, purge: bool = False) -> int:
    """Remove the installation, with `purge` also settings and state. Return the number of changes."""
    old_changes = root.changes
    unit_folder = root.path_for(UNIT_FOLDER)
    units = {path.name for path in unit_folder.glob("fedquilt-*")} if unit_folder.is_dir() else set()
    if root.path == Path("/") and units and not root.dry_run:
        _run_systemctl("stop", *sorted(units))
    for unit in sorted(units):
        _remove_unit(root, unit)
    for name in (PROGRAM_FOLDER, *((SETTINGS_FOLDER, *STATE_FOLDERS) if purge else ())):
        root.remove_path(name)
    if root.path == Path("/") and units and not root.dry_run:
        _run_systemctl("daemon-reload")
    if not purge and root.path_for(SETTINGS_FOLDER).is_dir():
        root.print_line(
            f"kept: /{SETTINGS_FOLDER} and /{STATE_FOLDERS[0]}, with the board's identity (--purge removes them)"
        )
    return root.changes - old_changes


def _remove_unit(root: RootFileSystem, unit: str) -> None:
    root.remove_path(f"{WANTS_FOLDERS[Path(unit).suffix]}/{unit}")
    root.remove_path(f"{UNIT_FOLDER}/{unit}")


def _start_units(units: Sequence[str], print_line: Callable[[str], None], *, has_changed: bool) -> None:
    if not Path("/run/systemd/system").is_dir():
        command = "/opt/fedquilt/current/bin/fedquilt agent /etc/fedquilt/agent.toml"
        print_line(f"systemd is not running: start the agent with {command}")
        return
    _run_systemctl("daemon-reload")
    _run_systemctl("restart" if has_changed else "start", "--no-block", *units)
    name = "fedquilt-serve" if "fedquilt-serve.service" in units else "fedquilt-agent"
    print_line(f"started; `journalctl -fu {name}` shows what it does")


def _run_systemctl(*arguments: str) -> None:
    subprocess.run(["systemctl", *arguments], check=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Install or uninstall. Return 0, 2 for a refused bundle, or 6 for missing rights or disk errors."""
    parser = argparse.ArgumentParser(prog="install.sh", description="Put fedquilt's agent onto this board.")
    parser.add_argument("--root", default="/", help="a mounted root file system instead of this board's")
    parser.add_argument("--dry-run", action="store_true", help="print changes without making them")
    parser.add_argument("--no-start", action="store_true", help="do not start the services")
    parser.add_argument("--uninstall", action="store_true", help="remove fedquilt")
    parser.add_argument("--purge", action="store_true", help="with --uninstall: also settings, identity and state")
    options = parser.parse_args(arguments)
    root = RootFileSystem(options.root, options.dry_run)
    if root.path == Path("/") and os.geteuid() != 0 and not options.dry_run:
        print("fedquilt: root rights are missing: sudo sh install.sh", file=sys.stderr)
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
        return "no changes: installed already"
    return f"{changes} changes {'would be' if dry_run else 'were'} made"


if __name__ == "__main__":
    sys.exit(main())
