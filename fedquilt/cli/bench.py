"""`fedquilt bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import argument, option, verb
from fedquilt.core import JobError

WHAT = (
    "idle",
    "blobs",
    "sensors",
    "energy",
    "stitch",
    "memory",
    "footprint",
    "deadlines",
    "fedsq",
    "costs",
    "gpu",
    "dash",
    "coordinator",
    "large",
    "sums",
    "sites",
    "sim",
    "cores",
)
FLEETS = ("coordinator", "sites")
ABLATIONS = "Ablations: of stitch, whole searches with and without parts of the method"


@verb()
@argument("what", f"One of {', '.join(WHAT)}.", type=options.WordChoice(WHAT), metavar="WHAT")
@option("--size", type=options.POSITIVE, many=True, help="For stitch and memory: sizes of images in pixels.")
@option("--images", type=options.POSITIVE, help="For stitch: images that are scored (default: 64).")
@option(
    "--agents",
    type=options.POSITIVE,
    many=True,
    help="For coordinator: numbers of boards (default: 200 3000). For sites: boards of each (default: 1000).",
)
@option("--sites", type=options.POSITIVE, help="For sites: number of sites (default: 20).")
@option(
    "--features",
    type=options.POSITIVE,
    help="For sites: features of FedStitch's donors together, in eights (default: 48); with another number "
    "they are joined, and not stitched.",
)
@option(
    "--method",
    "methods",
    many=True,
    metavar="NAME",
    help="For sites: methods (default: seven that add up, robust).",
)
@option("--updates", type=options.POSITIVE, help="For large: updates of the round (default: 5).")
@option("--rounds", type=options.POSITIVE, help="For coordinator (default: 6) and sites (default: 2): rounds.")
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
    help="For sim and cores: folder of IDX images of 28x28, such as MNIST's raw folder (cores: drawn without one).",
)
@option(
    "--engine",
    metavar="ENGINE",
    help="For cores: auto, pool, ray or ray://HOST:PORT, as of `fleet` (default: pool).",
)
@option(
    "--cores",
    type=options.POSITIVE,
    help="For cores: an even number, of which half are used first (default: those of this machine).",
)
@option(
    "--with",
    "beside",
    many=True,
    metavar="NAME",
    help="For sim: simulators to compare with, flower or pfl; they are installed into a cache folder.",
)
@option(
    "--ablate",
    type=options.PATH,
    is_flag=False,
    flag_value=Path(),
    metavar="[JOB]",
    help="Ablate a prepared job (default: the demo's).",
    group=ABLATIONS,
)
@option("--bundle", type=options.FOLDER, help="The bundle that `prepare` made (default: JOB.bundle).", group=ABLATIONS)
@option(
    "--alpha",
    many=True,
    help="Concentrations of Dirichlet partitions, or iid (default: the job's own partition).",
    group=ABLATIONS,
)
@option(
    "--seeds",
    type=options.WHOLE,
    many=True,
    help="Seeds; everything is run once with each (default: 0 1 2).",
    group=ABLATIONS,
)
@option(
    "--only",
    many=True,
    metavar="NAME",
    help="Run only these searches and comparisons; for sim, W1 or W2. An unknown name lists all.",
    group=ABLATIONS,
)
@option(
    "--out",
    type=options.FOLDER,
    help="Folder for finished runs and the plot (default: fedquilt-ablation).",
    group=ABLATIONS,
)
@options.format_option
def bench(what: str, ablate: Path | None, format: str, **given: Any) -> int:
    """Measure fedquilt on this machine."""
    from fedquilt.tools.lab import bench as tool

    ablating = what == "stitch" and ablate is not None
    given = {name: value or None for name, value in given.items()}
    for name, allowed, where in (
        ("size", what in ("stitch", "memory") and not ablating, "`bench stitch` and `bench memory`"),
        ("images", what == "stitch" and not ablating, "`bench stitch`"),
        ("after", what == "coordinator", "`bench coordinator`"),
        *((name, what in FLEETS, "`bench coordinator` and `bench sites`") for name in ("agents", "rounds")),
        *((name, what == "sites", "`bench sites`") for name in ("sites", "methods", "features")),
        ("updates", what == "large", "`bench large`"),
        ("ablate", what == "stitch", "`bench stitch`"),
        ("data", what in ("sim", "cores"), "`bench sim` and `bench cores`"),
        *((name, what == "cores", "`bench cores`") for name in ("engine", "cores")),
        ("beside", what == "sim", "`bench sim`"),
        ("only", ablating or what == "sim", "`bench stitch --ablate` and `bench sim`"),
        *((name, ablating, "`bench stitch --ablate`") for name in ("bundle", "alpha", "seeds", "out")),
    ):
        if {**given, "ablate": ablate}[name] is not None and not allowed:
            raise JobError(f"--{'with' if name == 'beside' else name} is an option of {where}: leave it out here")
    if ablating and ablate is not None:
        return _run_ablation(ablate, format, given)
    if what == "coordinator":
        some = {name: given[name] for name in ("agents", "rounds", "after") if given[name] is not None}
        return tool.main(what, format, given=some)
    if what == "sites":
        some = {name: given[name] for name in ("sites", "rounds", "methods", "features") if given[name] is not None}
        return tool.main(what, format, given=some | ({"agents": given["agents"][0]} if given["agents"] else {}))
    if what == "cores":
        some = {name: given[name] for name in ("engine", "cores", "data") if given[name] is not None}
        return tool.main(what, format, given=some)
    if what == "large":
        return tool.main(what, format, given={"updates": given["updates"]} if given["updates"] else {})
    if what != "sim":
        return tool.main(what, format, given["size"] or (), {"shown": given["images"]} if given["images"] else {})
    if given["data"] is None:
        raise JobError("bench sim wants --data: a folder of IDX images of 28x28, such as MNIST's raw folder")
    from fedquilt.tools.lab.bench import sim

    some = {
        "path": given["data"],
        "beside": given["beside"] or (),
        "workloads": sim.select_workloads(given["only"] or ()),
    }
    return tool.main("sim", format, given=some)


def _run_ablation(job: Path, format: str, given: dict[str, Any]) -> int:
    # The path "." is the demo's job.
    from fedquilt.tools.lab import demo as example
    from fedquilt.tools.lab.bench.ablation import searches

    own = job != Path()
    path = job if own else example.HERE / "job.toml"
    return searches.main(
        home_access.load_job(path),
        given["bundle"] or home_access.bundle_folder(path) if own else given["bundle"] or example.HERE / "bundle",
        given["out"] or Path("fedquilt-ablation"),
        alphas=given["alpha"] or (),
        seeds=given["seeds"] or (0, 1, 2),
        only=given["only"] or (),
        format=format,
    )
