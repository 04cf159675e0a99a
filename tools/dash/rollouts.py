"""Rollouts as the dashboard tells of them, and what can be asked of one."""

from __future__ import annotations

import time
from typing import Any, Final

from fedquilt.coordinator import requests, store
from fedquilt.coordinator.rollout_log import Kept
from fedquilt.coordinator.rollouts import Heard
from fedquilt.coordinator.views import rollouts as view
from fedquilt.tools.dash.watch import MissingRunError, Watch

BOARDS: Final = 200  # of one rollout that are shown, those first that have not committed it
LATEST: Final = 100  # rollouts of the list
WISHES: Final = ("abort", "rollback")


async def listed(watch: Watch) -> dict[str, Any]:
    """The latest rollouts, the last one first.

    Raises:
        StoreError: they cannot be read.
    """

    def read() -> tuple[list[dict[str, Any]], dict[str, str]]:
        log = watch.rollouts()
        around, latest = view.sight(watch.home, log), log.all()[::-1][:LATEST]
        return [{**_row(kept), "waits": view.held(kept, log, around)} for kept in latest], log.unreadable()

    rows, odd = await watch.aside(read)
    rows += [{"rollout": id, "problem": why} for id, why in odd.items()]
    return {"at": time.time(), "served": watch.served, "rollouts": rows}


async def one(watch: Watch, id: str) -> dict[str, Any]:
    """One rollout: its boards, what it asks of them, and what happened.

    Raises:
        MissingRunError: there is no such rollout.
        StoreError: it cannot be read.
    """
    kept = await _found(watch, id)

    def read() -> tuple[Any, str]:
        log = watch.rollouts()
        facts = log.facts(id)
        return facts, view.waits(kept.state, facts, view.sight(watch.home, log))

    facts, waits = await watch.aside(read)
    told = view.detail(kept)
    steps = [
        {"at": at, "text": view.sentence(kept.state, fact)} for _, at, fact in facts if not isinstance(fact, Heard)
    ]
    boards = told.pop("boards")
    return {
        "at": time.time(),
        "served": watch.served,
        **told,
        **_row(kept),
        "boards": boards[:BOARDS],
        "more": max(0, len(boards) - BOARDS),
        "steps": steps,
        "waits": waits,
    }


async def act(watch: Watch, id: str, what: str) -> str:
    """Ask the coordinator to end a rollout or to take it back; says what comes of it.

    Raises:
        MissingRunError: there is no such rollout.
        JobError: it cannot be done with it now.
        StoreError: the home cannot be written.
    """
    kept = await _found(watch, id)

    def done() -> str:
        with store.Store(watch.home) as written:
            return (requests.abort if what == "abort" else requests.roll_back)(written, kept.state.id)

    return await watch.aside(done)


def _row(kept: Kept) -> dict[str, Any]:
    return {**view.row(kept), "now": view.step(kept.state)}


async def _found(watch: Watch, id: str) -> Kept:
    for kept in await watch.aside(lambda: watch.rollouts().all()):
        if kept.state.id == id:
            return kept
    raise MissingRunError(f"there is no rollout {id[:100]!r} in {watch.home}, or it cannot be read")
