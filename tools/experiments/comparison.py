"""Comparison of several methods on one simulated fleet with several seeds.

A seed determines the partition, the cohorts and the order of examples, the same for all methods. All runs start with
the weights of the bundle. Seconds and joules are those of the simulated boards. Finished runs are cached in a folder.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fedquilt import methods, metrics
from fedquilt.console import progress, units
from fedquilt.coordinator import settings as jobs
from fedquilt.coordinator.settings import JobSettings, require_matching_bundle
from fedquilt.coordinator.views import event_messages, scores
from fedquilt.core import FedquiltError, JobError
from fedquilt.data import compatibility
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent.task import process
from fedquilt.formats import job_bundle, toml
from fedquilt.tools.experiments import run_cache
from fedquilt.tools.experiments.run_cache import RunCache
from fedquilt.tools.experiments.single_run import FORMAT, SeedRun, run_seed


class ComparisonCase(msgspec.Struct, frozen=True):
    job: bytes
    folder: str  # of the bundle
    how: bytes = b""  # further arguments of the player as JSON, or empty
    label: str = ""  # what the run is called; empty: by its method

    @property
    def cache_key(self) -> str:
        parts = (str(FORMAT).encode(), self.job, run_cache.list_plugin_versions(self.job), *filter(None, [self.how]))
        return run_cache.make_key(*parts, bundle=Path(self.folder), data=run_cache.list_data_paths(self.job))

    @property
    def name(self) -> str:
        job = self.settings
        return f"{self.label or job.method}, seed {job.seed}"

    @property
    def settings(self) -> JobSettings:
        return jobs.parse_job(msgspec.json.decode(self.job))


Tell = Callable[[int], None]  # hears how many rounds are done
Show = Callable[[str, float, float], None]
Player = Callable[[ComparisonCase, Tell], SeedRun]


def make_cases(
    job: JobSettings,
    folder: Path,
    names: Sequence[str] = (),
    seeds: Sequence[int] = (0, 1, 2),
    *,
    rounds: int | None = None,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[ComparisonCase]:
    """Return one case per seed and method, in the order of seeds.

    An interrupted comparison is thus complete for its first seeds.
    """
    made = job_bundle.load_bundle(folder)
    require_matching_bundle(job, made)
    if not job.data:
        raise JobError(f"job {job.name!r} has no [data] table: add one with the data of its devices")
    chosen = list(dict.fromkeys(names or (job.method, *job.compare)))
    changes = changes or {}
    for name in (*chosen, *job.compare, *changes):
        methods.load(name)
    if idle := sorted(changes.keys() - set(chosen)):
        raise JobError(f"--set {idle[0]}...: {idle[0]} is not compared; --methods {' '.join([*chosen, idle[0]])}")
    compatibility.open_compatible_data(made.meta, DataSpec.parse(job.data))
    if job.test:
        compatibility.open_compatible_data(made.meta, DataSpec.parse(scores.make_test_table(job), "[test]"))
    found = []
    for seed in sorted(set(seeds)):
        for name in chosen:
            method = methods.load(name)
            every = 0 if method.check is None else job.check.every or 1
            table = {
                **msgspec.to_builtins(job),
                "method": name,
                "params": merge_params(job, name, changes.get(name, {})),
                "seed": seed,
                "data": {**job.data, "seed": seed},
                "engine": job.engine if job.engine in method.engines else None,
                "rounds": rounds or job.rounds,
                "check": {"every": every},
            }
            table.pop("compare")
            jobs.parse_job(table)
            found.append(ComparisonCase(msgspec.json.encode(table, order="sorted"), str(folder)))
    return found


def merge_params(job: JobSettings, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a method: shared [params], then its [compare] table, then the changes.

    Parameters in [params] that the method does not have are ignored. In the other two they are kept, and raise an
    error when the job is parsed.
    """
    known = {field.name for field in dataclasses.fields(methods.load(name).params)}
    shared = {key: value for key, value in job.params.items() if key in known or name == job.method}
    return {**shared, **job.compare.get(name, {}), **changes}


def parse_changes(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return parameters by method from texts such as "fedprox.mu=0.1".

    Values are TOML. A bare word is a string.
    """
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        where, equals, value = text.partition("=")
        name, dot, key = where.strip().partition(".")
        if not (equals and dot and name and key and value.strip()):
            raise JobError(f"--set {text}: wanted METHOD.PARAMETER=VALUE, as in fedprox.mu=0.1")
        try:
            read = toml.parse_toml(f"value = {value}", text)["value"]
        except JobError:
            read = value.strip()
        found.setdefault(name, {})[key] = read
    return found


def run_cases(
    todo: Sequence[ComparisonCase],
    out: Path,
    player: Player,
    say: Callable[[str], None],
    show: Show = progress.LINE.show_status,
    *,
    abreast: bool = False,
) -> tuple[dict[ComparisonCase, SeedRun], list[str]]:
    """Run the cases that are not cached in `out`/runs.

    Returns:
        The run of each case that succeeded, and a sentence for each failure.
    """
    store = RunCache(out)
    keys = {case: case.cache_key for case in todo}  # of the data as they are before anything runs
    kept = {case: store.find(key) for case, key in keys.items()}
    found = {case: run for case, run in kept.items() if run is not None}
    missing = [case for case in keys if case not in found]
    for line in store.describe_cache(len(found), keys.values()):
        say(line)
    failed: list[str] = []
    made = _run_in_parallel(missing, player, show) if abreast else _run_sequentially(missing, player, show)
    for count, (case, outcome) in enumerate(made, 1):
        if isinstance(outcome, str):
            failed.append(f"{case.name}: {outcome}")
            say(f"run {count} of {len(missing)}: {case.name} failed: {outcome}")
            continue
        found[case] = outcome
        store.store(keys[case], outcome)
        (shown,), _ = select_scores([outcome], [each.settings.method for each in todo])
        last = shown.marks[-1] if shown.marks else None
        told = (
            "" if last is None or last.value is None else f", {event_messages.format_metric(last.metric, last.value)}"
        )
        say(f"run {count} of {len(missing)}: {case.name}{told}")
    progress.LINE.end_operation()
    return {case: found[case] for case in todo if case in found}, failed


def _run_sequentially(
    missing: Sequence[ComparisonCase], player: Player, show: Show
) -> Iterator[tuple[ComparisonCase, SeedRun | str]]:
    rounds = [case.settings.rounds for case in missing]
    for count, case in enumerate(missing):

        def show_round(done: int, count: int = count, case: ComparisonCase = case) -> None:
            line = f"run {count + 1} of {len(missing)}: {case.name}: round {done} of {rounds[count]}"
            show(line, sum(rounds[:count]) + done, sum(rounds))

        yield case, _run_case_or_describe_error(player, case, show_round)


def _run_in_parallel(
    missing: Sequence[ComparisonCase], player: Player, show: Show
) -> Iterator[tuple[ComparisonCase, SeedRun | str]]:
    began_s, done = time.monotonic(), 0

    def show_progress() -> None:
        elapsed = units.format_duration(time.monotonic() - began_s)
        show(f"{done} of {len(missing)} runs are done, {elapsed} so far", done, len(missing))

    with progress.call_periodically(show_progress):
        for index, run in run_in_processes(_run_case_or_describe_error, [(player, case) for case in missing]):
            done += 1
            yield missing[index], run


def _run_case_or_describe_error(player: Player, case: ComparisonCase, tell: Tell | None = None) -> SeedRun | str:
    try:
        return player(case, tell or (lambda done: None))
    except FedquiltError as error:
        return str(error)


def select_scores(runs: Sequence[SeedRun], compared: Iterable[str] = ()) -> tuple[list[SeedRun], str]:
    """Return the runs with their common scores, and a note on scores not of the test set.

    A test set cannot measure networks that differ by device. Such methods are compared on held-out shares, unless
    another method has no scores on them.
    """
    names = list(dict.fromkeys([*(run.method for run in runs), *compared]))
    personal = ", ".join(name for name in names if methods.load(name).personal_model is not None)
    if not personal or not any(run.tested for run in runs):
        return list(runs), ""
    blind = ", ".join(name for name in names if methods.load(name).check is None)
    if blind:
        return list(runs), (
            f"on the test set, because {blind} has no scores on held-out shares: the networks of {personal} differ by "
            "device, and the one of a new device is tested"
        )
    dropped = [
        msgspec.structs.replace(
            run, tested=0, marks=tuple(msgspec.structs.replace(mark, test=None) for mark in run.marks)
        )
        for run in runs
    ]
    return dropped, f"on held-out shares, because the networks of {personal} differ by device"


def compare_and_print(
    job: JobSettings,
    folder: Path,
    out: Path,
    *,
    names: Sequence[str] = (),
    seeds: Sequence[int] = (0, 1, 2),
    rounds: int | None = None,
    target: float | None = None,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    workers: int | None = None,
    engine: str = "auto",
    mixed: bool = False,
    format: str = "text",
) -> int:
    """Run missing cases, print the table and write its files. Return 1 if a run failed, otherwise 0."""
    from fedquilt.tools.experiments import tables

    metric = metrics.MAIN[metrics.task_from_network(job.model)]
    if target is not None and metric.share and target > 1:
        raise JobError(f"--target {target:g}: {metric.title} runs from 0 to 1; for {target:g} % give {target / 100:g}")
    todo = make_cases(job, folder, names, seeds, rounds=rounds, changes=changes)

    def run_case(case: ComparisonCase, tell: Tell) -> SeedRun:
        return run_seed(case.settings, Path(case.folder), tell, workers, engine=engine, mixed=mixed)

    found, failed = run_cases(todo, out, run_case, progress.LINE.print_lines)
    runs, note = select_scores(list(found.values()))
    result = tables.make_result(job.name, runs, target, failed, note)
    files, problem = tables.write_files(result, runs, out)
    unmade = [problem] if problem else []
    if format == "json":
        print(msgspec.json.format(msgspec.json.encode(result)).decode())
        progress.LINE.print_lines(*unmade)
    else:
        failures = [f"failed: {each}" for each in failed]
        print("\n".join([*tables.format_table(result), *failures, *files, *unmade]))
    return 1 if failed else 0


T = TypeVar("T")


class RunProcessError(FedquiltError): ...


def run_in_processes(
    play: Callable[..., T], todo: Sequence[tuple[Any, ...]], workers: int | None = None
) -> Iterator[tuple[int, T]]:
    """Yield the index and the result of each call as it finishes. An exception in one call stops all."""
    if not todo:
        return
    count = min(workers or len(os.sched_getaffinity(0)), len(todo))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, _initialise_worker, (os.getpid(),)) as pool:
        try:
            waiting = {pool.submit(_run_call_until_terminated, play, given): index for index, given in enumerate(todo)}
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except BrokenProcessPool:
            raise RunProcessError(
                f"a process that plays runs has ended, {count} at a time: most likely the kernel killed it for want of "
                "memory, then allow this command fewer cores (taskset -c 0 fedquilt ...); what it said stands above"
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def _initialise_worker(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends this process
    signal.signal(signal.SIGTERM, _raise_on_sigterm)
    process.exit_with_parent(parent)


class _TerminationExit(SystemExit): ...


def _raise_on_sigterm(number: int, frame: object) -> None:
    raise _TerminationExit(128 + number)  # by way of all that cleans up


def _run_call_until_terminated(play: Callable[..., T], given: tuple[Any, ...]) -> T:
    # a terminated process must not start the next call
    try:
        return play(*given)
    except _TerminationExit:
        os._exit(1)
