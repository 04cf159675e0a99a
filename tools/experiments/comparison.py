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
from fedquilt.console.table import fold_line
from fedquilt.coordinator import settings as jobs
from fedquilt.coordinator.settings import JobSettings, require_matching_bundle
from fedquilt.coordinator.storage.rows import make_run_id
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
    folder: str  # folder of the bundle
    how: bytes = b""  # further arguments of `RunCase` as JSON, or empty
    label: str = ""  # name of the run, or empty for the name of its method

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


ReportRound = Callable[[int], None]  # receives the number of finished rounds
ShowStatus = Callable[[str, float, float], None]
RunCase = Callable[[ComparisonCase, ReportRound], SeedRun]


def make_cases(
    job: JobSettings,
    folder: Path,
    names: Sequence[str] = (),
    seeds: Sequence[int] = (0, 1, 2),
    *,
    rounds: int | None = None,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[ComparisonCase]:
    """Return a case per seed and method, in the order of seeds, or raise JobError for an invalid job.

    An interrupted comparison is thus complete for its first seeds.
    """
    bundle = job_bundle.load_bundle(folder)
    require_matching_bundle(job, bundle)
    if not job.data:
        raise JobError(f"job {job.name!r} has no [data] table: add one with the data of its devices")
    chosen = list(dict.fromkeys(names or (job.method, *job.compare)))
    changes = changes or {}
    for name in (*chosen, *job.compare, *changes):
        methods.load(name)
    if idle := sorted(changes.keys() - set(chosen)):
        raise JobError(f"--set {idle[0]}...: {idle[0]} is not compared: use --methods {' '.join([*chosen, idle[0]])}")
    compatibility.open_compatible_data(bundle.meta, DataSpec.parse(job.data))
    if job.test:
        compatibility.open_compatible_data(bundle.meta, DataSpec.parse(scores.make_test_table(job), "[test]"))
    cases = []
    for seed in sorted(set(seeds)):
        for name in chosen:
            method = methods.load(name)
            evaluation_interval = 0 if method.check is None else job.check.every or 1
            table = {
                **msgspec.to_builtins(job),
                "method": name,
                "params": merge_params(job, name, changes.get(name, {})),
                "seed": seed,
                "data": {**job.data, "seed": seed},
                "engine": job.engine if jobs.supports_engine(method, job.engine) else None,
                "rounds": rounds or job.rounds,
                "check": {"every": evaluation_interval},
            }
            table.pop("compare")
            jobs.parse_job(table)
            cases.append(ComparisonCase(msgspec.json.encode(table, order="sorted"), str(folder)))
    return cases


def describe_other_engines(job: JobSettings, cases: Sequence[ComparisonCase]) -> list[str]:
    """Return a line on the methods that do not support the job's engine, or no line without such methods."""
    engines = {
        case.settings.method: " or ".join(jobs.list_engines(case.settings, methods.load(case.settings.method)))
        for case in cases
        if case.settings.engine != job.engine
    }
    texts = ", ".join(f"{name} runs on {engine}" for name, engine in engines.items())
    return [f'engine = "{job.engine}" does not support every method: {texts}'] if engines else []


def describe_other_params(job: JobSettings, cases: Sequence[ComparisonCase]) -> list[str]:
    """Return a line on each method whose parameters differ from the job's."""
    job_params, lines = _all_params(job.method, job.params), []
    for method, params in {case.settings.method: case.settings.params for case in cases}.items():
        own_params = _all_params(method, params)
        refused = {key: value for key, value in job.params.items() if key in own_params and key not in params}
        other = {
            key: value
            for key, value in own_params.items()
            if key not in refused and value not in (None, "", ()) and value != job_params.get(key)
        }
        texts = [f"without {_format_params(refused)} of [params], which it refuses"] if refused else []
        texts += [f"with {_format_params(other)}"] if other else []
        if texts:
            lines.append(f"{method} runs {', and '.join(texts)}; --set {method}.PARAM=VALUE changes its parameters")
    return lines


def _all_params(method: str, params: Mapping[str, Any]) -> dict[str, Any]:
    fields = dataclasses.fields(methods.load(method).params)
    return {field.name: field.default for field in fields if field.default is not dataclasses.MISSING} | dict(params)


def _format_params(params: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in params.items())


def merge_params(job: JobSettings, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a method: shared [params], then its [compare] table, then the changes.

    Parameters in [params] that another method does not have, or refuses, are ignored. In the other two they are kept,
    and raise an error when the job is parsed.
    """
    own_params = {**job.compare.get(name, {}), **changes}
    shared = job.params if name == job.method else jobs.select_shared_params(name, job.params, own_params)
    return {**shared, **own_params}


def parse_changes(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return parameters by method from texts such as "fedprox.mu=0.1".

    Values are TOML. A bare word is a string.
    """
    changes: dict[str, dict[str, Any]] = {}
    for text in texts:
        target, equals, value = text.partition("=")
        name, dot, key = target.strip().partition(".")
        if not (equals and dot and name and key and value.strip()):
            raise JobError(f"--set {text} is invalid: write METHOD.PARAMETER=VALUE, as in fedprox.mu=0.1")
        try:
            parsed = toml.parse_toml(f"value = {value}", text)["value"]
        except JobError:
            parsed = value.strip()
        changes.setdefault(name, {})[key] = parsed
    return changes


def run_cases(
    cases: Sequence[ComparisonCase],
    out: Path,
    run_case: RunCase,
    report_line: Callable[[str], None],
    show: ShowStatus = progress.LINE.show_status,
    *,
    parallel: bool = False,
) -> tuple[dict[ComparisonCase, SeedRun], list[str]]:
    """Run the cases that are not cached in `out`/runs.

    Returns:
        The run of each case that succeeded, and a sentence for each failure.
    """
    store = RunCache(out)
    keys = {case: case.cache_key for case in cases}  # digests of the data before any run
    cached = {case: store.find(key) for case, key in keys.items()}
    runs = {case: run for case, run in cached.items() if run is not None}
    missing = [case for case in keys if case not in runs]
    for line in store.describe_cache(len(runs), keys.values()):
        report_line(line)
    failed: list[str] = []
    outcomes = _run_in_parallel(missing, run_case, show) if parallel else _run_sequentially(missing, run_case, show)
    for count, (case, outcome) in enumerate(outcomes, 1):
        if isinstance(outcome, str):
            failed.append(f"{case.name}: {outcome}")
            report_line(f"run {count} of {len(missing)}: {case.name} failed: {outcome}")
            continue
        runs[case] = outcome
        store.store(keys[case], outcome)
        (scored_run,), _ = select_scores([outcome], [other.settings.method for other in cases])
        last_point = scored_run.marks[-1] if scored_run.marks else None
        metric_text = ""
        if last_point is not None and last_point.value is not None:
            metric_text = f", {event_messages.format_metric(last_point.metric, last_point.value)}"
        report_line(f"run {count} of {len(missing)}: {case.name}{metric_text}")
    progress.LINE.end_operation()
    return {case: runs[case] for case in cases if case in runs}, failed


def _run_sequentially(
    missing: Sequence[ComparisonCase], run_case: RunCase, show: ShowStatus
) -> Iterator[tuple[ComparisonCase, SeedRun | str]]:
    rounds = [case.settings.rounds for case in missing]
    for count, case in enumerate(missing):

        def show_round(rounds_done: int, count: int = count, case: ComparisonCase = case) -> None:
            line = f"run {count + 1} of {len(missing)}: {case.name}: round {rounds_done} of {rounds[count]}"
            show(line, sum(rounds[:count]) + rounds_done, sum(rounds))

        yield case, _run_case_or_describe_error(run_case, case, show_round)


def _run_in_parallel(
    missing: Sequence[ComparisonCase], run_case: RunCase, show: ShowStatus
) -> Iterator[tuple[ComparisonCase, SeedRun | str]]:
    started_s = time.monotonic()
    finished_count = 0

    def show_progress() -> None:
        elapsed = units.format_duration(time.monotonic() - started_s)
        show(f"{finished_count} of {len(missing)} runs are done, {elapsed} so far", finished_count, len(missing))

    with progress.call_periodically(show_progress):
        for index, run in run_in_processes(_run_case_or_describe_error, [(run_case, case) for case in missing]):
            finished_count += 1
            yield missing[index], run


def _run_case_or_describe_error(
    run_case: RunCase, case: ComparisonCase, report_round: ReportRound | None = None
) -> SeedRun | str:
    try:
        return run_case(case, report_round or (lambda done: None))
    except FedquiltError as error:
        return str(error)


def select_scores(runs: Sequence[SeedRun], compared: Iterable[str] = ()) -> tuple[list[SeedRun], str]:
    """Return the runs with the scores on which all can be compared, and a note on these scores, or "".

    A test set cannot measure networks that differ by device. Such methods are compared on held-out shares, unless
    another method has no scores on them.
    """
    names = list(dict.fromkeys([*(run.method for run in runs), *compared]))
    personal = ", ".join(name for name in names if methods.load(name).personal_model is not None)
    if not personal or not any(run.tested for run in runs):
        return list(runs), ""
    without_checks = ", ".join(name for name in names if methods.load(name).check is None)
    if without_checks:
        return list(runs), (
            f"on the test set, because {without_checks} has no scores on held-out shares: {personal} is tested with "
            "the network of a new device, although its networks differ by device"
        )
    untested_runs = [
        msgspec.structs.replace(
            run, tested=0, marks=tuple(msgspec.structs.replace(mark, test=None) for mark in run.marks)
        )
        for run in runs
    ]
    return untested_runs, f"on held-out shares, because the networks of {personal} differ by device"


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

    metric = metrics.MAIN_METRICS[metrics.task_from_network(job.model)]
    if target is not None and metric.share and target > 1:
        raise JobError(f"--target {target:g} is above 1: for {target:g} % {metric.title} use {target / 100:g}")
    todo = make_cases(job, folder, names, seeds, rounds=rounds, changes=changes)
    progress.LINE.print_lines(*describe_other_engines(job, todo), *describe_other_params(job, todo))

    def run_case(case: ComparisonCase, report_round: ReportRound) -> SeedRun:
        return run_seed(case.settings, Path(case.folder), report_round, workers, engine=engine, mixed=mixed)

    runs_by_case, failed = run_cases(todo, out, run_case, progress.LINE.print_lines)
    runs, note = select_scores(list(runs_by_case.values()))
    result = tables.make_result(job.name, runs, target, failed, note)
    folder = out / make_run_id(job.name, time.time())
    files, problem = tables.write_files(result, runs, folder)
    notes = [problem] if problem else []
    if format == "json":
        print(msgspec.json.format(msgspec.json.encode(result)).decode())
        progress.LINE.print_lines(*notes)
    else:
        failures = [f"failed: {failure}" for failure in failed]
        written = [str(folder), *fold_line(f"  {', '.join(files)}", 2)]
        print("\n".join([*tables.format_table(result), *failures, *written, *notes]))
    return 1 if failed else 0


T = TypeVar("T")


class RunProcessError(FedquiltError): ...


def run_in_processes(
    function: Callable[..., T], calls: Sequence[tuple[Any, ...]], workers: int | None = None
) -> Iterator[tuple[int, T]]:
    """Yield each call's index and result as the call finishes. An exception in a call ends all calls."""
    if not calls:
        return
    count = min(workers or len(os.sched_getaffinity(0)), len(calls))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, _initialise_worker, (os.getpid(),)) as pool:
        try:
            waiting = {
                pool.submit(_run_or_exit_on_sigterm, function, arguments): index
                for index, arguments in enumerate(calls)
            }
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except BrokenProcessPool:
            raise RunProcessError(
                f"one of {count} run processes ended unexpectedly (output above): if memory was low, use fewer cores "
                "(taskset -c 0 fedquilt ...)"
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
    raise _TerminationExit(128 + number)  # runs all cleanup handlers


def _run_or_exit_on_sigterm(function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    # a terminated process must not start the next call
    try:
        return function(*arguments)
    except _TerminationExit:
        os._exit(1)
