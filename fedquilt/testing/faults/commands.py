"""Implementation of `fedquilt simulate`: play one schedule and print its events, or play many and count the faults."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from fedquilt import progress
from fedquilt.coordinator.facts import AnyFact
from fedquilt.core import JobError
from fedquilt.testing.faults import schedule, search
from fedquilt.testing.faults.schedule import Schedule
from fedquilt.testing.faults.world import Theatre

FAILED: Final = 8  # exit code
INTERRUPTED: Final = 130  # likewise


def parsed(text: str, seed: int | None) -> Schedule:
    """A schedule of its text; `seed` wins over the one in it.

    Raises:
        JobError: it is none.
    """
    found = schedule.parse_schedule(text)
    _require([found.method, *filter(None, [found.also])], [])
    return found if seed is None else msgspec.structs.replace(found, seed=seed)


def drawn(seed: int, among: Sequence[str], kinds: Sequence[str]) -> Schedule:
    """The schedule of a seed.

    Raises:
        JobError: no such method or kind.
    """
    _require(among, kinds)
    return schedule.draw_schedule(seed, among or search.candidates(), kinds)


def one(plan: Schedule) -> int:
    """Play one schedule and print each fact; returns the exit code."""
    print(f"schedule: {plan.text()}")
    with Theatre() as theatre:
        found = search.attempt(theatre, plan, _tell)
    if isinstance(found, search.Failure):
        print(found.why)
        return FAILED
    print(
        "it holds:",
        ", ".join(f"{count} {name}" for name, count in sorted(found.items()) if count) or "nothing happened",
    )
    return 0


def many(seeds: range, among: Sequence[str], kinds: Sequence[str], processes: int) -> int:
    """Play many, shrink those that fail, and print what was covered; returns the exit code.

    An interrupt (Ctrl-C) ends it early: what was played until then is printed.

    Args:
        seeds: which.
        among: methods to draw from; (): all.
        kinds: further kinds of faults.
        processes: to play in.
    """
    _require(among, kinds)
    began_s, total, ended = _cpu_s(), search.NOTHING, 0
    line = progress.LINE
    try:
        for part in _parts(seeds, among, kinds, processes):
            total = total.plus(part)
            for failure in part.failures:
                line.aside(*failure.lines())
            line.at(f"seeds played, {len(total.failures)} failed", total.seeds, len(seeds))
    except KeyboardInterrupt:
        ended = INTERRUPTED
    line.end()
    if ended:
        print(f"interrupted: of the {len(seeds)} seeds from {seeds.start} on, {total.seeds} were played")
    print("\n".join(search.explained(total, _cpu_s() - began_s)))
    return FAILED if total.failures else ended


def _cpu_s() -> float:
    """Processor seconds of this process, and of those that it has started and that have ended."""
    taken = os.times()
    return taken.user + taken.system + taken.children_user + taken.children_system


def _parts(seeds: range, among: Sequence[str], kinds: Sequence[str], processes: int) -> Iterator[search.Played]:
    if processes > 1:
        yield from search.spread(seeds, processes, kinds, among)
        return
    search.calm()
    with Theatre() as theatre:
        for at in range(0, len(seeds), search.BATCH):
            yield search.play_seeds(theatre, seeds[at : at + search.BATCH], kinds, among)


def _require(among: Sequence[str], kinds: Sequence[str]) -> None:
    for name in among:
        if name not in search.candidates():
            raise JobError(f"{name} is not played here; there are: {', '.join(search.candidates())}")
    for kind in kinds:
        if kind not in schedule.LATER:
            raise JobError(f"{kind!r} is no further kind of fault; there are: {', '.join(schedule.LATER)}")


def _tell(job: str, fact: AnyFact) -> None:
    of = getattr(fact, "round", None)
    who = getattr(getattr(fact, "update", None), "device", "") or ", ".join(getattr(fact, "devices", ()))
    said = getattr(fact, "reason", "") or getattr(fact, "device", "")
    words = (job.partition("-")[0], type(fact).__name__, "" if of is None else f"round {of}", who, said)
    print(" ", " ".join(word for word in words if word))
