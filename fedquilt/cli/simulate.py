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
    """Play federations whose disks, networks, clocks and processes fail, and check that nothing is lost by it."""
    from fedquilt.testing.faults import commands

    if schedule is not None:
        return commands.one(commands.parsed(schedule, seed))
    if seed is not None:
        return commands.one(commands.drawn(seed, among, kinds))
    return commands.many(_range(seeds), among, kinds, processes)


def _range(text: str) -> range:
    """Seeds of "300" or "100-199".

    Raises:
        JobError: it is neither.
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)", text)
    if found is None:
        raise JobError(f"--seeds {text}: a number as 300, or from one to another as 100-199")
    return range(int(found[2])) if found[1] is None else range(int(found[1]), int(found[2]) + 1)
