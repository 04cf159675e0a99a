"""`fedquilt emulate`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import option, verb
from fedquilt.core import JobError


@verb()
@option("--out", type=options.FOLDER, default=Path("fedquilt-emulated"), help="Folder for the system and logs.")
@option("--mirror", metavar="URL", help="Mirror of Debian (default: the one that apt uses here).")
@option("--rounds", type=options.POSITIVE, help="Largest number of rounds (default: until the network is stitched).")
@option(
    "--systemd",
    is_flag=True,
    help="Instead, boot a flashed Debian on this machine's own processor, with systemd and a Jetson's files.",
)
@option(
    "--boards",
    many=True,
    metavar="BOARD[:JETPACK]",
    shell_complete=options.complete_boards,
    help="With --systemd: boards to boot as; all else is tried on the first of them (default: every board).",
)
@option("--enclosed", is_flag=True, hidden=True)  # the rehearsal's own call of itself
@options.format_option
def emulate(
    out: Path,
    mirror: str | None,
    rounds: int | None,
    systemd: bool,
    boards: tuple[str, ...],
    enclosed: bool,
    format: str,
) -> int:
    """Test an emulated arm64 device in qemu, from flashing to stitching (requires root)."""
    if not systemd:
        from fedquilt.tools import emulate as tool

        if boards:
            raise JobError("--boards goes with --systemd")
        return tool.main(out, mirror, rounds, format)
    from fedquilt.tools.emulate import rehearsal

    if rounds is not None:
        raise JobError("--rounds is for the emulation without --systemd")
    chosen = rehearsal.select_layouts(list(boards))
    if enclosed:
        return rehearsal.main(out, mirror, chosen, format)
    return rehearsal.rehearse_enclosed(out, mirror, list(boards), format)
