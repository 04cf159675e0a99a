"""`fedquilt board` flash, uninstall and check-gpu, left out of the wheel for boards."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fedquilt.cli import options
from fedquilt.cli.commands import argument, option, verb
from fedquilt.console import progress
from fedquilt.core import JobError

DESTINATION_GROUP: Final = "Destination, one of these (default: an archive)"
FLEET_GROUP: Final = "Many boards"


rootfs_option: Final = option(
    "--rootfs",
    type=options.FOLDER,
    metavar="DIR",
    help="A mounted root file system, or L4T's rootfs before flashing.",
    group=DESTINATION_GROUP,
)
ssh_option: Final = option("--ssh", metavar="USER@HOST", help="A running board.", group=DESTINATION_GROUP)
dry_run_option: Final = option("--dry-run", is_flag=True, help="Show what would be written, and write nothing.")


@verb()
@argument("settings", "The board's agent.toml, with the files that it names.", type=options.PATH)
@options.target_option
@option(
    "--role",
    type=options.WordChoice(("agent", "coordinator")),
    default="agent",
    help="Program of SETTINGS: agent, or coordinator with enrolment.",
)
@option("--device", type=options.NAME, help="Name of the board in place of agent.toml's.")
@rootfs_option
@option(
    "--image",
    type=options.PATH,
    metavar="FILE",
    help="Disk image to copy and install into, .img or .img.xz.",
    group=DESTINATION_GROUP,
)
@ssh_option
@option(
    "--out",
    type=options.PATH,
    metavar="PATH",
    help="New image or archive (default: fedquilt-DEVICE.img or .tar), or folder of --boards (default: "
    "fedquilt-boards).",
)
@dry_run_option
@option("--token", type=options.PATH, metavar="FILE", help="One-time token, for a board that enrols.")
@options.extras_option
@options.python_option
@option(
    "--boards",
    type=options.PATH,
    metavar="FILE",
    help="Table (CSV) of boards: name,target,budget,labels,address.",
    group=FLEET_GROUP,
)
@options.authority_option
def flash(
    settings: Path,
    target: str | None,
    role: str,
    device: str | None,
    rootfs: Path | None,
    image: Path | None,
    ssh: str | None,
    out: Path | None,
    dry_run: bool,
    token: Path | None,
    extras: tuple[str, ...],
    python: str | None,
    boards: Path | None,
    ca: Path,
) -> None:
    """Install an agent in a mounted root, on a disk image, over SSH, or as an archive."""
    from fedquilt.tools.boards import flash as tool

    options.require_exclusive(rootfs=rootfs, image=image, ssh=ssh)
    options.require_exclusive(boards=boards, rootfs=rootfs, ssh=ssh)
    options.require_exclusive(boards=boards, token=token)
    if role == "coordinator" and (boards is not None or token is not None or device is not None):
        raise JobError("--role coordinator is not possible with --boards, --token or --device: leave them out")
    if target is None and boards is None:
        raise JobError("--target is missing: docs/boards.md lists the targets")
    content = tool.FlashContent(
        target=target or "",
        settings=settings,
        device=device,
        token=token,
        extras=tuple(filter(None, extras)),
        python=python,
        role=role,
    )
    if boards is None:
        destination = tool.FlashDestination(rootfs=rootfs, image=image, out=out, ssh=ssh, dry_run=dry_run)
        with progress.show_progress(f"flashing {device or settings}"):
            tool.flash_board(content, destination, progress.LINE.print_to_stdout)
        return
    from fedquilt.tools.boards.flash import fleet

    plan = fleet.FlashPlan(content, image, out or Path("fedquilt-boards"), ca, dry_run=dry_run)
    fleet.flash_table(boards, target, plan)


@verb()
@rootfs_option
@ssh_option
@option("--purge", is_flag=True, help="Remove settings, identity and state as well.")
@dry_run_option
def uninstall(rootfs: Path | None, ssh: str | None, purge: bool, dry_run: bool) -> None:
    """Remove the agent from a mounted root or a running board."""
    from fedquilt.tools.boards import flash as tool

    options.require_exclusive(rootfs=rootfs, ssh=ssh)
    tool.remove_installation(tool.FlashDestination(rootfs=rootfs, ssh=ssh, dry_run=dry_run), purge=purge)


@verb()
@option("--out", type=options.PATH, help="File for the report as JSON.")
@option("--minutes", type=options.SECONDS, default=10.0, metavar="M", help="Time for all parts together, in minutes.")
@options.format_option
def check_gpu(out: Path | None, minutes: float, format: str) -> int:
    """Check this machine's GPU through the agent's code, within 10 minutes."""
    import msgspec

    from fedquilt.host import disk
    from fedquilt.tools.boards import gpu_check

    with progress.show_progress("checking the GPU"):
        report = gpu_check.GpuCheck().run(60 * minutes)
    text = msgspec.json.format(msgspec.json.encode(report)).decode()
    if out is not None:
        disk.write_output(out, text + "\n")
    print(text if format == "json" else "\n".join(gpu_check.format_report(report)))
    return gpu_check.exit_code(report)
