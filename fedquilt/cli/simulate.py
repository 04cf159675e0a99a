"""`fedquilt simulate`."""

from __future__ import annotations

import re

import click

from fedquilt.cli.commands import option, verb
from fedquilt.core import JobError


@verb()
@option("--seed", type=int, help="Play this one, and print what happens.")
@option("--schedule", metavar="TEXT", help="Play this one, as an earlier call has printed it.")
@option("--seeds", default="300", metavar="N|FIRST-LAST", help="Play so many, or from one to another.")
@option("--methods", "among", many=True, default=(), help="Draw from these alone.")
@option("--also", "kinds", many=True, default=(), help="Draw these kinds of faults as well: rot, restore.")
@option("--processes", type=click.IntRange(min=1), default=1, help="To play in.")
def simulate(
    seed: int | None, schedule: str | None, seeds: str, among: tuple[str, ...], kinds: tuple[str, ...], processes: int
) -> int:
    """Simulate federations with faults of disks, networks and clocks, and check the results."""
    from fedquilt.testing.faults import commands

    if schedule is not None:
        return commands.run_one(commands.parse_plan(schedule, seed))
    if seed is not None:
        return commands.run_one(commands.draw_plan(seed, among, kinds))
    return commands.run_many(_parse_seeds(seeds), among, kinds, processes)


def _parse_seeds(text: str) -> range:
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)", text)
    if found is None:
        raise JobError(f"--seeds {text}: a number as 300, or from one to another as 100-199")
    return range(int(found[2])) if found[1] is None else range(int(found[1]), int(found[2]) + 1)
