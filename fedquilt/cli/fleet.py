"""`fedquilt fleet`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import homes, options
from fedquilt.cli.commands import option, verb, wordy
from fedquilt.core import JobError


@verb()
@options.job_argument
@options.bundle
@option("--devices", type=options.POSITIVE, help="Number of boards (default: the job's fleet.devices).")
@option(
    "--link",
    default="embedded",
    type=options.OneOf(("embedded", "memory", "broker")),
    help="embedded: agents as processes, a broker of our own; broker: the same over --broker; "
    "memory: all in this process on virtual time. With --engine there is no link: rounds on virtual time, work done by "
    "workers.",
)
@option(
    "--agents-only", is_flag=True, help="With --link broker: start the agents only; the coordinator runs elsewhere."
)
@options.home
@options.workers
@options.broker()
def fleet(
    job: Path,
    bundle: Path | None,
    devices: int | None,
    link: str,
    agents_only: bool,
    home: Path,
    workers: options.Workers,
    broker: options.Broker,
) -> int:
    """Run a job on simulated boards that run the agents' own code."""
    from fedquilt.tools.simulation import agents as tool

    if agents_only and link != "broker":
        raise JobError("--agents-only needs --link broker and the coordinator's --broker URL")
    plan = tool.Plan(
        job=homes.load_job(job),
        bundle=homes.bundle_of(job, bundle),
        home=home,
        devices=devices,
        fleet=broker.fleet,
    )
    again = f"fedquilt fleet {job}"
    if workers.given:
        if link != "embedded":
            raise JobError(f"--link {link} and --engine are two ways to reach the boards: leave one of them out")
        from fedquilt.tools.experiments import watched_run

        again = " ".join([again, *workers.words])
        try:
            return homes.ended(home, *watched_run.told(plan, wordy=wordy() > 0, **workers.options()), again)
        except KeyboardInterrupt:
            return homes.ended(home, "", "running", again)
    if link == "memory":
        try:
            return homes.ended(home, *tool.virtually(plan, wordy=wordy() > 0), again)
        except KeyboardInterrupt:
            return homes.ended(home, "", "running", again)
    given = broker.table() if link == "broker" else None
    return homes.ended(home, *tool.really(plan, given, agents_only=agents_only, wordy=wordy() > 0), again)
