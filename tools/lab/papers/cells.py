"""Runs of a grid: starting weights, execution and values."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from fedquilt import methods, metrics
from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds import selection
from fedquilt.coordinator.settings import JobSettings
from fedquilt.core import Examples, Fit, JobError, Tensors
from fedquilt.data import examples
from fedquilt.data.spec import DataSpec
from fedquilt.formats import toml
from fedquilt.tools.artefacts import prepare
from fedquilt.tools.experiments import comparison, run_cache, single_run
from fedquilt.tools.experiments.comparison import ComparisonCase
from fedquilt.tools.experiments.single_run import SeedRun
from fedquilt.tools.experiments.single_run import run_seed as play_job
from fedquilt.tools.lab.papers.grid import NETWORK, Grid, GridRow, PretrainSettings, merge_tables
from fedquilt.tools.simulation import DeviceData
from fedquilt.tools.simulation.simulated_job import ROOM_BYTES, choose_job_engine

WEIGHTS: Final = ("weights", "weights_classes")  # keys of [model] that are used up when the bundle is made


class ExecutionOptions(msgspec.Struct, frozen=True):
    observe: str  # function of `custom`, or "" for none
    row: GridRow
    together: bool
    first: bool
    tested: bool
    device: str

    def select_devices(self, members: list[DeviceData]) -> list[DeviceData]:
        if self.device:
            members = [DeviceData(f"{self.device}-{i:02}", each.train, each.held) for i, each in enumerate(members)]
        chosen = members[slice(*self.row.members)] if self.row.members else members
        if not chosen:
            raise JobError(
                f"members = {list(self.row.members)}: the job has {len(members)} devices: give a smaller first number"
            )
        return chosen


class GridCell(NamedTuple):
    column: str
    row: str
    target: float | None
    case: ComparisonCase


def make_cells(
    grid: Grid, where: str, seeds: Sequence[int], rounds: int | None, columns: Sequence[str], out: Path
) -> list[GridCell]:
    """Return all runs of a table, and make their bundles in `out`.

    Runs are ordered by seed, so that an interrupted table is complete for its first seeds.
    """
    found: list[tuple[str, str, dict[str, Any], PretrainSettings | None, GridRow, float | None]] = []
    for seed in seeds:
        for column in columns:
            points = grid.columns[column]
            for name, row in grid.rows.items():
                job = grid.make_job(points, row, seed, rounds)
                with toml.prefix_errors(f"{where}, row {name!r}"):
                    settings.parse_job(job)
                before = [grid.pretrain, *(point.pretrain for point in points), row.pretrain]
                targets = [point.target for point in points if point.target is not None]
                found.append((column, name, job, [None, *filter(None, before)][-1], row, [None, *targets][-1]))
    bundles = make_bundles([(job, before) for _, _, job, before, _, _ in found], out)
    made = []
    for (column, name, job, _, row, target), folder in zip(found, bundles, strict=True):
        network = {key: value for key, value in job.get("model", {}).items() if key not in WEIGHTS}
        given = settings.parse_job({**job, "model": network})
        how = ExecutionOptions(grid.observe, row, grid.together, grid.first, grid.needs_test_set, grid.device)
        written = [msgspec.json.encode(each, order="sorted") for each in (given, how)]
        made.append(
            GridCell(
                column, name, target, ComparisonCase(written[0], str(folder), written[1], f"{column} {name}".strip())
            )
        )
    return made


def make_bundles(wanted: Sequence[tuple[Mapping[str, Any], PretrainSettings | None]], out: Path) -> list[Path]:
    """Make the bundles of jobs, with pretraining if requested, and return their folders.

    Cached bundles are reused.
    """
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
        key += [
            run_cache.compute_code_digest(),
            *(run_cache.compute_content_digest(Path(file)) for file in _list_named_files(key)),
        ]
        folder = out / "starts" / hashlib.sha256(msgspec.json.encode(key, order="sorted")).hexdigest()[:24]
        found.append(folder / "bundle")
        if not (folder / "bundle" / "bundle.json").exists():
            todo[folder] = (table, before, folder)
    for _ in comparison.run_in_processes(make_pretrained_bundle, list(todo.values())):
        pass
    return found


def make_pretrained_bundle(table: dict[str, Any], before: PretrainSettings | None, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if before is not None:
        _use_one_thread()
        file = folder / "weights.safetensors"
        file.write_bytes(tensors.encode_tensors(pretrain_weights(table, before)))
        table = merge_tables(table, {"model": {"weights": str(file)}})
    prepare.prepare_and_check(settings.parse_job(table), folder / "bundle")


def pretrain_weights(job: Mapping[str, Any], wanted: PretrainSettings) -> Tensors:
    from fedquilt.edge_agent.engines.torch.engine import TorchEngine
    from fedquilt.models.networks import registry, traces

    known = [field.name for field in dataclasses.fields(Fit)]
    for odd in wanted.fit.keys() - set(known):
        raise JobError(f"[pretrain.fit] {odd} is unknown{toml.describe_choices(odd, known)}")
    fit, given = Fit(**wanted.fit), examples.load_split(DataSpec.parse(wanted.data, "[pretrain.data]"))
    if wanted.by:
        return dict(find_function(wanted.by)(job, given))
    if wanted.below:
        rows = given.y < wanted.below
        given = Examples(given.x[rows], given.y[rows])
    drawn, seed = {key: value for key, value in job["model"].items() if key not in ("seed", "input")}, job["seed"]
    network = {**drawn, "input": job.get("input") or job["model"].get("input", {})}

    def draw_weights(seed: int) -> Tensors:
        return {name: value.numpy() for name, value in registry.load_network(drawn, seed=seed).state_dict().items()}

    found: Tensors = TorchEngine(ROOM_BYTES).train(
        network, draw_weights(seed), given, fit, tensors.seeded_rng(*wanted.draw, seed)
    )[0]
    if not wanted.new_head:
        return found
    register = traces.register_from_table(network)
    last = register.tensors_of_modules([register.find_classifier() or ""])
    return {name: value if name in last else found[name] for name, value in draw_weights(seed + 1000).items()}


def _list_named_files(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        own = [str(value[key]) for key in ("path", "weights") if isinstance(value.get(key), str)]
        return [*own, *(file for each in value.values() for file in _list_named_files(each))]
    return [file for each in value for file in _list_named_files(each)] if isinstance(value, list | tuple) else []


def _use_one_thread() -> None:
    importlib.import_module("fedquilt.edge_agent.engines.torch.engine")  # before torch: it sets how threads wait
    import torch

    torch.set_num_threads(1)  # one run per core


def run_case(case: ComparisonCase, tell: comparison.ReportRound) -> SeedRun:
    """Run one case, with the `play` function of its row or on single devices if the row requires it."""
    how, job, folder = msgspec.json.decode(case.how, type=ExecutionOptions), case.settings, Path(case.folder)
    if choose_job_engine(job, methods.load(job.method)) == "torch":
        _use_one_thread()
    if how.row.play:
        run: SeedRun = find_function(how.row.play)(job, folder, how)
        return run
    return _run_single_devices(job, folder, how) if how.row.alone else run_with_options(job, folder, how, tell)


def run_with_options(
    job: JobSettings,
    folder: Path,
    how: ExecutionOptions,
    tell: comparison.ReportRound = lambda done: None,
    **changes: Any,
) -> SeedRun:
    options: dict[str, Any] = {
        "select_members": how.select_devices,
        "offline_count": how.row.away,
        "batch_devices": how.together,
    }
    options |= {"evaluate_first": how.first, "tested": how.tested}
    if how.observe:
        options["observe_run"] = functools.partial(find_function(how.observe), folder, how)
    return play_job(job, folder, tell, **{"workers": 0, **options, **changes})


def _run_single_devices(job: JobSettings, folder: Path, how: ExecutionOptions) -> SeedRun:
    # each device alone; values are means, held-out accuracy by examples, and such devices send nothing
    members = how.select_devices(single_run.load_devices(job, folder)[0])
    names = selection.select_cohort(job.seed, 0, [each.device for each in members], how.row.alone)
    chosen = [member for member in members if member.device in names]

    def run_device(device: str) -> SeedRun:
        def pick(every: list[DeviceData]) -> list[DeviceData]:
            return [each for each in how.select_devices(every) if each.device == device]

        return run_with_options(job, folder, how, select_members=pick)

    runs = [run_device(member.device) for member in chosen]
    last = [run.marks[-1] for run in runs]
    figures: dict[str, Any] = {"held": None, "worst_decile": None, "up_bytes": 0}
    for name in ("rounds", "test", "mean", "seconds", "real_s", "energy_j", "down_bytes"):
        values = [getattr(mark, name) for mark in last]
        figures[name] = None if None in values else statistics.fmean(values)
    sized = [(mark.held, len(member.held)) for mark, member in zip(last, chosen, strict=True) if len(member.held)]
    shares = [(value, size) for value, size in sized if value is not None]
    if shares and len(shares) == len(sized):
        figures["held"] = sum(value * size for value, size in shares) / sum(size for _, size in shares)
        ordered = sorted((value for value, _ in shares), reverse=not metrics.KNOWN[last[0].metric].higher)
        figures["worst_decile"] = statistics.fmean(ordered[: math.ceil(len(ordered) / 10)])
    return msgspec.structs.replace(runs[-1], devices=len(runs), marks=(), figures=figures)


def find_function(name: str) -> Callable[..., Any]:
    """Return a function of `custom`, which is imported only for tables that name one."""
    found: Callable[..., Any] = getattr(importlib.import_module(f"{__package__}.custom"), name)
    return found


def read_value(run: SeedRun, name: str, target: float | None = None) -> Any:
    """Return a value of a run by name, from `figures` or else from the last evaluation, or None.

    "test@3" is the value of "test" after 3 rounds. "rounds_to" is the number of rounds until the target is reached,
    or None if it never is.
    """
    if name in run.figures:
        return run.figures[name]
    if name == "rounds_to":
        assert target is not None  # as `GridTable.grid` requires
        return next((mark.rounds for mark in run.marks if mark.test is not None and mark.test >= target), None)
    key, _, at = name.partition("@")
    marks = [mark for mark in run.marks if not at or mark.rounds == int(at)]
    return getattr(marks[-1], key, None) if marks else None
