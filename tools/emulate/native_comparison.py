"""Comparison of an emulated board's run with the same run on this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.coordinator.rounds.events import RoundCommitted, UpdateAccepted
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import JobError
from fedquilt.models.stitching.search import ranking
from fedquilt.models.stitching.search.state import SearchState

TOLERANCE: Final = 1e-3  # of scores, which are at most 1: another release of onnxruntime rounds otherwise


@dataclass(frozen=True)
class NativeComparison:
    rounds: int  # committed by the first
    tasks_s: tuple[float, ...]  # of each task of the first, on its board
    paths: int  # networks, whole or not, that both have scored
    only: int  # networks scored by one of the runs only
    score: float | None  # between scores of the same network
    junction: float | None  # between weights of the same junction
    chosen: str  # name of the network that the first has come to; "": its search is not finished
    same: bool  # whether both runs selected the same network


def compare(first: tuple[Store, str], other: tuple[Store, str]) -> NativeComparison:
    ours, theirs = state(*first), state(*other)
    mine, others = scores(ours), scores(theirs)
    common = mine.keys() & others.keys()
    joined = ours.junctions.keys() & theirs.junctions.keys()
    facts = [fact for _, _, fact in first[0].read_events(first[1])]
    return NativeComparison(
        sum(isinstance(fact, RoundCommitted) for fact in facts),
        tuple(fact.update.usage.wall_s for fact in facts if isinstance(fact, UpdateAccepted)),
        len(common),
        len(mine.keys() ^ others.keys()),
        max((abs(mine[path] - others[path]) for path in common), default=None),
        max((_max_difference(ours.junctions[name], theirs.junctions[name]) for name in joined), default=None),
        chosen(ours),
        chosen(ours) == chosen(theirs),
    )


def state(store: Store, run: str) -> SearchState:
    refs = [fact.state for _, _, fact in store.read_events(run) if isinstance(fact, RoundCommitted)]
    path = store.depot.blob_path(refs[-1].sha256) if refs else None
    if path is None:
        raise JobError(f"{run} in {store.home} has committed no round: `fedquilt logs {run} --home {store.home}`")
    return tensors.unpack_state(path.read_bytes(), methods.load("fedstitch").state)


def scores(state: SearchState) -> dict[tuple[str, ...], float]:
    nets = (*state.frontier, *state.finished, *([state.current] if state.current else []))
    return {**{net.path: net.score for net in nets}, **{net.path: net.score for net in state.finalists}}


def chosen(state: SearchState) -> str:
    return ranking.candidate_name(state.candidates[state.chosen]) if state.phase == "done" and state.candidates else ""


def _max_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def table(beside: NativeComparison) -> dict[str, object]:
    return dataclasses.asdict(beside)


# -- for people ------------------------------------------------------------------------------------


def agrees(result: Mapping[str, Any]) -> bool:
    """Whether scores in the emulated system are this machine's."""
    return result["score"] is not None and result["score"] <= TOLERANCE


def lines(result: Mapping[str, Any]) -> list[str]:
    said = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    tasks, chosen = result["tasks_s"], result["chosen"]
    took = f": {min(tasks):.1f} to {max(tasks):.1f} s each" if tasks else ""
    told = [
        f"in it: {said}",
        f"{result['rounds']} rounds, {len(tasks)} tasks done in it{took}",
        f"beside this machine's own processor: {result['paths']} networks known to both, {result['only']} to one alone",
    ]
    if result["score"] is not None:
        told.append(f"  scores differ by {result['score']:.1e} at most")
    if result["junction"] is not None:
        told.append(f"  weights of junctions differ by {result['junction']:.1e} at most")
    if chosen:
        told.append(f"  chosen: {chosen}; by the other {'too' if result['same'] else 'not'}")
    if not agrees(result):
        told.append(f"  they do not agree: {TOLERANCE:g} is allowed between scores, and there has to be one")
    return [*told, f"logs: {result['folder']}"]
