"""Installation of fedquilt on boards from the operator's machine (`fedquilt board flash`).

`bundle` builds one bundle and `install` installs it: into a mounted root file system, into a disk image (`image`), onto
a running board through ssh, or from an archive on the board. `fleet` does this for every board of a table.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import msgspec

import fedquilt
from fedquilt.console import progress
from fedquilt.core import JobError, LinkError
from fedquilt.edge_agent.upgrade import archive
from fedquilt.edge_agent.upgrade.archive import UpgradeManifest
from fedquilt.tools.boards import targets
from fedquilt.tools.boards.flash import bundle, image, install, wheels
from fedquilt.tools.boards.flash.bundle import CoordinatorFiles
from fedquilt.tools.boards.flash.install import InstallRefusedError
from fedquilt.tools.boards.flash.own_wheels import OwnWheel

Say = Callable[[str], None]


@dataclass(frozen=True)
class FlashDestination:
    rootfs: Path | None = None
    image: Path | None = None  # that is copied; the copy gets fedquilt
    out: Path | None = None  # the copy, or without a destination an archive; None: fedquilt-DEVICE.img or .tar
    ssh: str | None = None
    dry_run: bool = False


@dataclass(frozen=True)
class FlashContent:
    target: str
    settings: Path = Path()  # none for an upgrade
    device: str | None = None
    budget: str | None = None
    labels: tuple[str, ...] | None = None
    token: Path | None = None
    extras: tuple[str, ...] = ("onnx",)
    python: str | None = None
    role: str = "agent"  # or "coordinator"


def flash_board(what: FlashContent, where: FlashDestination, say: Say = print) -> None:
    """Build a board's bundle and install or write it at its destination."""
    target = targets.find_target(what.target, what.python)
    board: bundle.BoardFiles | CoordinatorFiles
    if what.role == "coordinator":
        board = bundle.read_coordinator_files(what.settings)
    else:
        board = bundle.read_board_files(what.settings, what.device, what.token, what.budget, what.labels)
        if board.enrols and not board.files.keys() & {"token", "device.crt"}:
            say(
                f"without --token {board.device} enrols only if it was enrolled before: "
                f"`fedquilt identity token {board.device} --out FILE` makes one"
            )
    asked = {"interpreter": target.interpreter, "machine": target.machine}
    try:
        with ExitStack() as stack:
            root = None if where.rootfs is None else _open_mounted_root(where, say)
            copied = None
            if where.image is not None:
                out = where.out or Path(f"fedquilt-{board.device}.img")
                copied = stack.enter_context(image.open_image_copy(where.image, out, target.interpreter, say))
                root = copied.root
                root.dry_run = where.dry_run
            if root is not None:
                install.check_compatibility(root, asked)
            host = None if where.ssh is None else SshHost(where.ssh)
            user_is_root = host is not None and host.check_board(target.machine, target.interpreter)
            files = _collect_bundle_files(what, target, board, say)
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedquilt-")))
            if root is not None:
                bundle.write_folder(files, scratch / TOP)
                changes = install.install_bundle(scratch / TOP, root)
                say(install.describe_changes(changes, where.dry_run))
                if copied is not None and not where.dry_run:
                    copied.save_image()
            elif host is not None:
                bundle.write_archive(files, scratch / "bundle.tar", TOP)
                host.install_archive(scratch / "bundle.tar", user_is_root, ["--dry-run"] if where.dry_run else [])
            else:
                _write_archive(files, where, f"fedquilt-{board.device}", say)
    except install.InstallRefusedError as error:
        raise JobError(str(error)) from None


def _collect_bundle_files(
    what: FlashContent, target: targets.BundleTarget, board: bundle.BoardFiles | CoordinatorFiles, say: Say
) -> dict[str, bytes | Path]:
    own = [extra for extra in board.extras if extra != "onnx" or "gpu" not in what.extras]  # they exclude each other
    extras = sorted({*what.extras, *own})
    name: OwnWheel = "fedquilt" if what.role == "coordinator" else "fedquilt-board"
    house, lock = wheels.collect_wheels(target, extras, name)
    files = bundle.collect_files(board, target, house, lock)
    size = sum(len(data) if isinstance(data, bytes) else data.stat().st_size for data in files.values())
    say(f"{board.device}: {len(house)} wheels for {target.name}, Python {target.python}; {size / 1e6:.1f} MB in all")
    return files


def write_upgrade_bundle(
    what: FlashContent, out: Path, authority: Path, *, whole: bool = False, say: Say = print
) -> None:
    """Write the bundle of an over-the-air upgrade, signed if the authority's key is here.

    Without `whole`, the boards must have the dependencies already.
    """
    target = targets.find_target(what.target, what.python)
    progress.LINE.set_part("wheels, of which new ones are downloaded", 0, 2)
    house, _ = wheels.collect_wheels(target, sorted({*what.extras, "identity"}))
    progress.LINE.set_part(f"packing {len(house)} wheels" if whole else "packing fedquilt's wheel", 1, 2)
    brought, left = (house, []) if whole else (house[:1], house[1:])
    made = UpgradeManifest(
        format=archive.FORMAT,
        version=fedquilt.__version__,
        machine=target.machine,
        python=target.python,
        wheels={path.name: wheels.file_sha256(path) for path in brought},
        unpacked_bytes=sum(map(bundle.unpacked_bytes, brought)),
        present={one.name: one.version for one in map(wheels.Wheel.from_file, left)},
        made_s=int(time.time()),
    )
    sign = None
    if (authority / "ca.key").is_file():
        from fedquilt.tools.identity.authority import CertificateAuthority

        signs = CertificateAuthority(authority)
        sign, made = signs.sign_upgrade, msgspec.structs.replace(made, number=signs.next_upgrade_number(time.time()))
    size = pack_bundle(made, house, out, sign)
    signed = f"signed by the authority in {authority}" if sign else f"not signed: no authority in {authority}"
    brings = f"{len(brought)} wheel{'s' * (len(brought) > 1)}"
    kind = f"{target.machine}, Python {made.python}"
    say(f"{out}: fedquilt {made.version} for {kind}; {brings}, {size / 1e6:.1f} MB, {signed}")
    if left:
        say(f"boards keep the other {len(left)} packages that they were flashed with (--whole brings them too)")
    say(f"fedquilt rollout agent {out} --home HOME brings it to the fleet")


def remove_installation(where: FlashDestination, *, purge: bool = False, say: Say = print) -> None:
    """Remove fedquilt from a mounted root or a running board."""
    arguments = ["--uninstall", *["--purge"] * purge, *["--dry-run"] * where.dry_run]
    try:
        if where.rootfs is not None:
            changes = install.uninstall(_open_mounted_root(where, say), purge=purge)
            say(f"{changes} things {'would be' if where.dry_run else 'were'} removed")
        elif where.ssh is not None:
            SshHost(where.ssh).uninstall(arguments)
        else:
            raise JobError(
                "board uninstall needs --rootfs or --ssh; on the board it is `sudo sh install.sh --uninstall`"
            )
    except install.InstallRefusedError as error:
        raise JobError(str(error)) from None


def _open_mounted_root(where: FlashDestination, say: Say) -> install.RootFileSystem:
    assert where.rootfs is not None
    if not where.rootfs.is_dir():
        raise JobError(f"--rootfs {where.rootfs} is no folder: mount the board's root file system there")
    if where.rootfs.resolve() == Path("/") or os.path.samefile(where.rootfs, "/"):
        raise JobError(
            "--rootfs / is this machine itself: flash an archive, and `sudo sh install.sh` from it, to put it here"
        )
    return install.RootFileSystem(where.rootfs, where.dry_run, say)


def _write_archive(files: dict[str, bytes | Path], where: FlashDestination, top: str, say: Say) -> None:
    path = where.out or Path(f"{top}.tar")
    if where.dry_run:
        for name in sorted(files):
            say(f"would pack {name}")
        return
    size = bundle.write_archive(files, path, top)
    say(f"{path}: {size / 1e6:.1f} MB. On the board: tar -xf {path.name} && sudo sh {top}/install.sh")


PROBE: Final = 'uname -m; id -u; test -x "$1" && echo python; for f in /usr/bin/python3.*; do echo "has $f"; done'
TOP: Final = "fedquilt-bundle"
# a folder of root's own making would need root for the copy as well; of the user's, nobody else reads it
UNPACK: Final = f'umask 077; d=$(mktemp -d) && tar -x -C "$d" && mv "$d/{TOP}" "$d/b" && echo "$d"'


class SshHost:
    """A board that is reached by ssh."""

    def __init__(self, name: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_][^\s]*", name):
            raise LinkError(f"--ssh {name!r} is no host: write user@host")
        self.name = name

    def check_board(self, machine: str, interpreter: str) -> bool:
        """Check machine and Python of the board. Return whether ssh logs in as root."""
        said = self._run_captured(f"sh -c {shlex.quote(PROBE)} sh {shlex.quote(interpreter)}").split("\n")
        found, user = said[0].strip(), said[1].strip() if len(said) > 1 else ""
        if found != machine:
            raise InstallRefusedError(
                f"{self.name} is {found or 'no Linux'}, and the target {machine}: name that board's --target"
            )
        if "python" not in said:
            others = [line.rsplit("/", 1)[-1] for line in said if re.fullmatch(r"has \S+/python3\.\d+", line)]
            has = f" but {', '.join(others)}" if others else ""
            raise InstallRefusedError(f"{self.name} has no {interpreter}{has}: name what it has with --python")
        return user == "0"

    def install_archive(self, archive: Path, root: bool, arguments: Sequence[str]) -> None:
        """Copy a bundle to the board, run its install.sh, and remove the copy in any case.

        sudo may request a password on this terminal.
        """
        with archive.open("rb") as file:
            folder = self._run_captured(f"sh -c {shlex.quote(UNPACK)}", stdin=file).strip().split("\n")[-1]
        if not re.fullmatch(r"/[A-Za-z0-9._/-]+", folder):
            raise LinkError(f"{self.name}: the bundle was not unpacked: {folder[:200]}")
        sudo = "" if root else "sudo "
        command = f"{sudo}sh {folder}/b/install.sh {' '.join(arguments)}; code=$?; rm -rf {folder}; exit $code"
        self._run_interactive(f"sh -c {shlex.quote(command)}")

    def uninstall(self, arguments: Sequence[str]) -> None:
        root = self._run_captured("id -u").strip() == "0"
        home = "/opt/fedquilt/current"
        self._run_interactive(f"{'' if root else 'sudo '}{home}/bin/python -B {home}/install.py {' '.join(arguments)}")

    def _run_interactive(self, command: str) -> None:
        done = subprocess.run(["ssh", "-t", self.name, command], check=False)
        if done.returncode:
            raise LinkError(f"{self.name}: it ended with {done.returncode}; what it said stands above")

    def _run_captured(self, command: str, stdin: IO[bytes] | int = subprocess.DEVNULL) -> str:
        try:
            done = subprocess.run(["ssh", self.name, command], stdin=stdin, capture_output=True, check=False)
        except FileNotFoundError:
            raise LinkError("there is no ssh program here: apt install openssh-client") from None
        if done.returncode:
            why = done.stderr.decode(errors="replace").strip().split("\n")[-1] or f"ssh ended with {done.returncode}"
            raise LinkError(f"{self.name}: {why}; does `ssh {self.name} true` work?")
        return done.stdout.decode(errors="replace")


def pack_bundle(made: UpgradeManifest, house: Sequence[Path], out: Path, sign: Callable[[bytes], bytes] | None) -> int:
    """Write an upgrade bundle, unsigned if `sign` is None. Return its size in bytes."""
    text = msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n"
    files: dict[str, bytes | Path] = {f"wheels/{path.name}": path for path in house if path.name in made.wheels}
    files[archive.MANIFEST] = text
    if sign is not None:
        files[archive.SIGNATURE] = sign(text)
    return bundle.write_archive(files, out, private=False)
