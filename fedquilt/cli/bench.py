"""`fedquilt lab bench`."""

from __future__ import annotations

from typing import Any

from fedquilt.cli import options
from fedquilt.cli.commands import argument, option, verb
from fedquilt.core import JobError

OPTIONS = {  # bench -> its options, which are arguments of its `measure`
    "idle": (),
    "blobs": (),
    "energy": (),
    "stitch": ("size", "images"),
    "coordinator": ("agents", "rounds", "after"),
    "sim": ("data", "with", "only"),
}


@verb()
@argument("what", f"One of {', '.join(OPTIONS)}.", type=options.WordChoice(tuple(OPTIONS)), metavar="WHAT")
@option("--size", type=options.POSITIVE, help="For stitch: size of images in pixels (default: 64).")
@option("--images", type=options.POSITIVE, help="For stitch: images that are scored (default: 64).")
@option("--agents", type=options.POSITIVE, many=True, help="For coordinator: numbers of boards (default: 200 3000).")
@option("--rounds", type=options.POSITIVE, help="For coordinator: rounds (default: 6).")
@option(
    "--after",
    type=options.POSITIVE,
    metavar="ROUNDS",
    help="For coordinator: run the first fleet once more after so many rounds in its log.",
)
@option(
    "--data",
    type=options.FOLDER,
    metavar="FOLDER",
    help="For sim: folder of IDX images of 28x28, such as MNIST's raw folder.",
)
@option(
    "--with",
    many=True,
    metavar="NAME",
    help="For sim: simulators to compare with, flower or pfl; they are installed into a cache folder.",
)
@option("--only", many=True, metavar="NAME", help="For sim: workloads, W1 or W2 (default: both).")
@options.format_option
def bench(what: str, format: str, **given: Any) -> int:
    """Measure fedquilt on this machine."""
    from fedquilt.tools.lab import bench as tool

    given = {name: value for name, value in given.items() if value not in (None, ())}
    for name in given:
        if name not in OPTIONS[what]:
            where = " and ".join(f"`lab bench {each}`" for each in OPTIONS if name in OPTIONS[each])
            raise JobError(f"--{name} is an option of {where}: leave it out here")
    if what == "sim" and "data" not in given:
        raise JobError("bench sim needs --data: a folder of IDX images of 28x28, such as MNIST's raw folder")
    if "with" in given:
        given["beside"] = given.pop("with")
    return tool.run_and_print(what, format, given)
