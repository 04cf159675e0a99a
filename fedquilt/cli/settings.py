"""`fedquilt settings`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from fedquilt.cli import home_access, options
from fedquilt.cli import rollout_options as phases
from fedquilt.cli.commands import argument, option, verb
from fedquilt.cli.rollout_options import RolloutOptions
from fedquilt.core import JobError

NUMBERS: Final = ("max_w", "telemetry_s")


def parse_settings(words: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise JobError(f"{word!r} is no setting: write budget=1GB labels=+canary, before --to")
        if key in found:
            raise JobError(f"{key} is set twice")
        if key == "labels":
            found[key] = [*filter(None, value.split(","))]
        elif key in NUMBERS:
            try:
                found[key] = float(value)
            except ValueError:
                raise JobError(f"{word!r}: {key} is a number") from None
        else:
            found[key] = value
    return found


@verb()
@argument(
    "words",
    "All that is set: budget=1GB, labels=+canary,-old, policy=energy, max_w=10, telemetry_s=60; else agent.toml holds.",
    nargs=-1,
    metavar="[KEY=VALUE]...",
)
@phases.rollout_options()
@option("--back", is_flag=True, help="Take the latest settings back: boards return to those before.")
@options.home_option
def settings(words: tuple[str, ...], phased: RolloutOptions, back: bool, home: Path) -> None:
    """Set budget, labels, power and telemetry of devices, within their agent.toml."""
    from fedquilt.edge_agent.upgrade import remote_settings

    if bool(words) == back:
        raise click.UsageError(
            "settings such as budget=1GB (before --to) or --back: one of them", click.get_current_context()
        )
    with home_access.open_existing_home(home) as store:
        if back:
            print(phases.roll_back_latest(store, "settings"))
            return
        given = parse_settings(words)
        remote_settings.parse_remote_settings(given)
        phases.submit_rollout(
            store, phased.make_plan("settings", " ".join(words), settings=given), None, " ".join(words), home
        )
