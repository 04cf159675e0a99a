"""`fedquilt audit`."""

from __future__ import annotations

import sys
from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import option, verb


@verb()
@option("--data", type=options.PATH, required=True, help="Images: a folder, .npz or IDX files.")
@option("--images", type=options.POSITIVE, default=4, help="How many.")
@option("--size", type=options.POSITIVE, help="Pixels to scale images to (default: as they are).")
@option("--steps", type=options.POSITIVE, default=300, help="Of the attack at most.")
@option("--noise", type=options.ABOVE_0, default=0.001, help="On FedAvg's gradients.")
@option("--seed", type=options.WHOLE, default=0, help="Of the images and the attack.")
@option("--out", type=options.PATH, default=Path("fedquilt-audit.svg"), metavar="FILE.svg", help="The pictures, drawn.")
@options.format
def audit(
    data: Path, images: int, size: int | None, steps: int, noise: float, seed: int, out: Path, format: str
) -> int:
    """Rebuild a device's pictures from what methods have it upload, and tell how well."""
    from fedquilt.tools import audit as tool

    wanted = {"count": images, "size": size or 0, "steps": steps, "noise": noise, "seed": seed}
    return tool.main(data, out, format, wanted, lambda line: print(line, file=sys.stderr, flush=True))
