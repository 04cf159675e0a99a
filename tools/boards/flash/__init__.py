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
from fedquilt.host.disk import REAL
from fedquilt.tools.boards import targets
from fedquilt.tools.boards.flash import bundle, image, install, wheels
from fedquilt.tools.boards.flash.bundle import CoordinatorFiles
from fedquilt.tools.boards.flash.install import InstallRefusedError
from fedquilt.tools.boards.flash.own_wheels import OwnWheel

PrintLine = Callable[[str], None]


@dataclass(frozen=True)
class FlashDestination:
    rootfs: Path | None = None
    image: Path | None = None  # the image is copied, and fedquilt installed in the copy
    out: Path | None = None  # copied image or archive, or None for fedquilt-DEVICE.img or .tar
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


def flash_board(content: FlashContent, destination: FlashDestination, print_line: PrintLine = print) -> None:
    """Build a board's bundle, and install it at its destination or write it as an archive.

    Raise JobError if the settings are invalid or the destination is unsuitable, and LinkError if ssh fails.
    """
    target = targets.find_target(content.target, content.python)
    board: bundle.BoardFiles | CoordinatorFiles
    if content.role == "coordinator":
        board = bundle.read_coordinator_files(content.settings)
    else:
        board = bundle.read_board_files(content.settings, content.device, content.token, content.budget, content.labels)
        if board.can_enrol and not board.files.keys() & {"token", "device.crt"}:
            print_line(
                f"without --token, {board.device} can only enrol if it was enrolled before: create one with "
                f"`fedquilt identity token {board.device} --out FILE`"
            )
    requirements = {"interpreter": target.interpreter, "machine": target.machine}
    try:
        with ExitStack() as stack:
            root = None if destination.rootfs is None else _open_mounted_root(destination, print_line)
            image_copy = None
            if destination.image is not None:
                out = destination.out or Path(f"fedquilt-{board.device}.img")
                image_copy = stack.enter_context(
                    image.open_image_copy(destination.image, out, target.interpreter, print_line)
                )
                root = image_copy.root
                root.dry_run = destination.dry_run
            if root is not None:
                install.check_compatibility(root, requirements)
            host = None if destination.ssh is None else SshHost(destination.ssh)
            user_is_root = host is not None and host.check_board(target.machine, target.interpreter)
            files = _collect_bundle_files(content, target, board, print_line)
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedquilt-")))
            if root is not None:
                bundle.write_folder(files, scratch / TOP_FOLDER)
                changes = install.install_bundle(scratch / TOP_FOLDER, root)
                print_line(install.describe_changes(changes, destination.dry_run))
                if image_copy is not None and not destination.dry_run:
                    image_copy.save_image()
            elif host is not None:
                bundle.write_archive(files, scratch / "bundle.tar", TOP_FOLDER)
                host.install_archive(scratch / "bundle.tar", user_is_root, ["--dry-run"] if destination.dry_run else [])
            else:
                _write_archive(files, destination, f"fedquilt-{board.device}", print_line)
    except install.InstallRefusedError as error:
        raise JobError(str(error)) from None


def _collect_bundle_files(
    content: FlashContent,
    target: targets.BundleTarget,
    board: bundle.BoardFiles | CoordinatorFiles,
    print_line: PrintLine,
) -> dict[str, bytes | Path]:
    own_extras = [
        extra for extra in board.extras if extra != "onnx" or "gpu" not in content.extras
    ]  # "gpu" and "onnx" exclude each other
    extras = sorted({*content.extras, *own_extras})
    wheel_name: OwnWheel = "fedquilt" if content.role == "coordinator" else "fedquilt-board"
    paths = wheels.collect_wheels(target, extras, wheel_name)
    files = bundle.collect_files(board, target, paths)
    size = sum(len(data) if isinstance(data, bytes) else data.stat().st_size for data in files.values())
    print_line(
        f"{board.device}: {len(paths)} wheels for {target.name}, Python {target.python}; {size / 1e6:.1f} MB in all"
    )
    return files


def write_upgrade_bundle(
    content: FlashContent, out: Path, authority: Path, *, with_dependencies: bool = False, print_line: PrintLine = print
) -> None:
    """Write the bundle of an over-the-air upgrade, signed if the folder `authority` has a key.

    Without `with_dependencies`, the boards must have the dependencies already.
    """
    target = targets.find_target(content.target, content.python)
    progress.LINE.set_part("wheels, of which new ones are downloaded", 0, 2)
    paths = wheels.collect_wheels(target, sorted({*content.extras, "identity"}))
    progress.LINE.set_part(f"packing {len(paths)} wheels" if with_dependencies else "packing fedquilt's wheel", 1, 2)
    included, omitted = (paths, []) if with_dependencies else (paths[:1], paths[1:])
    manifest = UpgradeManifest(
        format=archive.FORMAT,
        version=fedquilt.__version__,
        machine=target.machine,
        python=target.python,
        wheels={path.name: REAL.hash_file(path) for path in included},
        unpacked_bytes=sum(map(bundle.unpacked_bytes, included)),
        present={wheel.name: wheel.version for wheel in map(wheels.Wheel.from_file, omitted)},
        made_s=int(time.time()),
    )
    sign = None
    if (authority / "ca.key").is_file():
        from fedquilt.tools.identity.authority import CertificateAuthority

        certificate_authority = CertificateAuthority(authority)
        sign = certificate_authority.sign_upgrade
        number = certificate_authority.next_upgrade_number(time.time())
        manifest = msgspec.structs.replace(manifest, number=number)
    size = pack_bundle(manifest, paths, out, sign)
    signature_text = f"signed by the authority in {authority}" if sign else f"not signed: no authority in {authority}"
    wheels_text = f"{len(included)} wheel{'s' * (len(included) > 1)}"
    target_text = f"{target.machine}, Python {manifest.python}"
    print_line(
        f"{out}: fedquilt {manifest.version} for {target_text}; {wheels_text}, {size / 1e6:.1f} MB, {signature_text}"
    )
    if omitted:
        print_line(f"boards keep the other {len(omitted)} packages from their flash (--whole includes them)")
    print_line(f"to deploy it: fedquilt rollout agent {out} --home HOME")


def remove_installation(destination: FlashDestination, *, purge: bool = False, print_line: PrintLine = print) -> None:
    """Remove fedquilt from a mounted root or a board, with `purge` also settings, identity and state."""
    arguments = ["--uninstall", *["--purge"] * purge, *["--dry-run"] * destination.dry_run]
    try:
        if destination.rootfs is not None:
            changes = install.uninstall(_open_mounted_root(destination, print_line), purge=purge)
            print_line(f"{changes} changes {'would be' if destination.dry_run else 'were'} made")
        elif destination.ssh is not None:
            SshHost(destination.ssh).uninstall(arguments)
        else:
            raise JobError("board uninstall needs --rootfs or --ssh: on the board use `sudo sh install.sh --uninstall`")
    except install.InstallRefusedError as error:
        raise JobError(str(error)) from None


def _open_mounted_root(destination: FlashDestination, print_line: PrintLine) -> install.RootFileSystem:
    assert destination.rootfs is not None
    if not destination.rootfs.is_dir():
        raise JobError(f"--rootfs {destination.rootfs} is not a folder: mount the board's root file system there")
    if destination.rootfs.resolve() == Path("/") or os.path.samefile(destination.rootfs, "/"):
        raise JobError("--rootfs / is this machine itself: write an archive, and install it with `sudo sh install.sh`")
    return install.RootFileSystem(destination.rootfs, destination.dry_run, print_line)


def _write_archive(
    files: dict[str, bytes | Path], destination: FlashDestination, top_folder: str, print_line: PrintLine
) -> None:
    path = destination.out or Path(f"{top_folder}.tar")
    if destination.dry_run:
        for name in sorted(files):
            print_line(f"would pack {name}")
        return
    size = bundle.write_archive(files, path, top_folder)
    print_line(f"{path}: {size / 1e6:.1f} MB. On the board: tar -xf {path.name} && sudo sh {top_folder}/install.sh")


PROBE_COMMAND: Final = (
    'uname -m; id -u; test -x "$1" && echo python; for f in /usr/bin/python3.*; do echo "has $f"; done'
)
TOP_FOLDER: Final = "fedquilt-bundle"
# the login user creates the folder: root's folder would need root for the copy, and no other user can read this one
UNPACK_COMMAND: Final = f'umask 077; d=$(mktemp -d) && tar -x -C "$d" && mv "$d/{TOP_FOLDER}" "$d/b" && echo "$d"'


class SshHost:
    def __init__(self, name: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_][^\s]*", name):
            raise LinkError(f"--ssh {name!r} is not a host: write user@host")
        self.name = name

    def check_board(self, machine: str, interpreter: str) -> bool:
        """Return whether ssh logs in as root. Raise InstallRefusedError if machine type or Python do not fit."""
        lines = self._run_captured(f"sh -c {shlex.quote(PROBE_COMMAND)} sh {shlex.quote(interpreter)}").split("\n")
        machine_type, user = lines[0].strip(), lines[1].strip() if len(lines) > 1 else ""
        if machine_type != machine:
            raise InstallRefusedError(
                f"{self.name} is {machine_type or 'not Linux'}, but the target is {machine}: choose another --target"
            )
        if "python" not in lines:
            other_pythons = [line.rsplit("/", 1)[-1] for line in lines if re.fullmatch(r"has \S+/python3\.\d+", line)]
            available = f", but {', '.join(other_pythons)}" if other_pythons else ""
            raise InstallRefusedError(f"{self.name} has no {interpreter}{available}: choose another --python")
        return user == "0"

    def install_archive(self, archive: Path, root: bool, arguments: Sequence[str]) -> None:
        """Copy a bundle to the board, run its install.sh, and remove the copy even after a failure.

        sudo may request a password on this terminal.
        """
        with archive.open("rb") as file:
            folder = self._run_captured(f"sh -c {shlex.quote(UNPACK_COMMAND)}", stdin=file).strip().split("\n")[-1]
        if not re.fullmatch(r"/[A-Za-z0-9._/-]+", folder):
            raise LinkError(f"{self.name}: the bundle was not unpacked (output {folder[:200]!r})")
        sudo = "" if root else "sudo "
        command = f"{sudo}sh {folder}/b/install.sh {' '.join(arguments)}; code=$?; rm -rf {folder}; exit $code"
        self._run_interactive(f"sh -c {shlex.quote(command)}")

    def uninstall(self, arguments: Sequence[str]) -> None:
        root = self._run_captured("id -u").strip() == "0"
        home = "/opt/fedquilt/current"
        self._run_interactive(f"{'' if root else 'sudo '}{home}/bin/python -B {home}/install.py {' '.join(arguments)}")

    def _run_interactive(self, command: str) -> None:
        process = subprocess.run(["ssh", "-t", self.name, command], check=False)
        if process.returncode:
            raise LinkError(f"{self.name}: command failed with exit code {process.returncode} (output above)")

    def _run_captured(self, command: str, stdin: IO[bytes] | int = subprocess.DEVNULL) -> str:
        try:
            process = subprocess.run(["ssh", self.name, command], stdin=stdin, capture_output=True, check=False)
        except FileNotFoundError:
            raise LinkError("ssh is not installed: apt install openssh-client") from None
        if process.returncode:
            last_line = process.stderr.decode(errors="replace").strip().split("\n")[-1]
            reason = last_line or f"exit code {process.returncode}"
            raise LinkError(f"{self.name}: ssh failed ({reason}): check that `ssh {self.name} true` works")
        return process.stdout.decode(errors="replace")


def pack_bundle(
    manifest: UpgradeManifest, paths: Sequence[Path], out: Path, sign: Callable[[bytes], bytes] | None
) -> int:
    """Write an upgrade bundle, unsigned if `sign` is None. Return its size in bytes."""
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
    files: dict[str, bytes | Path] = {f"wheels/{path.name}": path for path in paths if path.name in manifest.wheels}
    files[archive.MANIFEST] = text
    if sign is not None:
        files[archive.SIGNATURE] = sign(text)
    return bundle.write_archive(files, out, private=False)
