"""`fedquilt flash`: an agent onto a board, from the operator's machine.

One bundle is built (`bundle`), and installed by what travels in it (`install`): into a mounted root file
system from here, into the root file system of a disk image (`image`), onto a running board through ssh (`remote`), or
by whoever unpacks the archive there. `fleet` does so for every board of a table.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from fedquilt import progress
from fedquilt.core import JobError
from fedquilt.tools.flash import bundle, coordinator, image, install, over_the_air, targets, wheels
from fedquilt.tools.flash.coordinator import Coordinator
from fedquilt.tools.flash.remote import TOP, Host

Say = Callable[[str], None]


@dataclass(frozen=True)
class Where:
    """One of the four: a mounted root, a disk image, a running board, an archive."""

    rootfs: Path | None = None
    image: Path | None = None  # that is copied; the copy gets fedquilt
    out: Path | None = None  # the copy; None: fedquilt-DEVICE.img
    ssh: str | None = None
    tar: Path | None = None
    ssh_options: tuple[str, ...] = ()
    dry_run: bool = False


@dataclass(frozen=True)
class What:
    """One board's bundle. See `bundle.board`, `targets.find`, `wheels.house`."""

    target: str
    settings: Path = Path()  # none for an upgrade
    device: str | None = None
    budget: str | None = None
    labels: tuple[str, ...] | None = None
    token: Path | None = None
    extras: tuple[str, ...] = ("onnx",)
    python: str | None = None
    interpreter: str | None = None
    system_packages: bool = False
    wheels: Path | None = None
    index: str | None = None
    constraint: Path | None = None
    refresh: bool = False
    own_python: Path | None = None
    role: str = "agent"  # or "coordinator"


def flash(what: What, where: Where, say: Say = print) -> None:
    """Build a board's bundle and put it where it goes.

    Raises:
        JobError: a target, setting or place that cannot be used.
        LinkError: the board cannot be reached, or its installation failed.
        StoreError: a folder here cannot be used.
    """
    target = targets.find(what.target, what.python, what.interpreter)
    board: bundle.Board | Coordinator
    if what.role == "coordinator":
        board = coordinator.read(what.settings)
    else:
        board = bundle.board(what.settings, what.device, what.token, what.budget, what.labels)
        if board.enrols and not board.files.keys() & {"token", "device.crt"}:
            say(
                f"without --token {board.device} enrols only if it was enrolled before: "
                f"`fedquilt enrol token {board.device} --out FILE` makes one"
            )
    brings = _brings(what, target)
    asked = {"interpreter": target.interpreter, "machine": target.machine, "own_python": brings}
    try:
        with ExitStack() as stack:
            root = None if where.rootfs is None else _mounted(where, say)
            copied = None
            if where.image is not None:
                out = where.out or Path(f"fedquilt-{board.device}.img")
                copied = stack.enter_context(image.opened(where.image, out, target.interpreter, say))
                root = copied.root
                root.dry_run = where.dry_run
            if root is not None:
                install.check(root, asked)
            host = None if where.ssh is None else Host(where.ssh, where.ssh_options)
            user_is_root = host is not None and host.check(target.machine, target.interpreter, brings)
            files = _files(what, target, board, say)
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedquilt-")))
            if root is not None:
                bundle.write(files, scratch / TOP)
                changes = install.install(scratch / TOP, root)
                say(
                    f"{changes} things {'would change' if where.dry_run else 'changed'}"
                    if changes
                    else "nothing to do: all is so already"
                )
                if copied is not None and not where.dry_run:
                    copied.finish()
            elif host is not None:
                bundle.pack(files, scratch / "bundle.tar", TOP)
                host.install(scratch / "bundle.tar", user_is_root, ["--dry-run"] if where.dry_run else [])
            else:
                _archive(files, where, f"fedquilt-{board.device}", say)
    except install.Refused as error:
        raise JobError(str(error)) from None


def _brings(what: What, target: targets.Target) -> bool:
    """Whether a Python comes along; one that is needed is there, and of the target's version.

    Raises:
        JobError: it is missing, or another.
    """
    if what.own_python is None:
        if target.brings:
            raise JobError(f"--target {target.name} has no Python that fedquilt runs on: {targets.OWN_PYTHON}")
        return False
    if not target.brings:
        raise JobError(f"--own-python is for jetpack4 and jetpack5 without an --interpreter, not for {target.name}")
    if what.system_packages:
        raise JobError(
            "--system-packages: the board's own packages are for its own Python, not for one that comes along"
        )
    from fedquilt.tools.flash import own_python  # it is a program too

    if (version := own_python.check(what.own_python)) != target.python:
        raise JobError(f"--own-python {what.own_python} holds Python {version}: say --python {version}")
    return True


def _files(what: What, target: targets.Target, board: bundle.Board | Coordinator, say: Say) -> dict[str, bytes | Path]:
    """The bundle's files, with the wheels that are missing here downloaded."""
    own = [extra for extra in board.extras if extra != "onnx" or "gpu" not in what.extras]  # they exclude each other
    extras = sorted({*what.extras, *own})
    cache = what.wheels or _cache()
    house, lock = wheels.house(target, extras, cache, what.index, constraint=what.constraint, refresh=what.refresh)
    files = bundle.contents(
        board, target, house, lock, system_packages=what.system_packages, own_python=what.own_python
    )
    size = sum(len(data) if isinstance(data, bytes) else data.stat().st_size for data in files.values())
    say(f"{board.device}: {len(house)} wheels for {target.name}, Python {target.python}; {size / 1e6:.1f} MB in all")
    return files


def upgrade(what: What, out: Path, authority: Path, *, whole: bool = False, say: Say = print) -> None:
    """Write the bundle of an upgrade over the air, for every board of a target. `what`: without settings.

    Raises:
        JobError: a target, extra or index that cannot be used.
        StoreError: it cannot be written.
    """
    target = targets.find(what.target, what.python, what.interpreter)
    cache, extras = what.wheels or _cache(), sorted({*what.extras, "identity"})
    progress.LINE.part("wheels, of which new ones are downloaded", 0, 2)
    house, _ = wheels.house(target, extras, cache, what.index, constraint=what.constraint, refresh=what.refresh)
    progress.LINE.part(f"packing {len(house)} wheels" if whole else "packing fedquilt's wheel", 1, 2)
    over_the_air.make(house, target, out, authority, whole=whole, system_packages=what.system_packages, say=say)


def take_out(where: Where, *, purge: bool = False, say: Say = print) -> None:
    """Take fedquilt out of a mounted root or a running board.

    Raises:
        JobError: no such place.
        LinkError: the board cannot be reached, or has no fedquilt.
    """
    arguments = ["--uninstall", *["--purge"] * purge, *["--dry-run"] * where.dry_run]
    try:
        if where.rootfs is not None:
            changes = install.uninstall(_mounted(where, say), purge=purge)
            say(f"{changes} things {'would be' if where.dry_run else 'were'} removed")
        elif where.ssh is not None:
            Host(where.ssh, where.ssh_options).uninstall(arguments)
        else:
            raise JobError("--uninstall is for --rootfs or --ssh; on the board it is `sudo sh install.sh --uninstall`")
    except install.Refused as error:
        raise JobError(str(error)) from None


def _mounted(where: Where, say: Say) -> install.Root:
    assert where.rootfs is not None
    if not where.rootfs.is_dir():
        raise JobError(f"--rootfs {where.rootfs} is no folder: mount the board's root file system there")
    if where.rootfs.resolve() == Path("/") or os.path.samefile(where.rootfs, "/"):
        raise JobError("--rootfs / is this machine itself: use --tar, and `sudo sh install.sh` from it, to put it here")
    return install.Root(where.rootfs, where.dry_run, say)


def _archive(files: dict[str, bytes | Path], where: Where, top: str, say: Say) -> None:
    path = where.tar or Path(f"{top}.tar")
    if where.dry_run:
        for name in sorted(files):
            say(f"would pack {name}")
        return
    size = bundle.pack(files, path, top)
    say(f"{path}: {size / 1e6:.1f} MB. On the board: tar -xf {path.name} && sudo sh {top}/install.sh")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedquilt" / "wheels"
