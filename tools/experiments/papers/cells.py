"""Runs of a grid: their starting weights, their execution by the machinery of `fedquilt compare`, and their values."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import msgspec

from fedquilt import config, methods, progress, tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import Job
from fedquilt.core import Examples, Fit, JobError, Tensors
from fedquilt.data import examples
from fedquilt.data.spec import DataSpec
from fedquilt.tools.artefacts import prepare
from fedquilt.tools.experiments import compare, parallel, run_cache
from fedquilt.tools.experiments.compare import Case
from fedquilt.tools.experiments.papers.grid import NETWORK, Grid, Pretrain, Row, merged
from fedquilt.tools.experiments.single_run import Run
from fedquilt.tools.experiments.single_run import play as play_job
from fedquilt.tools.simulation import Member
from fedquilt.tools.simulation.simulated_job import ROOM_BYTES, engine_of

WEIGHTS: Final = ("weights", "weights_classes")  # keys of [model] that are used up when the bundle is made


class How(msgspec.Struct, frozen=True):
    """Settings of a cell's run that are not in its job."""

    code: str  # the table's own module; "": none
    row: Row
    together: bool
    first: bool
    tested: bool
    device: str

    def pick(self, members: list[Member]) -> list[Member]:
        """Select and name the devices that take part."""
        if self.device:
            members = [Member(f"{self.device}-{i:02}", each.train, each.held) for i, each in enumerate(members)]
        return members[slice(*self.row.members)] if self.row.members else members


class Cell(NamedTuple):
    """One run of a table."""

    column: str
    row: str
    target: float | None
    case: Case


def cells(
    grid: Grid, code: str, where: str, seeds: Sequence[int], rounds: int | None, columns: Sequence[str], out: Path
) -> list[Cell]:
    """List all runs of a table, and make their bundles in `out`.

    Runs are ordered by seed, so that an interrupted table is complete for the first seeds.

    Raises:
        FedquiltError: a job of the table is wrong, or a bundle cannot be made.
    """
    found: list[tuple[str, str, dict[str, Any], Pretrain | None, Row, float | None]] = []
    for seed in seeds:
        for column in columns:
            points = grid.columns[column]
            for name, row in grid.rows.items():
                job = grid.job_of(points, row, seed, rounds)
                with config.naming(f"{where}, row {name!r}"):
                    settings.parse(job)
                before = [grid.pretrain, *(point.pretrain for point in points), row.pretrain]
                targets = [point.target for point in points if point.target is not None]
                found.append((column, name, job, [None, *filter(None, before)][-1], row, [None, *targets][-1]))
    bundles = starts(code, [(job, before) for _, _, job, before, _, _ in found], out)
    made = []
    for (column, name, job, _, row, target), folder in zip(found, bundles, strict=True):
        network = {key: value for key, value in job.get("model", {}).items() if key not in WEIGHTS}
        given = settings.parse({**job, "model": network})
        how = How(code, row, grid.together, grid.first, grid.tested, grid.device)
        written = [msgspec.json.encode(each, order="sorted") for each in (given, how)]
        made.append(Cell(column, name, target, Case(written[0], str(folder), written[1], f"{column} {name}".strip())))
    return made


# -- bundles --------------------------------------------------------------------------------------


def starts(code: str, wanted: Sequence[tuple[Mapping[str, Any], Pretrain | None]], out: Path) -> list[Path]:
    """Make the jobs' bundles, with pretraining where asked for; those in `out`/starts already are reused."""
    todo: dict[Path, tuple[Any, ...]] = {}
    found = []
    for job, before in wanted:
        table = {key: job[key] for key in (*NETWORK, "name", "method", "seed", "params", "data") if key in job}
        if table.get("model"):
            table["model"] = {"seed": job["seed"], **table["model"]}
        if before is not None:
            before = msgspec.structs.replace(before, data={"seed": job["seed"], **before.data})
        measured = table.get("int8") or table.get("input", {}).get("standardise")  # uses the job's own data
        of = [table.get(part) for part in (*NETWORK, *(["data"] if measured else []))]
        key: list[Any] = [of, msgspec.to_builtins(before), job["seed"] if before else 0]
        key += [run_cache.code(), *(run_cache.content(Path(file)) for file in _files(key))]
        folder = out / "starts" / hashlib.sha256(msgspec.json.encode(key, order="sorted")).hexdigest()[:24]
        found.append(folder / "bundle")
        if not (folder / "bundle" / "bundle.json").exists():
            todo[folder] = (code, table, before, folder)
    for _ in parallel.spread(start, list(todo.values())):
        pass
    return found


def start(code: str, table: dict[str, Any], before: Pretrain | None, folder: Path) -> None:
    """Make the bundle of a job in `folder`/bundle, with pretrained weights if asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    if before is not None:
        _one_thread()
        file = folder / "weights.safetensors"
        file.write_bytes(tensors.encode(pretrained(code, table, before)))
        table = merged(table, {"model": {"weights": str(file)}})
    prepare.prepare_and_check(settings.parse(table), folder / "bundle")


def pretrained(code: str, job: Mapping[str, Any], wanted: Pretrain) -> Tensors:
    """Train a network on examples of its own, before any round, and return its weights."""
    from fedquilt.edge_agent.engines.torch_engine import TorchEngine
    from fedquilt.models.networks import registry, tensor_register

    known = [field.name for field in dataclasses.fields(Fit)]
    for odd in wanted.fit.keys() - set(known):
        raise JobError(f"[pretrain.fit] {odd}: there are {', '.join(known)}{config.nearest(odd, known)}")
    fit, given = Fit(**wanted.fit), examples.load_all(DataSpec.parse(wanted.data, "[pretrain.data]"))
    if wanted.by:
        return dict(getattr(module(code), wanted.by)(job, given))
    if wanted.below:
        rows = given.y < wanted.below
        given = Examples(given.x[rows], given.y[rows])
    drawn, seed = {key: value for key, value in job["model"].items() if key not in ("seed", "input")}, job["seed"]
    network = {**drawn, "input": job.get("input") or job["model"].get("input", {})}

    def fresh(seed: int) -> Tensors:
        return {name: value.numpy() for name, value in registry.load(drawn, seed=seed).state_dict().items()}

    found: Tensors = TorchEngine(ROOM_BYTES).train(network, fresh(seed), given, fit, tensors.rng(*wanted.draw, seed))[0]
    if not wanted.new_head:
        return found
    register = tensor_register.of_table(network)
    last = register.tensors_of_modules([register.classifier() or ""])
    return {name: value if name in last else found[name] for name, value in fresh(seed + 1000).items()}


def _files(value: Any) -> list[str]:
    """Files and folders that a table names."""
    if isinstance(value, Mapping):
        own = [str(value[key]) for key in ("path", "weights") if isinstance(value.get(key), str)]
        return [*own, *(file for each in value.values() for file in _files(each))]
    return [file for each in value for file in _files(each)] if isinstance(value, list | tuple) else []


def _one_thread() -> None:
    importlib.import_module("fedquilt.edge_agent.engines.torch_engine")  # before torch: it sets how threads wait
    import torch

    torch.set_num_threads(1)  # one run per core


# -- runs -----------------------------------------------------------------------------------------


def play(case: Case, tell: compare.Tell) -> Run:
    """Play one run, by the row's `play` function if it names one.

    The table's code may have `look(folder, how, simulation, hands)`, which is called before the first round, after each
    round and at the end, and returns values for the run's `figures`. A `play` function takes (job, folder, how) and
    returns a `Run`.

    Raises:
        FedquiltError: the run has failed.
    """
    how, job, folder = msgspec.json.decode(case.how, type=How), case.settings, Path(case.folder)
    if engine_of(job, methods.load(job.method)) == "torch":
        _one_thread()
    code = module(how.code)
    if how.row.play:
        run: Run = getattr(code, how.row.play)(job, folder, how)
        return run
    return played(job, folder, how, tell)


def played(job: Job, folder: Path, how: How, tell: compare.Tell = lambda done: None, **changes: Any) -> Run:
    """Play a run with the grid's settings; `changes` replace arguments of `single_run.play`."""
    look = getattr(module(how.code), "look", None)
    options: dict[str, Any] = {"pick": how.pick, "away": how.row.away, "together": how.together}
    options |= {"first": how.first, "tested": how.tested}
    if look is not None:
        options["look"] = functools.partial(look, folder, how)
    return play_job(job, folder, tell, **{"workers": 0, **options, **changes})


def module(name: str) -> ModuleType | None:
    """Import the code of a table; None for the name ""."""
    return importlib.import_module(f"{__package__}.{name}") if name else None


def value_of(run: Run, name: str, target: float | None = None) -> Any:
    """A value of a run by its name: from its `figures`, else from its last evaluation; None: unknown.

    "test@3" is the value of "test" after 3 rounds. "rounds_to" counts the rounds to the first evaluation that reaches
    the target; None: never.
    """
    if name in run.figures:
        return run.figures[name]
    if name == "rounds_to":
        assert target is not None
        return next((mark.rounds for mark in run.marks if mark.test is not None and mark.test >= target), None)
    key, _, at = name.partition("@")
    marks = [mark for mark in run.marks if not at or mark.rounds == int(at)]
    return getattr(marks[-1], key, None) if marks else None


def played_all(
    todo: Sequence[Case], out: Path, say: Callable[[str], None], *, may_fail: bool = False
) -> dict[Case, Run]:
    """Play all cases, as many at a time as there are cores; runs finished earlier are read from `out`/runs.

    Args:
        todo: all cases.
        out: folder of finished runs.
        say: takes lines about the progress; those that failed are among them.
        may_fail: leave runs out that fail, unless all do.

    Raises:
        JobError: a run has failed; names it and the reason. The other runs are kept.
    """
    found, failed = compare.finished(todo, out, play, say, progress.LINE.at, abreast=True)
    progress.LINE.end()
    if failed and not (may_fail and found):
        raise JobError(f"{len(failed)} of {len(todo)} runs failed, the others are kept in {out / 'runs'}: {failed[0]}")
    return found
