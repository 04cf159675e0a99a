"""`fedquilt serve`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import option, verb, verbosity
from fedquilt.core import JobError


@verb()
@options.home_option
@option("--metrics", metavar="HOST:PORT", help="Serve metrics in the OpenMetrics format at http://HOST:PORT/metrics.")
@options.blob_options
@option(
    "--site",
    type=options.PATH,
    metavar="FILE",
    help="Run as a site: a device of the coordinator above, described in this file with the keys of an agent.toml "
    "(device, home, fleet, [broker]).",
)
@options.format_option
@options.broker_options()
def serve(
    home: Path,
    metrics: str | None,
    blobs: options.BlobOptions,
    site: Path | None,
    format: str,
    broker: options.BrokerOptions,
) -> None:
    """Run the coordinator for the jobs in --home until stopped."""
    from fedquilt.coordinator import limits
    from fedquilt.coordinator.storage.store import Store
    from fedquilt.coordinator.views.json_console import JsonConsole
    from fedquilt.coordinator.views.terminal import Console, run_coordinator
    from fedquilt.host import logs

    where = blobs.to_locations(broker.ca)
    with Store(home) as store:
        home = home.resolve()
        if not store.acquire_lock():
            raise JobError(f"another coordinator serves {home} already")
        limited = limits.load_limits(home)
        console = Console(wordy=verbosity() > 0, named=True)
        if format == "json":
            logs.use_json_logs()
            console = JsonConsole()
        link, identity = home_access.create_coordinator_link(broker, console.report)
        console.report(
            f"serving {home} on {broker.url}; submit with `fedquilt run JOB --home {home}`, "
            f"watch with `fedquilt logs RUN --follow --home {home}`"
        )
        above = None
        if site is not None:
            from fedquilt.tools.operations.site import connect_site_agent

            above = connect_site_agent(site, store)
            console.report(f"site {above.agent.device} of the coordinator at {above.agent.settings.broker.url}")
        run_coordinator(
            store,
            link,
            broker.fleet,
            console,
            identity=identity,
            metrics=metrics,
            limits=limited,
            where=where,
            site=above,
        )
