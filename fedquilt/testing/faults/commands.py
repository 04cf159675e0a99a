"""Implementation of `fedquilt simulate`: run one schedule, or many with a summary."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from fedquilt.console import progress
from fedquilt.coordinator.rounds.events import AnyEvent
from fedquilt.core import JobError
from fedquilt.testing.faults import schedule, search
from fedquilt.testing.faults.schedule import FaultSchedule
from fedquilt.testing.faults.world import ScheduleEnvironment

FAILED: Final = 8  # exit code
INTERRUPTED: Final = 130  # likewise


def parse_plan(text: str, seed: int | None) -> FaultSchedule:
    """Return the schedule of a text, with another seed unless None.

    Raises:
        JobError: If the text is not a valid schedule.
    """
    found = schedule.parse_schedule(text)
    _require_names([found.method, *filter(None, [found.also])], [])
    return found if seed is None else msgspec.structs.replace(found, seed=seed)


def draw_plan(seed: int, among: Sequence[str], kinds: Sequence[str]) -> FaultSchedule:
    """Return the schedule of a seed.

    Raises:
        JobError: If there is no such method or kind of fault.
    """
    _require_names(among, kinds)
    return schedule.draw_schedule(seed, among or search.supported_methods(), kinds)


def run_one(plan: FaultSchedule) -> int:
    print(f"schedule: {plan.to_text()}")
    with ScheduleEnvironment() as theatre:
        found = search.run_plan(theatre, plan, _print_event)
    if isinstance(found, search.FailedSchedule):
        print(found.why)
        return FAILED
    print(
        "it holds:",
        ", ".join(f"{count} {name}" for name, count in sorted(found.items()) if count) or "nothing happened",
    )
    return 0


def run_many(seeds: range, among: Sequence[str], kinds: Sequence[str], processes: int) -> int:
    """Run many schedules, shrink those that fail, print a summary and return the exit code.

    An interrupt (Ctrl-C) ends the runs early, and the results until then are printed.

    Args:
        seeds: The seeds of the schedules.
        among: The methods to draw from, or () for all.
        kinds: Further kinds of faults.
        processes: The number of processes.
    """
    _require_names(among, kinds)
    began_s, total, ended = _processor_s(), search.NOTHING, 0
    line = progress.LINE
    try:
        for part in _run_batches(seeds, among, kinds, processes):
            total = total.add(part)
            for failure in part.failures:
                line.print_to_stdout(*failure.to_lines())
            line.show_status(f"seeds played, {len(total.failures)} failed", total.seeds, len(seeds))
    except KeyboardInterrupt:
        ended = INTERRUPTED
    line.end_operation()
    if ended:
        print(f"interrupted: of the {len(seeds)} seeds from {seeds.start} on, {total.seeds} were played")
    print("\n".join(search.report_lines(total, _processor_s() - began_s)))
    return FAILED if total.failures else ended


def _processor_s() -> float:
    taken = os.times()
    return taken.user + taken.system + taken.children_user + taken.children_system


def _run_batches(
    seeds: range, among: Sequence[str], kinds: Sequence[str], processes: int
) -> Iterator[search.SearchResult]:
    if processes > 1:
        yield from search.run_in_processes(seeds, processes, kinds, among)
        return
    search.prepare_process()
    with ScheduleEnvironment() as theatre:
        for at in range(0, len(seeds), search.BATCH):
            yield search.play_seeds(theatre, seeds[at : at + search.BATCH], kinds, among)


def _require_names(among: Sequence[str], kinds: Sequence[str]) -> None:
    for name in among:
        if name not in search.supported_methods():
            raise JobError(f"{name} is not played here; there are: {', '.join(search.supported_methods())}")
    for kind in kinds:
        if kind not in schedule.LATER:
            raise JobError(f"{kind!r} is no further kind of fault; there are: {', '.join(schedule.LATER)}")


def _print_event(job: str, fact: AnyEvent) -> None:
    of = getattr(fact, "round", None)
    who = getattr(getattr(fact, "update", None), "device", "") or ", ".join(getattr(fact, "devices", ()))
    said = getattr(fact, "reason", "") or getattr(fact, "device", "")
    words = (job.partition("-")[0], type(fact).__name__, "" if of is None else f"round {of}", who, said)
    print(" ", " ".join(word for word in words if word))
