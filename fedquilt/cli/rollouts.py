"""`fedquilt rollouts`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import argument, verb


@verb()
@argument("rollout", "A rollout's id, or what it brings, for its boards and what happened.", required=False)
@options.home_option
@options.format_option
def rollouts(rollout: str | None, home: Path, format: str) -> None:
    """List the rollouts in --home, or show a rollout's steps and uncommitted devices."""
    from fedquilt.coordinator.views import rollouts as view

    with home_access.open_existing_home(home) as store:
        around = view.load_context(home, store.rollouts)
        if rollout is None:
            known, odd = store.rollouts.readable_rollouts(), store.rollouts.read_errors()
            none = f"no rollouts in {home}: `fedquilt deploy RUN --home {home}` begins one"
            held = {each.state.id: view.load_wait(each, store.rollouts, around) for each in known}
            rows = [{**view.summarise_rollout(each), "waits": held[each.state.id]} for each in known]
            rows += [{"rollout": id, "problem": why} for id, why in odd.items()]
            told = [f"{id} waits for {said}" for id, said in held.items() if said]
            home_access.print_rows(
                format, rows, [*(view.format_rollouts(known, around.now) if known else [none]), *told, *odd.values()]
            )
            return
        kept = store.rollouts.find_rollout(rollout)
        facts = store.rollouts.read_events(kept.state.id)
        shown = {**view.detail_rollout(kept), "waits": view.describe_rollout_wait(kept.state, facts, around)}
        home_access.print_rows(format, shown, view.format_rollout(kept, facts, around))
