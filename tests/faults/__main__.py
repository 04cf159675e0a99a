"""Play fault schedules: one with its events, or many with a summary.

    python -m tests.faults --seeds 0-99999 --processes 4
    python -m tests.faults --seed 17
    python -m tests.faults --schedule 'seed=24 devices=2 rounds=1 crash:coordinator,33,1,0.62'

The exit code is 8 if a schedule fails. A failing schedule is shortened, and printed as a command like the last.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Final

from fedquilt.console import progress
from fedquilt.coordinator.rounds.events import AnyEvent
from tests.faults import schedule, search
from tests.faults.federation import ScheduleEnvironment
from tests.faults.schedule import FaultSchedule

FAILED: Final = 8  # exit code
INTERRUPTED: Final = 130  # likewise


def main(words: Sequence[str] | None = None) -> int:
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seeds", type=parse_seeds, default="0-299", metavar="FIRST-LAST")
    what.add_argument("--seed", type=int, help="play this one, and print its events")
    what.add_argument("--schedule", metavar="TEXT", help="play this one, likewise")
    names = search.supported_methods()
    parser.add_argument("--methods", nargs="+", choices=names, default=names, metavar="METHOD", help="draw from these")
    parser.add_argument("--also", nargs="+", choices=schedule.LATER, default=(), help="draw these faults as well")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args(words)
    if given.schedule is not None:
        return run_one(schedule.parse_schedule(given.schedule))
    if given.seed is not None:
        return run_one(schedule.draw_schedule(given.seed, given.methods, given.also))
    return run_many(given.seeds, given.methods, given.also, given.processes)


def parse_seeds(text: str) -> range:
    found = re.fullmatch(r"(\d+)-(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of seeds such as 100-199")
    return range(int(found[1]), int(found[2]) + 1)


def run_one(plan: FaultSchedule) -> int:
    print(f"schedule: {plan.to_text()}")
    with ScheduleEnvironment() as environment:
        found = search.run_plan(environment, plan, print_event)
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
    """
    began_s, total, ended = processor_s(), search.NOTHING, 0
    line = progress.LINE
    try:
        for part in search.play_batches(seeds, among, kinds, processes):
            total = total.add(part)
            for failure in part.failures:
                line.print_to_stdout(*failure.to_lines())
            line.show_status(f"seeds played, {len(total.failures)} failed", total.seeds, len(seeds))
    except KeyboardInterrupt:
        ended = INTERRUPTED
    line.end_operation()
    if ended:
        print(f"interrupted: of the {len(seeds)} seeds from {seeds.start} on, {total.seeds} were played")
    print("\n".join(search.report_lines(total, processor_s() - began_s)))
    return FAILED if total.failures else ended


def processor_s() -> float:
    taken = os.times()
    return taken.user + taken.system + taken.children_user + taken.children_system


def print_event(job: str, fact: AnyEvent) -> None:
    of = getattr(fact, "round", None)
    who = getattr(getattr(fact, "update", None), "device", "") or ", ".join(getattr(fact, "devices", ()))
    said = getattr(fact, "reason", "") or getattr(fact, "device", "")
    words = (job.partition("-")[0], type(fact).__name__, "" if of is None else f"round {of}", who, said)
    print(" ", " ".join(word for word in words if word))


if __name__ == "__main__":
    sys.exit(main())
