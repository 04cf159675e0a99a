"""Search for failing schedules, and their reduction to the shortest with the same failure."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from typing import Final, NamedTuple

import msgspec

from fedquilt import methods
from tests.faults.federation import Observe, ScheduleEnvironment
from tests.faults.processes import InvariantError
from tests.faults.schedule import AnyFault, FaultSchedule, NewerParticipant, draw_schedule

BATCH: Final = 50  # seeds that a process takes at once
TRIES: Final = 60  # plays that shrinking may take
PLAIN: Final = FaultSchedule()


class FailedSchedule(NamedTuple):
    plan: FaultSchedule
    why: str

    def to_lines(self) -> list[str]:
        return [
            f"seed {self.plan.seed}: {self.why}",
            f"python -m tests.faults --schedule {shlex.quote(self.plan.to_text())}",
        ]


class SearchResult(NamedTuple):
    seeds: int
    rounds: int
    happened: Counter[str]  # how often
    covered: Counter[str]  # in how many seeds
    failures: tuple[FailedSchedule, ...]

    def add(self, other: SearchResult) -> SearchResult:
        return SearchResult(
            self.seeds + other.seeds,
            self.rounds + other.rounds,
            self.happened + other.happened,
            self.covered + other.covered,
            (*self.failures, *other.failures),
        )


NOTHING: Final = SearchResult(0, 0, Counter(), Counter(), ())


@cache
def supported_methods() -> tuple[str, ...]:
    """Return the built-in methods that schedules draw from.

    Excluded are methods with donors, which take minutes, and methods with evaluation rounds, which select other
    devices.
    """
    able = methods.builtin_names()
    found = [(name, methods.load(name)) for name in able]
    return tuple(name for name, method in found if _is_runnable(method.engines) and method.evaluation_round is None)


def _is_runnable(engines: Sequence[str]) -> bool:
    from fedquilt.edge_agent.engines import available_engines

    return bool({"numpy", "torch"} & set(engines) & set(available_engines()))


def run_plan(
    environment: ScheduleEnvironment, plan: FaultSchedule, observe: Observe = lambda job, fact: None
) -> FailedSchedule | Counter[str]:
    try:
        return environment.run_plan(plan, observe)
    except InvariantError as error:
        return FailedSchedule(plan, str(error))


def play_seeds(
    environment: ScheduleEnvironment, seeds: Iterable[int], among: Sequence[str], kinds: Sequence[str] = ()
) -> SearchResult:
    """Play the schedules of some seeds, drawn among these methods, and shrink those that fail.

    Kinds of faults of LATER are drawn where they are named.
    """
    before, count = environment.rounds, 0
    happened, covered = Counter[str](), Counter[str]()
    failures = []
    for seed in seeds:
        plan = draw_schedule(seed, among, kinds)
        found = run_plan(environment, plan)
        count += 1
        if isinstance(found, FailedSchedule):
            failures.append(shrink_failure(environment, found))
            continue
        happened += found
        covered.update({name for name in found if found[name]} | {f"method {plan.method}", f"codec {plan.codec}"})
        covered["two jobs at once" if plan.jobs > 1 else "one job"] += 1
        covered["the same job twice"] += plan.twice_s >= 0
        covered["buffered"] += plan.concurrency > 0
        covered["all devices in each round" if plan.requires_all_devices else "a part of the devices in a round"] += 1
    return SearchResult(count, environment.rounds - before, happened, covered, tuple(failures))


def play_batches(seeds: range, among: Sequence[str], kinds: Sequence[str], processes: int) -> Iterator[SearchResult]:
    batches = [seeds[at : at + BATCH] for at in range(0, len(seeds), BATCH)]
    if processes == 1:
        prepare_process()
        with ScheduleEnvironment() as environment:
            for batch in batches:
                yield play_seeds(environment, batch, among, kinds)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), prepare_process) as pool:
        playing = [pool.submit(_play_batch, batch, among, kinds) for batch in batches]
        try:
            for played in as_completed(playing):
                yield played.result()
        finally:
            pool.shutdown(cancel_futures=True)


def prepare_process() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("fedquilt").propagate = False
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)


@cache
def _environment_of_process() -> ScheduleEnvironment:
    return ScheduleEnvironment()


def _play_batch(seeds: range, among: Sequence[str], kinds: Sequence[str]) -> SearchResult:
    return play_seeds(_environment_of_process(), seeds, among, kinds)


def shrink_failure(environment: ScheduleEnvironment, failure: FailedSchedule) -> FailedSchedule:
    left = TRIES
    best = failure

    def fails(plan: FaultSchedule) -> bool:
        nonlocal left, best
        if left <= 0 or plan == best.plan:
            return False
        left -= 1
        found = run_plan(environment, plan)
        if isinstance(found, FailedSchedule):
            best = found
        return isinstance(found, FailedSchedule)

    again = True
    while again and left > 0:
        again = any(fails(plan) for plan in _simpler_schedules(best.plan))
    return best


def _simpler_schedules(plan: FaultSchedule) -> Iterator[FaultSchedule]:
    faults = plan.faults
    for index in range(len(faults)):
        yield msgspec.structs.replace(plan, faults=(*faults[:index], *faults[index + 1 :]))
    for name in ("jobs", "also", "twice_s", "check", "codec", "payload", "method", "over_select", "quorum"):
        yield msgspec.structs.replace(plan, **{name: getattr(PLAIN, name)})
    if plan.size and not any(
        isinstance(fault, NewerParticipant) for fault in faults
    ):  # who is not heard cannot be waited for
        sizes = {"size": 0, "quorum": 1.0, "over_select": 0.0, "concurrency": 0, "deadline_s": PLAIN.deadline_s}
        yield msgspec.structs.replace(plan, **sizes)
    for name, least in (("rounds", 1), ("devices", 2 if plan.requires_all_devices else 3)):
        if getattr(plan, name) > least:
            yield msgspec.structs.replace(plan, **{name: getattr(plan, name) - 1})
    for index, fault in enumerate(faults):
        for less in _smaller_faults(fault):
            yield msgspec.structs.replace(plan, faults=(*faults[:index], less, *faults[index + 1 :]))


def _smaller_faults(fault: AnyFault) -> Iterator[AnyFault]:
    for name in fault.__struct_fields__:
        value = getattr(fault, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value or name in ("call", "start"):
            continue
        if isinstance(value, int):
            if value > 1:
                yield msgspec.structs.replace(fault, **{name: 1})
        elif name not in ("factor", "down_s", "length_s", "start_s", "at_s", "place") and value > 0:
            yield msgspec.structs.replace(fault, **{name: 0.0})
        elif value > 1.0 and name != "start_s" and name != "at_s":
            yield msgspec.structs.replace(fault, **{name: round(value / 2, 2)})


def report_lines(played: SearchResult, cpu_s: float) -> Iterator[str]:
    each = played.rounds / cpu_s if cpu_s else 0.0
    yield f"{played.seeds} seeds, {played.rounds} rounds, {each:.0f} rounds for each second of processor time"
    yield "in how many seeds, and how often:"
    for name, count in sorted(played.covered.items()):
        often = played.happened[name]
        yield f"  {name:34} {count:7}" + (f" {often:9}" if often else "")
    for failure in played.failures:
        yield from failure.to_lines()
    if not played.failures:
        yield "nothing accepted was lost, no state and no private state is another than calmly"
