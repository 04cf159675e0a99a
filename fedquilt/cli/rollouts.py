"""`fedquilt rollouts`."""

from __future__ import annotations

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
        around = view.sight(home, store.rollouts)
        if rollout is None:
            known, odd = store.rollouts.all(), store.rollouts.unreadable()
            none = f"no rollouts in {home}: `fedquilt deploy RUN --home {home}` begins one"
            held = {each.state.id: view.held(each, store.rollouts, around) for each in known}
            rows = [{**view.row(each), "waits": held[each.state.id]} for each in known]
            rows += [{"rollout": id, "problem": why} for id, why in odd.items()]
            told = [f"{id} waits for {said}" for id, said in held.items() if said]
            homes.show(format, rows, [*(view.lines(known, around.now) if known else [none]), *told, *odd.values()])
            return
        kept = store.rollouts.find(rollout)
        facts = store.rollouts.facts(kept.state.id)
        shown = {**view.detail(kept), "waits": view.waits(kept.state, facts, around)}
        homes.show(format, shown, view.told(kept, facts, around))
