"""`fedquilt upgrade`."""

from __future__ import annotations

from pathlib import Path

import click

from fedquilt.cli import home_access, options
from fedquilt.cli import rollout_options as phases
from fedquilt.cli.commands import argument, option, verb
from fedquilt.cli.rollout_options import RolloutOptions


@verb()
@argument("bundle", "What `fedquilt flash --upgrade FILE` has made.", type=options.PATH, required=False)
@phases.rollout_options()
@option("--back", is_flag=True, help="Take the latest upgrade back: boards return to the version before.")
@options.home_option
def upgrade(bundle: Path | None, phased: RolloutOptions, back: bool, home: Path) -> None:
    """Roll out an agent version to the devices in phases. Devices undo a failed upgrade."""
    from fedquilt.core import StoreError
    from fedquilt.edge_agent.upgrade import archive

    if (bundle is None) != back:
        raise click.UsageError("either BUNDLE or --back", click.get_current_context())
    with home_access.open_existing_home(home) as store:
        if bundle is None:
            print(phases.roll_back_latest(store, "agent"))
            return
        with archive.open_bundle(bundle) as opened:
            opened.verify_wheels()
            told, signed = opened.manifest, opened.signature is not None
        try:
            payload = bundle.read_bytes()
        except OSError as error:
            raise StoreError(f"cannot read {bundle}: {error.strerror}") from None
        if not signed:
            print("not signed: only boards whose agent.toml says unsigned = true under [upgrade] take it")
        what = f"fedquilt {told.version} for {told.machine}, Python {told.python}, {len(payload) / 1e6:.1f} MB"
        phases.submit_rollout(store, phased.make_plan("agent", told.version), payload, what, home)
