"""`fedquilt simulate`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import option, verb, verbosity
from fedquilt.core import JobError


@verb()
@options.job_argument
@option("--devices", type=options.POSITIVE, help="Number of boards (default: the job's fleet.devices).")
@option(
    "--link",
    default="embedded",
    type=options.WordChoice(("embedded", "memory", "broker")),
    help="embedded: agents as processes, a broker of our own; broker: the same over --broker; "
    "memory: all in this process on virtual time. With --engine there is no link: rounds on virtual time, work done by "
    "workers.",
)
@options.home_option
@options.worker_options
@options.broker_options()
def simulate(
    job: Path,
    devices: int | None,
    link: str,
    home: Path,
    workers: options.WorkerOptions,
    broker: options.BrokerOptions,
) -> int:
    """Run a job on simulated devices that use the agents' own code."""
    from fedquilt.tools.simulation import agents as tool

    plan = tool.FleetPlan(
        job=home_access.load_job(job),
        bundle=home_access.bundle_folder(job),
        home=home,
        devices=devices,
        fleet=broker.fleet,
    )
    again = f"fedquilt simulate {job}"
    if workers.is_given:
        if link != "embedded":
            raise JobError(f"--link {link} and --engine are two ways to reach the boards: leave one of them out")
        from fedquilt.tools.experiments import watched_run

        again = " ".join([again, *workers.arguments])
        try:
            return home_access.report_end(
                home, *watched_run.run_and_print(plan, wordy=verbosity() > 0, **workers.to_keywords()), again
            )
        except KeyboardInterrupt:
            return home_access.report_end(home, "", "running", again)
    if link == "memory":
        try:
            return home_access.report_end(home, *tool.run_fleet_virtually(plan, wordy=verbosity() > 0), again)
        except KeyboardInterrupt:
            return home_access.report_end(home, "", "running", again)
    given = broker.to_table() if link == "broker" else None
    return home_access.report_end(home, *tool.run_fleet_on_broker(plan, given, wordy=verbosity() > 0), again)
