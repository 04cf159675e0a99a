"""Rollouts on the dashboard, and requests to revert them."""

from __future__ import annotations

import time
from typing import Any, Final

from fedquilt.coordinator import run_control
from fedquilt.coordinator.rounds.rollout import StatusReported
from fedquilt.coordinator.storage import store
from fedquilt.coordinator.storage.rollout_log import StoredRollout
from fedquilt.coordinator.views import rollouts as view
from fedquilt.tools.operations.dash.home_watcher import HomeWatcher, MissingRunError

BOARDS: Final = 200  # of one rollout that are shown, those first that have not committed it
LATEST: Final = 100  # rollouts of the list


async def load_rollouts(watch: HomeWatcher) -> dict[str, Any]:
    """Return the latest rollouts, the most recent first.

    Raises:
        StoreError: If the rollouts cannot be read.
    """

    def read() -> tuple[list[dict[str, Any]], dict[str, str]]:
        log = watch.open_rollout_log()
        around, latest = view.load_context(watch.home, log), log.readable_rollouts()[::-1][:LATEST]
        return [{**_format_row(kept), "waits": view.load_rollout_wait(kept, log, around)} for kept in latest], {
            id: str(why) for id, why in log.read_errors().items()
        }

    rows, odd = await watch.run_in_reader_thread(read)
    rows += [{"rollout": id, "problem": why} for id, why in odd.items()]
    return {"at": time.time(), "served": watch.is_served, "rollouts": rows}


async def load_rollout(watch: HomeWatcher, id: str) -> dict[str, Any]:
    """Return the devices, the settings and the history of one rollout.

    Raises:
        MissingRunError: If the rollout does not exist.
        StoreError: If the rollout cannot be read.
    """
    kept = await _find_rollout(watch, id)

    def read() -> tuple[Any, str]:
        log = watch.open_rollout_log()
        facts = log.read_events(id)
        return facts, view.describe_rollout_wait(kept.state, facts, view.load_context(watch.home, log))

    facts, waits = await watch.run_in_reader_thread(read)
    told = view.summarise_rollout_and_devices(kept)
    steps = [
        {"at": at, "text": view.format_event(kept.state, fact)}
        for _, at, fact in facts
        if not isinstance(fact, StatusReported)
    ]
    boards = told.pop("boards")
    return {
        "at": time.time(),
        "served": watch.is_served,
        **told,
        **_format_row(kept),
        "boards": boards[:BOARDS],
        "more": max(0, len(boards) - BOARDS),
        "steps": steps,
        "waits": waits,
    }


async def request_revert(watch: HomeWatcher, id: str) -> str:
    """Request the end or the roll-back of a rollout, and return a sentence on the effect.

    Raises:
        MissingRunError: If the rollout does not exist.
        JobError: If the rollout's state does not permit the action.
        StoreError: If the home cannot be written.
    """
    kept = await _find_rollout(watch, id)

    def store_request() -> str:
        with store.Store(watch.home) as written:
            return run_control.revert_rollout(written, kept.state.id)

    return await watch.run_in_reader_thread(store_request)


def _format_row(kept: StoredRollout) -> dict[str, Any]:
    return {**view.summarise_rollout(kept), "now": view.format_step(kept.state)}


async def _find_rollout(watch: HomeWatcher, id: str) -> StoredRollout:
    for kept in await watch.run_in_reader_thread(lambda: watch.open_rollout_log().readable_rollouts()):
        if kept.state.id == id:
            return kept
    raise MissingRunError(f"there is no rollout {id[:100]!r} in {watch.home}, or it cannot be read")
