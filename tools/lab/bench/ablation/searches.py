"""Ablation of FedStitch: complete searches with one part changed, and their baselines.

Each search runs through the coordinator's own rounds, for each data partition and seed. Accuracy is that of the
selected network on the test split. Runs are independent, so every core plays one with one thread. Finished runs are
stored in a folder and not repeated.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedquilt.coordinator import settings as jobs
from fedquilt.coordinator.rounds import cohort_selection
from fedquilt.coordinator.settings import JobSettings
from fedquilt.core import FedquiltError, JobError
from fedquilt.data.spec import DataSpec
from fedquilt.formats import job_bundle
from fedquilt.methods import fedstitch
from fedquilt.models.stitching import display_names
from fedquilt.models.stitching.algebra import cka
from fedquilt.tools.experiments import parallel_runs, run_cache
from fedquilt.tools.experiments.baselines import MOST_ROUNDS, BaselineResult, BaselineSetup, pool_examples
from fedquilt.tools.experiments.run_cache import RunCache
from fedquilt.tools.lab.bench.ablation.rows import ALIGNED, BASE, PARTS, VARIANTS, AblationRow
from fedquilt.tools.simulation import DeviceData, agents
from fedquilt.tools.simulation.run import iterate_states
from fedquilt.tools.simulation.simulated_job import SimulatedRound, Simulation
from fedquilt.tools.simulation.workers.backend import WorkBackend

BUDGET_BYTES = 2 << 30  # of each process
ALONE = 5  # devices that search on their own, at most
LEAST = 2 * cka.MIN_IMAGES  # examples of a device that can score; one with fewer declines


class AblationCase(msgspec.Struct, frozen=True):
    """One run of an ablation. `job` is the job as JSON with the partition and seed of the run."""

    job: bytes
    folder: str  # of the bundle
    condition: str
    seed: int
    part: str

    @property
    def key(self) -> str:
        return run_cache.make_key(
            self.job, self.part.encode(), bundle=Path(self.folder), data=run_cache.list_data_paths(self.job)
        )

    def __str__(self) -> str:
        return f"{self.condition}, seed {self.seed}, {self.part}"


@dataclass(frozen=True)
class AblationSetting:
    """Engine, data and job of a run."""

    bench: BaselineSetup
    members: Sequence[DeviceData]
    job: JobSettings
    folder: Path  # of its bundle


Finished = tuple[AblationCase, "list[AblationRow] | FedquiltError", float]  # and its seconds
Player = Callable[[Sequence[AblationCase]], Iterator[Finished]]


# -- what is to be played -------------------------------------------------------------------------


def create_cases(
    job: JobSettings, folder: Path, alphas: Sequence[str], seeds: Sequence[int], only: Sequence[str] = ()
) -> list[AblationCase]:
    """Create a case for each partition, seed and part.

    Args:
        job: Stitching job.
        folder: Bundle of the job.
        alphas: Concentrations of Dirichlet partitions, or "iid". Without any, the job's own partition is used.
        seeds: Seeds of the runs.
        only: Names among PARTS. Without any, all parts that the donors allow are used.

    Raises:
        JobError: If the job does not stitch or has no data, or a name is unknown.
    """
    if job.method != "fedstitch":
        raise JobError(f"job {job.name!r} is one of {job.method}: ablations are of fedstitch")
    if not job.data:
        raise JobError(f"job {job.name!r} has no [data] table: what is shared out among its devices, and tested on")
    unknown = sorted(set(only) - set(PARTS))
    if unknown:
        raise JobError(f"--only {' '.join(unknown)}: there are {', '.join(PARTS)}")
    aligned = any(donor.get("align") for donor in job_bundle.load_bundle(folder).meta["donors"].values())
    parts = [part for part in PARTS if part in only or (not only and (aligned or part not in ALIGNED))]
    found = []
    for condition, data in dict(_apply_partition(job, alpha) for alpha in alphas or ("",)).items():
        for seed in sorted(set(seeds)):
            table = {**msgspec.to_builtins(job), "seed": seed, "data": {**data, "seed": seed}}
            try:
                msgspec.convert(table["data"], DataSpec)
            except msgspec.ValidationError as error:
                raise JobError(f"[data] of job {job.name!r}, {condition}, seed {seed}: {error}") from None
            exact = msgspec.json.encode(table, order="sorted")
            found += [AblationCase(exact, str(folder), condition, seed, part) for part in parts]
    return found


def _apply_partition(job: JobSettings, alpha: str) -> tuple[str, dict[str, Any]]:
    data = dict(job.data)
    if alpha == "iid":
        data["partition"] = alpha
    elif alpha:
        try:
            data |= {"partition": "dirichlet", "alpha": float(alpha)}
        except ValueError:
            raise JobError(f"--alpha {alpha}: a number above 0, or iid") from None
    match data.get("partition", "all"):
        case "dirichlet":
            return f"alpha {data.get('alpha', 0.5):g}", data
        case "classes":
            return f"{data.get('classes', 2)} classes each", data
        case other:
            return str(other), data


# -- playing one ----------------------------------------------------------------------------------


def run_case(case: AblationCase) -> list[AblationRow]:
    setting = _load_setting(case.job, case.folder)
    began_s = time.perf_counter()
    rows = run_search(case.part, setting) if case.part in VARIANTS else run_baseline(case.part, setting)
    wall_s = round(time.perf_counter() - began_s, 3)
    known = {"condition": case.condition, "seed": case.seed, "part": case.part, "wall_s": wall_s}
    return [msgspec.convert({**row, **known, "tested": len(setting.bench.test)}, AblationRow) for row in rows]


@functools.lru_cache(maxsize=1)
def _load_setting(job: bytes, folder: str) -> AblationSetting:
    # cached, because reading the examples of a large file takes longer than scoring
    from fedquilt.edge_agent.engines.onnx.engine import OnnxEngine

    given, opened = jobs.parse_job(msgspec.json.decode(job)), job_bundle.load_bundle(Path(folder))
    members, test = agents.FleetPlan(given, Path(folder), Path()).load_devices()
    engine = OnnxEngine(BUDGET_BYTES, threads=1)
    bench = BaselineSetup(
        opened, lambda name: Path(folder) / "blobs" / opened.files[name].sha256, engine, pool_examples(members), test
    )
    able = [each for each in members if len(each.train) >= LEAST]
    if not able:
        raise JobError(f"none of {len(members)} devices has the {LEAST} images that scoring needs: have fewer devices")
    size = 0 if given.cohort.size >= len(able) else given.cohort.size
    params = asdict(replace(jobs.parse_params(given), **BASE))
    cohort = msgspec.structs.replace(given.cohort, size=size)
    played = msgspec.structs.replace(given, rounds=MOST_ROUNDS, params=params, cohort=cohort)
    return AblationSetting(bench, able, played, Path(folder))


def run_search(part: str, setting: AblationSetting) -> list[dict[str, Any]]:
    bench, variant, scored = setting.bench, VARIANTS[part], 0
    job = msgspec.structs.replace(setting.job, params={**setting.job.params, **variant.changes})
    method, rounds = variant.double(fedstitch.METHOD), list[SimulatedRound]()

    def observe(simulation: Simulation, hands: WorkBackend) -> None:
        rounds[:] = simulation.rounds

    for state in iterate_states(
        job, setting.folder, setting.members, load=lambda name: method, engine=bench.engine, observe=observe
    ):
        scored += len(state.pool) if state.phase == "score" else 0
    found, tasks = fedstitch.result(state), sum(len(each.devices) for each in rounds)
    return [
        {
            "name": variant.label,
            "accuracy": bench.compute_accuracy(found),
            "rounds": len(rounds),
            "task_s": sum(each.cpu_s for each in rounds) / tasks,
            "down_bytes": sum(each.down_bytes for each in rounds) / tasks,
            "up_bytes": sum(each.up_bytes for each in rounds) / tasks,
            "scored": scored,
            "path": display_names.network_name(found.meta["taps"], found.meta["head"] is not None),
        }
    ]


def run_baseline(part: str, setting: AblationSetting) -> list[dict[str, Any]]:
    bench, job, folder = setting.bench, setting.job, setting.folder
    match part:
        case "alone":
            devices = {each.device: each for each in setting.members}
            some = [devices[name] for name in cohort_selection.select_cohort(job.seed, 0, devices, ALONE)]
            accuracies = [each.accuracy for each in bench.evaluate_single_devices(job, folder, some)]
            return [
                {"name": "one device alone, mean", "accuracy": float(np.mean(accuracies))},
                {"name": f"one device alone, best of {len(some)}", "accuracy": max(accuracies)},
            ]
        case "unmodified":
            return _label_results("{}, unmodified", bench.evaluate_unmodified())
        case "self-stitched":
            return _label_results("{}, stitched to itself", bench.evaluate_self_stitched(job, folder, setting.members))
        case _:
            return _label_results("{}, new head", bench.evaluate_new_heads())


def _label_results(label: str, results: Iterable[BaselineResult]) -> list[dict[str, Any]]:
    return [{"name": label.format(each.name), "accuracy": each.accuracy} for each in results]


# -- playing all ----------------------------------------------------------------------------------


def run_cases(
    todo: Sequence[AblationCase], out: Path, player: Player, say: Callable[[str], None]
) -> tuple[list[AblationRow], list[str]]:
    """Run the cases that `out`/runs does not contain. Return all rows, and the errors."""
    store = RunCache(out, list[AblationRow])
    keys = {case: case.key for case in todo}  # of the data as they are before anything runs
    found = {case: rows for case, key in keys.items() if (rows := store.find(key)) is not None}
    missing = [case for case in todo if case not in found]
    for line in store.describe_cache(len(found), keys.values()):
        say(line)
    failed: list[str] = []
    began_s = time.monotonic()
    for count, (case, came, took_s) in enumerate(player(missing), 1):
        left_s = (time.monotonic() - began_s) / count * (len(missing) - count)
        told = f"[{count}/{len(missing)}, about {left_s / 60:.0f} min left] {case}"
        if isinstance(came, FedquiltError):
            failed.append(f"{case}: {came}")
            say(f"{told}: failed: {came}")
            continue
        found[case] = came
        store.store(keys[case], came)
        say(f"{told}: {', '.join(f'{100 * row.accuracy:.1f} %' for row in came)} in {took_s:.0f} s")
    return [row for case in todo for row in found.get(case, ())], failed


def run_in_processes(todo: Sequence[AblationCase]) -> Iterator[Finished]:
    """Run cases in one process per core, and yield each result when finished."""
    for _, finished in parallel_runs.run_in_processes(_try_case, [(case,) for case in todo]):
        yield finished


def _try_case(case: AblationCase) -> Finished:
    began_s = time.perf_counter()
    try:
        rows: list[AblationRow] | FedquiltError = run_case(case)
    except FedquiltError as error:
        rows = error
    return case, rows, time.perf_counter() - began_s


# -- the command ----------------------------------------------------------------------------------


def main(
    job: JobSettings,
    folder: Path,
    out: Path,
    *,
    alphas: Sequence[str] = (),
    seeds: Sequence[int] = (0, 1, 2),
    only: Sequence[str] = (),
    format: str = "text",
) -> int:
    """Run the missing cases, print the table and write ablation.svg. Return 1 if a case failed."""
    from fedquilt.tools.lab.bench.ablation import (
        plot as ablation_plot,  # before long work: a missing library is told now
    )
    from fedquilt.tools.lab.bench.ablation import table  # before long work: a missing library is told now

    rows, failed = run_cases(create_cases(job, folder, alphas, seeds, only), out, run_in_processes, _print_progress)
    plot = out / "ablation.svg"
    if rows:
        ablation_plot.draw_plot(rows, plot)
    if format == "json":
        result = {
            "bench": "ablate",
            "job": job.name,
            "table": table.summarise_rows(rows),
            "verdicts": table.verdicts_by_condition(rows),
            "failed": failed,
            "runs": rows,
        }
        print(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        print("\n".join([*table.format_table(rows), *(f"failed: {each}" for each in failed), f"plot: {plot}"]))
    return 1 if failed else 0


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
