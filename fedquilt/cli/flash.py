"""`fedquilt flash`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import argument, option, verb
from fedquilt.core import JobError

WHERE = "Where to: one of these"


@verb()
@argument("settings", "The board's agent.toml, with the files that it names.", type=options.PATH, required=False)
@option("--target", metavar="TARGET", help="jetpack6, jetpack7, raspberry-pi-os, arm64 or amd64.")
@option("--device", type=options.NAME, help="Another name than agent.toml's, which then does for many boards.")
@option(
    "--rootfs",
    type=options.FOLDER,
    metavar="DIR",
    help="A mounted root, or L4T's rootfs before flashing.",
    group=WHERE,
)
@option("--ssh", metavar="USER@HOST", help="A running board.", group=WHERE)
@option("--tar", type=options.PATH, metavar="FILE", help="An archive (default: fedquilt-DEVICE.tar).", group=WHERE)
@option("--ssh-option", multiple=True, metavar="OPTION", help="For ssh, as --ssh-option=-p22.")
@option("--dry-run", is_flag=True, help="Say what would be written, and write nothing there.")
@option("--token", type=options.PATH, metavar="FILE", help="One-time token, for a board that enrols.")
@option("--extras", many=True, none=True, default=("onnx",), metavar="EXTRA", help="What the board can run.")
@option("--python", metavar="3.N", help="Of the board (default: the target's).")
@option("--interpreter", metavar="PATH", help="On the board (default: /usr/bin/python3.N).")
@option("--system-packages", is_flag=True, help="Let the agent see the board's own packages too: NVIDIA's torch.")
@option("--wheels", type=options.FOLDER, metavar="DIR", help="Where downloads are kept (default: in ~/.cache).")
@option("--index", metavar="URL", help="One more package index.")
@option("--constraint", type=options.PATH, metavar="FILE", help="pip's: versions that are allowed (numpy==2.2.6).")
@option("--refresh", is_flag=True, help="Look for newer packages than were downloaded before.")
@option("--uninstall", is_flag=True, help="Take it out again, from --rootfs or --ssh.")
@option("--purge", is_flag=True, help="With --uninstall: settings, identity and state as well.")
def flash(
    settings: Path | None,
    target: str | None,
    device: str | None,
    rootfs: Path | None,
    ssh: str | None,
    tar: Path | None,
    ssh_option: tuple[str, ...],
    dry_run: bool,
    token: Path | None,
    extras: tuple[str, ...],
    python: str | None,
    interpreter: str | None,
    system_packages: bool,
    wheels: Path | None,
    index: str | None,
    constraint: Path | None,
    refresh: bool,
    uninstall: bool,
    purge: bool,
) -> None:
    """Put an agent onto a board: a mounted root, over SSH, or as an archive to take there."""
    from fedquilt.tools import flash as tool

    options.exclusive(rootfs=rootfs, ssh=ssh, tar=tar)
    where = tool.Where(rootfs, ssh, tar, ssh_option, dry_run)
    if uninstall:
        tool.take_out(where, purge=purge)
        return
    if purge:
        raise JobError("--purge goes with --uninstall")
    if settings is None or target is None:
        raise JobError("flash needs a --target and the board's agent.toml; docs/boards.md shows one")
    what = tool.What(
        target=target,
        settings=settings,
        device=device,
        token=token,
        extras=tuple(filter(None, extras)),
        python=python,
        interpreter=interpreter,
        system_packages=system_packages,
        wheels=wheels,
        index=index,
        constraint=constraint,
        refresh=refresh,
    )
    tool.flash(what, where)
