"""Installation of fedquilt on boards from the operator's machine (`fedquilt board flash`).

`bundle` builds one bundle and `install` installs it: into a mounted root file system, into a disk image (`image`), onto
a running board through ssh (`ssh_host`), or from an archive on the board. `fleet` does this for every board of a table.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from fedquilt.console import progress
from fedquilt.core import JobError
from fedquilt.tools.boards import targets
from fedquilt.tools.boards.flash import bundle, coordinator, image, install, upgrade_bundle, wheels
from fedquilt.tools.boards.flash.coordinator import CoordinatorFiles
from fedquilt.tools.boards.flash.own_wheels import OwnWheel
from fedquilt.tools.boards.flash.ssh_host import TOP, SshHost

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
    """Settings and packages of one board's bundle."""

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
    """Build a board's bundle and install or write it at its destination.

    Raises:
        JobError: If a target, setting or destination is unusable.
        LinkError: If the board is unreachable, or its installation failed.
        StoreError: If a local folder is unusable.
    """
    target = targets.find_target(what.target, what.python)
    board: bundle.BoardFiles | CoordinatorFiles
    if what.role == "coordinator":
        board = coordinator.read_coordinator_files(what.settings)
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
                say(
                    f"{changes} things {'would change' if where.dry_run else 'changed'}"
                    if changes
                    else "nothing to do: all is so already"
                )
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
    """Write the bundle of an over-the-air upgrade, for every board of a target.

    Raises:
        JobError: If a target, extra or index is unusable.
        StoreError: If the bundle cannot be written.
    """
    target = targets.find_target(what.target, what.python)
    extras = sorted({*what.extras, "identity"})
    progress.LINE.set_part("wheels, of which new ones are downloaded", 0, 2)
    house, _ = wheels.collect_wheels(target, extras)
    progress.LINE.set_part(f"packing {len(house)} wheels" if whole else "packing fedquilt's wheel", 1, 2)
    upgrade_bundle.sign_and_write_bundle(house, target, out, authority, whole=whole, say=say)


def remove_installation(where: FlashDestination, *, purge: bool = False, say: Say = print) -> None:
    """Remove fedquilt from a mounted root or a running board.

    Raises:
        JobError: If `where` is an image or an archive.
        LinkError: If the board is unreachable or does not have fedquilt.
    """
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
