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
from fedquilt.formats import job_bundle, toml
from fedquilt.tools.artefacts import prepare
from fedquilt.tools.experiments import comparison, run_cache, single_run
from fedquilt.tools.experiments.comparison import ComparisonCase
from fedquilt.tools.experiments.single_run import SeedRun
from fedquilt.tools.experiments.single_run import run_seed as play_job
from fedquilt.tools.lab.papers.grid import NETWORK, TO_TARGET, AxisPoint, Grid, GridRow, PretrainSettings, merge_tables
from fedquilt.tools.simulation import DeviceData
from fedquilt.tools.simulation.simulated_job import UNLIMITED_BYTES, choose_job_engine

WEIGHT_KEYS: Final = ("weights", "weights_classes")  # keys of [model] that the bundle replaces


class ExecutionOptions(msgspec.Struct, frozen=True):
    observe: str  # function of `custom`, or "" for none
    row: GridRow
    together: bool
    first: bool
    needs_test_set: bool
    device: str

    def select_devices(self, devices: list[DeviceData]) -> list[DeviceData]:
        if self.device:
            devices = [DeviceData(f"{self.device}-{i:02}", each.train, each.held_out) for i, each in enumerate(devices)]
        selected = devices[slice(*self.row.members)] if self.row.members else devices
        if not selected:
            raise JobError(
                f"members = {list(self.row.members)}, but the job has {len(devices)} devices: write a smaller first one"
            )
        return selected


class GridCell(NamedTuple):
    column: str
    row: str
    target: float | None
    case: ComparisonCase


def make_cells(
    grid: Grid, source: str, seeds: Sequence[int], rounds: int | None, columns: Sequence[str], out: Path
) -> list[GridCell]:
    """Return all runs of a table, and write their bundles into `out`. Raise JobError if a job is invalid.

    Runs are ordered by seed, so that an interrupted table is complete for its first seeds.
    """
    planned: list[tuple[str, str, dict[str, Any], PretrainSettings | None, GridRow, float | None]] = []
    for seed in seeds:
        for column in columns:
            points = grid.columns[column]
            data_set_job = write_data_sets(points, seed, out)
            for name, row in grid.rows.items():
                if row.best_of:
                    continue
                job = grid.make_job(points, row, seed, rounds, data_set_job)
                with toml.prefix_errors(f"{source}, row {name!r}"):
                    settings.parse_job(job)
                pretrain = [grid.pretrain, *(point.pretrain for point in points), row.pretrain]
                targets = [point.target for point in points if point.target is not None]
                planned.append((column, name, job, [None, *filter(None, pretrain)][-1], row, [None, *targets][-1]))
    bundles = make_bundles([(job, pretrain) for _, _, job, pretrain, _, _ in planned], out, grid.flops)
    cells = []
    for (column, name, job, _, row, target), folder in zip(planned, bundles, strict=True):
        network = {key: value for key, value in job.get("model", {}).items() if key not in WEIGHT_KEYS}
        settings_of_run = settings.parse_job({**job, "model": network})
        options = ExecutionOptions(grid.observe, row, grid.together, grid.first, grid.needs_test_set, grid.device)
        encoded = [msgspec.json.encode(each, order="sorted") for each in (settings_of_run, options)]
        cells.append(
            GridCell(
                column, name, target, ComparisonCase(encoded[0], str(folder), encoded[1], f"{column} {name}".strip())
            )
        )
    return cells


def write_data_sets(points: Sequence[AxisPoint], seed: int, out: Path) -> dict[str, Any]:
    """Write the points' data set and return the job of `simulate` for it, or {} without a data set."""
    from fedquilt.tools.lab.papers import data_sets

    names = [point.data_set for point in points if point.data_set]
    return dict(msgspec.to_builtins(data_sets.make_simulate_job(names[-1], seed, out))) if names else {}


def make_bundles(
    jobs: Sequence[tuple[Mapping[str, Any], PretrainSettings | None]], out: Path, flops: float = 0.0
) -> list[Path]:
    """Make the bundles of jobs, with pretraining if requested, and return their folders.

    Cached bundles are reused. With `flops`, predicted times and joules are those of a network with so many FLOPs per
    example.
    """
    todo: dict[Path, tuple[Any, ...]] = {}
    folders = []
    for job, pretrain in jobs:
        table = {key: job[key] for key in (*NETWORK, "name", "method", "seed", "params", "data") if key in job}
        if table.get("model"):
            table["model"] = {"seed": job["seed"], **table["model"]}
        if pretrain is not None:
            pretrain = msgspec.structs.replace(pretrain, data={"seed": job["seed"], **pretrain.data})
        needs_data = table.get("input", {}).get("standardise")  # the bundle depends on the data
        bundle_inputs = [table.get(part) for part in (*NETWORK, *(["data"] if needs_data else []))]
        key: list[Any] = [flops, bundle_inputs, msgspec.to_builtins(pretrain), job["seed"] if pretrain else 0]
        key += [
            run_cache.compute_code_digest(),
            *(run_cache.compute_content_digest(Path(file)) for file in _list_named_files(key)),
        ]
        folder = out / "starts" / hashlib.sha256(msgspec.json.encode(key, order="sorted")).hexdigest()[:24]
        folders.append(folder / "bundle")
        if not (folder / "bundle" / "bundle.json").exists():
            todo[folder] = (table, pretrain, folder, flops)
    for _ in comparison.run_in_processes(make_pretrained_bundle, list(todo.values())):
        pass
    return folders


def make_pretrained_bundle(
    table: dict[str, Any], pretrain: PretrainSettings | None, folder: Path, flops: float = 0.0
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if pretrain is not None:
        _use_one_thread()
        table = pretrain_networks(table, pretrain, folder)
    bundle = folder / ("prepared" if flops else "bundle")
    prepare.prepare_and_check(settings.parse_job(table), bundle)
    if flops:
        _copy_with_flops(bundle, folder / "bundle", flops)


def _copy_with_flops(folder: Path, out: Path, flops: float) -> None:
    bundle = job_bundle.load_bundle(folder)
    meta = {key: value for key, value in bundle.meta.items() if key != "layers"} | {"flops": flops}
    files = {name: (folder / "blobs" / ref.sha256).read_bytes() for name, ref in bundle.files.items()}
    job_bundle.write_bundle(out, meta, files)


def pretrain_networks(job: dict[str, Any], pretrain: PretrainSettings, folder: Path) -> dict[str, Any]:
    """Return the job with files of pretrained weights, in [model] or without [model] in each donor."""

    def write_weights(model: Mapping[str, Any], name: str) -> str:
        file = folder / f"{name}.safetensors"
        file.write_bytes(tensors.encode_tensors(pretrain_weights({**job, "model": model}, pretrain)))
        return str(file)

    if job.get("model"):
        return merge_tables(job, {"model": {"weights": write_weights(job["model"], "weights")}})
    donors = [{**donor, "weights": write_weights(donor["network"], donor["name"])} for donor in job["donors"]]
    return {**job, "donors": donors}


def pretrain_weights(job: Mapping[str, Any], pretrain: PretrainSettings) -> Tensors:
    """Return weights trained as in [pretrain], or computed by the function `pretrain.by`."""
    from fedquilt.edge_agent.engines.torch.engine import TorchEngine
    from fedquilt.models.networks import registry, traces

    fit_fields = [field.name for field in dataclasses.fields(Fit)]
    for unknown in pretrain.fit.keys() - set(fit_fields):
        raise JobError(f"[pretrain.fit] has unknown key {unknown}{toml.describe_choices(unknown, fit_fields)}")
    fit, examples_to_fit = Fit(**pretrain.fit), examples.load_split(DataSpec.parse(pretrain.data, "[pretrain.data]"))
    if pretrain.by:
        return dict(find_function(pretrain.by)(job, examples_to_fit))
    if pretrain.below:
        rows = examples_to_fit.y < pretrain.below
        examples_to_fit = Examples(examples_to_fit.x[rows], examples_to_fit.y[rows])
    model_table, seed = {key: value for key, value in job["model"].items() if key not in ("seed", "input")}, job["seed"]
    network = {**model_table, "input": job.get("input") or job["model"].get("input", {})}

    def draw_weights(seed: int) -> Tensors:
        return {
            name: value.numpy() for name, value in registry.load_network(model_table, seed=seed).state_dict().items()
        }

    trained: Tensors = TorchEngine(UNLIMITED_BYTES).train(
        network, draw_weights(seed), examples_to_fit, fit, tensors.seeded_rng(*pretrain.draw, seed)
    )[0]
    if not pretrain.new_head:
        return trained
    register = traces.register_from_table(network)
    head_names = register.tensors_of_modules([register.find_classifier() or ""])
    return {name: value if name in head_names else trained[name] for name, value in draw_weights(seed + 1000).items()}


def _list_named_files(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        own_files = [str(value[key]) for key in ("path", "weights") if isinstance(value.get(key), str)]
        return [*own_files, *(file for each in value.values() for file in _list_named_files(each))]
    return [file for each in value for file in _list_named_files(each)] if isinstance(value, list | tuple) else []


def _use_one_thread() -> None:
    # imported before torch, because the module sets how threads wait
    importlib.import_module("fedquilt.edge_agent.engines.torch.engine")
    import torch

    torch.set_num_threads(1)  # one run per core


def run_case(case: ComparisonCase, report: comparison.ReportRound) -> SeedRun:
    """Run a case on the fleet, on single devices if its row says `alone`, or by the row's `play`."""
    options, job, folder = msgspec.json.decode(case.how, type=ExecutionOptions), case.settings, Path(case.folder)
    if choose_job_engine(job, methods.load(job.method)) == "torch":
        _use_one_thread()
    if options.row.play:
        run: SeedRun = find_function(options.row.play)(job, folder, options)
        return run
    return (
        _run_single_devices(job, folder, options)
        if options.row.alone
        else run_with_options(job, folder, options, report)
    )


def run_with_options(
    job: JobSettings,
    folder: Path,
    options: ExecutionOptions,
    report: comparison.ReportRound = lambda done: None,
    **changes: Any,
) -> SeedRun:
    """Run a job with options of its grid and row. `changes` replace arguments of `single_run.run_seed`."""
    arguments: dict[str, Any] = {
        "select_members": options.select_devices,
        "offline_count": options.row.away,
        "batch_devices": options.together,
    }
    arguments |= {"evaluate_first": options.first, "tested": options.needs_test_set}
    if options.observe:
        arguments["observe_run"] = functools.partial(find_function(options.observe), folder, options)
    return play_job(job, folder, report, **{"workers": 0, **arguments, **changes})


def _run_single_devices(job: JobSettings, folder: Path, options: ExecutionOptions) -> SeedRun:
    # Each device trains alone and sends nothing. Values are means, weighted by examples for held-out accuracy.
    devices = options.select_devices(single_run.load_devices(job, folder)[0])
    draw = selection.CohortDraw(job.seed, 0)
    names = selection.select_cohort(draw, [each.device for each in devices], options.row.alone)
    selected = [member for member in devices if member.device in names]

    def run_device(device: str) -> SeedRun:
        def pick(devices: list[DeviceData]) -> list[DeviceData]:
            return [each for each in options.select_devices(devices) if each.device == device]

        return run_with_options(job, folder, options, select_members=pick)

    runs = [run_device(member.device) for member in selected]
    last_points = [run.marks[-1] for run in runs]
    figures: dict[str, Any] = {"held": None, "worst_decile": None, "up_bytes": 0}
    for name in ("rounds", "test", "mean", "seconds", "real_s", "energy_j", "down_bytes"):
        values = [getattr(mark, name) for mark in last_points]
        figures[name] = None if None in values else statistics.fmean(values)
    all_values = [
        (mark.held, len(member.held_out))
        for mark, member in zip(last_points, selected, strict=True)
        if len(member.held_out)
    ]
    sized_values = [(value, size) for value, size in all_values if value is not None]
    if sized_values and len(sized_values) == len(all_values):
        figures["held"] = sum(value * size for value, size in sized_values) / sum(size for _, size in sized_values)
        sorted_values = sorted(
            (value for value, _ in sized_values), reverse=not metrics.METRICS[last_points[0].metric].higher
        )
        figures["worst_decile"] = statistics.fmean(sorted_values[: math.ceil(len(sorted_values) / 10)])
    return msgspec.structs.replace(runs[-1], devices=len(runs), marks=(), figures=figures)


def find_function(name: str) -> Callable[..., Any]:
    """Return a function of `custom`, which is imported only for tables that name one."""
    function: Callable[..., Any] = getattr(importlib.import_module(f"{__package__}.custom"), name)
    return function


def read_value(run: SeedRun, name: str, target: float | None = None) -> Any:
    """Return a run's value by name, from `figures` or else from the last evaluation, or None if unknown.

    "test@3" is the value of "test" after 3 rounds. "seconds_to" is the value of "seconds" when "test" reaches the
    target, or None if it never does.
    """
    if name in run.figures:
        return run.figures[name]
    if name in TO_TARGET:
        assert target is not None  # as `GridTable.grid` requires
        points = [mark for mark in run.marks if mark.test is not None and mark.test >= target]
        return getattr(points[0], name.removesuffix("_to")) if points else None
    key, _, rounds = name.partition("@")
    points = [mark for mark in run.marks if not rounds or mark.rounds == int(rounds)]
    return getattr(points[-1], key, None) if points else None
