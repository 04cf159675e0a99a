"""`fedquilt deploy`."""

from __future__ import annotations

import re
from pathlib import Path

import click

from fedquilt.cli import homes, options
from fedquilt.cli.commands import argument, option, verb

_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _amount(text: str, units: dict[str, float], what: str) -> float:
    """A number with one of some units.

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(r"([+-]?\d+(?:\.\d+)?) ?([A-Za-z%]+)", text.strip())
    if found is None or found[2] not in units:
        raise ValueError(f"{text!r} is no {what}: a number with {', '.join(units)}")
    return float(found[1]) * units[found[2]]


def share(text: str) -> float:
    """A share of a whole: 0.05 of "5%"; a number without a sign of percent is one of percent too.

    Raises:
        ValueError: it is none, or not between 0 and 100 %.
    """
    value = _amount(text if text.endswith("%") else f"{text}%", {"%": 0.01}, "share")
    if not 0 <= value <= 1:
        raise ValueError(f"{text} is not between 0 % and 100 %")
    return round(value, 9)


def points(text: str) -> float:
    """A difference of two accuracies: -0.005 of "-0.5pt".

    Raises:
        ValueError: it is none.
    """
    value = _amount(text, {"pt": 0.01, "%": 0.01}, "number of points")
    if not -1 <= value <= 1:
        raise ValueError(f"{text} is not between -100pt and 100pt")
    return round(value, 9)


def seconds(text: str) -> float:
    """A time in seconds: 0.04 of "40ms".

    Raises:
        ValueError: it is none.
    """
    value = _amount(text, _SECONDS, "time")
    if not 0 <= value < 1e9:
        raise ValueError(f"{text} is less than 0, or too long")
    return round(value, 9)


def size(text: str) -> float:
    """A number of bytes: 500e6 of "500MB".

    Raises:
        ValueError: it is none.
    """
    from fedquilt.edge_agent.settings import UNITS

    return _amount(text, {**UNITS}, "size")


SHARE = options.Checked("share", share)
POINTS = options.Checked("points", points)
TIME = options.Checked("time", seconds)
SIZE = options.Checked("size", size)
CHECKS = "What a board asks of a model in its own check, beside what it runs now"
WHEN = "When"


@verb()
@argument(
    "run",
    "A run's id, or a job's name for its latest run; with --rollback and --abort a rollout (default: the latest).",
    required=False,
    shell_complete=options.runs,
)
@option("--model", type=options.PATH, metavar="FILE.onnx", help="Deploy this file instead of a run's result.")
@option("--to", "select", many=True, metavar="WORD", help="Only boards with this label or group; !WORD: without it.")
@option("--canary", type=SHARE, default="5%", help="Share of the boards that get it first; one at least.")
@option("--phases", type=SHARE, many=True, default=("25%", "100%"), help="Shares that have it after each phase.")
@option("--abort-above", type=SHARE, default="10%", help="Undo it once more than this share of the boards failed.")
@option("--patience", type=TIME, default="10min", help="Go on without boards that say nothing for so long.")
@option("--min-gain", type=POINTS, metavar="POINTS", help="Least gain in accuracy: -0.5pt.", group=CHECKS)
@option("--max-latency", type=TIME, help="Most time of an answer: 40ms.", group=CHECKS)
@option("--max-energy", type=options.ABOVE_0, metavar="J", help="Most joules of an answer.", group=CHECKS)
@option("--max-peak", type=SIZE, help="Most memory of the check: 500MB.", group=CHECKS)
@option("--soak", type=TIME, default="60s", help="For how long it has to hold before a board keeps it.", group=WHEN)
@option("--window", metavar="HH:MM-HH:MM", help="Only within this time of the boards' day: 02:00-05:00.", group=WHEN)
@option("--force", is_flag=True, help="Exchange it also while a board carries out a task.", group=WHEN)
@option("--rollback", is_flag=True, help="Take a rollout back that is done: boards return to what they ran before.")
@option("--abort", is_flag=True, help="End a rollout that is under way: boards that have it return.")
@options.home
def deploy(
    run: str | None,
    model: Path | None,
    select: tuple[str, ...],
    canary: float,
    phases: tuple[float, ...],
    abort_above: float,
    patience: float,
    min_gain: float | None,
    max_latency: float | None,
    max_energy: float | None,
    max_peak: float | None,
    soak: float,
    window: str | None,
    force: bool,
    rollback: bool,
    abort: bool,
    home: Path,
) -> None:
    """Bring a run's result, or an ONNX file, to the boards in phases; the coordinator of --home carries it out."""
    from msgspec.structs import replace

    from fedquilt import graph_check, wire
    from fedquilt.coordinator import requests
    from fedquilt.coordinator.rollouts import Plan
    from fedquilt.core import ModelError, StoreError
    from fedquilt.tools.artefacts import export

    options.exclusive(rollback=rollback, abort=abort, model=model)
    with homes.existing(home) as store:
        if rollback or abort:
            print((requests.roll_back if rollback else requests.abort)(store, run or ""))
            return
        if (run is None) == (model is None):
            raise click.UsageError("name RUN or --model FILE.onnx: one of them", click.get_current_context())
        plan = Plan(
            kind="model",
            name="",
            select=select,
            canary=canary,
            phases=phases,
            abort_above=abort_above,
            patience_s=patience,
            limits=wire.Limits(
                min_gain=min_gain,
                max_latency_s=max_latency,
                max_energy_j=max_energy,
                max_peak_bytes=None if max_peak is None else int(max_peak),
            ),
            soak_s=soak,
            window=window or "",
            force=force,
        )
        plan.require()
        if model is not None:
            try:
                payload, what = model.read_bytes(), model.name
            except OSError as error:
                raise StoreError(f"cannot read {model}: {error.strerror}") from None
            name = model.stem
        else:
            payload, what = export.graph(store, str(run))
            name = store.job(str(run)).id
        try:
            graph_check.of_bytes(payload)
        except ModelError as error:
            raise ModelError(f"{what}: {error}") from None
        id = requests.deploy(store, replace(plan, name=name[:200]), payload)
        print(f"{id}: {what}; `fedquilt rollouts {id} --home {home}` shows how far it is")
        if not store.served():
            print(f"no coordinator serves {home}: `fedquilt serve --home {home}` carries it out")
