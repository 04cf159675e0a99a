"""`fedquilt rollouts`."""

from __future__ import annotations

import time
from pathlib import Path

from fedquilt.cli import homes, options
from fedquilt.cli.commands import argument, verb


@verb()
@argument("rollout", "A rollout's id, or what it brings, for its boards and what happened.", required=False)
@options.home
@options.format
def rollouts(rollout: str | None, home: Path, format: str) -> None:
    """List the rollouts in --home, or show one: its steps, and every board that has not committed it."""
    from fedquilt.coordinator.views import rollouts as view

    with homes.existing(home) as store:
        now = time.time()
        if rollout is None:
            known, odd = store.rollouts.all(), store.rollouts.unreadable()
            none = f"no rollouts in {home}: `fedquilt deploy RUN --home {home}` begins one"
            rows = [view.row(kept) for kept in known] + [{"rollout": id, "problem": why} for id, why in odd.items()]
            homes.show(format, rows, [*(view.lines(known, now) if known else [none]), *odd.values()])
            return
        kept = store.rollouts.find(rollout)
        homes.show(format, view.detail(kept), view.told(kept, store.rollouts.facts(kept.state.id), now))
