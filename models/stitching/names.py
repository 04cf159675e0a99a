"""Names of networks, taps and paths for people, the same in logs, reports, tables and exports.

They are made from block ids, "<donor>.<index>".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def network(taps: Sequence[Sequence[str]], headed: bool) -> str:
    """A network's name, for instance "head on a.3 + (a.0-2 > b.1)".

    Args:
        taps: the network's paths, of block ids.
        headed: whether a head takes the ends of the paths; otherwise the only path ends with a donor's classifier.
    """
    return f"head on {' + '.join(map(tap, taps))}" if headed else path(taps[0])


def tap(ids: Sequence[str]) -> str:
    """A tap's name: its last block if its path is an unmodified donor's beginning, otherwise the path in brackets."""
    donor, _, _ = ids[0].rpartition(".")
    native = list(ids) == [f"{donor}.{index}" for index in range(len(ids))]
    return ids[-1] if native else f"({path(ids)})"


def path(ids: Sequence[str]) -> str:
    """A path's block ids in order, runs of three or more blocks of one donor as "donor.first-last"."""
    return " > ".join(_runs(ids))


def _runs(ids: Sequence[str]) -> Iterator[str]:
    """Yield the path's parts: runs of three or more blocks, and the ids of all other blocks."""
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
