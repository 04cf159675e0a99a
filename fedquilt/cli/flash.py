"""`fedquilt flash`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import argument, option, verb
from fedquilt.core import JobError

WHERE = "Destination, one of these"
MANY = "Many boards"


@verb()
@argument("settings", "The board's agent.toml, with the files that it names.", type=options.PATH, required=False)
@option(
    "--target",
    metavar="TARGET",
    help="System of the board: jetpack5 to jetpack7, jetpack6-gpu, raspberry-pi-os, arm64 or amd64.",
)
@option(
    "--role",
    type=options.WordChoice(("agent", "coordinator")),
    default="agent",
    help="What SETTINGS are of: a board's agent, or the coordinator and its enrolment (coordinator.toml).",
)
@option(
    "--device",
    type=options.NAME,
    help="Name of the board in place of agent.toml's, so that one agent.toml serves many boards.",
)
@option(
    "--rootfs",
    type=options.FOLDER,
    metavar="DIR",
    help="Write into a mounted root file system, or L4T's rootfs before flashing.",
    group=WHERE,
)
@option(
    "--image",
    type=options.PATH,
    metavar="FILE",
    help="Write into a copy of a disk image, .img or .img.xz, for the usual card writer.",
    group=WHERE,
)
@option("--ssh", metavar="USER@HOST", help="Install on a running board.", group=WHERE)
@option(
    "--tar", type=options.PATH, metavar="FILE", help="Write an archive (default: fedquilt-DEVICE.tar).", group=WHERE
)
@option(
    "--upgrade",
    type=options.PATH,
    metavar="FILE",
    help="Write what `fedquilt upgrade` brings to boards of --target over the air; no SETTINGS are needed.",
    group=WHERE,
)
@option("--whole", is_flag=True, help="With --upgrade: bring all packages, not fedquilt's own alone.")
@option(
    "--ssh-option", multiple=True, metavar="OPTION", help="Option for ssh, such as --ssh-option=-p22; may be repeated."
)
@option(
    "--out",
    type=options.PATH,
    metavar="PATH",
    help="New image of --image (default: fedquilt-DEVICE.img), or folder of --boards (default: fedquilt-boards).",
)
@option("--dry-run", is_flag=True, help="Say what would be written, and write nothing there.")
@option("--token", type=options.PATH, metavar="FILE", help="One-time token, for a board that enrols.")
@option(
    "--extras",
    many=True,
    none=True,
    default=("onnx",),
    metavar="EXTRA",
    help="Extras of fedquilt to install, such as onnx or train; without a word, none.",
)
@option("--python", metavar="3.N", help="Python version of the board (default: the target's).")
@option("--interpreter", metavar="PATH", help="Path of Python on the board (default: /usr/bin/python3.N).")
@option(
    "--system-packages",
    is_flag=True,
    help="Let the agent use the board's own Python packages too, such as NVIDIA's torch.",
)
@option(
    "--wheels", type=options.FOLDER, metavar="DIR", help="Folder that keeps downloaded packages (default: in ~/.cache)."
)
@option("--index", metavar="URL", help="Another package index, used besides PyPI.")
@option(
    "--constraint",
    type=options.PATH,
    metavar="FILE",
    help="Constraints file of pip: versions that are allowed (numpy==2.2.6).",
)
@option("--refresh", is_flag=True, help="Look for newer packages than were downloaded before.")
@option(
    "--boards",
    type=options.PATH,
    metavar="FILE",
    help="Table (CSV) of boards: name,target,budget,labels,address; each gets its own token, image, archive or visit.",
    group=MANY,
)
@option(
    "--authority",
    type=options.FOLDER,
    metavar="DIR",
    default=Path("fedquilt-ca"),
    help="Folder of the certificate authority that makes the tokens, and signs what --upgrade writes.",
    group=MANY,
)
@option("--watch", is_flag=True, help="Show first boots and enrolments until every board is there.", group=MANY)
@option("--uninstall", is_flag=True, help="Remove the agent from --rootfs or --ssh.")
@option("--purge", is_flag=True, help="With --uninstall: remove settings, identity and state as well.")
def flash(
    settings: Path | None,
    target: str | None,
    role: str,
    device: str | None,
    rootfs: Path | None,
    image: Path | None,
    ssh: str | None,
    tar: Path | None,
    upgrade: Path | None,
    whole: bool,
    out: Path | None,
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
    boards: Path | None,
    authority: Path,
    watch: bool,
    uninstall: bool,
    purge: bool,
) -> None:
    """Install an agent in a mounted root, on a disk image, over SSH, or as an archive."""
    from fedquilt.console import progress
    from fedquilt.tools.boards import flash as tool

    options.require_exclusive(rootfs=rootfs, image=image, ssh=ssh, tar=tar, upgrade=upgrade)
    options.require_exclusive(boards=boards, rootfs=rootfs, ssh=ssh, tar=tar, upgrade=upgrade)
    options.require_exclusive(boards=boards, token=token)
    where = tool.FlashDestination(rootfs, image, out, ssh, tar, ssh_option, dry_run)
    if uninstall:
        tool.remove_installation(where, purge=purge)
        return
    if purge:
        raise JobError("--purge goes with --uninstall")
    if role == "coordinator" and (boards is not None or token is not None or device is not None):
        raise JobError("--role coordinator goes with none of --boards, --token and --device")
    if upgrade is not None and (settings is not None or target is None or role != "agent"):
        raise JobError("--upgrade needs a --target, and no SETTINGS: boards keep theirs")
    if upgrade is None and (settings is None or (target is None and boards is None)):
        raise JobError("flash needs a --target and the board's agent.toml; docs/boards.md shows one")
    what = tool.FlashContent(
        target=target or "",
        settings=settings or Path(),
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
        role=role,
    )
    if upgrade is not None:
        with progress.show_progress(f"collecting what {upgrade} takes"):
            tool.write_upgrade_bundle(what, upgrade, authority, whole=whole, say=progress.LINE.print_to_stdout)
        return
    if boards is None:
        with progress.show_progress(f"flashing {device or settings}"):
            tool.flash(what, where, progress.LINE.print_to_stdout)
        return
    from fedquilt.tools.boards.flash import fleet

    plan = fleet.FlashPlan(what, image, out or Path("fedquilt-boards"), authority, ssh_option, dry_run=dry_run)
    fleet.flash_table(boards, target, plan, watch=watch)
