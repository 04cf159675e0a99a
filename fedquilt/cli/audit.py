"""`fedquilt audit`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import option, verb


@verb()
@option("--data", type=options.PATH, required=True, help="Images: a folder, .npz or IDX files.")
@option("--images", type=options.POSITIVE, default=4, help="Number of images to rebuild.")
@option("--size", type=options.POSITIVE, help="Width and height in pixels to scale images to (default: their own).")
@option("--steps", type=options.POSITIVE, default=300, help="Largest number of steps of the attack.")
@option(
    "--noise",
    type=options.ABOVE_0,
    default=0.001,
    help="Standard deviation of the noise on FedAvg's gradients, in the row that has noise.",
)
@option("--seed", type=options.WHOLE, default=0, help="Seed of the choice of images and of the attack.")
@option(
    "--out",
    type=options.PATH,
    default=Path("fedquilt-audit.svg"),
    metavar="FILE.svg",
    help="File for a drawing of the original and rebuilt pictures.",
)
@options.format_option
def audit(
    data: Path, images: int, size: int | None, steps: int, noise: float, seed: int, out: Path, format: str
) -> int:
    """Measure how well images can be reconstructed from a device's uploads."""
    from fedquilt.console import progress
    from fedquilt.tools.lab import audit as tool

    wanted = {"count": images, "size": size or 0, "steps": steps, "noise": noise, "seed": seed}
    with progress.show_progress("rebuilding pictures"):
        return tool.main(data, out, format, wanted)
