"""Display names of networks, taps and paths, made from block ids ("<donor>.<index>")."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence


def network_name(taps: Sequence[Sequence[str]], headed: bool) -> str:
    """Return a network's name, for instance "head on a.0-3 + (a.0-2 > b.1)" with the taps a.0, a.1, a.2 and a.3.

    Args:
        taps: Paths of the network, as block ids.
        headed: Whether a head reads the ends of the paths. Otherwise the only path ends in a donor's classifier.
    """
    if not headed:
        return path_name(taps[0])
    parts = list[str]()
    for stitched, group in itertools.groupby(map(tap_name, taps), key=lambda name: name.startswith("(")):
        names = list(group)
        parts += names if stitched else _abbreviate_donor_runs(names)
    return f"head on {' + '.join(parts)}"


def tap_name(ids: Sequence[str]) -> str:
    """Return a tap's name: the last block of an unmodified donor, otherwise the path in brackets."""
    donor, _, _ = ids[0].rpartition(".")
    native = list(ids) == [f"{donor}.{index}" for index in range(len(ids))]
    return ids[-1] if native else f"({path_name(ids)})"


def path_name(ids: Sequence[str]) -> str:
    """Return a path's block ids in order, with runs of one donor as "donor.first-last"."""
    return " > ".join(_abbreviate_donor_runs(ids))


def _abbreviate_donor_runs(ids: Sequence[str]) -> Iterator[str]:
    place = 0
    while place < len(ids):
        donor, _, first = ids[place].rpartition(".")
        end = place + 1
        while end < len(ids) and ids[end] == f"{donor}.{int(first) + end - place}":
            end += 1
        if end - place > 2:
            yield f"{ids[place]}-{int(first) + end - place - 1}"
        else:
            yield from ids[place:end]
        place = end
