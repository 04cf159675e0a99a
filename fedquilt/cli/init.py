"""`fedquilt init`."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click

from fedquilt.cli import options
from fedquilt.cli.commands import option, verb
from fedquilt.core import JobError, StoreError

DIGITS: Final = "digits"  # stands for the handwritten digits that come with fedquilt
BOARDS: Final = ("jetson-nano", "jetson-orin-nano", "raspberry-pi-5", "x86-host")
DONORS: Final = {"mobilenet": "torchvision/mobilenet_v2", "squeezenet": "torchvision/squeezenet1_1"}  # of images
NEEDED: Final = {"fedlps": {"encoder": 0.0}}  # parameters without whose values a network of random weights is refused


@verb()
@option(
    "--method",
    metavar="METHOD",
    help="Method of the job (default: ask, or fedavg where nobody can be asked).",
    shell_complete=options.complete_methods,
)
@option(
    "--data",
    metavar="PATH",
    help="Examples: an .npz, a folder of images or IDX files, or digits, the handwritten ones that come with "
    "fedquilt (default: ask, or digits).",
)
@option("--devices", type=options.POSITIVE, help="Number of devices (default: ask, or 4).")
@option(
    "--rounds",
    type=options.POSITIVE,
    help="Number of rounds (default: ask, or 10; at most 200 for a method that ends by itself).",
)
@option("--out", type=options.PATH, default=Path("job.toml"), help="The job file to write.")
@option("--force", is_flag=True, help="Overwrite files that exist.")
def init(
    method: str | None,
    data: str | None,
    devices: int | None,
    rounds: int | None,
    out: Path,
    force: bool,
) -> None:
    """Write a commented job file, from questions or from options.

    On a terminal, `init` asks for missing options. The job trains a small network whose shape fits the data. For a
    method with donors, the donors are two of torchvision's image networks.
    """
    from fedquilt.host import disk

    if out.exists() and not force:
        raise StoreError(f"{out} exists already: --force overwrites it, --out names another file")
    chosen = method or _ask("method (`fedquilt methods` lists them)", "fedavg")
    donors = _has_donors(chosen)
    path, shape, classes = _read_data_shape(data or _ask(f"data: a path, or {DIGITS}", DIGITS), out)
    if donors:
        _require_images(chosen, path, shape)
    count = devices or int(_ask("devices", 4, options.POSITIVE))
    rounds = rounds or int(_ask("rounds", 200 if donors else 10, options.POSITIVE))
    text = "\n".join(_job_lines(out, chosen, path, shape, classes, count, rounds))
    if path.name == "digits.npz" and not (out.parent / path).exists():
        disk.make_output_folder(out)
        shutil.copyfile(_digits_path(), out.parent / path)
    disk.write_output(out, text + "\n")
    print(f"wrote {out}")
    print(f"next: `fedquilt prepare {out}`, then `fedquilt simulate {out} --link memory`")


def _ask(question: str, default: Any, kind: options.ParsedType | None = None) -> Any:
    return click.prompt(question, default=default, type=kind, err=True) if sys.stdin.isatty() else default


def _has_donors(method: str) -> bool:
    from fedquilt import methods

    return "onnx" in methods.load(method).engines


def _require_images(method: str, path: Path, shape: tuple[int, ...]) -> None:
    if len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3)):
        return
    raise JobError(
        f"{method} begins with donors, init knows donors of images only, and examples of {path} have shape {shape}: "
        "write a job with [[donors]] of your own (docs/jobs.md), as examples/series_stitching has for time series"
    )


def _digits_path() -> Path:
    from fedquilt.tools.lab import demo

    return demo.HERE / "digits.npz"


def _read_data_shape(data: str, out: Path) -> tuple[Path, tuple[int, ...], int]:
    # The path is relative to the job file. Shape and number of classes are read from the data.
    from fedquilt.data import examples
    from fedquilt.data.spec import DataSpec

    given = _digits_path() if data == DIGITS else Path(data)
    reader = examples.open_split(DataSpec.parse({"path": str(given.resolve())}))
    classes = max(2, int(reader.y.max(initial=0)) + 1)
    named = Path("digits.npz") if data == DIGITS else Path(os.path.relpath(given, out.parent))
    return named, tuple(reader.shape), classes


def _job_lines(
    out: Path, method: str, data: Path, shape: tuple[int, ...], classes: int, devices: int, rounds: int
) -> Iterator[str]:
    from fedquilt import methods
    from fedquilt.tools.experiments import method_pages

    card = method_pages.make_card(method)
    name = re.sub(r"[^a-z0-9._-]+", "-", out.stem.lower()).strip("-._")[:40] or "job"
    donors = _has_donors(method)
    yield "# A job for fedquilt; docs/jobs.md lists every key. Lines that begin with # hold defaults."
    yield ""
    yield f"name = {json.dumps(name)}"
    yield f"method = {json.dumps(method)}   # {card.title}"
    yield f"rounds = {rounds}" + ("        # at most: the job ends by itself" if donors else "")
    if donors:
        yield f"labels = {json.dumps([str(each) for each in range(classes)])}   # names of the classes in order"
    yield "# seed = 0          # everything random is drawn from it"
    if "numpy" in methods.load(method).engines:
        yield 'engine = "numpy"    # enough for a small network; without this line devices train with torch'
    yield ""
    yield "[params]              # of the method"
    wide = max((len(each.name) for each in card.parameters), default=0)
    for each in card.parameters:
        about = each.about.replace("\n", " ")
        needed = each.name in NEEDED.get(method, {})
        value = NEEDED[method][each.name] if needed else each.default
        yield f"{'' if needed else '# '}{each.name.ljust(wide)} = {_toml_value(value)}" + (
            f"   # {about}" if about else ""
        )
    yield ""
    yield "[cohort]"
    yield "# size = 0            # devices that take part in a round; 0: all"
    yield "# deadline_s = 600    # the longest that a round waits for them"
    if card.evaluates:
        yield ""
        yield "[check]"
        yield "every = 1             # rounds between evaluations on the examples that each device holds out"
    yield ""
    yield from (
        _donor_lines()
        if donors
        else _model_lines(math.prod(shape), classes, methods.load(method).traits.frozen_weights)
    )
    yield ""
    yield "[data]                # of simulated devices; a board of your own names its data in agent.toml"
    yield f"path = {json.dumps(str(data))}"
    yield 'partition = "dirichlet"   # devices have unlike shares of the classes; "iid" makes them alike'
    yield "alpha = 0.5           # the smaller, the more unlike"
    yield "# held = 0.2          # share of a device's examples that it does not train on"
    yield ""
    yield "[fleet]               # what `fedquilt simulate` simulates, in turn"
    yield f"devices = {devices}"
    yield f"boards = {json.dumps(list(BOARDS))}"
    yield f'budgets = ["{"1GB" if donors else "256MB"}"]   # memory that a task may take'


def _model_lines(inputs: int, classes: int, frozen: str) -> Iterator[str]:
    yield "[model]               # `fedquilt prepare` makes its first weights"
    yield 'name = "mlp"          # fully connected; docs/jobs.md lists the other networks'
    yield f"inputs = {inputs}"
    yield f"hidden = [{64 if inputs > 256 else 32}]"
    yield f"classes = {classes}"
    if frozen:
        yield f'# weights = "FILE"    # of a pre-trained network, of which the method keeps {frozen}'


def _donor_lines() -> Iterator[str]:
    yield "[input]               # of the donors: images are scaled to it, and standardised as ImageNet's"
    yield "channels = 3"
    yield "size = 64             # larger images are told apart better, and take more time"
    yield "mean = [0.485, 0.456, 0.406]"
    yield "std = [0.229, 0.224, 0.225]"
    for name, network in DONORS.items():
        yield ""
        yield "[[donors]]"
        yield f'name = "{name}"'
        yield f'network = {{ name = "{network}" }}'
        yield 'weights = "DEFAULT"   # torchvision\'s, which `fedquilt prepare` downloads; or a file'


def _toml_value(value: Any) -> str:
    if value is None:
        return "..."
    return json.dumps(list(value) if isinstance(value, tuple) else value)
