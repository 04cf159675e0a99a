"""`fedquilt compare`: several methods on one simulated fleet with several seeds, beside each other.

A seed draws the partition, the cohorts and the order of examples, the same for every method; all begin with the
bundle's weights. Runs go through the coordinator's own rounds on simulated boards. Seconds and joules
are those of the simulated boards, by their profiles. Finished runs are kept in a folder and are not repeated.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fedquilt import bundle, config, methods, metrics, progress, units
from fedquilt.coordinator import settings as jobs
from fedquilt.coordinator.preflight import require_made_for
from fedquilt.coordinator.settings import Job
from fedquilt.coordinator.views import scores
from fedquilt.core import FedquiltError, JobError
from fedquilt.data import fitting
from fedquilt.data.spec import DataSpec
from fedquilt.tools.experiments import parallel, run_cache
from fedquilt.tools.experiments.run_cache import Kept
from fedquilt.tools.experiments.single_run import FORMAT, Run, play


class Case(msgspec.Struct, frozen=True):
    """One run to be made: its job as JSON, exactly."""

    job: bytes
    folder: str  # of the bundle
    how: bytes = b""  # what the player does besides, as JSON; empty: it plays the job as it is
    label: str = ""  # what the run is called; empty: by its method

    @property
    def key(self) -> str:
        """Inputs that the run depends on."""
        parts = (str(FORMAT).encode(), self.job, run_cache.outside(self.job), *filter(None, [self.how]))
        return run_cache.key(*parts, bundle=Path(self.folder), data=run_cache.paths(self.job))

    @property
    def name(self) -> str:
        """What the run is called in progress lines and errors."""
        job = self.settings
        return f"{self.label or job.method}, seed {job.seed}"

    @property
    def settings(self) -> Job:
        """Settings of the case's job."""
        return jobs.parse(msgspec.json.decode(self.job))


Tell = Callable[[int], None]  # hears how many rounds are done
Player = Callable[[Case, Tell], Run]


# -- what is to be run ----------------------------------------------------------------------------


def cases(
    job: Job,
    folder: Path,
    names: Sequence[str] = (),
    seeds: Sequence[int] = (0, 1, 2),
    *,
    rounds: int | None = None,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Case]:
    """Make one case for each seed and method, seed by seed, so that an interrupted comparison has whole rows.

    Args:
        job: with data and a fleet.
        folder: its bundle.
        names: methods; (): the job's own and those of its [compare] tables.
        seeds: of the runs.
        rounds: of every run; None: the job's.
        changes: method -> parameters, over the job's [params] and [compare.METHOD].

    Raises:
        JobError: an unknown method or parameter, no [data], or no bundle or another job's; says what there is.
        DataError: the data cannot be read, or the network cannot take them.
    """
    made = bundle.load(folder)
    require_made_for(job, made)
    if not job.data:
        raise JobError(f"job {job.name!r} has no [data] table: what is shared out among its devices")
    chosen = list(dict.fromkeys(names or (job.method, *job.compare)))
    changes = changes or {}
    for name in (*chosen, *job.compare, *changes):
        methods.load(name)
    if idle := sorted(changes.keys() - set(chosen)):
        raise JobError(f"--set {idle[0]}...: {idle[0]} is not compared; --methods {' '.join([*chosen, idle[0]])}")
    fitting.require_fit(made.meta, DataSpec.parse(job.data))
    if job.test:
        fitting.require_fit(made.meta, DataSpec.parse(scores.test_table(job), "[test]"))
    found = []
    for seed in sorted(set(seeds)):
        for name in chosen:
            method = methods.load(name)
            every = 0 if method.check is None else job.check.every or 1
            table = {
                **msgspec.to_builtins(job),
                "method": name,
                "params": params_of(job, name, changes.get(name, {})),
                "seed": seed,
                "data": {**job.data, "seed": seed},
                "engine": job.engine if job.engine in method.engines else None,
                "rounds": rounds or job.rounds,
                "check": {"every": every},
            }
            table.pop("compare")
            jobs.parse(table)
            found.append(Case(msgspec.json.encode(table, order="sorted"), str(folder)))
    return found


def params_of(job: Job, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A method's parameters: what it knows of [params], over it its own table, over it the changes.

    Another method's parameters in [params] are not its; in its own table an unknown one is an error.
    """
    known = {field.name for field in dataclasses.fields(methods.load(name).params)}
    shared = {key: value for key, value in job.params.items() if key in known or name == job.method}
    return {**shared, **job.compare.get(name, {}), **changes}


def parse_changes(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """From "fedprox.mu=0.1"; values are TOML's, a bare word is a string.

    Raises:
        JobError: not of this form.
    """
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        where, equals, value = text.partition("=")
        name, dot, key = where.strip().partition(".")
        if not (equals and dot and name and key and value.strip()):
            raise JobError(f"--set {text}: wanted METHOD.PARAMETER=VALUE, as in fedprox.mu=0.1")
        try:
            read = config.parse(f"value = {value}", text)["value"]
        except JobError:
            read = value.strip()
        found.setdefault(name, {})[key] = read
    return found


# -- all runs -------------------------------------------------------------------------------------


def played(todo: Sequence[Case], out: Path, player: Player, say: Callable[[str], None]) -> tuple[list[Run], list[str]]:
    """The runs of all cases, in their order, and what failed. Finished ones lie in `out`/runs."""
    found, failed = finished(todo, out, player, say, progress.LINE.at)
    progress.LINE.end()
    return [found[case] for case in todo if case in found], failed


def finished(
    todo: Sequence[Case],
    out: Path,
    player: Player,
    say: Callable[[str], None],
    show: Callable[[str], None],
    *,
    abreast: bool = False,
) -> tuple[dict[Case, Run], list[str]]:
    """Run of each case that succeeded, and a sentence for each that failed. Finished ones are kept in `out`/runs.

    Args:
        todo: all cases.
        out: folder of the comparison.
        player: runs a case.
        say: prints a line that stays.
        show: prints a line that the next one replaces, after each round.
        abreast: play as many runs at a time as there are cores, each in a process that imports `player` by its name;
            `show` then gets how many are done, every second.
    """
    store = Kept(out, Run)
    keys = {case: case.key for case in todo}  # of the data as they are before anything runs
    kept = {case: store.find(key) for case, key in keys.items()}
    found = {case: run for case, run in kept.items() if run is not None}
    missing = [case for case in keys if case not in found]
    for line in store.told(len(found), keys.values()):
        say(line)
    failed: list[str] = []
    began_s = time.monotonic()
    made = _abreast(missing, player, show) if abreast else _in_turn(missing, player, show)
    for count, (case, outcome) in enumerate(made, 1):
        if isinstance(outcome, str):
            failed.append(f"{case.name}: {outcome}")
            say(f"[{count}/{len(missing)}] {case.name} failed: {outcome}")
            continue
        found[case] = outcome
        store.keep(keys[case], outcome)
        left_s = (time.monotonic() - began_s) / count * (len(missing) - count)
        last = outcome.marks[-1] if outcome.marks else None
        value = None if last is None else last.value
        told = "" if last is None or value is None else f": {metrics.shown(metrics.KNOWN[last.metric], value, 1)}"
        say(f"[{count}/{len(missing)}, about {left_s / 60:.0f} min left] {case.name}{told}")
    return found, failed


Made = Iterator[tuple[Case, Run | str]]
"""Each case with its run, or with the sentence that says why it failed."""


def _in_turn(missing: Sequence[Case], player: Player, show: Callable[[str], None]) -> Made:
    for count, case in enumerate(missing, 1):
        live = f"[{count}/{len(missing)}] {case.name}: round {{}} of {case.settings.rounds}"
        yield case, _attempt(player, case, lambda done, live=live: show(live.format(done)))  # type: ignore[misc]


def _abreast(missing: Sequence[Case], player: Player, show: Callable[[str], None]) -> Made:
    began_s, done = time.monotonic(), 0

    def tell() -> None:
        show(f"{done} of {len(missing)} runs are done, {units.duration(time.monotonic() - began_s)} so far")

    with progress.ticking(tell):
        for index, run in parallel.spread(_attempt, [(player, case) for case in missing]):
            done += 1
            yield missing[index], run


def _attempt(player: Player, case: Case, tell: Tell | None = None) -> Run | str:
    try:
        return player(case, tell or (lambda done: None))
    except FedquiltError as error:
        return str(error)


# -- the command ----------------------------------------------------------------------------------


def main(
    job: Job,
    folder: Path,
    out: Path,
    *,
    names: Sequence[str] = (),
    seeds: Sequence[int] = (0, 1, 2),
    rounds: int | None = None,
    target: float | None = None,
    on: str = "test",
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    workers: int | None = None,
    engine: str = "auto",
    mixed: bool = False,
    format: str = "text",
) -> int:
    """Make the runs that are missing, print the table, write plots, page and JSON to `out`; 1 when a run failed."""
    from fedquilt.tools.experiments import tables

    metric = metrics.MAIN[metrics.task_of(job.model)]
    if target is not None and metric.share and target > 1:
        raise JobError(f"--target {target:g}: {metric.title} runs from 0 to 1; for {target:g} % give {target / 100:g}")
    todo = cases(job, folder, names, seeds, rounds=rounds, changes=changes)

    def player(case: Case, tell: Tell) -> Run:
        return play(case.settings, Path(case.folder), tell, workers, engine=engine, mixed=mixed)

    runs, failed = played(todo, out, player, progress.LINE.say)
    if on == "held":
        runs = tables.personal(runs)
    result = tables.result(job.name, runs, target, failed)
    files = tables.write(result, runs, out)
    if format == "json":
        print(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        print("\n".join([*tables.lines(result), *(f"failed: {each}" for each in failed), *files]))
    return 1 if failed else 0
